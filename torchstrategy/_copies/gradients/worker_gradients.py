"""All workers' gradients, added up, and what all replicas have to agree about.

A worker comes here with the weighted gradients of its own replicas, and with the
accumulated gradients as these replicas have left them: what `gradient_reducer` does for
the replicas of one process is done here for the processes.
"""

from __future__ import annotations

import struct
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from torchstrategy._base.marks import sum_of_bits
from torchstrategy._base.options import ReduceOp
from torchstrategy._copies.gradients.replica_gradients import EarlyReads
from torchstrategy._group.participants import Participants
from torchstrategy._group.reductions import sum_of_sparse
from torchstrategy._group.workers import Workers

_POINT = "the reduction of gradients"

# What each worker tells of each parameter, in one byte.
# Which kind of gradient there is to add, and whether hooks see it.
_DENSE, _SPARSE, _SEEN = 1, 2, 4
_DOUBTFUL, _IDLE_READ, _UNREAD = 8, 16, 32  # see `EarlyReads`
_CLEARED, _CHANGED = 64, 128  # what became of the accumulated gradient

Table = np.ndarray[Any, Any]  # a row for each worker, a column for each parameter


@final
@dataclass
class WorkerReduction:
    """One reduction of gradients over all workers, and what this worker brings to it.

    `meet` comes first, then `sums`.

    Args:
        workers: The processes that train together.
        weights: How much each replica of this worker counts.
        owners: The user's parameters.
        names: What to call them in a message.
        before: Their accumulated gradients before the step could change them.
        accumulated: The same as the replicas of this worker have left them. `sums`
            replaces what others decide.
        total: The weighted sums of the local gradients of this worker's replicas, by
            position.
        seen: The positions of the parameters whose hooks are to see the sums.
        early: The gradients that replicas of this worker have read before they were
            complete, or might have.
    """

    workers: Workers
    weights: Participants
    owners: list[torch.Tensor]
    names: list[str]
    before: list[torch.Tensor | None]
    accumulated: list[torch.Tensor | None]
    total: dict[int, torch.Tensor]
    seen: Set[int]
    early: EarlyReads

    def meet(self) -> None:
        """Learns what the other workers bring."""
        flags = np.zeros(len(self.owners), np.uint8)
        dense = [
            index for index, gradient in self.total.items() if not gradient.is_sparse
        ]
        cleared, changed = self._find_changes()
        for flag, indices in (
            (_DENSE, dense),
            (_SPARSE, self.total.keys() - set(dense)),
            (_SEEN, self.seen),
            (_DOUBTFUL, self.early.doubtful),
            (_IDLE_READ, self.early.idle),
            (_UNREAD, self.early.unread),
            (_CLEARED, cleared),
            (_CHANGED, changed),
        ):
            if indices:
                flags[list(indices)] |= flag
        marks = [int(sum_of_bits(gradient)) for gradient in changed.values()]
        self.workers.compare("how many parameters there are:", len(flags))
        own = struct.pack(_MARK * len(marks), *marks)
        of_all = self.workers.all_gather_alike(
            bytes([self.weights.is_understudy]) + flags.tobytes() + own, _POINT
        )
        self._is_understudy = np.array([one[0] for one in of_all], bool)
        self._told: Table = np.stack(
            [np.frombuffer(one, np.uint8)[1 : 1 + len(flags)] for one in of_all]
        )
        self._marks = [one[1 + len(flags) :] for one in of_all]

    def sums(self) -> tuple[dict[int, torch.Tensor], set[int]]:
        """The sums over all workers by position, and whose hooks are to see them.

        Those are positions of parameters.

        Raises:
            RuntimeError: If the workers disagree about an accumulated gradient, or one
                was read before it was complete.
        """
        if not self._told.any():  # as at the end of most runs
            self.accumulated[:] = self.before
            return {}, set()
        some_unread = self._is_told(_IDLE_READ) & self._is_told(_UNREAD)
        too_early = self._is_told(_DENSE | _SPARSE) & (
            self._is_told(_DOUBTFUL) | some_unread
        )
        if too_early.any():
            raise RuntimeError(
                _TOO_EARLY.format(self.names[min(_positions_in(too_early))])
            )
        self._agree()
        kinds = dict.fromkeys(sorted(_positions_in(self._is_told(_SPARSE))), True)
        kinds.update(dict.fromkeys(_positions_in(self._is_told(_DENSE)), False))
        return sum_over_processes(
            self.workers, self.total, kinds, self.owners
        ), _positions_in(self._is_told(_SEEN))

    def _find_changes(self) -> tuple[list[int], dict[int, torch.Tensor]]:
        """The accumulated gradients that replicas have cleared, and those they changed.

        They are given by their positions.
        """
        cleared, changed = [], {}
        for index, (was, now) in enumerate(
            zip(self.before, self.accumulated, strict=True)
        ):
            if now is not None and now is not was:
                changed[index] = now
            elif now is not was:
                cleared.append(index)
        return cleared, changed

    def _is_told(self, flags: int) -> Table:
        """Which parameters any worker tells one of these things of."""
        return np.asarray((self._told & flags).any(0))

    def _agree(self) -> None:
        """Makes one of what all workers' replicas did to the accumulated gradients."""
        # Workers without rows do what the others do.
        counting = self._told[~self._is_understudy]
        cleared, changed = (
            (counting & flag != 0).sum(0) for flag in (_CLEARED, _CHANGED)
        )
        had = np.array([was is not None for was in self.before], bool)
        some_cleared = (changed == 0) & (cleared > 0) & (cleared < len(counting))
        disagree = some_cleared | (
            (changed > 0) & (changed < len(counting)) & (had | (cleared > 0))
        )
        if disagree.any():
            raise RuntimeError(
                _DISAGREE.format(self.names[min(_positions_in(disagree))])
            )
        rows = zip(self.before, cleared.tolist(), changed.tolist(), strict=True)
        for index, (was, is_cleared, is_changed) in enumerate(rows):
            if not is_changed:
                self.accumulated[index] = None if is_cleared else was
        unlike = self._find_unlike(_positions_in(changed))
        if not unlike:
            return
        # Each put a gradient of its own rows there: they are weighted as local
        # gradients are.
        if self.weights.reduction is not ReduceOp.MEAN:
            raise RuntimeError(_DISAGREE.format(self.names[unlike[0]]))
        here = {index: self._weigh(index) for index in unlike}
        for index, value in sum_over_processes(
            self.workers, here, dict.fromkeys(unlike, False), self.owners
        ).items():
            self.accumulated[index] = value

    def _find_unlike(self, changed: Set[int]) -> list[int]:
        """The changed gradients, by position, that not all workers changed alike.

        These are accumulated gradients.
        """
        if not changed:
            return []
        marks = []
        for flags, data in zip(self._told, self._marks, strict=True):
            of_worker = [mark for (mark,) in struct.iter_unpack(_MARK, data)]
            marks.append(
                dict(
                    zip(sorted(_positions_in(flags & _CHANGED)), of_worker, strict=True)
                )
            )
        return [
            index
            for index in sorted(changed)
            if len({own.get(index) for own in marks}) > 1
        ]

    def _weigh(self, index: int) -> torch.Tensor:
        value = self.accumulated[index]
        if value is None or self.weights.is_understudy:
            return torch.zeros_like(self.owners[index])
        # See Note [Where a gradient is weighed] in `_group/weighing`.
        return (value.to_dense() if value.is_sparse else value) * sum(
            self.weights.weights
        )


