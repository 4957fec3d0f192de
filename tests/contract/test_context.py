"""Where am I?

What the four questions answer, thread by thread, and what may be nested in what.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import pytest
import torch

import torchstrategy
from contexts import (
    DEFAULT,
    NOT_CROSS,
    State,
    enter_scope_of,
    in_each_replica,
    in_new_thread,
    in_replica_of,
    mixing,
    outside,
    state,
)
from problems import shown
from topologies import central
from torchstrategy import (
    Strategy,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
)

SET_INSIDE = (
    r"^Must not be called inside a `with strategy\.scope\(\):` block or in a replica: "
)


def in_scope_of(strategy: Strategy) -> State:
    return State(strategy, True, True, False)


def leave(scope: Any) -> None:
    scope.__exit__(None, None, None)


@contextmanager
def set_strategy(strategy: Strategy | None) -> Iterator[None]:
    """`experimental_set_strategy`, for the length of a block."""
    experimental_set_strategy(strategy)
    try:
        yield
    finally:
        experimental_set_strategy(None)


# Outside


def test_where_nothing_was_entered_the_default_strategy_holds() -> None:
    assert state() == outside()
    assert get_strategy() is get_strategy()


def test_the_default_replica_context_is_one_object_for_replica_0_of_1() -> None:
    context = get_replica_context()
    assert context is not None
    assert context is get_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert type(context.replica_id_in_sync_group) is int
    assert context.strategy is DEFAULT
    assert context.devices == (torch.device("cpu", 0),)


def test_there_is_one_default_strategy() -> None:
    with pytest.raises(
        RuntimeError,
        match=(
            r"^There is one default strategy; "
            r"torchstrategy\.get_strategy\(\) returns"
        ),
    ):
        type(DEFAULT)()


# Strategy.scope


def test_a_scope_yields_its_strategy_which_is_the_current_one_in_it(
    chosen: Strategy,
) -> None:
    with chosen.scope() as current:
        assert current is chosen
        assert state() == in_scope_of(chosen)
        assert get_replica_context() is None
    assert state() == outside()


def test_leaving_a_scope_brings_back_the_very_objects_that_were_there_before(
    chosen: Strategy,
) -> None:
    before = get_strategy(), get_replica_context()
    with chosen.scope():
        pass
    assert get_strategy() is before[0]
    assert get_replica_context() is before[1]


def test_a_scope_does_nothing_until_it_is_entered(chosen: Strategy) -> None:
    chosen.scope()
    assert state() == outside()


def test_a_scope_of_the_same_strategy_can_be_nested_to_any_depth(
    chosen: Strategy,
) -> None:
    with chosen.scope(), chosen.scope():
        with chosen.scope() as innermost:
            assert innermost is chosen
        assert state() == in_scope_of(chosen)
    assert state() == outside()


def test_a_scope_object_can_be_entered_again_while_it_is_open(chosen: Strategy) -> None:
    scope = chosen.scope()
    with scope:
        with scope as again:
            assert again is chosen
        assert state() == in_scope_of(chosen)
    assert state() == outside()


def test_a_scope_object_can_be_used_again_after_it_was_left(strategy: Strategy) -> None:
    scope = strategy.scope()
    for _ in range(3):
        with scope as current:
            assert current is strategy is get_strategy()
        assert state() == outside()


def test_a_scope_of_another_strategy_is_refused_and_the_outer_one_stays(
    chosen: Strategy, other: Strategy
) -> None:
    with chosen.scope():
        with pytest.raises(RuntimeError, match=mixing(other, chosen)), other.scope():
            pytest.fail("the block of a refused scope was run")
        assert state() == in_scope_of(chosen)
    assert state() == outside()


def test_two_equal_strategies_are_not_the_same_strategy() -> None:
    first, second = central(2), central(2)
    with first.scope(), pytest.raises(RuntimeError, match=mixing(second, first)):
        second.scope().__enter__()


def test_a_refused_scope_can_be_entered_later(
    chosen: Strategy, other: Strategy
) -> None:
    scope = other.scope()
    with chosen.scope(), pytest.raises(RuntimeError, match=r"^Mixing different"):
        scope.__enter__()
    with scope:
        assert state() == in_scope_of(other)
    assert state() == outside()


def test_an_exception_leaves_a_scope_as_itself(chosen: Strategy) -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, chosen.scope(), chosen.scope():
        raise error
    assert caught.value is error
    assert state() == outside()


def test_leaving_a_scope_that_was_not_entered_is_an_error(chosen: Strategy) -> None:
    with pytest.raises(
        RuntimeError,
        match=(
            r"^Scope nesting error: the scope of "
            rf"{re.escape(repr(chosen))} was left, "
        ),
    ):
        leave(chosen.scope())
    assert state() == outside()


def test_leaving_scopes_in_the_order_of_entering_is_an_error(chosen: Strategy) -> None:
    """It changes nothing."""
    first, second = chosen.scope(), chosen.scope()
    with first:
        with second:
            with pytest.raises(RuntimeError, match=r"^Scope nesting error: "):
                leave(first)
            assert state() == in_scope_of(chosen)
        assert state() == in_scope_of(chosen)
    assert state() == outside()


def test_a_scope_cannot_be_left_on_another_thread(chosen: Strategy) -> None:
    scope = chosen.scope()
    with scope:
        with pytest.raises(RuntimeError, match=r"^Scope nesting error: "):
            in_new_thread(lambda: leave(scope))
        assert state() == in_scope_of(chosen)
    assert state() == outside()


# The scope of the default strategy changes nothing


def test_the_scope_of_the_default_strategy_changes_nothing() -> None:
    with DEFAULT.scope() as current:
        assert current is DEFAULT
        assert state() == outside()
        with DEFAULT.scope():
            assert state() == outside()
    assert state() == outside()


def test_a_scope_can_be_entered_in_that_of_the_default_strategy(
    chosen: Strategy,
) -> None:
    with DEFAULT.scope():
        with chosen.scope():
            assert state() == in_scope_of(chosen)
        assert state() == outside()


@pytest.mark.parametrize("enter", ["scope", "set", "run"])
def test_the_scope_of_the_default_strategy_must_not_be_nested_in_another(
    chosen: Strategy, enter: str
) -> None:
    message = re.escape(
        f"Must not nest the default strategy's scope in the scope of {chosen!r}."
    )
    with pytest.raises(RuntimeError, match=f"^{message}"):
        if enter == "run":
            chosen.run(lambda: enter_scope_of(DEFAULT))
        with chosen.scope() if enter == "scope" else set_strategy(chosen):
            enter_scope_of(DEFAULT)
    assert state() == outside()


# Which methods may be called where


CROSS_REPLICA: dict[str, Callable[[Strategy], object]] = {
    "Strategy.run": lambda s: s.run(lambda: None),
    "Strategy.reduce": lambda s: s.reduce("mean", 1.0, axis=None),
    "Strategy.gather": lambda s: s.gather(torch.ones(1), axis=0),
    "Strategy.distribute_module": lambda s: s.distribute_module(torch.nn.Linear(1, 1)),
    "Strategy.distribute_optimizer": lambda s: s.distribute_optimizer(
        torch.optim.SGD([torch.ones(1)])
    ),
    "call_for_each_replica": lambda s: s.extended.call_for_each_replica(lambda: None),
    "reduce_to": lambda s: s.extended.reduce_to("mean", torch.ones(1), "cpu"),
    "batch_reduce_to": lambda s: s.extended.batch_reduce_to(
        "mean", [(torch.ones(1), "cpu")]
    ),
}
ANYWHERE: dict[str, Callable[[Strategy], object]] = {
    "extended": lambda s: s.extended,
    "num_replicas_in_sync": lambda s: s.num_replicas_in_sync,
    "cluster_resolver": lambda s: s.cluster_resolver,
    "scope, not entered": lambda s: s.scope(),
    "experimental_distribute_dataset": lambda s: list(
        s.experimental_distribute_dataset([torch.ones(4)])
    ),
    "experimental_distribute_values_from_function": lambda s: (
        s.experimental_distribute_values_from_function(str)
    ),
    "experimental_local_results": lambda s: s.experimental_local_results(1),
    "experimental_assign_to_logical_device": lambda s: (
        s.experimental_assign_to_logical_device(torch.ones(1), 0)
    ),
    "worker_devices": lambda s: s.extended.worker_devices,
    "parameter_devices": lambda s: s.extended.parameter_devices,
    "experimental_require_static_shapes": lambda s: (
        s.extended.experimental_require_static_shapes
    ),
    "variable_created_in_scope": lambda s: s.extended.variable_created_in_scope(
        torch.ones(1)
    ),
}


@pytest.mark.parametrize("method", CROSS_REPLICA)
def test_what_speaks_for_all_replicas_works_outside_and_in_the_own_scope(
    chosen: Strategy, method: str
) -> None:
    call = CROSS_REPLICA[method]
    call(chosen)
    with chosen.scope():
        call(chosen)
    with DEFAULT.scope():
        call(chosen)
    with set_strategy(chosen):
        call(chosen)
    chosen.run(
        lambda: get_replica_context().merge_call(lambda _: call(chosen) and None)
    )


@pytest.mark.parametrize("method", CROSS_REPLICA)
def test_what_speaks_for_all_replicas_is_refused_in_a_replica(
    chosen: Strategy, method: str
) -> None:
    with pytest.raises(RuntimeError, match=NOT_CROSS):
        chosen.run(lambda: CROSS_REPLICA[method](chosen))


@pytest.mark.parametrize("method", CROSS_REPLICA)
def test_what_speaks_for_all_replicas_is_refused_in_the_scope_of_another_strategy(
    chosen: Strategy, other: Strategy, method: str
) -> None:
    with other.scope(), pytest.raises(RuntimeError, match=mixing(chosen, other)):
        CROSS_REPLICA[method](chosen)
    with pytest.raises(RuntimeError, match=mixing(chosen, other)):
        other.run(lambda: CROSS_REPLICA[method](chosen))


@pytest.mark.parametrize("method", CROSS_REPLICA)
def test_the_default_strategy_too_is_refused_in_the_scope_of_another(
    other: Strategy, method: str
) -> None:
    with (
        other.scope(),
        pytest.raises(
            RuntimeError, match=r"^Mixing different torchstrategy\.Strategy objects: "
        ),
    ):
        CROSS_REPLICA[method](DEFAULT)


def test_the_error_names_the_method_and_no_more() -> None:
    strategy, other = central(2), central(2)
    for method in CROSS_REPLICA:
        with (
            other.scope(),
            pytest.raises(
                RuntimeError, match=mixing(strategy, other, re.escape(method))
            ),
        ):
            CROSS_REPLICA[method](strategy)


def test_gather_in_a_replica_is_told_of_all_gather(strategy: Strategy) -> None:
    with pytest.raises(RuntimeError, match=NOT_CROSS + r".*all_gather\(\)"):
        strategy.run(lambda: strategy.gather(torch.ones(1), axis=0))


@pytest.mark.parametrize("method", ANYWHERE)
def test_what_does_not_speak_for_all_replicas_works_everywhere(
    chosen: Strategy, other: Strategy, method: str
) -> None:
    call = ANYWHERE[method]
    call(chosen)
    with other.scope():
        call(chosen)
    with chosen.scope():
        call(chosen)
    other.run(lambda: str(call(chosen)))
    chosen.run(lambda: str(call(chosen)))


# Threads


def test_a_thread_that_is_started_in_a_scope_begins_outside(chosen: Strategy) -> None:
    with chosen.scope():
        assert in_new_thread(state) == outside()
        assert state() == in_scope_of(chosen)


def test_a_thread_that_is_started_in_a_replica_begins_outside(chosen: Strategy) -> None:
    states = in_each_replica(chosen, lambda: in_new_thread(state))
    assert states == [outside()] * chosen.num_replicas_in_sync


def test_threads_may_be_in_the_scopes_of_different_strategies_at_once(
    chosen: Strategy, other: Strategy
) -> None:
    both_are_inside = Barrier(2)

    def stay_in(strategy: Strategy) -> State:
        with strategy.scope():
            both_are_inside.wait(timeout=30)
            seen = state()
            both_are_inside.wait(timeout=30)
        assert state() == outside()
        return seen

    with ThreadPoolExecutor(2) as pool:
        states = list(pool.map(stay_in, [chosen, other], timeout=30))
    assert states == [in_scope_of(chosen), in_scope_of(other)]


def test_threads_may_be_in_one_scope_object_at_once(chosen: Strategy) -> None:
    scope = chosen.scope()
    with ThreadPoolExecutor(1) as other_thread:
        scope.__enter__()
        other_thread.submit(scope.__enter__).result(timeout=30)
        try:
            leave(scope)
            assert state() == outside()
            assert other_thread.submit(state).result(timeout=30) == in_scope_of(chosen)
        finally:
            other_thread.submit(leave, scope).result(timeout=30)
            if has_strategy():
                leave(scope)


# experimental_set_strategy


def test_a_strategy_that_was_set_holds_until_another_is_or_none(
    chosen: Strategy, other: Strategy
) -> None:
    try:
        assert experimental_set_strategy(chosen) is None
        assert state() == in_scope_of(chosen)
        experimental_set_strategy(other)
        assert state() == in_scope_of(other)
        experimental_set_strategy(None)
        assert state() == outside()
    finally:
        experimental_set_strategy(None)


def test_none_can_be_set_where_nothing_was() -> None:
    experimental_set_strategy(None)
    assert state() == outside()


def test_setting_the_default_strategy_takes_away_the_one_before(
    chosen: Strategy,
) -> None:
    with set_strategy(chosen):
        experimental_set_strategy(DEFAULT)
        assert state() == outside()


def test_a_strategy_that_was_set_is_not_seen_by_other_threads(chosen: Strategy) -> None:
    with set_strategy(chosen):
        assert in_new_thread(state) == outside()


def test_a_strategy_that_another_thread_set_is_not_seen(chosen: Strategy) -> None:
    def set_and_look() -> State:
        experimental_set_strategy(chosen)
        return state()

    assert in_new_thread(set_and_look) == in_scope_of(chosen)
    assert state() == outside()


def test_the_scope_of_the_strategy_that_was_set_can_be_entered(
    chosen: Strategy,
) -> None:
    with set_strategy(chosen):
        assert enter_scope_of(chosen) == in_scope_of(chosen)
        assert state() == in_scope_of(chosen)


def test_the_scope_of_another_strategy_than_the_one_that_was_set_is_refused(
    chosen: Strategy, other: Strategy
) -> None:
    with set_strategy(chosen):
        with pytest.raises(RuntimeError, match=mixing(other, chosen)):
            enter_scope_of(other)
        assert state() == in_scope_of(chosen)


def test_another_strategy_than_the_one_that_was_set_cannot_be_run(
    chosen: Strategy, other: Strategy
) -> None:
    with set_strategy(chosen), pytest.raises(RuntimeError, match=mixing(other, chosen)):
        other.run(lambda: None)


def test_a_strategy_that_was_set_runs_its_replicas(chosen: Strategy) -> None:
    with set_strategy(chosen):
        assert (
            in_each_replica(chosen, state)
            == [in_replica_of(chosen)] * chosen.num_replicas_in_sync
        )
        assert state() == in_scope_of(chosen)


def test_what_is_created_under_a_strategy_that_was_set_belongs_to_it(
    chosen: Strategy,
) -> None:
    with set_strategy(chosen):
        inside = torch.nn.Linear(1, 1)
        with chosen.scope():
            nested = torch.nn.Linear(1, 1)
    outside_again = torch.nn.Linear(1, 1)
    assert [
        chosen.extended.variable_created_in_scope(m)
        for m in (inside, nested, outside_again)
    ] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("choice", ["another", "the same", None])
def test_no_strategy_can_be_set_in_a_scope(
    chosen: Strategy, other: Strategy, choice: str | None
) -> None:
    with chosen.scope():
        with pytest.raises(RuntimeError, match=SET_INSIDE):
            experimental_set_strategy(
                {"another": other, "the same": chosen, None: None}[choice]
            )
        assert state() == in_scope_of(chosen)
    assert state() == outside()


@pytest.mark.parametrize("nothing", [False, True])
def test_no_strategy_can_be_set_in_a_replica(strategy: Strategy, nothing: bool) -> None:
    with pytest.raises(RuntimeError, match=SET_INSIDE):
        strategy.run(lambda: experimental_set_strategy(None if nothing else strategy))
    assert state() == outside()


def test_in_a_replica_no_strategy_can_be_set(chosen: Strategy) -> None:
    """Nor can the one that was set before the run be taken away."""
    with set_strategy(chosen):
        with pytest.raises(RuntimeError, match=SET_INSIDE):
            chosen.run(lambda: experimental_set_strategy(None))
        assert state() == in_scope_of(chosen)


def test_the_strategy_that_was_set_can_be_taken_away_in_its_own_scope(
    chosen: Strategy,
) -> None:
    with set_strategy(chosen):
        with chosen.scope():
            experimental_set_strategy(None)
        assert state() == outside()


@pytest.mark.parametrize("junk", [3, "cpu", object()], ids=shown)
def test_what_is_no_strategy_cannot_be_set(junk: Any) -> None:
    expected = (
        "^experimental_set_strategy takes a torchstrategy.Strategy or None; got "
        f"{re.escape(repr(junk))}"
    )
    with pytest.raises(TypeError, match=expected):
        experimental_set_strategy(junk)
    assert state() == outside()


def test_a_context_that_was_not_entered_leaves_the_scope_as_it_is() -> None:
    """Its exit took the frame of the scope, which failed later, far from the cause."""
    strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
    context = torchstrategy.ReplicaContext(strategy, 0)
    with strategy.scope():
        with pytest.raises(IndexError):
            context.__exit__(None, None, None)
        assert torchstrategy.get_strategy() is strategy
