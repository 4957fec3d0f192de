"""Batches of every kind, to be dealt out: leaves of any rows, and containers.

Leaves have 0 rows or more.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.utils import _pytree  # what libraries register their containers with

import torchstrategy
from problems import replica_id
from torchstrategy import InputOptions, RunOptions, register_batch_type


def dealt(strategy: torchstrategy.Strategy, batch: Any, **options: Any) -> Any:
    """What becomes of a batch."""
    given_options = InputOptions(**options)
    return next(iter(strategy.experimental_distribute_dataset([batch], given_options)))


def in_the_steps(
    strategy: torchstrategy.Strategy, value: Any, read: Callable[[Any], Any]
) -> list[Any]:
    """What each replica's step reads of its part of a value.

    Parts without rows are included.
    """
    seen: dict[int, Any] = {}  # what a step returns would be taken apart

    def step(part: Any) -> None:
        seen[replica_id()] = read(part)

    strategy.run(step, args=(value,), options=RunOptions(run_empty_replicas=True))
    return [seen[r] for r in sorted(seen)]


# The kinds


class Tagged(torch.Tensor):
    """A tensor of a class of one's own."""


@dataclass(frozen=True)
class Word:
    """Registered below."""

    letters: Any
    scores: Any


register_batch_type(
    Word,
    rows=lambda word: len(word.letters),
    take=lambda word, rows: Word(word.letters[rows], word.scores[rows]),
    apply=lambda word, fn: Word(word.letters, fn(word.scores)),
)


def table(rows: int) -> torch.Tensor:
    return torch.arange(3.0 * rows).reshape(rows, 3)


def sequences(rows: int) -> list[torch.Tensor]:
    """Of different lengths, none of them empty, in no order."""
    return [
        torch.arange(1.0 + 7 * row % 5).unsqueeze(1) + 10 * row for row in range(rows)
    ]


def packed(rows: int, *, is_sorted: bool = False) -> rnn.PackedSequence:
    parts = sequences(rows)
    return rnn.pack_sequence(
        sorted(parts, key=len, reverse=True) if is_sorted else parts,
        enforce_sorted=is_sorted,
    )


def jagged(rows: int) -> torch.Tensor:
    return torch.nested.nested_tensor(sequences(rows), layout=torch.jagged)


def jagged_with_holes(rows: int) -> torch.Tensor:
    return torch.nested.narrow(
        table(rows),
        1,
        torch.arange(rows) % 2,
        torch.arange(rows) % 2 + 1,
        layout=torch.jagged,
    )


def read_only(rows: int) -> np.ndarray[Any, Any]:
    array = np.arange(2.0 * rows).reshape(rows, 2)
    array.flags.writeable = False
    return array


def records(rows: int) -> np.ndarray[Any, Any]:
    return np.array(
        [(row, row % 2) for row in range(rows)], [("value", "f4"), ("flag", "i1")]
    )


def uncoalesced(rows: int) -> torch.Tensor:
    indices = torch.arange(rows).repeat(2).unsqueeze(0)
    return torch.sparse_coo_tensor(
        indices, torch.arange(2.0 * rows), (rows,), check_invariants=False
    )


def as_rows(value: Any) -> list[Any]:
    """Its rows as plain values, of a whole batch and of a piece alike."""
    if isinstance(value, Word):
        return list(zip(value.letters, value.scores.tolist(), strict=True))
    if isinstance(value, rnn.PackedSequence):
        return (
            [row.tolist() for row in rnn.unpack_sequence(value)]
            if len(value.data)
            else []
        )
    if isinstance(value, torch.Tensor) and value.is_nested:
        return [row.tolist() for row in value.unbind()]
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        return as_rows(value.to_dense())
    return (
        value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else list(value)
    )


