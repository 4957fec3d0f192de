"""The numbers of tensors that ranks exchange.

They are read when a collective is called, and written when a rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrategy.testing._ranks.torch_internals import factor_of
from torchstrategy.testing._simulation.memory import on_cpu, span
from torchstrategy.testing._simulation.ordinals import is_simulated
from torchstrategy.testing._simulation.shapes import is_large, shapes_only


def _seen_here(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU that has the memory of `tensor`.

    `data` keeps writes out of autograd's count of versions.

    A tensor whose class handles its operators may have no memory of its own: then it is
    `tensor` itself.
    """
    return (
        on_cpu(tensor.detach())
        if is_simulated(tensor) and not _handles_operators(tensor)
        else tensor.data
    )


def _handles_operators(tensor: torch.Tensor) -> bool:
    """Whether its class does, such as that of a wrapper around other tensors."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def taken(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a tensor has now.

    They are no tensor of its device, whose memory a network does not take.

    Where only shapes are computed, large tensors have no numbers, and what is taken has
    none either.
    """
    if _has_no_numbers(tensor):
        return torch.empty_like(tensor, device="meta")
    if is_simulated(tensor) and _handles_operators(tensor):
        return tensor.data.to("cpu", copy=True)
    return _seen_here(tensor).clone()


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; of a sparse one, those of its indices and values."""
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _has_no_numbers(tensor: torch.Tensor) -> bool:
    return (
        shapes_only()
        and is_simulated(tensor)
        and tensor.layout is torch.strided
        and is_large([tensor])
    )


def bring(values: torch.Tensor, tensor: torch.Tensor) -> None:
    """Writes numbers on a tensor, if there are any."""
    if values.is_meta or _has_no_numbers(tensor):
        return
    if values.is_sparse:
        # `data` of a sparse tensor gets indices and values of its own.
        with torch.no_grad():
            tensor.copy_(values)
        return
    here = _seen_here(tensor)
    here.copy_(values.reshape(here.shape))


def spoil(tensor: torch.Tensor) -> None:
    """Makes what is read before it was brought visible: NaN, and the lowest integer."""
    if tensor.is_sparse or tensor.dtype is torch.bool or _has_no_numbers(tensor):
        return
    here = _seen_here(tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        here.fill_(float("nan"))
    else:
        here.fill_(torch.iinfo(tensor.dtype).min)


def is_spoiled(tensor: torch.Tensor) -> bool:
    """Whether a tensor still has what `spoil` gave it, as far as can be known."""
    if tensor.is_sparse or tensor.dtype is torch.bool or _has_no_numbers(tensor):
        return True
    here = _seen_here(tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(
            torch.isnan(here.float() if here.element_size() == 1 else here).all()
        )
    return bool((here == torch.iinfo(tensor.dtype).min).all())


def overlap(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether tensors have memory in common with others."""
    spans, other_spans = _spans(tensors), _spans(others)
    return any(
        start < its_end and its_start < end
        for start, end in other_spans
        for its_start, its_end in spans
    )


def _spans(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [
        span(tensor)
        for tensor in tensors
        if tensor.layout is torch.strided and tensor.numel()
    ]


def in_words(tensors: Sequence[torch.Tensor]) -> str:
    """The sizes and dtypes: `3x4 float32, 7 int64`; those of many tensors in short."""
    shown = ", ".join(_in_words(tensor) for tensor in tensors[:_SHOWN])
    more = len(tensors) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


_SHOWN = 4


def _in_words(tensor: torch.Tensor) -> str:
    return (
        f"{'x'.join(map(str, tensor.shape)) or '1'} "
        f"{str(tensor.dtype).removeprefix('torch.')}"
    )


def name_of(operation: Any) -> str:
    """The name of a reduction, `sum`."""
    kind = getattr(operation, "op", operation)
    return str(kind).rpartition(".")[2].lower()


def reduced(tensors: Sequence[torch.Tensor], operation: Any) -> torch.Tensor:
    """One tensor of several of the same sizes, in the order of the ranks.

    Raises:
        NotImplementedError: If there is no such reduction.
    """
    name = name_of(operation)
    if name == "premul_sum":
        tensors = [tensor * factor_of(operation) for tensor in tensors]
    pair = _PAIRS.get(name)
    if pair is None:
        raise NotImplementedError(
            f"run_ranks does not reduce with {name!r}: use one of {', '.join(_PAIRS)}."
        )
    total = tensors[0]
    for tensor in tensors[1:]:
        total = pair(total, tensor)
    if name == "avg":
        total = torch.div(
            total,
            len(tensors),
            rounding_mode=None if _has_fractions(total) else "floor",
        )
    return total.to(tensors[0].dtype)


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


_PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
