"""Gradients that an all-reduce added up for all replicas and left on every device."""

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
"""Adds up the gradients of several replicas, times their weights, and returns the sums on the device of each replica.

It gets the gradients of each of these replicas, their weights, and for each replica of the strategy its parameters,
which tell where it wants the sums.
"""


@final
class AllReducedGradients:
    """The copies of accumulated gradients that all-reduces left on the devices, for as long as they are sure to agree.

    Args:
        all_reduce: Adds the gradients up.
    """

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        # By the id of an accumulated gradient: the gradient, so that no other tensor gets its id; its version, which
        # shows writes; and the copy of each replica.
        self._arrived: dict[int, tuple[torch.Tensor, int, list[torch.Tensor]]] = {}

    def combined(
        self,
        weighing: Sequence[int],
        weights: Sequence[float],
        of_replicas: Sequence[ReplicaGradients],
        owners: Sequence[torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """The weighted sums of the gradients of some replicas, on the devices of the user's parameters."""
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
            # A sum may be a view of the pack in which it was sent, and torch cannot clear a gradient that is a view.
            total[index] = gradient = gradients[0].detach().to(owners[index].device)
            self._arrived[id(gradient)] = gradient, version(gradient), gradients
        return total

    def arrived(self, gradient: torch.Tensor, replica: int) -> torch.Tensor | None:
        """A replica's copy of an accumulated gradient; None if it has none, or somebody has written on the gradient."""
        known = self._arrived.get(id(gradient))
        return known[2][replica] if known is not None and version(gradient) == known[1] else None

    def forget(self) -> None:
        """From here on, accumulated gradients may be written in ways that torch's version counters do not show."""
        self._arrived.clear()
