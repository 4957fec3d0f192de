"""What a process has for itself, and ranks on threads would share: each rank puts on its own when its turn begins."""

from __future__ import annotations

import os
import random
import sys
from typing import Any, final

import numpy as np
import torch

from torchstrategy.testing._ranks.imports import Imports
from torchstrategy.testing._ranks.process import PythonState
from torchstrategy.testing._ranks.torch_internals import (
    forget_fake_results,
    put_module_hooks,
    put_settings,
    put_variables,
    take_module_hooks,
    take_settings,
    take_variables,
    variables_of_a_new_process,
)
from torchstrategy.testing._simulation.generators import default_generators


@final
class Belongings:
    """What Python has for one process, its environment, random numbers, script, hooks, groups and settings.

    Args:
        imports: What modules say while they are imported in the run.
        environment: Variables that it has, besides those of this process.
    """

    def __init__(self, imports: Imports, environment: dict[str, str] | None = None) -> None:
        self._imports = imports
        self._take()
        if environment is not None:
            self._python_state = PythonState(is_new=True)
            self._environment |= environment
            self._variables = variables_of_a_new_process()

    def put_on(self) -> None:
        """Makes them those of this process.

        Raises:
            FileNotFoundError: If the working folder is no longer there.
        """
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        torch.set_rng_state(self._torch)
        for generator, state in zip(default_generators(), self._devices, strict=True):
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        sys.modules["__main__"] = self._main  # a script is a module of its own in each rank, and pickle looks there
        put_variables(self._variables)
        put_module_hooks(self._hooks)
        put_settings(self._settings)
        forget_fake_results()
        self._python_state.put_on()
        self._imports.repeat(self._seen)

    def take_off(self) -> None:
        """Keeps what this process has now."""
        self._take()

    def _take(self) -> None:
        self._python_state, self._seen = PythonState(), len(self._imports)
        self._environment = dict(os.environ)
        self._torch = torch.get_rng_state()
        self._devices = [generator.get_state() for generator in default_generators()]
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._main = sys.modules["__main__"]
        self._variables = take_variables()
        self._hooks = take_module_hooks()
        self._settings = take_settings()
