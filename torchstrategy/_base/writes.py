"""Which of some tensors were written since the last look, in whatever way.

Torch's version counters see most writes, and a run checks all tensors several times. So
there is one list for the versions of all tensors, one for their addresses and one for
their layouts (`marks.Look`). Comparing two such lists needs no Python call for each
tensor.

Some writes change no version: those through `.data`, from NumPy, from another process,
or from a kernel that does not count its writes. The copies of a tensor have to be
brought up to date after such a write, too. So the library compares CPU memory with what
it was before: that of small tensors bit by bit, that of large tensors by checksums. To
compare the memory of an accelerator, it would have to wait for the accelerator. There,
a tensor counts as written if the program has read its `.data` since, or still holds a
`.data` that it has read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence, Set
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base.marks import differing, look_at, version_of
from torchstrategy._base.memory import (
    has_lost_memory,
    memory_between_ends,
    sizes_of,
    write_values,
)
from torchstrategy._base.torch_internals import (
    are_dense,
    keeping_version,
    num_users,
    pointers,
    versions,
)
from torchstrategy._base.weak_references import living

_OUTDATED = -1  # takes the place of a version: the copies do not agree with the tensor
# Bytes: of tensors up to this size, the library keeps a copy of the memory.
_SMALL = 1 << 16
# Primes: the checksums of a tensor have a number of columns that divides no stride.
_COLUMNS = (1021, 1019, 1013)


class Writes(NamedTuple):
    """The positions of tensors that were, or may have been, written since a look."""

    all: list[int]
    moved: set[int]  # those whose address, shape, strides or dtype has changed
    uncounted: set[int]  # those whose version torch has not changed
    unsure: set[int]  # those of the uncounted that may hold what they held before


@final
class TrackedTensors:
    """Some tensors of the user's.

    Args:
        held: The tensors that are part of a module.
        loose: The tensors that are not part of a module. They are not kept alive.
        running: The positions of running statistics. Torch's kernels write these
            without changing their versions.
    """

    def __init__(
        self,
        held: Iterable[torch.Tensor],
        loose: Iterable[torch.Tensor] = (),
        running: Set[int] = frozenset(),
    ) -> None:
        self._held, self._loose = list(held), list(map(weakref.ref, loose))
        self.running = running
        self._versions: list[int] = []
        # The addresses of the tensors; another list when one has moved.
        self.pointers: list[int] = []
        self._layouts: list[list[object]] = []
        # Keeps the memory, so that no other tensor can get one of the addresses.
        self._memory: list[object] = []
        self._watched: set[int] = set()
        self._uncounted = UncountedWrites({})
        self._noted: set[int] = set()
        self.take_changes()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors themselves."""
        if not self._loose:
            return self._held
        loose = living(self._loose)
        assert len(loose) == len(self._loose), (
            "copies are given up when a variable dies"
        )
        return [*self._held, *loose]

    def watch(self, indices: Iterable[int] | None = None) -> None:
        """Starts to look for uncounted writes on tensors that replicas have copies of.

        The copies have memory of their own. `None` stands for all tensors.
        """
        self._watched = set(range(len(self.tensors)) if indices is None else indices)
        self._uncounted = UncountedWrites(
            {index: self.tensors[index] for index in self._watched}
        )

    def written(self) -> list[int]:
        """The indices of the tensors whose version or address has changed.

        It does not check whether a tensor has another shape or other strides over the
        same memory.
        """
        tensors = self.tensors
        return differing(
            (versions(tensors), pointers(tensors)), (self._versions, self.pointers)
        )

    def take_changes(self, counts_all: bool = False) -> Writes:
        """The tensors that have changed since the copies agreed with them.

        The caller brings the copies up to date: later calls compare with the tensors as
        they are now.

        Args:
            counts_all: Whether torch has counted all writes since the last call. Then a
                large tensor of which nobody knows whether it was written does not count
                as written.
        """
        tensors = self.tensors
        count, where, how = look_at(tensors)
        moved = set(differing((where, *how), (self.pointers, *self._layouts)))
        counted = set(differing((count,), (self._versions,)))
        uncounted, self._noted = self._noted, set()
        unsure: set[int] = set()
        self._versions = count
        if moved:
            self.pointers, self._layouts = where, how
            self._memory = [
                t.untyped_storage() if t.layout is torch.strided else None
                for t in tensors
            ]
            # All watched tensors count as written: to look at the old memory of those
            # that did not move is not worth its risk.
            unsure = self._watched - moved
            self.watch(self._watched)
        elif self._watched:
            # What was noted is known to be written, like what torch has counted.
            changed, unsure = self._uncounted.take(counted | uncounted, counts_all)
            uncounted |= changed
        if uncounted or unsure:
            unsure -= uncounted | counted
            uncounted = (uncounted | unsure) - counted - moved
        return Writes(sorted(counted | moved | uncounted), moved, uncounted, unsure)

    def note_agreement(self, indices: Iterable[int]) -> None:
        """Says that the copies agree with some of the tensors."""
        tensors = self.tensors
        for index in indices:
            self._versions[index] = version_of(tensors[index])

    def note_uncounted(self, indices: Iterable[int]) -> None:
        """Says that some of the tensors were, or may have been, written.

        Their versions have not changed.
        """
        self._noted.update(indices)

    def note_outdated(self, indices: Iterable[int]) -> None:
        """Says that copies do not agree with some tensors: these count as written."""
        for index in indices:
            self._versions[index] = _OUTDATED

    def replace(self, index: int, tensor: torch.Tensor) -> None:
        """Takes another tensor, one that is part of a module, in the place of one.

        The copies do not agree with it.
        """
        self._held[index] = tensor
        self.note_outdated([index])

    def fits(self, index: int, value: torch.Tensor) -> bool:
        """Whether one of the tensors has the shape and dtype of a value."""
        return (self._held[index].shape, self._held[index].dtype) == (
            value.shape,
            value.dtype,
        )

    def take(self, index: int, value: torch.Tensor) -> None:
        """Writes one of the tensors. After this, the copies do not agree with it."""
        write_value(self.tensors[index], value, is_counted=index not in self.running)
        self.note_outdated([index])


