"""One training of the problem, in plain PyTorch or under the strategy.

Each step leaves a record.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.context import (
    current_replica_context,
    is_default,
    using_device,
)
from torchstrategy._base.devices import memory_device
from torchstrategy._base.errors import (
    LossWeightWarning,
    ReplicaBufferWarning,
    SharedWriteWarning,
    an,
)
from torchstrategy._base.options import LOSS, NO_OPTIONS, ReduceOp, RunOptions
from torchstrategy._base.tree import leaves_with_names, map_leaves, tree_flatten
from torchstrategy._base.types import Device, Tree
from torchstrategy._data.batch_types import move_to
from torchstrategy._group.participants import Participants, reduction_of
from torchstrategy.replicated import ReplicatedExtended
from torchstrategy.strategy import StrategyBase
from torchstrategy.testing._instruments import none_in_force
from torchstrategy.testing._lockstep import Lockstep
from torchstrategy.testing._same_as_plain.difference import Tolerance, updates_agree
from torchstrategy.testing._same_as_plain.loss_counts import (
    NOTHING_READ,
    LossCounts,
    LossNotes,
)
from torchstrategy.testing._same_as_plain.randomness import Source, Stream
from torchstrategy.testing._same_as_plain.record import (
    Numbers,
    Record,
    Sighting,
    frozen,
    gradients_of,
    named_buffers,
    named_parameters,
    optimizer_numbers,
    parameters_of,
)
from torchstrategy.testing._same_as_plain.row_statistics import RowStatistics


@final
@dataclass(frozen=True)
class Problem:
    """The model to train and what to compare; see `assert_same_as_plain`."""

    step: Callable[[Any, Any, Any], Tree]
    model_fn: Callable[[], Tree]
    optimizer_fn: Callable[[Any], Tree] | None
    batches: tuple[Tree, ...]
    strategy: StrategyBase
    options: RunOptions | None
    seed: int
    tolerance: Tolerance
    ignore: frozenset[str]
    # What notes where the step makes one number of its rows.
    row_statistics: RowStatistics | None = None

    @property
    def device(self) -> Device | None:
        """The device on which plain PyTorch trains: that of replica 0.

        None: the caller's default device.
        """
        return (
            None
            if is_default(self.strategy)
            else self.strategy.extended.worker_devices[0]
        )

    @property
    def devices(self) -> list[Device]:
        """All devices in use."""
        extended = self.strategy.extended
        return (
            []
            if self.device is None
            else [*extended.worker_devices, *extended.parameter_devices]
        )

    @property
    def reduction(self) -> ReduceOp:
        """How the gradients of the replicas become one."""
        default = getattr(self.strategy.extended, "_gradient_reduction", ReduceOp.MEAN)
        return reduction_of(self.options or NO_OPTIONS, default)

    @property
    def weighs_losses(self) -> bool:
        """Whether gradients are weighted by what each replica's loss was divided by."""
        losses = getattr(self.strategy.extended, "_losses", None)
        default = None if losses is None else losses.said
        return ((self.options or NO_OPTIONS).gradient_reduction or default) == LOSS

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return self.strategy.num_replicas_in_sync

    @property
    def step_name(self) -> str:
        """What to call the step in a message."""
        return f"`{getattr(self.step, '__name__', type(self.step).__name__)}`"


