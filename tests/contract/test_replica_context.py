"""What a replica knows of itself, and what its context is good for elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchstrategy
from contexts import (
    DEFAULT,
    NOT_CROSS,
    Opaque,
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
from torchstrategy import ReplicaContext, Strategy, get_replica_context


def test_a_scope_does_not_move_what_names_its_own_device() -> None:
    with central(2).scope(), torch.device("meta"):
        assert torch.ones(1).device.type == "meta"


# In a replica


def test_in_a_replica_its_strategy_is_current(chosen: Strategy) -> None:
    """And the context is not the cross-replica one."""
    assert (
        in_each_replica(chosen, state)
        == [in_replica_of(chosen)] * chosen.num_replicas_in_sync
    )
    assert state() == outside()


def test_in_a_replica_of_the_default_strategy_has_strategy_is_false() -> None:
    assert DEFAULT.run(state) == State(DEFAULT, False, False, True)


def test_the_replica_context_knows_its_id_its_group_and_its_strategy(
    strategy: Strategy,
) -> None:
    def step() -> tuple[object, ...]:
        context = get_replica_context()
        assert isinstance(context, ReplicaContext)
        assert type(context.replica_id_in_sync_group) is int
        return (
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
            context.strategy,
            context.devices,
        )

    n = strategy.num_replicas_in_sync
    devices = (
        [torch.device("cpu", 0)]
        if strategy is DEFAULT
        else strategy.extended.worker_devices
    )
    assert in_each_replica(strategy, step) == [
        (r, n, strategy, (devices[r],)) for r in range(n)
    ]


def test_each_run_has_one_replica_context(strategy: Strategy) -> None:
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


def test_a_scope_of_its_strategy_cannot_be_entered_in_a_replica(
    chosen: Strategy,
) -> None:
    with pytest.raises(
        RuntimeError,
        match=NOT_CROSS
        + r"Strategy\.scope speaks for all replicas, and was called inside",
    ):
        chosen.run(lambda: enter_scope_of(chosen))


def test_a_scope_of_another_strategy_cannot_be_entered_in_a_replica(
    chosen: Strategy, other: Strategy
) -> None:
    with pytest.raises(RuntimeError, match=mixing(other, chosen)):
        chosen.run(lambda: enter_scope_of(other))


def test_any_scope_can_be_entered_in_the_default_strategys_replica(
    strategy: Strategy,
) -> None:
    with strategy.scope():
        expected = state()
    assert DEFAULT.run(lambda: enter_scope_of(strategy)) == expected


def test_any_other_strategy_can_be_run_in_the_default_strategys_replica(
    chosen: Strategy,
) -> None:
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


# ReplicaContext


def test_a_kept_replica_context_only_knows_who_it_was(chosen: Strategy) -> None:
    """It does nothing more."""
    kept: list[ReplicaContext] = []
    chosen.run(lambda: kept.append(get_replica_context()))
    for r, context in enumerate(
        sorted(kept, key=lambda context: context.replica_id_in_sync_group)
    ):
        assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (
            r,
            chosen.num_replicas_in_sync,
        )
        assert context.strategy is chosen
        for use in USES.values():
            with pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
                use(context)
            with (
                chosen.scope(),
                pytest.raises(RuntimeError, match=r"^Mismatching replica context: "),
            ):
                use(context)
            with pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
                chosen.run(lambda context=context, use=use: use(context))


def test_a_replica_context_that_was_kept_meets_nobody_even_where_it_is_entered(
    chosen: Strategy,
) -> None:
    kept: list[ReplicaContext] = []
    chosen.run(lambda: kept.append(get_replica_context()))
    for context in kept:
        for meet in ("merge_call", "all_reduce", "all_gather"):
            with (
                context,
                pytest.raises(RuntimeError, match=r"^Mismatching replica context: "),
            ):
                USES[meet](context)
    assert state() == outside()


USES: dict[str, Callable[[ReplicaContext], object]] = {
    "merge_call": lambda context: context.merge_call(lambda strategy: None),
    "all_reduce": lambda context: context.all_reduce("sum", torch.ones(1)),
    "all_gather": lambda context: context.all_gather(torch.ones(1), axis=0),
    "devices": lambda context: context.devices,
}


@pytest.mark.parametrize("use", USES)
def test_the_default_replica_context_is_of_no_use_in_a_scope(
    chosen: Strategy, use: str
) -> None:
    context = get_replica_context()
    assert context is not None
    with (
        chosen.scope(),
        pytest.raises(
            RuntimeError,
            match=f"^Mismatching replica context: {use} was called on replica 0",
        ),
    ):
        USES[use](context)


@pytest.mark.parametrize("use", USES)
def test_a_replica_context_is_of_no_use_on_another_thread(
    chosen: Strategy, use: str
) -> None:
    def step() -> None:
        context = get_replica_context()
        with pytest.raises(RuntimeError, match=r"^Mismatching replica context: "):
            in_new_thread(lambda: USES[use](context))

    chosen.run(step)


@pytest.mark.parametrize("use", USES)
def test_a_replica_context_is_of_no_use_in_a_merge_function(
    strategy: Strategy, use: str
) -> None:
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


def test_a_replica_context_made_by_hand_knows_its_device_where_it_is_entered(
    chosen: Strategy,
) -> None:
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


@pytest.mark.parametrize(
    "junk", ["0", 0.5, object(), torch.tensor(0.5), torch.tensor([0, 1])], ids=shown
)
def test_a_replica_id_must_be_an_integer(junk: Any) -> None:
    with pytest.raises(
        ValueError, match=f"^A replica id is an integer; got {re.escape(repr(junk))}\\."
    ):
        ReplicaContext(central(2), junk)


@pytest.mark.parametrize(
    "name", ["replica_id_in_sync_group", "num_replicas_in_sync", "strategy", "devices"]
)
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
    merged = context.merge_call(
        lambda s, x, y: Opaque((s, state(), x, y)), args=(value,), kwargs={"y": 2}
    )
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
        context.all_reduce(torchstrategy.ReduceOp.SUM, torch.tensor([1.0, 2.0])),
        torch.tensor([1.0, 2.0]),
    )
    assert torch.equal(
        context.all_gather(torch.tensor([1.0, 2.0]), axis=0), torch.tensor([1.0, 2.0])
    )


def test_a_failed_merge_at_top_level_leaves_nothing_behind() -> None:
    def fail(strategy: Strategy) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        get_replica_context().merge_call(fail)
    assert state() == outside()


def test_a_run_of_one_replica_that_is_interrupted_anywhere_leaves_no_frame() -> None:
    """A signal's handler raises where a function begins.

    On the way into the end of a block, the block stayed open.
    """
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
        assert torchstrategy.get_strategy() is not strategy, (
            f"interrupted at call {calls[1]}"
        )
    assert calls[1] > 5
