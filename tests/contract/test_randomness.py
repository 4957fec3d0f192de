"""Which random numbers replicas draw: each its own, the same for the same seed.

Replica 0 draws plain torch's.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from conditions import for_releases, needs_simulated_devices
from problems import in_pieces
from topologies import ALONE, SIMULATED, central
from torchstrategy._base.context import is_accelerator, using_device


@pytest.fixture(autouse=True)
def where_replica_0_is(request: pytest.FixtureRequest) -> Iterator[None]:
    """The caller draws from the generators that replica 0 draws from."""
    (strategy,) = [
        request.getfixturevalue(name)
        for name in STRATEGIES
        if name in request.fixturenames
    ] or [None]
    with using_device(strategy and strategy.extended._device_of(0)):
        yield


STRATEGIES = ("strategy", "several", "in_one_place")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def plain_net(strategy: torchstrategy.Strategy) -> Net:
    """A net that no strategy knows, made where the parameters of this one live."""
    with strategy.scope():
        device = torch.empty(0).device
    with using_device(device):
        return Net()


def replica() -> int:
    return torchstrategy.get_replica_context().replica_id_in_sync_group


def meet() -> None:
    torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))


def in_each(strategy: torchstrategy.Strategy, fn: Callable[[], Any]) -> list[Any]:
    """What `fn` returns in each replica."""
    found: dict[int, Any] = {}

    def step() -> None:
        found[replica()] = fn()

    strategy.run(step)
    return [found[r] for r in sorted(found)]


def draws(count: int = 4) -> list[float]:
    return torch.rand(count).tolist()


def random_state() -> tuple[torch.Tensor, ...]:
    """That of the CPU, and of the accelerator in use: what a checkpoint holds."""
    device = torch.get_default_device()
    here = (
        [torch.get_device_module(device).get_rng_state(device)]
        if is_accelerator(device)
        else []
    )
    return (torch.get_rng_state(), *here)


def set_random_state(state: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    for of_device in state[1:]:
        device = torch.get_default_device()
        torch.get_device_module(device).set_rng_state(of_device, device)


def same(state: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(map(torch.equal, state, other))


class Training:
    """A model with dropout, and a step that trains it."""

    def __init__(self, strategy: torchstrategy.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = Net()
            self.optimizer = torch.optim.SGD(
                self.model.parameters(), lr=0.1, momentum=0.9
            )
        self.pieces = in_pieces(strategy, torch.randn(12, 6))

    def step(self, piece: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(piece).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def steps(self, count: int) -> list[float]:
        losses = [
            self.strategy.run(self.step, args=(self.pieces,)) for _ in range(count)
        ]
        return [
            loss.item()
            for each in losses
            for loss in self.strategy.experimental_local_results(each)
        ]

    def weights(self) -> list[torch.Tensor]:
        return [
            parameter.detach().cpu().clone() for parameter in self.model.parameters()
        ]


# The same seed


@for_releases
@pytest.mark.slow
def test_fifty_of_fifty_trainings_are_bit_identical_under_the_same_seed() -> None:
    def trained() -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(1)
        training = Training(central(4))
        return training.steps(3), training.weights(), random_state()

    losses, weights, state = trained()
    same_so_far = 0
    for _ in range(50):
        other_losses, other_weights, other_state = trained()
        equal_weights = all(map(torch.equal, weights, other_weights))
        same_so_far += (
            losses == other_losses and equal_weights and same(state, other_state)
        )
    assert same_so_far == 50
    assert len(set(losses)) == len(losses)


def test_a_strategy_draws_the_same_numbers_however_often_it_has_run(
    several: torchstrategy.Strategy,
) -> None:
    torch.manual_seed(3)
    expected = [in_each(several, draws) for _ in range(3)]
    torch.manual_seed(3)
    assert [in_each(several, draws) for _ in range(3)] == expected
    torch.manual_seed(3)
    other = copy.deepcopy(several)
    assert [in_each(other, draws) for _ in range(3)] == expected


def test_another_seed_gives_every_replica_other_numbers(
    several: torchstrategy.Strategy,
) -> None:
    torch.manual_seed(3)
    some = in_each(several, draws)
    torch.manual_seed(4)
    others = in_each(several, draws)
    assert all(one != other for one, other in zip(some, others, strict=True))


# Which numbers


def test_no_two_replicas_and_no_two_runs_draw_the_same(
    several: torchstrategy.Strategy,
) -> None:
    with several.scope():
        dropout = nn.Dropout(0.5)
    masks = [
        mask
        for _ in range(5)
        for mask in in_each(several, lambda: tuple(dropout(torch.ones(64)).tolist()))
    ]
    assert len(set(masks)) == len(masks) == 5 * several.num_replicas_in_sync


def test_a_run_inside_a_merge_function_draws_numbers_that_no_other_replica_draws(
    several: torchstrategy.Strategy,
) -> None:
    inner: list[list[float]] = []

    def step() -> list[float]:
        torchstrategy.get_replica_context().merge_call(
            lambda strategy: inner.extend(in_each(strategy, draws))
        )
        return draws()

    outer = in_each(several, step)
    found = [tuple(numbers) for numbers in (*inner, *outer)]
    assert len(set(found)) == len(found) == 2 * several.num_replicas_in_sync


@pytest.mark.parametrize("strategy", ALONE, indirect=True)
def test_one_replica_draws_what_plain_torch_draws(
    strategy: torchstrategy.Strategy,
) -> None:
    torch.manual_seed(5)
    training = Training(strategy)
    losses = training.steps(3)
    state = random_state()

    torch.manual_seed(5)
    model = plain_net(strategy).to(torch.get_default_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(12, 6)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == expected
    assert all(map(torch.equal, training.weights(), model.cpu().parameters()))
    assert same(state, random_state())


def test_replica_0_draws_what_plain_torch_draws(
    several: torchstrategy.Strategy,
) -> None:
    def step() -> list[Any]:
        return [
            draws(3),
            torch.randn(5).tolist(),
            torch.randperm(7).tolist(),
            F.dropout(torch.ones(9)).tolist(),
        ]

    torch.manual_seed(6)
    first, *_ = in_each(several, step)
    torch.manual_seed(6)
    assert first == step()


def test_the_callers_generator_goes_on_where_replica_0_stopped(
    several: torchstrategy.Strategy,
) -> None:
    def step() -> None:
        draws(replica() + 1)
        meet()
        draws(10 * (replica() + 1))

    torch.manual_seed(7)
    several.run(step)
    after = draws()
    torch.manual_seed(7)
    draws(1)
    draws(10)
    assert after == draws()


def test_a_run_that_draws_nothing_leaves_the_generator_alone(
    strategy: torchstrategy.Strategy,
) -> None:
    before = random_state()
    strategy.run(lambda: torch.ones(3).sum())
    strategy.run(meet)
    assert same(random_state(), before)


def test_numbers_that_replica_0_does_not_draw_are_others_in_the_next_run(
    several: torchstrategy.Strategy,
) -> None:
    # A replica's seed is made of the caller's state. Where only another replica drew,
    # this state stayed as it was, and the other replica drew the same noise in every
    # step.
    def step() -> list[float]:
        return draws() if replica() > 0 else []

    torch.manual_seed(7)
    first, second = (in_each(several, step) for _ in range(2))
    assert first[0] == second[0] == []
    assert all(one != other for one, other in zip(first[1:], second[1:], strict=True))
    torch.manual_seed(7)
    assert in_each(several, step) == first


def test_half_of_a_pair_of_normal_numbers_is_not_lost_between_replicas(
    several: torchstrategy.Strategy,
) -> None:
    # A generator makes normal numbers in pairs and keeps the second one: it is a part
    # of the state of a stream.
    def step() -> list[float]:
        numbers = [torch.empty(1, dtype=torch.float64).normal_().item()]
        meet()
        numbers.append(torch.empty(1, dtype=torch.float64).normal_().item())
        return numbers

    torch.manual_seed(8)
    with_meeting = in_each(several, step)
    torch.manual_seed(8)
    at_once = in_each(
        several,
        lambda: [
            torch.empty(1, dtype=torch.float64).normal_().item() for _ in range(2)
        ],
    )
    assert with_meeting == at_once


# Checkpoints


def test_torchs_own_random_state_is_enough_to_resume(
    strategy: torchstrategy.Strategy,
) -> None:
    training = Training(strategy)
    training.steps(2)
    file = io.BytesIO()
    model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
    torch.save({"model": model, "optimizer": optimizer, "random": random_state()}, file)
    expected = training.steps(3), training.weights()

    torch.manual_seed(99)
    resumed = Training(
        copy.deepcopy(strategy)
        if strategy is not torchstrategy.get_strategy()
        else strategy
    )
    resumed.pieces = training.pieces
    resumed.steps(1)
    file.seek(0)
    checkpoint = torch.load(file)
    resumed.model.load_state_dict(checkpoint["model"])
    resumed.optimizer.load_state_dict(checkpoint["optimizer"])
    set_random_state(checkpoint["random"])
    losses = resumed.steps(3)
    assert losses == expected[0]
    assert all(map(torch.equal, resumed.weights(), expected[1]))


def test_fork_rng_around_a_run_takes_back_all_that_it_drew(
    strategy: torchstrategy.Strategy,
) -> None:
    kind = SIMULATED[0].type if SIMULATED else "cuda"
    with torch.random.fork_rng(
        [device.index for device in SIMULATED], device_type=kind
    ):
        first = in_each(strategy, draws)
    assert in_each(strategy, draws) == first


# Meetings


@pytest.mark.parametrize(
    "how", ["all_reduce", "merge_call", "optimizer", "gradient", "backward"]
)
def test_a_meeting_in_the_middle_of_drawing_does_not_mix_streams(
    several: torchstrategy.Strategy, how: str
) -> None:
    training = Training(several)

    def drawing(meets: bool) -> Callable[[], list[float]]:
        def step() -> list[float]:
            context = torchstrategy.get_replica_context()
            numbers = draws()
            for parameter in training.model.parameters():
                parameter.square().sum().backward()
            if meets and how == "all_reduce":
                context.all_reduce("sum", torch.ones(()))
            elif meets and how == "merge_call":
                context.merge_call(lambda strategy: None)
            elif meets and how == "optimizer":
                training.optimizer.step()
            elif meets and how == "gradient":
                nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            elif meets and how == "backward":
                context.all_reduce("sum", torch.ones((), requires_grad=True)).backward()
            return numbers + draws()

        return step

    torch.manual_seed(9)
    expected = in_each(several, drawing(meets=False))
    state = random_state()
    torch.manual_seed(9)
    assert in_each(several, drawing(meets=True)) == expected
    assert same(random_state(), state)


def test_a_merge_function_draws_from_the_callers_stream(
    several: torchstrategy.Strategy,
) -> None:
    merged: list[list[float]] = []

    def step() -> list[float]:
        numbers = draws()
        torchstrategy.get_replica_context().merge_call(
            lambda strategy: merged.append(draws())
        )
        return numbers + draws()

    torch.manual_seed(10)
    first, *others = in_each(several, step)
    after = draws()

    # As plain torch draws them where the merge function stands in the middle of the
    # step.
    torch.manual_seed(10)
    assert first[:4] == draws()
    assert merged == [draws()]
    assert first[4:] == draws()
    assert after == draws()

    torch.manual_seed(10)
    without = in_each(several, lambda: draws() + draws())
    assert others == without[1:], (
        "what a merge function draws is no other replica's business"
    )


def test_a_merge_function_draws_from_the_callers_stream_also_on_another_replicas_device(
    several: torchstrategy.Strategy,
) -> None:
    device, merged = several.extended.worker_devices[-1], []

    def step() -> None:
        draws()
        torchstrategy.get_replica_context().merge_call(
            lambda _: merged.append(torch.rand(4, device=device).tolist())
        )

    torch.manual_seed(19)
    for _ in range(2):
        several.run(step)
    torch.manual_seed(19)
    assert merged == [
        (draws(), torch.rand(4, device=device).tolist())[1] for _ in range(2)
    ]


def test_what_a_merge_function_seeds_holds_for_the_caller(
    several: torchstrategy.Strategy,
) -> None:
    def step() -> list[float]:
        torchstrategy.get_replica_context().merge_call(
            lambda strategy: torch.manual_seed(11)
        )
        return draws()

    first, *others = in_each(several, step)
    after = draws()
    torch.manual_seed(11)
    assert first == draws()
    assert after == draws()
    assert first not in others


def test_a_step_that_seeds_draws_what_it_asked_for(
    in_one_place: torchstrategy.Strategy,
) -> None:
    # Not on several devices: torch.manual_seed seeds those on which other replicas run
    # at the same time.
    def step() -> list[float]:
        torch.manual_seed(100 + replica())
        meet()
        return draws()

    found = in_each(in_one_place, step)
    after = draws()
    for r, numbers in enumerate(found):
        torch.manual_seed(100 + r)
        assert numbers == draws()
    torch.manual_seed(100)
    draws()
    assert after == draws()


def test_a_generator_of_the_steps_own_is_its_own(
    in_one_place: torchstrategy.Strategy,
) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(12)
    before = random_state()
    found = in_each(in_one_place, lambda: torch.rand(2, generator=generator).tolist())
    assert same(random_state(), before)
    generator.manual_seed(12)
    assert found == [torch.rand(2, generator=generator).tolist() for _ in found]


# Failures


@pytest.mark.parametrize("who", ["first", "last"])
@pytest.mark.parametrize(
    "meets", [False, True], ids=["before a meeting", "after a meeting"]
)
def test_after_a_failure_the_caller_goes_on_where_replica_0_stopped(
    several: torchstrategy.Strategy, who: str, meets: bool
) -> None:
    fails = 0 if who == "first" else several.num_replicas_in_sync - 1

    def step() -> None:
        draws(3)
        if meets:
            meet()
            draws(5)
        if replica() == fails:
            raise ValueError("bad")
        draws(7)

    torch.manual_seed(13)
    with pytest.raises(ValueError, match="bad"):
        several.run(step)
    after = draws()

    torch.manual_seed(13)
    draws(3)
    if meets:
        draws(5)
    if fails:
        draws(7)
    assert after == draws()


def test_a_stopped_replica_draws_nothing_from_the_caller(
    several: torchstrategy.Strategy,
) -> None:
    """While it unwinds."""
    last = several.num_replicas_in_sync - 1

    def step() -> None:
        draws(3)
        try:
            meet()
            if replica() == 0:
                raise ValueError("bad")
            meet()
        finally:
            if replica() == last:
                draws(11)

    torch.manual_seed(14)
    with pytest.raises(ValueError, match="bad"):
        several.run(step)
    after = draws()
    torch.manual_seed(14)
    draws(3)
    assert after == draws()


def test_a_failure_does_not_change_what_the_next_runs_draw(
    several: torchstrategy.Strategy,
) -> None:
    def fails() -> None:
        draws()
        if replica() == several.num_replicas_in_sync - 1:
            raise ValueError("bad")

    torch.manual_seed(15)
    several.run(lambda: draws() and None)
    expected = [in_each(several, draws) for _ in range(2)]
    torch.manual_seed(15)
    with pytest.raises(ValueError, match="bad"):
        several.run(fails)
    assert [in_each(several, draws) for _ in range(2)] == expected


# Around runs


def test_weights_made_in_a_scope_are_those_that_plain_torch_makes(
    strategy: torchstrategy.Strategy,
) -> None:
    torch.manual_seed(16)
    with strategy.scope():
        model = Net()
    after = draws()
    torch.manual_seed(16)
    plain = plain_net(strategy)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert after == draws()


def test_making_the_replicas_copies_draws_nothing(
    strategy: torchstrategy.Strategy,
) -> None:
    with strategy.scope():
        model = Net()
    before = random_state()
    strategy.run(lambda: model.eval() and None)
    assert same(random_state(), before)


def test_a_module_made_in_a_step_is_made_of_that_replicas_numbers(
    several: torchstrategy.Strategy,
) -> None:
    torch.manual_seed(17)
    first, *others = in_each(several, lambda: nn.Linear(2, 2).weight.detach().tolist())
    torch.manual_seed(17)
    assert first == nn.Linear(2, 2).weight.detach().tolist()
    assert first not in others


def test_replicas_that_sit_out_do_not_change_what_the_others_draw() -> None:
    strategy = central(4)

    def numbers(rows: int) -> list[list[float]]:
        torch.manual_seed(18)
        (batch,) = strategy.experimental_distribute_dataset([torch.ones(rows, 1)])
        found = {}
        strategy.run(lambda piece: found.update({replica(): draws()}), args=(batch,))
        return [found[r] for r in sorted(found)]

    everyone = numbers(4)
    assert len(everyone) == 4
    assert numbers(2) == everyone[:2]
    assert numbers(1) == everyone[:1]


class Noisy(nn.Linear):
    """Draws the same noise on every machine, by a CPU generator, and moves it."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape[1:], generator=self.generator, dtype=x.dtype)
        order = torch.randperm(x.shape[1], generator=self.generator)
        return super().forward(x[:, order.to(x.device)] + noise.to(x.device))


