"""What the replicas' losses were divided by in one step, read from their graphs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base.context import without_autograd
from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.torch_internals import losses_noted_by
from torchstrategy._base.types import Tree
from torchstrategy._group.participants import Participants
from torchstrategy._run.losses.graph_nodes import without_unpacking
from torchstrategy._run.losses.loss_terms import UNREADABLE, read_terms
from torchstrategy._run.losses.loss_weights import (
    COUNTED,
    HOW_COUNTED,
    HOW_SELECTED,
    Column,
    LossReading,
    LossWeights,
    weigh,
)

_MAX_BACKWARDS = 8  # of one replica, that are read


@final
class LossNotes:
    """Notes, in each replica, where its backwards begin."""

    def __init__(self) -> None:
        self._notes: dict[int, list[LossReading]] = {}

    def noting(self, replica: int) -> AbstractContextManager[None]:
        """A block in which the losses of this replica are noted. It changes nothing."""
        notes = self._notes.setdefault(replica, [])
        return losses_noted_by(partial(_note, notes))

    def counts(self, shares: Participants, leaves: Sequence[Tree]) -> LossCounts:
        """What the notes tell of one run, whose arguments have these leaves."""
        records = {
            leaf.rows
            for leaf in leaves
            if isinstance(leaf, PerReplica) and leaf.rows is not None
        }
        rows = tuple(map(float, records.pop())) if len(records) == 1 else None
        numbers = {len(notes) for notes in self._notes.values()}
        if (
            len(self._notes) < 2
            or len(numbers) > 1
            or self._notes.keys() != set(shares.present)
        ):
            # It is not known which backwards belong together.
            return LossCounts((), rows)
        found = []
        for k in range(numbers.pop()):
            found.append(
                weigh(
                    {r: notes[k] for r, notes in self._notes.items()},
                    shares.parts,
                    rows,
                )
            )
        return LossCounts(tuple(found), rows)


def _note(notes: list[LossReading], outputs: Sequence[Any]) -> None:
    loss = outputs[0] if len(outputs) == 1 else None
    if (
        len(notes) >= _MAX_BACKWARDS
        or not isinstance(loss, torch.Tensor)
        or loss.numel() != 1
    ):
        return
    with without_unpacking(), without_autograd():
        notes.append(LossReading.of(read_terms(loss), loss.detach()))


@final
class LossCounts(NamedTuple):
    """What the losses of the replicas were divided by.

    Args:
        found: What follows of it, for each backward.
        rows: How many rows each replica has; None: nobody knows.
    """

    found: tuple[LossWeights, ...] = ()
    rows: tuple[float, ...] | None = None

    @property
    def unread(self) -> str | None:
        """The name of a node where the graph of a loss could not be read further.

        It is None if there is no such node.
        """
        names = [
            column.name
            for one in self.found
            for column in one.columns
            if column.reason == UNREADABLE
        ]
        return names[0] if names else None

    def parts(self, num_replicas: int) -> tuple[float, ...] | None:
        """How much of the batch's loss the loss of each replica is.

        It is None if the terms of a loss do not agree on that.
        """
        for_all = set()
        for one in self.found:
            for column in one.columns:
                if column.reason == COUNTED:
                    weights = dict(zip(one.replicas, column.weights, strict=True))
                    for_all.add(tuple(weights.get(r, 0.0) for r in range(num_replicas)))
        return for_all.pop() if len(for_all) == 1 else None

    def told(self) -> str | None:
        """By how much two replicas have divided their losses, in words.

        It is None if no term has a count of its own.
        """
        for one in self.found:
            for column in one.columns:
                if column.reason == COUNTED:
                    return self._told(one, column)
        return None

    def _told(self, one: LossWeights, column: Column) -> str:
        quotients = [
            count / weight
            for count, weight in zip(column.counts, self._of_rows(one), strict=True)
        ]
        two = sorted({quotients.index(max(quotients)), quotients.index(min(quotients))})
        counts = " and ".join(
            f"by {column.counts[p]:g} in replica {one.replicas[p]}" for p in two
        )
        rows = " and ".join(f"{self._of_rows(one)[p]:g}" for p in two)
        which = f", which have {rows} rows" if self.rows else ""
        return (
            f"it was divided {counts}{which} "
            f"({HOW_COUNTED.get(column.source, HOW_SELECTED)})"
        )

    def _of_rows(self, one: LossWeights) -> list[float]:
        return [self.rows[r] if self.rows else 1.0 for r in one.replicas]


NOTHING_READ = LossCounts()
