"""Whether all workers read the same rows in the same order.

Each worker then takes its part of every batch.

Each worker draws the indices of whole batches, from a copy of the sampler of its own.
If the copies draw differently, one worker loads rows that another has loaded, and
nobody loads others. So

    when an iteration begins    the workers compare their loaders, and go on from the
                                random states of worker 0: those of torch, of Python's
                                `random` and of NumPy's `np.random`
    when a batch is used        they compare what they have read, in a message that is
                                sent anyway

What is compared of a batch are its indices in the dataset. Where a dataset has none,
every worker reads whole batches, and the beginning of each row is compared. What a
dataset makes of an index is not seen: a dataset that shuffles in its own constructor
has to do so alike in all workers.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.marks import checksum, digest
from torchstrategy._base.tree import tree_flatten
from torchstrategy._base.types import Tree
from torchstrategy._data.batch_types import is_leaf, tensors_within
from torchstrategy._group.processes.wire import decode, encode
from torchstrategy._group.workers import ROWS, Workers

_BEGINNING = "the beginning of an iteration over a dataset"
_SHOWN = 8  # how many indices a message shows
_LOOKED_AT = 2**14  # bytes of a batch that are compared


@final
class Read(NamedTuple):
    """What a worker has read of a dataset that all workers read alike, for one batch.

    Attributes:
        number: Which batch of the epoch it is, from 0; of a batch without indices, 0.
        rows: The indices of all its rows; or numbers that differ where the beginnings
            of rows do.
        has_indices: Which of the two it is.
    """

    number: int
    rows: Sequence[Any]
    has_indices: bool

    def __str__(self) -> str:
        if not self.has_indices:
            return f"a batch whose rows have the check sums and shapes {self.rows}"
        more = ", ..." if len(self.rows) > _SHOWN else ""
        shown = ", ".join(map(str, self.rows[:_SHOWN]))
        return (
            f"batch {self.number} with the indices [{shown}{more}], {len(self.rows)} "
            "in all"
        )


def begin_alike(
    workers: Workers, facts: dict[str, Any], generators: Sequence[torch.Generator]
) -> None:
    """Begins an iteration in all workers.

    All have loaders that fit together, and take the random states of worker 0.

    Args:
        workers: The processes that read.
        facts: What has to be alike in all of them, by what a message calls it.
        generators: The generators of torch that decide the order.

    Raises:
        ValueError: In all workers, if something is not.
    """
    own = facts | {"torch.Generator objects": len(generators)}
    states = encode(
        (
            [g.get_state() for g in generators],
            random.getstate(),
            np.random.get_state(legacy=False),
        )
    )
    of_all = workers.all_gather_object(
        (digest(encode(own)), digest(states), len(states)), _BEGINNING
    )
    marks_of_facts, marks_of_states, sizes = zip(*of_all, strict=True)
    if len(set(marks_of_facts)) > 1:
        _refuse_other_datasets(workers, own)
    if len(set(marks_of_states)) == 1:
        return
    # Those of worker 0 may take more bytes than those of another worker.
    sent = torch.frombuffer(
        bytearray(states[: sizes[0]].ljust(sizes[0], b"\0")), dtype=torch.uint8
    )
    workers.broadcast([sent], 0, _BEGINNING, are_alike=True)
    if workers.index:
        of_torch, of_python, of_numpy = decode(sent.numpy().tobytes())
        for generator, state in zip(generators, of_torch, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        # Another kind of generator was put in the place of NumPy's.
        with suppress(ValueError):
            np.random.set_state(of_numpy)


def _refuse_other_datasets(workers: Workers, facts: dict[str, Any]) -> None:
    of_all = workers.all_gather_object(facts, _BEGINNING)
    for name in {key: None for theirs in of_all for key in theirs}:
        known = [theirs.get(name) for theirs in of_all]
        other = next((w for w, value in enumerate(known) if value != known[0]), None)
        if other is not None:
            error = ValueError(
                f"The workers read different datasets: worker 0 has {name} {known[0]}, "
                f"and worker {other} has {known[other]}. Each worker loads its part of "
                "every batch, so all need the same rows in the same order: make the "
                "dataset and its loader alike in all of them, with the same seed where "
                "random numbers decide. If each has a dataset of its own, use "
                "strategy.distribute_datasets_from_function. If one of them iterates "
                "over a dataset that others leave out, as when worker 0 validates "
                "alone, let all do so."
            )
            workers.note_of_all(error)
            raise error


def mark_of_subsets(dataset: Any) -> str:
    """A text that differs where subsets in a dataset have other indices.

    It looks at each `torch.utils.data.Subset`, and is empty if there is none.
    """
    if isinstance(dataset, ConcatDataset):
        return " ".join(filter(None, map(mark_of_subsets, dataset.datasets)))
    if not isinstance(dataset, Subset):
        return ""
    try:
        data = np.asarray(dataset.indices).tobytes()
    except ValueError:  # they are no numbers
        data = repr(dataset.indices).encode()
    return (
        f"{len(data)}:{digest(data).hex()} {mark_of_subsets(dataset.dataset)}".strip()
    )


def read_of(element: Tree, rows: int) -> Read:
    """What to compare of a batch that every worker has read whole.

    This is its shapes, and the beginnings of its rows.

    Numbers of a batch that stands for classes, words or ids say which rows they are. So
    floating-point numbers, which machines may compute with other rounding errors, are
    looked at only where there is nothing else.
    """
    found: list[Any] = []
    tensors: list[torch.Tensor] = []
    for leaf in tree_flatten(element, is_leaf)[0]:
        within = tensors_within(leaf)
        tensors += within
        if not within and type(leaf) in (list, tuple, str, int, np.ndarray):
            found.append(
                zlib.crc32(
                    repr(leaf[:rows] if not isinstance(leaf, int) else leaf)[
                        :_LOOKED_AT
                    ].encode()
                )
            )
    near = [
        t
        for t in tensors
        if t.is_cpu and t.layout is torch.strided and not t.is_nested and t.numel()
    ]
    exact = [t for t in near if not (t.is_floating_point() or t.is_complex())]
    for tensor in exact or ([] if found else near):
        found.append(checksum(_beginnings(tensor)))
    shapes = [
        f"{tuple(t.shape)} {t.dtype}"
        for t in tensors
        if t.layout is torch.strided and not t.is_nested
    ]
    return Read(0, [rows, *found, *shapes], has_indices=False)


def _beginnings(tensor: torch.Tensor) -> torch.Tensor:
    """The first numbers of each row."""
    rows = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    few = max(1, _LOOKED_AT // (len(rows) * tensor.element_size()))
    return rows[:, :few]


def reads_among(values: Sequence[Tree]) -> list[Read]:
    """What was read of the batches among some values, each once."""
    reads: dict[int, Read] = {}
    for value in values:
        if type(value) is PerReplica and value.read is not None:
            reads[id(value.read)] = value.read
    return list(reads.values())


def refuse_other_reads(workers: Workers, reads: Sequence[Read]) -> None:
    """Called in all workers if they have read different rows.

    Raises:
        RuntimeError: Naming the rows of each worker.
    """
    shown = "; ".join(map(str, reads)) or "no batch of a dataset that is split"
    of_all = workers.all_gather_object(shown, "the rows that were read")
    listed = "\n".join(f"  worker {w} has {one}" for w, one in enumerate(of_all))
    error = RuntimeError(
        f"The workers have read different rows:\n{listed}\nEach loads its part of the "
        "same batch, so rows would be used twice or not at all. All draw the order for "
        "themselves: let it come from torch's generator, from `random` or `np.random`, "
        "which have the same state in all workers when an iteration begins; or from a "
        "generator of its own with the same seed in all of them. Random numbers of the "
        "dataset, such as those of augmentations, have to come from another generator "
        "than a sampler that draws during the epoch."
    )
    workers.note_of_all(error)
    raise error


def mention_reads(workers: Workers, values: Sequence[Tree]) -> Callable[[], None]:
    """Lets the next exchange compare the batches among some values.

    It returns a function that refuses differing batches.

    The function is called after the exchange.

    Raises:
        RuntimeError: By the function, in all workers, if they have read different rows.
    """
    reads = reads_among(values)
    workers.differing.discard(ROWS)  # of an exchange that has failed otherwise
    if reads:
        workers.mention(ROWS, [tuple(one) for one in reads])

    def refuse_others() -> None:
        if ROWS in workers.differing:
            workers.differing.discard(ROWS)
            refuse_other_reads(workers, reads)

    return refuse_others
