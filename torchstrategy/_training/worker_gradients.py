"""The gradients of all workers, added up, and what the replicas of all workers have to agree about.

A worker comes here with the weighted gradients of its own replicas, and with the accumulated gradients as these
replicas have left them: what `gradient_reducer` does for the replicas of one process is done here for the processes.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from torchstrategy._core.options import ReduceOp
from torchstrategy._execution.replica_weights import ReplicaWeights
from torchstrategy._execution.worker_streams import WorkerStreams
from torchstrategy._training.replica_gradients import EarlyReads

_POINT = "the reduction of gradients"

Table = np.ndarray[Any, Any]  # of whole numbers, or of truth values

# What each worker tells of each parameter. The numbers of all workers are added up.
_HAS, _SPARSE, _SEEN = 0, 1, 2  # whether there is a gradient to add, whether it is sparse, whether hooks see it
_DOUBTFUL, _IDLE_READ, _UNREAD = 3, 4, 5  # see `EarlyReads`
_CLEARED, _CHANGED, _MARKED, _MARK, _SQUARE = 6, 7, 8, 9, 10  # what became of the accumulated gradient
_WIDTH = 11
# What each worker tells in a last row: whether its rows count, its random generators, and whether its replicas drew.
_COUNTS, _STREAM, _STREAM_SQUARE, _DREW = 0, 1, 2, 3


@final
@dataclass
class WorkerReduction:
    """One reduction of gradients over all workers, and what this worker brings to it.

    Args:
        streams: The workers, and the caller's random generators in this one.
        weights: How much each replica of this worker counts.
        owners: The user's parameters.
        names: What to call them in a message.
        before: Their accumulated gradients before the step could change them.
        accumulated: The same as the replicas of this worker have left them. `agree` replaces what others decide.
        total: The weighted sums of the local gradients of this worker's replicas, by position.
        seen: The positions of the parameters whose hooks are to see the sums.
        early: The gradients that replicas of this worker have read before they were complete, or might have.
    """

    streams: WorkerStreams
    weights: ReplicaWeights
    owners: list[torch.Tensor]
    names: list[str]
    before: list[torch.Tensor | None]
    accumulated: list[torch.Tensor | None]
    total: dict[int, torch.Tensor]
    seen: Set[int]
    early: EarlyReads

    def sums(self) -> tuple[dict[int, torch.Tensor], set[int]]:
        """The sums over all workers by position, and the positions of the parameters whose hooks are to see them.

        Raises:
            RuntimeError: If the workers disagree about an accumulated gradient, or one was read before it was complete.
        """
        of_all = self.streams.workers.add_up(torch.from_numpy(self._told()), _POINT).numpy()
        told, last = of_all[:-1].T, of_all[-1].tolist()
        if last[_DREW] or not _are_alike(self.streams.workers.count, last[_STREAM], last[_STREAM_SQUARE]):
            self.streams.follow(bool(last[_DREW]))
        self.streams.has_drawn = False
        if not told.any():  # as at the end of most runs
            self.accumulated[:] = self.before
            return {}, set()
        too_early = told[_HAS] * (told[_DOUBTFUL] + told[_IDLE_READ] * told[_UNREAD])
        if too_early.any():
            raise RuntimeError(_TOO_EARLY.format(self.names[min(_where(too_early))]))
        self._agree(told, last[_COUNTS])
        return self._added(told), _where(told[_SEEN])

    def _told(self) -> Table:
        table = np.zeros((len(self.owners) + 1, _WIDTH), np.int64)
        mark = self.streams.mark()
        table[-1, :4] = not self.weights.is_understudy, mark, mark * mark, self.streams.has_drawn
        for column, indices in (
            (_HAS, self.total),
            (_SPARSE, [index for index, gradient in self.total.items() if gradient.is_sparse]),
            (_SEEN, self.seen),
            (_DOUBTFUL, self.early.doubtful),
            (_IDLE_READ, self.early.idle),
            (_UNREAD, self.early.unread),
        ):
            if indices:
                table[list(indices), column] = 1
        for index, (was, now) in enumerate(zip(self.before, self.accumulated, strict=True)):
            if now is not None and now is not was:
                mark = _mark(now)
                table[index, _CHANGED:_WIDTH] = not self.weights.is_understudy, 1, mark, mark * mark
            elif now is not was and not self.weights.is_understudy:
                table[index, _CLEARED] = 1
        return table

    def _agree(self, told: Table, counting: int) -> None:
        """Makes one of what the replicas of all workers have done to the accumulated gradients."""
        cleared, changed = told[_CLEARED], told[_CHANGED]
        had = np.array([was is not None for was in self.before], bool)
        some_cleared = (changed == 0) & (cleared > 0) & (cleared < counting)
        disagree = some_cleared | ((changed > 0) & (changed < counting) & (had | (cleared > 0)))
        if disagree.any():
            raise RuntimeError(_DISAGREE.format(self.names[min(_where(disagree))]))
        as_before = zip(self.before, self.accumulated, cleared.tolist(), changed.tolist(), strict=True)
        self.accumulated[:] = [now if c else None if gone else was for was, now, gone, c in as_before]
        everyone = self.streams.workers.count
        marks = {index: told[_MARKED : _SQUARE + 1, index].tolist() for index in sorted(_where(changed))}
        unlike = [index for index, (n, *mark) in marks.items() if n < everyone or not _are_alike(everyone, *mark)]
        if not unlike:
            return
        # Each put a gradient of its own rows there: they are weighted as local gradients are.
        if self.weights.reduction is not ReduceOp.MEAN:
            raise RuntimeError(_DISAGREE.format(self.names[unlike[0]]))
        here = [self._weighted(index) for index in unlike]
        for index, value in zip(unlike, self.streams.workers.all_reduce(here, _POINT), strict=True):
            self.accumulated[index] = value

    def _weighted(self, index: int) -> torch.Tensor:
        value = self.accumulated[index]
        if value is None or self.weights.is_understudy:
            return torch.zeros_like(self.owners[index])
        return (value.to_dense() if value.is_sparse else value) * sum(self.weights.weights)

    def _added(self, told: Table) -> dict[int, torch.Tensor]:
        some_dense = told[_HAS] > told[_SPARSE]
        all_dense = _where(some_dense & (told[_SPARSE] == 0))
        added = self._all_reduce(all_dense)
        added.update(self._all_reduce(_where(some_dense) - all_dense))
        return {index: added[index] if index in added else self._sparse(index) for index in sorted(_where(told[_HAS]))}

    def _all_reduce(self, indices: Set[int]) -> dict[int, torch.Tensor]:
        """The sums of dense gradients over all workers, by position."""
        ordered = sorted(indices, reverse=True)
        if not ordered:
            return {}
        here = [self._dense(index) for index in ordered]
        return dict(zip(ordered, self.streams.workers.all_reduce(here, _POINT, agreed=True), strict=True))

    def _dense(self, index: int) -> torch.Tensor:
        mine = self.total.get(index)
        if mine is None:
            return torch.zeros_like(self.owners[index])
        return mine.to_dense() if mine.is_sparse else mine

    def _sparse(self, index: int) -> torch.Tensor:
        """The sum of gradients that are sparse in all workers which have one."""
        mine, owner = self.total.get(index), self.owners[index]
        if mine is None:
            nowhere = torch.empty((1, 0), dtype=torch.int64, device=owner.device)
            mine = torch.sparse_coo_tensor(
                nowhere, owner.new_empty((0, *owner.shape[1:])), owner.shape, check_invariants=False
            )
        mine = mine.coalesce()
        indices = self.streams.workers.all_gather(mine.indices(), 1, _POINT)
        values = self.streams.workers.all_gather(mine.values(), 0, _POINT)
        added = torch.cat(indices, 1), torch.cat(values)
        return torch.sparse_coo_tensor(*added, owner.shape, check_invariants=False).coalesce()


def _where(counts: Table) -> set[int]:
    """The positions of the parameters of which a column tells something."""
    return set(counts.nonzero()[0].tolist())


def _are_alike(count: int, total: int, squares: int) -> bool:
    """Whether `count` numbers are equal, of which the sum and the sum of the squares are given."""
    return total * total == count * squares


def _mark(gradient: torch.Tensor) -> int:
    """A number of 24 bits that seldom is the same for two gradients: the sum of their bits, read as integers."""
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    values = torch.view_as_real(values) if values.is_complex() else values
    integers = values.contiguous().view(_INTEGERS[values.element_size()])
    return int(integers.sum(dtype=torch.int64).item()) % _MARKS


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MARKS = 16777213  # a prime below 2 ** 24, so that all bits of the sum count

_DISAGREE = (
    "The workers disagree about the gradient of {}: some cleared or changed what was accumulated and others did not. "
    "Do it in every replica of every worker, or outside of strategy.run."
)
_TOO_EARLY = (
    "A replica of one worker read the gradient of {} as complete, and replicas of other workers still had to add "
    "theirs. Run backward in every replica before one of them reads a gradient: one that has nothing to train on "
    "runs a backward of zero, (outputs.sum() * 0).backward()."
)
