"""The random numbers and tensors that trainings share, kept apart for each of them.

A step draws random numbers from torch's default generators, Python's and numpy's, and
from generators that the step itself holds. It may also write on tensors that it holds,
and keep other values in globals, containers and attributes. The state of all of these
is exchanged between trainings, so that each training goes on as if it were the only
one.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from torchstrategy._base.context import is_accelerator
from torchstrategy._base.types import Device, GeneratorLike
from torchstrategy._copies.references.step_references import find_references
from torchstrategy._copies.run_warnings import shared_tensors
from torchstrategy._group.random_streams import generators_of
from torchstrategy.testing._same_as_plain.held import held_by
from torchstrategy.testing._same_as_plain.kept_state import KeptState, State


@final
@dataclass(frozen=True)
class Source:
    """One generator, or one tensor.

    Args:
        name: A name that a person would use.
        read: Returns its state.
        write: Sets its state.
        is_shared: Whether the step itself holds it, so that all replicas share it.
        number: Makes a tensor on the CPU of a state; None if the source is a generator.
    """

    name: str
    read: Callable[[], bytes]
    write: Callable[[bytes], Any]
    is_shared: bool = False
    number: Callable[[bytes], torch.Tensor] | None = None


@final
class Sources:
    """All generators from which a step may draw, and tensors on which it may write.

    The tensors are those outside of models.

    Args:
        functions: The functions that may hold some: first the step, then those that
            make models and optimizers.
        devices: The devices in use.
    """

    def __init__(self, functions: Sequence[Any], devices: Iterable[Device]) -> None:
        accelerators = sorted(
            {device for device in devices if is_accelerator(device)}, key=str
        )
        self.all = [
            _of_torch("torch's generator of the CPU", torch.default_generator),
            # Before CUDA is first used, torch has no object for that of a device.
            *(
                _of_torch(f"torch's generator of {d}", of)
                for d in accelerators
                for of in generators_of(d, False)
            ),
            _pickled(
                "Python's `random`", random.getstate, random.setstate, is_shared=False
            ),
            _pickled(
                "numpy's `np.random`",
                np.random.get_state,
                np.random.set_state,
                is_shared=False,
            ),
        ]
        held = {
            id(value): (name, value)
            for function in functions
            for name, value in held_by(function)
        }
        found = (
            _of_the_step(name, value)
            for name, value in held.values()
            if value is not torch.default_generator
        )
        self.all += [source for source in found if source is not None]
        reached = (
            pair
            for fn in functions
            for pair in shared_tensors(find_references(fn), (), ())
        )
        tensors = {
            id(tensor): (name, tensor) for name, tensor in reached if _is_plain(tensor)
        }
        self.all += [
            _of_tensor(f"`{name}`", tensor) for name, tensor in tensors.values()
        ]
        self.kept_state = KeptState(functions[0] if functions else None, functions[1:])

    def seed(self, seed: int) -> None:
        """Seeds the generators that belong to the process.

        Those that the step holds keep the user's state.
        """
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def states(self) -> list[bytes]:
        """The state of each source."""
        return [source.read() for source in self.all]

    def put(self, states: Sequence[bytes]) -> None:
        """Sets the state of each source."""
        for source, state in zip(self.all, states, strict=True):
            source.write(state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block after which all sources are as they were before.

        What the functions keep is restored, too.
        """
        states, kept = self.states(), self.kept_state.read()
        try:
            yield
        finally:
            self.kept_state.write(kept)
            self.put(states)


@final
class Stream:
    """The random numbers of one of several trainings, and the numbers of held tensors.

    The step of the training holds these tensors.

    Args:
        sources: The generators and tensors.
        states: The states with which the training begins.
    """

    def __init__(self, sources: Sources, states: Sequence[bytes]) -> None:
        self._sources = sources
        self._states = list(states)
        self._kept: State = sources.kept_state.read()
        self.drawn: list[Source] = []  # the generators from which the last block drew

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A block that goes on where the last block of this training stopped."""
        before = self._states
        others = self._sources.kept_state.read()
        self._sources.kept_state.write(self._kept)
        self._sources.put(before)
        try:
            yield
        finally:
            self._kept = self._sources.kept_state.read()
            self._sources.kept_state.write(others)
            self._states = self._sources.states()
            pairs = zip(self._sources.all, before, self._states, strict=True)
            self.drawn = [
                source
                for source, old, new in pairs
                if old != new and source.number is None
            ]

    def numbers(self) -> dict[str, torch.Tensor]:
        """The tensors that the step holds, as this training has left them."""
        pairs = zip(self._sources.all, self._states, strict=True)
        return {
            source.name: source.number(state)
            for source, state in pairs
            if source.number is not None
        }


def _of_torch(name: str, generator: GeneratorLike, is_shared: bool = False) -> Source:
    return Source(
        name,
        lambda: generator.get_state().numpy().tobytes(),
        lambda state: generator.set_state(
            torch.from_numpy(np.frombuffer(state, np.uint8).copy())
        ),
        is_shared,
    )


def _pickled(
    name: str, read: Callable[[], Any], write: Callable[[Any], Any], is_shared: bool
) -> Source:
    return Source(
        name,
        lambda: pickle.dumps(read()),
        lambda state: write(pickle.loads(state)),
        is_shared,
    )


def _of_tensor(name: str, tensor: torch.Tensor) -> Source:
    def read() -> bytes:
        bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return bits.numpy().tobytes()

    def number(state: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(state), dtype=tensor.dtype).reshape(
            tensor.shape
        )

    def write(state: bytes) -> None:
        if read() != state:
            # Through `.data`, which counts no version: for autograd, nothing has
            # happened.
            tensor.data.copy_(number(state))

    return Source(name, read, write, is_shared=True, number=number)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers are its whole state, and too few to be data."""
    is_ordinary = (
        tensor.layout is torch.strided
        and not tensor.is_inference()
        and not tensor.is_conj()
    )
    return is_ordinary and tensor.device.type != "meta" and 0 < tensor.nbytes <= _MUCH


_MUCH = 2**26


def _of_the_step(name: str, value: object) -> Source | None:
    if isinstance(value, torch.Generator):
        return _of_torch(name, value, is_shared=True)
    if isinstance(value, random.Random):
        return _pickled(name, value.getstate, value.setstate, is_shared=True)
    if isinstance(value, np.random.RandomState):
        return _pickled(name, value.get_state, value.set_state, is_shared=True)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _pickled(
            name,
            lambda: bits.state,
            lambda state: setattr(bits, "state", state),
            is_shared=True,
        )
    return None
