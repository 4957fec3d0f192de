"""`copy.deepcopy` of a variable makes one of its kind, in its strategy.

It does wherever it is made, as in TensorFlow.

A copy that was made outside of the scope belonged to no strategy: each replica then
assigned it for itself, and what they assigned was lost.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from topologies import central, central_with_copies, mirrored, mirrored_with_copies
from torchstrategy import (
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)
from torchstrategy._variables.kinds import SyncOnReadVariable

STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "central": lambda: central(3),
    "central with copies": lambda: central_with_copies(2),
    "mirrored": lambda: mirrored(3),
    "mirrored with copies": lambda: mirrored_with_copies(2),
    "one device": lambda: torchstrategy.OneDeviceStrategy("cpu"),
}
KINDS = [
    (s, a)
    for s in ("ON_WRITE", "ON_READ")
    for a in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
]


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return STRATEGIES[request.param]()


def variable(
    strategy: torchstrategy.Strategy, synchronization: str, aggregation: str
) -> torchstrategy.Variable:
    with strategy.scope():
        return torchstrategy.Variable(
            torch.tensor([1.0, 2.0], dtype=torch.float64),
            name="counts",
            synchronization=VariableSynchronization[synchronization],
            aggregation=VariableAggregation[aggregation],
        )


def replica_id() -> int:
    context = get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def of_replicas(strategy: torchstrategy.Strategy, v: Any) -> list[list[float]]:
    found = strategy.experimental_local_results(strategy.run(lambda: v * 1))
    return [one.tolist() for one in found]


def assign_in_replicas(strategy: torchstrategy.Strategy, v: Any) -> None:
    """Each replica its own, where that is allowed."""

    def step() -> None:
        v.assign(torch.full((2,), 3.0 + replica_id(), dtype=torch.float64))

    if v.aggregation is VariableAggregation.NONE and not isinstance(
        v, SyncOnReadVariable
    ):
        v.assign([3.0, 3.0])
    else:
        strategy.run(step)


PLACES = ["outside", "in the scope", "in a merge function", "in the step"]


def copied(
    strategy: torchstrategy.Strategy,
    v: Any,
    place: str,
    how: Callable[[Any], Any] = copy.deepcopy,
) -> Any:
    if place == "outside":
        return how(v)
    if place == "in the scope":
        with strategy.scope():
            return how(v)
    made: list[Any] = []

    def merge() -> None:
        context = get_replica_context()
        assert context is not None
        context.merge_call(lambda strategy: made.append(how(v)))

    strategy.run(
        merge if place == "in a merge function" else lambda: made.append(how(v))
    )
    assert all(one is made[0] for one in made)
    return made[0]


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("synchronization", "aggregation"), KINDS)
def test_a_copy_is_of_the_same_kind(
    strategy: torchstrategy.Strategy,
    synchronization: str,
    aggregation: str,
    place: str,
    how: Any,
) -> None:
    v = variable(strategy, synchronization, aggregation)
    assign_in_replicas(strategy, v)
    before = of_replicas(strategy, v)
    w = copied(strategy, v, place, how)
    assert type(w) is type(v)
    assert w is not v
    assert (w.name, w.trainable, w.synchronization, w.aggregation) == (
        v.name,
        v.trainable,
        v.synchronization,
        v.aggregation,
    )
    assert strategy.extended.variable_created_in_scope(
        w
    ) == strategy.extended.variable_created_in_scope(v)
    assert of_replicas(strategy, w) == before  # of each replica its own value
    # They have nothing in common, and the copy does what the variable would do.
    assign_in_replicas(strategy, w)
    after = of_replicas(strategy, w)
    assert of_replicas(strategy, v) == before
    assign_in_replicas(strategy, v)
    assert of_replicas(strategy, v) == after


def test_a_copy_keeps_what_the_user_set_on_it(strategy: torchstrategy.Strategy) -> None:
    v = variable(strategy, "ON_WRITE", "MEAN")
    v.note = ["a"]
    for place in PLACES:
        w = copied(strategy, v, place)
        assert vars(w) == {"note": ["a"]}
        assert w.note is not v.note
    with strategy.scope():
        assert vars(pickle.loads(pickle.dumps(v))) == {"note": ["a"]}


def test_a_step_that_sets_an_attribute_of_the_variable_is_refused(
    strategy: torchstrategy.Strategy,
) -> None:
    """All replicas have the one variable.

    On a module, it is each replica's own copy.
    """
    v = variable(strategy, "ON_WRITE", "MEAN")
    with strategy.scope():
        model = nn.Module()
        model.held = v

    def on_the_module() -> None:
        model.held.note = 3

    strategy.run(on_the_module)
    assert v.note == 3

    def by_itself() -> None:
        v.note = 4

    def takes_away() -> None:
        del v.note

    if strategy.num_replicas_in_sync > 1:
        for step in (by_itself, takes_away):
            with pytest.raises(
                RuntimeError,
                match="The step wrote the attribute 'note' of counts in a replica",
            ):
                strategy.run(step)
        assert v.note == 3


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_of_a_module_has_such_variables(
    strategy: torchstrategy.Strategy, place: str
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.scale = variable(strategy, "ON_WRITE", "MEAN")
            self.seen = variable(strategy, "ON_READ", "SUM")
            self.plain = [self.scale]

    with strategy.scope():
        net = Net()
    net.scale.assign([5.0, 6.0])
    made: list[Any] = []
    if place == "in the step":
        strategy.run(lambda: made.append(copy.deepcopy(net)))
    else:
        made.append(copied(strategy, net, place))
    for twin in made:
        assert twin.plain[0] is twin.scale
        assert (type(twin.scale), type(twin.seen)) == (type(net.scale), type(net.seen))
        assert of_replicas(strategy, twin.scale) == of_replicas(strategy, net.scale)
        assert strategy.extended.variable_created_in_scope(twin.scale)
        strategy.run(
            lambda twin=twin: twin.seen.assign_add(torch.ones(2, dtype=torch.float64))
        )
        assert not torch.equal(twin.seen.read_value(), net.seen.read_value())


def test_the_strategy_is_another_one_or_gone() -> None:
    strategy, other = mirrored(2), central(2)
    v = variable(strategy, "ON_WRITE", "MEAN")
    with other.scope(), pytest.raises(RuntimeError, match=r"Variable\.__deepcopy__"):
        copy.deepcopy(v)
    model = nn.Module()
    model.held = copy.deepcopy(v)
    with pytest.raises(
        RuntimeError, match="already belongs to another strategy, as its copies do"
    ):
        other.distribute_module(model)
    kind = type(v)
    del strategy
    assert type(copy.deepcopy(v)) is kind


def test_a_variable_of_no_strategy_stays_one(strategy: torchstrategy.Strategy) -> None:
    v = torchstrategy.Variable([1.0, 2.0])
    for w in (copy.deepcopy(v), copied(strategy, v, "in the scope")):
        assert type(w) is torchstrategy.Variable
        assert not strategy.extended.variable_created_in_scope(w)
        assert w.tolist() == [1.0, 2.0]


def test_a_component_is_copied_as_a_plain_variable() -> None:
    strategy = mirrored_with_copies(2)
    v = variable(strategy, "ON_READ", "SUM")
    assign_in_replicas(strategy, v)
    component = copy.deepcopy(strategy.experimental_local_results(v)[1])
    assert type(component) is torchstrategy.Variable
    assert component.tolist() == [4.0, 4.0]
    component.assign([0.0, 0.0])
    assert v.read_value().tolist() == [7.0, 7.0]


def test_replicas_that_copy_different_variables_are_refused() -> None:
    strategy = mirrored(2)
    v, w = (
        variable(strategy, "ON_WRITE", "MEAN"),
        variable(strategy, "ON_WRITE", "MEAN"),
    )
    with pytest.raises(
        RuntimeError, match="The replicas copied different variables at once"
    ):
        strategy.run(lambda: copy.deepcopy((v, w)[replica_id()]))
