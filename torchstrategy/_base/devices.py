"""Which device a name means, and whether it is there.

Names are made canonical once, where they enter the library: every device inside the
library has an index, and is on this machine. Two logical CPUs (`cpu:0`, `cpu:1`) are
two devices that share ordinary CPU memory: `memory_device` says where a tensor really
lives. Code never identifies a replica by its device, since several replicas may have
the same.
"""

from __future__ import annotations

import torch

from torchstrategy._base.types import Device, DeviceLike

# If one is missing, the error says so, and not "no such device".
_KNOWN = ("cuda", "xpu", "mps", "mtia", "hpu")


def canonical_device(name: DeviceLike) -> Device:
    """The device of a name: `"cuda:1"`, `"/gpu:1"`, `1` and so on.

    TensorFlow's long names work, too: `"/job:localhost/replica:0/task:0/device:GPU:1"`.

    An integer is the index of an accelerator; `None` and `""` are torch's current
    default device.

    Raises:
        TypeError: If `name` is not a string, an int, a `torch.device` or None.
        ValueError: If `name` is no device, or a device that this machine does not have.
    """
    if isinstance(name, bool) or not isinstance(
        name, (str, int, torch.device, type(None))
    ):
        raise TypeError(
            f"A device is a string, a torch.device or an index; got {name!r}, a "
            f"{type(name).__name__}."
        )
    if isinstance(name, str):
        device = _parse(name)
    elif isinstance(name, int):
        device = (
            _parse(f"{_accelerator_type()}:{name}")
            if name >= 0
            else _refuse(name, "an index is 0 or more")
        )
    else:
        device = torch.get_default_device() if name is None else name
    if device.type == "meta":
        _refuse(name, "meta tensors hold no numbers to compute with")
    count = device_count(device.type)
    if device.index is None:
        device = torch.device(device.type, _current_index(device.type) if count else 0)
    if count is not None and device.index >= count:
        raise ValueError(_not_here(name, device.type))
    return device


def memory_device(device: Device) -> Device:
    """The device that tensors on `device` report. For every logical CPU it is `cpu`."""
    return torch.device("cpu") if device.type == "cpu" else device


def device_count(device_type: str) -> int | None:
    """How many devices of a type there are.

    It is None for logical CPUs, since there are as many as the user names.
    """
    if device_type == "cpu":
        return None
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:  # torch knows the type, but this build of torch cannot use it
        return 0
    try:
        if hasattr(module, "device_count"):
            return int(module.device_count())
    except (RuntimeError, AttributeError):
        return 0
    return (
        torch.accelerator.device_count() if _is_accelerator_of_torch(device_type) else 0
    )


def _current_index(device_type: str) -> int:
    """Which device of a type is the current one of this thread.

    Not every module says so: `torch.mps` does not.
    """
    module = torch.get_device_module(device_type)
    if hasattr(module, "current_device"):
        return int(module.current_device())
    return (
        torch.accelerator.current_device_index()
        if _is_accelerator_of_torch(device_type)
        else 0
    )


def _is_accelerator_of_torch(device_type: str) -> bool:
    """Whether `torch.accelerator` speaks of devices of this type."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type


def copies_by_itself(device: Device) -> bool:
    """Whether a device can copy pinned memory of the CPU while the program goes on.

    Torch cannot pin memory for MPS, which would read other memory after the program has
    written there.
    """
    return device.type not in ("cpu", "mps")


def local_accelerators() -> list[Device]:
    """The accelerators of this machine, in the order of their indices."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [
        torch.device(accelerator.type, index)
        for index in range(torch.accelerator.device_count())
    ]


def _parse(name: str) -> Device:
    found = []
    for part in filter(None, name.split("/")):
        key, _, said = part.partition(":")
        if key.lower() == "job" and said != "localhost":
            _refuse(name, f"there is no job {said!r}, only 'localhost'")
        if key.lower() in ("replica", "task") and said != "0":
            _refuse(name, "this process is replica 0, task 0")
        if key.lower() == "device" and ":" not in said:
            _refuse(name, "after 'device:' stand a type and an index")
        if key.lower() not in ("job", "replica", "task"):
            found.append(said if key.lower() == "device" else part)
    if not found:
        return torch.get_default_device()
    if len(found) > 1:
        _refuse(name, f"it names two devices, {found[0]!r} and {found[1]!r}")
    kind, colon, index = found[0].lower().partition(":")
    if index not in ("", "*") and not index.isdigit():
        _refuse(name, f"{index!r} is not an index")
    if kind == "gpu":
        kind = _accelerator_type()
    if kind in _KNOWN and index.isdigit() and int(index) >= (device_count(kind) or 0):
        raise ValueError(_not_here(name, kind))
    try:
        device = (
            torch.device(kind, int(index)) if index.isdigit() else torch.device(kind)
        )
    except (RuntimeError, OverflowError, ValueError):
        return _refuse(name, f"torch knows no device {kind + colon + index!r}")
    if index.isdigit() and device.index != int(index):
        return _refuse(name, f"torch cannot count to {index}")
    return device


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cuda" if accelerator is None else accelerator.type


def _not_here(name: DeviceLike, device_type: str) -> str:
    asked_for = [
        f"{device_type}:{index}" for index in range(device_count(device_type) or 0)
    ]
    others = [
        str(device) for device in local_accelerators() if device.type != device_type
    ]
    here = ", ".join(
        [*asked_for, *others, "cpu:0, cpu:1, ... (logical CPUs, as many as you name)"]
    )
    return (
        f"The device {str(name)!r} is not on this machine, which has {here}. To test "
        "the same program here, write "
        '["cpu"] * 2 for two devices; torchstrategy.testing.simulate_devices(2) makes '
        "devices with their own memory."
    )


def _refuse(name: object, why: str) -> Device:
    raise ValueError(
        f"{name!r} is not a device: {why}. Devices are written like 'cpu:0', 'cuda:1' "
        "or '/gpu:1'."
    )