class Training(ABC):
    """A model and its optimizer, and the steps taken with them.

    Args:
        problem: The problem that is trained.
        stream: The random numbers of this training.
    """

    def __init__(self, problem: Problem, stream: Stream) -> None:
        self._problem = problem
        self._stream = stream
        with self._stream.in_force():
            self.models, self.optimizers = self._build()

    @property
    def drawn(self) -> list[Source]:
        """The generators from which the last step drew random numbers."""
        return self._stream.drawn

    def take(self, batch: Tree, leader: Record | None = None) -> Record:
        """Takes one step.

        If the gradients agree with the leader's but for rounding, the update is made
        from the leader's. Otherwise an optimizer may make much of rounding: Adam
        divides a gradient by its own size, and gradients of a bias before a
        normalisation layer are nothing but rounding.

        Args:
            batch: The batch. The step gets a copy, on which it may write.
            leader: Another training's record of the same step.
        """
        with self._stream.in_force(), self._updates(leader) as updates:
            sightings, shares, losses = self._run(copy.deepcopy(batch))
        return self._record(sightings, shares, updates, losses)

    def look(self) -> Record:
        """A record of the training before its first step."""
        return self._record(
            [Sighting.of((), self.models)],
            Participants((0,), (1.0,), ReduceOp.MEAN),
            [],
        )

    @abstractmethod
    def _build(self) -> tuple[Tree, Tree]:
        """Makes a model and its optimizer."""

    @abstractmethod
    def _run(self, batch: Tree) -> tuple[Sequence[Sighting], Participants, LossCounts]:
        """Calls the step."""

    def _record(
        self,
        sightings: Sequence[Sighting],
        shares: Participants,
        updates: Sequence[Numbers],
        losses: LossCounts = NOTHING_READ,
    ) -> Record:
        weighs_losses = self._problem.weighs_losses
        parameters = named_parameters(self.models)
        return Record(
            seen=tuple(sightings),
            shares=shares,
            updates=tuple(updates),
            gradients=gradients_of(parameters),
            parameters={
                name: frozen(parameter) for name, parameter in parameters.items()
            },
            buffers={
                name: frozen(buffer)
                for name, buffer in named_buffers(self.models).items()
            },
            optimizer=optimizer_numbers(self.optimizers, self._names()),
            tensors=dict(self._stream.numbers()),
            losses=losses,
            loss_parts=losses.parts(len(shares.parts)) if weighs_losses else None,
        )

    def _names(self) -> dict[int, str]:
        return {
            id(parameter): name
            for name, parameter in named_parameters(self.models).items()
        }

    @contextmanager
    def _updates(self, leader: Record | None) -> Iterator[list[Numbers]]:
        """A block that notes the gradients at each `optimizer.step()`.

        The block then replaces them by the gradients of the leader.
        """
        updates: list[Numbers] = []

        def before_update(optimizer: Optimizer, args: object, kwargs: object) -> None:
            parameters = parameters_of(optimizer, self._names())
            updates.append(gradients_of(parameters))
            theirs = (
                leader.updates[len(updates) - 1]
                if leader and len(updates) <= len(leader.updates)
                else None
            )
            if theirs is not None and updates_agree(
                updates[-1], theirs, self._problem.tolerance
            ):
                _put_gradients(parameters, theirs)

        hooks = [
            o.register_step_pre_hook(before_update)
            for o in tree_flatten(self.optimizers or ())[0]
        ]
        try:
            yield updates
        finally:
            for hook in hooks:
                hook.remove()


@final
class PlainTraining(Training):
    """A training in plain PyTorch, on the device of replica 0."""

    def _build(self) -> tuple[Tree, Tree]:
        # The model is made on the device on which the strategy makes it, since the
        # generator of another device would draw other weights. Then it is moved to the
        # device of replica 0.
        devices = self._problem.devices
        with using_device(devices[-1] if devices else None):
            models = _built(self._problem.model_fn)
        return _moved(models, self._problem.device), self._optimizers(models)

    def _optimizers(self, models: Tree) -> Tree:
        with using_device(self._problem.device):
            return _optimizers(self._problem.optimizer_fn, models)

    def _run(self, batch: Tree) -> tuple[Sequence[Sighting], Participants, LossCounts]:
        device = self._problem.device
        with using_device(device):
            batch = batch if device is None else move_to(batch, memory_device(device))
            watch = self._problem.row_statistics
            with nullcontext() if watch is None else watch.in_plain():
                sighting = _observed(
                    self._problem.step, self.models, self.optimizers, batch
                )
        return (
            [sighting],
            Participants((0,), (1.0,), self._problem.reduction),
            NOTHING_READ,
        )


