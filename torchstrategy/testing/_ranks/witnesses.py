"""Who is told of each collective when a rank comes to it, with its tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

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


class UnderWay(NamedTuple):
    """A collective or message of a program, from its call until it has waited for it.

    Attributes:
        rank: Who has called it.
        part: Its part in it, which `WorkWitness.over` is told, too.
        reads: The tensors whose numbers others get.
        writes: The tensors that will be written.
    """

    rank: int
    part: Any
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]


class WorkWitness(NamedTuple):
    """Who hears when a rank's program calls something, and when it has waited."""

    begins: Callable[[UnderWay], None]
    over: Callable[[int, Any], None]


witnesses: list[Callable[[Told], None]] = []
work_witnesses: list[WorkWitness] = []


def tell(told: Told) -> None:
    """Says to all witnesses that a rank came to a collective, before any write."""
    for witness in witnesses:
        witness(told)
