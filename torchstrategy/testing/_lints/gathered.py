"""Tensors that are gathered from all ranks for a loss, and lose their gradients."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.facts import Facts, tensors_in
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.fingerprints import can_be_read
from torchstrategy.testing._lints.known import is_plain
from torchstrategy.testing._lints.lint import Follower
from torchstrategy.testing._lints.places import Place, here, is_in_a_function
from torchstrategy.testing._ranks.witnesses import Told
from torchstrategy.testing._simulation.memory import span

_COPY = torch.ops.aten.copy_.default


class _Piece(NamedTuple):
    """Memory that holds what a rank has gathered of itself, or what was computed from it."""

    storage: weakref.ref[Any]
    start: int
    end: int
    place: Place
    shape: str


@final
class Gathered(Follower):
    """Follows what a rank gathers of its own tensors that have gradients, until a loss is made of it."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, list[_Piece]]] = defaultdict(dict)  # by rank and address of a storage
        self._found: dict[Place, tuple[str, Place]] = {}

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if is_of_torch or told.kind != "all_gather" or len(told.gives) != 1 or not told.gives[0].requires_grad:
            return
        if len(told.ranks) < 2 or len(told.gets) != len(told.ranks) or is_in_a_function():
            return
        own = told.gets[list(told.ranks).index(told.rank)]
        if can_be_read(own) and own.numel():
            self._add(facts.rank, own, here(), "x".join(map(str, own.shape)) or "1")

    @override
    def operator(self, facts: Facts, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if func is _COPY and self._found_in(facts.rank, args[1]) is None:
            self._overwrite(facts.rank, args[0])
            return
        piece = None
        for tensor in tensors_in((*args, *kwargs.values())):
            piece = piece or self._found_in(facts.rank, tensor)
        if piece is None:
            return
        sources = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(args) if is_plain(tensor)}
        for made in tensors_in((result,)):
            if is_plain(made) and (made.untyped_storage().data_ptr() not in sources or func is _COPY):
                self._add(facts.rank, made, piece.place, piece.shape)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        for loss in losses:
            piece = self._found_in(facts.rank, loss)
            if piece is not None:
                self._found.setdefault(piece.place, (piece.shape, here()))
        self._pieces.pop(facts.rank, None)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._pieces.pop(facts.rank, None)

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "gathered-without-gradient",
                f"The loss at {backward} is made of what was gathered at {place}, a tensor of {shape} that has a "
                "gradient and loses it there, also in the part of the rank itself.",
                "`parts[rank] = tensor` puts the rank's own tensor back into the list; "
                "`torch.distributed.nn.functional.all_gather(tensor)` has a gradient for the parts of all ranks.",
                [place, backward],
            )
            for place, (shape, backward) in self._found.items()
        ]

    def _add(self, rank: int, tensor: torch.Tensor, place: Place, shape: str) -> None:
        storage = tensor.untyped_storage()
        start, end = span(tensor)
        piece = _Piece(weakref.ref(storage), start, end, place, shape)
        self._pieces[rank].setdefault(storage.data_ptr(), []).append(piece)

    def _found_in(self, rank: int, tensor: Any) -> _Piece | None:
        """The piece in the memory of a tensor."""
        pieces = self._pieces.get(rank)
        if not pieces or not is_plain(tensor) or not tensor.numel():
            return None
        start, end = span(tensor)
        for piece in pieces.get(tensor.untyped_storage().data_ptr(), ()):
            if piece.storage() is not None and piece.start < end and start < piece.end:
                return piece
        return None

    def _overwrite(self, rank: int, tensor: torch.Tensor) -> None:
        """What is written over is gone, such as by the rank's own tensor, which has its gradient."""
        address = tensor.untyped_storage().data_ptr() if is_plain(tensor) else 0
        if address in self._pieces[rank] and tensor.numel():
            start, end = span(tensor)
            left = [piece for piece in self._pieces[rank][address] if not (start <= piece.start and piece.end <= end)]
            self._pieces[rank][address] = left
