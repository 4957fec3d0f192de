"""Means of means, over numbers of rows or tokens that are not the same.

They are in metrics and in training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Backward, Facts, Model
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    few_numbers,
    number_of,
)
from torchstrategy.testing._lints.evidence.known import Known, is_plain
from torchstrategy.testing._lints.evidence.losses import Term
from torchstrategy.testing._lints.evidence.places import Place, here, in_words
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.means.scales import (
    accumulated,
    factor_of,
    factor_of_gradients,
    ranks_of,
)
from torchstrategy.testing._lints.torch_internals import has_hook_of_gradients
from torchstrategy.testing._ranks.witnesses import Told

_MOST_NUMBERS, _MOST_STEPS, _MATTERS, _CLOSE = 1000, 10_000, 0.05, 1e-4
_MOST_CLASSES = 64
_aten = torch.ops.aten
Counts = tuple[float | None, ...]


class _Mean(NamedTuple):
    """A mean over so many numbers, or their sum, or shares of several classes.

    The classes have so many numbers together.

    `is_of_training` says that it was made of numbers with gradients: it is a loss, and
    no metric, if it is shown.
    """

    over: float
    is_mean: bool
    is_of_training: bool


class _Brought(NamedTuple):
    """What one rank brings to a mean over ranks."""

    counts: Counts
    place: Place
    ranks: tuple[int, ...]
    weight: float = 1.0  # by what it has multiplied the gradients since `backward`


class _Total(NamedTuple):
    """A sum that one rank has divided by a number, to be reduced as a mean."""

    divisor: float
    most: float  # how many numbers were added up: no count of them is larger
    place: Place
    ranks: tuple[int, ...]
    # The keys of the numbers that the rank has added up over ranks in this step.
    reduced: tuple[Hashable, ...]


_OfRank = TypeVar("_OfRank", _Brought, _Total)


@final
class Means(Lint):
    """Follows means until they are reduced.

    Compares over how many numbers they are on each rank.
    """

    def __init__(self) -> None:
        self._known: dict[int, Known[_Mean]] = defaultdict(Known)
        # Counts by the number that a rank has read.
        self._read: dict[int, dict[float, float]] = defaultdict(dict)
        self._metrics: dict[Hashable, dict[int, _Brought]] = defaultdict(dict)
        # By step and rank.
        self._losses: dict[int, dict[int, _Brought]] = defaultdict(dict)
        # Losses that are a sum, divided by a number.
        self._sums: dict[int, dict[int, _Brought]] = defaultdict(dict)
        # The same by the number of all ranks.
        self._totals: dict[int, dict[int, _Total]] = defaultdict(dict)
        # Single numbers that ranks add up.
        self._brought: dict[Hashable, dict[int, float]] = defaultdict(dict)
        # Of a step, by rank.
        self._reduced: dict[int, list[Hashable]] = defaultdict(list)
        # How many rows a model was called with last, by rank.
        self._called_with: dict[int, int] = {}
        self._accumulated: dict[Place, list[Counts]] = defaultdict(list)

    @override
    def operators(self) -> dict[Any, Seen]:
        seen: dict[Any, Seen] = {
            op: self._is_mean for op in (_aten.mean.default, _aten.mean.dim)
        }
        seen |= {op: self._is_sum for op in (_aten.sum.default, _aten.sum.dim_IntList)}
        seen |= {
            op: self._is_passed for op in (_aten._to_copy.default, _aten.clone.default)
        }
        seen |= {op: self._is_divided for op in (_aten.div.Tensor, _aten.div_.Tensor)}
        changing = [
            _aten.mul_.Tensor,
            _aten.add_.Tensor,
            _aten.sub_.Tensor,
            _aten.zero_.default,
            _aten.fill_.Scalar,
        ]
        seen |= {op: self._is_changed for op in changing}
        seen[_aten.nll_loss_forward.default] = self._is_loss_of_classes
        seen[_aten.copy_.default] = self._is_copied
        seen[_aten._local_scalar_dense.default] = self._is_read
        return seen

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        is_reduced = told.kind in ("all_reduce", "reduce") and told.detail.startswith(
            ("sum", "avg")
        )
        if is_of_torch or not is_reduced or len(told.ranks) < 2 or len(told.gives) != 1:
            return
        (tensor,) = told.gives
        mean = self._known[facts.rank].get(tensor)
        if tensor.numel() != 1 and mean is None:
            return
        number = (
            number_of(tensor)
            if can_be_read(tensor) and told.detail.startswith("sum")
            else None
        )
        if (
            number is not None
            and number.is_integer()
            and len(self._brought) < _MOST_STEPS
        ):
            self._brought[told.key][facts.rank] = number
            self._reduced[facts.rank].append(told.key)
        if not tensor.is_floating_point():
            return
        count = (
            mean.over
            if mean is not None and mean.is_mean
            else self._count_of_number(facts.rank, tensor)
        )
        if mean is not None and mean.is_of_training:
            count = None
        if count is not None and len(self._metrics) < _MOST_STEPS:
            self._metrics[told.key][facts.rank] = _Brought(
                (count,), here(), tuple(told.ranks)
            )
        self._known[facts.rank].drop(tensor)  # it will be of all ranks

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        calls = [call for call in facts.backwards if call.is_plain]
        self._steps_with_a_sum(facts, calls)
        self._steps_with_a_total(facts, calls)
        several = accumulated(calls) or calls
        factor, micro = factor_of(several) if several else None, len(several)
        weight = factor_of_gradients(facts, several) if several else None
        ranks, is_summed = ranks_of(facts, several) if several else (0, False)
        # A loss that is divided by the ranks, for a sum over them.
        of_ranks = ranks if is_summed and weight == 1 else 1
        if (
            factor is None
            or abs(factor * micro * of_ranks - 1) > 1e-6
            or weight is None
        ):
            return
        counts = tuple(
            term.over for call in several for term in call.terms if term.is_mean
        )
        if None in counts or facts.steps >= _MOST_STEPS or _have_hooks(facts):
            return
        place, companions = several[-1].place, facts.companions()
        if accumulated(calls) and len(counts) == micro:
            self._accumulated[place].append(counts)
        if len(companions) > 1:
            # Of several tasks, ranks may add the losses in other orders, each in that
            # of its own rows.
            self._losses[facts.steps][facts.rank] = _Brought(
                _known(counts), place, companions, weight
            )

    def _steps_with_a_sum(self, facts: Facts, calls: Sequence[Backward]) -> None:
        """Notes by how many numbers a rank has divided sums to have means.

        These are the losses of a step.
        """
        ranks, rows = facts.companions(), self._called_with.pop(facts.rank, None)
        several = accumulated(calls) or (calls if len(calls) == 1 else [])
        if not several or facts.steps >= _MOST_STEPS or rows == 1:
            return
        sums = [
            term
            for call in several
            for term in call.terms
            if term.summed is not None and term.divisors
        ]
        counts = tuple(_count_of_mean(term, len(several)) for term in sums)
        factor = factor_of_gradients(facts, several)
        if (
            not sums
            or None in counts
            or factor is None
            or factor not in (1, 1 / max(len(ranks), 1))
        ):
            return
        place = several[-1].place
        if len(several) > 1 and len(counts) == len(several):
            self._accumulated[place].append(counts)
        if len(ranks) > 1:
            self._sums[facts.steps][facts.rank] = _Brought(_known(counts), place, ranks)

    def _steps_with_a_total(self, facts: Facts, calls: Sequence[Backward]) -> None:
        """Notes by how many numbers of all ranks a rank has divided a sum.

        The ranks take the mean of it.
        """
        reduced, sums = self._reduced.pop(facts.rank, []), []
        calls = accumulated(calls) or (calls if len(calls) == 1 else [])
        if calls and reduced and facts.steps < _MOST_STEPS:
            sums = [
                term
                for call in calls
                for term in call.terms
                if term.summed is not None and term.divisors
            ]
        # More than one divisor: of the number of micro-batches, say.
        terms = [one for one in sums if len(one.divisors) == 1]
        divisors = {divisor for one in terms for divisor in one.divisors}
        ranks, is_summed = ranks_of(facts, calls) if calls else (0, False)
        if (
            len(divisors) != 1
            or ranks < 2
            or is_summed
            or factor_of_gradients(facts, calls) != 1
        ):
            return
        divisor, summed = (
            divisors.pop(),
            [one.summed for one in terms if one.summed is not None],
        )
        if any(ranks in one.multipliers for one in sums if one.divisors[-1] == divisor):
            # The program knows of the mean over ranks: the others may be of weights,
            # alike on all of them.
            return
        # A sum of as many numbers as a parameter has may be one of weights, too.
        if divisor == ranks or any(one.numel() in summed for one in facts.parameters()):
            return
        total = _Total(
            divisor, sum(summed), calls[0].place, facts.companions(), tuple(reduced)
        )
        self._totals[facts.steps][facts.rank] = total

    def _is_of_all(self, by_rank: dict[int, _Total]) -> bool:
        """Whether all ranks have divided by the same number.

        It is the sum of what they count.
        """
        totals = list(by_rank.values())
        if len({total.divisor for total in totals}) > 1:
            return False
        for key in totals[0].reduced:
            counts = self._brought[key]
            are_counts = all(
                0 < counts.get(rank, 0) <= total.most for rank, total in by_rank.items()
            )
            if (
                are_counts
                and len(counts) == len(by_rank)
                and sum(counts.values()) == totals[0].divisor
            ):
                return True
        return False

    def _divided_by_all(self) -> list[Finding | None]:
        """The places where most losses were divided by all ranks' numbers.

        They were averaged then.
        """
        found = []
        for those in _complete_by_place(self._totals.values()):
            wrong = list(filter(self._is_of_all, those))
            if 2 * len(wrong) > len(those):
                found.append(_of_all_ranks(wrong[0], len(wrong), len(those)))
        return found

    @override
    def calls(self, facts: Facts, model: Model, args: Sequence[Any]) -> None:
        rows = next(
            (arg.shape[0] for arg in args if is_plain(arg) and arg.dim() > 0), None
        )
        if rows is not None:
            self._called_with[facts.rank] = rows

    @override
    def findings(self) -> list[Finding | None]:
        metrics = self._uneven(list(self._metrics.values()), _differ)
        losses = self._uneven(
            list(self._losses.values()),
            lambda those: _differ(those) and _are_apart(those),
        )
        losses += self._uneven(list(self._sums.values()), _are_apart)
        found = [_of_metric(*case) for case in metrics] + [
            _of_loss(*case) for case in losses
        ]
        found += self._divided_by_all()
        for place, steps in self._accumulated.items():
            uneven = [counts for counts in steps if len(set(counts)) > 1]
            if 2 * len(uneven) > len(steps):
                found.append(_of_accumulation(uneven[0], place))
        return found

    def _uneven(
        self,
        brought: list[dict[int, _Brought]],
        are_uneven: Callable[[dict[int, _Brought]], bool],
    ) -> list[tuple[dict[int, _Brought], int, int]]:
        """Those places where most means were over different numbers.

        The last batch of an epoch is one of many.
        """
        cases = []
        for those in _complete_by_place(brought):
            uneven = list(filter(are_uneven, those))
            if uneven and 2 * len(uneven) >= len(those):
                cases.append((uneven[0], len(uneven), len(those)))
        return cases

    def _is_mean(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if result.numel() == 1 and not self._carry_shares(facts, args[0], result):
            self._known[facts.rank].put(
                result, _Mean(float(args[0].numel()), True, args[0].requires_grad)
            )

    def _is_sum(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if (
            result.numel() == 1
            and not result.is_complex()
            and not self._carry_shares(facts, args[0], result)
        ):
            self._known[facts.rank].put(
                result, _Mean(float(args[0].numel()), False, args[0].requires_grad)
            )

    def _is_loss_of_classes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        loss, total = result
        count = number_of(total)
        # A mean, and all classes weigh the same.
        if args[3] == 1 and args[2] is None and count is not None:
            self._known[facts.rank].put(loss, _Mean(count, True, args[0].requires_grad))

    def _is_passed(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        mean = self._known[facts.rank].get(args[0])
        if mean is not None and result.numel() == 1:
            self._known[facts.rank].put(result, mean)

    def _is_copied(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        known = self._known[facts.rank]
        mean = known.get(args[1])
        if mean is not None and args[0].numel() == 1:
            known.put(args[0], mean)
        elif known.get(args[0]) is not None:
            known.drop(args[0])

    def _is_divided(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        known = self._known[facts.rank]
        if result.numel() != 1:
            self._are_shares(facts, args, result)
            return
        mean, by = known.get(args[0]), args[1]
        if mean is None and (facts.size < 2 or not _counts_hits(args[0])):
            return
        if mean is not None and mean.is_mean:
            known.put(result, mean)
            return
        count = number_of(by)
        if mean is None and (count is None or not _is_share(args[0], count)):
            return
        if count is not None:
            known.put(
                result, _Mean(count, True, mean is not None and mean.is_of_training)
            )

    def _are_shares(
        self, facts: Facts, args: Sequence[Any], result: torch.Tensor
    ) -> None:
        """Notes shares of several classes, each of its own number.

        An intersection over a union is such a share.
        """
        is_of_classes = 1 < result.numel() <= _MOST_CLASSES and not result.is_complex()
        has_gradient = any(
            isinstance(one, torch.Tensor) and one.requires_grad for one in args
        )
        if facts.size < 2 or has_gradient or not is_of_classes:
            return
        numbers = [
            few_numbers(one) if isinstance(one, torch.Tensor) else None
            for one in args[:2]
        ]
        hits, counts = numbers
        if hits is None or counts is None or len(hits) != len(counts):
            return
        pairs = [(float(one), float(of)) for one, of in zip(hits, counts, strict=True)]
        if all(
            one.is_integer() and of.is_integer() and 0 <= one <= of for one, of in pairs
        ):
            self._known[facts.rank].put(
                result, _Mean(sum(of for _, of in pairs), True, False)
            )

    def _carry_shares(
        self, facts: Facts, shares: torch.Tensor, result: torch.Tensor
    ) -> bool:
        """Whether a result is the mean or the sum of such shares.

        Notes it as one of them then.
        """
        mean = self._known[facts.rank].get(shares)
        if mean is None or not mean.is_mean or shares.numel() == 1:
            return False
        self._known[facts.rank].put(result, mean)
        return True

    def _is_changed(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if (
            isinstance(args[0], torch.Tensor)
            and self._known[facts.rank].get(args[0]) is not None
        ):
            self._known[facts.rank].drop(args[0])

    def _is_read(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        mean, read = self._known[facts.rank].get(args[0]), self._read[facts.rank]
        if (
            mean is None
            or mean.is_of_training
            or len(read) >= _MOST_NUMBERS
            or not mean.over
        ):
            return
        if isinstance(result, complex):
            return
        if mean.is_mean:
            read[_rounded(float(result))] = mean.over
        else:
            # Of a sum, Python may make the mean.
            read[_rounded(float(result) / mean.over)] = mean.over

    def _count_of_number(self, rank: int, tensor: torch.Tensor) -> float | None:
        """Over how many numbers a mean is that was read, and made a tensor again."""
        number = (
            number_of(tensor) if can_be_read(tensor) and rank in self._read else None
        )
        if number is None or number == int(number if np.isfinite(number) else 0):
            return None
        return self._read[rank].get(_rounded(number))


def _complete_by_place(
    brought: Iterable[dict[int, _OfRank]],
) -> list[list[dict[int, _OfRank]]]:
    """What all ranks that belong together have brought.

    It is put together by the line of the first of them.
    """
    by_place: dict[Place, list[dict[int, _OfRank]]] = defaultdict(list)
    for by_rank in brought:
        first = by_rank[min(by_rank)]
        if len(by_rank) == len(first.ranks):
            by_place[first.place].append(by_rank)
    return list(by_place.values())


def _known(counts: Counts) -> tuple[float, ...]:
    """Those counts that are known, in order of their size."""
    return tuple(sorted(count for count in counts if count is not None))


def _count_of_mean(term: Term, micro: int) -> float | None:
    """The count by which a sum was divided to be a mean, one of so many of a step.

    It is None if it was something else.

    It was divided by a count of what was added, by the number of micro-batches, and by
    nothing else.
    """
    for count in term.divisors:
        is_mean = abs(term.factor * count * micro - 1) <= 1e-6
        if (
            is_mean
            and count.is_integer()
            and term.summed is not None
            and 1 < count <= term.summed
        ):
            return count
    return None


def _rounded(number: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def _counts_hits(tensor: Any) -> bool:
    """Whether something may be a number of hits that was counted in several batches."""
    return (
        isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and can_be_read(tensor)
    )


def _is_share(hits: torch.Tensor, count: float) -> bool:
    """Whether a whole number is divided by a larger one, as hits by rows are."""
    number = number_of(hits)
    return (
        number is not None
        and number.is_integer()
        and count.is_integer()
        and count > 1
        and 0 <= number <= count
    )


def _have_hooks(facts: Facts) -> bool:
    """Whether the program reduces the gradients of a wrapped model itself.

    It may weigh them by numbers of rows.
    """
    return any(
        has_hook_of_gradients(one.model())
        for one in facts.models
        if one.key in facts.called
    )


def _differ(by_rank: dict[int, _Brought]) -> bool:
    if len({one.weight for one in by_rank.values()}) > 1:
        shares = [
            count / one.weight
            for one in by_rank.values()
            for count in one.counts
            if count and one.weight
        ]
        if shares and max(shares) - min(shares) <= _CLOSE * max(shares):
            return False  # each rank weighs by what it counts
    return len({one.counts for one in by_rank.values()}) > 1


def _are_apart(by_rank: dict[int, _Brought]) -> bool:
    """Whether ranks brought means over numbers that differ by more than a little."""
    of_term = zip(*(one.counts for one in by_rank.values()), strict=False)
    known = [[count for count in counts if count is not None] for counts in of_term]
    return any(
        counts and max(counts) - min(counts) > _MATTERS * max(counts)
        for counts in known
    )


def _of_rank(by_rank: dict[int, _Brought]) -> str:
    return ", ".join(
        f"{' and '.join(f'{count:g}' for count in one.counts if count is not None)} on "
        f"rank {rank}"
        for rank, one in sorted(by_rank.items())
    )


def _of_metric(by_rank: dict[int, _Brought], uneven: int, total: int) -> Finding | None:
    places = [one.place for one in by_rank.values()]
    return finding(
        "mean-of-means",
        f"The means that are reduced at {in_words(places)} are over different numbers, "
        f"{_of_rank(by_rank)}, and count the same ({uneven} of {total} times).",
        "Reduce the sum and the number of each rank, and divide one by the other then.",
        places,
    )


def _of_loss(by_rank: dict[int, _Brought], uneven: int, total: int) -> Finding | None:
    places = [one.place for one in by_rank.values()]
    return finding(
        "mean-of-means",
        f"The losses at {in_words(places)} are means over different numbers, "
        f"{_of_rank(by_rank)}, and their gradients count the same ({uneven} of {total} "
        "steps).",
        "Divide the sum of each rank by the number of all ranks, `loss = total * ranks "
        "/ number_of_all`, or give all ranks the same number.",
        places,
    )


def _of_all_ranks(by_rank: dict[int, _Total], wrong: int, steps: int) -> Finding | None:
    first, places = by_rank[min(by_rank)], [total.place for total in by_rank.values()]
    count = len(by_rank)
    return finding(
        "loss-divided-twice",
        f"In the losses at {in_words(places)}, a sum is divided by {first.divisor:g}, "
        f"which is the number of all {count} ranks, and its gradients are averaged "
        f"over the ranks: they are 1/{count} of those of the mean ({wrong} of {steps} "
        "steps).",
        "Multiply by the number of ranks, `loss = total * ranks / number_of_all`.",
        places,
    )


def _of_accumulation(counts: Counts, place: Place) -> Finding | None:
    shown = ", ".join(f"{count:g}" for count in counts if count is not None)
    return finding(
        "mean-of-means",
        f"The losses that a step adds at {place} are means over different numbers, "
        f"{shown}, and count the same.",
        "Divide the sum of each micro-batch by the number of the whole batch.",
        [place],
    )
