"""Rows of a rank that a loss compares with rows gathered from all ranks.

No gradient goes back to these.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of, tensors_in
from torchstrategy.testing._lints.evidence.fingerprints import can_be_read
from torchstrategy.testing._lints.evidence.nodes import leaf_of, name_of, node_behind
from torchstrategy.testing._lints.evidence.pieces import Pieces
from torchstrategy.testing._lints.evidence.places import (
    Place,
    exchanging_function_here,
    here,
)
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower
from torchstrategy.testing._ranks.witnesses import Told

_ENOUGH = 2  # backward passes
_aten = torch.ops.aten
# Which put rows beside others.
_PUTTING = (_aten.cat.default, _aten.stack.default, _aten.copy_.default)
_TURNING = ("TBackward", "TransposeBackward")
# Each with the positions of the two factors.
_PRODUCTS = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
}


class _Gathered(NamedTuple):
    """Rows of all ranks: where they were gathered, among how many, and how.

    It also has by which function, and the shape of the rows of one rank.

    The function has a backward of its own; None if the program has gathered without
    one.
    """

    place: Place
    ranks: int
    function: Any
    shape: tuple[int, ...]


class _Compared(NamedTuple):
    gathered_at: Place
    compared_at: Place


@final
class OneSided(Follower):
    """Looks for products of n rows of a rank with each rank's n, both with gradients.

    Each rank has a loss of its own rows then, and a row has a gradient from the losses
    of all ranks. A function with a backward of its own that gathers has to send it
    back. Where each rank compares all rows with all rows, nothing has to be sent. Who
    gathers without such a function leaves these gradients out on purpose, unless the
    rank puts its own rows, which have a gradient, among those that it has gathered.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, Pieces[_Gathered]] = {}
        # By rank, each with its function.
        self._compared: dict[int, dict[_Compared, Any]] = defaultdict(dict)
        # By rank: where it has gathered the others.
        self._has_own: dict[int, set[Place]] = defaultdict(set)
        self._is_back: set[int] = set()
        # The functions that exchange something in their backward.
        self._sends_back: set[Any] = set()
        self._times: Counter[tuple[_Compared, Any]] = Counter()

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        function = exchanging_function_here()
        if facts.rank in self._is_back:
            if function is not None:
                self._sends_back.add(function)
            return
        if (
            is_of_torch
            or told.kind != "all_gather"
            or len(told.gives) != 1
            or len(told.ranks) < 2
        ):
            return
        if len(told.gets) != len(told.ranks) or not (
            function is None or told.gives[0].requires_grad
        ):
            return
        for rows in told.gets:
            if can_be_read(rows) and rows.numel():
                gathered = _Gathered(
                    here(), len(told.ranks), function, tuple(told.gives[0].shape)
                )
                self._pieces.setdefault(facts.rank, Pieces()).add(rows, gathered)

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        pieces = self._pieces[facts.rank]
        if func in _PUTTING:
            self._puts_own(facts, args)
        positions = _PRODUCTS.get(func)
        if positions is not None and facts.rank not in self._is_back:
            factors = [args[at] for at in positions]
            found = [pieces.find(factor) for factor in factors]
            gathered = found[0] or found[1]
            if (
                gathered is not None
                and None in found
                and all(one.requires_grad for one in factors)
            ):
                rows, columns = sorted(result.shape[-2:])
                other = factors[0] if found[0] is None else factors[1]
                # The rows of all ranks may be of several views, beside each other, and
                # so may those of the rank.
                is_of_all = columns % (rows * gathered.ranks) == 0 and rows > 1
                is_one_sided = (
                    is_of_all
                    and _is_of_rows(other, gathered.shape)
                    and not _is_weight(facts, other)
                )
                if is_one_sided and (
                    gathered.function or gathered.place in self._has_own[facts.rank]
                ):
                    self._compared[facts.rank][_Compared(gathered.place, here())] = (
                        gathered.function
                    )
        pieces.follow(func, args, kwargs, result)

    def _puts_own(self, facts: Facts, args: Sequence[Any]) -> None:
        """Notes that a rank puts rows with a gradient among those that it gathered."""
        pieces, together = self._pieces[facts.rank], list(tensors_in(args))
        gathered = next(
            (found for one in together if (found := pieces.find(one)) is not None), None
        )
        others = [
            one for one in together if one.requires_grad and pieces.find(one) is None
        ]
        if gathered is not None and any(
            tuple(one.shape) == gathered.shape for one in others
        ):
            self._has_own[facts.rank].add(gathered.place)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._is_back.add(facts.rank)
        self._pieces.pop(facts.rank, None)
        self._has_own.pop(facts.rank, None)

    @override
    def went_back(self, facts: Facts) -> None:
        self._is_back.discard(facts.rank)
        self._times.update(self._compared.pop(facts.rank, {}).items())

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._pieces.pop(facts.rank, None)
        self._has_own.pop(facts.rank, None)
        self._compared.pop(facts.rank, None)

    @override
    def findings(self) -> list[Finding | None]:
        found: dict[Place, Finding | None] = {}
        for (compared, function), times in self._times.items():
            if times >= _ENOUGH and (
                function is None or function not in self._sends_back
            ):
                found.setdefault(compared.gathered_at, _finding(compared))
        return list(found.values())


def _is_of_rows(factor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a factor has the rows that a rank has given of this shape.

    It may have such rows of several views.
    """
    if sorted(factor.shape[-2:]) == sorted(shape[-2:]):
        return True
    node = node_behind(factor.grad_fn, _TURNING)
    if len(shape) < 2 or not name_of(node).startswith("CatBackward"):
        return False
    views, (rows, width) = len(node.next_functions), shape[-2:]
    return sorted(factor.shape[-2:]) == sorted((views * rows, width))


def _is_weight(facts: Facts, factor: torch.Tensor) -> bool:
    """Whether a factor is a parameter, or one in another dtype.

    It may have as many rows as a rank has.
    """
    of_leaf = (
        leaf_of(node_behind(factor.grad_fn, (*_TURNING, "ToCopyBackward"))) is not None
    )
    return of_leaf or any(
        address_of(one) == address_of(factor) for one in facts.parameters()
    )


def _finding(compared: _Compared) -> Finding | None:
    return finding(
        "gradient-not-sent-back",
        "The loss compares the rows of each rank with the rows of all ranks (the "
        f"product at {compared.compared_at}), which are gathered at "
        f"{compared.gathered_at}, and backward sends nothing to the ranks that they "
        "are from. The gradient of a row lacks what the losses of other ranks add.",
        "Gather with `torch.distributed.nn.functional.all_gather(rows)`, whose "
        "backward sends the gradients back; or compare all gathered rows with all of "
        "them, on each rank.",
        [compared.gathered_at, compared.compared_at],
    )
