"""Do a simulated device and the CPU do the same?

One trial, run on both, and all that can be seen of it compared.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import keystr, tree_flatten_with_path

from sweep.copies import CPU


class Trial(NamedTuple):
    """One thing to try."""

    name: str
    run: Callable[[torch.device], Any]
    """Does it on a device, and returns whatever can be seen of it.

    That is results, gradients, and what became of the inputs.
    """


class Verdict(enum.Enum):
    """What came out of a trial."""

    EQUAL = "equal, bit by bit"
    CLOSE = "close"
    REFUSED = "refused by both"
    DIFFERENT = "different"


class Outcome(NamedTuple):
    """What came out of a trial, and if the two differ, how."""

    trial: str
    verdict: Verdict
    difference: str = ""


class Raised(NamedTuple):
    """The error that a trial ended with."""

    error: Exception


def judge(trial: Trial, device: torch.device) -> Outcome:
    """Runs a trial on the CPU and on a device."""
    wanted, found = observed(trial, CPU), observed(trial, device)
    if isinstance(wanted, Raised) and isinstance(found, Raised):
        return Outcome(trial.name, Verdict.REFUSED)
    if isinstance(wanted, Raised):
        return Outcome(
            trial.name, Verdict.DIFFERENT, f"only the CPU raises {wanted.error!r}"
        )
    if isinstance(found, Raised):
        return Outcome(
            trial.name,
            Verdict.DIFFERENT,
            f"{type(found.error).__name__}: {found.error}",
        )
    return Outcome(trial.name, *compared(wanted, found, device))


def observed(trial: Trial, device: torch.device) -> Any:
    """What a trial returns on a device, or the error that it ends with."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return trial.run(device)
        # Whatever it is, it is what the operator does with this sample.
        except Exception as error:
            return Raised(error)


def compared(
    wanted: Any, found: Any, device: torch.device | None
) -> tuple[Verdict, str]:
    """What the CPU returned and what the device did.

    Where it is has to be `device`, unless that is None.
    """
    leaves, structure = tree_flatten_with_path(wanted)
    others, other_structure = tree_flatten_with_path(found)
    if structure != other_structure:
        return Verdict.DIFFERENT, f"{other_structure} instead of {structure}"
    verdict = Verdict.EQUAL
    for (path, one), (_, other) in zip(leaves, others, strict=True):
        try:
            if not _is_equal(one, other, device):
                verdict = Verdict.CLOSE
        except AssertionError as error:
            return Verdict.DIFFERENT, f"{keystr(path)}: {error}"
    return verdict, ""


def _is_equal(wanted: Any, found: Any, device: torch.device | None) -> bool:
    """Whether two leaves are the same to the bit.

    Raises:
        AssertionError: If they are not even close (as `torch.testing` has it, for
            numbers as large as the largest), or differ in anything but numbers.
    """
    if not isinstance(wanted, torch.Tensor):
        nan = wanted != wanted and found != found
        is_place = isinstance(wanted, torch.device) or wanted == "cpu"
        assert nan or (type(wanted) is type(found) and (is_place or wanted == found)), (
            f"{found!r}, not {wanted!r}"
        )
        return True
    assert device in (None, found.device), f"is on {found.device}"
    for fact in _FACTS:
        assert fact(found) == fact(wanted), (
            f"{fact.__name__} is {fact(found)}, not {fact(wanted)}"
        )
    return _has_equal_numbers(wanted.detach(), found.detach().to(CPU))


def _has_equal_numbers(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    is_plain = wanted.layout is torch.strided and type(wanted) is torch.Tensor
    if is_plain and torch.equal(_bytes(wanted), _bytes(found)):
        return True
    relative, absolute = default_tolerances(wanted)
    largest = (
        wanted.to_dense().abs().max().item() if absolute and wanted.numel() else 0.0
    )
    absolute *= max(1.0, largest if math.isfinite(largest) else 0.0)
    torch.testing.assert_close(
        found, wanted, rtol=relative, atol=absolute, equal_nan=True
    )
    return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    return (
        torch.empty_like(plain, memory_format=torch.contiguous_format)
        .copy_(plain)
        .view(-1, 1)
        .view(torch.uint8)
    )


def sizes(tensor: torch.Tensor) -> Any:
    return tensor.size()


def dtype(tensor: torch.Tensor) -> Any:
    return tensor.dtype


def layout(tensor: torch.Tensor) -> Any:
    return tensor.layout


def strides(tensor: torch.Tensor) -> Any:
    """Those that mean something."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    return [
        stride
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
        if size > 1
    ]


def requires_grad(tensor: torch.Tensor) -> Any:
    return tensor.requires_grad


_FACTS = (sizes, dtype, layout, strides, requires_grad)
