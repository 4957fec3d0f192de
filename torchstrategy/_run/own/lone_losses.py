"""What a lone replica's loss was divided by.

This number weighs the gradients of its worker, or the run warns.

`LoneLossWeigher` is for `gradient_reduction="loss"`. See `Note [When workers compare
their losses]`. `LoneLossNotes` only looks on: where gradients are weighed by rows and
nobody has said that they should.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base.context import without_autograd
from torchstrategy._base.torch_internals import (
    hide_from_compiler,
    losses_run_by,
    unseen_by_function_modes,
)
from torchstrategy._group.participants import Participants
from torchstrategy._group.workers import Workers
from torchstrategy._run.losses.graph_nodes import without_unpacking
from torchstrategy._run.losses.loss_terms import DIVISOR, NUMBER, Term
from torchstrategy._run.losses.loss_watchers import (
    BY_LOSS,
    MAX_BACKWARDS,
    common_factor,
    reading_of,
    weighted_roots,
)
from torchstrategy._run.losses.loss_weights import (
    LossReading,
    LossWeights,
    count_of,
    number_of,
    weigh,
)
from torchstrategy._run.losses.told_losses import (
    BEFORE,
    NEVER,
    WITH,
    ToldLosses,
    are_alike,
    count_on_device,
    mark_of,
    when_to_compare,
)
from torchstrategy._run.losses.whole_batch import WholeBatchLook
from torchstrategy._run.own.counted_gradients import CountedGradients
from torchstrategy._run.own.own_gradients import OwnGradients

# How many places are kept at which workers need not compare their losses before
# backward.
_MOST_KNOWN = 256

_Run = Callable[[Sequence[Any], Sequence[Any]], Any]
# The step, which of its backwards it is, and whether all workers have as many rows.
_Place = tuple[str, int, bool]


class _Usual(NamedTuple):
    """What the workers found where a backward of a step began.

    They go by it the next time.
    """

    when: str  # they have to compare their losses
    total: float = 0.0  # the sum of the counts of all workers
    is_awaited: bool = False  # whether these are in the memory of accelerators


# Note [When workers compare their losses]
# The first time that a backward of a step begins, the workers tell one another what
# they have read, in a message, and weigh as the replicas of one process do. What they
# found says what they do the next time, and all of them know it:
# - A loss without counts: nothing. A mark of what was read travels with the gradients.
# - One term that has a count, where all workers have as many rows: each multiplies its
#   gradients by its count, which travels with them, as the mark does. The sums are
#   divided by the sum of the counts.
# - Anything else: a message before backward, as the first time. Terms have unlike
#   weights then, or rows may have to be kept, and backward has to know it when it
#   begins. So it is for sharded models, which send their gradients themselves, and for
#   scales in the memory of an accelerator, which have to be the same in all workers.
# A count in the memory of an accelerator travels by itself, from there: the host never
# waits for it.
# A worker that has read something else than the last time has another mark. All workers
# see it when the gradients have come, tell one another what they have read, and send
# the gradients once more by the right weights. That worker itself knows it before. It
# begins backward when it knows the weights: meanwhile it sends zeros.
@final
class LoneLosses:
    """What workers with one replica each know of the losses of their steps.

    Args:
        workers: The processes that train together.
    """

    def __init__(self, workers: Workers) -> None:
        self.told = ToldLosses(workers, 1)
        self.usual: dict[_Place, _Usual] = {}  # the same in all workers
        # By what was read, when workers compare it, and the mark of it. It takes long
        # to find out.
        self.kinds: dict[object, tuple[str, int]] = {}


@final
class LoneLossWeigher:
    """Weighs each backward of a run by what its loss was divided by.

    Args:
        of_all: What is known of earlier runs.
        weights: How much the replica of each worker counts.
        gradients: Those of this worker.
        index: The number of this worker.
        step: What to call the step.
        prepare: Called where a backward begins, before anything is sent.
    """

    def __init__(
        self,
        of_all: LoneLosses,
        weights: Participants,
        gradients: OwnGradients,
        index: int,
        step: str,
        prepare: Callable[[], None],
    ) -> None:
        self._of_all, self._weights, self._gradients = of_all, weights, gradients
        self._index, self._step, self._prepare = index, step, prepare
        self._num_backwards = 0
        parts = weights.parts_of_all
        self._is_even = len(set(parts)) == 1 and all(parts)
        self._rows = None if weights.rows_of_all is None else weights.rows_of_all[index]
        self.found: list[LossWeights] = []
        # Looks whether a loss needs the whole batch.
        self.look: WholeBatchLook | None = None

    def watching(self) -> losses_run_by:
        """A block in which the backwards of this thread are weighed."""
        return losses_run_by(self._weighed)

    def compare(self) -> None:
        """All was compared where backwards began."""

    def _weighed(self, outputs: Sequence[Any], grads: Sequence[Any], run: _Run) -> Any:
        # A checkpoint may run its forward again, as the user's code runs.
        reading, terms = reading_of(outputs, self.look, self._rows)
        self._num_backwards += 1
        self._prepare()
        gradients, place = (
            self._gradients,
            (self._step, self._num_backwards, self._is_even),
        )
        usual = (
            self._of_all.usual.get(place)
            if gradients.tensors.sharded.is_empty
            else None
        )
        try:
            if usual is None or usual.when == BEFORE:
                return self._run_weighed(
                    outputs, grads, run, terms, self._ask(place, reading)
                )
            with without_autograd(), unseen_by_function_modes():
                counted = self._counted(reading, usual)
            ask = partial(self._ask, place, reading)
            if counted is None:
                gradients.begin_unforeseen(
                    outputs[0].device if usual.is_awaited else None
                )
                return self._run_weighed(outputs, grads, run, terms, ask())
            gradients.count_next(counted, lambda: _only(ask()))
            return run(outputs, grads)
        finally:
            gradients.forget_counts()

    def _counted(self, reading: LossReading, usual: _Usual) -> CountedGradients | None:
        """How this worker counts, if it has read what is usual there; else None."""
        when, mark = self._kind_of(reading)
        if when != usual.when:
            return None
        if when == NEVER:
            return CountedGradients(mark)
        (fact,) = reading.facts
        if fact.is_awaited != usual.is_awaited:
            return None
        count = count_on_device(reading) if fact.is_awaited else count_of(fact, reading)
        if not isinstance(count, torch.Tensor) and not 0 <= count < torch.inf:
            return None
        return CountedGradients(
            mark, count, usual.total, is_zero=fact.source == DIVISOR
        )

    def _kind_of(self, reading: LossReading) -> tuple[str, int]:
        """When the workers compare such a loss, and the mark of it."""
        fact = reading.facts[0]
        # Numbers of this step are a part of the mark of such a loss.
        if len(reading.facts) > 1 or fact.scales or fact.source == NUMBER:
            return when_to_compare(reading, self._is_even, self._rows), mark_of(reading)
        kinds, key = (
            self._of_all.kinds,
            (self._is_even, self._rows, fact._replace(counted=None)),
        )
        known = kinds.get(key)
        if known is None:
            if len(kinds) >= _MOST_KNOWN:
                kinds.clear()
            kinds[key] = known = (
                when_to_compare(reading, self._is_even, self._rows),
                mark_of(reading),
            )
        return known

    def _ask(self, place: _Place, reading: LossReading) -> list[float] | None:
        """Compares the losses of all workers; returns what multiplies each gradient.

        There is a factor for the gradient of each term. None means that each factor is
        1.
        """
        weights, of_all = self._weights, self._of_all
        with without_autograd(), unseen_by_function_modes():
            readings = of_all.told.of_all({0: reading}, BY_LOSS)
        found = weigh(
            readings, weights.parts_of_all, weights.rows_of_all, can_split=False
        )
        self.found.append(found)
        if len(of_all.usual) >= _MOST_KNOWN:
            of_all.usual.clear()
        of_all.usual[place] = self._usual_of([readings[r] for r in found.replicas])
        return found.factors(self._index, weights.parts[0])

    def _usual_of(self, readings: Sequence[LossReading]) -> _Usual:
        if not readings or not are_alike(readings):
            return _Usual(BEFORE)
        when = when_to_compare(readings[0], self._is_even, self._rows)
        if when != WITH:
            return _Usual(when)
        counts = [count_of(reading.facts[0], reading) for reading in readings]
        if not all(0 <= count < torch.inf for count in counts) or not any(counts):
            return _Usual(BEFORE)
        return _Usual(WITH, sum(counts), readings[0].facts[0].is_awaited)

    def _run_weighed(
        self,
        outputs: Sequence[Any],
        grads: Sequence[Any],
        run: _Run,
        terms: Sequence[Term],
        factors: Sequence[float] | None,
    ) -> Any:
        """Runs a backward by weights that are known."""
        gradients = self._gradients
        if factors is not None and not any(factors):
            # Nothing of its loss counts. The loss may be 0 / 0, and zero times its
            # gradient is NaN.
            gradients.multiply_next(0.0)
            return run(outputs, grads)
        gradients.note_loss(common_factor(factors))
        return run(*weighted_roots(outputs, grads, terms, factors))


def _only(factors: Sequence[float] | None) -> float:
    """The factor of all terms, where backward has run already.

    There is a single term then, or none has a count.
    """
    factor = common_factor(factors)
    assert factor is not None
    return factor


@final
class LoneLossNotes:
    """Notes what the losses of a run were divided by.

    It is compared only where the workers' counts differ.

    A number that stands for the counts travels with the gradients, beside others. Where
    it differs, the workers tell one another what these stand for, and what the notes
    say.

    Args:
        told: Exchanges readings with the other workers.
        weights: How much the replica of each worker counts.
        index: The number of this worker.
        say: Sets the number.
    """

    def __init__(
        self,
        told: ToldLosses,
        weights: Participants,
        index: int,
        say: Callable[[int], None],
    ) -> None:
        self._told, self._weights, self._say = told, weights, say
        self._rows = None if weights.rows_of_all is None else weights.rows_of_all[index]
        self._num_backwards = 0
        self._reading: LossReading | None = None
        self.found: list[LossWeights] = []
        # Looks whether a loss needs the whole batch.
        self.look: WholeBatchLook | None = None

    def watching(self) -> losses_run_by:
        """A block in which the losses of this thread are noted."""
        return losses_run_by(self._note)

    def _note(self, outputs: Sequence[Any], grads: Sequence[Any], run: _Run) -> Any:
        self._num_backwards += 1
        if self._num_backwards > MAX_BACKWARDS:
            return run(outputs, grads)
        with without_unpacking(), without_autograd(), unseen_by_function_modes():
            self._reading = reading_of(outputs, self.look, self._rows)[0]
            self._say(_mark_of_counts(self._reading, self._weights.parts[0]))
        try:
            return run(outputs, grads)
        finally:
            self._reading = None
            self._say(0)

    @property
    def has_reading(self) -> bool:
        """Whether a backward runs whose loss was noted."""
        return self._reading is not None

    def settle(self, name: str) -> None:
        """Compares what all workers read, if the numbers beside gradients differ.

        All workers call it, and each has a reading.
        """
        assert self._reading is not None
        with without_autograd(), unseen_by_function_modes():
            readings = self._told.of_all({0: self._reading}, name)
        self.found.append(
            weigh(readings, self._weights.parts_of_all, self._weights.rows_of_all)
        )

    def compare(self) -> None:
        """All was compared while backwards ran."""


def _mark_of_counts(reading: LossReading, part: float) -> int:
    """32 bits that are equal where the workers' counts are to one another as rows."""
    counted = [
        number_of(fact.counted) for fact in reading.facts if fact.counted is not None
    ]
    if not counted or not part or not all(abs(count) < torch.inf for count in counted):
        return 0
    return zlib.crc32(",".join([f"{count / part:.8e}" for count in counted]).encode())


hide_from_compiler(LoneLossWeigher._weighed)
hide_from_compiler(LoneLossNotes._note)
