"""Gradients that a step puts into `.grad` itself, in the place of a backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, final

import torch

from torchstrategy._base.marks import sum_of_bits, version_of, versions_of
from torchstrategy._base.memory import memory_id
from torchstrategy._base.torch_internals import raw_grads, set_raw_grads
from torchstrategy._group.workers import Workers
from torchstrategy._run.own.trained_tensors import TrainedTensors


# Note [Gradients that a step assigns]
# `parameter.grad = torch.autograd.grad(loss, parameter)[0]` makes a gradient of this
# worker's rows, and nobody is told. So the library knows the objects that are gradients
# of the whole batch: those that an exchange has made, and those that were there when
# the run began. Before anything is done with `.grad` that cannot be taken back, which
# is another backward, an update, or the end of the run, each other object is compared
# by the sum of its bits. If all workers have the same numbers there, they are left as
# they are. Else they are weighed and added up.
# What a step assigns may have the earlier gradient of the batch in it: `parameter.grad
# = parameter.grad + new`. The weights of all workers add up to 1, so that the earlier
# one is in the weighted sum once, as it should be. They do not where gradients are
# added up and not averaged, and nobody knows whether it is in there: then it is
# refused.
# Clipping reads all of a gradient: `clip_grad_norm_` on gradients of this worker's rows
# takes their norm, and what the workers add up is not what one device would have
# clipped. So an assigned gradient that was written in place and is not alike in all
# workers is refused. (What was computed out of place before it was assigned, nobody can
# see.)
# A step may also write on a gradient in place. After a backward of the run, that is
# what clipping does, alike in all workers; numbers of this worker's rows would make
# parameters differ, which `ValuesOfParameters` finds. Where no backward made the
# gradients, nobody would look: so a gradient that was written in such a run counts as
# assigned.
# To assign means a message, so all workers must do it alike. A step that assigns
# nothing sends none.
@final
class AssignedGradients:
    """Which gradients are of the whole batch, and what becomes of the others.

    Args:
        workers: The processes that train together.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.train(TrainedTensors([], [], averages_buffers=True))

    def train(self, tensors: TrainedTensors) -> None:
        """Takes other parameters.

        The gradients that they have count as those of the whole batch.
        """
        self._tensors = tensors
        # The versions of the gradients that were there when the run began.
        self._versions = [-1] * len(tensors.parameters)
        self.note_all()

    def note_all(self) -> None:
        """Says that the gradients that are there are those of the whole batch."""
        self.note(raw_grads(self._tensors.parameters))

    def note(self, gradients: Sequence[Any]) -> None:
        """The same, for a caller that has just read or written them."""
        self._known: list[weakref.ref[Any]]
        try:
            self._known = list(map(weakref.ref, gradients))
        except TypeError:  # some parameters have none
            self._known = [
                _NOTHING if gradient is None else weakref.ref(gradient)
                for gradient in gradients
            ]

    def begin_run(self) -> None:
        """Takes what the program put into `.grad` between runs as the whole batch's."""
        gradients: Sequence[Any] = raw_grads(self._tensors.parameters)
        if not all(map(is_, gradients, map(_target, self._known))) and self.find():
            self.note(gradients)
        self._versions = versions_of(gradients)

    def find_written(self, indices: Sequence[int] | None = None) -> list[int]:
        """The positions of parameters with another gradient, or one that was written.

        It looks at what has happened since the run began.
        """
        found = self.find(indices)
        looked_at = range(len(self._known)) if indices is None else indices
        gradients = raw_grads([self._tensors.parameters[i] for i in looked_at])
        written = [
            i
            for i, gradient, version in zip(
                looked_at, gradients, versions_of(gradients), strict=True
            )
            if gradient is not None and version != self._versions[i]
        ]
        return sorted({*found, *written})

    def find(self, indices: Sequence[int] | None = None) -> list[int]:
        """The positions of parameters that have another gradient.

        Args:
            indices: The positions to look at. None: all.
        """
        parameters, known = self._tensors.parameters, self._known
        if indices is not None and indices is not self._tensors.positions:
            parameters, known = (
                [parameters[i] for i in indices],
                [known[i] for i in indices],
            )
        gradients = raw_grads(parameters)
        of_batch = list(map(_target, known))
        if all(map(is_, gradients, of_batch)):  # as mostly
            return []
        rows = zip(
            range(len(gradients)) if indices is None else indices,
            gradients,
            of_batch,
            strict=True,
        )
        return [
            i
            for i, gradient, one in rows
            if gradient is not None and gradient is not one
        ]

    def add_up(
        self, indices: Sequence[int], weight: float, total_weight: float, point: str
    ) -> None:
        """Makes gradients those of the whole batch. All workers come to this together.

        Args:
            indices: The positions of their parameters.
            weight: How much this worker's replica counts.
            total_weight: How much all workers count.
            point: Where the step is, as the user would write it.

        Raises:
            RuntimeError: If only some workers have put a gradient there, or if it may
                count several times.
        """
        parameters = [self._tensors.parameters[i] for i in indices]
        found = [gradient for gradient in raw_grads(parameters) if gradient is not None]
        changed = self._find_changed(indices)
        # To read a sum from an accelerator, the host would wait for it.
        is_read = bool(changed) or any(
            gradient.is_cpu or gradient.is_sparse for gradient in found
        )
        sums = _read_sums(found) if is_read else None
        of_all = self._workers.all_gather_object((list(indices), sums), point)
        for w, (theirs, _) in enumerate(of_all):
            for i in set(theirs).symmetric_difference(indices):
                raise RuntimeError(
                    _UNLIKE.format(
                        self._tensors.names()[i], self._workers.index, w, point
                    )
                )
        sums_of_all = [theirs for _, theirs in of_all]
        if all(theirs is None for theirs in sums_of_all):
            self._refuse_ambiguous(indices, total_weight)
            totals = self._add_up_unread(found, weight, point)
        else:
            if None in sums_of_all:  # some workers had to read theirs
                sums_of_all = self._workers.all_gather_object(_read_sums(found), point)
            differ = [
                k
                for k, column in enumerate(zip(*sums_of_all, strict=True))
                if len(set(column)) > 1
            ]
            for k in differ:
                if indices[k] in changed:
                    raise RuntimeError(
                        _CHANGED.format(self._tensors.names()[indices[k]], point)
                    )
            self._refuse_ambiguous([indices[k] for k in differ], total_weight)
            totals = self._add_up_some(found, differ, weight, point)
        set_raw_grads(parameters, totals)
        for i, total in zip(indices, raw_grads(parameters), strict=True):
            assert total is not None
            self._known[i], self._versions[i] = weakref.ref(total), version_of(total)

    def _find_changed(self, indices: Sequence[int]) -> set[int]:
        """The positions of gradients that were written again after they were set.

        Before, they had become the gradients of this worker's rows.
        """
        gradients = raw_grads(self._tensors.parameters)
        # Gradients that were sent together are parts of one tensor, and count their
        # writes together.
        num_together = Counter(
            memory_id(gradient) for gradient in gradients if gradient is not None
        )
        changed = set()
        for i in indices:
            gradient = gradients[i]
            assert gradient is not None
            is_known = gradient is self._known[i]()
            allowed = (
                self._versions[i] + num_together[memory_id(gradient)] if is_known else 0
            )
            if version_of(gradient) > allowed:
                changed.add(i)
        return changed

    def _refuse_ambiguous(self, indices: Sequence[int], total_weight: float) -> None:
        for i in indices:
            if total_weight != 1.0 and self._known[i] is not _NOTHING:
                raise RuntimeError(_AMBIGUOUS.format(self._tensors.names()[i]))

    def _add_up_some(
        self,
        own: Sequence[torch.Tensor],
        differ: Sequence[int],
        weight: float,
        point: str,
    ) -> list[torch.Tensor]:
        """The gradients; those that differ between workers become their weighed sum."""
        weighed = [_weigh(own[k], weight) for k in differ]
        sums = self._workers.all_reduce(weighed, point, agreed=True)
        totals = list(own)
        for k, total in zip(differ, sums, strict=True):
            totals[k] = total
        return totals

    def _add_up_unread(
        self, own: Sequence[torch.Tensor], weight: float, point: str
    ) -> list[torch.Tensor]:
        """Does the same on an accelerator, which decides itself which gradients differ.

        The host reads none of them.
        """
        mine = torch.stack(list(map(sum_of_bits, own)))
        of_all = torch.stack(self._workers.all_gather(mine, 0, point))
        are_alike = (of_all == of_all[0]).all(0)
        sums = self._add_up_some(own, range(len(own)), weight, point)
        rows = zip(are_alike, own, sums, strict=True)
        return [
            torch.where(is_alike, gradient.detach(), total)
            for is_alike, gradient, total in rows
        ]


