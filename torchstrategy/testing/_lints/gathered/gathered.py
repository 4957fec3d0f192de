"""Tensors that are gathered from all ranks for a loss, and lose their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import can_be_read
from torchstrategy.testing._lints.evidence.pieces import Pieces
from torchstrategy.testing._lints.evidence.places import Place, here, is_in_a_function
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower
from torchstrategy.testing._ranks.witnesses import Told


class _Own(NamedTuple):
    """What a rank has gathered of itself."""

    place: Place
    shape: str


@final
class Gathered(Follower):
    """Follows what a rank gathers of its own tensors that have gradients.

    It does until a loss is made of it.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, Pieces[_Own]] = {}
        self._found: dict[Place, tuple[str, Place]] = {}

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if (
            is_of_torch
            or told.kind != "all_gather"
            or len(told.gives) != 1
            or not told.gives[0].requires_grad
        ):
            return
        if (
            len(told.ranks) < 2
            or len(told.gets) != len(told.ranks)
            or is_in_a_function()
        ):
            return
        own = told.gets[list(told.ranks).index(told.rank)]
        if can_be_read(own) and own.numel():
            shape = "x".join(map(str, own.shape)) or "1"
            self._pieces.setdefault(facts.rank, Pieces()).add(own, _Own(here(), shape))

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        # What is written over is gone, such as by the rank's own tensor, which has its
        # gradient.
        self._pieces[facts.rank].follow(func, args, kwargs, result)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        pieces = self._pieces.pop(facts.rank, None)
        for loss in losses if pieces is not None else ():
            assert pieces is not None
            own = pieces.find(loss)
            if own is not None:
                self._found.setdefault(own.place, (own.shape, here()))

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._pieces.pop(facts.rank, None)

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "gathered-without-gradient",
                f"The loss at {backward} is made of what was gathered at {place}, a "
                f"tensor of {shape} that has a gradient and loses it there, also in "
                "the part of the rank itself.",
                "`torch.distributed.nn.functional.all_gather(tensor)` has a gradient "
                "for the parts of all ranks. If each rank compares all rows with all "
                "rows, it is enough to put its own back: `parts[rank] = tensor`.",
                [place, backward],
            )
            for place, (shape, backward) in self._found.items()
        ]
