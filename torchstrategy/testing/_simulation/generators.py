"""Random numbers of simulated devices, each of which has a generator.

Inside this generator is one of the CPU.

A program has a `SimulatedGenerator`, of which torch's C++ is told that it is one of a
simulated device. So torch's dispatcher brings an operator of the CPU that is given one
to a kernel of this package, which refuses it, as a GPU does. The kernels draw from the
generator inside.

The state is that of the generator inside, behind 16 bytes that are those of a GPU: a
seed and an offset, which says how many numbers were drawn. The offset here says only
whether any were. States of the CPU and of devices have other sizes, so neither takes
one of the other. A DTensor wants the 16 bytes alone, and sets the offset for each
shard; see `counted_state`.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import weakref
from typing import Any, NamedTuple, final

import numpy as np
import torch

from torchstrategy.testing._simulation.facades import put_in_place
from torchstrategy.testing._simulation.ordinals import NAME, ordinal
from torchstrategy.testing._simulation.torch_internals import (
    generator_id,
    say_it_is_simulated,
)

_default: list[SimulatedGenerator] = []  # filled once, by `make_default_generators`
COUNTED_STATE = 16  # the bytes of a GPU's state
_WORD = 4  # an offset counts in fours


class _Counted(NamedTuple):
    """The seed and offset that a generator was set to last."""

    seed: int
    offset: int

    def own_seed(self) -> int:
        """The seed of the generator inside, unrelated to those of its neighbours."""
        digest = hashlib.blake2b(
            f"{self.seed},{self.offset}".encode(), digest_size=8
        ).digest()
        return int.from_bytes(digest, "little") >> 1  # a seed is a signed 64-bit number


@final
class _Inside:
    """What draws for a generator of a device.

    Two that are in the same state say the same seed and offset, whatever they were set
    to before: both follow from the state of the generator inside, and from the seed
    that it was given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator("cpu")
        self.counted: _Counted | None = None

    def counted_now(self) -> _Counted | None:
        """The seed and offset to which the generator was set.

        It is None if the generator was seeded since, or never set.
        """
        counted = self.counted  # another thread may exchange it meanwhile
        return (
            counted
            if counted is not None
            and counted.own_seed() == self.generator.initial_seed()
            else None
        )

    def seed_and_offset(self) -> tuple[int, int]:
        own = self.generator.initial_seed()
        seed, offset = self.counted_now() or (own, 0)
        # By how far a GPU would have moved on does not matter.
        return seed, offset + _WORD * (
            _bytes_of(self.generator.get_state()) != _fresh(own)
        )

    def set_counted(self, seed: int, offset: int) -> None:
        self.counted = counted = _Counted(seed, offset)
        self.generator.manual_seed(counted.own_seed())

    def set_state(self, state: torch.Tensor, seed: int, offset: int) -> None:
        """Sets the state of the generator inside, which says the seed and offset."""
        self.generator.set_state(state)
        own = self.generator.initial_seed()
        # The generator has the second state if it has drawn since.
        known = (_Counted(seed, offset), _Counted(seed, offset - _WORD))
        self.counted = next((one for one in known if one.own_seed() == own), None)


# The generator inside each living generator of this file, by the outer one's id.
_inside: dict[int, _Inside] = {}


@functools.lru_cache(maxsize=64)
def _fresh(seed: int) -> bytes:
    """The state of a CPU generator that has drawn nothing since it was seeded."""
    return _bytes_of(torch.Generator("cpu").manual_seed(seed).get_state())


def _bytes_of(state: torch.Tensor) -> bytes:
    """The bytes of a state, read without an operator.

    So a program that counts operators does not count this.
    """
    return state.numpy().tobytes()