# Note [Writes that count, and writes that do not]
# torch refuses a backward if a tensor that its forward has saved has got another
# version since. The backward of a replica is to be refused where that of the user's own
# tensors would be.
# - What torch has counted on the user's tensor is counted on the copies, too.
# - What was perhaps not written is not counted: the copies get the values that they
#   have. So it is with a large tensor whose memory nobody has compared, and with one on
#   an accelerator whose `.data` somebody holds. A copy of a buffer or a constant in the
#   memory of the CPU is compared, and written only if it differs. Parameters are not:
#   they are unsure after each update, and to compare them takes longer than to write
#   them.
# - What was written in a run, as by a merge function through `.data`, is not counted,
#   either. In plain PyTorch, a backward after it computes with the new values, and so
#   it does in replicas.
# - What was written between runs through `.data` is counted on the copies. A backward
#   of an earlier run is refused: it would compute with the new values only if another
#   run had begun meanwhile.
# - torch's kernels write running statistics without changing their version, so that an
#   earlier forward, which has saved them, may still have its backward. The library does
#   the same.
def write_value(
    buffer: torch.Tensor, value: torch.Tensor, is_counted: bool = True
) -> None:
    """Writes a buffer, or a copy of one.

    See Note [Writes that count, and writes that do not].
    """
    # An inference tensor counts no writes.
    with (
        nullcontext()
        if is_counted or buffer.is_inference()
        else keeping_version(buffer)
    ):
        write_values(buffer, value.detach())


