"""Warnings of a run: that its numbers may not be those of one device.

*Batches that were not distributed.* Every replica computes with all rows. An argument
that is the same tensor in all replicas is nothing unusual: a mask, noise, a table of
weights. So the warning comes only if three conditions hold. No argument is a
distributed value, and one is a tensor with rows. No replica asked for its id, by which
it could choose rows of its own. And the run trained: parameters got gradients, or were
updated.

*Buffers and plain attributes that replicas wrote differently*, such as a queue, a
codebook or a moving average. Only the numbers of the first replica are kept. To compare
them with those of other accelerators, the program has to wait for the accelerators. So
they are compared after the first run that wrote them, the second, the fourth, the
eighth etc.

*Writes on tensors that all replicas share.* A tensor that is neither in a module of the
strategy nor in a variable is one tensor for all replicas: a total, a moving average in
a dict, a teacher that was made outside of the scope. If it is a count, or each replica
writes rows of its own, the writes are right. A mean or a decay is applied once by each
replica, which is wrong. This file cannot tell them apart, so it warns.

Such writes are known by the versions that torch counts. These are read whenever a
replica stops to wait. If replicas run one at a time, a new version tells which replica
has written. On several devices they run one at a time in the first run of a step that
reaches such a tensor, and in the run after one in which it was not clear who wrote.

Writes through `.data` and NumPy count no version. So in the first run, the second, the
fourth, the eighth and so on, the numbers in the memory of the CPU are read as well. On
accelerators the program would have to wait for the device to read them: there such
writes are not noticed. Modules of no strategy are looked into in the same runs only,
since this costs much, and a module writes in every run or in none.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, final

import numpy as np
import torch
from torch import nn

from torchstrategy._base.distributed_values import DistributedValues
from torchstrategy._base.errors import (
    ReplicaBufferWarning,
    SharedWriteWarning,
    UndistributedBatchWarning,
    warn,
)
from torchstrategy._base.marks import checksum, mark_of, versions_of
from torchstrategy._base.memory import extent, memory_between_ends
from torchstrategy._base.objects.module_traversal import held_plainly
from torchstrategy._base.torch_internals import raw_grads, unseen_by_function_modes
from torchstrategy._base.tree import leaves_within
from torchstrategy._copies.references.step_references import StepReferences, TensorPlace
from torchstrategy._group.group import Watch
from torchstrategy._run.metrics import is_metric
from torchstrategy._variables.variable import is_variable

Named = tuple[str, torch.Tensor]  # a tensor with the name by which the step reaches it
# So many bytes of a tensor are read at most: a mean or a decay changes all, so it shows
# in these.
_READ = 2**24
_SHOWN = 3  # at the most so many names are in a message
# What `np.isclose` compares.
_NUMERIC = (bool, int, float, complex, np.number, np.ndarray)
# Each replica of a normalisation layer counts the same steps.
_COUNTER = "num_batches_tracked"


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


# Batches that were not distributed


def has_plain_rows(leaves: Sequence[Any]) -> bool:
    """Whether a leaf of the arguments has rows, and none is a distributed value."""
    has_rows = False
    for _, leaf in leaves_within(list(leaves), ""):
        if is_variable(leaf):
            continue
        if isinstance(leaf, DistributedValues):
            return False
        has_rows |= isinstance(leaf, _ARRAYS) and leaf.ndim > 0 and len(leaf) > 1
    return has_rows


def mark_training(parameters: Sequence[torch.Tensor]) -> list[object]:
    """A list that differs after parameters got gradients or an update.

    Items differ one by one.
    """
    return [*versions_of(parameters), *map(mark_of, raw_grads(parameters))]


def warn_of_plain_batch(num_replicas: int) -> None:
    """Warns at the user's line."""
    warn(_NOT_DISTRIBUTED.format(count=num_replicas), UndistributedBatchWarning)


