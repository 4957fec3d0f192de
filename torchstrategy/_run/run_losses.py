"""Which runs look at their losses, and what they warn of.

By default gradients are weighted by rows. The first few runs of each step look whether
its loss was divided by something else, and warn. With `gradient_reduction="loss"` every
run weighs by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol, final

from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.errors import LossWeightWarning, warn
from torchstrategy._base.options import (
    LOSS,
    NO_OPTIONS,
    GradientReduction,
    ReduceOp,
    RunOptions,
    as_gradient_reduction,
)
from torchstrategy._base.types import ReplicaFn, Tree
from torchstrategy._group.group import Replica
from torchstrategy._group.participants import Participants
from torchstrategy._group.workers import LONE, Workers
from torchstrategy._run.losses.loss_terms import UNREADABLE
from torchstrategy._run.losses.loss_watchers import (
    GradientsOfReplica,
    LossNotes,
    LossWeigher,
)
from torchstrategy._run.losses.loss_weights import (
    COUNTED,
    HOW_COUNTED,
    HOW_SELECTED,
    LIKE_ROWS,
    Column,
    LossWeights,
)
from torchstrategy._run.losses.told_losses import ToldLosses
from torchstrategy._run.losses.whole_batch import WholeBatchLook
from torchstrategy._run.own.lone_losses import LoneLossNotes, LoneLossWeigher
from torchstrategy._run.own.own_objects import OwnObjects


class GradientsOfReplicas(Protocol):
    """The gradients of all replicas, as far as losses have to do with them."""

    @property
    def of_replicas(
        self,
    ) -> Sequence[GradientsOfReplica] | Mapping[int, GradientsOfReplica]:
        """Those of each replica."""


# How many runs of a step look at its losses: a training of many steps pays nothing.
LOOKS = 4
MAX_STEPS = 64  # of how many steps this is known
MATTERS = 1e-3  # how much a weight has to differ

Watcher = LossNotes | LossWeigher
LoneWatcher = LoneLossNotes | LoneLossWeigher


@final
class RunLosses:
    """What a strategy does about the losses of its steps.

    Args:
        gradient_reduction: What its constructor was given.
        workers: The processes that train together.
        num_local: How many replicas each of them has.
        is_counted: Whether a function of the user's says how much each replica counts.

    Attributes:
        said: What was given, as it is written in `RunOptions`. None: nothing.
        reduction: How gradients become one, once each is weighted.
        settled: The code of the steps at which nobody looks any more, if a run has no
            `gradient_reduction` of its own: they were looked at often enough, or
            somebody has said how replicas count. A run of such a step asks here itself,
            and does not call `begin_run` or `begin_lone_run`.
    """

    def __init__(
        self,
        gradient_reduction: ReduceOp | str | None,
        workers: Workers = LONE,
        num_local: int = 1,
        is_counted: bool = False,
    ) -> None:
        said = gradient_reduction
        self.said: GradientReduction | None = (
            None if said is None else as_gradient_reduction(said)
        )
        self.reduction = self.said if isinstance(self.said, ReduceOp) else ReduceOp.MEAN
        self._told = ToldLosses(workers, num_local) if workers.count > 1 else None
        self._first, self._is_counted = workers.index * num_local, is_counted
        # How many runs of a step have looked, by the code of the step.
        self._looks: dict[object, int] = {}
        # By the code of a step: what looks whether it needs the whole batch, and in how
        # many runs it has.
        self._whole: dict[object, tuple[WholeBatchLook, int]] = {}
        self._warned: set[object] = set()
        self.settled: set[object] = set()

    def begin_run(
        self,
        fn: ReplicaFn,
        options: RunOptions,
        weights: Participants,
        leaves: Sequence[Tree],
    ) -> LossesOfRun | None:
        """What looks at the losses of a run with these argument leaves, or None."""
        has_several = self._told is not None or len(weights.present) > 1
        if weights.reduction is not ReduceOp.MEAN or not has_several:
            return None
        rows = weights.rows_of_all if self._told is not None else _rows(leaves)
        watcher: Watcher
        if self._weighs(options):
            watcher = LossWeigher(weights, rows, self._first, self._told)
        elif len(weights.present) > 1 and self._looks_at(fn, options):
            watcher = LossNotes(weights, rows, self._first)
        else:
            return None
        watcher.look = self._look_of(fn)
        return LossesOfRun(self, watcher, fn, rows or weights.parts_of_all)

    def begin_lone_run(
        self,
        fn: ReplicaFn,
        options: RunOptions,
        weights: Participants,
        storage: OwnObjects,
        step: str,
    ) -> LossesOfRun | None:
        """The same for the only replica of one of several workers.

        Args:
            fn: The step.
            options: What the user has said about the run.
            weights: How much the replica of each worker counts.
            storage: What the step uses.
            step: What to call the step.
        """
        if weights.reduction is not ReduceOp.MEAN:
            return None
        watcher: LoneWatcher
        if self._weighs(options):
            watcher = storage.weigher_of_losses(weights, step)
        elif self._looks_at(fn, options):
            watcher = storage.notes_of_losses(weights)
        else:
            return None
        watcher.look = self._look_of(fn)
        return LossesOfRun(
            self, watcher, fn, weights.rows_of_all or weights.parts_of_all
        )

    def _weighs(self, options: RunOptions) -> bool:
        return (options.gradient_reduction or self.said) == LOSS

    def _looks_at(self, fn: ReplicaFn, options: RunOptions) -> bool:
        """Whether a run looks at its losses to warn.

        The first few runs of a step do, if nobody has said how replicas count.
        """
        key, looks = code_of(fn), self._looks
        said = options.gradient_reduction or self.said
        if said is not None or self._is_counted or options.examples is not None:
            if options == NO_OPTIONS and len(self.settled) < MAX_STEPS:
                self.settled.add(key)
            return False
        if looks.get(key, 0) >= LOOKS or (key not in looks and len(looks) >= MAX_STEPS):
            self.settled.add(key)
            return False
        looks[key] = looks.get(key, 0) + 1
        return True

    def _look_of(self, fn: ReplicaFn) -> WholeBatchLook | None:
        """An object that looks whether the loss of a step needs the whole batch.

        It does so in the first runs of the step.
        """
        key = code_of(fn)
        look, runs = self._whole.get(key) or (WholeBatchLook(), 0)
        if (
            runs >= LOOKS
            or key in self._warned
            or (not runs and len(self._whole) >= MAX_STEPS)
        ):
            return None
        self._whole[key] = look, runs + 1
        return look

    def warn(
        self, fn: ReplicaFn, watcher: Watcher | LoneWatcher, rows: Sequence[float]
    ) -> None:
        """Warns after a run, once for each step, if a gradient is wrong.

        A gradient is wrong if it is not that of the whole batch.
        """
        key = code_of(fn)
        if key in self._warned:
            return
        is_by_rows = isinstance(watcher, (LossNotes, LoneLossNotes))
        if is_by_rows:
            # A failing look must not stop a training.
            with suppress(RuntimeError, TypeError, ValueError):
                watcher.compare()
        tells = _tell_by_rows if is_by_rows else _tell_kept
        told = (
            tells(found, column, rows)
            for found in watcher.found
            for column in found.columns
        )
        message = next(filter(None, told), None) or _tell_whole(watcher.look)
        if message is not None:
            self._warned.add(key)
            self._looks[key] = LOOKS
            warn(message.format(step=_name(fn)), LossWeightWarning)


@final
class LossesOfRun:
    """What looks at the losses of one run.

    Args:
        of_all: What the strategy knows of its steps.
        watcher: Looks at the losses.
        fn: The step.
        rows: How many rows each replica of all workers has, or how much it counts.
    """

    def __init__(
        self,
        of_all: RunLosses,
        watcher: Watcher | LoneWatcher,
        fn: ReplicaFn,
        rows: Sequence[float],
    ) -> None:
        self._of_all, self._watcher, self._fn, self._rows = of_all, watcher, fn, rows

    def watching(
        self, replica: Replica, gradients: GradientsOfReplicas
    ) -> AbstractContextManager[None]:
        """A block in which the losses of a replica are looked at."""
        assert isinstance(self._watcher, (LossNotes, LossWeigher))
        return self._watcher.watching(replica, gradients.of_replicas[replica.index])

    def watched(self, call: Callable[[], Tree]) -> Tree:
        """Calls the step of a lone replica, whose losses are looked at."""
        assert isinstance(self._watcher, (LoneLossNotes, LoneLossWeigher))
        with self._watcher.watching():
            return call()

    def warn(self) -> None:
        """Called when the run has ended."""
        if isinstance(self._watcher, LossNotes) or self._watcher.found:
            self._of_all.warn(self._fn, self._watcher, self._rows)


def _tell_by_rows(
    found: LossWeights, column: Column, rows: Sequence[float]
) -> str | None:
    if column.reason != COUNTED or column.differs <= MATTERS or len(found.replicas) < 2:
        return None
    quotients = [
        count / rows[r] if rows[r] else 0.0
        for r, count in zip(found.replicas, column.counts, strict=True)
    ]
    two = sorted({quotients.index(max(quotients)), quotients.index(min(quotients))})
    ids = [found.replicas[position] for position in two]
    counts = " and by ".join(
        f"{column.counts[p]:g} in replica {r}" for p, r in zip(two, ids, strict=True)
    )
    of_rows = " and ".join(f"{rows[r]:g}" for r in ids)
    how = HOW_COUNTED.get(column.source, HOW_SELECTED)
    return (
        f"The loss of `{{step}}` was divided by {counts} ({how}), but their gradients "
        f"are weighted by rows, {of_rows}. "
        'The gradient of the whole batch needs RunOptions(gradient_reduction="loss"). '
        'If each row is meant to count the same, say gradient_reduction="mean", which '
        "hides this."
    )


def _tell_kept(found: LossWeights, column: Column, rows: Sequence[float]) -> str | None:
    if column.reason == UNREADABLE:
        why = f"cannot be read (`{column.name}`)"
    elif column.reason in (COUNTED, LIKE_ROWS) or column.differs <= MATTERS:
        return None
    else:
        why = column.reason
    return (
        f"The loss of `{{step}}` {why}, so its gradients are weighted by rows. Say how "
        "much each replica counts: RunOptions(examples=lambda batch: ...), or use "
        "torchstrategy.nn.compute_average_loss."
    )


def _tell_whole(look: WholeBatchLook | None) -> str | None:
    if look is None or look.found is None:
        return None
    what, node = look.found
    return (
        f"The loss of `{{step}}` {what} (`{node}`), and each replica has only its own "
        "rows of the batch: its gradient is not that of the whole batch, however "
        "replicas are weighted. Collect what the loss needs of all rows in the step, "
        "by torchstrategy.get_replica_context().all_reduce('sum', ...) or "
        "all_gather(rows, axis=0), through which gradients flow; docs/features.md "
        "shows it for such losses. If it is meant to be so, say "
        'gradient_reduction="mean", which hides this.'
    )


def _rows(leaves: Sequence[Tree]) -> tuple[float, ...] | None:
    """How many rows each replica has, if the arguments tell it, and agree."""
    records = {
        leaf.rows
        for leaf in leaves
        if isinstance(leaf, PerReplica) and leaf.rows is not None
    }
    return records.pop() if len(records) == 1 else None


def code_of(fn: Any) -> object:
    """What two calls of one step share, even if each run makes the step anew."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__code__", None) or type(fn)


def _name(fn: Any) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)
