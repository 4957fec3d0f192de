"""Operators that are not computed: their results only have the right sizes.

Nobody touches the memory of these results.

So a model of real size runs on a laptop, as far as sizes are all that matters. torch's
meta kernels know the sizes.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchstrategy.testing._simulation.torch_internals import tree_map_only

# bytes. What is not larger is computed: counters, indices, the scale of a loss.
LARGE = 64 * 1024

_blocks = 0
_sizes: dict[Any, Any] = {}  # what meta kernels said, by operator and signature
_computed: Counter[str] = Counter()


@contextmanager
def computing_shapes_only() -> Iterator[Counter[str]]:
    """A block whose operators on tensors of more than 64 KiB are not computed.

    Yields:
        How often an operator was computed all the same, since torch has no meta kernel
        for it, by name.
    """
    global _blocks
    if not _blocks:
        _computed.clear()
        _take_from_the_system(LARGE)
    _blocks += 1
    try:
        yield _computed
    finally:
        _blocks -= 1
        if not _blocks:
            _sizes.clear()
            _take_from_the_system(_KEPT_BY_GLIBC)


def shapes_only() -> bool:
    """Whether such a block is open, on any thread."""
    return _blocks > 0


def is_large(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of some tensors has more than 64 KiB."""
    return any(tensor.numel() * tensor.element_size() > LARGE for tensor in tensors)


def shaped(
    op: Any,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    same: Sequence[Any],
) -> Any:
    """Results of an operator in their sizes.

    Small ones hold zeros, and large ones what was in the memory.

    Args:
        op: The operator.
        call: The function that computes it, on tensors of the CPU.
        args: Its arguments, as tensors of the CPU.
        kwargs: Its arguments by name.
        same: For each result: the argument that it is, or None if it is a new tensor.

    Returns:
        The results, or `NOT_KNOWN` if torch cannot say their sizes.
    """
    if all(tensor is not None for tensor in same):
        return same[0] if len(same) == 1 else tuple(same) or None
    key = (op, _signature(args), _signature(tuple(kwargs.items())))
    if key not in _sizes:
        _sizes[key] = _asked(op, call, args, kwargs)
    if _sizes[key] is NOT_KNOWN:
        _computed[str(op)] += 1
        return NOT_KNOWN
    return _made(_sizes[key])


NOT_KNOWN = object()


def _asked(
    op: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )

    args, kwargs = tree_map_only(torch.Tensor, to_meta, (list(args), dict(kwargs)))
    args, kwargs = tree_map_only(
        torch.device, lambda device: torch.device("meta"), (args, kwargs)
    )
    args, kwargs = tree_map_only(
        torch.Generator, lambda generator: None, (args, kwargs)
    )
    try:
        made = call(*args, **kwargs)
        return (
            made.contiguous(memory_format=_layout(args)) if op is _CONVOLUTION else made
        )
    # torch has no meta kernel, or one that looks at values.
    except (NotImplementedError, RuntimeError):
        return NOT_KNOWN


def _layout(tensors: Sequence[Any]) -> torch.memory_format:
    """The layout of a convolution's result.

    It is channels last, if the input or the weight is. Meta kernels forget that.
    """
    for layout in (torch.channels_last, torch.channels_last_3d):
        for tensor in tensors[:2]:
            fits = tensor.dim() == _DIMENSIONS[layout] and tensor.is_contiguous(
                memory_format=layout
            )
            if fits and not tensor.is_contiguous():
                return layout
    return torch.contiguous_format


_CONVOLUTION = torch.ops.aten.convolution.default
_DIMENSIONS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _made(like: Any) -> Any:
    if isinstance(like, torch.Tensor):
        made = torch.empty_strided(
            like.size(), like.stride(), dtype=like.dtype, device="cpu"
        )
        return made if is_large([like]) else made.zero_()
    if isinstance(like, (list, tuple)):
        return (
            tuple(map(_made, like))
            if isinstance(like, tuple)
            else list(map(_made, like))
        )
    return like


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.size(), value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return (
        value if isinstance(value, (int, bool, str, float, torch.dtype)) else str(value)
    )


def _take_from_the_system(at_least: int) -> None:
    """Makes glibc take blocks of so many bytes from the system.

    The system gives memory only where somebody touches it.

    By itself, glibc keeps blocks that it has had once, and gives their touched memory
    to the next one that asks.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, at_least)
            libc.mallopt(_M_TRIM_THRESHOLD, 2 * at_least)


# The numbers of glibc's settings. It cannot be asked for them, so it gets back what it
# comes to by itself in a process that works on large tensors: the most that its own
# rule allows.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BY_GLIBC = 32 * 2**20
