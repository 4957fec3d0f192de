"""Memory of which lints know a fact, and what is computed from it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, final

import torch

from torchstrategy.testing._lints.evidence.facts import tensors_in
from torchstrategy.testing._lints.evidence.known import is_plain
from torchstrategy.testing._simulation.memory import span

Fact = TypeVar("Fact")
_COPY = torch.ops.aten.copy_.default


class _Piece(NamedTuple):
    """A part of a storage."""

    storage: weakref.ref[Any]
    start: int
    end: int
    fact: Any


@final
class Pieces(Generic[Fact]):
    """The pieces of memory of a rank of which a fact is known."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[_Piece]] = {}  # by the address of a storage

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, tensor: torch.Tensor, fact: Fact) -> None:
        """Notes a fact of the numbers of a tensor."""
        storage: Any = tensor.untyped_storage()
        start, end = span(tensor)
        there = [
            piece
            for piece in self._pieces.get(storage.data_ptr(), ())
            if piece.storage() is not None
        ]
        self._pieces[storage.data_ptr()] = [
            *there,
            _Piece(weakref.ref(storage), start, end, fact),
        ]

    def find(self, tensor: Any) -> Fact | None:
        """What is known of the numbers of a tensor, or of some of them."""
        if not self._pieces or not is_plain(tensor) or not tensor.numel():
            return None
        start, end = span(tensor)
        for piece in self._pieces.get(tensor.untyped_storage().data_ptr(), ()):
            if piece.storage() is not None and piece.start < end and start < piece.end:
                fact: Fact = piece.fact
                return fact
        return None

    def follow(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """An operator has run: what it has made of a piece is a piece.

        What it has written over is none.
        """
        if func is _COPY and self.find(args[1]) is None:
            self.drop(args[0])
            return
        fact = None
        for tensor in tensors_in((*args, *kwargs.values())):
            fact = self.find(tensor) if fact is None else fact
        if fact is None:
            return
        sources = {
            tensor.untyped_storage().data_ptr()
            for tensor in tensors_in(args)
            if is_plain(tensor)
        }
        for made in tensors_in((result,)):
            if is_plain(made) and (
                made.untyped_storage().data_ptr() not in sources or func is _COPY
            ):
                self.add(made, fact)

    def drop(self, tensor: torch.Tensor) -> None:
        """Forgets what is known of a tensor's numbers, and of nothing beside them."""
        address = tensor.untyped_storage().data_ptr() if is_plain(tensor) else 0
        if address in self._pieces and tensor.numel():
            start, end = span(tensor)
            left = [
                piece
                for piece in self._pieces[address]
                if not (start <= piece.start and piece.end <= end)
            ]
            self._pieces[address] = left
