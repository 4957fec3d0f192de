"""Results that are computed from parameters or gradients and thrown away.

A write in place was meant.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of, tensors_in
from torchstrategy.testing._lints.evidence.known import Known, is_plain
from torchstrategy.testing._lints.evidence.places import Place, calls_of_the_user
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower, Seen
from torchstrategy.testing._ranks.lines import is_of_a_package
from torchstrategy.testing._ranks.witnesses import Told
from torchstrategy.testing._simulation.ordinals import is_simulated

# Results, and steps of the optimizer between which they were thrown away.
_ENOUGH, _ENOUGH_STEPS = 4, 2
_LONGEST = 8  # operators: a result that is there for longer is kept for something
# Results of a call that are there at once: one may be in a variable, until the next one
# is assigned to it.
_KEPT = 2
_IN_PLACE = ("all_reduce", "broadcast")
_aten = torch.ops.aten
_ARITHMETIC = (
    *(
        _aten.mul.Tensor,
        _aten.mul.Scalar,
        _aten.div.Tensor,
        _aten.div.Scalar,
        _aten.add.Tensor,
        _aten.sub.Tensor,
    ),
    *(
        _aten.lerp.Scalar,
        _aten.lerp.Tensor,
        _aten.clamp.default,
        _aten.clamp_min.default,
        _aten.clamp_max.default,
    ),
)
_COPIES = (_aten.clone.default, _aten.cat.default)


class _Spot(NamedTuple):
    """A call in the program: a line may have several."""

    place: Place
    instruction: int


@final
@dataclass
class _Result:
    """A result that nothing has read so far.

    Attributes:
        spot: Where it was computed.
        memory: Its memory, while it is there.
        address: Where its memory is.
        age: How many operators have run since.
        exchanged_at: Where a collective has written on it; None if none has.
    """

    spot: _Spot
    memory: weakref.ref[Any]
    address: int
    age: int = 0
    exchanged_at: Place | None = None


@final
@dataclass
class _Seen:
    """What has become of the results of a call.

    Attributes:
        is_used: Whether something has read one of them, or it was kept.
        dropped: How many were thrown away.
        steps: After how many steps of the optimizer.
        exchanged_at: Where a collective has written on them; None if none has.
    """

    is_used: bool = False
    dropped: int = 0
    steps: set[int] = field(default_factory=set)
    exchanged_at: Place | None = None


@final
class Dropped(Follower):
    """Looks for calls all of whose results are gone soon after they were made.

    Nothing has read them before.

    Results of a call that are there at once are in a list, or will be in a file. The
    lint looks at simulated devices alone: NumPy, which nobody sees, may read what is on
    the CPU.
    """

    def __init__(self) -> None:
        # By rank, those that nothing has read.
        self._pieces: dict[int, list[_Result]] = {}
        self._parameters: dict[int, set[int]] = {}  # by rank, where they are
        self._copies: dict[int, Known[_Spot]] = defaultdict(Known)  # of gradients
        self._calls: dict[_Spot, _Seen] = defaultdict(_Seen)

    @override
    def operators(self) -> dict[Any, Seen]:
        return {op: self._computes for op in _ARITHMETIC} | {
            op: self._copies_gradients for op in _COPIES
        }

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        read = {address_of(one) for one in tensors_in((*args, *kwargs.values()))}
        made = {address_of(one) for one in tensors_in([result])}
        there = self._those_left(facts.rank, facts.steps)
        is_continued = any(
            one.address in made and one.address not in read for one in there
        )
        left = []
        for one in there:
            one.age += 1
            # It is another one, or it is written in place.
            if one.address not in read or one.address in made:
                left.append(one)
            # Otherwise what becomes of the new one says what both are for.
            elif not is_continued:
                self._calls[one.spot].is_used = True
        self._keep(facts.rank, left)

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if is_of_torch:
            return
        is_in_place = told.kind in _IN_PLACE
        for tensor in told.gives if is_in_place and facts.rank in self._copies else ():
            copied_at = self._copies[facts.rank].get(tensor)
            if copied_at is not None:
                self._copies[facts.rank].drop(tensor)
                self._follow(facts, tensor, copied_at)
        given = set(map(address_of, told.gives))
        left = []
        for one in self._those_left(facts.rank, facts.steps):
            if one.address not in given:
                left.append(one)
            elif is_in_place:
                one.age, one.exchanged_at = 0, _spot_here().place
                left.append(one)
            else:
                self._calls[one.spot].is_used = True
        self._keep(facts.rank, left)

    @override
    def shown(self, facts: Facts, tensor: torch.Tensor) -> None:
        for one in self._pieces.get(facts.rank, ()):
            if one.address == address_of(tensor):
                self._calls[one.spot].is_used = True

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._parameters.pop(facts.rank, None)  # they may be elsewhere by the next time

    @override
    def findings(self) -> list[Finding | None]:
        return [
            _finding(spot.place, seen)
            for spot, seen in self._calls.items()
            if not seen.is_used
            and seen.dropped >= _ENOUGH
            and len(seen.steps) >= _ENOUGH_STEPS
        ]

    def _computes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            return  # a part of a loss
        if facts.stepping is None and is_simulated(result):
            sources = (address_of(one) for one in tensors if one.shape == result.shape)
            if any(self._is_watched(facts, address) for address in sources if address):
                self._follow(facts, result, _spot_here())

    def _is_watched(self, facts: Facts, address: int) -> bool:
        """Whether a parameter, gradient or result that nothing has read is there."""
        if facts.rank not in self._parameters:
            self._parameters[facts.rank] = {
                address_of(one) for one in facts.parameters()
            }
        if address in self._parameters[facts.rank] or address in facts.addresses:
            return True
        return any(one.address == address for one in self._pieces.get(facts.rank, ()))

    def _copies_gradients(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if (
            facts.stepping is not None
            or facts.size < 2
            or not facts.addresses
            or not is_simulated(result)
        ):
            return
        if any(address_of(one) in facts.addresses for one in tensors_in(args[:1])):
            self._copies[facts.rank].put(result, _spot_here())

    def _follow(self, facts: Facts, result: torch.Tensor, spot: _Spot) -> None:
        if not spot.place.file or not is_plain(result):
            return
        there = self._those_left(facts.rank, facts.steps)
        if sum(one.spot == spot for one in there) >= _KEPT:
            self._calls[spot].is_used = True
        memory: Any = result.untyped_storage()
        there.append(_Result(spot, weakref.ref(memory), address_of(result)))
        self._keep(facts.rank, there)

    def _those_left(self, rank: int, steps: int) -> list[_Result]:
        """The results that are still there.

        Those that are gone have been thrown away.
        """
        left = []
        for one in self._pieces.get(rank, ()):
            seen = self._calls[one.spot]
            if one.memory() is None:
                seen.dropped += 1
                seen.steps.add(steps)
                seen.exchanged_at = seen.exchanged_at or one.exchanged_at
            elif one.age > _LONGEST:
                seen.is_used = True
            elif not seen.is_used:
                left.append(one)
        return left

    def _keep(self, rank: int, results: list[_Result]) -> None:
        if results:
            self._pieces[rank] = results
        else:
            self._pieces.pop(rank, None)


def _spot_here() -> _Spot:
    """The innermost call that is neither torch's nor this library's.

    It is one of no file if it is that of a package.
    """
    frame = next(calls_of_the_user(), None)
    if frame is None or is_of_a_package(frame):
        return _Spot(Place("", 0), 0)
    return _Spot(Place(frame.f_code.co_filename, frame.f_lineno), frame.f_lasti)


def _finding(place: Place, seen: _Seen) -> Finding | None:
    exchange = (
        ""
        if seen.exchanged_at is None
        else f", which ranks have exchanged ({seen.exchanged_at}),"
    )
    return finding(
        "result-thrown-away",
        f"The result of a call at {place}{exchange} is thrown away each time, "
        f"{seen.dropped} times in this run. It is computed from parameters or "
        "gradients, nothing reads it, and nothing is written.",
        "Write in place, as with `value.mul_(decay).add_(...)` or "
        "`parameter.grad.div_(count)`, or copy the result back with "
        "`tensor.copy_(result)`.",
        [place, *([] if seen.exchanged_at is None else [seen.exchanged_at])],
    )
