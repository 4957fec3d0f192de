"""Whether a tensor was written, and whether two tensors hold the same numbers.

Each question has exactly one way to ask it, which is here.

*Was it written?* Torch counts the writes on a tensor in its version. A version by
itself says nothing: whoever wants to know looks twice, and compares. `Versions` does so
for some tensors, `version_of` and `mark_of` for one, and a `Look` for tensors that may
also have moved to other memory through `.data`. Writes that torch does not count,
`writes` finds.

*Are the numbers the same?* Two processes cannot compare tensors without sending them,
and nobody should read all of a model at each step. So numbers are compared by
fingerprints; see Note [Three fingerprints].
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from itertools import chain
from operator import sub
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base.memory import (
    as_in_memory,
    bits,
    has_lost_memory,
    own_storage,
    view_at,
    wrapped_by,
    wraps_others,
)
from torchstrategy._base.torch_internals import (
    dtypes,
    pointers,
    readings,
    shapes,
    unseen_by_function_modes,
    version,
    versions,
)

# Was it written?


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place, as torch counts it.

    It is 0 for an inference tensor, which does not count its writes.
    """
    try:
        return version(tensor)
    except RuntimeError:
        if tensor.is_inference():
            return 0
        raise


def versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """The versions of some tensors; -1 in the place of None."""
    there: Any = tensors
    try:
        return versions(there)
    except TypeError:  # one of them is None
        return [-1 if tensor is None else version_of(tensor) for tensor in tensors]


def mark_of(tensor: torch.Tensor | None) -> tuple[int, int]:
    """A mark that differs once a tensor was written, or another one is in its place.

    The mark works for as long as somebody keeps it.
    """
    return id(tensor), -1 if tensor is None else version_of(tensor)


