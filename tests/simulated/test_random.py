"""Random numbers: a generator for each device.

No other device disturbs it, nor does the CPU.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from torchstrategy.testing import cuda_alias

ONE, TWO = torch.device("sim:1"), torch.device("sim:2")

DRAWS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "rand": lambda d: torch.rand(3, device=d),
    "randn": lambda d: torch.randn(3, device=d),
    "randint": lambda d: torch.randint(100, (5,), device=d),
    "randperm": lambda d: torch.randperm(50, device=d),
    "rand_like": lambda d: torch.rand_like(torch.ones(3, device=d)),
    "bernoulli": lambda d: torch.bernoulli(torch.full((64,), 0.5, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.ones(50, device=d), 5),
    "normal": lambda d: torch.normal(torch.zeros(3, device=d), torch.ones(3, device=d)),
    "poisson": lambda d: torch.poisson(torch.full((9,), 9.0, device=d)),
    "uniform_": lambda d: torch.empty(3, device=d).uniform_(),
    "exponential_": lambda d: torch.empty(3, device=d).exponential_(),
    "xavier": lambda d: nn.init.xavier_uniform_(torch.empty(3, 3, device=d)),
    "dropout": lambda d: F.dropout(torch.ones(64, device=d)),
    "dropout_in_a_graph": lambda d: F.dropout(
        torch.ones(64, device=d, requires_grad=True)
    ).detach(),
    "native_dropout": lambda d: torch.native_dropout(
        torch.ones(64, device=d), 0.5, True
    )[0],
    "alpha_dropout": lambda d: F.alpha_dropout(
        torch.ones(64, device=d), 0.5, training=True
    ),
    "dropout2d": lambda d: F.dropout2d(torch.ones(1, 64, 1, 1, device=d)),
    "rrelu": lambda d: F.rrelu(-torch.ones(9, device=d), training=True),
    "gumbel": lambda d: F.gumbel_softmax(torch.ones(9, device=d)),
    "attention": lambda d: F.scaled_dot_product_attention(
        *[torch.eye(8, device=d)[None]] * 3, dropout_p=0.5
    ),
    "layer_made_there": lambda d: nn.Linear(2, 2, device=d).weight.detach(),
    "distribution": lambda d: torch.distributions.Beta(
        torch.ones(3, device=d), torch.ones(3, device=d)
    ).sample(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
class TestDraws:
    def test_a_seed_brings_the_same_numbers_on_every_device(self, draw: Any) -> None:
        drawn = []
        for device in (ONE, TWO, ONE):
            torch.manual_seed(3)
            drawn.append(draw(device).cpu())
        assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
        assert not torch.equal(drawn[0], draw(ONE).cpu())

    def test_neither_the_cpu_nor_another_device_is_disturbed(self, draw: Any) -> None:
        cpu, two, one = (
            torch.get_rng_state(),
            *(torch.sim.get_rng_state(i) for i in (2, 1)),
        )  # type: ignore[attr-defined]
        draw(ONE)
        assert torch.equal(torch.get_rng_state(), cpu)
        assert torch.equal(torch.sim.get_rng_state(TWO), two)  # type: ignore[attr-defined]
        assert not torch.equal(torch.sim.get_rng_state(ONE), one)  # type: ignore[attr-defined]

    def test_threads_on_devices_of_their_own_draw_what_they_draw_alone(
        self, draw: Any
    ) -> None:
        def drawn(together: bool) -> dict[int, list[torch.Tensor]]:
            found: dict[int, list[torch.Tensor]] = {}

            def work(index: int) -> None:
                found[index] = [
                    draw(torch.device("sim", index)).cpu() for _ in range(10)
                ]

            torch.manual_seed(7)
            threads = [
                threading.Thread(target=work, args=(index,)) for index in range(4)
            ]
            noise = threading.Thread(
                target=lambda: [torch.randn(9) for _ in range(100)]
            )
            for thread in [noise, *threads]:
                thread.start()
                if not together:
                    thread.join()
            for thread in [noise, *threads]:
                thread.join()
            return found

        alone, together = drawn(False), drawn(True)
        for index in range(4):
            assert all(
                torch.equal(a, b)
                for a, b in zip(alone[index], together[index], strict=True)
            )


def test_dropout_keeps_share_and_scale_and_passes_gradients_to_what_it_kept() -> None:
    x = torch.ones(1000, device=ONE, requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert 200 < int((y == 0).sum()) < 300
    assert x.grad is not None and torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(share: float) -> None:
    x = torch.ones(8, device=ONE, requires_grad=True)
    assert F.dropout(x, share).tolist() == [1 - share] * 8
    assert torch.native_dropout(x, share, True)[0].tolist() == [1 - share] * 8
    assert torch.native_dropout(x, share, False)[0].tolist() == [1] * 8


def test_a_generator_belongs_to_its_device() -> None:
    generator = torch.Generator(device="sim:1").manual_seed(3)
    assert generator.device == ONE and isinstance(generator, torch.Generator)
    assert torch.Generator().device == torch.device("cpu")
    first = torch.randn(3, device=ONE, generator=generator)
    assert torch.equal(
        first, torch.randn(3, device=ONE, generator=generator.manual_seed(3))
    )


DRAWS_FROM: dict[str, Callable[[Any, torch.Generator], Any]] = {
    "randn": lambda d, g: torch.randn(3, device=d, generator=g),
    "normal_": lambda d, g: torch.empty(3, device=d).normal_(generator=g),
    "randperm": lambda d, g: torch.randperm(3, device=d, generator=g),
    "randint": lambda d, g: torch.randint(5, (3,), device=d, generator=g),
    "multinomial": lambda d, g: torch.multinomial(
        torch.ones(3, device=d), 1, generator=g
    ),
    "bernoulli": lambda d, g: torch.bernoulli(torch.ones(3, device=d), generator=g),
    "normal": lambda d, g: torch.normal(
        torch.zeros(3, device=d), torch.ones(3, device=d), generator=g
    ),
}


@pytest.mark.parametrize("draw", DRAWS_FROM.values(), ids=DRAWS_FROM)
def test_a_generator_of_another_kind_of_device_is_refused(draw: Any) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"^Expected a 'sim' device type for generator but found 'cpu'",
    ):
        draw(TWO, torch.Generator())
    with pytest.raises(
        RuntimeError,
        match=r"^Expected a 'cpu' device type for generator but found 'sim'",
    ):
        draw("cpu", torch.Generator("sim:1"))
    with (
        cuda_alias(),
        pytest.raises(
            RuntimeError,
            match=r"^Expected a 'cpu' device type for generator but found 'cuda'",
        ),
    ):
        draw("cpu", torch.Generator("cuda"))


def test_a_generator_of_another_device_of_the_kind_is_taken_as_by_gpus() -> None:
    first, second = (
        torch.Generator("sim:1").manual_seed(3),
        torch.Generator("sim:2").manual_seed(3),
    )
    assert torch.equal(
        torch.randn(3, device=TWO, generator=first),
        torch.randn(3, device=TWO, generator=second),
    )


def test_a_loader_that_shuffles_with_a_generator_of_a_device_is_refused() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4))
    words = "Expected a 'cpu' device type for generator but found 'cuda'"
    with cuda_alias():
        with pytest.raises(RuntimeError, match=words):
            next(
                iter(
                    torch.utils.data.DataLoader(
                        data, 2, shuffle=True, generator=torch.Generator("cuda")
                    )
                )
            )
        with pytest.raises(RuntimeError, match=words):
            torch.utils.data.random_split(
                data, [2, 2], generator=torch.Generator("cuda")
            )


def test_a_loader_that_shuffles_where_a_gpu_is_the_default_device_is_refused() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4, device="cpu"))
    with cuda_alias(), torch.device("cuda"):
        with pytest.raises(
            RuntimeError,
            match="Expected a 'cuda' device type for generator but found 'cpu'",
        ):
            next(iter(torch.utils.data.DataLoader(data, 2, shuffle=True)))
        with pytest.raises(
            RuntimeError,
            match="Expected a 'cuda' device type for generator but found 'cpu'",
        ):
            torch.utils.data.random_split(data, [2, 2], generator=torch.Generator())


def test_a_generator_without_an_index_says_none() -> None:
    assert (
        torch.Generator("sim").device == torch.device("sim")
        and torch.Generator("sim:0").device.index == 0
    )


def test_a_state_is_not_one_of_the_cpu() -> None:
    here, there = torch.Generator(), torch.Generator("sim")
    with pytest.raises(RuntimeError, match="RNG state is wrong size"):
        there.set_state(here.get_state())
    with pytest.raises(
        RuntimeError, match=r"Expected a CPUGeneratorImplState of size 5056"
    ):
        here.set_state(there.get_state())
    with pytest.raises(TypeError, match=r"RNG state must be a torch.ByteTensor"):
        there.set_state(there.get_state().int())
    with pytest.raises(TypeError, match=r"RNG state must be a torch.ByteTensor"):
        there.set_state(there.get_state().to(ONE))


def test_a_state_begins_with_that_of_a_gpu() -> None:
    generator = torch.Generator("sim").manual_seed(7)
    assert generator.get_state()[:16].view(torch.int64).tolist() == [7, 0]
    torch.rand(3, device="sim", generator=generator)
    assert generator.get_state()[:16].view(torch.int64).tolist() == [7, 4]
    of_a_gpu = torch.tensor([7, 12]).view(torch.uint8)
    first, second = (
        torch.rand(3, device="sim", generator=generator.set_state(of_a_gpu))
        for _ in range(2)
    )
    assert (
        torch.equal(first, second)
        and generator.initial_seed() == 7
        and generator.get_offset() == 16
    )


def test_an_offset_leads_to_numbers_of_its_own() -> None:
    generator = torch.Generator("sim").manual_seed(7)
    draws = []
    for offset in (0, 8, 0, 8):
        assert generator.set_offset(offset).get_offset() == offset
        draws.append(torch.rand(3, device="sim", generator=generator))
    assert (
        torch.equal(draws[0], draws[2])
        and torch.equal(draws[1], draws[3])
        and not torch.equal(draws[0], draws[1])
    )
    after = generator.get_state()
    assert torch.equal(generator.set_offset(generator.get_offset()).get_state(), after)
    with pytest.raises(RuntimeError, match="offset must be a multiple of 4"):
        generator.set_offset(3)


@pytest.mark.parametrize(
    "begin", [lambda g: g.manual_seed(7), lambda g: g.manual_seed(7).set_offset(8)]
)
def test_a_state_is_the_same_whether_it_was_drawn_to_or_set(
    begin: Callable[[Any], torch.Generator],
) -> None:
    """The bytes of a state are the seed of what replicas draw.

    They have to draw the same after a checkpoint.
    """
    going_on, resumed = begin(torch.Generator("sim")), torch.Generator("sim")
    torch.rand(3, device="sim", generator=going_on)
    resumed.set_state(going_on.get_state())
    for generator in (going_on, resumed):
        torch.rand(3, device="sim", generator=generator)
    assert torch.equal(going_on.get_state(), resumed.get_state())


@pytest.mark.parametrize(
    "copied",
    [lambda g: g.clone_state(), copy.deepcopy],
    ids=["clone_state", "deepcopy"],
)
def test_a_copy_of_a_generator_draws_the_same(
    copied: Callable[[torch.Generator], torch.Generator],
) -> None:
    generator = torch.Generator("sim:1").manual_seed(7)
    torch.rand(3, device=ONE, generator=generator)
    other = copied(generator)
    assert other.device == ONE and torch.equal(other.get_state(), generator.get_state())
    assert torch.equal(
        *(torch.rand(3, device=ONE, generator=one) for one in (generator, other))
    )


def test_states_are_taken_and_put_back_for_each_device() -> None:
    module: Any = torch.get_device_module("sim")
    state, states = module.get_rng_state(1), module.get_rng_state_all()
    first, other = torch.rand(3, device=ONE), torch.rand(3, device=TWO)
    module.set_rng_state(state, 1)
    assert torch.equal(torch.rand(3, device=ONE), first)
    module.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device=ONE), first) and torch.equal(
        torch.rand(3, device=TWO), other
    )


def test_fork_rng_puts_the_devices_back_that_it_is_given() -> None:
    before = torch.sim.get_rng_state(1)  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        torch.rand(3, device=ONE)
    assert torch.equal(torch.sim.get_rng_state(1), before)  # type: ignore[attr-defined]


def test_an_operator_that_fails_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        torch.multinomial(-torch.ones(3, device=ONE), 1)
    assert torch.equal(torch.get_rng_state(), before)
