"""Writes on tensors for which torch's version counter does not go up.

Such writes come through `.data`, from NumPy, from another process, or from a kernel that does not count its writes. The
copies of a tensor have to be brought up to date after such a write, too. So the library compares CPU memory with what
it was before: that of small tensors bit by bit, that of large tensors by checksums. To compare the memory of an
accelerator, it would have to wait for the accelerator. There, a tensor counts as written if the program has read its
`.data` since, or still holds a `.data` that it has read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import Any, final

import torch

from torchstrategy._core.torch_internals import num_users

_SMALL = 1 << 16  # bytes: of tensors up to this size, the library keeps a copy of the memory
_COLUMNS = 1021  # a prime, so that the checksums also change if two rows of a usual length change places


@final
class UncountedWrites:
    """Finds out whether some tensors were written without a change of their version.

    Args:
        tensors: The tensors, by keys that the caller chooses. Their memory must stay where it is.
        is_exact: Whether a large tensor counts as written only if it was. If not, a large tensor may count as written
            without having been; but then no checksum is computed for a tensor that is written between all calls.
    """

    def __init__(self, tensors: dict[int, torch.Tensor], is_exact: bool = False) -> None:
        dense = {key: t for key, t in tensors.items() if t.layout is torch.strided}
        here = {key: _bits(tensor) for key, tensor in dense.items() if tensor.is_cpu}
        self._small = {key: bits for key, bits in here.items() if bits.nbytes <= _SMALL}
        self._kept = self._bits_of_small()
        self._large = {key: bits for key, bits in here.items() if bits.nbytes > _SMALL}
        self._is_exact = is_exact
        # The checksums of the large tensors, as far as they are known:
        self._sums = {key: _sums(bits) for key, bits in self._large.items()} if is_exact else {}
        self._reads = DataReads({key: tensor for key, tensor in dense.items() if not tensor.is_cpu})
        self._never_known = tensors.keys() - dense.keys()
        self._never_known |= {key for key, tensor in dense.items() if tensor.is_inference() and not tensor.is_cpu}

    def take(self, counted: Set[int]) -> set[int]:
        """The tensors that were, or may have been, written since the last call.

        Args:
            counted: The tensors whose version has changed, of which the caller knows that they were written. Unless
                `is_exact`, no checksum of a large one of them is computed now, and it counts as written at the next
                call.
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
        """Says that the caller itself has written the tensors: later calls compare with the tensors as they are now."""
        self._kept = self._bits_of_small()
        if self._is_exact:
            self._sums = {key: _sums(bits) for key, bits in self._large.items()}
        self._reads.take()

    def _bits_of_small(self) -> torch.Tensor:
        return torch.cat(list(self._small.values())) if self._small else torch.empty(0, dtype=torch.uint8, device="cpu")


@final
class DataReads:
    """Records of which tensors on accelerators a program has read the `.data`, on which it can write uncounted.

    Args:
        tensors: The tensors, by keys that the caller chooses. They are not kept alive, but their memory is.
    """

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        self._storages = {key: tensor.untyped_storage() for key, tensor in tensors.items()}
        self._keys = {storage._cdata for storage in self._storages.values()}
        self._read = self._keys & _given.keys()  # the program has read these before, and still holds the `.data`
        given = {storage: len(_given.get(storage, ())) for storage in self._keys}
        self._users = {key: num_users(s) - given[s._cdata] for key, s in self._storages.items()}
        if tensors:
            listen_to_data()
            _listeners.add(self)

    def note(self, storage: int) -> None:
        """Records that the program has read the `.data` of a tensor of this storage. Called on any thread."""
        if storage in self._keys:
            self._read.add(storage)

    def take(self) -> set[int]:
        """The tensors that may have been written: their `.data` was read, or the program still holds it."""
        if not self._read:
            return set()
        found, self._read = {key for key, s in self._storages.items() if s._cdata in self._read}, set()
        for storage, users in ((self._storages[key], self._users[key]) for key in found):
            if storage._cdata in _given or num_users(storage) > users:
                self._read.add(storage._cdata)
        return found


def writes_on(tensors: Sequence[torch.Tensor]) -> UncountedWrites:
    """Finds out which of some tensors a step writes, by position. Sparse tensors are left to torch's own counter."""
    return UncountedWrites({i: t for i, t in enumerate(tensors) if t.layout is torch.strided}, is_exact=True)


_listeners: weakref.WeakSet[DataReads] = weakref.WeakSet()
_is_listening: list[bool] = []
_given: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}  # by storage: the tensors that reading `.data` returned


def listen_to_data() -> None:
    """Replaces the property `torch.Tensor.data` by one that records each read of a tensor on an accelerator.

    torch has no hook for this.
    """
    if _is_listening:
        return
    _is_listening.append(True)
    plain: Any = torch.Tensor.data

    def data(tensor: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = plain.__get__(tensor)
        if not tensor.is_cpu and tensor.layout is torch.strided:
            with suppress(NotImplementedError, RuntimeError, ValueError):  # a tensor without a storage
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
    """The memory from the first element of a tensor to its last, as bytes."""
    size = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    bits = torch.empty(0, dtype=torch.uint8, device="cpu")
    begin = tensor.storage_offset() * tensor.element_size()
    length = size * tensor.element_size() if tensor.numel() else 0
    return bits.set_(tensor.untyped_storage(), begin, (length,), (1,))


def _sums(bits: torch.Tensor) -> torch.Tensor:
    """Checksums of some memory: so many sums of its words that changed or exchanged values change one of them."""
    begin = -bits.data_ptr() % 8
    words = bits[begin : begin + (bits.numel() - begin) // 8 * 8].view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    columns = words[:whole].view(-1, _COLUMNS).sum(0)
    rest = torch.cat([words[whole:].view(torch.uint8), bits[:begin], bits[begin + words.nbytes :]])
    return torch.cat([columns.view(torch.uint8), rest])
