"""Random numbers: a generator for each device, and none that another device or the CPU disturbs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

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
    "dropout_in_a_graph": lambda d: F.dropout(torch.ones(64, device=d, requires_grad=True)).detach(),
    "native_dropout": lambda d: torch.native_dropout(torch.ones(64, device=d), 0.5, True)[0],
    "alpha_dropout": lambda d: F.alpha_dropout(torch.ones(64, device=d), 0.5, training=True),
    "dropout2d": lambda d: F.dropout2d(torch.ones(1, 64, 1, 1, device=d)),
    "rrelu": lambda d: F.rrelu(-torch.ones(9, device=d), training=True),
    "gumbel": lambda d: F.gumbel_softmax(torch.ones(9, device=d)),
    "attention": lambda d: F.scaled_dot_product_attention(*[torch.eye(8, device=d)[None]] * 3, dropout_p=0.5),
    "layer_made_there": lambda d: nn.Linear(2, 2, device=d).weight.detach(),
    "distribution": lambda d: torch.distributions.Beta(torch.ones(3, device=d), torch.ones(3, device=d)).sample(),
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
        cpu, two, one = torch.get_rng_state(), *(torch.sim.get_rng_state(i) for i in (2, 1))  # type: ignore[attr-defined]
        draw(ONE)
        assert torch.equal(torch.get_rng_state(), cpu)
        assert torch.equal(torch.sim.get_rng_state(TWO), two)  # type: ignore[attr-defined]
        assert not torch.equal(torch.sim.get_rng_state(ONE), one)  # type: ignore[attr-defined]

    def test_threads_on_devices_of_their_own_draw_what_they_draw_alone(self, draw: Any) -> None:
        def drawn(together: bool) -> dict[int, list[torch.Tensor]]:
            found: dict[int, list[torch.Tensor]] = {}

            def work(index: int) -> None:
                found[index] = [draw(torch.device("sim", index)).cpu() for _ in range(10)]

            torch.manual_seed(7)
            threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
            noise = threading.Thread(target=lambda: [torch.randn(9) for _ in range(100)])
            for thread in [noise, *threads]:
                thread.start()
                if not together:
                    thread.join()
            for thread in [noise, *threads]:
                thread.join()
            return found

        alone, together = drawn(False), drawn(True)
        for index in range(4):
            assert all(torch.equal(a, b) for a, b in zip(alone[index], together[index], strict=True))


def test_dropout_keeps_the_share_and_the_scale_and_passes_gradients_to_what_it_kept() -> None:
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
    assert torch.equal(first, torch.randn(3, device=ONE, generator=generator.manual_seed(3)))


@pytest.mark.parametrize("generator", ["sim:1", "cpu"])
def test_a_generator_of_another_device_is_refused(generator: str) -> None:
    wrong = torch.Generator(device=generator)
    for draw in (
        lambda: torch.randn(3, device=TWO, generator=wrong),
        lambda: torch.empty(3, device=TWO).normal_(generator=wrong),
        lambda: torch.randperm(3, device=TWO, generator=wrong),
        lambda: torch.multinomial(torch.ones(3, device=TWO), 1, generator=wrong),
    ):
        with pytest.raises(RuntimeError, match=f"Expected a 'sim:2' device type for generator but found '{generator}'"):
            draw()


def test_known_limit_a_generator_of_a_device_is_not_refused_by_the_cpu() -> None:
    """Accelerators refuse it. Inside it is one of the CPU, and operators on the CPU ask nobody else."""
    assert torch.randn(3, generator=torch.Generator("sim:1")).device == torch.device("cpu")


def test_states_are_taken_and_put_back_for_each_device() -> None:
    module: Any = torch.get_device_module("sim")
    state, states = module.get_rng_state(1), module.get_rng_state_all()
    first, other = torch.rand(3, device=ONE), torch.rand(3, device=TWO)
    module.set_rng_state(state, 1)
    assert torch.equal(torch.rand(3, device=ONE), first)
    module.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device=ONE), first) and torch.equal(torch.rand(3, device=TWO), other)


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
