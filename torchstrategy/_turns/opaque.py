"""Objects whose state is no Python object: arrays, and random generators.

A replica that draws from a generator of a module draws what the others draw, as the
model on one device does.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

# Bytes of an array whose numbers are exchanged. A larger one is read at each hand-over.
LARGEST = 1 << 16
_KINDS = (np.ndarray, bytearray, torch.Generator, random.Random)
# NumPy imports these when somebody asks for them.
_OF_NUMPY = ("numpy.random._generator", "numpy.random.mtrand")


def is_opaque(cls: type) -> bool:
    """Whether objects of a class are arrays or random generators."""
    return issubclass(cls, _KINDS) or cls.__module__ in _OF_NUMPY


def can_exchange(thing: Any) -> bool:
    """Whether the state of an object is exchanged, and not one for all replicas.

    The generator that `torch.rand` uses, and large arrays, are not.
    """
    if isinstance(thing, torch.Generator):
        return thing is not torch.default_generator
    if isinstance(thing, np.ndarray):
        return thing.nbytes <= LARGEST and not thing.dtype.hasobject
    return not isinstance(thing, bytearray) or len(thing) <= LARGEST


def read_state(thing: Any) -> Any:
    """The state of an object, which can be compared with `==`."""
    if isinstance(thing, torch.Generator):
        return thing.get_state().numpy().tobytes()
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if isinstance(thing, bytearray):
        return bytes(thing)
    if isinstance(thing, random.Random):
        return thing.getstate()
    if hasattr(thing, "bit_generator"):
        return _Comparable(thing.bit_generator.state)
    return _Comparable(thing.get_state(legacy=False))


def write_state(thing: Any, state: Any) -> None:
    """Gives an object a state that was read from it."""
    if isinstance(thing, torch.Generator):
        thing.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(thing, np.ndarray):
        if thing.flags.writeable:
            thing[...] = np.frombuffer(state, thing.dtype).reshape(thing.shape)
    elif isinstance(thing, bytearray):
        thing[:] = state
    elif isinstance(thing, random.Random):
        thing.setstate(state)
    elif hasattr(thing, "bit_generator"):
        thing.bit_generator.state = state.state
    else:
        thing.set_state(state.state)


class _Comparable:
    """The state of a generator of NumPy, which has an array in it."""

    def __init__(self, state: Any) -> None:
        self.state, self._shown = state, repr(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Comparable) and self._shown == other._shown

    def __hash__(self) -> int:
        return hash(self._shown)
