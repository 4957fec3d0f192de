"""What happens where the backward of a replica begins.

The replica's loss is read, and the reading weighs the replica's gradient.

The gradients of a replica are multiplied by its part of the rows when they are reduced,
see `gradient_reducer`. A loss that was divided by something else gets another weight
here, before backward runs: `LossWeigher` multiplies the gradient with which it begins
by the quotient of the two weights. Where the terms of a loss have unlike weights,
backward begins at the terms, each with a gradient of its own.

`LossNotes` only looks on: where a strategy weighs by rows and nobody has said that it
should, a run warns. Of several workers with several replicas each, each worker compares
its own ones, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, final

import torch
from torch.autograd.graph import GradientEdge

from torchstrategy._base.context import is_in_replica, without_autograd
from torchstrategy._base.torch_internals import (
    hide_from_compiler,
    is_distributed_tensor,
    losses_run_by,
    unseen_by_function_modes,
)
from torchstrategy._group.group import Replica
from torchstrategy._group.participants import Participants
from torchstrategy._run.losses.graph_nodes import without_unpacking
from torchstrategy._run.losses.loss_terms import Term, read_terms
from torchstrategy._run.losses.loss_weights import (
    UNREAD,
    LossReading,
    LossWeights,
    weigh,
)
from torchstrategy._run.losses.told_losses import ToldLosses
from torchstrategy._run.losses.whole_batch import WholeBatchLook


class GradientsOfReplica(Protocol):
    """The gradients of one replica, as far as its losses have to do with them.

    Attributes:
        loss_factor: How much more than its rows the loss of the newest backward counts.
            None: its terms are not alike.
    """

    loss_factor: float | None

    def dropping(self) -> AbstractContextManager[None]:
        """A block in which backward adds nothing to them."""


MAX_BACKWARDS = 8  # of one replica in one run, that are looked at to warn

_Run = Callable[[Sequence[Any], Sequence[Any]], Any]


class _Watcher:
    """What is read of the losses of one run.

    Args:
        weights: How much each replica counts.
        rows: How many rows each replica of all workers has; None: nobody knows.
        first: Which of the replicas of all workers is the first one here.

    Attributes:
        found: How much the losses of each backward count.
        look: Looks whether a loss needs the whole batch. None: nobody does.
    """

    def __init__(
        self, weights: Participants, rows: Sequence[float] | None, first: int = 0
    ) -> None:
        self._weights, self._rows, self._first = weights, rows, first
        self.found: list[LossWeights] = []
        self.look: WholeBatchLook | None = None

    def _rows_of(self, r: int) -> float | None:
        """How many rows a replica of this process has; None: nobody knows."""
        return None if self._rows is None else self._rows[self._first + r]


@final
class LossNotes(_Watcher):
    """Notes, in each replica, what its losses were divided by.

    The notes are compared when the run has ended.
    """

    def __init__(
        self, weights: Participants, rows: Sequence[float] | None, first: int = 0
    ) -> None:
        super().__init__(weights, rows, first)
        self._notes: dict[int, list[LossReading]] = {r: [] for r in weights.present}

    def watching(
        self, replica: Replica, gradients: GradientsOfReplica
    ) -> losses_run_by:
        """A block in which the losses of a replica are noted. It waits for nobody."""
        return losses_run_by(partial(self._note, replica.index))

    def _note(
        self, r: int, outputs: Sequence[Any], grads: Sequence[Any], run: _Run
    ) -> Any:
        notes = self._notes[r]
        if is_in_replica() and len(notes) < MAX_BACKWARDS:
            with without_unpacking(), without_autograd():
                notes.append(reading_of(outputs, self.look, self._rows_of(r))[0])
        return run(outputs, grads)

    def compare(self) -> None:
        """Called when the run has ended, on the thread that called it."""
        numbers = set(map(len, self._notes.values()))
        if len(numbers) > 1:
            # Replicas ran unlike numbers of backwards: it is not known which belong
            # together.
            return
        # Other workers have the rest, and nobody asks them.
        own = sum(self._weights.parts) or 1.0
        parts = [0.0] * self._first + [part / own for part in self._weights.parts]
        for k in range(numbers.pop()):
            readings = {self._first + r: notes[k] for r, notes in self._notes.items()}
            self.found.append(weigh(readings, parts, self._rows))


@final
class LossWeigher(_Watcher):
    """Weighs each backward of the replicas by what its loss was divided by.

    All replicas meet where one begins.

    Args:
        weights: How much each replica counts.
        rows: How many rows each replica of all workers has; None: nobody knows.
        first: Which of the replicas of all workers is the first one here.
        told: Exchanges readings with other workers. None: there are none.
    """

    def __init__(
        self,
        weights: Participants,
        rows: Sequence[float] | None,
        first: int = 0,
        told: ToldLosses | None = None,
    ) -> None:
        super().__init__(weights, rows, first)
        self._told = told

    def watching(
        self, replica: Replica, gradients: GradientsOfReplica
    ) -> losses_run_by:
        """A block in which the backwards of a replica are weighted."""
        return losses_run_by(partial(self._weighted, replica, gradients))

    def compare(self) -> None:
        """All was compared where backwards began."""

    def _weighted(
        self,
        replica: Replica,
        gradients: GradientsOfReplica,
        outputs: Sequence[Any],
        grads: Sequence[Any],
        run: _Run,
    ) -> Any:
        if not is_in_replica():
            return run(outputs, grads)
        # A checkpoint may run its forward again, as the user's code runs.
        reading, terms = reading_of(outputs, self.look, self._rows_of(replica.index))
        factors = replica.synchronize(BY_LOSS, self._combined, reading)
        gradients.loss_factor = common_factor(factors)
        if factors is not None and not any(factors):
            # Nothing of its loss counts. The loss may be 0 / 0, and zero times its
            # gradient is NaN. But the replica has run a backward, and its hooks are
            # called.
            with gradients.dropping():
                return run(outputs, grads)
        return run(*weighted_roots(outputs, grads, terms, factors))

    def _combined(self, readings: Sequence[Any]) -> list[list[float] | None]:
        """The factors of the terms of each replica.

        It runs once for all, on the thread that called `run`.
        """
        present = self._weights.present
        own = dict(zip(present, readings, strict=True))
        parts = self._weights.parts_of_all
        with without_autograd(), unseen_by_function_modes():
            of_all = own if self._told is None else self._told.of_all(own, BY_LOSS)
        found = weigh(of_all, parts, self._rows, can_split=False)
        self.found.append(found)
        return [found.factors(self._first + r, self._weights.parts[r]) for r in present]


def reading_of(
    outputs: Sequence[Any],
    look: WholeBatchLook | None = None,
    rows: float | None = None,
) -> tuple[LossReading, list[Term]]:
    """What can be read where a backward begins: nothing unless it begins at one number.

    Args:
        outputs: Where it begins.
        look: Looks whether the loss needs the whole batch. None: nobody does.
        rows: How many rows the replica has. None: nobody knows.
    """
    loss = outputs[0] if len(outputs) == 1 else None
    if not isinstance(loss, torch.Tensor) or is_distributed_tensor(loss):
        return UNREAD, []
    with unseen_by_function_modes():
        value = loss.detach() if loss.numel() == 1 else None
    if value is None:
        return UNREAD, []
    terms = read_terms(loss)
    try:
        reading = LossReading.of(terms, value)
    except RuntimeError:  # a target whose memory is freed: backward will say so
        return UNREAD, []
    if look is not None:
        look.look(loss, len(terms), rows)
    return reading, terms


def common_factor(factors: Sequence[float] | None) -> float | None:
    """What all terms of a loss are multiplied by.

    It is None if the terms have different factors.
    """
    if factors is None:
        return 1.0
    return factors[0] if len(set(factors)) == 1 else None


def weighted_roots(
    outputs: Sequence[Any],
    grads: Sequence[Any],
    terms: Sequence[Term],
    factors: Sequence[float] | None,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The tensors where backward begins, and their gradients, for weighted terms.

    Each term of the loss is multiplied by its factor.

    Args:
        outputs: Where it would begin.
        grads: With which gradients.
        terms: Those of the loss.
        factors: One for each term, of which some are not zero. None: nothing is
            multiplied.
    """
    if factors is None:
        return outputs, grads
    (loss,), (grad,) = outputs, grads
    if len(set(factors)) > 1:
        return _roots(loss, grad, terms, factors)
    with without_autograd(), unseen_by_function_modes():
        return outputs, [grad * factors[0]]


def _roots(
    loss: torch.Tensor,
    grad: torch.Tensor,
    terms: Sequence[Term],
    factors: Sequence[float],
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Where backward begins if terms have unlike weights, and the gradients there."""
    # Backward does not come through the loss itself: what it would call there is called
    # here.
    for hook in list((loss._backward_hooks or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    edges, gradients = [], []
    with without_autograd(), unseen_by_function_modes():
        for term, factor in zip(terms, factors, strict=True):
            if factor and term.factor:
                edges.append(GradientEdge(term.entry.node, term.entry.index))
                gradients.append(term.entry.gradient(loss, grad.reshape(()) * factor))
    return edges, gradients


# The name of the synchronization point.
BY_LOSS = "backward, by gradient_reduction='loss'"

CLOSURE_OF_TERMS = (
    "optimizer.step(closure) with gradient_reduction='loss': the terms of the loss "
    "were divided by unlike numbers, and count differently in each replica, so the "
    "loss that the closure returns is not known for the whole batch. Let the closure "
    "make each mean by torchstrategy.nn.compute_average_loss, and say "
    "gradient_reduction='mean'."
)

hide_from_compiler(LossNotes._note)
hide_from_compiler(LossWeigher._weighted)
