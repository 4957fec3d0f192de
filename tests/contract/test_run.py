"""Strategy.run: what it takes, who runs when, and what comes back."""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from conditions import only_in_turns, only_with_copies
from problems import context, replica_id, share_a_place, shown
from runs import REBUILD, Opaque, from_each, one_of, per_replica
from topologies import TOPOLOGIES, central
from torchstrategy import OneDeviceStrategy, RunOptions, Strategy, get_strategy

# Arguments


@pytest.mark.parametrize(
    "junk",
    [torch.ones(2), None, "ab", {1}, {"x": 1}, 5, (i for i in range(2))],
    ids=shown,
)
def test_positional_arguments_must_be_a_list_or_tuple(
    kind: Strategy, junk: Any
) -> None:
    name = type(junk).__name__
    with pytest.raises(
        ValueError,
        match=(
            r"^positional args must be a list or tuple: args=\(batch,\); got a "
            rf"{name}\."
        ),
    ):
        kind.run(lambda *args: None, args=junk)


@pytest.mark.parametrize(
    "args", [(3, 4), [3, 4], collections.namedtuple("Two", "a b")(3, 4)], ids=shown
)
def test_positional_arguments_may_be_a_list_or_any_tuple(
    kind: Strategy, args: Any
) -> None:
    assert one_of(kind, kind.run(lambda a, b: a * b, args=args)) == 12


def test_keyword_arguments_may_be_left_out_or_none(kind: Strategy) -> None:
    results = (
        kind.run(lambda: 1),
        kind.run(lambda: 1, kwargs=None),
        kind.run(lambda: 1, (), {}),
    )
    assert [one_of(kind, result) for result in results] == [1, 1, 1]
    assert (
        one_of(kind, kind.run(lambda a, *, b: a - b, args=(5,), kwargs={"b": 3})) == 2
    )


@pytest.mark.parametrize("junk", [5, [("x", 1)], "x"], ids=shown)
def test_keyword_arguments_must_be_a_mapping(kind: Strategy, junk: Any) -> None:
    with pytest.raises(TypeError):
        kind.run(lambda x=None: x, kwargs=junk)


@pytest.mark.parametrize("junk", [5, None, "fn", torch.ones(1)], ids=shown)
def test_what_is_run_must_be_callable(kind: Strategy, junk: Any) -> None:
    with pytest.raises(TypeError, match=r"call(able|ed)"):
        kind.run(junk)


def test_too_many_arguments_are_the_functions_own_error(kind: Strategy) -> None:
    with pytest.raises(
        TypeError, match=r"takes 1 positional argument but 2 were given"
    ):
        kind.run(lambda x: x, args=(1, 2))


def test_arguments_that_are_not_distributed_arrive_as_the_same_objects(
    strategy: Strategy,
) -> None:
    passed = Opaque(), torch.ones(2), {1, 2}, None, "text"

    def step(*received: Any) -> bool:
        return all(
            mine is theirs for mine, theirs in zip(received, passed, strict=True)
        )

    assert strategy.run(step, args=passed) is True


def test_a_distributed_argument_is_its_component_at_any_depth(
    several: Strategy,
) -> None:
    n = several.num_replicas_in_sync
    value = per_replica(several, [torch.tensor(float(r)) for r in range(n)])
    pair = collections.namedtuple("Pair", "a b")

    def step(x: Any, tree: Any, *, y: Any) -> Any:
        assert type(tree["k"][1]) is pair
        return (
            x
            + tree["k"][0]["z"] * 10
            + tree["k"][1].a * 100
            + tree["k"][1].b
            + y * 1000
        )

    result = several.run(
        step, args=(value, {"k": [{"z": value}, pair(value, 0.5)]}), kwargs={"y": value}
    )
    assert [float(component) for component in result.values] == [
        r * 1111 + 0.5 for r in range(n)
    ]


def test_what_one_run_returned_is_an_argument_of_the_next(strategy: Strategy) -> None:
    first = strategy.run(lambda: {"x": torch.tensor(replica_id() + 1.0)})
    second = strategy.run(lambda tree: tree["x"] * 10, args=(first,))
    n = strategy.num_replicas_in_sync
    assert [
        float(component) for component in strategy.experimental_local_results(second)
    ] == [10.0 * (r + 1) for r in range(n)]


@pytest.mark.parametrize("topology", REBUILD)
def test_replicas_that_meet_get_containers_of_their_own(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    tree: dict[str, list[int]] = {"x": []}

    def step(mine: dict[str, list[int]]) -> int:
        mine["x"].append(replica_id())
        mine["y"] = []
        return len(mine["x"])

    assert (
        from_each(strategy, strategy.run(step, args=(tree,)))
        == [1] * strategy.num_replicas_in_sync
    )
    assert tree == {"x": []}


@pytest.mark.parametrize("topology", ["default", "one_device"])
def test_a_single_replica_on_the_users_own_objects_gets_those_very_containers(
    topology: str,
) -> None:
    tree: list[int] = []
    TOPOLOGIES[topology]().run(lambda mine: mine.append(1), args=(tree,))
    assert tree == [1]


@pytest.mark.parametrize(
    "where", ["args", "kwargs", "nested in args", "nested in kwargs"]
)
def test_a_value_with_another_number_of_components_is_refused(
    strategy: Strategy, where: str
) -> None:
    n = strategy.num_replicas_in_sync
    for components in {1, 2, 3, 5} - {n}:
        value = per_replica(
            STRATEGIES[components], list(range(1000, 1000 + components))
        )
        if "nested" in where:
            value = {"x": [value]}
        sentence = (
            rf"^A value with {components} components? was given to a strategy with {n} "
            r"replicas?: "
        )
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
    "run with too few components": lambda: STRATEGIES[2].run(
        lambda x: None, args=(per_replica(STRATEGIES[1], [1]),)
    ),
    "too few examples": lambda: STRATEGIES[2].run(
        lambda: None, options=RunOptions(examples=[1])
    ),
    "too many examples": lambda: STRATEGIES[1].run(
        lambda: None, options=RunOptions(examples=[1, 2])
    ),
    "too few parts": lambda: STRATEGIES[2].experimental_split_to_logical_devices(
        torch.ones(2, 2), [1]
    ),
    "too many parts": lambda: STRATEGIES[2].experimental_split_to_logical_devices(
        torch.ones(2), [1, 1]
    ),
}


