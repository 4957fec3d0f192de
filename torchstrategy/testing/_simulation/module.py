"""What `torch.sim` is: the functions at `torch.get_device_module(device)`.

Code finds functions there as it finds them at `torch.cuda`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Any

import torch

from torchstrategy.testing._simulation import accounts as _accounts
from torchstrategy.testing._simulation.generators import (
    counted_state,
    default_generator,
    default_generators,
)
from torchstrategy.testing._simulation.listeners import listeners
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    current,
    current_device,
    device_count,
    is_simulated,
    ordinal,
    set_device,
)
from torchstrategy.testing._simulation.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    refuse_in_capture,
    set_stream,
    stream,
)

_TOTAL_MEMORY = 16 * 2**30  # what `get_device_properties` says; nothing enforces it
# The modules that draw for DTensors. The second does for devices that say that they are
# CUDA's.
_OF_DTENSORS = ("torch.distributed.tensor._random", "torch._prims.rng_prims")


def make_module() -> types.ModuleType:
    """Makes the module, which torch then knows by the name of the device."""
    module = types.ModuleType(f"torch.{NAME}", __doc__)
    public: list[Any] = [
        Event,
        Stream,
        current_device,
        current_stream,
        default_stream,
        device_count,
        device_of,
        empty_cache,
        get_amp_supported_dtype,
        get_device_name,
        get_device_properties,
        get_rng_state,
        get_rng_state_all,
        init,
        is_available,
        is_bf16_supported,
        is_initialized,
        manual_seed,
        manual_seed_all,
        max_memory_allocated,
        memory_allocated,
        reset_peak_memory_stats,
        set_device,
        set_rng_state,
        set_rng_state_all,
        set_stream,
        stream,
        synchronize,
    ]
    vars(module).update({thing.__name__: thing for thing in public})
    vars(module).update(
        device=current,
        memory_reserved=memory_allocated,  # nothing is held back for later
        max_memory_reserved=max_memory_allocated,
        default_generators=default_generators(),
        seed_all=manual_seed_all,
        # Activation checkpoints ask this before they keep the random state.
        _initialized=True,
        _lazy_init=init,
        _is_in_bad_fork=lambda: False,
    )
    return module


def is_available() -> bool:
    """Whether there are devices: they are simulated, so yes."""
    return True


def is_initialized() -> bool:
    """Whether the devices can be used at once: yes."""
    return True


def init() -> None:
    """Does nothing: the devices need no initialization."""


def device_of(tensor: torch.Tensor) -> current:
    """A block in which a tensor's device is the current one, if it is simulated."""
    return current(tensor.device if is_simulated(tensor) else None)


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Returns at once: nothing is under way.

    A negative number means the current device, as for GPUs.
    """
    refuse_in_capture("synchronize() waits for the device")
    index = ordinal(None if isinstance(device, int) and device < 0 else device)
    for listener in listeners():
        listener.synchronized_device(index)


def get_device_name(device: torch.device | str | int | None = None) -> str:
    """The name of a device."""
    return f"simulated device {ordinal(device)}"


def get_device_properties(
    device: torch.device | str | int | None = None,
) -> types.SimpleNamespace:
    """The name of a device, its sizes, and no capability of CUDA's.

    Nothing enforces the sizes. `DataParallel` compares them.
    """
    return types.SimpleNamespace(
        name=get_device_name(device),
        total_memory=_TOTAL_MEMORY,
        multi_processor_count=1,
        major=0,
        minor=0,
    )


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes to which autocast may cast: all, since CUDA warns of none."""
    return [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


def is_bf16_supported() -> bool:
    """Whether bfloat16 can be computed with: yes."""
    return True


def empty_cache() -> None:
    """Gives back the memory that is kept, of which there is none.

    `torch.cuda.memory_reserved` tells how much is kept.
    """
    for index in range(device_count()):
        _accounts.account_of(index).empty_cache()


def memory_allocated(device: torch.device | str | int | None = None) -> int:
    """The bytes that tensors on a device hold."""
    return _accounts.held(ordinal(device))


def max_memory_allocated(device: torch.device | str | int | None = None) -> int:
    """The most bytes of a device's tensors since `reset_peak_memory_stats`."""
    return _accounts.peak(ordinal(device))


def reset_peak_memory_stats(device: torch.device | str | int | None = None) -> None:
    """Counts `max_memory_allocated` from here on."""
    _accounts.reset_peak(ordinal(device))


def manual_seed(seed: int) -> None:
    """Seeds the default generator of the current device."""
    default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the default generators of all devices; `torch.manual_seed` calls it."""
    for generator in default_generators():
        generator.manual_seed(seed)


def get_rng_state(device: torch.device | str | int = NAME) -> torch.Tensor:
    """The state of the default generator of a device."""
    # A DTensor computes with the state, and wants that of a GPU; it asks for it on the
    # device's module.
    here = inspect.currentframe()
    caller = here.f_back if here is not None else None
    if caller is not None and caller.f_globals.get("__name__") in _OF_DTENSORS:
        return counted_state(ordinal(device))
    return default_generator(ordinal(device)).get_state()


def set_rng_state(
    new_state: torch.Tensor, device: torch.device | str | int = NAME
) -> None:
    """Sets the state of the default generator of a device."""
    default_generator(ordinal(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of the default generator of each device."""
    return [generator.get_state() for generator in default_generators()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Sets the state of the default generator of each device."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
