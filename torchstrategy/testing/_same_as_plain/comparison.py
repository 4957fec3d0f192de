"""Both trainings, step by step, until they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from torchstrategy._base.errors import add_note
from torchstrategy._base.tree import tree_flatten
from torchstrategy._base.types import Tree
from torchstrategy.testing._same_as_plain.device_errors import is_about_devices
from torchstrategy.testing._same_as_plain.difference import (
    Difference,
    Pair,
    against_plain,
    differences,
    side_by_side,
)
from torchstrategy.testing._same_as_plain.randomness import Source, Sources, Stream
from torchstrategy.testing._same_as_plain.record import Record
from torchstrategy.testing._same_as_plain.training import (
    PlainTraining,
    Problem,
    ReplicaTraining,
)


@final
@dataclass(frozen=True)
class Mismatch:
    """The first step after which two trainings differ.

    Args:
        step: The step, from 0.
        differences: What differs after it.
        replicas: The record of the replicas.
        plain: The record of plain PyTorch.
        is_order: Whether the replicas agree with plain PyTorch, and differ from the
            same replicas in another order.
        depends_on_order: Whether the replicas make other numbers in another order.
        models: The models of plain PyTorch.
        drawn: The generators from which the step drew random numbers.
    """

    step: int
    differences: Sequence[Difference]
    replicas: Record
    plain: Record
    is_order: bool
    depends_on_order: bool
    models: Sequence[nn.Module]
    drawn: Sequence[Source]


class StepFailed(Exception):
    """The step raised an error in replicas only.

    It raised in any order of the replicas, in one order only, or because of another
    device.

    Args:
        step: The step, from 0.
        error: The exception.
        order: The order in which the replicas ran, if it was not their usual one.
        is_everywhere: Whether plain PyTorch fails for the same reason, on the device of
            replica 0.
    """

    def __init__(
        self,
        step: int,
        error: Exception,
        *,
        order: Sequence[int] | None = None,
        is_everywhere: bool = False,
    ) -> None:
        super().__init__(step, error, order)
        self.step = step
        self.error = error
        self.order = order
        self.is_everywhere = is_everywhere


def first_mismatch(problem: Problem) -> Mismatch | None:
    """Trains both ways until something differs; None if nothing does.

    Generators get their earlier states back.

    Raises:
        StepFailed: If the step raises in replicas only, or is not fit for another
            device than one.
        ValueError: If `model_fn` makes another model each time.
        Exception: What the step raises in plain PyTorch.
    """
    sources = Sources(
        (problem.step, problem.model_fn, problem.optimizer_fn), problem.devices
    )
    with sources.kept():
        sources.seed(problem.seed)
        comparison = _Comparison(problem, sources)
        mismatches = (
            comparison.take(step, batch) for step, batch in enumerate(problem.batches)
        )
        return next(filter(None, mismatches), None)


def first_plain_record(problem: Problem) -> Record:
    """The record of plain PyTorch after the first batch."""
    sources = Sources(
        (problem.step, problem.model_fn, problem.optimizer_fn), problem.devices
    )
    with sources.kept():
        sources.seed(problem.seed)
        return PlainTraining(problem, Stream(sources, sources.states())).take(
            problem.batches[0]
        )


@final
class _Comparison:
    """The trainings of one problem.

    At each step the replicas go first, and the others update from their gradients.
    """

    def __init__(self, problem: Problem, sources: Sources) -> None:
        self._problem = problem
        start = sources.states()
        self._replicas = ReplicaTraining(problem, Stream(sources, start))
        self._plain = PlainTraining(problem, Stream(sources, start))
        self._order = list(reversed(range(problem.num_replicas)))
        self._reordered: ReplicaTraining | None = None
        if len(self._order) > 1 and "order" not in problem.ignore:
            self._reordered = ReplicaTraining(
                problem, Stream(sources, start), self._order
            )
        self._check_alike()

    def take(self, step: int, batch: Tree) -> Mismatch | None:
        """One step of each training."""
        try:
            replicas = self._replicas.take(batch)
        except Exception as error:
            raise self._failure(step, batch, error) from error
        plain = self._take_plain(step, batch, replicas)
        found = self._differences(against_plain(replicas, plain))
        by_order = self._differences_by_order(step, batch, replicas)
        if not found and not by_order:
            return None
        models = tree_flatten(self._plain.models)[0]
        return Mismatch(
            step,
            found or by_order,
            replicas,
            plain,
            not found,
            bool(by_order),
            models,
            self._plain.drawn,
        )

    def _failure(self, step: int, batch: Tree, error: Exception) -> StepFailed:
        try:
            self._take_plain(step, batch, None)
        except Exception as plain_error:
            if not is_about_devices(error) or not is_about_devices(plain_error):
                raise
            return StepFailed(step, error, is_everywhere=True)
        return StepFailed(step, error)

    def _take_plain(self, step: int, batch: Tree, leader: Record | None) -> Record:
        try:
            return self._plain.take(batch, leader)
        except Exception as error:
            add_note(
                error,
                f"raised in plain PyTorch, at step {step + 1}: the step fails without "
                "a strategy.",
            )
            raise

    def _differences_by_order(
        self, step: int, batch: Tree, replicas: Record
    ) -> list[Difference]:
        if self._reordered is None:
            return []
        try:
            reordered = self._reordered.take(batch, replicas)
        except Exception as error:
            raise StepFailed(step, error, order=self._order) from error
        return self._differences(
            side_by_side(replicas, reordered), "in their own order"
        )

    def _differences(
        self, pairs: Sequence[Pair], reference: str = "in plain PyTorch"
    ) -> list[Difference]:
        compared = [pair for pair in pairs if pair.section not in self._problem.ignore]
        return differences(compared, self._problem.tolerance, reference)

    def _check_alike(self) -> None:
        trainings = [self._replicas, self._plain, *filter(None, [self._reordered])]
        modules = [
            id(model)
            for training in trainings
            for model in tree_flatten(training.models)[0]
        ]
        if len(set(modules)) < len(modules):
            raise ValueError(
                "model_fn returned the same module twice. It has to make a new one at "
                "each call."
            )
        for training in trainings[1:]:
            found = self._differences(
                against_plain(self._replicas.look(), training.look())
            )
            if found:
                raise ValueError(
                    "model_fn and optimizer_fn do not make the same from the same "
                    f"seed: {found[0]}. Draw what they draw from torch's default "
                    "generator, Python's `random` or numpy's `np.random`."
                )
