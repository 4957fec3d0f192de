"""Merge functions: what they get and return, and that every replica comes to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from problems import context, replica_id
from runs import Opaque, from_each, one_of, per_replica
from topologies import EVERY, TOPOLOGIES, central
from torchstrategy import Strategy

UNEQUAL = (
    r"^The replicas synchronized a different number of times,? or in a different "
    r"order: "
)


def test_a_merge_function_is_called_once_with_the_arguments_of_all_replicas(
    several: Strategy,
) -> None:
    shared, calls = Opaque(), []

    def merge(strategy: Strategy, *args: Any, **kwargs: Any) -> None:
        calls.append((strategy, args, kwargs))

    def step() -> None:
        context().merge_call(
            merge,
            args=(replica_id() + 1000, shared, [replica_id() + 2000]),
            kwargs={"k": replica_id()},
        )

    several.run(step)
    ((strategy, args, kwargs),) = calls
    replicas = range(several.num_replicas_in_sync)
    assert strategy is several
    assert args[0].values == tuple(r + 1000 for r in replicas)
    assert args[1] is shared
    assert type(args[2]) is list
    assert args[2][0].values == tuple(r + 2000 for r in replicas)
    assert kwargs["k"].values == tuple(replicas)


@pytest.mark.parametrize("topology", ["default", "one_device", "central_1", "copies_1"])
def test_the_merge_function_of_one_replica_gets_plain_arguments(topology: str) -> None:
    value = torch.ones(1)
    merged = TOPOLOGIES[topology]().run(
        lambda: context().merge_call(lambda s, x, *, y: [x, y], (value,), {"y": value})
    )
    assert merged[0] is value
    assert merged[1] is value


def test_what_a_merge_function_returns_is_split_again(several: Strategy) -> None:
    shared = Opaque()

    def merge(strategy: Strategy, value: Any) -> Any:
        return {
            "own": strategy.run(lambda x: x * 10, args=(value,)),
            "shared": shared,
            "plain": 7,
            "none": None,
        }

    result = several.run(
        lambda: context().merge_call(merge, args=(torch.tensor(replica_id() + 1),))
    )
    assert [int(own) for own in result["own"].values] == [
        10 * (r + 1) for r in range(several.num_replicas_in_sync)
    ]
    assert result["shared"] is shared
    assert one_of(several, result["plain"]) == 7
    assert result["none"] is None


def test_of_different_merge_functions_that_of_replica_0_is_called(
    several: Strategy,
) -> None:
    functions = [
        lambda _, r=r: f"of replica {r}" for r in range(several.num_replicas_in_sync)
    ]
    assert (
        several.run(lambda: context().merge_call(functions[replica_id()]))
        == "of replica 0"
    )


def test_values_are_reduced_in_a_merge_function(strategy: Strategy) -> None:
    def step() -> Any:
        mine = torch.tensor([1.0, float(replica_id())])
        return context().merge_call(
            lambda s, v: s.reduce("mean", v, axis=None), args=(mine,)
        )

    n = strategy.num_replicas_in_sync
    for component in from_each(strategy, strategy.run(step)):
        assert component.tolist() == [1.0, (n - 1) / 2]


def test_a_merge_function_may_run_a_step_that_merges_again(strategy: Strategy) -> None:
    log: list[tuple[str, int]] = []

    def inner(x: Any) -> Any:
        log.append(("inner", replica_id()))
        merged = context().merge_call(
            lambda s, v: s.gather(s.run(lambda y: y + 100, args=(v,)), axis=0),
            args=(x,),
        )
        return merged.sum()

    def outer() -> Any:
        log.append(("outer", replica_id()))
        x = torch.tensor([replica_id()])
        result = context().merge_call(lambda s, v: s.run(inner, args=(v,)), args=(x,))
        log.append(("back", replica_id()))
        return result

    n = strategy.num_replicas_in_sync
    results = from_each(strategy, strategy.run(outer))
    assert [int(result) for result in results] == [100 * n + n * (n - 1) // 2] * n
    # Replicas on different devices run at the same time.
    stages = [sorted(log[k * n : (k + 1) * n]) for k in range(3)]
    assert stages == [
        [(where, r) for r in range(n)] for where in ("outer", "inner", "back")
    ]


def test_an_exception_of_a_merge_function_comes_out_of_run(strategy: Strategy) -> None:
    error = KeyError("in merge")

    def merge(_: Strategy) -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        strategy.run(lambda: context().merge_call(merge))
    assert caught.value is error
    assert (
        one_of(strategy, strategy.run(lambda: context().merge_call(lambda _: 1))) == 1
    )


def test_an_exception_of_a_merge_function_is_not_the_step_s_to_catch(
    several: Strategy,
) -> None:
    def merge(_: Strategy) -> None:
        raise KeyError("in merge")

    def step() -> None:
        try:
            context().merge_call(merge)
        except Exception:
            pytest.fail("it reached the step")

    with pytest.raises(KeyError):
        several.run(step)


@pytest.mark.parametrize("who", [0, -1])
def test_a_merge_that_not_every_replica_comes_to_is_an_error(
    several: Strategy, who: int
) -> None:
    who %= several.num_replicas_in_sync

    def step() -> None:
        if replica_id() == who:
            context().merge_call(lambda _: pytest.fail("it was merged"))

    with pytest.raises(
        RuntimeError, match=UNEQUAL + rf".*replica {who} is at merge_call"
    ):
        several.run(step)
    assert one_of(several, several.run(lambda: 1)) == 1


def test_replicas_at_different_meetings_are_an_error(several: Strategy) -> None:
    def step() -> None:
        if replica_id():
            context().merge_call(lambda _: None)
        else:
            context().all_reduce("sum", torch.ones(1))

    with pytest.raises(
        RuntimeError,
        match=UNEQUAL
        + r".*replica 0 is at all_reduce\(SUM\), replica 1 is at merge_call",
    ):
        several.run(step)


def test_a_second_meeting_that_not_every_replica_comes_to_is_an_error(
    several: Strategy,
) -> None:
    def step() -> None:
        for _ in range(2 if replica_id() else 1):
            context().merge_call(lambda _: None)

    with pytest.raises(RuntimeError, match=UNEQUAL):
        several.run(step)


def test_merge_arguments_of_different_structure_are_refused(several: Strategy) -> None:
    last = several.num_replicas_in_sync - 1
    with pytest.raises(
        ValueError, match=rf"^Replicas 0 and {last} .* of different structure"
    ):
        several.run(
            lambda: context().merge_call(
                lambda s, x: None, args=([1] * (1 if replica_id() < last else 2),)
            )
        )


@pytest.mark.parametrize("components", [1, 3])
def test_a_merge_function_may_not_return_another_strategys_value(
    components: int,
) -> None:
    strategy, foreign = (
        central(2),
        per_replica(central(components), list(range(components))),
    )
    with pytest.raises(
        ValueError, match=rf"^A value with {components} components? was "
    ):
        strategy.run(lambda: context().merge_call(lambda _: foreign))


# The merge function of a strategy of one device is on that device.
@pytest.mark.parametrize(
    "strategy", [name for name in EVERY if name != "one_device"], indirect=True
)
def test_a_merge_function_makes_tensors_where_its_caller_does(
    strategy: Strategy,
) -> None:
    with torch.device("meta"):
        made = strategy.run(
            lambda: context().merge_call(lambda _: [torch.empty(()).device.type])
        )
    assert from_each(strategy, made[0]) == ["meta"] * strategy.num_replicas_in_sync
