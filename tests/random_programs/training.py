"""What the parts of a program work on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from .optimizers import Optimizer

Batch = tuple[torch.Tensor, torch.Tensor]


class Hands:
    """What a step takes in its hands; in a replica each is the replica's own."""

    def __init__(
        self,
        model: Any,
        optimizers: list[Any],
        schedulers: list[Any],
        scaler: Any = None,
        teacher: Any = None,
        forward: Any = None,
        reads: Any = (),
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.scaler = scaler
        self.teacher = teacher
        self.forward = model if forward is None else forward
        self.reads = list(reads)  # what hooks keep outside of the model

    def parameters(self) -> list[Any]:
        """The model's, each once."""
        return list(self.model.parameters())

    def with_gradients(self) -> list[Any]:
        """Parameters that have one."""
        return [p for p in self.parameters() if p.grad is not None]


class Place(Protocol):
    """Where a program runs, as far as events see it."""

    def scope(self) -> AbstractContextManager[Any]:
        """Where models and optimizers are made."""

    def adopt(self, model: nn.Module) -> nn.Module:
        """A model that was made elsewhere."""

    def adopt_optimizer(self, optimizer: Any) -> Any:
        """An optimizer that was made elsewhere."""

    def wrapped(self, model: nn.Module) -> Any:
        """What a step calls as the model."""

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, in replicas if there are any."""

    def gathered(self, value: Any) -> torch.Tensor:
        """A result with rows."""

    def deal(self, batch: Batch) -> Any:
        """A batch for `run`."""


class Training(Hands):
    """A program under way: what its step works on, and what its user has beside it."""

    def __init__(
        self, place: Place, model: nn.Module, kinds: tuple[Optimizer, ...]
    ) -> None:
        super().__init__(model, [], [])
        self.place = place
        self.kinds = kinds
        self.views: list[torch.Tensor] = []  # that were saved
        self.states: list[dict[str, Any]] = []  # of models, that were saved
        self.optimizer_states: list[list[dict[str, Any]]] = []
        # That the user has beside the model, and compares at the end.
        self.others: list[nn.Module] = []
        self.hooks: list[Any] = []
        self.averaged: Any = None
        self.trainer: Any = None  # whose method the step is
        self.results: list[torch.Tensor] = []
        self.results_width = 0

    def fail(self, late: bool, everywhere: bool) -> None:
        """A step that raises."""
        raise NotImplementedError

    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def renew(self, model: nn.Module) -> None:
        """Goes on with another model, or with one whose parameters are others."""
        self.model = model
        self.forward = self.place.wrapped(model)
        with self.place.scope():
            self.optimizers = [kind.build(model) for kind in self.kinds]
            self.schedule()

    def schedule(self) -> None:
        """New schedulers, of the optimizers that there are."""
        made = (
            kind.schedule(optimizer)
            for kind, optimizer in zip(self.kinds, self.optimizers, strict=True)
        )
        self.schedulers = [scheduler for scheduler in made if scheduler is not None]
