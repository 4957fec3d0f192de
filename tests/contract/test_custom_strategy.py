"""Strategies of one's own, and the page that says how they are made."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy
from conditions import for_changes
from documents import examples_run_on
from torchstrategy import (
    DistributedValues,
    ReplicaContext,
    RunOptions,
    Strategy,
    StrategyExtended,
    get_replica_context,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "custom-strategies.md"
TEXT = PAGE.read_text()
[CODE] = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
EXAMPLE: dict[str, Any] = {"__name__": "custom"}
exec(compile(CODE, str(PAGE), "exec"), EXAMPLE)
MicroBatches: Any = EXAMPLE["MicroBatches"]
MIXING = r"^Mixing different torchstrategy\.Strategy objects: "


class Alone(StrategyExtended):
    """The smallest one: what TensorFlow asks for, with one replica."""

    _num_replicas_in_sync = 1  # type: ignore[assignment]

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        with ReplicaContext(self._container_strategy(), 0):
            return fn(*args, **kwargs)

    def _local_results(self, distributed_value: Any) -> tuple[Any, ...]:
        return (distributed_value,)

    def _reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        return value


def test_the_examples_of_the_page_run() -> None:
    examples_run_on(PAGE, EXAMPLE)


# The example


@settings(deadline=None)
@given(rows=st.integers(1, 9), count=st.integers(1, 4))
def test_the_gradient_in_parts_is_that_of_the_batch(rows: int, count: int) -> None:
    strategy, model, batch = (
        MicroBatches(count),
        torch.nn.Linear(3, 1),
        torch.randn(rows, 3),
    )
    (model(batch).square().sum() / rows).backward()
    whole = [p.grad for p in model.parameters()]
    model.zero_grad()
    [dealt] = strategy.experimental_distribute_dataset([batch])
    strategy.run(
        lambda part: (model(part).square().sum() / rows).backward(), args=(dealt,)
    )
    for gradient, p in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, gradient)


@for_changes
@settings(deadline=None)
@given(
    rows=st.integers(1, 9),
    count=st.integers(1, 4),
    axis=st.sampled_from([0, 1, -1, (0, 1)]),
)
def test_reduce_needs_no_more_than_the_four_methods(
    rows: int, count: int, axis: Any
) -> None:
    strategy, batch = MicroBatches(count), torch.rand(rows, count)
    same = torchstrategy.CentralStorageStrategy(["cpu"] * count)
    [dealt] = strategy.experimental_distribute_dataset([batch])
    if isinstance(dealt, DistributedValues) and axis in (1, -1):
        dealt = strategy.run(
            lambda: (
                torch.ones(2, 3) * (1 + get_replica_context().replica_id_in_sync_group)
            )
        )
    for op in ("sum", "mean"):
        torch.testing.assert_close(
            strategy.reduce(op, dealt, axis=axis), same.reduce(op, dealt, axis=axis)
        )


def test_an_axis_that_is_not_there_is_refused_as_in_any_strategy() -> None:
    for strategy in (
        MicroBatches(2),
        torchstrategy.CentralStorageStrategy(["cpu"] * 2),
    ):
        value = strategy.run(lambda: torch.ones(2))
        for axis, error in ((1, ValueError), ((0, -1), ValueError), (0.5, TypeError)):
            with pytest.raises(error, match=r"axis"):
                strategy.reduce("mean", value, axis=axis)


def test_contexts_and_their_errors_are_those_of_any_strategy() -> None:
    strategy, other = MicroBatches(2), torchstrategy.OneDeviceStrategy("cpu")

    def step() -> int:
        context = get_replica_context()
        assert context is not None
        assert (
            context.strategy,
            context.num_replicas_in_sync,
            torchstrategy.get_strategy(),
        ) == (strategy, 2, strategy)
        assert torchstrategy.has_strategy()
        assert not torchstrategy.in_cross_replica_context()
        with pytest.raises(
            RuntimeError,
            match=r"^Method requires being in cross-replica context: Strategy\.run",
        ):
            strategy.run(step)
        with pytest.raises(RuntimeError, match=MIXING):
            other.run(step)
        return context.replica_id_in_sync_group

    assert strategy.run(step).values == (0, 1)
    with other.scope(), pytest.raises(RuntimeError, match=MIXING):
        strategy.run(step)
    assert not torchstrategy.has_strategy()


def test_a_failed_step_leaves_nothing_behind() -> None:
    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        MicroBatches(2).run(fail)
    assert not torchstrategy.has_strategy()


def test_a_replica_that_was_entered_by_hand_says_that_it_meets_nobody() -> None:
    def step() -> None:
        context = get_replica_context()
        assert context is not None
        context.all_reduce("sum", torch.ones(1))

    of = r"replica 0 of 2 of MicroBatches\(2 replicas on cpu:0\)"
    sentence = (
        rf"^all_reduce is where replicas synchronize, and {of} was entered by hand: "
    )
    with pytest.raises(RuntimeError, match=sentence):
        MicroBatches(2).run(step)


def test_a_copy_is_a_strategy_of_its_own() -> None:
    strategy = MicroBatches(2)
    strategy.label = [1]
    copied = copy.deepcopy(strategy)
    assert type(copied) is MicroBatches
    assert copied.label == [1]
    assert copied.label is not strategy.label
    assert copied.extended is not strategy.extended
    assert copied.run(lambda: torchstrategy.get_strategy() is copied) is True
    with strategy.scope(), pytest.raises(RuntimeError, match=MIXING):
        copied.run(lambda: None)


# The smallest one


def test_the_smallest_strategy_runs_and_reduces() -> None:
    strategy = Strategy(Alone())
    assert strategy.run(lambda x, y: x + y, args=(1,), kwargs={"y": 2}) == 3
    assert strategy.extended.call_for_each_replica(lambda: 4) == 4
    assert strategy.experimental_local_results(5) == (5,)
    assert strategy.reduce("mean", torch.tensor([1.0, 2.0]), axis=0) == 1.5
    assert strategy.extended.reduce_to("sum", 7, "cpu") == 7
    assert strategy.experimental_distribute_values_from_function(
        lambda c: c.num_replicas_in_sync
    ).values == (1,)


def test_a_lone_replica_meets_itself() -> None:
    def step() -> tuple[Any, ...]:
        context = get_replica_context()
        assert context is not None
        average = torchstrategy.nn.compute_average_loss(torch.tensor([1.0, 3.0]))
        return (
            context.all_reduce("sum", torch.ones(1)),
            context.merge_call(lambda strategy, x: x + 1, (2,)),
            average,
        )

    reduced, merged, average = Strategy(Alone()).run(step)
    assert (reduced.tolist(), merged, average) == ([1], 3, 2)


def test_options_are_refused_by_who_has_no_use_for_them() -> None:
    strategy = Strategy(Alone())
    assert strategy.run(lambda: 1, options=RunOptions()) == 1
    with pytest.raises(
        ValueError, match=r"^Alone has no use for RunOptions\(.*run_empty_replicas=True"
    ):
        strategy.run(lambda: 1, options=RunOptions(run_empty_replicas=True))


def test_an_extended_knows_its_strategy_before_that_has_it() -> None:
    seen = []

    class Curious(Alone):
        def __init__(self, container_strategy: Strategy) -> None:
            super().__init__(container_strategy)
            seen.append(self._container_strategy())

    class Mine(Strategy):
        def __init__(self) -> None:
            super().__init__(Curious(self))

    assert [Mine()] == seen


def test_an_extended_is_of_one_strategy() -> None:
    one = Strategy(Alone())
    said = r"^The `extended` belongs to Strategy\(1 replica\)\. Two cannot share one: "
    with pytest.raises(ValueError, match=said):
        Strategy(one.extended)
    assert one.run(torchstrategy.get_strategy) is one
    extended = one.extended
    del one
    two = Strategy(extended)
    assert two.run(torchstrategy.get_strategy) is two


# What is missing

NEEDS: dict[str, Callable[[Strategy], object]] = {
    "_num_replicas_in_sync": lambda s: s.num_replicas_in_sync,
    "_call_for_each_replica": lambda s: s.run(lambda: None),
    "_local_results": lambda s: s.experimental_local_results(1),
    "_reduce_to": lambda s: s.reduce("sum", torch.ones(1), axis=None),
    "_gather": lambda s: s.gather(torch.ones(1), axis=0),
    "_broadcast_to": lambda s: s.extended.broadcast_to(torch.ones(1), "cpu"),
    "_distribute_dataset": lambda s: s.experimental_distribute_dataset([torch.ones(1)]),
    "_distribute_from_function": lambda s: s.distribute_datasets_from_function(
        lambda context: [torch.ones(1)]
    ),
    "_distribute_module": lambda s: s.distribute_module(torch.nn.Linear(1, 1)),
    "_distribute_optimizer": lambda s: s.distribute_optimizer(
        torch.optim.SGD([torch.ones(1)])
    ),
    "worker_devices": lambda s: s.extended.worker_devices,
    "parameter_devices": lambda s: s.extended.parameter_devices,
    "variable_created_in_scope": lambda s: s.extended.variable_created_in_scope(
        torch.ones(1)
    ),
    "experimental_between_graph": lambda s: s.extended.experimental_between_graph,
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_is_missing_is_named_when_it_is_needed(name: str) -> None:
    strategy = Strategy(StrategyExtended())
    with pytest.raises(
        NotImplementedError,
        match=f"^StrategyExtended does not bring {name}, which this needs: ",
    ):
        NEEDS[name](strategy)
    assert not torchstrategy.has_strategy()


def test_the_page_lists_all_that_can_be_missing() -> None:
    package = Path(torchstrategy.__file__).parent
    files = (package / "extended.py", package / "_variables" / "kinds.py")
    source = "".join(path.read_text() for path in files)
    assert re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE) == list(NEEDS)
    assert set(NEEDS) == set(re.findall(r'self\._missing\("(\w+)"\)', source))
