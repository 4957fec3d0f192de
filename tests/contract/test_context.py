"""Where am I? What the four questions answer, thread by thread, and what may be nested in what."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any, NamedTuple

import pytest
import torch

import torchstrategy
from problems import shown
from topologies import TOPOLOGIES, central
from torchstrategy import (
    ReplicaContext,
    Strategy,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)

NOT_CROSS = "^Method requires being in cross-replica context: "
SET_INSIDE = r"^Must not be called inside a `with strategy\.scope\(\):` block or in a replica: "


class State(NamedTuple):
    """The answers to the four questions."""

    strategy: Strategy
    has_strategy: bool
    in_cross_replica_context: bool
    has_replica_context: bool


def state() -> State:
    return State(get_strategy(), has_strategy(), in_cross_replica_context(), get_replica_context() is not None)


def outside() -> State:
    """The state where nothing was entered."""
    return State(DEFAULT, False, False, True)


def in_scope_of(strategy: Strategy) -> State:
    return State(strategy, True, True, False)


def in_replica_of(strategy: Strategy) -> State:
    return State(strategy, True, False, True)


class Opaque:
    """Holds a value that is not to be looked into."""

    def __init__(self, value: Any) -> None:
        self.value = value


def in_each_replica(strategy: Strategy, fn: Callable[[], Any]) -> list[Any]:
    """What `fn` returns in each replica, as it is."""
    return [held.value for held in strategy.experimental_local_results(strategy.run(lambda: Opaque(fn())))]


def mixing(strategy: Strategy, current: Strategy, what: str = ".+") -> str:
    """The first sentence of the error for a call to `strategy` in the context of `current`."""
    called = re.escape(f" of {strategy!r} was called in the context of {current!r}.")
    return rf"^Mixing different torchstrategy\.Strategy objects: {what}{called}"


def leave(scope: Any) -> None:
    scope.__exit__(None, None, None)


def in_new_thread(fn: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result(timeout=30)


def enter_scope_of(strategy: Strategy) -> State:
    with strategy.scope():
        return state()


@contextmanager
def set_strategy(strategy: Strategy | None) -> Iterator[None]:
    """`experimental_set_strategy`, for the length of a block."""
    experimental_set_strategy(strategy)
    try:
        yield
    finally:
        experimental_set_strategy(None)


DEFAULT = get_strategy()


@pytest.fixture(params=["one_device", "central_1", "central_2", "copies_3"])
def chosen(request: pytest.FixtureRequest) -> Strategy:
    """A strategy that somebody chose: any but the default one."""
    return TOPOLOGIES[request.param]()


@pytest.fixture
def other() -> Strategy:
    """Another one."""
    return central(2)


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
    with pytest.raises(RuntimeError, match=r"^There is one default strategy; torchstrategy\.get_strategy\(\) returns"):
        type(DEFAULT)()


# Strategy.scope


def test_a_scope_yields_its_strategy_which_is_the_current_one_in_it(chosen: Strategy) -> None:
    with chosen.scope() as current:
        assert current is chosen
        assert state() == in_scope_of(chosen)
        assert get_replica_context() is None
    assert state() == outside()


def test_leaving_a_scope_brings_back_the_very_objects_that_were_there_before(chosen: Strategy) -> None:
    before = get_strategy(), get_replica_context()
    with chosen.scope():
        pass
    assert get_strategy() is before[0]
    assert get_replica_context() is before[1]


def test_a_scope_does_nothing_until_it_is_entered(chosen: Strategy) -> None:
    chosen.scope()
    assert state() == outside()


def test_a_scope_of_the_same_strategy_can_be_nested_to_any_depth(chosen: Strategy) -> None:
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


def test_a_scope_of_another_strategy_is_refused_and_the_outer_one_stays(chosen: Strategy, other: Strategy) -> None:
    with chosen.scope():
        with pytest.raises(RuntimeError, match=mixing(other, chosen)), other.scope():
            pytest.fail("the block of a refused scope was run")
        assert state() == in_scope_of(chosen)
    assert state() == outside()


def test_two_equal_strategies_are_not_the_same_strategy() -> None:
    first, second = central(2), central(2)
    with first.scope(), pytest.raises(RuntimeError, match=mixing(second, first)):
        second.scope().__enter__()


def test_a_refused_scope_can_be_entered_later(chosen: Strategy, other: Strategy) -> None:
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
    with pytest.raises(RuntimeError, match=rf"^Scope nesting error: the scope of {re.escape(repr(chosen))} was left, "):
        leave(chosen.scope())
    assert state() == outside()


def test_leaving_scopes_in_the_order_of_entering_them_is_an_error_and_changes_nothing(chosen: Strategy) -> None:
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


def test_a_scope_does_not_move_what_names_its_own_device() -> None:
    with central(2).scope(), torch.device("meta"):
        assert torch.ones(1).device.type == "meta"


# The scope of the default strategy changes nothing


def test_the_scope_of_the_default_strategy_changes_nothing() -> None:
    with DEFAULT.scope() as current:
        assert current is DEFAULT
        assert state() == outside()
        with DEFAULT.scope():
            assert state() == outside()
    assert state() == outside()


def test_the_scope_of_a_strategy_can_be_entered_in_that_of_the_default_one(chosen: Strategy) -> None:
    with DEFAULT.scope():
        with chosen.scope():
            assert state() == in_scope_of(chosen)
        assert state() == outside()


@pytest.mark.parametrize("enter", ["scope", "set", "run"])
def test_the_scope_of_the_default_strategy_must_not_be_nested_in_another(chosen: Strategy, enter: str) -> None:
    message = re.escape(f"Must not nest the default strategy's scope in the scope of {chosen!r}.")
    with pytest.raises(RuntimeError, match=f"^{message}"):
        if enter == "run":
            chosen.run(lambda: enter_scope_of(DEFAULT))
        with chosen.scope() if enter == "scope" else set_strategy(chosen):
            enter_scope_of(DEFAULT)
    assert state() == outside()


# In a replica


def test_in_a_replica_the_strategy_is_current_and_the_context_is_not_cross_replica(chosen: Strategy) -> None:
    assert in_each_replica(chosen, state) == [in_replica_of(chosen)] * chosen.num_replicas_in_sync
    assert state() == outside()


def test_in_a_replica_of_the_default_strategy_has_strategy_is_false() -> None:
    assert DEFAULT.run(state) == State(DEFAULT, False, False, True)


def test_the_replica_context_knows_its_id_its_group_and_its_strategy(strategy: Strategy) -> None:
    def step() -> tuple[object, ...]:
        context = get_replica_context()
        assert isinstance(context, ReplicaContext)
        assert type(context.replica_id_in_sync_group) is int
        return context.replica_id_in_sync_group, context.num_replicas_in_sync, context.strategy, context.devices

    n = strategy.num_replicas_in_sync
    devices = [torch.device("cpu", 0)] if strategy is DEFAULT else strategy.extended.worker_devices
    assert in_each_replica(strategy, step) == [(r, n, strategy, (devices[r],)) for r in range(n)]


def test_the_replica_context_is_one_object_within_a_run_and_another_in_the_next(strategy: Strategy) -> None:
    def step() -> ReplicaContext | None:
        assert get_replica_context() is get_replica_context()
        return get_replica_context()

    contexts = in_each_replica(strategy, step) + in_each_replica(strategy, step)
    assert len(set(map(id, contexts))) == 2 * strategy.num_replicas_in_sync


def test_after_a_run_the_caller_is_where_it_was(strategy: Strategy) -> None:
    strategy.run(lambda: None)
    assert state() == outside()
    with strategy.scope():
        before = state()
        strategy.run(lambda: None)
        assert state() == before


def test_after_a_failed_run_the_caller_is_where_it_was(strategy: Strategy) -> None:
    def fail() -> None:
        raise KeyError

    with strategy.scope():
        before = state()
        with pytest.raises(KeyError):
            strategy.run(fail)
        assert state() == before
    assert state() == outside()
    assert strategy.run(lambda: None) is None


def test_a_scope_of_its_strategy_cannot_be_entered_in_a_replica(chosen: Strategy) -> None:
    with pytest.raises(
        RuntimeError, match=NOT_CROSS + r"Strategy\.scope speaks for all replicas, and was called inside"
    ):
        chosen.run(lambda: enter_scope_of(chosen))


def test_a_scope_of_another_strategy_cannot_be_entered_in_a_replica(chosen: Strategy, other: Strategy) -> None:
    with pytest.raises(RuntimeError, match=mixing(other, chosen)):
        chosen.run(lambda: enter_scope_of(other))


def test_any_scope_can_be_entered_in_the_default_strategys_replica(strategy: Strategy) -> None:
    with strategy.scope():
        expected = state()
    assert DEFAULT.run(lambda: enter_scope_of(strategy)) == expected


def test_any_other_strategy_can_be_run_in_the_default_strategys_replica(chosen: Strategy) -> None:
    states = DEFAULT.run(lambda: in_each_replica(chosen, state))
    assert states == [in_replica_of(chosen)] * chosen.num_replicas_in_sync


def test_the_default_strategy_cannot_be_run_in_its_own_replica() -> None:
    with pytest.raises(RuntimeError, match=NOT_CROSS):
        DEFAULT.run(lambda: DEFAULT.run(lambda: None))


def test_in_a_merge_function_the_context_is_cross_replica(strategy: Strategy) -> None:
    def step() -> tuple[object, ...]:
        context = get_replica_context()
        merged = context.merge_call(lambda merging: Opaque((merging, state())))
        return *merged.value, get_replica_context() is context

    expected = (strategy, State(strategy, strategy is not DEFAULT, True, False), True)
    assert in_each_replica(strategy, step) == [expected] * strategy.num_replicas_in_sync


# Which methods may be called where

CROSS_REPLICA: dict[str, Callable[[Strategy], object]] = {
    "Strategy.run": lambda s: s.run(lambda: None),
    "Strategy.reduce": lambda s: s.reduce("mean", 1.0, axis=None),
    "Strategy.gather": lambda s: s.gather(torch.ones(1), axis=0),
    "Strategy.distribute_module": lambda s: s.distribute_module(torch.nn.Linear(1, 1)),
    "Strategy.distribute_optimizer": lambda s: s.distribute_optimizer(torch.optim.SGD([torch.ones(1)])),
    "call_for_each_replica": lambda s: s.extended.call_for_each_replica(lambda: None),
    "reduce_to": lambda s: s.extended.reduce_to("mean", torch.ones(1), "cpu"),
    "batch_reduce_to": lambda s: s.extended.batch_reduce_to("mean", [(torch.ones(1), "cpu")]),
}
ANYWHERE: dict[str, Callable[[Strategy], object]] = {
    "extended": lambda s: s.extended,
    "num_replicas_in_sync": lambda s: s.num_replicas_in_sync,
    "cluster_resolver": lambda s: s.cluster_resolver,
    "scope, not entered": lambda s: s.scope(),
    "experimental_distribute_dataset": lambda s: list(s.experimental_distribute_dataset([torch.ones(4)])),
    "experimental_distribute_values_from_function": lambda s: s.experimental_distribute_values_from_function(str),
    "experimental_local_results": lambda s: s.experimental_local_results(1),
    "experimental_assign_to_logical_device": lambda s: s.experimental_assign_to_logical_device(torch.ones(1), 0),
    "worker_devices": lambda s: s.extended.worker_devices,
    "parameter_devices": lambda s: s.extended.parameter_devices,
    "experimental_require_static_shapes": lambda s: s.extended.experimental_require_static_shapes,
    "variable_created_in_scope": lambda s: s.extended.variable_created_in_scope(torch.ones(1)),
}


@pytest.mark.parametrize("method", CROSS_REPLICA)
def test_what_speaks_for_all_replicas_works_outside_and_in_the_own_scope(chosen: Strategy, method: str) -> None:
    call = CROSS_REPLICA[method]
    call(chosen)
    with chosen.scope():
        call(chosen)
    with DEFAULT.scope():
        call(chosen)
    with set_strategy(chosen):
        call(chosen)
    chosen.run(lambda: get_replica_context().merge_call(lambda _: call(chosen) and None))


@pytest.mark.parametrize("method", CROSS_REPLICA)
def test_what_speaks_for_all_replicas_is_refused_in_a_replica(chosen: Strategy, method: str) -> None:
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
def test_the_default_strategy_too_is_refused_in_the_scope_of_another(other: Strategy, method: str) -> None:
    with other.scope(), pytest.raises(RuntimeError, match=r"^Mixing different torchstrategy\.Strategy objects: "):
        CROSS_REPLICA[method](DEFAULT)


def test_the_error_names_the_method_and_no_more() -> None:
    strategy, other = central(2), central(2)
    for method in CROSS_REPLICA:
        with other.scope(), pytest.raises(RuntimeError, match=mixing(strategy, other, re.escape(method))):
            CROSS_REPLICA[method](strategy)


def test_gather_in_a_replica_is_told_of_all_gather(strategy: Strategy) -> None:
    with pytest.raises(RuntimeError, match=NOT_CROSS + r".*all_gather\(\)"):
        strategy.run(lambda: strategy.gather(torch.ones(1), axis=0))


@pytest.mark.parametrize("method", ANYWHERE)
def test_what_does_not_speak_for_all_replicas_works_everywhere(chosen: Strategy, other: Strategy, method: str) -> None:
    call = ANYWHERE[method]
    call(chosen)
    with other.scope():
        call(chosen)
    with chosen.scope():
        call(chosen)
    other.run(lambda: call(chosen) and None)
    chosen.run(lambda: call(chosen) and None)


# Threads


def test_a_thread_that_is_started_in_a_scope_begins_outside(chosen: Strategy) -> None:
    with chosen.scope():
        assert in_new_thread(state) == outside()
        assert state() == in_scope_of(chosen)


def test_a_thread_that_is_started_in_a_replica_begins_outside(chosen: Strategy) -> None:
    states = in_each_replica(chosen, lambda: in_new_thread(state))
    assert states == [outside()] * chosen.num_replicas_in_sync


def test_threads_may_be_in_the_scopes_of_different_strategies_at_once(chosen: Strategy, other: Strategy) -> None:
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


def test_a_strategy_that_was_set_holds_until_another_is_or_none(chosen: Strategy, other: Strategy) -> None:
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


def test_setting_the_default_strategy_takes_away_the_one_before(chosen: Strategy) -> None:
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


def test_the_scope_of_the_strategy_that_was_set_can_be_entered(chosen: Strategy) -> None:
    with set_strategy(chosen):
        assert enter_scope_of(chosen) == in_scope_of(chosen)
        assert state() == in_scope_of(chosen)


def test_the_scope_of_another_strategy_than_the_one_that_was_set_is_refused(chosen: Strategy, other: Strategy) -> None:
    with set_strategy(chosen):
        with pytest.raises(RuntimeError, match=mixing(other, chosen)):
            enter_scope_of(other)
        assert state() == in_scope_of(chosen)


def test_another_strategy_than_the_one_that_was_set_cannot_be_run(chosen: Strategy, other: Strategy) -> None:
    with set_strategy(chosen), pytest.raises(RuntimeError, match=mixing(other, chosen)):
        other.run(lambda: None)


def test_a_strategy_that_was_set_runs_its_replicas(chosen: Strategy) -> None:
    with set_strategy(chosen):
        assert in_each_replica(chosen, state) == [in_replica_of(chosen)] * chosen.num_replicas_in_sync
        assert state() == in_scope_of(chosen)


def test_what_is_created_under_a_strategy_that_was_set_belongs_to_it(chosen: Strategy) -> None:
    with set_strategy(chosen):
        inside = torch.nn.Linear(1, 1)
        with chosen.scope():
            nested = torch.nn.Linear(1, 1)
    outside_again = torch.nn.Linear(1, 1)
    assert [chosen.extended.variable_created_in_scope(m) for m in (inside, nested, outside_again)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("choice", ["another", "the same", None])
def test_no_strategy_can_be_set_in_a_scope(chosen: Strategy, other: Strategy, choice: str | None) -> None:
    with chosen.scope():
        with pytest.raises(RuntimeError, match=SET_INSIDE):
            experimental_set_strategy({"another": other, "the same": chosen, None: None}[choice])
        assert state() == in_scope_of(chosen)
    assert state() == outside()


@pytest.mark.parametrize("nothing", [False, True])
def test_no_strategy_can_be_set_in_a_replica(strategy: Strategy, nothing: bool) -> None:
    with pytest.raises(RuntimeError, match=SET_INSIDE):
        strategy.run(lambda: experimental_set_strategy(None if nothing else strategy))
    assert state() == outside()


def test_no_strategy_can_be_set_in_a_replica_of_the_one_that_was_set(chosen: Strategy) -> None:
    with set_strategy(chosen):
        with pytest.raises(RuntimeError, match=SET_INSIDE):
            chosen.run(lambda: experimental_set_strategy(None))
        assert state() == in_scope_of(chosen)


def test_the_strategy_that_was_set_can_be_taken_away_in_its_own_scope(chosen: Strategy) -> None:
    with set_strategy(chosen):
        with chosen.scope():
            experimental_set_strategy(None)
        assert state() == outside()


@pytest.mark.parametrize("junk", [3, "cpu", object()], ids=shown)
def test_what_is_no_strategy_cannot_be_set(junk: Any) -> None:
    expected = f"^experimental_set_strategy takes a torchstrategy.Strategy or None; got {re.escape(repr(junk))}"
    with pytest.raises(TypeError, match=expected):
        experimental_set_strategy(junk)
    assert state() == outside()


# ReplicaContext


def test_a_replica_context_that_was_kept_still_knows_who_it_was_and_does_nothing_more(chosen: Strategy) -> None:
    kept: list[ReplicaContext] = []
    chosen.run(lambda: kept.append(get_replica_context()))
    for r, context in enumerate(sorted(kept, key=lambda context: context.replica_id_in_sync_group)):
        assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (r, chosen.num_replicas_in_sync)
        assert context.strategy is chosen
        for use in USES.values():
            with pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
                use(context)
            with chosen.scope(), pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
                use(context)
            with pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
                chosen.run(lambda context=context, use=use: use(context))


def test_a_replica_context_that_was_kept_meets_nobody_even_where_it_is_entered(chosen: Strategy) -> None:
    kept: list[ReplicaContext] = []
    chosen.run(lambda: kept.append(get_replica_context()))
    for context in kept:
        for meet in ("merge_call", "all_reduce", "all_gather"):
            with context, pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
                USES[meet](context)
    assert state() == outside()


USES: dict[str, Callable[[ReplicaContext], object]] = {
    "merge_call": lambda context: context.merge_call(lambda strategy: None),
    "all_reduce": lambda context: context.all_reduce("sum", torch.ones(1)),
    "all_gather": lambda context: context.all_gather(torch.ones(1), axis=0),
    "devices": lambda context: context.devices,
}


@pytest.mark.parametrize("use", USES)
def test_the_default_replica_context_is_of_no_use_in_a_scope(chosen: Strategy, use: str) -> None:
    context = get_replica_context()
    assert context is not None
    with (
        chosen.scope(),
        pytest.raises(RuntimeError, match=f"^Mismatching replica context: {use} was called on replica 0"),
    ):
        USES[use](context)


@pytest.mark.parametrize("use", USES)
def test_a_replica_context_is_of_no_use_on_another_thread(chosen: Strategy, use: str) -> None:
    def step() -> None:
        context = get_replica_context()
        with pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
            in_new_thread(lambda: USES[use](context))

    chosen.run(step)


@pytest.mark.parametrize("use", USES)
def test_a_replica_context_is_of_no_use_in_a_merge_function(strategy: Strategy, use: str) -> None:
    def step() -> None:
        context = get_replica_context()
        context.merge_call(lambda _: USES[use](context) and None)

    with pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
        strategy.run(step)


def test_a_replica_context_made_by_hand_can_be_entered(chosen: Strategy) -> None:
    context = ReplicaContext(chosen, 0)
    with context as entered:
        assert entered is context is get_replica_context()
        assert state() == in_replica_of(chosen)
        with context:
            assert get_replica_context() is context
        assert get_replica_context() is context
    assert state() == outside()


def test_a_replica_context_made_by_hand_knows_its_device_where_it_is_entered(chosen: Strategy) -> None:
    context = ReplicaContext(chosen, 0)
    with pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
        _ = context.devices
    with context:
        assert context.devices == (chosen.extended.worker_devices[0],)


def test_a_replica_context_made_by_hand_meets_nobody(several: Strategy) -> None:
    with ReplicaContext(several, 0) as context, pytest.raises(RuntimeError):
        context.merge_call(lambda strategy: None)
    assert state() == outside()


def test_a_replica_id_may_be_a_tensor() -> None:
    assert ReplicaContext(central(2), torch.tensor(1)).replica_id_in_sync_group == 1


@pytest.mark.parametrize("junk", ["0", 0.5, object(), torch.tensor(0.5), torch.tensor([0, 1])], ids=shown)
def test_a_replica_id_must_be_an_integer(junk: Any) -> None:
    with pytest.raises(ValueError, match=f"^A replica id is an integer; got {re.escape(repr(junk))}\\."):
        ReplicaContext(central(2), junk)


@pytest.mark.parametrize("name", ["replica_id_in_sync_group", "num_replicas_in_sync", "strategy", "devices"])
def test_what_a_replica_context_says_cannot_be_set(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(get_replica_context(), name, 1)


def test_a_replica_context_has_no_replica_id() -> None:
    assert not hasattr(get_replica_context(), "replica_id")


# The default replica context, at top level


def test_the_default_replica_context_merges_with_itself() -> None:
    context = get_replica_context()
    assert context is not None
    value = torch.ones(1)
    merged = context.merge_call(lambda s, x, y: Opaque((s, state(), x, y)), args=(value,), kwargs={"y": 2})
    strategy, seen, x, y = merged.value
    assert strategy is DEFAULT
    assert seen == State(DEFAULT, False, True, False)
    assert x is value
    assert y == 2
    assert state() == outside()


def test_the_default_replica_context_reduces_and_gathers_what_it_is_given() -> None:
    context = get_replica_context()
    assert context is not None
    assert torch.equal(
        context.all_reduce(torchstrategy.ReduceOp.SUM, torch.tensor([1.0, 2.0])), torch.tensor([1.0, 2.0])
    )
    assert torch.equal(context.all_gather(torch.tensor([1.0, 2.0]), axis=0), torch.tensor([1.0, 2.0]))


def test_a_failed_merge_at_top_level_leaves_nothing_behind() -> None:
    def fail(strategy: Strategy) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        get_replica_context().merge_call(fail)
    assert state() == outside()


def test_a_run_of_one_replica_that_is_interrupted_anywhere_leaves_no_frame() -> None:
    """A signal's handler raises where a function begins: on the way into the end of a block, the block stayed open."""
    strategy = torchstrategy.OneDeviceStrategy("cpu")
    calls = [0, 0]  # so far, and at which to raise

    def trace(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "call"
        if calls[0] == calls[1]:
            raise KeyboardInterrupt

    was_interrupted = True
    while was_interrupted:
        calls[:] = [0, calls[1] + 1]
        was_interrupted = False
        former = sys.gettrace()
        sys.settrace(trace)
        try:
            strategy.run(lambda: None)
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.settrace(former)
        assert torchstrategy.get_strategy() is not strategy, f"interrupted at call {calls[1]}"
    assert calls[1] > 5