KINDS: dict[str, Callable[[int], Any]] = {
    "floats": table,
    "booleans": lambda rows: torch.arange(rows) % 2 == 0,
    "complex": lambda rows: torch.complex(table(rows), -table(rows)),
    "conjugate": lambda rows: torch.complex(table(rows), -table(rows)).conj(),
    "a half": lambda rows: table(rows).to(torch.bfloat16),
    "expanded": lambda rows: torch.arange(3.0).expand(rows, 3),
    "every other": lambda rows: table(2 * rows)[::2, 1:],
    "transposed": lambda rows: table(rows).T.contiguous().T,
    # That overlap.
    "windows": lambda rows: torch.arange(rows + 2.0).unfold(0, 3, 1)[:rows],
    "with gradient": lambda rows: table(rows).requires_grad_(),
    "parameter": lambda rows: nn.Parameter(table(rows)),
    "subclass": lambda rows: table(rows).as_subclass(Tagged),  # type: ignore[arg-type]
    "sparse": lambda rows: table(rows).to_sparse(),
    "hybrid": lambda rows: table(rows).to_sparse(1),
    "uncoalesced": uncoalesced,
    "packed": packed,
    "packed in order": lambda rows: packed(rows, is_sorted=True),
    "array": lambda rows: np.arange(2 * rows).reshape(rows, 2),
    "read-only array": read_only,
    "backwards array": lambda rows: np.arange(2.0 * rows).reshape(rows, 2)[::-1],
    "swapped array": lambda rows: np.arange(rows).astype(">i4"),
    "field of records": lambda rows: records(rows)["value"],
    "strings array": lambda rows: np.array([f"row {row}" for row in range(rows)], "U9"),
    "objects array": lambda rows: np.array(
        [{row} for row in range(rows)] + [None], object
    )[:rows],
    "dates array": lambda rows: np.array(
        [f"2020-01-0{row + 1}" for row in range(rows)], "M8[D]"
    ),
    "records": records,
    "masked array": lambda rows: np.ma.masked_array(
        np.arange(1.0 * rows), np.arange(rows) % 2
    ),
    "strings": lambda rows: [f"row {row}" for row in range(rows)],
    "a tuple of strings": lambda rows: tuple(f"row {row}" for row in range(rows)),
    "bytes": lambda rows: [bytes([row]) for row in range(rows)],
    "numbers": lambda rows: [row / 2 for row in range(rows)],
    "numpy numbers": lambda rows: [np.float32(row) for row in range(rows)],
    "Nones": lambda rows: [None] * rows,
    "sets": lambda rows: [{row} for row in range(rows)],
    "mixed": lambda rows: [row if row % 2 else f"row {row}" for row in range(rows)],
    "registered": lambda rows: Word(
        [chr(97 + row) for row in range(rows)], torch.arange(1.0 * rows)
    ),
}


# Containers


@dataclass
class Plain:
    x: Any
    y: Any
    note: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any
    note: Any


@dataclass(slots=True)
class Slotted:
    x: Any
    y: Any
    note: Any


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any
    y: Any
    note: Any


@dataclass
class Prepared:
    """Does in `__post_init__` what must not be done twice."""

    x: Any
    y: Any
    note: Any
    total: Any = field(init=False)
    later: Any = field(init=False, repr=False)  # not set by `__init__`

    def __post_init__(self) -> None:
        self.x = self.x + 1
        self.total = self.x.sum()


class Attributes(dict[str, Any]):
    """A dict whose items are attributes."""

    def __init__(self, *, x: Any, y: Any, note: Any) -> None:
        super().__init__(x=x, y=y, note=note)

    __getattr__ = dict.__getitem__


@dataclass
class Output(collections.OrderedDict[str, Any]):
    """A dataclass and a dict at once, as the outputs of transformers' models are."""

    x: Any = None
    y: Any = None
    note: Any = None

    def __post_init__(self) -> None:
        for name in ("x", "y", "note"):
            self[name] = getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        made, _, *rest = super().__reduce__()
        return made, (self.x, self.y, self.note), *rest


class Store(MutableMapping[str, Any]):
    """A mapping that keeps its items in a dict of its own."""

    def __init__(self, **items: Any) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class CopiedStore(Store):
    def __copy__(self) -> CopiedStore:
        return CopiedStore(**self.items_)


class Known:
    """A class that torch's pytree knows, and is asked for its parts by number."""

    def __init__(self, x: Any, y: Any, note: Any) -> None:
        self.x, self.y, self.note = x, y, note


_pytree.register_pytree_node(
    Known,
    lambda known: ([known.x, known.y, known.note], None),
    lambda parts, _: Known(*parts),
)

Triple = collections.namedtuple("Triple", "x y note")

IN_ORDER: dict[str, Callable[..., Any]] = {
    "list": lambda x, y, note: [x, y, note],
    "tuple": lambda x, y, note: (x, y, note),
    "deque": lambda x, y, note: collections.deque([x, y, note]),
}
BY_KEY: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "ordered dict": collections.OrderedDict,
    "dict with a default": lambda **items: collections.defaultdict(list, items),
    "user dict": collections.UserDict,
    "dict of a class": Attributes,
    "mapping": CopiedStore,
}
BY_NAME: dict[str, Callable[..., Any]] = {
    "named tuple": Triple,
    "dataclass": Plain,
    "frozen": Frozen,
    "slots": Slotted,
    "frozen with slots": FrozenSlotted,
    "prepared": Prepared,
    "output": Output,
    "registered with pytree": Known,
}
CONTAINERS = {**IN_ORDER, **BY_KEY, **BY_NAME}


def inside(container: Any) -> list[Any]:
    """The parts of one of these containers."""
    if (
        isinstance(container, (list, tuple, collections.deque))
        and type(container) is not Triple
    ):
        return list(container)
    if isinstance(container, MutableMapping):
        return [container["x"], container["y"], container["note"]]
    return [container.x, container.y, container.note]