# Stands for this warning among those that users have got.
PLAIN_BATCH = (0, "a plain batch")
_ARRAYS = (torch.Tensor, np.ndarray)
_NOT_DISTRIBUTED = (
    "This run trained on tensors that were not distributed: each of the {count} "
    "replicas computed with all rows, which costs {count} times the work, and counts "
    "each row {count} times where results are added up. Distribute the batches, and "
    "run the step with what that yields: for batch in "
    "strategy.experimental_distribute_dataset(loader): strategy.run(step, "
    "args=(batch,)). If each replica is to have all rows: "
    'warnings.filterwarnings("ignore", '
    "category=torchstrategy.UndistributedBatchWarning)."
)


# Buffers and plain attributes that replicas wrote differently


@final
class LostNumbers:
    """Remembers which buffers and attributes differed between replicas."""

    def __init__(self) -> None:
        # Each is known by the id of its module or container, and by its name.
        self._runs: Counter[tuple[int, str]] = Counter()  # how many runs wrote it
        self.differing: list[tuple[int, str]] = []  # those that are to be warned of

    def look(
        self, place: int, name: str, kept: object, others: Sequence[object]
    ) -> None:
        """Compares what is kept, or the step made, with what other replicas wrote.

        Args:
            place: The id of the module or container.
            name: What the warning is to call it.
            kept: A tensor, an array or a number.
            others: The same of other replicas.
        """
        if others and not name.endswith(_COUNTER):
            self._runs[place, name] += 1
            is_due = _is_power_of_two(self._runs[place, name])
            if is_due and not all(_are_close(kept, other) for other in others):
                self.differing.append((place, name))

    def warn(self, warned: set[tuple[int, str]]) -> None:
        """Warns of what differed, unless `warned` has that users were warned of it."""
        for key in self.differing:
            if key not in warned:
                warned.add(key)
                warn(_DIFFERS.format(name=key[1]), ReplicaBufferWarning)
        self.differing.clear()


def _are_close(one: Any, other: Any) -> bool:
    """Whether two values hold the same numbers, but for rounding on devices."""
    if isinstance(one, _NUMERIC) and isinstance(other, _NUMERIC):
        return np.shape(one) == np.shape(other) and bool(
            np.all(np.isclose(one, other, equal_nan=True))
        )
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return not isinstance(one, (torch.Tensor, *_NUMERIC)) and not isinstance(
            other, (torch.Tensor, *_NUMERIC)
        )
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    other = other.to(one.device)
    # `torch.allclose` takes neither sparse nor nested tensors, and a warning that may
    # be wrong is worse than none.
    if (
        one.layout is not torch.strided
        or other.layout is not torch.strided
        or one.is_nested
    ):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    # Torch does not compare tensors of float8.
    if one.element_size() == 1:
        one, other = one.float(), other.float()
    return torch.allclose(one, other, equal_nan=True)


_DIFFERS = (
    "The {name} has other numbers in each replica after this run: each wrote it from "
    "its own rows. Those of the first replica are kept, and what the others wrote is "
    "lost. Write it from the rows of all replicas: in forward, rows = "
    "torchstrategy.get_replica_context().all_gather(rows, axis=0) before it is "
    "written, or all_reduce('sum', ...) for a sum or a count. Or write it in a merge "
    "function; or keep it in a torchstrategy.Variable. For statistics of a batch there "
    "is torchstrategy.nn.SyncBatchNorm. If the first replica's will do: "
    'warnings.filterwarnings("ignore", category=torchstrategy.ReplicaBufferWarning).'
)


# Writes on tensors that all replicas share


