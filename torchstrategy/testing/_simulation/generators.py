"""Random numbers of simulated devices: each device has a generator, which is a generator of the CPU inside."""

from __future__ import annotations

import weakref
from typing import Any, final

import torch

from torchstrategy.testing._simulation.facades import put_in_place
from torchstrategy.testing._simulation.ordinals import NAME, ordinal
from torchstrategy.testing._simulation.torch_internals import generator_id

_default: list[torch.Generator] = []  # filled once, by `make_default_generators`
_devices: dict[int, torch.device] = {}  # the device of each living generator of this file, by the generator's id


@final
class SimulatedGenerator(torch.Generator):  # the original: `install` puts another one in its place
    """A generator that says that it is on a simulated device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _devices[generator_id(self)]


def install() -> None:
    """Makes `torch.Generator(device="sim:1")` possible."""
    put_in_place("Generator", _generator)


def _generator(original: Any, device: Any = "cpu") -> torch.Generator:
    if torch.device(device).type != NAME:
        made: torch.Generator = original(device)
        return made
    generator = SimulatedGenerator("cpu")
    identity = generator_id(generator)
    _devices[identity] = torch.device(NAME, ordinal(device))
    weakref.finalize(generator, _devices.pop, identity, None).atexit = False
    return generator


def make_default_generators(count: int) -> None:
    """Gives each device its default generator, seeded as torch's other default generators are."""
    for index in range(count):
        generator = torch.Generator(f"{NAME}:{index}")
        generator.manual_seed(torch.initial_seed())
        _default.append(generator)


def default_generators() -> list[torch.Generator]:
    """The default generator of each device."""
    return _default


def default_generator(index: int) -> torch.Generator:
    """The generator from which operators on a device draw if they are given none."""
    return _default[index]


def check_generator(generator: torch.Generator, index: int) -> None:
    """Refuses a generator of another device, in the words that torch has for accelerators.

    Raises:
        RuntimeError: If it is not one of this device.
    """
    wanted = torch.device(NAME, index)
    found = _devices.get(generator_id(generator), generator.device)
    if found != wanted:
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")
