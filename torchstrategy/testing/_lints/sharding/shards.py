"""Gradients whose parts ranks multiply by numbers that differ.

They do by clipping with the norm of a part, for example.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of, parameters_of
from torchstrategy.testing._lints.evidence.fingerprints import number_of, numbers_of
from torchstrategy.testing._lints.evidence.known import is_plain
from torchstrategy.testing._lints.evidence.modules import owners_of
from torchstrategy.testing._lints.evidence.operators import DIVIDING, MULTIPLYING
from torchstrategy.testing._lints.evidence.pieces import Pieces
from torchstrategy.testing._lints.evidence.places import Place, here, in_words
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower, Seen
from torchstrategy.testing._lints.torch_internals import part_of
from torchstrategy.testing._ranks.witnesses import Told

_MOST_STEPS, _CLOSE = 1000, 1e-3
_ENOUGH, _MOST_FOLLOWED = 2, 8  # steps
_WRITE = (
    "Add the squares of the norms of all parts, `dist.all_reduce(squared)`, before you "
    "take the root, or clip with `torch.nn.utils.clip_grad_norm_`, which knows of "
    "parts."
)
_COLLECTIVES = ("c10d", "_c10d_functional")  # the namespaces of their operators


@final
@dataclass
class _Factor:
    """By what the part of a gradient was multiplied since `backward`, and where last.

    It is None if nobody knows.
    """

    number: float | None
    place: Place
    size: int  # of what was multiplied: it may be a block of a part
    is_own: bool  # whether a number was made of parts of this rank alone


@final
class Shards(Follower):
    """Notes by what each rank multiplies its gradients between `backward` and the step.

    These are its parts of gradients.

    Parts are those of `DTensor`, and what the program itself gets from
    `reduce_scatter`, if it is a gradient in a step. In the first steps, it follows what
    is computed from parts, until a collective adds it up.
    """

    def __init__(self) -> None:
        # By rank and address.
        self._parts: dict[int, dict[int, _Factor | None]] = defaultdict(dict)
        # By rank and address: among whom.
        self._scattered: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self._steps: dict[tuple[Any, ...], dict[int, _Factor]] = defaultdict(dict)
        self._whole: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}  # by id
        self._pieces: dict[int, Pieces[bool]] = {}
        # By step and rank.
        self._own: dict[Place, dict[int, dict[int, float | None]]] = defaultdict(dict)

    @override
    def operators(self) -> dict[Any, Seen]:
        return dict.fromkeys(DIVIDING, self._divides) | dict.fromkeys(
            MULTIPLYING, self._multiplies
        )

    @override
    def went_back(self, facts: Facts) -> None:
        # Hooks may have exchanged gradients while `backward` ran.
        self._parts[facts.rank] = dict.fromkeys(self._scattered[facts.rank])
        if facts.size > 1:
            for parameter in facts.parameters():
                part = part_of(parameter.grad)
                if part is not None and (address := address_of(part)):
                    self._parts[facts.rank][address] = None
                    if facts.steps < _MOST_FOLLOWED:
                        self._pieces.setdefault(facts.rank, Pieces()).add(part, True)

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if facts.rank in self._pieces:
            for tensor in told.gives:
                self._pieces[facts.rank].drop(tensor)
        # Of several tensors, each may be a whole gradient, for the rank that owns the
        # parameter.
        memory = {
            one.untyped_storage().data_ptr() for one in told.gives if is_plain(one)
        }
        if (
            told.kind == "reduce_scatter"
            and len(memory) == 1
            and not is_of_torch
            and facts.stepping is None
        ):
            for tensor in told.gets:
                if address := address_of(tensor):
                    self._scattered[facts.rank][address] = tuple(told.ranks)
                    self._parts[facts.rank][address] = None
                    if facts.steps < _MOST_FOLLOWED:
                        self._pieces.setdefault(facts.rank, Pieces()).add(tensor, True)

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        if facts.stepping is None and func.namespace not in _COLLECTIVES:
            self._pieces[facts.rank].follow(func, args, kwargs, result)

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._pieces.pop(facts.rank, None)
        parts = self._parts.get(facts.rank)
        if parts and facts.steps < _MOST_STEPS and any(parts.values()):
            found: dict[tuple[Any, ...], _Factor | None] = {}
            for position, parameter in enumerate(parameters_of(optimizer)):
                part, ranks = self._part_of(facts, parameter)
                if (
                    part is not None
                    and part.numel()
                    and not (part is parameter.grad and self._is_whole(parameter))
                ):
                    key = facts.steps, ranks, tuple(parameter.shape), position
                    factor = parts.get(address_of(part))
                    found[key] = (
                        None
                        if factor is None or factor.size != part.numel()
                        else factor
                    )
            factors = [factor for factor in found.values() if factor is not None]
            # A norm of all parts is one number for all of them. Norms of single rows or
            # layers are others.
            if (
                not factors
                or len(factors) < len(found)
                or len({factor.number for factor in factors}) > 1
            ):
                return
            for key, factor in found.items():
                if factor is not None:
                    self._steps[key][facts.rank] = factor
            if all(factor.is_own for factor in factors):
                for factor in factors:
                    self._own[factor.place].setdefault(facts.steps + 1, {})[
                        facts.rank
                    ] = factor.number

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._scattered.pop(facts.rank, None)

    @override
    def findings(self) -> list[Finding | None]:
        found: dict[tuple[Place, ...], tuple[int, dict[int, float], list[Place]]] = {}
        for key, by_rank in self._steps.items():
            factors = dict(sorted(by_rank.items()))
            numbers = {
                rank: factor.number
                for rank, factor in factors.items()
                if factor.number is not None
            }
            if len(numbers) < max(2, len(key[1])):
                continue
            size = max(map(abs, numbers.values()))
            if max(numbers.values()) - min(numbers.values()) > _CLOSE * size:
                places = list(
                    dict.fromkeys(factor.place for factor in factors.values())
                )
                found.setdefault(tuple(places), (key[0] + 1, numbers, places))
        own: list[Finding | None] = []
        for place, by_step in self._own.items():
            step, numbers_of_own = next(iter(by_step.items()))
            if len(by_step) >= _ENOUGH and not any(place in places for places in found):
                own.append(_finding_of_own(step, numbers_of_own, place))
        return [_finding(*one) for one in found.values()] + own

    def _part_of(
        self, facts: Facts, parameter: torch.Tensor
    ) -> tuple[torch.Tensor | None, tuple[int, ...]]:
        """This rank's part of a gradient, and the ranks that have the others."""
        gradient: Any = parameter.grad
        part = part_of(gradient)
        if part is not None:
            return part, tuple(numbers_of(gradient.device_mesh.mesh).flatten().tolist())
        ranks = (
            self._scattered[facts.rank].get(address_of(gradient))
            if gradient is not None
            else None
        )
        return (None, ()) if ranks is None else (gradient, ranks)

    def _is_whole(self, parameter: torch.Tensor) -> bool:
        """Whether a module has a parameter.

        Its rank owns all of it then, and its gradient is no part of a flat one.
        """
        there, is_whole = self._whole.get(id(parameter), (None, False))
        if there is None or there() is not parameter:
            is_whole = bool(owners_of(parameter))
            self._whole[id(parameter)] = weakref.ref(parameter), is_whole
        return is_whole

    def _divides(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._note(facts, args, is_division=True)

    def _multiplies(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._note(facts, args, is_division=False)

    def _note(self, facts: Facts, args: Sequence[Any], is_division: bool) -> None:
        parts = self._parts.get(facts.rank)
        if not parts:
            return
        written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        sizes = {
            address: one.numel()
            for one in written
            if (address := address_of(one)) in parts
        }
        addresses = list(sizes)
        if not addresses:
            return
        number = number_of(args[1])
        if number is not None and is_division:
            number = 1 / number if number else None
        place = here()
        pieces = self._pieces.get(facts.rank)
        is_number = isinstance(args[1], torch.Tensor) and args[1].numel() == 1
        is_own = pieces is not None and is_number and bool(pieces.find(args[1]))
        for address in addresses:
            before = parts[address]
            earlier = 1.0 if before is None else before.number
            product = None if number is None or earlier is None else number * earlier
            was_own = before is not None and before.is_own
            parts[address] = _Factor(product, place, sizes[address], is_own or was_own)


def _finding(
    step: int, numbers: dict[int, float], places: list[Place]
) -> Finding | None:
    shown = ", ".join(
        f"{number:.4g} on rank {rank}" for rank, number in list(numbers.items())[:2]
    )
    return finding(
        "shards-scaled-apart",
        f"In step {step}, ranks multiply their parts of the same gradients at "
        f"{in_words(places)} by numbers that differ: {shown}.",
        _WRITE,
        places,
    )


def _finding_of_own(
    step: int, numbers: dict[int, float | None], place: Place
) -> Finding | None:
    shown = ", ".join(
        f"{number:.4g} on rank {rank}"
        for rank, number in sorted(numbers.items())[:2]
        if number
    )
    return finding(
        "shards-scaled-apart",
        f"In step {step}, ranks multiply their parts of gradients at {place} by a "
        "number that each rank computes from its own parts "
        f"alone{f': {shown}' if shown else ''}. No collective adds these up in "
        "between.",
        _WRITE,
        [place],
    )
