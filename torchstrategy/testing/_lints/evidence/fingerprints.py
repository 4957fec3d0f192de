"""What is kept of a tensor, to say later whether another rank had the same."""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import torch

from torchstrategy._base.memory import memory_at, own_storage
from torchstrategy.testing._lints.evidence.asking import asked
from torchstrategy.testing._lints.evidence.known import is_plain
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._simulation.memory import on_cpu
from torchstrategy.testing._simulation.ordinals import is_simulated
from torchstrategy.testing._simulation.program import unwatched
from torchstrategy.testing._simulation.shapes import is_large, shapes_only

_SAMPLED, _CLOSE = 64, 1e-4
_FEW = 64
_PRIME = 7919


class Fingerprint(NamedTuple):
    """What is kept of a tensor.

    Each NaN in a sample is the one object `math.nan`, so that two samples can be equal.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int
    sample: tuple[float, ...]

    @property
    def is_drawn(self) -> bool:
        """Whether the numbers differ, as random ones do.

        All zeros say nothing of what ranks are to share.
        """
        return len(set(self.sample)) > 2

    def divided_by(self, number: float) -> Fingerprint:
        """What is kept of a tensor that was multiplied by a number to be this one.

        There is no checksum.
        """
        sample = tuple(one if one is math.nan else one / number for one in self.sample)
        return self._replace(checksum=0, sample=sample)

    def is_close_to(self, other: Fingerprint) -> bool:
        """Whether two tensors differ by rounding only, as far as some numbers say."""
        if self.shape != other.shape:
            return False
        size = max(
            (abs(one) for one in (*self.sample, *other.sample) if math.isfinite(one)),
            default=0.0,
        )
        pairs = zip(self.sample, other.sample, strict=True)
        return all(a is b or a == b or abs(a - b) <= _CLOSE * size for a, b in pairs)


_ORDINARY = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.uint8,
    }
    | {torch.int8, torch.int16, torch.int32, torch.int64}
)
# With others, such as quantized or packed ones, torch cannot compute.
_READABLE = _ORDINARY | {
    *(
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    ),
    torch.float8_e8m0fnu,
}


def has_ordinary_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be read, and its numbers can be taken apart.

    Complex, quantized or packed ones cannot.
    """
    return tensor.dtype in _ORDINARY and can_be_read(tensor)


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its own numbers, in one piece of memory, which is there."""
    if not is_plain(tensor) or tensor.dtype not in _READABLE:
        return False
    if tensor.numel() and own_storage(tensor) is None:  # the program may have freed it
        return False
    return not (shapes_only() and is_simulated(tensor) and is_large([tensor]))


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, on the CPU, in one piece.

    Nobody is told that they are read.
    """
    with torch.no_grad(), unwatched(), without_modes():
        tensor = tensor.detach()
        return (on_cpu(tensor) if is_simulated(tensor) else tensor).contiguous()


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are zero; False if it cannot be read."""
    if not can_be_read(tensor):
        return False
    here = numbers_of(tensor)
    with torch.no_grad(), unwatched(), without_modes():
        return not bool(here.any())


def fingerprint(tensor: torch.Tensor | None) -> Fingerprint | None:
    """What is kept of a tensor; None of none, or of one that cannot be read."""
    if tensor is None or not can_be_read(tensor):
        return None
    here = numbers_of(tensor)
    with torch.no_grad(), unwatched(), without_modes():
        flat = here.view(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED]
        numbers = (some.abs() if some.is_complex() else some).double().tolist()
        if any(map(math.isnan, numbers)):
            numbers = [math.nan if math.isnan(one) else one for one in numbers]
            here = torch.where(here.isnan(), math.nan, here)
        sample = tuple(numbers)
    return Fingerprint(tuple(tensor.shape), tensor.dtype, checksum(here), sample)


def of_sparse(tensor: torch.Tensor) -> tuple[Fingerprint | None, tuple[int, int]]:
    """What is kept of a sparse tensor.

    It is of its numbers, whatever their order is, and checksums of indices and values.
    """
    with torch.no_grad(), unwatched(), without_modes():
        here = (
            on_cpu(tensor.detach()) if is_simulated(tensor) else tensor.detach().cpu()
        )
        parts = (
            checksum(here._indices().contiguous()),
            checksum(here._values().contiguous()),
        )
        whole = here.coalesce()
        values = fingerprint(whole.values())
        if values is None:
            return None, parts
        indices = checksum(whole.indices().contiguous())
        both = zlib.crc32(f"{indices} {values.checksum}".encode())
    # Other indices are another tensor, however close the values are.
    return Fingerprint(
        (*tensor.shape, indices), tensor.dtype, both, values.sample
    ), parts


def checksum(here: torch.Tensor) -> int:
    """A checksum of the bytes of a tensor that `numbers_of` returned."""
    if not here.numel():
        return 0
    return zlib.crc32(memory_at(here.data_ptr(), here.nbytes))


def hashes_of_rows(tensor: torch.Tensor) -> list[int]:
    """A number for each row, the same for rows of which some numbers are alike."""
    numbers = numbers_of(tensor)
    with torch.no_grad(), unwatched(), without_modes():
        flat = numbers.reshape(len(numbers), -1)
        # With equal steps it could be one of several features each time.
        if flat.shape[1] > _SAMPLED:
            flat = flat[:, torch.arange(_SAMPLED) * _PRIME % flat.shape[1]]
        return [hash(tuple(row)) for row in flat.tolist()]


def few_numbers(tensor: torch.Tensor) -> list[Any] | None:
    """The numbers of a small tensor; None if it is large, or cannot be read."""
    if tensor.numel() > _FEW or not can_be_read(tensor):
        return None
    here = numbers_of(tensor)
    with unwatched(), without_modes():
        return here.view(-1).tolist()


def number_of(value: Any) -> float | None:
    """The number that a value is, or that a tensor has.

    It is None if there is none, or it cannot be read.
    """
    if not isinstance(value, torch.Tensor):
        # A whole number may be too large.
        return (
            asked(lambda: float(value), None)
            if isinstance(value, (int, float))
            else None
        )
    if value.numel() != 1 or not can_be_read(value) or value.is_complex():
        return None
    here = numbers_of(value)
    with unwatched(), without_modes():
        return float(here.item())
