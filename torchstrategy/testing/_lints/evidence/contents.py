"""What a data set holds.

Ranks whose data sets hold other things have no rows in common, whatever their numbers
are.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from torchstrategy.testing._lints.evidence.asking import named_in
from torchstrategy.testing._lints.evidence.fingerprints import (
    checksum,
    has_ordinary_numbers,
    numbers_of,
)
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._simulation.program import unwatched

_DEEPEST, _MOST_ITEMS, _MOST_WORDS, _SAMPLED = 4, 64, 4096, 4096
_NUMBERS = (float, complex, bool, type(None), range, slice, np.generic)


def content_of(dataset: Any) -> int:
    """A checksum of what a data set holds: of its tensors, arrays, paths and settings.

    Some of many are looked at.
    """
    return zlib.crc32(
        "\n".join(islice(_words_of(dataset, _DEEPEST), _MOST_WORDS)).encode(
            errors="replace"
        )
    )


def _words_of(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, int):
        yield f"{hash(value)}"  # it may have thousands of digits
    elif isinstance(value, _NUMBERS):
        yield repr(value)
    elif isinstance(value, (str, bytes, bytearray)):
        yield f"{len(value)} {value[:_SAMPLED]!r}"
    elif isinstance(value, os.PathLike):
        yield str(os.fspath(value))
    elif isinstance(value, torch.Tensor):
        yield _of_tensor(value)
    elif isinstance(value, np.ndarray):
        yield _of_array(value)
    elif isinstance(value, (list, tuple, set, frozenset, dict, deque)):
        yield f"{type(value).__name__} of {len(value)}"
        items: Iterable[Any] = value.items() if isinstance(value, dict) else value
        for item in islice(items, _MOST_ITEMS if depth else 0):
            yield from _words_of(item, depth - 1)
    elif depth and not isinstance(value, (type, nn.Module)) and not callable(value):
        yield type(value).__qualname__
        for name, held in islice(named_in(value).items(), _MOST_ITEMS):
            yield name
            yield from _words_of(held, depth - 1)
    else:
        yield type(value).__qualname__  # a generator, say, or a function


def _of_tensor(tensor: torch.Tensor) -> str:
    if not has_ordinary_numbers(tensor):
        return f"{tensor.dtype}"
    with torch.no_grad(), unwatched(), without_modes():
        flat = numbers_of(tensor).reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()
        return f"{tuple(tensor.shape)} {checksum(some)}"


def _of_array(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.hasobject or not array.size:
        return f"{array.shape}"
    some = array.flat[:: max(1, array.size // _SAMPLED)]  # without a copy of the whole
    return f"{array.shape} {zlib.crc32(np.ascontiguousarray(some).tobytes())}"
