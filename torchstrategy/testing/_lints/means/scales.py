"""Losses divided too often or not at all, by the micro-batches or ranks.

They are divided by the number of these.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import (
    Backward,
    Factor,
    Facts,
    address_of,
)
from torchstrategy.testing._lints.evidence.fingerprints import number_of
from torchstrategy.testing._lints.evidence.known import Known, is_plain
from torchstrategy.testing._lints.evidence.operators import DIVIDING, MULTIPLYING
from torchstrategy.testing._lints.evidence.own_steps import OwnOptimizer
from torchstrategy.testing._lints.evidence.places import (
    CLIPPING,
    Place,
    here,
    is_within,
)
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import has_hook_of_gradients

_RANKS = re.compile(r"world|rank|gpu|replica|nproc|n_proc", re.IGNORECASE)
_ROWS_OF_ALL = re.compile(r"global|world|effective|all_ranks", re.IGNORECASE)
_BINARY = re.compile(r"[/*]=?\s*\(?\s*([A-Za-z_]\w*)")
_aten = torch.ops.aten


@final
@dataclass
class _Case:
    """One way to be wrong at one place."""

    says: str
    write: str
    places: list[Place]


@final
@dataclass
class _Count:
    right: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    cases: dict[str, _Case] = field(default_factory=dict)


@final
class Scales(Lint):
    """Follows by what the mean losses of a step are multiplied.

    It does until the optimizer has their gradients.
    """

    def __init__(self) -> None:
        self._counts: dict[Place, _Count] = defaultdict(_Count)
        # Where a number was divided by the number of ranks, or by that of the rows of
        # all ranks.
        self._divided: dict[int, Known[Place]] = defaultdict(Known)
        # Of the losses of a step, those places.
        self._by_ranks: dict[int, list[Place]] = defaultdict(list)

    @override
    def operators(self) -> dict[Any, Seen]:
        seen: dict[Any, Seen] = dict.fromkeys(DIVIDING, _divided) | dict.fromkeys(
            MULTIPLYING, _multiplied
        )
        seen |= {_aten.copy_.default: _overwritten, _aten.zero_.default: _overwritten}
        return seen | {
            _aten.div.Tensor: self._scaled_a_number,
            _aten.mul.Tensor: self._scaled_a_number,
        }

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        places = [self._divided[facts.rank].get(loss) for loss in losses]
        self._by_ranks[facts.rank] += [place for place in places if place is not None]

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        calls = [call for call in facts.backwards if call.is_plain]
        several = accumulated(calls)
        if (several or len(calls) == 1) and (last := (several or calls)[-1]):
            # A program that updates weights itself may divide in the update, where
            # nobody sees it.
            self._judge(
                facts,
                several or calls,
                last,
                may_divide_later=isinstance(optimizer, OwnOptimizer),
            )
        self._by_ranks.pop(facts.rank, None)

    @override
    def findings(self) -> list[Finding | None]:
        found: list[Finding | None] = []
        for count in self._counts.values():
            for name, case in count.cases.items():
                if count.wrong[name] > count.right:
                    found.append(finding(name, case.says, case.write, case.places))
        return found

    def _judge(
        self,
        facts: Facts,
        calls: Sequence[Backward],
        last: Backward,
        may_divide_later: bool,
    ) -> None:
        loss, gradient = factor_of(calls), factor_of_gradients(facts, calls)
        if loss is None and gradient == 1:
            self._judge_sums(facts, calls, last)
        if loss is None or gradient is None:
            return
        total, micro = loss * gradient, len(calls)
        ranks, is_summed = ranks_of(facts, calls)
        count = self._counts[last.place]
        # What a mean over ranks multiplies by, where they are added.
        of_ranks = 1 / ranks if is_summed else 1
        if may_divide_later and total > of_ranks / micro:
            return
        if micro > 1 and (_is(total, 1) or _is(total, of_ranks)):
            self._note(count, "loss-not-divided", _not_divided(micro, last.place))
        elif micro > 1 and _is(total, of_ranks / micro**2):
            self._note(
                count, "loss-divided-twice", _twice(micro, "micro-batches", last.place)
            )
        elif ranks > 1 and is_summed and _is(total, 1 / micro):
            self._note(count, "loss-not-divided", _summed(ranks, last.place))
        elif ranks > 1 and self._is_of_ranks(
            facts, loss, gradient, total * micro, ranks, is_summed
        ):
            places = [last.place, *self._by_ranks[facts.rank][:1]]
            case = _twice(ranks, "ranks", *places)
            self._note(count, "loss-divided-twice", case)
        else:
            count.right += 1

    def _judge_sums(
        self, facts: Facts, calls: Sequence[Backward], last: Backward
    ) -> None:
        """Looks for sums that are divided by the number of rows of all ranks.

        They are averaged over ranks then.
        """
        ranks, is_summed = ranks_of(facts, calls)
        if ranks < 2 or is_summed:
            return
        count, places = self._counts[last.place], self._by_ranks[facts.rank]
        if places and all(
            _is_divided_by_all(call, ranks * len(calls)) for call in calls
        ):
            self._note(
                count, "loss-divided-twice", _by_all(ranks, places[0], last.place)
            )
        else:
            count.right += 1

    def _note(self, count: _Count, name: str, case: _Case) -> None:
        count.wrong[name] += 1
        count.cases.setdefault(name, case)

    def _is_of_ranks(
        self,
        facts: Facts,
        loss: float,
        gradient: float,
        total: float,
        ranks: int,
        is_summed: bool,
    ) -> bool:
        """Whether the mean over ranks is divided by their number once more."""
        if is_summed:
            return _is(total, 1 / ranks**2)
        return _is(total, 1 / ranks) and (
            _is(gradient, 1 / ranks) or bool(self._by_ranks[facts.rank])
        )

    def _scaled_a_number(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Notes where a single number is divided by the number of ranks.

        The line has to say that it is this number.
        """
        is_number = is_plain(args[0]) and not args[0].dim() and not result.dim()
        if facts.size < 2 or not is_number:
            return
        number, known = number_of(args[1]), self._divided[facts.rank]
        before = known.get(args[0])
        if before is not None:
            known.put(result, before)
        elif number is not None and _says_ranks(number, facts.size, place := here()):
            known.put(result, place)


