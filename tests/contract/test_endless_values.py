"""Containers that hold themselves, or have thousands of levels, raise an error.

They do wherever they are handed over.

Python gave up with a RecursionError, hundreds of lines long, of which none was the
user's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import torchstrategy
from torchstrategy._base.tree import (
    MOST_LEVELS,
    check_depth,
    leaves_with_names,
    map_leaves,
    tree_leaves,
)

Make = Callable[[], Any]


@dataclass
class Record:
    x: Any
    more: Any = None


def rows() -> torch.Tensor:
    return torch.ones(4, 2)


def list_in_itself() -> Any:
    value: list[Any] = [rows()]
    value.append(value)
    return value


def dict_in_itself() -> Any:
    value: dict[str, Any] = {"x": rows()}
    value["more"] = ({"inner": value},)
    return value


def record_in_itself() -> Any:
    value = Record(rows())
    value.more = [value]
    return value


def nested(wrap: Callable[[Any], Any]) -> Make:
    def make() -> Any:
        value: Any = rows()
        for _ in range(2000):
            value = wrap(value)
        return value

    return make


ENDLESS = {
    "list": (list_in_itself, "This list holds itself"),
    "dict": (dict_in_itself, r"holds itself: value.* is value.* again"),
    "levels of lists": (
        nested(lambda value: [value]),
        "nested in more than 100 levels",
    ),
    "levels of dicts": (
        nested(lambda value: {"a": value}),
        "nested in more than 100 levels",
    ),
    "levels of tuples": (
        nested(lambda value: (rows(), value)),
        "nested in more than 100 levels",
    ),
}
RECORDS = {
    "record": (record_in_itself, "holds itself"),
    "levels of records": (
        nested(lambda value: Record(rows(), value)),
        "nested in more than 100 levels",
    ),
}


def context() -> torchstrategy.ReplicaContext:
    found = torchstrategy.get_replica_context()
    assert found is not None
    return found


WAYS: dict[str, Callable[[torchstrategy.Strategy, Make], Any]] = {
    "args": lambda s, make: s.run(lambda x: None, args=(make(),)),
    "kwargs": lambda s, make: s.run(lambda x: None, kwargs={"x": make()}),
    "reduce": lambda s, make: s.reduce("sum", make(), axis=None),
    "gather": lambda s, make: s.gather(make(), axis=0),
    "all_reduce": lambda s, make: s.run(lambda: context().all_reduce("sum", make())),
    "merge_call": lambda s, make: s.run(
        lambda: context().merge_call(lambda s, x: None, args=(make(),))
    ),
    "local results": lambda s, make: s.experimental_local_results(make()),
}
# One replica returns what its step returns, as it is, and the default strategy reads
# what a dataset has.
WAYS_OF_SEVERAL: dict[str, Callable[[torchstrategy.Strategy, Make], Any]] = {
    "a batch": lambda s, make: next(iter(s.experimental_distribute_dataset([make()]))),
    "a batch of a function": lambda s, make: next(
        iter(s.distribute_datasets_from_function(lambda c: [make()]))
    ),
    "a result": lambda s, make: s.run(make),
    "a reduced result": lambda s, make: s.reduce("sum", s.run(make), axis=None),
}
WAYS_OF_RECORDS = {
    way: (WAYS | WAYS_OF_SEVERAL)[way]
    for way in ("args", "a batch", "a reduced result")
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("way", WAYS)
def test_a_value_without_an_end_is_refused(
    strategy: torchstrategy.Strategy, way: str, kind: str
) -> None:
    make, message = ENDLESS[kind]
    with pytest.raises(ValueError, match=message):
        WAYS[way](strategy, make)
    assert (
        strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None)
        == strategy.num_replicas_in_sync
    )


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("way", WAYS_OF_SEVERAL)
def test_a_result_without_an_end_is_refused(
    several: torchstrategy.Strategy, way: str, kind: str
) -> None:
    make, message = ENDLESS[kind]
    with pytest.raises(ValueError, match=message):
        WAYS_OF_SEVERAL[way](several, make)


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("way", WAYS_OF_RECORDS)
def test_a_record_without_an_end_is_refused(
    several: torchstrategy.Strategy, way: str, kind: str
) -> None:
    make, message = RECORDS[kind]
    with pytest.raises(ValueError, match=message):
        WAYS_OF_RECORDS[way](several, make)


def test_one_device_refuses_a_batch_without_an_end() -> None:
    strategy = torchstrategy.OneDeviceStrategy("cpu")
    for make, message in ENDLESS.values():
        with pytest.raises(ValueError, match=message):
            next(iter(strategy.experimental_distribute_dataset([make()])))


def test_data_parallel_refuses_a_value_without_an_end() -> None:
    replicated = torchstrategy.DataParallel(torch.nn.Identity(), ["cpu", "cpu"])
    for make, message in ENDLESS.values():
        with pytest.raises(ValueError, match=message):
            replicated(make())


def test_what_is_held_twice_and_not_within_itself_is_no_fault(
    strategy: torchstrategy.Strategy,
) -> None:
    shared = [rows()]
    value = {"a": shared, "b": [shared, (shared, shared)]}
    check_depth(value)
    check_depth([value, value, 3, "text", None])
    assert len(tree_leaves(strategy.run(lambda x: len(x["b"]), args=(value,)))) == 1


def test_a_hundred_levels_are_walked_through(strategy: torchstrategy.Strategy) -> None:
    value: Any = rows()
    for _ in range(MOST_LEVELS):
        value = [value]
    check_depth(value)
    distributed = next(iter(strategy.experimental_distribute_dataset([value])))
    strategy.run(lambda x: None, args=(distributed,))
    with pytest.raises(
        ValueError,
        match="nested in more than 100 levels, at value\\[0\\]\\[0\\]\\[0\\]",
    ):
        check_depth([value])


def test_an_endless_recursion_of_the_users_own_is_their_error() -> None:
    def recurse(leaf: Any) -> Any:
        return recurse(leaf)

    with pytest.raises(RecursionError):
        map_leaves(recurse, [[rows()], 3])
    with pytest.raises(RecursionError):
        torchstrategy.CentralStorageStrategy(["cpu"] * 2).run(recurse, args=(rows(),))
    assert leaves_with_names([1]) == [("[0]", 1)]