@final
class SharedTensors:
    """What a strategy remembers of tensors that its steps reach.

    Replicas have no copies of them.
    """

    def __init__(self) -> None:
        self._runs: Counter[str] = Counter()  # by name: how many runs have reached it
        # Names of tensors on which somebody wrote, nobody knows which replica.
        self.unclear: set[str] = set()
        # By id and name: to keep the tensors themselves would keep their memory.
        self.warned: set[tuple[int, str]] = set()

    def watch(
        self, named: StepReferences, own: Container[int], known: Collection[int]
    ) -> SharedWrites | None:
        """Makes what watches tensors for the length of a run; None if there are none.

        See `shared_tensors`.
        """
        roots = {
            _root_name(name)
            for name, _ in (*named.others, *named.tensors, *named.modules)
        }
        self._runs.update(roots)
        # Tensors and modules below these names are looked at closely in this run.
        due = {
            root
            for root in roots
            if _is_power_of_two(self._runs[root]) or root in self.unclear
        }
        counted: list[Named] = []
        read: list[Named] = []
        places = [
            one for one in named.places if (id(one.holder), one.name) not in self.warned
        ]
        looked_at = {
            _root_name(one.name) for one in places if _root_name(one.name) in due
        }
        for name, tensor in shared_tensors(
            named, own, known, lambda name: _root_name(name) in due
        ):
            root = _root_name(name)
            if (id(tensor), root) in self.warned:
                continue
            counted.append((name, tensor))
            if root in due:
                read.append((name, tensor))
                looked_at.add(root)
        if not counted and not places:
            return None
        # One after the other, so that it is clear who wrote.
        take_turns = any(
            self._runs[root] == 1 or root in self.unclear for root in looked_at
        )
        return SharedWrites(self, counted, read, places, take_turns)


@final
class SharedWrites(Watch):
    """Notes which replicas have written on which of some tensors, in one run.

    Args:
        known: What the strategy remembers of tensors.
        tensors: The tensors whose versions are read.
        read: Those of them whose numbers are read as well.
        places: Where a step can put another tensor in the place of one.
        take_turns: Whether replicas should run one at a time.
    """

    def __init__(
        self,
        known: SharedTensors,
        tensors: Sequence[Named],
        read: Sequence[Named],
        places: Sequence[TensorPlace],
        take_turns: bool,
    ) -> None:
        self.take_turns = take_turns
        self._known = known
        self._pairs = [*tensors, *read]
        self._counted = [tensor for _, tensor in tensors]
        self._read = [tensor for _, tensor in read]
        self._places = places
        self._marks: list[int] = []
        self._held: list[object] = []  # what was at each place at the last look
        self._writers: dict[int, _Changes] = {}  # by the id of a tensor
        self._assigners: dict[int, _Changes] = {}  # by the id of a place

    def look(self, running: Collection[int]) -> None:
        """Notes tensors that changed since the last look: these replicas wrote them.

        With no replicas, nobody did.
        """
        # On the thread that called `run`, whose own function modes must not see these
        # operations.
        with unseen_by_function_modes():
            marks = [*versions_of(self._counted), *map(_checksum, self._read)]
        if running and marks != self._marks:
            who = frozenset(running)
            for (name, tensor), before, now in zip(
                self._pairs, self._marks, marks, strict=True
            ):
                if before != now:
                    changes = _Changes(name, (id(tensor), _root_name(name)))
                    self._writers.setdefault(id(tensor), changes).made_by.append(who)
        self._marks = marks
        held = [place.read() for place in self._places]
        if running:
            for place, earlier, later in zip(
                self._places, self._held, held, strict=True
            ):
                if earlier is not later:
                    changes = _Changes(place.name, (id(place.holder), place.name))
                    self._assigners.setdefault(id(place), changes).made_by.append(
                        frozenset(running)
                    )
        self._held = held

    def begin_turn(self, replica: int) -> None:
        """Nothing: `look` tells which replicas have run."""

    def warn(self) -> None:
        """Warns of tensors that several replicas wrote or replaced, once for each."""
        found = [*self._writers.values(), *self._assigners.values()]
        # Several replicas ran between two looks. In the next run they take turns, and
        # it becomes clear.
        unclear = [changes for changes in found if not changes.are_clear()]
        self._known.unclear.difference_update(
            _root_name(changes.name) for changes in found
        )
        self._known.unclear.update(_root_name(changes.name) for changes in unclear)
        self._warn_of(self._writers.values(), _BY_SEVERAL)
        self._warn_of(self._assigners.values(), _ASSIGNED_BY_SEVERAL)

    def _warn_of(self, found: Iterable[_Changes], message: str) -> None:
        by_several: dict[str, int] = {}
        for changes in found:
            count = changes.num_replicas()
            if changes.are_clear() and count > 1:
                self._known.warned.add(changes.key)
                by_several[changes.name] = count
        if by_several:
            names = [f"`{name}`" for name in by_several]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            shown, most = ", ".join(names[:_SHOWN]) + more, max(by_several.values())
            warn(message.format(names=shown, count=most), SharedWriteWarning)