def sum_over_processes(
    workers: Workers,
    gradients: dict[int, torch.Tensor],
    kinds: dict[int, bool],
    like: list[torch.Tensor],
) -> dict[int, torch.Tensor]:
    """The sums of weighted gradients over all workers, by the parameters' positions.

    Args:
        workers: The processes that train together, which have just agreed about
            `kinds`.
        gradients: Those of this worker. What it lacks counts as zeros.
        kinds: The positions of the parameters for which any worker has a gradient, and
            whether all of these are sparse.
        like: The parameters.
    """
    dense = sorted(
        (index for index, is_sparse in kinds.items() if not is_sparse), reverse=True
    )
    here = [_make_dense(gradients.get(index), like[index]) for index in dense]
    added = dict(
        zip(
            dense,
            workers.all_reduce(here, _POINT, agreed=True) if here else [],
            strict=True,
        )
    )
    for index in sorted(kinds.keys() - added.keys()):
        added[index] = sum_of_sparse(workers, gradients.get(index), like[index], _POINT)
    return added


def _make_dense(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _positions_in(column: Table) -> set[int]:
    """The positions of the parameters of which a column tells something."""
    return set(column.nonzero()[0].tolist())


_MARK = "q"  # a sum of bits, as `struct` packs it

_DISAGREE = (
    "The workers disagree about the gradient of {}: some cleared or changed what was "
    "accumulated and others did not. Do it in every replica of every worker, or "
    "outside of strategy.run."
)
_TOO_EARLY = (
    "A replica of one worker read the gradient of {} as complete, and replicas of "
    "other workers still had to add theirs. Run backward in every replica before one "
    "of them reads a gradient: one that has nothing to train on runs a backward of "
    "zero, (outputs.sum() * 0).backward()."
)
