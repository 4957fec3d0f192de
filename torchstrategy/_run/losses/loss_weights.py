"""How much each replica's loss counts, by what all replicas have read of theirs.

A term of the loss that was divided by a count, see `loss_terms`, has the weight `count
/ sum of the counts` in each replica: then the gradient is that of the whole batch. It
keeps the weight of the replica's rows

- if it has no count, or counts like the rows: a mean over rows, a constant, a number
  that all replicas have;
- if it was divided or multiplied by Python numbers that are no whole numbers, which
  count nothing as a rule;
- if there is a term for each row, as a loop over rows makes it, or one that was summed
  up of a single row;
- if the program has corrected the weights: it also multiplied or divided the term by
  numbers that differ between replicas, by the rows of the replica, or by how many such
  terms there are;
- if replicas have other terms, or no replica counts anything.

A replica whose loss was multiplied by zero, as that of one without anything to learn,
has no say. The mean over an empty mask, `total / mask.sum().clamp(min=1)`, counts 0.

Numbers are compared here, on the thread that called `run`, so that those on an
accelerator are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, final

import torch

from torchstrategy._base.context import without_autograd
from torchstrategy._base.torch_internals import unseen_by_function_modes
from torchstrategy._run.losses.graph_nodes import depends_only_on_parameters
from torchstrategy._run.losses.loss_terms import (
    DIVISOR,
    MEAN,
    NUMBER,
    SELECTION,
    SUM,
    TARGETS,
    UNREADABLE,
    Scale,
    Term,
)

# How much equal numbers may differ: float32 has seven digits.
_CLOSE, _CLOSE_OF_FLOATS = 1e-9, 1e-6

COUNTED = "counted"
LIKE_ROWS = "it counts like the rows"

# Why a term keeps the weight of its rows although it has a count. A reader of the
# warning sees these words.
OTHER_TERMS = "is made of other terms in other replicas"
OTHER_FACTORS = "is also multiplied by numbers that differ between replicas"
DIVIDED_BY_ROWS = "is also divided by the rows of each replica"
DIVIDED_BY_TERMS = "is a mean of several terms that have counts of their own"
NO_COUNT = "is divided by numbers that differ between replicas and are no whole numbers"
BEHIND_HOOKS = "has several terms and passes through backward hooks of a module"


class Fact(NamedTuple):
    """What is known of one term in one replica, without its graph. See `Term`.

    A reference to the graph would keep it alive.

    `is_rounded` tells that the count was no number of 64 bits, and `likes` how many
    terms of its source the loss has, each of other targets. `is_awaited` tells that the
    count is in the memory of an accelerator, for which the host would have to wait, and
    `has_awaited` that a scale is.
    """

    source: str
    name: str
    counted: torch.Tensor | float | None
    factor: float
    divisors: tuple[float, ...]
    scales: tuple[Scale, ...]
    is_learned: bool
    is_added: bool
    is_hooked: bool
    is_rounded: bool = False
    likes: int = 1
    is_awaited: bool = False
    has_awaited: bool = False

    @classmethod
    def of(cls, term: Term, source: str, likes: int) -> Fact:
        return cls(
            source=source,
            name=term.name,
            counted=term.count,
            factor=term.factor,
            divisors=term.divisors,
            scales=term.scales,
            is_learned=term.is_learned,
            is_added=term.is_added,
            is_hooked=term.is_hooked,
            is_rounded=isinstance(term.count, torch.Tensor)
            and term.count.dtype != torch.float64,
            likes=likes,
            is_awaited=isinstance(term.count, torch.Tensor) and not term.count.is_cpu,
            has_awaited=not all(scale.tensor.is_cpu for scale in term.scales),
        )


class LossReading(NamedTuple):
    """What was read of the loss with which a backward of one replica begins."""

    facts: tuple[Fact, ...]
    value: torch.Tensor | None  # the loss, without its graph

    @classmethod
    def of(cls, terms: Sequence[Term], value: torch.Tensor | None) -> LossReading:
        sources = list(map(_source_of, terms))
        likes = (
            [1] * len(terms) if len(terms) == 1 else _numbers_of_likes(terms, sources)
        )
        return cls(tuple(map(Fact.of, terms, sources, likes)), value)

    @property
    def is_zero(self) -> bool:
        """Whether the program has multiplied the loss by zero."""
        return not any(fact.factor for fact in self.facts)


def _source_of(term: Term) -> str:
    # What depends on nothing but parameters is the same in all replicas.
    is_constant = (
        term.source == UNREADABLE
        and term.node is not None
        and depends_only_on_parameters(term.node)
    )
    return MEAN if is_constant else term.source


def _numbers_of_likes(terms: Sequence[Term], sources: Sequence[str]) -> list[int]:
    """For each term, how many of its source there are, each of other targets."""
    targets: dict[str, set[tuple[int, ...]]] = {}
    for term, source in zip(terms, sources, strict=True):
        targets.setdefault(source, set()).add(term.targets)
    return [len(targets[source]) for source in sources]


UNREAD = LossReading(
    (Fact(UNREADABLE, "several tensors", None, 1.0, (), (), False, False, False),), None
)


@final
class Column(NamedTuple):
    """One term, in all replicas that have a say."""

    source: str
    name: str
    # `COUNTED`, `LIKE_ROWS`, `UNREADABLE`, or why it keeps the weight of its rows.
    reason: str
    counts: tuple[float, ...]  # of the replicas that have a say
    # What their gradients of this term are to be multiplied by.
    weights: tuple[float, ...]
    differs: float  # how much these differ from the weights of the rows, at most


@final
class LossWeights(NamedTuple):
    """What follows of the readings of all replicas."""

    replicas: tuple[int, ...]  # those that have a say
    columns: tuple[Column, ...]
    # Whether all replicas have the same terms, so that there is a column for each.
    is_alike: bool

    def factors(self, replica: int, part: float) -> list[float] | None:
        """What the gradient of each term of a replica is multiplied by.

        The replica's part of the rows is a further factor. None means that each factor
        is 1.
        """
        if not self.is_alike or replica not in self.replicas:
            return None
        position = self.replicas.index(replica)
        factors = [
            column.weights[position] / part if column.reason == COUNTED else 1.0
            for column in self.columns
        ]
        return None if all(factor == 1.0 for factor in factors) else factors


def weigh(
    readings: Mapping[int, LossReading],
    parts: Sequence[float],
    rows: Sequence[float] | None,
    can_split: bool = True,
) -> LossWeights:
    """The weights of all terms of a loss.

    Args:
        readings: What was read in each replica that takes part.
        parts: For each replica, its part of the batch: the weight that it has if
            nothing is read.
        rows: For each replica, how many rows it has. None: nobody knows.
        can_split: Whether terms may get unlike weights where module hooks are in the
            way.
    """
    replicas = tuple(
        r for r, reading in readings.items() if parts[r] and not reading.is_zero
    )
    own = [parts[r] for r in replicas]
    with without_autograd(), unseen_by_function_modes():
        columns, is_alike = _columns(
            [readings[r] for r in replicas],
            own,
            None if rows is None else [rows[r] for r in replicas],
        )
    factors = {
        tuple(
            round(weight / part, 12)
            for weight, part in zip(column.weights, own, strict=True)
        )
        for column in columns
    }
    if (
        not can_split
        and len(factors) > 1
        and any(f.is_hooked for reading in readings.values() for f in reading.facts)
    ):
        columns = [
            one._replace(reason=BEHIND_HOOKS) if one.reason == COUNTED else one
            for one in columns
        ]
    return LossWeights(replicas, tuple(columns), is_alike)


def _columns(
    readings: Sequence[LossReading],
    parts: Sequence[float],
    rows: Sequence[float] | None,
) -> tuple[list[Column], bool]:
    shapes = [
        [(fact.source, fact.is_learned, len(fact.scales)) for fact in reading.facts]
        for reading in readings
    ]
    if any(shape != shapes[0] for shape in shapes):
        return [_unlike([reading.facts for reading in readings], parts, rows)], False
    columns = []
    for k in range(len(shapes[0]) if shapes else 0):
        facts = [reading.facts[k] for reading in readings]
        reason, counts = _judged(facts, readings, rows)
        columns.append(_column(facts, reason, counts, parts))
    return columns, True


def _column(
    facts: Sequence[Fact], reason: str, counts: Sequence[float], parts: Sequence[float]
) -> Column:
    weights = list(parts)
    if counts and sum(counts) > 0:
        weights = [count / sum(counts) for count in counts]
    differs = max(
        abs(weight - part) for weight, part in zip(weights, parts, strict=True)
    )
    near = (
        _CLOSE_OF_FLOATS
        if any(fact.is_rounded for fact in facts) and facts[0].source == DIVISOR
        else _CLOSE
    )
    if reason == COUNTED and differs <= near * max(parts):
        # With the weights of rows, nothing changes, not even by rounding.
        reason, weights = LIKE_ROWS, list(parts)
    return Column(
        facts[0].source, facts[0].name, reason, tuple(counts), tuple(weights), differs
    )


def _unlike(
    of_replicas: Sequence[Sequence[Fact]],
    parts: Sequence[float],
    rows: Sequence[float] | None,
) -> Column:
    """For replicas with other terms, whose loops may depend on the number of rows."""
    first = of_replicas[0][0]
    for facts in of_replicas:
        unread = next((fact for fact in facts if fact.source == UNREADABLE), None)
        if unread is not None:
            return Column(UNREADABLE, unread.name, UNREADABLE, (), tuple(parts), 0.0)
    counted = [
        [fact for fact in facts if fact.source not in (MEAN, SUM)]
        for facts in of_replicas
    ]
    is_loop = rows is None or all(
        len(own) == n for own, n in zip(counted, rows, strict=True)
    )
    reason = LIKE_ROWS if is_loop or not any(counted) else OTHER_TERMS
    return Column(first.source, first.name, reason, (), tuple(parts), 1.0)


def _judged(
    facts: Sequence[Fact], readings: Sequence[LossReading], rows: Sequence[float] | None
) -> tuple[str, list[float]]:
    """Why a term has the weights that it has, and its counts."""
    source = facts[0].source
    if source in (MEAN, SUM, UNREADABLE):
        return (UNREADABLE if source == UNREADABLE else LIKE_ROWS), []
    likes = [fact.likes for fact in facts]
    counts = _counts(facts, readings)
    # A single replica that has a say has all that counts.
    if (
        _is_loop(likes, rows)
        or _is_one_row(facts, readings, rows)
        or (len(counts) > 1 and _alike(counts))
    ):
        return LIKE_ROWS, []
    if (
        source == NUMBER
        and rows is not None
        and _alike([c / n for c, n in zip(counts, rows, strict=True) if n])
    ):
        return LIKE_ROWS, []
    if not all(0 <= count < torch.inf for count in counts) or not sum(counts):
        return LIKE_ROWS, []
    for reason, holds in _CORRECTED:
        if holds(facts, likes, rows):
            return reason, counts
    return COUNTED, counts


def _counts(facts: Sequence[Fact], readings: Sequence[LossReading]) -> list[float]:
    return [
        count_of(fact, reading) for fact, reading in zip(facts, readings, strict=True)
    ]


def count_of(fact: Fact, reading: LossReading) -> float:
    """What a term was divided by; NaN if it cannot be read."""
    count = number_of(fact.counted)
    # What `clamp(min=1)` makes of an empty mask.
    may_be_clamped = fact.source == DIVISOR and count == 1 and len(reading.facts) == 1
    if may_be_clamped and reading.value is not None:
        return count if number_of(reading.value) else 0.0
    return count


def _is_loop(likes: Sequence[int], rows: Sequence[float] | None) -> bool:
    """Whether there is a term for each row, so that each row counts the same."""
    if rows is None:
        return min(likes) > 1
    return min(rows) > 1 and all(
        number == n for number, n in zip(likes, rows, strict=True)
    )


def _is_one_row(
    facts: Sequence[Fact], readings: Sequence[LossReading], rows: Sequence[float] | None
) -> bool:
    """Whether it may be such a loop over a single row, as `sum([loss])`."""
    if rows is None or min(rows) > 1 or len(readings[0].facts) > 1:
        return False
    return all(fact.is_added for fact, n in zip(facts, rows, strict=True) if n == 1)


# Whether the program has corrected the weights by hand


def _has_other_factors(
    facts: Sequence[Fact], likes: Sequence[int], rows: Sequence[float] | None
) -> bool:
    if not _alike([abs(fact.factor) for fact in facts]):
        return True
    scales = [fact.scales for fact in facts]
    return any(not _are_equal(column) for column in zip(*scales, strict=True))


def _is_by_rows(
    facts: Sequence[Fact], likes: Sequence[int], rows: Sequence[float] | None
) -> bool:
    if rows is None:
        return False
    if facts[0].source == NUMBER:  # one of its numbers is its count
        return all(len(fact.divisors) > 1 for fact in facts) and _divided_by(
            facts, rows
        )
    if max(likes) == 1 and _alike(rows):
        return False  # it corrects nothing, and may be the number of micro-batches
    if _divided_by(facts, rows):
        return True
    for column in zip(*(fact.scales for fact in facts), strict=True):
        numbers = [
            number_of(scale.tensor) if scale.tensor.numel() == 1 else None
            for scale in column
        ]
        if all(
            number in (n, 1 / n) for number, n in zip(numbers, rows, strict=True) if n
        ):
            return True
    return False


def _is_no_count(
    facts: Sequence[Fact], likes: Sequence[int], rows: Sequence[float] | None
) -> bool:
    """Whether the Python numbers that divide or multiply a sum are no counts.

    Counts are whole numbers.
    """
    if facts[0].source != NUMBER:
        return False
    if len({len(fact.divisors) for fact in facts}) > 1:
        return True
    differing = [
        column
        for column in zip(*(fact.divisors for fact in facts), strict=True)
        if not _alike(column)
    ]
    numbers = [number for column in differing for number in column]
    return not numbers or not all(
        number >= 1 and _alike([number, round(number)]) for number in numbers
    )


def _is_by_terms(
    facts: Sequence[Fact], likes: Sequence[int], rows: Sequence[float] | None
) -> bool:
    return max(likes) > 1 and _divided_by(facts, [max(likes)] * len(facts))


def counts_alone(fact: Fact, rows: float | None) -> bool:
    """Whether the only term of a loss counts whenever counts differ.

    All replicas must have the same term, and the same number of rows.
    """
    return fact.source in (TARGETS, DIVISOR, SELECTION) and not (
        rows == 1 and fact.is_added
    )


def _divided_by(facts: Sequence[Fact], numbers: Sequence[float]) -> bool:
    pairs = zip(facts, numbers, strict=True)
    return all(
        any(_alike([divisor, number]) for divisor in fact.divisors)
        for fact, number in pairs
    )


_Holds = Callable[[Sequence[Fact], Sequence[int], "Sequence[float] | None"], bool]
_CORRECTED: tuple[tuple[str, _Holds], ...] = (
    (DIVIDED_BY_TERMS, _is_by_terms),
    (OTHER_FACTORS, _has_other_factors),
    (DIVIDED_BY_ROWS, _is_by_rows),
    (NO_COUNT, _is_no_count),
)


def _are_equal(scales: Sequence[Scale]) -> bool:
    first = scales[0].tensor
    for scale in scales[1:]:
        other = scale.tensor
        if other.shape != first.shape or scale.divides != scales[0].divides:
            return False
        if other is not first and not torch.equal(
            other.to(first.device, first.dtype), first
        ):
            return False
    return True


def _alike(numbers: Sequence[float]) -> bool:
    return not numbers or max(numbers) - min(numbers) <= _CLOSE * max(map(abs, numbers))


def number_of(value: torch.Tensor | float | None) -> float:
    """What a count is; NaN if it cannot be read."""
    with suppress(RuntimeError, TypeError):
        return float(value.item() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]
    return torch.nan


HOW_COUNTED = {
    TARGETS: "it leaves out ignored targets, or weighs classes",
    DIVISOR: "the step divides a sum by a tensor",
    NUMBER: "the step divides a sum by a number",
}
HOW_SELECTED = "it is a mean over elements that a mask or indices select"
