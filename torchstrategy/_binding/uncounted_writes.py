"""Writes that torch does not count: through `.data`, by NumPy, by another process, by a kernel that counts nothing.

A copy of a tensor has to be brought up to date after such a write, too. So the memory of the CPU is compared with what
it was: that of small tensors bit by bit, that of large ones by sums of their bits. The memory of an accelerator could
only be compared by waiting for the accelerator. There, a tensor counts as written if a program has asked for its
`.data` since, or still has what it was given then.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import Any, final

import torch

from torchstrategy._core.torch_internals import num_users

_SMALL = 1 << 16  # bytes: of smaller tensors the bits are kept
_COLUMNS = 1021  # a prime, so that rows of the usual lengths which change places do not go unnoticed


@final
class UncountedWrites:
    """Whether some tensors were written in a way that torch does not count.

    Args:
        tensors: The tensors, by a number of the caller's. They have to lie where they lie for as long as this is used.
        is_exact: Whether a large tensor is never taken for written that was not; else it may be, so that it costs
            nothing to look at one that was written each time.
    """

    def __init__(self, tensors: dict[int, torch.Tensor], is_exact: bool = False) -> None:
        dense = {key: t for key, t in tensors.items() if t.layout is torch.strided}
        here = {key: _bits(tensor) for key, tensor in dense.items() if tensor.is_cpu}
        self._small = {key: bits for key, bits in here.items() if bits.nbytes <= _SMALL}
        self._kept = self._bits_of_small()
        self._large = {key: bits for key, bits in here.items() if bits.nbytes > _SMALL}
        self._is_exact = is_exact
        # Of the large ones, where they are known:
        self._sums = {key: _sums(bits) for key, bits in self._large.items()} if is_exact else {}
        self._reads = DataReads({key: tensor for key, tensor in dense.items() if not tensor.is_cpu})
        self._never_known = tensors.keys() - dense.keys()
        self._never_known |= {key for key, tensor in dense.items() if tensor.is_inference() and not tensor.is_cpu}

    def take(self, counted: Set[int]) -> set[int]:
        """The tensors that were written since this was last asked, or may have been.

        Args:
            counted: Those of which torch has counted it: what they are now is looked at when this is asked again.
        """
        written = set(self._never_known) | self._reads.take()
        for key, bits in self._large.items():
            before = self._sums.pop(key, None)
            if key not in counted or self._is_exact:
                self._sums[key] = _sums(bits)
            if key not in counted and (before is None or not torch.equal(before, self._sums[key])):
                written.add(key)
        now, before = self._bits_of_small(), self._kept
        if not torch.equal(now, before):
            sizes = [bits.numel() for bits in self._small.values()]
            pairs = zip(self._small, now.split(sizes), before.split(sizes), strict=True)
            written.update(key for key, one, other in pairs if not torch.equal(one, other))
            self._kept = now
        return written

    def agree(self) -> None:
        """The tensors were written by those who ask: what they are now is what they were."""
        self._kept = self._bits_of_small()
        if self._is_exact:
            self._sums = {key: _sums(bits) for key, bits in self._large.items()}
        self._reads.take()

    def _bits_of_small(self) -> torch.Tensor:
        return torch.cat(list(self._small.values())) if self._small else torch.empty(0, dtype=torch.uint8, device="cpu")


@final
class DataReads:
    """Of which tensors on accelerators a program has asked for the `.data`, and so for memory to write uncounted.

    Args:
        tensors: The tensors, by a number of the caller's. They are not kept alive, and their memory is.
    """

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        self._storages = {key: tensor.untyped_storage() for key, tensor in tensors.items()}
        self._keys = {storage._cdata for storage in self._storages.values()}
        self._read = self._keys & _given.keys()  # somebody has asked before, and has it still
        given = {storage: len(_given.get(storage, ())) for storage in self._keys}
        self._users = {key: num_users(s) - given[s._cdata] for key, s in self._storages.items()}
        if tensors:
            listen_to_data()
            _listeners.add(self)

    def note(self, storage: int) -> None:
        """A program has asked for the `.data` of a tensor of this storage. Called on any thread."""
        if storage in self._keys:
            self._read.add(storage)

    def take(self) -> set[int]:
        """The tensors that may have been written, since they were read or what was given out is still there."""
        if not self._read:
            return set()
        found, self._read = {key for key, s in self._storages.items() if s._cdata in self._read}, set()
        for storage, users in ((self._storages[key], self._users[key]) for key in found):
            if storage._cdata in _given or num_users(storage) > users:
                self._read.add(storage._cdata)
        return found


def writes_on(tensors: Sequence[torch.Tensor]) -> UncountedWrites:
    """Which of some tensors a step writes, by their position; of what is sparse, torch's count says it."""
    return UncountedWrites({i: t for i, t in enumerate(tensors) if t.layout is torch.strided}, is_exact=True)


_listeners: weakref.WeakSet[DataReads] = weakref.WeakSet()
_is_listening: list[bool] = []
_given: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}  # by storage: the tensors that were given as `.data`


def listen_to_data() -> None:
    """Has every `tensor.data` told of, where the tensor is on an accelerator. torch has no hook for it."""
    if _is_listening:
        return
    _is_listening.append(True)
    plain: Any = torch.Tensor.data

    def data(tensor: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = plain.__get__(tensor)
        if not tensor.is_cpu and tensor.layout is torch.strided:
            with suppress(NotImplementedError, RuntimeError, ValueError):  # what has no storage, or none yet
                storage = tensor.untyped_storage()._cdata
                gone = functools.partial(_forget, storage, id(given))
                _given.setdefault(storage, {})[id(given)] = weakref.ref(given, gone)
                for listener in list(_listeners):
                    listener.note(storage)
        return given

    torch.Tensor.data = property(data, plain.__set__, doc=plain.__doc__)  # type: ignore[assignment]


def _forget(storage: int, given: int, _: object) -> None:
    tensors = _given.get(storage, {})
    tensors.pop(given, None)
    if not tensors:
        _given.pop(storage, None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first number of a tensor to its last, as bytes."""
    size = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    bits = torch.empty(0, dtype=torch.uint8, device="cpu")
    begin = tensor.storage_offset() * tensor.element_size()
    length = size * tensor.element_size() if tensor.numel() else 0
    return bits.set_(tensor.untyped_storage(), begin, (length,), (1,))


def _sums(bits: torch.Tensor) -> torch.Tensor:
    """Sums of the words of some memory, so many that a change of values or of their places is seen."""
    begin = -bits.data_ptr() % 8
    words = bits[begin : begin + (bits.numel() - begin) // 8 * 8].view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    columns = words[:whole].view(-1, _COLUMNS).sum(0)
    rest = torch.cat([words[whole:].view(torch.uint8), bits[:begin], bits[begin + words.nbytes :]])
    return torch.cat([columns.view(torch.uint8), rest])
