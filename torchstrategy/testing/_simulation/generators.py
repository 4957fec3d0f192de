"""Random numbers of simulated devices: each device has a generator, which is a generator of the CPU inside.

Its state is that of the CPU's. A DTensor wants the state of a GPU's instead, which says by a seed and an offset how
many numbers were drawn, and sets the offset for each shard; see `counted_state`.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, NamedTuple, final

import torch

from torchstrategy.testing._simulation.facades import put_in_place
from torchstrategy.testing._simulation.ordinals import NAME, ordinal
from torchstrategy.testing._simulation.torch_internals import generator_id

_default: list[torch.Generator] = []  # filled once, by `make_default_generators`
_devices: dict[int, torch.device] = {}  # the device of each living generator of this file, by the generator's id


class _Counted(NamedTuple):
    """The seed and offset that a generator was set to last, and its own seed and state just after."""

    seed: int
    offset: int
    made_of: int
    state: torch.Tensor


_counted: dict[int, _Counted] = {}


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


def counted_state(index: int) -> torch.Tensor:
    """The state of the default generator of a device as a GPU has it: a seed and an offset, of 8 bytes each.

    It leads to the same numbers wherever it is set. It is not the state in which the generator is now: numbers that are
    drawn after it was set are not what the generator would have drawn next.
    """
    generator = _default[index]
    counted = _counted.get(index)
    if counted is None or counted.made_of != generator.initial_seed():
        seed, offset = generator.initial_seed(), 0
    else:
        # Other operators have drawn since; by how far a GPU would have moved on does not matter.
        has_drawn = not torch.equal(generator.get_state(), counted.state)
        seed, offset = counted.seed, counted.offset + 4 * has_drawn
    return torch.tensor([_signed(seed), offset]).view(torch.uint8)


def set_counted_state(index: int, state: torch.Tensor) -> None:
    """Sets the default generator of a device to a seed and an offset."""
    seed, offset = state.contiguous().view(torch.int64).tolist()
    generator = _default[index]
    # Neighbouring seeds and offsets have to lead to numbers that have nothing to do with each other.
    mixed = int.from_bytes(hashlib.blake2b(f"{seed},{offset}".encode(), digest_size=8).digest(), "little", signed=True)
    generator.manual_seed(mixed)
    _counted[index] = _Counted(seed, offset, generator.initial_seed(), generator.get_state())


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def check_generator(generator: torch.Generator, index: int) -> None:
    """Refuses a generator of another device, in the words that torch has for accelerators.

    Raises:
        RuntimeError: If it is not one of this device.
    """
    wanted = torch.device(NAME, index)
    found = _devices.get(generator_id(generator), generator.device)
    if found != wanted:
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")