def test_a_generator_of_the_cpu_draws_on_the_cpu_as_in_torch(
    strategy: torchstrategy.Strategy,
) -> None:
    """The default device of a replica is its own.

    Torch refused a generator that cannot draw there.
    """
    plain = Noisy()
    model = strategy.distribute_module(copy.deepcopy(plain))
    x = torch.randn(5, 3, device="cpu")
    for _ in range(3):
        batch = next(iter(strategy.experimental_distribute_dataset([x])))
        outputs = strategy.run(lambda rows: model(rows).detach(), args=(batch,))
        torch.testing.assert_close(
            strategy.gather(outputs, axis=0).cpu(), plain.cpu()(x).detach()
        )


@needs_simulated_devices
def test_torchs_refusal_of_another_device_comes_with_what_the_default_device_is() -> (
    None
):
    strategy = central(2)
    device = strategy.extended.worker_devices[0]
    mask = torch.ones(3, device="cpu")

    def mixes() -> torch.Tensor:
        return torch.zeros(3) + mask

    def draws() -> torch.Tensor:
        return torch.rand(
            3, generator=torch.Generator("cpu"), device=torch.get_default_device()
        )

    for step in (mixes, draws):
        with pytest.raises(RuntimeError) as caught:
            strategy.run(step)
        (_, note) = caught.value.__notes__
        assert f"the default device is {device}" in note
        assert "mask.to(x.device)" in note and "device=g.device" in note
