"""The objects of the scope of a strategy whose replicas take turns on them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.context import is_in_replica
from torchstrategy._base.distributed_values import DistributedValues
from torchstrategy._base.objects.torch_hooks import Stepper, tell_of_steps
from torchstrategy._base.types import ReplicaFn, Tree
from torchstrategy._base.weak_references import living
from torchstrategy._run.placement import Placement
from torchstrategy._run.run_losses import code_of
from torchstrategy._run.storage import Storage
from torchstrategy._turns import refusals
from torchstrategy._turns.reachable import Reached, Walk
from torchstrategy._turns.run import KnownStep, TurnsRun
from torchstrategy._variables.kinds import SyncOnReadVariable
from torchstrategy._variables.variable import Variable


@final
class SharedObjects(Storage):
    """The program's own objects, on which several replicas of a process take turns.

    Args:
        placement: Where the replicas are, and which processes train together.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._steppers: weakref.WeakValueDictionary[int, Stepper] = (
            weakref.WeakValueDictionary()
        )
        self._variables: dict[int, weakref.ref[Variable]] = {}
        self._on_read: weakref.WeakValueDictionary[int, SyncOnReadVariable] = (
            weakref.WeakValueDictionary()
        )
        self.has_news = False
        self.warned: set[tuple[int, str]] = set()
        self._known: dict[object, KnownStep] = {}
        # The runs under way, the newest last: a merge function may begin another one.
        self._runs: list[TurnsRun] = []
        self._runs_under_way = 0
        self._thread: int | None = None  # that of the runs
        self._lock = threading.Lock()
        tell_of_steps(self)

    def take_part(self, module: nn.Module) -> None:
        if id(module) in self._modules or is_in_replica():
            return
        self.claim(module)
        self._modules[id(module)] = weakref.ref(
            module, functools.partial(_forget, weakref.ref(self), id(module))
        )
        self.has_news = True

    def take_variable(self, variable: Variable) -> None:
        self.claim(variable)
        self.has_news = True
        if isinstance(variable, SyncOnReadVariable):
            self._on_read[id(variable)] = variable
        else:
            self._variables[id(variable)] = weakref.ref(
                variable, functools.partial(_forget, weakref.ref(self), id(variable))
            )

    def take_stepper(self, stepper: Optimizer | Stepper) -> None:
        if is_in_replica():
            return
        if isinstance(stepper, Optimizer):
            self._optimizers[id(stepper)] = weakref.ref(
                stepper, functools.partial(_forget, weakref.ref(self), id(stepper))
            )
        else:
            self._steppers[id(stepper)] = stepper

    # Runs

    @contextmanager
    def running(self) -> Iterator[list[TurnsRun]]:
        """A block for one run.

        Gives a list to which the run is appended.

        Raises:
            RuntimeError: If another run is under way, unless a merge function of it
                begins this one.
        """
        with self._lock:
            here = threading.get_ident()
            if self._runs_under_way and (self._thread != here or is_in_replica()):
                raise RuntimeError(refusals.RUN_IN_RUN)
            self._thread, depth = here, len(self._runs)
            self._runs_under_way += 1
        try:
            yield self._runs
        finally:
            del self._runs[depth:]
            self._runs_under_way -= 1

    def before_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before any optimizer in the process takes a step, on its thread."""
        if self._runs:
            self._runs[-1].before_any_step(optimizer)

    def after_any_step(self, optimizer: Optimizer) -> None:
        """Called after any optimizer in the process has taken a step."""

    def known_of(
        self, fn: ReplicaFn, leaves: Sequence[Tree]
    ) -> tuple[KnownStep, Reached]:
        """What is known of a step from its earlier runs, and what it reaches.

        Args:
            fn: The step.
            leaves: The leaves of its arguments.
        """
        self.has_news = False
        name = type(fn).__name__ if isinstance(fn, nn.Module) else ""
        roots: list[tuple[str, Any]] = [(name, fn)]
        roots += [(type(m).__name__, m) for m in living(self._modules.values())]
        roots += [(type(o).__name__, o) for o in living(self._optimizers.values())]
        roots += [(type(s).__name__, s) for s in living(self._steppers.valuerefs())]
        roots += [(v.name, v) for v in living(self._variables.values())]
        roots += [
            (f"argument {i}", leaf)
            for i, leaf in enumerate(leaves)
            if not isinstance(leaf, (torch.Tensor, DistributedValues))
        ]
        key = code_of(fn)
        known = self._known.pop(key, None)
        reached = None if known is None else known.walk.go(roots)
        if known is None or reached is None:
            walk = Walk(roots)
            reached = walk.take()
            known = KnownStep(walk, reached)
        while len(self._known) >= MOST_STEPS:
            self._known.pop(next(iter(self._known)))
        self._known[key] = known
        return known, reached


MOST_STEPS = 8  # of which a strategy remembers what earlier runs have shown


def _forget(storage: weakref.ref[SharedObjects], key: int, _: object) -> None:
    """Forgets an object that the program has dropped, and what was kept for it.

    Python's garbage collector calls it, on any thread.
    """
    if (own := storage()) is not None:
        for table in (own._modules, own._optimizers, own._variables):
            table.pop(key, None)
        own._known.clear()
