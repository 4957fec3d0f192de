"""Strategy.run: what it takes, who runs when, what comes back; merge functions; replicas without rows."""

from __future__ import annotations

import collections
import copy
import gc
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

import torchstrategy
from problems import context, replica_id, shown
from topologies import TOPOLOGIES, central, compute_devices
from torchstrategy import (
    CentralStorageStrategy,
    DistributedValues,
    OneDeviceStrategy,
    ReduceOp,
    RunOptions,
    Strategy,
    ValueContext,
    get_strategy,
)

DEFAULT = get_strategy()
REBUILD = [name for name in TOPOLOGIES if name not in ("default", "one_device")]
UNEQUAL = r"^The replicas synchronized a different number of times,? or in a different order: "


@pytest.fixture(params=["default", "one_device", "central_1", "central_3"])
def kind(request: pytest.FixtureRequest) -> Strategy:
    """One strategy of each kind, for what does not depend on the number of replicas."""
    return TOPOLOGIES[request.param]()


class Opaque:
    """Holds a value that is not to be looked into."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def per_replica(strategy: Strategy, components: Sequence[Any]) -> Any:
    """A value with these components."""
    return strategy.experimental_distribute_values_from_function(lambda c: components[c.replica_id_in_sync_group])


def dealt(strategy: Strategy, rows: int) -> Any:
    """A batch of the rows 0, 1, ..."""
    return next(iter(strategy.experimental_distribute_dataset([torch.arange(rows)])))


def from_each(strategy: Strategy, value: Any) -> list[Any]:
    """What each replica that is present returned, of a value that may have collapsed to one."""
    if isinstance(value, DistributedValues):
        return list(value.values)
    return [value] * strategy.num_replicas_in_sync


def one_of(strategy: Strategy, value: Any) -> Any:
    """What all replicas returned, which is equal."""
    (one,) = set(from_each(strategy, value))
    return one


# Arguments


@pytest.mark.parametrize("junk", [torch.ones(2), None, "ab", {1}, {"x": 1}, 5, (i for i in range(2))], ids=shown)
def test_positional_arguments_must_be_a_list_or_tuple(kind: Strategy, junk: Any) -> None:
    name = type(junk).__name__
    with pytest.raises(
        ValueError, match=rf"^positional args must be a list or tuple, as in args=\(batch,\); got a {name}\."
    ):
        kind.run(lambda *args: None, args=junk)


@pytest.mark.parametrize("args", [(3, 4), [3, 4], collections.namedtuple("Two", "a b")(3, 4)], ids=shown)
def test_positional_arguments_may_be_a_list_or_any_tuple(kind: Strategy, args: Any) -> None:
    assert one_of(kind, kind.run(lambda a, b: a * b, args=args)) == 12


def test_keyword_arguments_may_be_left_out_or_none(kind: Strategy) -> None:
    results = kind.run(lambda: 1), kind.run(lambda: 1, kwargs=None), kind.run(lambda: 1, (), {})
    assert [one_of(kind, result) for result in results] == [1, 1, 1]
    assert one_of(kind, kind.run(lambda a, *, b: a - b, args=(5,), kwargs={"b": 3})) == 2


@pytest.mark.parametrize("junk", [5, [("x", 1)], "x"], ids=shown)
def test_keyword_arguments_must_be_a_mapping(kind: Strategy, junk: Any) -> None:
    with pytest.raises(TypeError):
        kind.run(lambda x=None: x, kwargs=junk)


@pytest.mark.parametrize("junk", [5, None, "fn", torch.ones(1)], ids=shown)
def test_what_is_run_must_be_callable(kind: Strategy, junk: Any) -> None:
    with pytest.raises(TypeError, match=r"call(able|ed)"):
        kind.run(junk)


def test_too_many_arguments_are_the_functions_own_error(kind: Strategy) -> None:
    with pytest.raises(TypeError, match=r"takes 1 positional argument but 2 were given"):
        kind.run(lambda x: x, args=(1, 2))


def test_arguments_that_are_not_distributed_arrive_as_the_same_objects(strategy: Strategy) -> None:
    passed = Opaque(), torch.ones(2), {1, 2}, None, "text"

    def step(*received: Any) -> bool:
        return all(mine is theirs for mine, theirs in zip(received, passed, strict=True))

    assert strategy.run(step, args=passed) is True


def test_a_distributed_argument_is_its_component_at_any_depth(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    value = per_replica(several, [torch.tensor(float(r)) for r in range(n)])
    pair = collections.namedtuple("Pair", "a b")

    def step(x: Any, tree: Any, *, y: Any) -> Any:
        assert type(tree["k"][1]) is pair
        return x + tree["k"][0]["z"] * 10 + tree["k"][1].a * 100 + tree["k"][1].b + y * 1000

    result = several.run(step, args=(value, {"k": [{"z": value}, pair(value, 0.5)]}), kwargs={"y": value})
    assert [float(component) for component in result.values] == [r * 1111 + 0.5 for r in range(n)]


def test_what_one_run_returned_is_an_argument_of_the_next(strategy: Strategy) -> None:
    first = strategy.run(lambda: {"x": torch.tensor(replica_id() + 1.0)})
    second = strategy.run(lambda tree: tree["x"] * 10, args=(first,))
    n = strategy.num_replicas_in_sync
    assert [float(component) for component in strategy.experimental_local_results(second)] == [
        10.0 * (r + 1) for r in range(n)
    ]


@pytest.mark.parametrize("topology", REBUILD)
def test_replicas_that_meet_get_containers_of_their_own(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    tree: dict[str, list[int]] = {"x": []}

    def step(mine: dict[str, list[int]]) -> int:
        mine["x"].append(replica_id())
        mine["y"] = []
        return len(mine["x"])

    assert from_each(strategy, strategy.run(step, args=(tree,))) == [1] * strategy.num_replicas_in_sync
    assert tree == {"x": []}


@pytest.mark.parametrize("topology", ["default", "one_device"])
def test_a_single_replica_on_the_users_own_objects_gets_those_very_containers(topology: str) -> None:
    tree: list[int] = []
    TOPOLOGIES[topology]().run(lambda mine: mine.append(1), args=(tree,))
    assert tree == [1]


@pytest.mark.parametrize("where", ["args", "kwargs", "nested in args", "nested in kwargs"])
def test_a_value_with_another_number_of_components_is_refused(strategy: Strategy, where: str) -> None:
    n = strategy.num_replicas_in_sync
    for components in {1, 2, 3, 5} - {n}:
        value = per_replica(STRATEGIES[components], list(range(1000, 1000 + components)))
        if "nested" in where:
            value = {"x": [value]}
        sentence = rf"^A value with {components} components? was given to a strategy with {n} replicas?: "
        with pytest.raises(ValueError, match=sentence):
            if where.endswith("kwargs"):
                strategy.run(lambda x: None, kwargs={"x": value})
            else:
                strategy.run(lambda x: None, args=(value,))


STRATEGIES = {replicas: central(replicas) for replicas in (1, 2, 3, 5)}

COUNTS: dict[str, Callable[[], object]] = {
    "run with too many components": lambda: OneDeviceStrategy("cpu").run(
        lambda x: None, args=(per_replica(STRATEGIES[2], [1, 2]),)
    ),
    "run with too few components": lambda: STRATEGIES[2].run(lambda x: None, args=(per_replica(STRATEGIES[1], [1]),)),
    "too few examples": lambda: STRATEGIES[2].run(lambda: None, options=RunOptions(examples=[1])),
    "too many examples": lambda: STRATEGIES[1].run(lambda: None, options=RunOptions(examples=[1, 2])),
    "too few parts": lambda: STRATEGIES[2].experimental_split_to_logical_devices(torch.ones(2, 2), [1]),
    "too many parts": lambda: STRATEGIES[2].experimental_split_to_logical_devices(torch.ones(2), [1, 1]),
}


@pytest.mark.parametrize("case", COUNTS)
def test_messages_count_as_people_do(case: str) -> None:
    with pytest.raises(ValueError) as caught:
        COUNTS[case]()
    assert re.findall(r"\b1 (?:replicas|components|numbers|dimensions)\b", str(caught.value)) == []


# Options


@pytest.mark.parametrize("junk", [{}, "options", 3, torchstrategy.RunOptions], ids=shown)
def test_options_must_be_run_options(kind: Strategy, junk: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"^options is a torchstrategy\.RunOptions or None; got {re.escape(repr(junk))}\."
    ):
        kind.run(lambda: None, options=junk)


@pytest.mark.parametrize(
    "option",
    [
        {"experimental_enable_dynamic_batch_size": False},
        {"experimental_bucketizing_dynamic_shape": True},
        {"experimental_xla_options": object()},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_tpus_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=rf"^RunOptions\({name}=.*\) is an option of TPUs and has no meaning here\."):
        RunOptions(**option)


def test_options_that_say_what_holds_anyway_are_accepted(kind: Strategy) -> None:
    options = RunOptions(
        experimental_enable_dynamic_batch_size=True,
        experimental_bucketizing_dynamic_shape=False,
        experimental_xla_options=None,
        run_empty_replicas=False,
        gradient_reduction=None,
        examples=None,
    )
    assert options == RunOptions()
    assert one_of(kind, kind.run(lambda: 1, options=options)) == 1


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RunOptions().run_empty_replicas = True


@pytest.mark.parametrize("reduction", [ReduceOp.SUM, "sum", "Sum", "SUM"])
def test_the_gradient_reduction_may_be_named(kind: Strategy, reduction: Any) -> None:
    options = RunOptions(gradient_reduction=reduction)
    assert options.gradient_reduction is ReduceOp.SUM
    assert one_of(kind, kind.run(lambda: 1, options=options)) == 1


@pytest.mark.parametrize(
    "make", [lambda r: RunOptions(gradient_reduction=r), lambda r: central(2, gradient_reduction=r)]
)
def test_an_unknown_gradient_reduction_is_refused(make: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=r"^'max' is not one of the reductions 'SUM', 'MEAN'\."):
        make("max")
    with pytest.raises(TypeError, match=r"^Expected reduce_op to be a torchstrategy\.ReduceOp or its name"):
        make(3)


@pytest.mark.parametrize("examples", [[3, 1], (3.0, 1.0), torch.tensor([3, 1]), [0, 2]], ids=shown)
def test_examples_are_one_number_for_each_replica(examples: Any) -> None:
    two = central(2)
    assert one_of(two, two.run(lambda: 1, options=RunOptions(examples=examples))) == 1


def test_too_few_or_too_many_examples_are_refused(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync
    for count in (n - 1, n + 1):
        examples = tuple(range(1, count + 1))
        given = re.escape(f"RunOptions(examples={examples})")
        with pytest.raises(ValueError, match=rf"^{given} has {count} numbers?; the strategy has {n} replicas?\."):
            strategy.run(lambda: pytest.fail("it was run"), options=RunOptions(examples=examples))


@pytest.mark.parametrize("bad", [-1, -0.5, float("nan"), float("inf")])
def test_an_example_count_is_a_number_of_examples(bad: float) -> None:
    with pytest.raises(ValueError, match=r"^RunOptions\(examples=.*\) counts examples: "):
        RunOptions(examples=[2, bad])


@pytest.mark.parametrize("junk", [3, "ab", "31", ["3", "1"], {3: 1}, [None, 1]], ids=shown)
def test_examples_of_another_type_are_refused_by_name(junk: Any) -> None:
    with pytest.raises(TypeError, match=rf"^RunOptions\(examples={re.escape(repr(junk))}\): it is a list of numbers"):
        RunOptions(examples=junk)


def test_examples_may_have_been_counted_by_torch() -> None:
    assert RunOptions(examples=torch.tensor([3.0, 1.0])).examples == (3.0, 1.0)


def test_arguments_dealt_with_different_rows_need_examples() -> None:
    strategy = central(2)
    batches = dealt(strategy, 4), dealt(strategy, 3)
    with pytest.raises(ValueError, match=r"^The arguments of this run were split with different numbers of rows, "):
        strategy.run(lambda a, b: None, args=batches)
    result = strategy.run(lambda a, b: (len(a), len(b)), args=batches, options=RunOptions(examples=[2, 1]))
    assert strategy.experimental_local_results(result) == ((2, 2), (2, 1))


def test_a_replica_with_rows_of_one_argument_only_is_not_left_out() -> None:
    # It was: who followed the message and said how many examples there are lost the rows of that replica.
    strategy = central(2)
    batches = dealt(strategy, 2), dealt(strategy, 1)
    for said in (RunOptions(examples=[2, 1]), RunOptions(gradient_reduction="sum")):
        with pytest.raises(ValueError, match=r"replica 1 has rows of one and none of another.*run_empty_replicas=True"):
            strategy.run(lambda a, b: None, args=batches, options=said)
    options = RunOptions(examples=[2, 1], run_empty_replicas=True)
    result = strategy.run(lambda a, b: (len(a), len(b)), args=batches, options=options)
    assert strategy.experimental_local_results(result) == ((1, 1), (1, 0))


def test_a_sum_of_gradients_needs_no_shares() -> None:
    strategy = central(2)
    options = RunOptions(gradient_reduction="sum")
    result = strategy.run(lambda a, b: len(a) + len(b), args=(dealt(strategy, 4), dealt(strategy, 3)), options=options)
    assert strategy.experimental_local_results(result) == (4, 3)


def test_arguments_dealt_with_the_same_rows_need_nothing() -> None:
    strategy = central(2)
    assert strategy.run(lambda a, b: int((a + b).sum()), args=(dealt(strategy, 3), dealt(strategy, 3))).values == (2, 4)


# Who runs when


def test_replicas_of_one_device_run_one_after_the_other_in_order(in_one_place: Strategy) -> None:
    log: list[tuple[str, int]] = []

    def step() -> None:
        log.append(("start", replica_id()))
        log.append(("end", replica_id()))

    in_one_place.run(step)
    assert log == [(what, r) for r in range(in_one_place.num_replicas_in_sync) for what in ("start", "end")]


def test_replicas_hand_over_only_where_they_meet(in_one_place: Strategy) -> None:
    log: list[Any] = []

    def step() -> None:
        for meeting in ("first", "second"):
            log.append((f"to {meeting}", replica_id()))
            context().merge_call(lambda _, meeting=meeting: log.append(meeting))
        log.append(("end", replica_id()))

    in_one_place.run(step)
    replicas = range(in_one_place.num_replicas_in_sync)
    assert log == [
        *(("to first", r) for r in replicas),
        "first",
        *(("to second", r) for r in replicas),
        "second",
        *(("end", r) for r in replicas),
    ]


@pytest.mark.parametrize("topology", ["default", "one_device", "central_1", "copies_1"])
def test_one_replica_runs_on_the_callers_thread(topology: str) -> None:
    assert TOPOLOGIES[topology]().run(threading.get_ident) == threading.get_ident()


def test_several_replicas_run_on_threads_of_their_own_which_stay(several: Strategy) -> None:
    first = several.run(threading.get_ident).values
    assert len({*first, threading.get_ident()}) == several.num_replicas_in_sync + 1
    assert several.run(threading.get_ident).values == first


def test_merge_functions_run_on_the_callers_thread(strategy: Strategy) -> None:
    ident = strategy.run(lambda: context().merge_call(lambda _: threading.get_ident()))
    assert one_of(strategy, ident) == threading.get_ident()


def test_an_exception_comes_out_as_the_object_that_was_raised(strategy: Strategy) -> None:
    error = KeyError("mine", 2)

    def step() -> None:
        if replica_id() == strategy.num_replicas_in_sync - 1:
            raise error

    with pytest.raises(KeyError) as caught:
        strategy.run(step)
    assert caught.value is error
    assert one_of(strategy, strategy.run(lambda: 1)) == 1


def test_an_exception_says_which_replica_raised_it() -> None:
    def step() -> None:
        if replica_id() == 1:
            raise KeyError

    with pytest.raises(KeyError) as caught:
        central(3).run(step)
    assert caught.value.__notes__[0].startswith(f"raised by replica 1 of 3 on {compute_devices(3)[1]}")


def test_replicas_after_a_failed_one_do_not_start(in_one_place: Strategy) -> None:
    started: list[int] = []

    def step() -> None:
        started.append(replica_id())
        if replica_id() == 1:
            raise KeyError

    with pytest.raises(KeyError):
        in_one_place.run(step)
    assert started == [0, 1]


def test_replicas_that_wait_are_unwound_when_another_fails(several: Strategy) -> None:
    log: list[Any] = []

    def step() -> None:
        if replica_id() == several.num_replicas_in_sync - 1:
            raise KeyError
        try:
            context().merge_call(lambda _: log.append("merged"))
            log.append("went on")
        except Exception:
            log.append("caught")
        finally:
            log.append(replica_id())

    with pytest.raises(KeyError):
        several.run(step)
    assert log == list(range(several.num_replicas_in_sync - 1))


def test_replicas_that_stand_at_a_meeting_are_unwound_when_another_fails_after_it(several: Strategy) -> None:
    unwound: list[int] = []

    def step() -> None:
        try:
            context().merge_call(lambda _: None)
            if replica_id() == 0:
                raise KeyError
        finally:
            unwound.append(replica_id())

    with pytest.raises(KeyError):
        several.run(step)
    assert sorted(unwound) == list(range(several.num_replicas_in_sync))
    assert from_each(several, several.run(replica_id)) == sorted(unwound)


@pytest.mark.parametrize("topology", ["default", "one_device", "central_1", "central_2", "copies_3"])
def test_three_threads_may_run_one_strategy_at_once(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    n = strategy.num_replicas_in_sync
    barriers = [threading.Barrier(3) for _ in range(n)]  # replicas of one run may run at the same time

    def step(x: torch.Tensor) -> torch.Tensor:
        all_three = barriers[replica_id()]
        all_three.wait(timeout=30)
        mine = x * 2 + replica_id()
        merged = context().merge_call(lambda s, v: s.reduce("mean", v, axis=None), args=(mine,))
        all_three.wait(timeout=30)
        assert get_strategy() is strategy
        return torch.stack([mine, merged.to(mine.device)])

    def run(thread: int) -> list[list[float]]:
        value = strategy.run(lambda: torch.tensor(100.0 * thread) + 0 * replica_id())
        for _ in range(3):
            result = strategy.run(step, args=(value,))
        return [component.tolist() for component in strategy.experimental_local_results(result)]

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, range(3), timeout=60))
    assert results == [[[200.0 * thread + r, 200.0 * thread + (n - 1) / 2] for r in range(n)] for thread in range(3)]


# Results


def test_returning_nothing_returns_none(strategy: Strategy) -> None:
    assert strategy.run(lambda: None) is None


def test_an_object_that_every_replica_returns_is_returned(strategy: Strategy) -> None:
    shared = torch.ones(2)
    assert strategy.run(lambda: shared) is shared
    assert strategy.run(lambda x: x, args=(shared,)) is shared


def test_equal_tensors_stay_one_for_each_replica(several: Strategy) -> None:
    assert len(several.run(lambda: torch.ones(2) * 3).values) == several.num_replicas_in_sync


@pytest.mark.parametrize("topology", ["default", "one_device", "central_1", "copies_1"])
def test_what_one_replica_returns_is_plain(topology: str) -> None:
    tree = TOPOLOGIES[topology]().run(lambda: {"x": [torch.ones(1) * 2]})
    assert type(tree["x"][0]) is torch.Tensor


def test_results_may_differ_in_shape_and_dtype(several: Strategy) -> None:
    value = several.run(lambda: torch.ones(replica_id() + 1, dtype=torch.float64 if replica_id() else torch.float32))
    assert [len(component) for component in value.values] == [r + 1 for r in range(several.num_replicas_in_sync)]


# Merge functions


def test_a_merge_function_is_called_once_with_the_arguments_of_all_replicas(several: Strategy) -> None:
    shared, calls = Opaque(), []

    def merge(strategy: Strategy, *args: Any, **kwargs: Any) -> None:
        calls.append((strategy, args, kwargs))

    def step() -> None:
        context().merge_call(
            merge, args=(replica_id() + 1000, shared, [replica_id() + 2000]), kwargs={"k": replica_id()}
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
    merged = TOPOLOGIES[topology]().run(lambda: context().merge_call(lambda s, x, *, y: [x, y], (value,), {"y": value}))
    assert merged[0] is value
    assert merged[1] is value


def test_what_a_merge_function_returns_is_split_again(several: Strategy) -> None:
    shared = Opaque()

    def merge(strategy: Strategy, value: Any) -> Any:
        return {"own": strategy.run(lambda x: x * 10, args=(value,)), "shared": shared, "plain": 7, "none": None}

    result = several.run(lambda: context().merge_call(merge, args=(torch.tensor(replica_id() + 1),)))
    assert [int(own) for own in result["own"].values] == [10 * (r + 1) for r in range(several.num_replicas_in_sync)]
    assert result["shared"] is shared
    assert one_of(several, result["plain"]) == 7
    assert result["none"] is None


def test_of_different_merge_functions_that_of_replica_0_is_called(several: Strategy) -> None:
    functions = [lambda _, r=r: f"of replica {r}" for r in range(several.num_replicas_in_sync)]
    assert several.run(lambda: context().merge_call(functions[replica_id()])) == "of replica 0"


def test_values_are_reduced_in_a_merge_function(strategy: Strategy) -> None:
    def step() -> Any:
        mine = torch.tensor([1.0, float(replica_id())])
        return context().merge_call(lambda s, v: s.reduce("mean", v, axis=None), args=(mine,))

    n = strategy.num_replicas_in_sync
    for component in from_each(strategy, strategy.run(step)):
        assert component.tolist() == [1.0, (n - 1) / 2]


def test_a_run_in_a_merge_function_in_a_run(strategy: Strategy) -> None:
    log: list[tuple[str, int]] = []

    def inner(x: Any) -> Any:
        log.append(("inner", replica_id()))
        merged = context().merge_call(lambda s, v: s.gather(s.run(lambda y: y + 100, args=(v,)), axis=0), args=(x,))
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
    stages = [sorted(log[k * n : (k + 1) * n]) for k in range(3)]  # replicas on different devices run at the same time
    assert stages == [[(where, r) for r in range(n)] for where in ("outer", "inner", "back")]


def test_an_exception_of_a_merge_function_comes_out_of_run(strategy: Strategy) -> None:
    error = KeyError("in merge")

    def merge(_: Strategy) -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        strategy.run(lambda: context().merge_call(merge))
    assert caught.value is error
    assert one_of(strategy, strategy.run(lambda: context().merge_call(lambda _: 1))) == 1


def test_an_exception_of_a_merge_function_is_not_the_step_s_to_catch(several: Strategy) -> None:
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
def test_a_merge_that_not_every_replica_comes_to_is_an_error(several: Strategy, who: int) -> None:
    who %= several.num_replicas_in_sync

    def step() -> None:
        if replica_id() == who:
            context().merge_call(lambda _: pytest.fail("it was merged"))

    with pytest.raises(RuntimeError, match=UNEQUAL + rf".*replica {who} is at merge_call"):
        several.run(step)
    assert one_of(several, several.run(lambda: 1)) == 1


def test_replicas_at_different_meetings_are_an_error(several: Strategy) -> None:
    def step() -> None:
        if replica_id():
            context().merge_call(lambda _: None)
        else:
            context().all_reduce("sum", torch.ones(1))

    with pytest.raises(
        RuntimeError, match=UNEQUAL + r".*replica 0 is at all_reduce\(SUM\), replica 1 is at merge_call"
    ):
        several.run(step)


def test_a_second_meeting_that_not_every_replica_comes_to_is_an_error(several: Strategy) -> None:
    def step() -> None:
        for _ in range(2 if replica_id() else 1):
            context().merge_call(lambda _: None)

    with pytest.raises(RuntimeError, match=UNEQUAL):
        several.run(step)


def test_merge_arguments_of_different_structure_are_refused(several: Strategy) -> None:
    last = several.num_replicas_in_sync - 1
    with pytest.raises(ValueError, match=rf"^Replicas 0 and {last} .* of different structure"):
        several.run(lambda: context().merge_call(lambda s, x: None, args=([1] * (1 if replica_id() < last else 2),)))


@pytest.mark.parametrize("components", [1, 3])
def test_a_merge_function_may_not_return_another_strategys_value(components: int) -> None:
    strategy, foreign = central(2), per_replica(central(components), list(range(components)))
    with pytest.raises(ValueError, match=rf"^A value with {components} components? was "):
        strategy.run(lambda: context().merge_call(lambda _: foreign))


# Replicas without rows sit the step out


def partial(replicas: int = 3) -> tuple[Strategy, Any]:
    """A strategy, and a batch that has rows for all of its replicas but the last."""
    strategy = central(replicas)
    return strategy, dealt(strategy, replicas - 1)


@pytest.mark.parametrize(("replicas", "rows", "present"), [(2, 1, 1), (3, 2, 2), (3, 4, 2), (4, 1, 1), (4, 6, 3)])
def test_a_replica_without_rows_is_not_called(replicas: int, rows: int, present: int) -> None:
    strategy = central(replicas)
    called: list[int] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        called.append(replica_id())
        return batch.max()

    result = strategy.run(step, args=(dealt(strategy, rows),))
    assert sorted(called) == list(range(present))
    assert len(result.values) == present


def test_wherever_the_batch_stands_in_the_arguments_it_decides_who_runs() -> None:
    strategy, batch = partial()
    assert len(strategy.run(lambda tree: replica_id() + 1000, args=({"x": [batch]},)).values) == 2
    assert len(strategy.run(lambda x, *, b: replica_id() + 1000, args=(1,), kwargs={"b": batch}).values) == 2


def test_an_absent_replica_has_no_component_in_the_results() -> None:
    strategy, batch = partial()
    value = strategy.run(lambda x: x.float() + 1, args=(batch,))
    assert [component.tolist() for component in value.values] == [[1], [2]]
    assert [component.tolist() for component in strategy.experimental_local_results(value)] == [[1], [2]]
    assert str(value) == "PerReplica:{\n" + ",\n".join(f"  {r}: {c}" for r, c in enumerate(value.values)) + "\n}"
    assert strategy.reduce("sum", value, axis=None).tolist() == [3]
    assert strategy.reduce("mean", value, axis=None).tolist() == [1.5]
    assert strategy.reduce("mean", value, axis=0).item() == 1.5
    assert strategy.gather(value, axis=0).tolist() == [1, 2]


def test_results_of_the_lone_replica_that_is_present_are_distributed_values() -> None:
    strategy, batch = partial(2)
    constant = strategy.run(lambda x: 7, args=(batch,))
    assert constant.values == (7,)
    assert strategy.run(lambda x: None, args=(batch,)) is None
    nested = strategy.run(lambda x: {"x": [x * 2]}, args=(batch,))
    assert nested["x"][0].values[0].tolist() == [0]


def test_a_replica_that_sat_out_sits_out_again() -> None:
    strategy, batch = partial()
    value = strategy.run(lambda x: x + 1, args=(batch,))
    for options in (None, RunOptions(run_empty_replicas=True)):
        again = strategy.run(lambda x: int(x) + 1000, args=(value,), options=options)
        assert again.values == (1001, 1002)


def test_a_replica_sits_out_if_any_argument_has_nothing_for_it() -> None:
    strategy, batch = partial()
    everywhere = strategy.run(lambda: torch.ones(1) * replica_id())
    absent = strategy.run(lambda x: x + 1, args=(batch,))
    assert len(strategy.run(lambda a, b: a + b, args=(everywhere, absent)).values) == 2


def test_who_is_present_meets_without_the_absent() -> None:
    strategy, batch = partial()

    def step(x: torch.Tensor) -> Any:
        merged = context().merge_call(lambda s, v: (len(v.values), s.reduce("sum", v, axis=None)), args=(x + 1,))
        reduced = context().all_reduce("mean", x + 1.0)
        gathered = context().all_gather(x, axis=0)
        return Opaque((merged[0], merged[1].tolist(), reduced.tolist(), gathered.tolist()))

    expected = (2, [3], [1.5], [0, 1])
    assert [held.value for held in strategy.run(step, args=(batch,)).values] == [expected, expected]


def test_the_number_of_replicas_in_sync_counts_the_absent_too() -> None:
    strategy, batch = partial()
    assert strategy.run(lambda x: context().num_replicas_in_sync + 1000, args=(batch,)).values == (1003, 1003)


def test_where_no_replica_has_a_row_all_run() -> None:
    strategy = central(3)
    result = strategy.run(lambda x: (len(x), replica_id()), args=(dealt(strategy, 0),))
    assert strategy.experimental_local_results(result) == ((0, 0), (0, 1), (0, 2))


def test_empty_replicas_can_be_made_to_run() -> None:
    strategy, batch = partial()
    result = strategy.run(lambda x: (len(x), replica_id()), args=(batch,), options=RunOptions(run_empty_replicas=True))
    assert strategy.experimental_local_results(result) == ((1, 0), (1, 1), (0, 2))


def test_a_full_batch_after_a_partial_one_is_run_by_all() -> None:
    strategy, batch = partial()
    strategy.run(lambda x: x, args=(batch,))
    assert len(strategy.run(lambda x: x * 1, args=(dealt(strategy, 3),)).values) == 3


def test_a_value_that_nobody_dealt_has_no_empty_replicas() -> None:
    strategy = central(2)
    value = per_replica(strategy, [torch.ones(1), torch.ones(0)])
    assert strategy.run(lambda x: len(x) + 1000, args=(value,)).values == (1001, 1000)


# Strategy.experimental_distribute_values_from_function


@pytest.mark.parametrize("topology", REBUILD)
def test_a_value_function_is_called_for_each_replica_in_order(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    n = strategy.num_replicas_in_sync
    seen: list[tuple[ValueContext, int]] = []

    def value_fn(asked: ValueContext) -> float:
        seen.append((asked, threading.get_ident()))
        return asked.replica_id_in_sync_group + 0.5

    value = strategy.experimental_distribute_values_from_function(value_fn)
    assert seen == [(ValueContext(r, n), threading.get_ident()) for r in range(n)]
    assert isinstance(value, DistributedValues)
    assert value.values == tuple(r + 0.5 for r in range(n))


@pytest.mark.parametrize("topology", REBUILD)
@pytest.mark.parametrize("same", [7, None, "text", torch.ones(1)], ids=shown)
def test_a_value_function_makes_a_distributed_value_also_of_one_object(topology: str, same: object) -> None:
    strategy = TOPOLOGIES[topology]()
    value = strategy.experimental_distribute_values_from_function(lambda _: same)
    assert isinstance(value, DistributedValues)
    assert len(value.values) == strategy.num_replicas_in_sync
    assert all(component is same for component in value.values)


def test_a_value_function_may_return_containers(several: Strategy) -> None:
    value = several.experimental_distribute_values_from_function(lambda c: {"a": [c.replica_id_in_sync_group, 7]})
    n = several.num_replicas_in_sync
    assert value["a"][0].values == tuple(range(n))
    assert value["a"][1].values == (7,) * n


def test_a_value_function_of_different_structures_is_refused(several: Strategy) -> None:
    with pytest.raises(ValueError, match=r"^Replicas 0 and 1 .*of different structure"):
        several.experimental_distribute_values_from_function(lambda c: [0] * c.replica_id_in_sync_group)


@pytest.mark.parametrize("topology", ["default", "one_device"])
def test_a_value_function_of_a_single_replica_returns_what_it_returns(topology: str) -> None:
    made = Opaque()
    seen: list[ValueContext] = []
    strategy = TOPOLOGIES[topology]()
    assert strategy.experimental_distribute_values_from_function(lambda c: seen.append(c) or made) is made
    assert seen == [ValueContext(0, 1)]


def test_a_value_function_must_be_callable(kind: Strategy) -> None:
    with pytest.raises(
        TypeError, match=r"^value_fn is called with a ValueContext for each replica; 3 cannot be called\."
    ):
        kind.experimental_distribute_values_from_function(3)


def test_what_a_value_function_raises_comes_out(kind: Strategy) -> None:
    with pytest.raises(AttributeError, match=r"replica_id"):
        kind.experimental_distribute_values_from_function(lambda c: c.replica_id)


def test_a_value_context_is_two_numbers_that_stay() -> None:
    assert ValueContext() == ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)
    assert str(ValueContext(1, 4)) == "torchstrategy.ValueContext(replica id 1, total replicas in sync: 4)"
    with pytest.raises(FrozenInstanceError):
        ValueContext().num_replicas_in_sync = 2


# Logical devices: each replica has one


def test_the_one_logical_device_is_number_0(strategy: Strategy) -> None:
    tensor = torch.ones(2, 3)
    assert strategy.experimental_assign_to_logical_device(tensor, 0) is tensor
    assert strategy.experimental_split_to_logical_devices(tensor, [1, 1]) is tensor
    assert strategy.experimental_replicate_to_logical_devices(tensor) is tensor
    scalar = torch.tensor(1.0)
    assert strategy.experimental_split_to_logical_devices(scalar, []) is scalar


def test_logical_devices_can_be_named_in_the_step(several: Strategy) -> None:
    def step() -> bool:
        tensor = torch.ones(2)
        return several.experimental_assign_to_logical_device(tensor, 0) is tensor

    assert several.run(step) is True


@pytest.mark.parametrize("number", [-1, 1, 7])
def test_there_is_no_other_logical_device(kind: Strategy, number: int) -> None:
    sentence = rf"^There is no logical device {number}: each replica has 1 logical device, number 0\."
    with pytest.raises(ValueError, match=sentence):
        kind.experimental_assign_to_logical_device(torch.ones(1), number)


SPLITS: dict[str, tuple[tuple[int, ...], list[int], str]] = {
    "too few numbers": ((2, 2), [1], r"partition_dimensions=\[1\] has 1 numbers? for a tensor of 2 dimensions"),
    "too many numbers": ((2,), [1, 1], r"partition_dimensions=\[1, 1\] has 2 numbers for a tensor of 1 dimensions?"),
    "the number comes before the division": ((3, 2), [2], r"partition_dimensions=\[2\] has 1 numbers?"),
    "does not divide": ((3, 2), [2, 1], r"partition_dimensions=\[2, 1\] does not divide a tensor of shape \(3, 2\)"),
    "zero": ((2,), [0], r"partition_dimensions=\[0\] does not divide a tensor of shape \(2,\)"),
    "negative": ((2,), [-1], r"partition_dimensions=\[-1\] does not divide a tensor of shape \(2,\)"),
    "the division comes before the product": ((4, 3), [2, 2], r"partition_dimensions=\[2, 2\] does not divide"),
    "too many parts": ((4, 3), [2, 3], r"partition_dimensions=\[2, 3\] asks for 6 parts"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_what_needs_more_than_one_logical_device_is_refused(kind: Strategy, case: str) -> None:
    shape, partition, sentence = SPLITS[case]
    with pytest.raises(ValueError, match="^" + sentence):
        kind.experimental_split_to_logical_devices(torch.ones(shape), partition)


@pytest.mark.parametrize("case", SPLITS)
def test_every_such_error_says_how_many_logical_devices_there_are(case: str) -> None:
    shape, partition, _ = SPLITS[case]
    with pytest.raises(ValueError, match=r"1 logical device\b"):
        central(2).experimental_split_to_logical_devices(torch.ones(shape), partition)


# Strategy.extended


def test_worker_and_parameter_devices_are_tuples_of_devices() -> None:
    extended = CentralStorageStrategy(["cpu:1", "/cpu:2"], "CPU:3").extended
    # The strategy is gone; its devices are still known.
    assert extended.worker_devices == (torch.device("cpu", 1), torch.device("cpu", 2))
    assert extended.parameter_devices == (torch.device("cpu", 3),)
    one = OneDeviceStrategy("cpu:1").extended
    assert one.worker_devices == one.parameter_devices == (torch.device("cpu", 1),)


@pytest.mark.parametrize("name", ["worker_devices", "parameter_devices"])
def test_the_default_strategy_has_no_devices(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"^The default strategy has no devices of its own: "):
        getattr(DEFAULT.extended, name)


def test_shapes_may_vary(kind: Strategy) -> None:
    assert kind.extended.experimental_require_static_shapes is False


def test_there_is_no_cluster(kind: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["localhost:1"]}}')
    assert kind.cluster_resolver is None


@pytest.mark.parametrize("name", ["num_replicas_in_sync", "extended", "cluster_resolver"])
def test_what_a_strategy_is_cannot_be_set(kind: Strategy, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(kind, name, 3)


def test_an_extended_without_its_strategy_says_so() -> None:
    extended = central(2).extended
    gc.collect()
    with pytest.raises(RuntimeError, match=r"^The strategy of this `extended` is gone\."):
        extended.call_for_each_replica(lambda: None)


def test_call_for_each_replica_does_what_run_does(strategy: Strategy) -> None:
    ids = strategy.extended.call_for_each_replica(lambda a, *, b: a + b + replica_id(), args=(1000,), kwargs={"b": 1})
    n = strategy.num_replicas_in_sync
    assert strategy.experimental_local_results(ids) == tuple(1001 + r for r in range(n))
    assert one_of(strategy, strategy.extended.call_for_each_replica(lambda: 1)) == 1


def test_call_for_each_replica_does_not_ask_for_a_tuple(strategy: Strategy) -> None:
    assert one_of(strategy, strategy.extended.call_for_each_replica(lambda a, b: a * b, args=iter([3, 4]))) == 12


@pytest.mark.parametrize("op", ["sum", ReduceOp.MEAN])
def test_reduce_to_a_device_gives_a_tensor(several: Strategy, op: Any) -> None:
    n = several.num_replicas_in_sync
    value = several.run(lambda: {"x": torch.ones(2) * (replica_id() + 1)})
    expected = n * (n + 1) / 2 / (1 if op == "sum" else n)
    for destination in ("cpu:0", "/cpu:1", torch.device("cpu"), torch.zeros(3)):
        reduced = several.extended.reduce_to(op, value, destination)["x"]
        assert type(reduced) is torch.Tensor
        assert reduced.tolist() == [expected] * 2


def test_reduce_to_a_distributed_value_gives_a_copy_for_each_component(several: Strategy) -> None:
    value = several.run(lambda: torch.ones(2))
    reduced = several.extended.reduce_to("sum", value, value)
    assert isinstance(reduced, DistributedValues)
    n = several.num_replicas_in_sync
    assert [component.tolist() for component in reduced.values] == [[n, n]] * n
    assert several.run(lambda x: x is reduced.values[replica_id()], args=(reduced,)) is True


def test_what_was_reduced_for_those_present_is_run_by_those_present() -> None:
    strategy, batch = partial()
    value = strategy.run(lambda x: x + 1, args=(batch,))
    reduced = strategy.extended.reduce_to("sum", value, value)
    assert strategy.run(lambda x: int(x) + 1000, args=(reduced,)).values == (1003, 1003)


@pytest.mark.parametrize("topology", ["default", "one_device"])
def test_reduce_to_gives_a_single_replicas_value_itself(topology: str) -> None:
    strategy, value = TOPOLOGIES[topology](), torch.tensor([1, 2])
    for op in ("sum", "mean"):
        reduced = strategy.extended.reduce_to(op, value, "cpu")
        assert torch.equal(reduced, value)
        assert reduced.dtype is torch.int64


def test_reduce_to_of_a_plain_value_is_as_reduce(several: Strategy) -> None:
    with pytest.raises(
        ValueError, match=r"^A value that is not distributed, tensor\(\[1\.\]\), cannot be summed over "
    ):
        several.extended.reduce_to("sum", torch.ones(1), "cpu")
    assert several.extended.reduce_to("mean", torch.ones(1), "cpu").tolist() == [1]


REDUCE_TO_ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no destination": ({"destinations": None}, ValueError, r"destinations says where the result goes: "),
    "a list of destinations": ({"destinations": ["cpu"]}, TypeError, r"destinations is one device, tensor or "),
    "a tuple of destinations": ({"destinations": ("cpu",)}, TypeError, r"destinations is one device, tensor or "),
    "an unknown destination": ({"destinations": "foo"}, ValueError, r"'foo' is not a device: "),
    "an absent destination": ({"destinations": "xpu:7"}, ValueError, r"The device 'xpu:7' is not on this machine"),
    "an unknown reduction": ({"reduce_op": "max"}, ValueError, r"'max' is not one of the reductions 'SUM', 'MEAN'\."),
    "no reduction": ({"reduce_op": None}, TypeError, r"Expected reduce_op to be a torchstrategy\.ReduceOp or its name"),
    "options": ({"options": 3}, ValueError, r"reduce_to\(options=3\): "),
}


@pytest.mark.parametrize("case", REDUCE_TO_ERRORS)
def test_reduce_to_says_what_is_wrong(several: Strategy, case: str) -> None:
    wrong, error, sentence = REDUCE_TO_ERRORS[case]
    value = several.run(lambda: torch.ones(1))
    with pytest.raises(error, match="^" + sentence):
        several.extended.reduce_to(**{"reduce_op": "sum", "value": value, "destinations": "cpu", **wrong})


def test_a_destination_without_a_device_is_refused() -> None:
    strategy = central(2)
    value, numbers = strategy.run(lambda: torch.ones(1)), per_replica(strategy, [1.5, 2.5])
    with pytest.raises((TypeError, ValueError), match=r"^destinations?\b"):
        strategy.extended.reduce_to("sum", value, numbers)


def test_batch_reduce_to_reduces_each_pair(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    one, two = several.run(lambda: torch.ones(1)), several.run(lambda: torch.ones(1) * 2)
    first, second = several.extended.batch_reduce_to("sum", [(one, "cpu"), (two, two)])
    assert first.tolist() == [n]
    assert [component.tolist() for component in second.values] == [[2 * n]] * n
    assert several.extended.batch_reduce_to("sum", []) == []


@pytest.mark.parametrize("pair", [[1, "cpu"], (1,), (1, "cpu", 2), 1], ids=shown)
def test_batch_reduce_to_takes_pairs(kind: Strategy, pair: Any) -> None:
    sentence = rf"^batch_reduce_to takes \(value, destinations\) pairs; got {re.escape(repr(pair))}\."
    with pytest.raises(ValueError, match=sentence):
        kind.extended.batch_reduce_to("mean", [pair])


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "default"])
def test_a_module_and_its_parameters_are_known_to_their_strategy(topology: str) -> None:
    strategy, other = TOPOLOGIES[topology](), TOPOLOGIES[topology]()
    outside = torch.nn.Linear(1, 1)
    with strategy.scope():
        inside = torch.nn.Sequential(torch.nn.Linear(1, 1))
    for thing in (inside, inside[0], inside[0].weight):
        assert strategy.extended.variable_created_in_scope(thing) is True
        assert other.extended.variable_created_in_scope(thing) is False
        assert DEFAULT.extended.variable_created_in_scope(thing) is False
    for thing in (outside, outside.weight):
        assert strategy.extended.variable_created_in_scope(thing) is False
        assert DEFAULT.extended.variable_created_in_scope(thing) is True
    assert strategy.extended.variable_created_in_scope(strategy.distribute_module(outside).weight) is True


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "default"])
def test_so_is_a_parameter_that_came_with_a_checkpoint(topology: str) -> None:
    """A random program: `load_state_dict(assign=True)` tells nobody, and an optimizer of the new ones was nobody's."""
    strategy, other = TOPOLOGIES[topology](), TOPOLOGIES[topology]()
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    first = model[0].weight
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert strategy.extended.variable_created_in_scope(model[0].weight) is True
    assert other.extended.variable_created_in_scope(model[0].weight) is False
    assert DEFAULT.extended.variable_created_in_scope(model[0].weight) is False
    assert strategy.extended.variable_created_in_scope(first) is False


