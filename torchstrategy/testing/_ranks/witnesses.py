"""Who is told of each collective when a rank comes to it, with its tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch


class Told(NamedTuple):
    """A collective of several ranks, as one of them calls it.

    Attributes:
        rank: Who calls it.
        ranks: Who takes part, in order.
        key: The same in all ranks that call it.
        kind: Which collective, as `Collective.kind`.
        detail: The reduction or the root.
        gives: The tensors whose numbers others get.
        gets: The tensors that will be written.
    """

    rank: int
    ranks: Sequence[int]
    key: Hashable
    kind: str
    detail: str
    gives: Sequence[torch.Tensor]
    gets: Sequence[torch.Tensor]


witnesses: list[Callable[[Told], None]] = []


def tell(told: Told) -> None:
    """Says to all witnesses that a rank has come to a collective, before anything is written."""
    for witness in witnesses:
        witness(told)