def _state_of(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


@final
# This derives from the original class: `install` puts another one in its place.
class SimulatedGenerator(torch.Generator):
    """A generator of a simulated device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._inside.device

    @property
    def _inside(self) -> _Inside:
        return _inside[generator_id(self)]

    def manual_seed(self, seed: int) -> SimulatedGenerator:
        self._inside.generator.manual_seed(seed)
        self._inside.counted = None
        return self

    def seed(self) -> int:
        self._inside.counted = None
        return self._inside.generator.seed()

    def initial_seed(self) -> int:
        counted = self._inside.counted_now()
        return (
            self._inside.generator.initial_seed() if counted is None else counted.seed
        )

    def get_state(self) -> torch.Tensor:
        inside = self._inside
        return _state_of(
            _packed(*inside.seed_and_offset()) + _bytes_of(inside.generator.get_state())
        )

    def set_state(self, new_state: torch.Tensor) -> SimulatedGenerator:
        """Sets a state of a generator of a device, or the 16 bytes of a GPU's.

        Raises:
            TypeError: If it is no tensor of bytes on the CPU.
            RuntimeError: If it is the state of something else.
        """
        if not isinstance(new_state, torch.Tensor):
            raise TypeError(
                f"expected a torch.ByteTensor, but got {type(new_state).__name__}"
            )
        if (
            new_state.dtype is not torch.uint8
            or not new_state.is_cpu
            or new_state.layout is not torch.strided
        ):
            raise TypeError("RNG state must be a torch.ByteTensor")
        inside, content = self._inside, _bytes_of(new_state.detach().contiguous())
        inner = inside.generator.get_state().numel()
        if len(content) not in (COUNTED_STATE, COUNTED_STATE + inner):
            raise RuntimeError("RNG state is wrong size")
        seed, offset = struct.unpack("<Qq", content[:COUNTED_STATE])
        if len(content) == COUNTED_STATE:
            inside.set_counted(seed, offset)
        else:
            inside.set_state(_state_of(content[COUNTED_STATE:]), seed, offset)
        return self

    def get_offset(self) -> int:
        """The offset: 0 where nothing was drawn since the seed was set.

        It moves on by 4, however much is drawn.
        """
        return self._inside.seed_and_offset()[1]

    def set_offset(self, offset: int) -> SimulatedGenerator:
        """Sets the offset.

        Each leads to numbers of its own, which are not those that were drawn at it
        before.

        Raises:
            RuntimeError: If it is not a multiple of 4.
        """
        if offset % _WORD:
            raise RuntimeError("offset must be a multiple of 4")
        seed, now = self._inside.seed_and_offset()
        if offset == 0:
            self.manual_seed(seed)
        elif offset != now:
            self._inside.set_counted(seed, offset)
        return self

    def clone_state(self) -> SimulatedGenerator:
        """Another generator of the device, in the same state."""
        return _made(self.device).set_state(self.get_state())

    def graphsafe_get_state(self) -> SimulatedGenerator:
        """Another generator of the device, in the same state."""
        return self.clone_state()

    def graphsafe_set_state(self, other: SimulatedGenerator) -> SimulatedGenerator:  # type: ignore[override]
        """Takes over the state of another generator."""
        return self.set_state(other.get_state())

    def __reduce__(self) -> Any:
        return _made_again, (self.device.index, self.get_state())


def install() -> None:
    """Makes `torch.Generator(device="sim:1")` possible."""
    put_in_place("Generator", _generator)


def _generator(original: Any, device: Any = "cpu") -> torch.Generator:
    # A number means the accelerator's device.
    if not isinstance(device, int) and torch.device(device).type != NAME:
        made: torch.Generator = original(device)
        return made
    if isinstance(device, int) or torch.device(device).index is not None:
        return _made(torch.device(NAME, ordinal(device)))
    return _made(torch.device(NAME))


def _made(device: torch.device) -> SimulatedGenerator:
    generator = SimulatedGenerator("cpu")
    identity = generator_id(generator)
    _inside[identity] = _Inside(device)
    weakref.finalize(generator, _inside.pop, identity, None).atexit = False
    say_it_is_simulated(generator, device)
    return generator


def _made_again(index: int | None, state: torch.Tensor) -> SimulatedGenerator:
    return _made(
        torch.device(NAME) if index is None else torch.device(NAME, index)
    ).set_state(state)


def make_default_generators(count: int) -> None:
    """Gives each device its default generator, seeded as torch's other ones are."""
    for index in range(count):
        _default.append(
            _made(torch.device(NAME, index)).manual_seed(torch.initial_seed())
        )


def default_generators() -> list[SimulatedGenerator]:
    """The default generator of each device."""
    return _default


def default_generator(index: int) -> SimulatedGenerator:
    """The generator from which operators on a device draw if they are given none."""
    return _default[index]


def inside_default_generator(index: int) -> torch.Generator:
    """The generator of the CPU that draws for the default generator of a device."""
    return _inside[generator_id(_default[index])].generator


def inside(generator: torch.Generator) -> torch.Generator:
    """The generator of the CPU that draws for a generator of a device.

    Raises:
        RuntimeError: If it is none of a device, in torch's words. A GPU does not ask
            which GPU it is of.
    """
    found = _inside.get(generator_id(generator))
    if found is None:
        raise RuntimeError(
            f"Expected a '{NAME}' device type for generator but found "
            f"'{generator.device.type}'"
        )
    return found.generator


def refused_by_the_cpu() -> RuntimeError:
    """What a CPU operator raises that gets a device's generator, in torch's words."""
    return RuntimeError(
        f"Expected a 'cpu' device type for generator but found '{NAME}'"
    )


def counted_state(index: int) -> torch.Tensor:
    """The state of the default generator of a device as a GPU has it.

    The state is a seed and an offset, of 8 bytes each.

    It leads to the same numbers wherever it is set. It is not the state in which the
    generator is now: numbers that are drawn after it was set are not what the generator
    would have drawn next.
    """
    found = _inside[generator_id(_default[index])]
    if found.counted_now() is None:
        return _state_of(_packed(found.generator.initial_seed(), 0))
    return _state_of(_packed(*found.seed_and_offset()))


def _packed(seed: int, offset: int) -> bytes:
    return struct.pack("<Qq", seed % 2**64, offset)