@pytest.mark.parametrize(
    ("make", "part"),
    [(torch.nn.ReLU, lambda it: it), (lambda: torch.nn.ParameterList([torch.ones(1)]), lambda it: it[0])],
    ids=["module", "parameter"],
)
def test_a_module_without_parameters_and_a_parameter_of_a_module_are_known_too(
    make: Callable[[], Any], part: Callable[[Any], Any]
) -> None:
    strategy = central(2)
    with strategy.scope():
        module = make()
    outside = make()
    assert strategy.extended.variable_created_in_scope(part(module)) is True
    assert strategy.extended.variable_created_in_scope(part(outside)) is False


@pytest.mark.parametrize("junk", [3, None, "weight"], ids=shown)
def test_only_modules_and_parameters_can_have_been_created_in_a_scope(kind: Strategy, junk: Any) -> None:
    with pytest.raises(TypeError, match=r"^variable_created_in_scope asks about a module or a parameter; got "):
        kind.extended.variable_created_in_scope(junk)


# Copies


def test_a_strategy_must_not_be_copied_shallowly(strategy: Strategy) -> None:
    with pytest.raises(RuntimeError, match=r"^Must only deepcopy a Strategy: "):
        copy.copy(strategy)


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "default"])
def test_a_deep_copy_is_another_strategy_of_the_same_kind(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    first, second = copy.deepcopy([strategy, strategy])
    assert first is second
    assert first is not strategy
    assert type(first) is type(strategy)
    assert first.num_replicas_in_sync == strategy.num_replicas_in_sync
    assert first.extended.worker_devices == strategy.extended.worker_devices
    assert first.extended.parameter_devices == strategy.extended.parameter_devices
    assert first.extended.variable_created_in_scope(model) is False
    assert from_each(first, first.run(replica_id)) == list(range(strategy.num_replicas_in_sync))
    with strategy.scope(), pytest.raises(RuntimeError, match=r"^Mixing different torchstrategy\.Strategy objects: "):
        first.run(lambda: None)


def test_a_deep_copy_reduces_gradients_as_the_original_does() -> None:
    strategy = copy.deepcopy(central(2, gradient_reduction="sum"))
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
    strategy.run(lambda: model(torch.ones(1)).sum().backward())
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 2


def test_the_default_strategy_is_not_copied() -> None:
    with pytest.raises(
        RuntimeError, match=r"^There is one default strategy; torchstrategy\.get_strategy\(\) returns it"
    ):
        copy.deepcopy(DEFAULT)


def test_a_strategy_is_made_of_its_extended() -> None:
    with pytest.raises(TypeError):
        Strategy()


def test_a_merge_function_makes_tensors_where_its_caller_does(strategy: Strategy) -> None:
    if isinstance(strategy, OneDeviceStrategy):
        pytest.skip("the merge function of a strategy of one device is on that device")
    with torch.device("meta"):
        made = strategy.run(lambda: context().merge_call(lambda _: [torch.empty(()).device.type]))
    assert from_each(strategy, made[0]) == ["meta"] * strategy.num_replicas_in_sync