def _says_ranks(number: float, ranks: int, place: Place) -> bool:
    """Whether a number is that of the ranks, or may be that of their rows.

    The line of the number says that it is.
    """
    text = place.text()
    if _is(number, ranks) or _is(number, 1 / ranks):
        names = _BINARY.findall(text)
        return bool(_RANKS.search(text)) or any(
            place.mentions(name, "world_size|WORLD_SIZE") for name in names
        )
    # Without such a word it may be the number of other things: `sum / (2 * rows)` is
    # the half of a mean.
    return number > ranks and number % ranks == 0 and bool(_ROWS_OF_ALL.search(text))


def _is_divided_by_all(call: Backward, times: int) -> bool:
    """Whether a loss is one sum, divided by some times as many numbers as it has.

    It is divided by nothing else.
    """
    if len(call.terms) != 1:
        return False
    (term,) = call.terms
    is_plain_sum = all(abs(one) == 1 for one in term.multipliers)
    return is_plain_sum and _is(math.prod(term.divisors), times * (term.summed or 0))


def accumulated(calls: Sequence[Backward]) -> list[Backward]:
    """Those calls, through the same lines, that add to the same gradients.

    They are gradients of the same parameters, if there are several.
    """
    by_way: dict[tuple[Place, ...], list[Backward]] = defaultdict(list)
    for call in calls:
        if not call.is_given:
            by_way[call.way].append(call)
    several = max(by_way.values(), key=len, default=[])
    return (
        several
        if len(several) > 1 and set.intersection(*(call.changed for call in several))
        else []
    )