@pytest.mark.parametrize("case", COUNTS)
def test_messages_say_one_replica_and_not_one_replicas(case: str) -> None:
    with pytest.raises(ValueError) as caught:
        COUNTS[case]()
    assert (
        re.findall(
            r"\b1 (?:replicas|components|numbers|dimensions)\b", str(caught.value)
        )
        == []
    )


# Who runs when


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


def test_replicas_run_on_the_callers_thread_as_long_as_none_of_them_waits(
    several: Strategy,
) -> None:
    idents = several.run(threading.get_ident).values
    if share_a_place(several):
        assert set(idents) == {threading.get_ident()}
    else:
        assert len({*idents, threading.get_ident()}) == several.num_replicas_in_sync + 1


def test_replicas_that_wait_run_on_threads_of_their_own_which_stay(
    several: Strategy,
) -> None:
    def step() -> int:
        context().all_reduce("sum", torch.ones(()))
        return threading.get_ident()

    idents = several.run(step).values
    assert len(set(idents)) == several.num_replicas_in_sync
    assert (idents[0] == threading.get_ident()) == share_a_place(several)
    assert several.run(step).values == idents


def test_merge_functions_run_on_the_callers_thread(strategy: Strategy) -> None:
    ident = strategy.run(lambda: context().merge_call(lambda _: threading.get_ident()))
    assert one_of(strategy, ident) == threading.get_ident()


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


def test_replicas_that_stand_at_a_meeting_are_unwound_when_another_fails_after_it(
    several: Strategy,
) -> None:
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


@pytest.mark.parametrize(
    "topology",
    [
        "default",
        "one_device",
        "central_1",
        pytest.param("central_2", marks=only_with_copies),
        pytest.param("copies_3", marks=only_with_copies),
    ],
)
def test_three_threads_may_run_one_strategy_at_once(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    n = strategy.num_replicas_in_sync
    # Replicas of one run may run at the same time.
    barriers = [threading.Barrier(3) for _ in range(n)]

    def step(x: torch.Tensor) -> torch.Tensor:
        all_three = barriers[replica_id()]
        all_three.wait(timeout=30)
        mine = x * 2 + replica_id()
        merged = context().merge_call(
            lambda s, v: s.reduce("mean", v, axis=None), args=(mine,)
        )
        all_three.wait(timeout=30)
        assert get_strategy() is strategy
        return torch.stack([mine, merged.to(mine.device)])

    def run(thread: int) -> list[list[float]]:
        value = strategy.run(lambda: torch.tensor(100.0 * thread) + 0 * replica_id())
        for _ in range(3):
            result = strategy.run(step, args=(value,))
        return [
            component.tolist()
            for component in strategy.experimental_local_results(result)
        ]

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, range(3), timeout=60))
    assert results == [
        [[200.0 * thread + r, 200.0 * thread + (n - 1) / 2] for r in range(n)]
        for thread in range(3)
    ]


@only_in_turns
@pytest.mark.parametrize("topology", ["central_2", "copies_3"])
def test_a_run_during_one_of_another_thread_is_refused(topology: str) -> None:
    """Replicas take turns on the user's objects, which one run at a time can have."""
    strategy = TOPOLOGIES[topology]()

    def step() -> int:
        if replica_id() == 0:
            with ThreadPoolExecutor(1) as pool:
                another = pool.submit(strategy.run, lambda: None)
                with pytest.raises(RuntimeError, match="call run when the other has"):
                    another.result(timeout=60)
        return replica_id() + 1

    assert strategy.reduce("sum", strategy.run(step), axis=None) > 1
    strategy.run(lambda: None)


# Results


def test_an_object_that_every_replica_returns_is_returned(strategy: Strategy) -> None:
    shared = torch.ones(2)
    assert strategy.run(lambda: shared) is shared
    assert strategy.run(lambda x: x, args=(shared,)) is shared


def test_equal_tensors_stay_one_for_each_replica(several: Strategy) -> None:
    assert (
        len(several.run(lambda: torch.ones(2) * 3).values)
        == several.num_replicas_in_sync
    )


@pytest.mark.parametrize("topology", ["default", "one_device", "central_1", "copies_1"])
def test_what_one_replica_returns_is_plain(topology: str) -> None:
    tree = TOPOLOGIES[topology]().run(lambda: {"x": [torch.ones(1) * 2]})
    assert type(tree["x"][0]) is torch.Tensor


def test_results_may_differ_in_shape_and_dtype(several: Strategy) -> None:
    value = several.run(
        lambda: torch.ones(
            replica_id() + 1, dtype=torch.float64 if replica_id() else torch.float32
        )
    )
    assert [len(component) for component in value.values] == [
        r + 1 for r in range(several.num_replicas_in_sync)
    ]
