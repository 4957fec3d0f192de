"""What a process has for itself, and ranks on threads would share.

Each rank puts its own belongings in place when its turn begins.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from torchstrategy.testing._ranks import process
from torchstrategy.testing._ranks.imports import Imports
from torchstrategy.testing._ranks.part import Part, never_same, part_of_names
from torchstrategy.testing._ranks.torch_internals import (
    forget_fake_results,
    put_hooks,
    put_variables,
    take_hooks,
    take_variables,
    variables_of_a_new_process,
)
from torchstrategy.testing._ranks.torch_settings import (
    NAMES,
    put_settings,
    take_settings,
)
from torchstrategy.testing._simulation.generators import default_generators


def _are_same_states(
    some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> bool:
    # Without an operator: a mode of the program would see it.
    return all(
        one.numpy().tobytes() == other.numpy().tobytes()
        for one, other in zip(some, others, strict=True)
    )


def _put_random_numbers(states: Sequence[torch.Tensor]) -> None:
    of_the_cpu, *of_devices = states
    torch.set_rng_state(of_the_cpu)
    for generator, state in zip(default_generators(), of_devices, strict=True):
        generator.set_state(state)


def _take_random_numbers_of_numpy() -> bytes:
    # Bytes are compared, since arrays are not compared as a whole.
    return pickle.dumps(np.random.get_state(legacy=False))


def _put_random_numbers_of_numpy(state: bytes) -> None:
    np.random.set_state(pickle.loads(state))


def _put_script(module: Any) -> None:
    # A script is a module of its own in each rank, and pickle looks there.
    sys.modules["__main__"] = module


_PARTS = [
    Part(
        lambda: [
            torch.get_rng_state(),
            *(generator.get_state() for generator in default_generators()),
        ],
        _put_random_numbers,
        _are_same_states,
    ),
    Part(random.getstate, random.setstate),
    Part(_take_random_numbers_of_numpy, _put_random_numbers_of_numpy),
    Part(lambda: sys.modules["__main__"], _put_script),
    Part(
        take_variables,
        put_variables,
        never_same,
        lambda values: variables_of_a_new_process(),
    ),
    Part(take_hooks, put_hooks, never_same),
    Part(take_settings, put_settings),
    part_of_names(NAMES),
    *process.PARTS,
]
_ENVIRONMENT = _PARTS.index(process.ENVIRONMENT)


@final
class Belongings:
    """What Python and torch have for one process.

    This is environment, random numbers, script, hooks, groups, settings and folder.

    Args:
        imports: What modules say while they are imported in the run.
    """

    def __init__(self, imports: Imports) -> None:
        self._imports = imports
        self.take_off()

    def begin_process(self, environment: dict[str, str]) -> Belongings:
        """What a process has that this one begins.

        Args:
            environment: Variables that it has, besides those of this process.
        """
        new = copy.copy(self)
        new._values = [
            part.begin(value) for part, value in zip(_PARTS, self._values, strict=True)
        ]
        new._values[_ENVIRONMENT] = process.add_to_environment(
            new._values[_ENVIRONMENT], environment
        )
        return new

    def put_on(self, over: Belongings | None = None) -> None:
        """Makes them those of this process.

        Args:
            over: What this process has now, if that is known: what is the same there is
                left as it is.

        Raises:
            FileNotFoundError: If the working folder is no longer there.
        """
        there = [part.take() for part in _PARTS] if over is None else over._values
        forget_fake_results()
        for part, mine, other in zip(_PARTS, self._values, there, strict=True):
            if not part.is_same(mine, other):
                part.put(mine)
        self._imports.repeat(self._seen)

    def take_off(self) -> None:
        """Keeps what this process has now."""
        self._values, self._seen = [part.take() for part in _PARTS], len(self._imports)
