"""Random numbers of simulated devices: each has a generator of its own, which is one of the CPU inside."""

from __future__ import annotations

import weakref
from typing import Any, final

import torch

from torchstrategy._torch import generator_id
from torchstrategy.testing._simulation._ordinals import NAME, ordinal

_CpuGenerator = torch.Generator
_default: list[torch.Generator] = []  # filled once, by `make_default_generators`
_devices: dict[int, torch.device] = {}  # of each living generator of ours, by its id


@final
class SimulatedGenerator(_CpuGenerator):
    """A generator that says that it is on a simulated device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _devices[generator_id(self)]


class _GeneratorType(type(_CpuGenerator)):  # type: ignore[misc]
    """Of what kind `torch.Generator` becomes: the same, and it can be asked for one on a simulated device."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _CpuGenerator)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        if torch.device(device).type != NAME:
            return _CpuGenerator(device)
        generator = SimulatedGenerator("cpu")
        identity = generator_id(generator)
        _devices[identity] = torch.device(NAME, ordinal(device))
        weakref.finalize(generator, _devices.pop, identity, None).atexit = False
        return generator


class _Generator(_CpuGenerator, metaclass=_GeneratorType):
    """In the place of `torch.Generator`, whose C++ asks only backends of C++."""

    __doc__ = _CpuGenerator.__doc__


def install() -> None:
    """Makes `torch.Generator(device="sim:1")` possible."""
    _Generator.__module__, _Generator.__qualname__, _Generator.__name__ = "torch", "Generator", "Generator"
    torch.Generator = _Generator  # type: ignore[misc]


def make_default_generators(count: int) -> None:
    """Gives each device its default generator, seeded as torch's other ones are."""
    for index in range(count):
        generator = torch.Generator(f"{NAME}:{index}")
        generator.manual_seed(torch.initial_seed())
        _default.append(generator)


def default_generators() -> list[torch.Generator]:
    """The default generator of each device."""
    return _default


def default_generator(index: int) -> torch.Generator:
    """From which operators on a device draw if they are given no generator."""
    return _default[index]


def check_generator(generator: torch.Generator, index: int) -> None:
    """Refuses a generator of another device, in the words of accelerators.

    Raises:
        RuntimeError: If it is not one of this device.
    """
    wanted = torch.device(NAME, index)
    found = _devices.get(generator_id(generator), generator.device)
    if found != wanted:
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")