def ranks_of(facts: Facts, calls: Sequence[Backward]) -> tuple[int, bool]:
    """Among how many ranks gradients are reduced, and if as a sum; 0 if unknown."""
    called = [model for model in facts.models if model.key in facts.called]
    if called:
        is_known = not facts.reduced and not has_hook_of_gradients(called[0].model())
        return (len(called[0].ranks), False) if is_known else (0, False)
    of_calls = set().union(*(call.changed for call in calls))
    addresses = {address for own, address in facts.gradients.items() if own in of_calls}
    if not isinstance(facts.stepping, OwnOptimizer) and addresses & facts.apart:
        # A flat tensor was reduced, to be looked at, and not the gradients.
        return (0, False)
    ways = {facts.reduced.get(address) for address in addresses}
    if ways == {"sum"}:
        return len(facts.reducers), True
    return (len(facts.reducers), False) if ways == {"avg"} else (0, False)


def factor_of(calls: Sequence[Backward]) -> float | None:
    """What the means in some losses are multiplied by, all the same.

    It is None if there is no such number.
    """
    factors = set()
    for call in calls:
        means = [abs(term.factor) for term in call.terms if term.is_mean]
        factors.add(round(max(means), 12) if means else None)
    return factors.pop() if len(factors) == 1 else None


def factor_of_gradients(facts: Facts, calls: Sequence[Backward]) -> float | None:
    """What the program multiplied all gradients by since `backward`; else None.

    It is None if nobody knows.
    """
    changed = set.intersection(*(call.changed for call in calls))
    factors: set[float | None] = set()
    for parameter in facts.parameters():
        if id(parameter) in changed:
            address = facts.address_of_gradient(parameter)
            factors.add(facts.factor_at(address) if address else None)
    return factors.pop() if len(factors) == 1 else None


def _is(number: float, expected: float) -> bool:
    return abs(number - expected) <= 1e-6 * expected


def _not_divided(micro: int, place: Place) -> _Case:
    return _Case(
        f"The gradients of {micro} mean losses ({place}) are added in each step, and "
        f"nothing is divided by {micro}: the step is {micro} times as long as one with "
        "the mean of them.",
        f"`(loss / {micro}).backward()`, with the number of micro-batches.",
        [place],
    )


def _summed(ranks: int, place: Place) -> _Case:
    return _Case(
        f"The gradients of mean losses ({place}) are added over {ranks} ranks, and "
        f"nothing is divided by {ranks}.",
        "Reduce them with `op=dist.ReduceOp.AVG`, or divide them by the number of "
        "ranks.",
        [place],
    )


def _twice(number: int, of: str, *places: Place) -> _Case:
    why = ": their gradients are averaged already" if of == "ranks" else ""
    return _Case(
        f"The loss at {places[0]} is divided by {number}, the number of {of}, once too "
        f"often{why}{f'; {places[1]} divides by it' if len(places) > 1 else ''}.",
        "Leave one of the two divisions away.",
        list(dict.fromkeys(places)),
    )


def _by_all(ranks: int, divides: Place, goes_back: Place) -> _Case:
    return _Case(
        "Each rank divides the sum of its own losses by the number of losses of all "
        f"{ranks} ranks ({divides}), and their gradients are averaged over the ranks "
        f"besides ({goes_back}): the step is a part of {ranks} of the one that is "
        "meant.",
        "Divide by the number of the rank's own losses, or multiply the loss by the "
        "number of ranks.",
        list(dict.fromkeys([divides, goes_back])),
    )


def _divided(
    facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    _scaled(facts, args, is_division=True)


def _multiplied(
    facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    _scaled(facts, args, is_division=False)


def _scaled(facts: Facts, args: Sequence[Any], is_division: bool) -> None:
    gradients, flat = facts.gradients_in(args[0]), facts.flats.get(args[0])
    if (not gradients and flat is None) or is_within(CLIPPING):
        return
    by = number_of(args[1])
    number = None if not by else 1 / by if is_division else by
    if flat is not None and args[0].nbytes != args[0].untyped_storage().nbytes():
        number = None  # of a part of it
    if flat is None:
        facts.multiplies(gradients, number, here())
    else:
        flat.multiplies(number, here())


def _overwritten(
    facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    if not facts.addresses or (address := address_of(args[0])) not in facts.addresses:
        return
    facts.apart.discard(address)
    facts.factors[address] = Factor(None, here())
