"""`assert_replicas_agree` sees copies that drifted apart, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from problems import context, data, deal, mse, replica_id, sgd
from topologies import TOPOLOGIES, central, central_with_copies
from torchstrategy._base.torch_internals import version
from torchstrategy._copies.gradients.replica_gradients import (
    ReplicaParameter,
    make_local,
)
from torchstrategy.testing._counters import count_traffic
from torchstrategy.testing._drift import assert_replicas_agree
from torchstrategy.testing._faults import fail_in_replica
from torchstrategy.testing._lockstep import Lockstep


class Net(nn.Module):
    """Parameters, running statistics and a table that no step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.last = nn.Linear(4, 2, dtype=torch.float64)
        self.register_buffer("table", torch.arange(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))


class Training:
    """A model that has been trained for a step."""

    def __init__(
        self, strategy: torchstrategy.Strategy, build: Callable[[], nn.Module] = Net
    ) -> None:
        torch.manual_seed(0)
        self.strategy = strategy
        with strategy.scope():
            self.model = build()
            self.optimizer = sgd(self.model)

    def train(self) -> None:
        def step(batch: Any) -> None:
            self.optimizer.zero_grad()
            mse(self.model, batch).backward()
            self.optimizer.step()

        self.strategy.run(step, args=(deal(self.strategy, data(8)),))

    def tamper(
        self, replica: int, name: str, write: Callable[[torch.Tensor], None]
    ) -> None:
        """Writes on one replica's copy so that torch does not see it."""

        def step() -> None:
            if replica_id() == replica:
                write(
                    unseen(
                        dict(
                            (
                                *self.model.named_parameters(),
                                *self.model.named_buffers(),
                            )
                        )[name]
                    )
                )

        self.strategy.run(step)

    def agree(self) -> None:
        assert_replicas_agree(self.strategy, self.model)


