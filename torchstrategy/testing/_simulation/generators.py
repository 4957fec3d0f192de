"""Random numbers of simulated devices: each device has a generator, which has a generator of the CPU inside.

A program has a `SimulatedGenerator`, of which torch's C++ is told that it is one of a simulated device. So torch's
dispatcher brings an operator of the CPU that is given one to a kernel of this package, which refuses it, as a GPU does.
The kernels draw from the generator inside.

The state is that of the generator inside, behind 16 bytes that are those of a GPU: a seed and an offset, which says how
many numbers were drawn. The offset here says only whether any were. States of the CPU and of devices have other sizes,
so neither takes one of the other. A DTensor wants the 16 bytes alone, and sets the offset for each shard; see
`counted_state`.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, NamedTuple, final

import torch

from torchstrategy.testing._simulation.facades import put_in_place
from torchstrategy.testing._simulation.ordinals import NAME, ordinal
from torchstrategy.testing._simulation.torch_internals import generator_id, say_it_is_simulated

_default: list[SimulatedGenerator] = []  # filled once, by `make_default_generators`
COUNTED_STATE = 16  # the bytes of a GPU's state
_WORD = 4  # an offset counts in fours


class _Counted(NamedTuple):
    """The seed and offset that a generator was set to last, and its own seed and state just after."""

    seed: int
    offset: int
    made_of: int
    state: torch.Tensor


@final
class _Inside:
    """What draws for a generator of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator("cpu")
        self.counted: _Counted | None = None

    def seed_and_offset(self) -> tuple[int, int]:
        seed = self.generator.initial_seed()
        if self.counted is None or self.counted.made_of != seed:
            return seed, _WORD * (not torch.equal(self.generator.get_state(), _fresh(seed)))
        # Operators have drawn since; by how far a GPU would have moved on does not matter.
        has_drawn = not torch.equal(self.generator.get_state(), self.counted.state)
        return self.counted.seed, self.counted.offset + _WORD * has_drawn

    def set_counted(self, seed: int, offset: int) -> None:
        # Neighbouring seeds and offsets have to lead to numbers that have nothing to do with each other.
        digest = hashlib.blake2b(f"{seed},{offset}".encode(), digest_size=8).digest()
        self.generator.manual_seed(int.from_bytes(digest, "little", signed=True))
        self.note(seed, offset)

    def note(self, seed: int, offset: int) -> None:
        """Notes to what the generator was set."""
        self.counted = _Counted(seed, offset, self.generator.initial_seed(), self.generator.get_state())


_inside: dict[int, _Inside] = {}  # of each living generator of this file, by the generator's id


def _fresh(seed: int) -> torch.Tensor:
    return torch.Generator("cpu").manual_seed(seed).get_state()


@final
class SimulatedGenerator(torch.Generator):  # the original: `install` puts another one in its place
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
        counted, seed = self._inside.counted, self._inside.generator.initial_seed()
        return counted.seed if counted is not None and counted.made_of == seed else seed

    def get_state(self) -> torch.Tensor:
        return torch.cat([_packed(*self._inside.seed_and_offset()), self._inside.generator.get_state()])

    def set_state(self, new_state: torch.Tensor) -> SimulatedGenerator:
        """Sets a state of a generator of a device, or the 16 bytes of a GPU's.

        Raises:
            TypeError: If it is no tensor of bytes on the CPU.
            RuntimeError: If it is the state of something else.
        """
        if not isinstance(new_state, torch.Tensor):
            raise TypeError(f"expected a torch.ByteTensor, but got {type(new_state).__name__}")
        if new_state.dtype is not torch.uint8 or not new_state.is_cpu or new_state.layout is not torch.strided:
            raise TypeError("RNG state must be a torch.ByteTensor")
        inside, state = self._inside, new_state.detach().contiguous().clone()
        inner = inside.generator.get_state().numel()
        if state.numel() not in (COUNTED_STATE, COUNTED_STATE + inner):
            raise RuntimeError("RNG state is wrong size")
        seed, offset = state[:COUNTED_STATE].view(torch.int64).tolist()
        if state.numel() == COUNTED_STATE:
            inside.set_counted(seed, offset)
        else:
            inside.generator.set_state(state[COUNTED_STATE:].clone())
            inside.note(seed, offset)
        return self

    def get_offset(self) -> int:
        """The offset: 0 where nothing was drawn since the seed was set. It moves on by 4, however much is drawn."""
        return self._inside.seed_and_offset()[1]

    def set_offset(self, offset: int) -> SimulatedGenerator:
        """Sets the offset. Each leads to numbers of its own, which are not those that were drawn at it before.

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
    return _made(torch.device(NAME) if index is None else torch.device(NAME, index)).set_state(state)


def make_default_generators(count: int) -> None:
    """Gives each device its default generator, seeded as torch's other default generators are."""
    for index in range(count):
        _default.append(_made(torch.device(NAME, index)).manual_seed(torch.initial_seed()))


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
        RuntimeError: If it is none of a device, in torch's words. A GPU does not ask which GPU it is of.
    """
    found = _inside.get(generator_id(generator))
    if found is None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generator.device.type}'")
    return found.generator


def refused_by_the_cpu() -> RuntimeError:
    """What an operator of the CPU raises that is given a generator of a device, in torch's words."""
    return RuntimeError(f"Expected a 'cpu' device type for generator but found '{NAME}'")


def counted_state(index: int) -> torch.Tensor:
    """The state of the default generator of a device as a GPU has it: a seed and an offset, of 8 bytes each.

    It leads to the same numbers wherever it is set. It is not the state in which the generator is now: numbers that are
    drawn after it was set are not what the generator would have drawn next.
    """
    found = _inside[generator_id(_default[index])]
    if found.counted is None or found.counted.made_of != found.generator.initial_seed():
        return _packed(found.generator.initial_seed(), 0)
    return _packed(*found.seed_and_offset())


def _packed(seed: int, offset: int) -> torch.Tensor:
    return torch.tensor([_signed(seed), offset], device="cpu").view(torch.uint8)


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed
