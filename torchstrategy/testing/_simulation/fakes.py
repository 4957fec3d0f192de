"""Fake tensors of simulated devices: tensors with sizes and no memory.

Compilers and DTensor try operators on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchstrategy.testing._simulation.ordinals import NAME
from torchstrategy.testing._simulation.torch_internals import (
    FAKE_CACHE_CHECK,
    NotForTheCache,
)


def install() -> None:
    """Lets a fake tensor on `"sim"` be on the device that is current at each call.

    Without this, it would be on the device that was current the first time.

    torch keeps what an operator returned for its arguments. Of those, only `"cuda"`
    without an index means another device at another time; and torch gives `"cuda"` its
    index before.
    """
    FAKE_CACHE_CHECK.replace(_knowing_the_current_device(FAKE_CACHE_CHECK.now()))


def _knowing_the_current_device(check: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(check)
    def replaced(
        self: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if any(map(_has_no_index, _devices(args, kwargs))):
            raise NotForTheCache("a device without an index means the current one")
        check(self, func, args, kwargs)

    return replaced


def _has_no_index(device: torch.device) -> bool:
    return device.type == NAME and device.index is None


def _devices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.device]:
    return (
        value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)
    )