def _read_sums(gradients: Sequence[torch.Tensor]) -> list[int]:
    """Numbers by which workers see whether their gradients are alike."""
    return [int(sum_of_bits(gradient)) for gradient in gradients]


class _Gone:
    """A class whose objects nobody keeps."""


# Stands for a gradient that is not there.
_NOTHING: weakref.ref[Any] = weakref.ref(_Gone())
# What a reference refers to, or None.
_target: Callable[[weakref.ref[Any]], Any] = weakref.ref.__call__


def _weigh(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    # See Note [Where a gradient is weighed] in `_group/weighing`.
    dense = gradient.detach().to_dense()
    # What does not count may be NaN, and 0 * NaN is NaN.
    return dense * weight if weight else torch.zeros_like(dense)


_UNLIKE = (
    "The workers disagree about the gradient of {}: of workers {} and {}, only one has "
    "put a gradient of its own there before {}. Do it in all workers alike."
)

_AMBIGUOUS = (
    "The step has assigned the gradient of {}, which had one before, and "
    "gradient_reduction='sum' adds up what all workers have there. The earlier "
    "gradient may be a part of it, and would count once for each worker. Call "
    "optimizer.zero_grad() before strategy.run, or let loss.backward() make the "
    "gradient."
)

_CHANGED = (
    "The step has put a gradient of its own rows into {}.grad, and then changed it in "
    "place, as clip_grad_norm_ does, before {}: the gradient of the whole batch was "
    "not known yet. Call loss.backward(), which makes it at once. If you only add or "
    "scale, do it out of place: parameter.grad = parameter.grad + new."
)
