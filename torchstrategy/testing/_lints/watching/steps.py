"""Optimizers, schedulers, `GradScaler` and CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchstrategy.testing._lints.evidence.fingerprints import number_of
from torchstrategy.testing._lints.torch_internals import scale_of
from torchstrategy.testing._lints.watching.replaced import (
    Method,
    Replaced,
    after,
    before,
)
from torchstrategy.testing._lints.watching.telling import Telling
from torchstrategy.testing._ranks.world import current_rank
from torchstrategy.testing._simulation.cuda_graphs import CUDAGraph


@final
class Steps:
    """Is told of steps by torch's hooks, and replaces what is around them."""

    def __init__(self, telling: Telling) -> None:
        self._telling = telling

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """A block in which torch tells of the steps of optimizers."""
        hooks = [
            register_optimizer_step_pre_hook(
                lambda optimizer, *_: self._telling.tell("steps", optimizer)
            ),
            register_optimizer_step_post_hook(
                lambda optimizer, *_: self._telling.tell("stepped", optimizer)
            ),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def replaced(self) -> Replaced:
        """What is replaced."""
        optimizer, module, scaler = (
            torch.optim.Optimizer,
            torch.nn.Module,
            torch.amp.GradScaler,
        )
        return [
            (optimizer, "__init__", after(optimizer.__init__, self._has_optimizer)),
            (optimizer, "zero_grad", before(optimizer.zero_grad, self._zeroed)),
            (module, "zero_grad", before(module.zero_grad, self._zeroed)),
            (LRScheduler, "step", after(LRScheduler.step, self._scheduled)),
            (ReduceLROnPlateau, "step", after(ReduceLROnPlateau.step, self._measured)),
            (scaler, "scale", after(scaler.scale, self._scaled)),
            (scaler, "step", self._scaled_step(scaler.step)),
            *self._replaced_of_graphs(),
        ]

    def _has_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._telling.tell("has_optimizer", optimizer)

    def _zeroed(self, *_: Any, **__: Any) -> None:
        self._telling.tell("zeroed")

    def _scheduled(self, scheduler: Any, *_: Any, **__: Any) -> None:
        self._telling.saw("scheduled", scheduler)

    def _measured(
        self, scheduler: Any, metrics: Any = None, *_: Any, **__: Any
    ) -> None:
        self._telling.saw("measured", scheduler, metrics)

    def _scaled(self, scaler: Any, *_: Any, **__: Any) -> None:
        session, scale = self._telling.session(), scale_of(scaler)
        if session is not None and scale is not None:
            session.facts(current_rank()).scale = number_of(scale)

    def _scaled_step(self, step: Method) -> Method:
        @functools.wraps(step)
        def told(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            session = self._telling.session()
            if session is None:
                return step(scaler, optimizer, *args, **kwargs)
            with session.scaled_step(current_rank()):
                return step(scaler, optimizer, *args, **kwargs)

        return told

    def _replaced_of_graphs(self) -> Replaced:
        def begins(graph: Any, *_: Any, **__: Any) -> None:
            self._telling.saw("captures", graph, False)

        def ends(graph: Any) -> None:
            self._telling.saw("captures", graph, True)

        def replays(graph: Any) -> None:
            self._telling.saw("replayed", graph)

        told = {"capture_begin": begins, "capture_end": ends, "replay": replays}
        # The program may get the simulated one under torch's name only later.
        kinds: dict[Any, None] = {CUDAGraph: None, torch.cuda.CUDAGraph: None}
        return [
            (kind, name, after(getattr(kind, name), tell))
            for kind in kinds
            for name, tell in told.items()
        ]
