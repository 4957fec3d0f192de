"""`Strategy.gather` of Python objects with one for each row: texts, ids, dicts of them.

They were refused: "Only tensors, arrays and numbers can be combined across replicas".
So a program that evaluates on texts had to make tensors of them, or to put the lists of
the replicas together by itself, which several processes cannot do.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from support.topologies import TOPOLOGIES
from torchstrategy import Strategy

NAMES = ["cat", "dog"]  # each is one object, which several replicas return


class Kind(enum.Enum):
    EVEN = 0
    ODD = 1


class Found(NamedTuple):
    name: str
    row: int


@dataclass
class Scored:
    text: str
    score: float


ROWS: dict[str, Callable[[int], Any]] = {
    "texts": lambda i: f"row {i}",
    "the same texts": lambda i: NAMES[i % 2],
    "one text": lambda i: "x",
    "ids": lambda i: i,
    "the same ids": lambda i: 7,
    "floats": lambda i: i / 3,
    "bytes": lambda i: bytes([i]),
    "nothing": lambda i: None,
    "some": lambda i: None if i % 3 else f"row {i}",
    "flags": lambda i: i % 2 == 0,
    "dicts": lambda i: {"text": NAMES[i % 2], "id": i},
    "other dicts": lambda i: {f"key {i}": i},
    "lists": lambda i: list(range(i)),
    "pairs": lambda i: (NAMES[i % 2], i),
    "named tuples": lambda i: Found(NAMES[i % 2], i),
    "ordered": lambda i: OrderedDict(b=i, a="x"),
    "deep": lambda i: {"tokens": [["a"] * i, {"n": None}]},
    "mixed": lambda i: [i, "text", (i,), {"a": i}][i % 4],
    "members": lambda i: list(Kind)[i % 2],
    "sets": lambda i: {i, "a"},
    "dataclasses": lambda i: Scored(f"row {i}", i / 2),
}
SIZES = (8, 5, 3, 1, 4)
STRATEGIES = TOPOLOGIES


def gathered_of(
    strategy: Strategy,
    make: Callable[[int], Any],
    wrap: Callable[[list[Any]], Any] = list,
) -> list[Any]:
    """For batches of each size, what is gathered of rows that `make` makes."""
    batches = [torch.arange(size) for size in SIZES]

    def step(rows: torch.Tensor) -> Any:
        return wrap([make(i) for i in rows.tolist()])

    dataset = strategy.experimental_distribute_dataset(batches)
    return [
        strategy.gather(strategy.run(step, args=(batch,)), axis=0) for batch in dataset
    ]


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("name", ROWS)
def test_the_rows_of_all_replicas_come_in_order(kind: str, name: str) -> None:
    make = ROWS[name]
    found = gathered_of(STRATEGIES[kind](), make)
    assert found == [[make(i) for i in range(size)] for size in SIZES]
    assert all(type(rows) is list for rows in found)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_lists_stand_beside_tensors_in_containers(kind: str) -> None:
    def wrap(rows: list[Any]) -> Any:
        return {
            "texts": rows,
            "numbers": torch.ones(len(rows), 2),
            "both": (rows, [rows, torch.ones(len(rows))]),
        }

    for found, size in zip(
        gathered_of(STRATEGIES[kind](), lambda i: NAMES[i % 2], wrap),
        SIZES,
        strict=True,
    ):
        texts = [NAMES[i % 2] for i in range(size)]
        assert found["texts"] == found["both"][0] == found["both"][1][0] == texts
        assert found["numbers"].shape == (size, 2) and len(found["both"][1][1]) == size


@pytest.mark.parametrize("kind", STRATEGIES)
def test_texts_of_a_loader_are_gathered(kind: str) -> None:
    """A `DataLoader` makes a tuple of the texts of its rows.

    Tuples of other lengths were other structures.
    """
    strategy = STRATEGIES[kind]()
    rows = [(torch.ones(2) * i, f"row {i}") for i in range(7)]
    found: list[Any] = []
    direct: list[Any] = []
    for batch in strategy.experimental_distribute_dataset(
        DataLoader(rows, batch_size=3)
    ):
        numbers, texts = strategy.gather(
            strategy.run(lambda given: (given[0] * 2, given[1]), args=(batch,)), axis=0
        )
        assert len(numbers) == len(texts) and type(texts) is list
        found += texts
        direct += strategy.gather(batch[1], axis=0)
    assert found == direct == [text for _, text in rows]


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("axis", [1, -1, None, "rows"])
def test_objects_are_gathered_along_no_other_axis_than_0(kind: str, axis: Any) -> None:
    strategy = STRATEGIES[kind]()
    texts = strategy.run(lambda: ["a", "b"])
    with pytest.raises(
        (TypeError, ValueError), match=r"axis=0|The axis to gather along is an integer"
    ):
        strategy.gather(texts, axis=axis)


@pytest.mark.parametrize(
    "kind", [kind for kind in TOPOLOGIES if TOPOLOGIES[kind]().num_replicas_in_sync > 1]
)
def test_what_is_no_list_of_rows_is_refused_as_before(kind: str) -> None:
    strategy = TOPOLOGIES[kind]()
    for make, error in (
        (lambda: "".join(["a", "b"]), TypeError),
        (lambda: 3, ValueError),
    ):
        with pytest.raises(error):
            strategy.gather(strategy.run(make), axis=0)
    heads = strategy.run(lambda: [torch.ones(1) * 1, torch.ones(2) * 2])
    assert [len(one) for one in strategy.gather(heads, axis=0)] == [
        strategy.num_replicas_in_sync * rows for rows in (1, 2)
    ]
    assert strategy.gather([], axis=0) == [] and strategy.gather(["a"], axis=0) == ["a"]
