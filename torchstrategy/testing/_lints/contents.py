"""What a data set holds: ranks whose data sets hold other things have no rows in common, whatever their numbers are."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from torchstrategy.testing._lints.fingerprints import can_be_read, numbers_of
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._simulation.program import unwatched

_DEEPEST, _MOST_ITEMS, _SAMPLED = 4, 64, 4096
_SIMPLE = (str, bytes, int, float, complex, bool, type(None), range, slice, np.generic)


def content_of(dataset: Any) -> int:
    """A checksum of what a data set holds: of its tensors, arrays, paths and settings. Some of many are looked at."""
    return zlib.crc32("\n".join(_words_of(dataset, _DEEPEST)).encode())


def _words_of(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, _SIMPLE):
        yield repr(value)
    elif isinstance(value, torch.Tensor):
        yield _of_tensor(value)
    elif isinstance(value, np.ndarray):
        yield _of_array(value)
    elif isinstance(value, (list, tuple, set, frozenset, dict)):
        yield f"{type(value).__name__} of {len(value)}"
        items: Iterable[Any] = value.items() if isinstance(value, dict) else value
        for item in islice(items, _MOST_ITEMS if depth else 0):
            yield from _words_of(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        yield type(value).__qualname__
        for name, held in islice(vars(value).items(), _MOST_ITEMS):
            yield name
            yield from _words_of(held, depth - 1)
    else:
        yield type(value).__qualname__  # a generator, say, or a function


def _of_tensor(tensor: torch.Tensor) -> str:
    if not can_be_read(tensor):
        return f"{tuple(tensor.shape)}"
    with torch.no_grad(), unwatched(), without_modes():
        flat = numbers_of(tensor).reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()
        return f"{tuple(tensor.shape)} {some.tolist()}"


def _of_array(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.hasobject:
        return f"{array.shape}"
    some = array.reshape(-1)[:: max(1, array.size // _SAMPLED)]
    return f"{array.shape} {zlib.crc32(np.ascontiguousarray(some).tobytes())}"
