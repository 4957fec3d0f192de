"""Gradients that are added up for all replicas at once, each of which has the sums on its own device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from torchstrategy._core.torch_internals import version
from torchstrategy._training.replica_gradients import ReplicaGradients

AllReduce = Callable[
    [Sequence[Sequence[torch.Tensor | None]], Sequence[float], Sequence[Sequence[torch.Tensor]]],
    Sequence[Sequence[torch.Tensor | None]],
]
"""Adds up what several replicas have, times their weights, and returns a sum where each replica wants it."""


@final
class AllReducedGradients:
    """What replicas have got of the gradients of the whole batch, until somebody may write on these.

    Args:
        all_reduce: What adds them up.
    """

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._arrived: dict[int, tuple[torch.Tensor, int, list[torch.Tensor]]] = {}  # by the id of the owner's gradient

    def combined(
        self,
        weighing: Sequence[int],
        weights: Sequence[float],
        of_replicas: Sequence[ReplicaGradients],
        owners: Sequence[torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """The gradients of some replicas, weighed and added up, by parameter, where the owners are."""
        local = [of_replicas[r].take_local()[0] for r in weighing]
        indices = sorted(set().union(*local))
        sums = self._all_reduce(
            [[gradients.get(index) for index in indices] for gradients in local],
            weights,
            [[of_replica.parameters[index] for index in indices] for of_replica in of_replicas],
        )
        self.forget()
        total: dict[int, torch.Tensor] = {}
        for index, column in zip(indices, zip(*sums, strict=True), strict=True):
            gradients = [gradient for gradient in column if gradient is not None]
            # A sum may be a view of the pack that it came in, and torch clears no views.
            total[index] = gradient = gradients[0].detach().to(owners[index].device)
            self._arrived[id(gradient)] = gradient, version(gradient), gradients
        return total

    def arrived(self, gradient: torch.Tensor, replica: int) -> torch.Tensor | None:
        """What a replica has got of an owner's gradient already, if nobody has written on it since."""
        known = self._arrived.get(id(gradient))
        return known[2][replica] if known is not None and version(gradient) == known[1] else None

    def forget(self) -> None:
        """The owners' gradients may be written from here on, also in ways that torch does not count."""
        self._arrived.clear()