def can_compare(copied: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether a copy can be compared with the original.

    The comparison is bit by bit, and does not wait for an accelerator.
    """
    if not (copied.is_cpu and original.is_cpu and are_dense((copied, original))):
        return False
    return look_at([copied]).layouts == look_at([original]).layouts


def has_bits_of(copied: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether a copy can be compared with the original, and has the same bits."""
    if not can_compare(copied, original):
        return False
    # Bytes are compared: as numbers, 0.0 and -0.0 would be equal.
    one, other = memory_between_ends(copied), memory_between_ends(original)
    # Words are compared faster.
    whole = len(one) // 8 * 8 if one.data_ptr() % 8 == other.data_ptr() % 8 == 0 else 0
    are_same_words = torch.equal(
        one[:whole].view(torch.int64), other[:whole].view(torch.int64)
    )
    return are_same_words and torch.equal(one[whole:], other[whole:])


def bring_value(
    copied: torch.Tensor,
    original: torch.Tensor,
    is_unsure: bool,
    is_running: bool = False,
) -> None:
    """Writes a copy of a buffer, or of a constant.

    `is_unsure`: it may agree already.
    """
    if has_lost_memory(original):  # it has no values now
        return
    if not is_unsure or not has_bits_of(copied, original):
        is_counted = not is_unsure or can_compare(copied, original)
        write_value(copied, original, is_counted and not is_running)


# Writes that torch does not count


class _Large(NamedTuple):
    """The memory of a large tensor, as checksums are made of it."""

    bits: torch.Tensor
    num_columns: int


@final
class UncountedWrites:
    """Finds out whether some tensors were written without a change of their version.

    Args:
        tensors: The tensors, by keys that the caller chooses. Their memory must stay
            where it is. Of a tensor without memory, and from when its memory is taken
            away, no write is found.
        is_exact: About large tensors on the CPU. True: exact, with a checksum at each
            call. False: cheaper. A tensor whose version has changed also counts as
            written at the next call, which a step with an optimizer makes once for each
            change; and if nothing is counted there, at the one after it, which makes a
            checksum.
    """

    def __init__(
        self, tensors: dict[int, torch.Tensor], is_exact: bool = False
    ) -> None:
        dense = {key: t for key, t in tensors.items() if t.layout is torch.strided}
        here = {
            key: memory_between_ends(tensor)
            for key, tensor in dense.items()
            if tensor.is_cpu
        }
        self._here = here
        self._storages = [bits.untyped_storage() for bits in here.values()]
        self._sizes = sizes_of(self._storages)
        self._small = {key: bits for key, bits in here.items() if bits.nbytes <= _SMALL}
        self._kept = self._bits_of_small()
        large = {key: bits for key, bits in here.items() if bits.nbytes > _SMALL}
        self._large = {
            key: _Large(bits, _count_columns(dense[key])) for key, bits in large.items()
        }
        self._is_exact = is_exact
        # The checksums of the large tensors, as far as they are known; None: the next
        # call makes one.
        self._sums: dict[int, torch.Tensor | None] = {}
        if is_exact:
            self._sums.update(
                (key, _sum_columns(one)) for key, one in self._large.items()
            )
        self._reads = DataReads(
            {key: tensor for key, tensor in dense.items() if not tensor.is_cpu}
        )
        self._never_known = tensors.keys() - dense.keys()
        self._never_known |= {
            key
            for key, tensor in dense.items()
            if tensor.is_inference() and not tensor.is_cpu
        }

    def take(
        self, counted: Set[int], counts_all: bool = False
    ) -> tuple[set[int], set[int]]:
        """The tensors that were, or may have been, written since the last call.

        Args:
            counted: The tensors whose version has changed, of which the caller knows
                that they were written.
            counts_all: Whether all writes since the last call were counted.
        """
        if sizes_of(self._storages) != self._sizes:
            self._forget_lost()
        written: set[int] = set()
        unsure = set() if counts_all else self._never_known | self._reads.take()
        for key, large in self._large.items():
            if counts_all and key not in counted:
                continue
            is_at_rest, before = key in self._sums, self._sums.pop(key, None)
            if key not in counted or self._is_exact:
                self._sums[key] = sums = (
                    _sum_columns(large) if is_at_rest or self._is_exact else None
                )
                if key in counted:
                    continue
                if before is None or sums is None:
                    unsure.add(key)
                elif not torch.equal(before, sums):
                    written.add(key)
        now, before = self._bits_of_small(), self._kept
        if not torch.equal(now, before):
            sizes = [bits.numel() for bits in self._small.values()]
            pairs = zip(self._small, now.split(sizes), before.split(sizes), strict=True)
            written.update(
                key for key, one, other in pairs if not torch.equal(one, other)
            )
            self._kept = now
        return written, unsure

    def _forget_lost(self) -> None:
        """Forgets the tensors whose memory was taken away.

        Reading there would crash the process.
        """
        self._sizes = sizes_of(self._storages)
        lost = {key for key, bits in self._here.items() if has_lost_memory(bits)}
        kept = zip(
            self._small,
            self._kept.split([bits.numel() for bits in self._small.values()]),
            strict=True,
        )
        self._kept = _concatenate([bits for key, bits in kept if key not in lost])
        for key in lost:
            for known in (self._here, self._small, self._large, self._sums):
                known.pop(key, None)

    def _bits_of_small(self) -> torch.Tensor:
        return _concatenate(list(self._small.values()))


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    return (
        torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


@final
class DataReads:
    """Records of which tensors on accelerators a program has read the `.data`.

    The program can write on `.data`, and no version counts the write.

    Args:
        tensors: The tensors, by keys that the caller chooses. They are not kept alive,
            but their memory is.
    """

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        self._storages = {
            key: tensor.untyped_storage() for key, tensor in tensors.items()
        }
        self._keys = {storage._cdata for storage in self._storages.values()}
        # The program has read these before, and still holds the `.data`.
        self._read = self._keys & _given.keys()
        given = {storage: len(_given.get(storage, ())) for storage in self._keys}
        self._users = {
            key: num_users(s) - given[s._cdata] for key, s in self._storages.items()
        }
        if tensors:
            listen_to_data()
            _listeners[id(self)] = self

    def note(self, storage: int) -> None:
        """Records that the program has read the `.data` of a tensor of this storage.

        Called on any thread.
        """
        if storage in self._keys:
            self._read.add(storage)

    def take(self) -> set[int]:
        """The tensors that may have been written.

        The program has read their `.data`, or still holds it.
        """
        if not self._read:
            return set()
        # First the set is exchanged: another thread may note a read meanwhile.
        read, self._read = self._read, set()
        found = {key for key, s in self._storages.items() if s._cdata in read}
        for storage, users in (
            (self._storages[key], self._users[key]) for key in found
        ):
            if storage._cdata in _given or num_users(storage) > users:
                self._read.add(storage._cdata)
        return found


@final
class StepWrites:
    """Finds out on which of a replica's tensors a step writes.

    It looks from its creation on, or from the last call of `note`.

    Args:
        tensors: The tensors. Sparse tensors are left to torch's own counter.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._versions: list[int] = []
        self._pointers: list[int] = []
        self._uncounted = UncountedWrites({})
        self.note()

    def note(self) -> None:
        """Says that what was written until now is known."""
        before, self._versions, self._pointers = (
            self._pointers,
            versions(self.tensors),
            pointers(self.tensors),
        )
        self._uncounted.take(set())
        if before != self._pointers:
            dense = {
                i: tensor
                for i, tensor in enumerate(self.tensors)
                if tensor.layout is torch.strided
            }
            self._uncounted = UncountedWrites(dense, is_exact=True)

    def is_counted(self, index: int) -> bool:
        """Whether the version of one of the tensors has changed."""
        return version_of(self.tensors[index]) != self._versions[index]

    def written(self) -> set[int]:
        """The positions of tensors that were written, or whose `.data` was replaced."""
        counted = set(
            differing(
                (versions(self.tensors), pointers(self.tensors)),
                (self._versions, self._pointers),
            )
        )
        written, unsure = self._uncounted.take(counted)
        return counted | written | unsure


# `valuerefs` makes a list at once: another thread may add a listener meanwhile.
_listeners: weakref.WeakValueDictionary[int, DataReads] = weakref.WeakValueDictionary()
# For each storage, the tensors that reading `.data` returned.
_given: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}


@functools.cache  # once in a process
def listen_to_data() -> None:
    """Makes `torch.Tensor.data` record each read of a tensor on an accelerator.

    It replaces that property by another one.

    torch has no hook for this.
    """
    plain: Any = torch.Tensor.data

    def data(tensor: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = plain.__get__(tensor)
        if not tensor.is_cpu and tensor.layout is torch.strided:
            # A tensor without a storage.
            with suppress(NotImplementedError, RuntimeError, ValueError):
                storage = tensor.untyped_storage()._cdata
                gone = functools.partial(_forget, storage, id(given))
                _given.setdefault(storage, {})[id(given)] = weakref.ref(given, gone)
                for known in _listeners.valuerefs():
                    if (listener := known()) is not None:
                        listener.note(storage)
        return given

    torch.Tensor.data = property(data, plain.__set__, doc=plain.__doc__)  # type: ignore[assignment]


def _forget(storage: int, given: int, _: object) -> None:
    tensors = _given.get(storage, {})
    tensors.pop(given, None)
    if not tensors:
        _given.pop(storage, None)


def _count_columns(tensor: torch.Tensor) -> int:
    """A number of columns that makes checksums see neighbouring rows change places."""
    steps = [stride * tensor.element_size() for stride in tensor.stride() if stride]
    return next(
        (c for c in _COLUMNS if all(step % (8 * c) for step in steps)), _COLUMNS[0]
    )


def _sum_columns(large: _Large) -> torch.Tensor:
    """Checksums of some memory: one sum for each column of its words.

    So a changed word shows, and so do two exchanged words, unless they are in one
    column.
    """
    bits, num_columns = large.bits, large.num_columns
    begin = -bits.data_ptr() % 8
    words = bits[begin : begin + (bits.numel() - begin) // 8 * 8].view(torch.int64)
    whole = words.numel() // num_columns * num_columns
    columns = words[:whole].view(-1, num_columns).sum(0)
    rest = torch.cat(
        [words[whole:].view(torch.uint8), bits[:begin], bits[begin + words.nbytes :]]
    )
    return torch.cat([columns.view(torch.uint8), rest])
