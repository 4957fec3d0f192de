"""Which simulated devices there are, and which of them is current on this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import torch

NAME = "sim"
# What torch raises for a device that is not there. torch 2.10 has it, and some builds
# do not export it.
DeviceError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)

_devices: list[torch.device] = []  # filled once, by `simulate_devices`
_indices: dict[torch.device, int] = {}


@final
class _Here(threading.local):
    current = 0


_here = _Here()


class Spoken:
    """How messages call simulated devices.

    Attributes:
        name: Their name: "cuda" in blocks in which the program calls them so.
    """

    name = NAME

    @classmethod
    def library(cls) -> str:
        """With what an error of a device begins: "CUDA error", "CUDA out of memory"."""
        return "CUDA" if cls.name == "cuda" else cls.name


def declare(count: int) -> None:
    """Sets how many devices there are. Torch has to know their name before."""
    _devices.extend(torch.device(NAME, index) for index in range(count))
    _indices.update((device, index) for index, device in enumerate(_devices))


def simulated_devices() -> list[torch.device]:
    """The simulated devices of this process, in order; none before `simulate_devices`.

    Example:
        >>> torchstrategy.testing.simulated_devices()
        []
    """
    return list(_devices)


def is_simulated(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a simulated device."""
    return tensor.device in _indices


def index_of(tensor: torch.Tensor) -> int | None:
    """The index of the simulated device that a tensor is on; None if it is on none."""
    return _indices.get(tensor.device)


def device_count() -> int:
    """How many simulated devices there are."""
    return len(_devices)


def current_device() -> int:
    """The index of this thread's current device: `"sim"` without an index."""
    return _here.current


def set_device(device: torch.device | str | int | None) -> None:
    """Makes a device this thread's current one.

    A negative number changes nothing, as for GPUs.

    Raises:
        ValueError: If it is no device of this type with an index.
        RuntimeError: If there is no such device.
    """
    if isinstance(device, str):
        device = torch.device(device)
    has_no_index = (
        isinstance(device, torch.device)
        and device.type == NAME
        and device.index is None
    )
    if device is None or has_no_index:
        said = device if device is None else Spoken.name
        raise ValueError(
            "Expected a torch.device with a specified index or an integer, but "
            f"got:{said}"
        )
    if not isinstance(device, int) or device >= 0:
        _here.current = ordinal(device)


def ordinal(device: torch.device | str | int | None) -> int:
    """The index that `device` means; None and `"sim"` mean the current one.

    Raises:
        ValueError: If it is a device of another type.
        DeviceError: If there is no such device.
    """
    if isinstance(device, int):
        index: int | None = device
    elif device is None:
        index = None
    else:
        device = torch.device(device)
        if device.type != NAME:
            raise ValueError(f"Expected a {Spoken.name} device, but got: {device}")
        index = device.index
    if index is None:
        return _here.current
    if not 0 <= index < len(_devices):
        raise DeviceError(
            f"{Spoken.library()} error: invalid device ordinal\n"
            "GPU device may be out of range, do you have enough GPUs?\n"
            f"{Spoken.name}:{index}: this process simulates {len(_devices)} devices."
        )
    return index


def known(device: Any, index: Callable[[Any], int], what: str = "device") -> int:
    """The number of a device, for functions with an error for a missing device.

    These functions of `torch.cuda` have an error of their own.

    Raises:
        AssertionError: If it is not there.
    """
    try:
        return index(device)
    except DeviceError:
        raise AssertionError(f"Invalid {what} id") from None


@final
class current:
    """A block in which a device is the current one.

    With None or -1 the current device stays.
    """

    def __init__(self, device: torch.device | str | int | None) -> None:
        self.idx = _here.current if device is None or device == -1 else ordinal(device)
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(_here.current)
        _here.current = self.idx

    def __exit__(self, *error: object) -> None:
        _here.current = self._before.pop()