@final
class Versions:
    """The versions of some tensors when this was made, or when they were last taken.

    Args:
        tensors: The tensors. If the caller puts another tensor into this list, that
            one's version is looked at.
    """

    __slots__ = ("_known", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._known = versions(tensors)

    def take(self) -> None:
        """Looks again: what was written until now no longer counts as written."""
        self._known = versions(self.tensors)

    def have_changed(self) -> bool:
        """Whether torch has counted a write on any of the tensors since."""
        return versions(self.tensors) != self._known

    def written(self) -> list[int]:
        """The positions of the tensors on which torch has counted a write since."""
        return differing((versions(self.tensors),), (self._known,))

    def num_writes(self) -> list[int]:
        """How many writes torch has counted on each tensor since."""
        return list(map(sub, versions(self.tensors), self._known))


class Look(NamedTuple):
    """What a later look at some tensors is compared with.

    The comparison tells whether the tensors were written or have moved.
    """

    versions: list[int]
    pointers: list[int]  # their addresses
    # Lists that say how each reads its memory: its dtype, shape and strides, for
    # example.
    layouts: list[list[object]]


def look_at(tensors: Sequence[torch.Tensor]) -> Look:
    """Looks at some tensors."""
    layouts: list[list[object]] = [
        [*dtypes(tensors)],
        [*shapes(tensors)],
        *readings(tensors),
    ]
    return Look(versions(tensors), pointers(tensors), layouts)


def differing(
    columns: tuple[Sequence[object], ...], others: tuple[Sequence[object], ...]
) -> list[int]:
    """The positions at which some lists differ from earlier ones.

    Each list says another fact about the same things.
    """
    if columns == others:  # mostly; it needs no Python call for each position
        return []
    rows, known = list(zip(*columns, strict=True)), list(zip(*others, strict=False))
    return [
        index
        for index, row in enumerate(rows)
        if index >= len(known) or row != known[index]
    ]


# Are the numbers the same?


# Note [Three fingerprints]
# No one fingerprint serves all, so there are three, which differ in what they cost and
# in what they see:
# - `sum_of_bits` is computed where the tensor is, so that the host need not wait for an
#   accelerator. A sum is the same for the same numbers in another order. It is for
#   gradients, which are compared at many steps.
# - `checksum` sees the order. The host reads the numbers, or only the first of them, in
#   microseconds. It is for what is looked at again and again, where a case that is
#   missed once shows at another look.
# - `digest` sees the order, and has so many bits that no two values ever have the same
#   one. It is for a refusal that names a tensor, and for the texts and states that
#   workers compare.
# To see in one process whether memory was written, nothing has to be sent, and no
# change may be missed: there, `writes` keeps small tensors themselves, and the sums of
# columns of large ones. The gradient that a step was shown is compared by a sample of
# it (`replica_gradients`): most steps do not touch it, and those that do change all of
# it.


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's numbers, with their bits as integers, where the tensor is.

    See Note [Three fingerprints].
    """
    numbers = tensor.detach()
    if numbers.is_sparse:
        numbers = numbers.coalesce().values()  # the zeros between them add nothing
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    return (
        numbers.contiguous()
        .view(_INTEGERS[numbers.element_size()])
        .sum(dtype=torch.int64)
    )


def checksum(tensor: torch.Tensor, most: int | None = None, before: int = 0) -> int:
    """32 bits of the elements of a dense tensor, in their order.

    See Note [Three fingerprints].

    Args:
        tensor: The tensor. If it is on an accelerator, the host waits for it.
        most: How many bytes are looked at, at most. None: all.
        before: The checksum of what comes before.
    """
    return zlib.crc32(bits(tensor)[:most].cpu().numpy().data, before)


# bytes. While zlib reads more than 5 kB, another thread may take the memory away.
_PIECE = 1 << 12


def checksum_of_piece(tensor: torch.Tensor, number: int) -> int:
    """The checksum of a piece of a tensor in the CPU's memory.

    For each `number`, by turns, it takes another piece.

    Each backward takes one. The pieces of tensors with the same numbers are the same in
    every layout.

    Args:
        tensor: The tensor. If it wraps others, they have pieces by turns.
        number: From 0 on.

    Returns:
        The checksum; 0 where there is nothing to read, or where the host would have to
        wait for an accelerator.
    """
    if wraps_others(tensor):
        parts = wrapped_by(tensor)
        return (
            checksum_of_piece(parts[number % len(parts)], number // len(parts))
            if parts
            else 0
        )
    with unseen_by_function_modes():  # a subclass may say that it has another size
        storage = own_storage(tensor) if tensor.is_cpu else None
        if storage is None:
            return 0
        num_elements, size = tensor.numel(), tensor.element_size()
        in_piece = _PIECE // size
        begin = number % -(-num_elements // in_piece) * in_piece
        count = min(in_piece, num_elements - begin)
        if not tensor.is_contiguous():
            return _checksum_of_elements(tensor, begin, begin + count)
        # A sum, by torch or by NumPy, takes three times as long here: its code is in no
        # cache of the processor.
        address = storage.data_ptr() + (int(tensor.storage_offset()) + begin) * size
        return zlib.crc32(view_at(address, count * size))


def _checksum_of_elements(tensor: torch.Tensor, begin: int, end: int) -> int:
    """The checksum of some elements in the order of the tensor, not of its memory."""
    numbers = as_in_memory(tensor)
    per_element = numbers.numel() // tensor.numel()  # a complex number is two
    positions = torch.arange(begin * per_element, end * per_element, device="cpu")
    return checksum(numbers.view(_INTEGERS[numbers.element_size()]).take(positions))


def digest(data: bytes) -> bytes:
    """Eight bytes by which workers compare what they have.

    See Note [Three fingerprints].
    """
    return hashlib.blake2b(data, digest_size=8).digest()


def digest_of(tensor: torch.Tensor) -> bytes:
    """The digest of the elements of a tensor of any layout, in their order.

    For a tensor on an accelerator, the host has to wait.

    A tensor whose memory somebody has taken away has none.
    """
    return digest(
        b"".join(bits(part).cpu().numpy().tobytes() for part in _dense_parts(tensor))
    )


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that make up a tensor.

    A sparse tensor has indices and values. A tensor that wraps others has the parts of
    all these.
    """
    if wraps_others(tensor):
        return list(chain.from_iterable(map(_dense_parts, wrapped_by(tensor))))
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return [] if tensor.is_meta or has_lost_memory(tensor) else [tensor]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