@final
class ReplicaTraining(Training):
    """A training under the strategy.

    Args:
        problem: The problem that is trained.
        stream: The random numbers of this training.
        order: The order in which the replicas run; None: their usual order.
    """

    def __init__(
        self, problem: Problem, stream: Stream, order: Sequence[int] | None = None
    ) -> None:
        self._order = order
        super().__init__(problem, stream)

    def _build(self) -> tuple[Tree, Tree]:
        with self._problem.strategy.scope():
            models = _built(self._problem.model_fn)
            return models, _optimizers(self._problem.optimizer_fn, models)

    def _run(self, batch: Tree) -> tuple[Sequence[Sighting], Participants, LossCounts]:
        problem, notes = self._problem, LossNotes()
        (distributed,) = problem.strategy.experimental_distribute_dataset([batch])
        leaves = tree_flatten(distributed)[0]
        options, extended = problem.options or NO_OPTIONS, problem.strategy.extended
        counts = (
            extended._counts((distributed,), {}, options)
            if isinstance(extended, ReplicatedExtended)
            else None
        )
        shares = Participants.of(
            leaves, problem.num_replicas, options, problem.reduction, counts=counts
        )
        watch = problem.row_statistics
        if watch is not None:
            watch.next_step()
        step = partial(_noted, notes, watch, problem.step, self.models, self.optimizers)
        # What these warn of is compared here anyway.
        with self._in_order(), warnings.catch_warnings():
            for compared in (
                LossWeightWarning,
                SharedWriteWarning,
                ReplicaBufferWarning,
            ):
                warnings.simplefilter("ignore", compared)
            sightings = problem.strategy.run(
                step, args=(distributed,), options=problem.options
            )
        return (
            problem.strategy.experimental_local_results(sightings),
            shares,
            notes.counts(shares, leaves),
        )

    def _in_order(self) -> AbstractContextManager[object]:
        if self._order is None:
            return nullcontext()
        stack = ExitStack()
        # A `Lockstep` of the caller's would give turns as well.
        stack.enter_context(none_in_force())
        stack.enter_context(Lockstep(self._order))
        return stack


def _observed(
    step: Callable[[Any, Any, Any], Tree], models: Tree, optimizers: Tree, batch: Tree
) -> Sighting:
    """Calls the step, in plain PyTorch or in a replica, and keeps its numbers."""
    return Sighting.of(step(models, optimizers, batch), models)


def _noted(
    notes: LossNotes,
    watch: RowStatistics | None,
    step: Callable[[Any, Any, Any], Tree],
    models: Tree,
    optimizers: Tree,
    batch: Tree,
) -> Sighting:
    """Calls the step in a replica, and notes what its losses were divided by."""
    context = current_replica_context()
    assert context is not None
    replica = context.replica_id_in_sync_group
    with (
        notes.noting(replica),
        nullcontext() if watch is None else watch.in_replica(replica),
    ):
        return _observed(step, models, optimizers, batch)


def _built(model_fn: Callable[[], Tree]) -> Tree:
    models = model_fn()
    return _only("model_fn", models, "torch.nn.Module", nn.Module)


def _optimizers(optimizer_fn: Callable[[Any], Tree] | None, models: Tree) -> Tree:
    if optimizer_fn is None:
        return None
    return _only(
        "optimizer_fn", optimizer_fn(models), "torch.optim.Optimizer", Optimizer
    )


def _only(what: str, tree: Tree, name: str, kind: type) -> Tree:
    for path, leaf in leaves_with_names(tree):
        if not isinstance(leaf, kind):
            raise TypeError(
                f"{what} returns a {name}, or a list, tuple or dict of them; it "
                f"returned {an(type(leaf).__name__)}{f' at {path}' if path else ''}."
            )
    return tree


def _moved(models: Tree, device: Device | None) -> Tree:
    return (
        models
        if device is None
        else map_leaves(lambda model: model.to(memory_device(device)), models)
    )


def _put_gradients(parameters: dict[str, torch.Tensor], gradients: Numbers) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            gradient = gradients[name]
            if (
                parameter.grad is not None
                and gradient is not None
                and parameter.grad.layout is torch.strided
            ):
                parameter.grad.detach().copy_(gradient)