@final
class _Changes:
    """Which replicas may have made each change of a tensor, or of what is at a place.

    Args:
        name: The path by which the step reaches the tensor.
        key: What a strategy knows it by among those of which it has warned.
    """

    def __init__(self, name: str, key: tuple[int, str]) -> None:
        self.name = name
        self.key = key
        self.made_by: list[frozenset[int]] = []

    def are_clear(self) -> bool:
        """Whether it is known which replica made each change."""
        return all(len(who) == 1 for who in self.made_by)

    def num_replicas(self) -> int:
        return len(frozenset().union(*self.made_by))


def shared_tensors(
    named: StepReferences,
    own: Container[int],
    known: Collection[int],
    is_due: Callable[[str], bool] = lambda name: True,
) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a step reaches and replicas have no copies of, by path.

    Args:
        named: What the step names.
        own: The ids of the modules of which replicas have copies.
        known: The ids of the parameters of which replicas have copies.
        is_due: Whether a module of this name is looked into.
    """
    pairs = [*named.others, *named.tensors]
    for name, module in named.modules:
        if id(module) in own or not is_due(name):
            continue
        for path, part in module.named_modules(prefix=name):
            if id(part) not in own and not is_metric(vars(part)):
                pairs += _tensors_of(path, part)
    # Reversed, so that each tensor is known by the first of its names.
    found = {id(tensor): (name, tensor) for name, tensor in reversed(pairs)}
    return [
        pair
        for key, pair in reversed(found.items())
        if key not in known and not is_variable(pair[1])
    ]


def _tensors_of(path: str, module: nn.Module) -> Iterator[Named]:
    """The tensors that a module holds itself, each with its path."""
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                yield f"{path}.{name}", tensor
    for where, held in held_plainly(module):
        if isinstance(held, torch.Tensor):
            yield path + where, held


@functools.lru_cache(maxsize=4096)
def _root_name(name: str) -> str:
    """The name with which a path begins.

    The objects below it may change from run to run, as the items of a list do.
    """
    return name.partition("[")[0].partition(".")[0]


def _checksum(tensor: torch.Tensor) -> int:
    """A checksum of the numbers of a tensor in the CPU's memory.

    It is 0 unless they fill one piece without gaps.
    """
    is_plain = (
        type(tensor) in _PLAIN_TENSORS
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )
    if not is_plain or tensor.device.type != "cpu":
        return 0
    start, stop = extent(tensor)
    # Bytes in gaps between the numbers may belong to another tensor.
    if start == stop or stop - start != tensor.nbytes:
        return 0
    return checksum(memory_between_ends(tensor), most=_READ)


_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_BY_SEVERAL = (
    "In one run, {count} replicas wrote in place on {names}: a tensor that is neither "
    "in a module of the strategy nor in a torchstrategy.Variable is one for all "
    "replicas. That is right for a count (hits.add_(hits_in_these_rows)) and for rows "
    "of each replica's own (bank[indices] = outputs). It is wrong for a mean, a moving "
    "average or a decay, which plain PyTorch writes once. For those, return the value "
    "from the step and write after strategy.run; or keep it in a "
    "torchstrategy.Variable; or write in a merge function: "
    "get_replica_context().merge_call(lambda "
    'strategy: ...). If it is right: warnings.filterwarnings("ignore", '
    "category=torchstrategy.SharedWriteWarning)."
)
_ASSIGNED_BY_SEVERAL = (
    "In one run, {count} replicas assigned another tensor to {names}: what is neither "
    "in a module of the strategy nor in a torchstrategy.Variable is one for all "
    "replicas. A sum (total = total + loss) gets what each replica adds. A mean, a "
    "moving average or a decay is applied {count} times, where plain PyTorch applies "
    "it once. If the value does not depend on the one before, the last replica's is "
    "kept. Return the value from the step and assign after strategy.run; or keep it in "
    "a torchstrategy.Variable; or assign in a merge function: "
    "get_replica_context().merge_call(lambda strategy: ...). If it is right: "
    'warnings.filterwarnings("ignore", category=torchstrategy.SharedWriteWarning).'
)