def unseen(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whose writes torch does not count.

    A local parameter's own `data` are counted in a step.
    """
    return torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]


def add(position: tuple[int, ...], amount: float) -> Callable[[torch.Tensor], None]:
    def write(tensor: torch.Tensor) -> None:
        tensor[position] += amount

    return write


# What it sees


@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_replicas_that_train_agree(name: str) -> None:
    training = Training(TOPOLOGIES[name]())
    for _ in range(3):
        training.agree()
        training.train()
        training.agree()


@pytest.mark.parametrize("replica", [1, 2])
def test_a_parameter_that_has_drifted_is_seen(replica: int) -> None:
    training = Training(central_with_copies(3))
    training.train()
    training.tamper(replica, "first.weight", add((0, 1), 0.5))
    message = (
        "The replicas have drifted apart in 1 of 10 tensors:\n"
        f"    Net.first.weight: replica {replica} differs by up to 0.5, in 1 of 12 "
        "numbers\n"
    )
    with pytest.raises(AssertionError, match=re.escape(message)):
        training.agree()


def test_if_replica_0_has_drifted_all_others_differ_from_it() -> None:
    training = Training(central_with_copies(3))
    training.tamper(0, "last.bias", add((0,), -2))
    with pytest.raises(
        AssertionError,
        match=r"last\.bias: replica 1 differs by up to 2, .*; replica 2 differs",
    ):
        training.agree()


def test_a_running_statistic_that_was_written_after_the_run_is_seen() -> None:
    training = Training(central(3))
    training.train()
    training.agree()  # which has brought the mean of the replicas to their copies
    copies = training.strategy.extended._storage._idle[-1]
    copies.replicated.replicas[2].local_objects[
        id(training.model)
    ].norm.running_mean.data[1] += 1
    before = training.model.norm.running_mean.clone()
    with pytest.raises(
        AssertionError,
        match=r"norm\.running_mean: replica 2 differs by up to 1, in 1 of 4",
    ):
        training.agree()
    assert torch.equal(training.model.norm.running_mean, before)


def test_the_first_tensors_are_named_and_the_others_counted() -> None:
    training = Training(
        central_with_copies(2),
        lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))),
    )
    for k in range(4):
        training.tamper(1, f"{k}.weight", add((0, 0), 1))
        training.tamper(1, f"{k}.bias", add((0,), 1))
    with pytest.raises(AssertionError, match=r"in 8 of 8 tensors") as caught:
        training.agree()
    assert [f"Sequential.{k // 2}." in str(caught.value) for k in range(8)] == [
        True
    ] * 6 + [False] * 2
    assert "and 3 more" in str(caught.value)


def test_the_smallest_difference_is_one() -> None:
    training = Training(central_with_copies(2))

    def write(bias: torch.Tensor) -> None:
        bias[0] = bias[0].nextafter(
            torch.tensor(1e9, dtype=torch.float64, device=bias.device)
        )

    training.tamper(1, "first.bias", write)
    with pytest.raises(
        AssertionError,
        match=r"first\.bias: replica 1 differs by up to \d\.?\d*e-\d\d, in 1 of 4",
    ):
        training.agree()


@pytest.mark.parametrize(
    ("theirs", "ours", "agree"),
    [
        (float("nan"), float("nan"), True),
        (-float("nan"), float("nan"), True),
        (float("inf"), float("inf"), True),
        (float("inf"), -float("inf"), False),
        (float("nan"), 1.0, False),
        (1.0, float("nan"), False),
        (0.0, -0.0, False),
    ],
)
def test_nan_agrees_with_nan_only_and_all_else_bit_by_bit(
    theirs: float, ours: float, agree: bool
) -> None:
    training = Training(central_with_copies(2))

    def write(value: float) -> Callable[[torch.Tensor], None]:
        return lambda tensor: tensor.__setitem__(0, value)

    training.tamper(0, "first.bias", write(ours))
    training.tamper(1, "first.bias", write(theirs))
    if agree:
        training.agree()
    else:
        with pytest.raises(
            AssertionError, match=r"first\.bias: replica 1 differs by up to"
        ):
            training.agree()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), "has torch.int32 instead of torch.int64"),
        (torch.zeros(4, dtype=torch.int64), r"has \(4,\) instead of \(3,\)"),
        (
            torch.zeros(3, dtype=torch.int64, device="meta"),
            "has meta instead of (cpu|sim)",
        ),
        (None, "does not have it and replica 0 does"),
    ],
)
def test_tensors_of_another_kind_differ(
    tensor: torch.Tensor | None, message: str
) -> None:
    training = Training(central(2))
    training.train()
    copies = training.strategy.extended._storage._idle[-1]
    copies.replicated.replicas[1].local_objects[id(training.model)]._buffers[
        "table"
    ] = tensor
    with pytest.raises(AssertionError, match=rf"Net\.table: replica 1 {message}"):
        training.agree()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.0),
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.arange(6, dtype=torch.uint8).reshape(2, 3).t(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j, complex("nan")]),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_of_every_kind_agree(tensor: torch.Tensor) -> None:
    strategy = central(2)
    with strategy.scope():
        module = nn.Module()
        module.register_buffer("buffer", tensor)
    assert_replicas_agree(strategy, module)


def test_several_modules_are_told_apart() -> None:
    strategy = central_with_copies(2)
    with strategy.scope():
        first, second = nn.Linear(1, 1), nn.Linear(1, 1)

    def step() -> None:
        if replica_id() == 1:
            unseen(second.bias)[0] += 1

    strategy.run(step)
    assert_replicas_agree(strategy, first)
    with pytest.raises(AssertionError, match=r"Linear 1\.bias: replica 1"):
        assert_replicas_agree(strategy, first, second)


def test_after_a_drift_the_next_run_has_fresh_copies() -> None:
    training = Training(central_with_copies(2))
    training.train()
    before = {
        name: tensor.clone() for name, tensor in training.model.state_dict().items()
    }
    training.tamper(1, "first.weight", add((0, 0), 1))
    with pytest.raises(AssertionError, match="drifted"):
        training.agree()
    training.agree()
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in training.model.state_dict().items()
    )


# What it changes


@pytest.mark.parametrize("make", [central, central_with_copies])
def test_it_changes_nothing(make: Callable[[int], torchstrategy.Strategy]) -> None:
    training = Training(make(3))
    training.train()
    model = training.model
    model.last.eval()
    model.first.bias.requires_grad_(False)
    training.strategy.run(
        lambda batch: mse(model, batch).backward(),
        args=(deal(training.strategy, data(8)),),
    )
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]

    def state() -> tuple[Any, ...]:
        return (
            [(id(t), version(t), t.data_ptr(), t.requires_grad) for t in tensors],
            [
                (id(g), None if g is None else version(g))
                for g in (p.grad for p in model.parameters())
            ],
            [(id(module), type(module), module.training) for module in model.modules()],
            torch.get_rng_state().tolist(),
            [id(t) for t in (*model.parameters(), *model.buffers())],
        )

    values = [tensor.clone() for tensor in tensors]
    before = state()
    training.agree()
    assert state() == before
    assert all(map(torch.equal, values, tensors))
    assert any(gradient is not None for gradient in gradients)


def test_training_goes_on_as_if_it_had_not_been_called() -> None:
    trained = []
    for looks in (False, True):
        training = Training(central_with_copies(3))
        for _ in range(3):
            if looks:
                training.agree()
            training.train()
        trained.append(training.model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_it_is_no_run_of_the_test_s() -> None:
    training = Training(central(2))
    with Lockstep([1, 0]) as lockstep, count_traffic() as traffic, fail_in_replica(1):
        training.agree()
        assert lockstep.history == []
        assert not traffic.meetings
        with pytest.raises(RuntimeError, match="injected"):
            training.strategy.run(lambda: None)


# What is refused


def test_modules_that_are_not_the_strategy_s_are_refused() -> None:
    strategy, other = central(2), central(2)
    with other.scope():
        theirs = nn.Linear(1, 1)
    for module in (nn.Linear(1, 1), theirs):
        with pytest.raises(ValueError, match="Linear does not belong to"):
            assert_replicas_agree(strategy, module)
    with pytest.raises(TypeError, match="looks at nothing"):
        assert_replicas_agree(strategy)
    with pytest.raises(
        TypeError, match="looks at modules and optimizers; got a ReplicaParameter"
    ):
        assert_replicas_agree(
            strategy, make_local(ReplicaParameter, torch.ones(1), False)
        )  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a torchstrategy\.Strategy first"):
        assert_replicas_agree(nn.Linear(1, 1), nn.Linear(1, 1))  # type: ignore[arg-type]


def test_it_is_refused_in_the_middle_of_a_run() -> None:
    training = Training(central(2))
    with pytest.raises(RuntimeError, match="was called in replica 0"):
        training.strategy.run(training.agree)
    with pytest.raises(RuntimeError, match="was called in a merge function"):
        training.strategy.run(
            lambda: context().merge_call(lambda strategy: training.agree())
        )
