"""Averages of weights that are evaluated with unchanged statistics.

They are those of batch norm, which no batch has changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of
from torchstrategy.testing._lints.evidence.fingerprints import can_be_read, numbers_of
from torchstrategy.testing._lints.evidence.known import Known
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.layers.batch_norm import BATCH_NORMS, SYNCHRONIZED
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import without_modes
from torchstrategy.testing._simulation.program import unwatched

_ENOUGH = 8  # forward passes in training


class _Unchanged(NamedTuple):
    place: Place
    channels: int
    trained: Place


@final
class Averages(Lint):
    """Looks for batch norm in evaluation with trained weights, mean 0 and variance 1.

    Weights of a model that is new are all 1 or all 0; trained ones differ from channel
    to channel.
    """

    def __init__(self) -> None:
        # Where, by rank and number of channels.
        self._trained: dict[int, dict[int, Place]] = defaultdict(dict)
        # By rank and number of channels.
        self._times: Counter[tuple[int, int]] = Counter()
        # Statistics that are not those of a new layer.
        self._changed: dict[int, Known[bool]] = defaultdict(Known)
        self._found: dict[Place, _Unchanged] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        return dict.fromkeys(BATCH_NORMS, self._normalizes) | {
            SYNCHRONIZED: self._synchronizes
        }

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "statistics-not-averaged",
                f"The model that is called at {one.place} is evaluated with trained "
                f"weights, and its batch norm of {one.channels} channels has mean 0 "
                "and variance 1, as a new one has. A batch norm of that size is "
                f"trained in the model that is called at {one.trained}: its statistics "
                "were not copied.",
                "Copy the buffers, too: `for e, b in zip(average.buffers(), "
                "model.buffers()): e.copy_(b)`, or use "
                "`torch.optim.swa_utils.AveragedModel(model)`, which does so.",
                [one.place],
            )
            for one in self._found.values()
        ]

    def _synchronizes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """`SyncBatchNorm` computes statistics of all ranks', and only in training."""
        if args[3] is not None:
            self._notes_training(facts, args[3].numel())

    def _notes_training(self, facts: Facts, channels: int) -> None:
        trained = self._trained[facts.rank]
        if channels not in trained:
            trained[channels] = here()

    def _normalizes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        _, weight, bias, mean, variance, is_training = args[:6]
        if mean is None or variance is None:
            return
        trained = self._trained[facts.rank]
        if is_training:
            if torch.is_grad_enabled():
                self._notes_training(facts, mean.numel())
                self._times[facts.rank, mean.numel()] += 1
            return
        # Functional code makes steps that nobody sees.
        has_trained = facts.steps or self._times[facts.rank, mean.numel()] >= _ENOUGH
        if (
            not has_trained
            or mean.numel() not in trained
            or self._changed[facts.rank].get(mean)
        ):
            return
        if not all(can_be_read(tensor) for tensor in (mean, variance)):
            return
        if not (_are_all(mean, 0) and _are_all(variance, 1)):
            self._changed[facts.rank].put(mean, True)
        elif any(_are_trained(facts, tensor) for tensor in (weight, bias)):
            place = here()
            self._found.setdefault(
                place, _Unchanged(place, mean.numel(), trained[mean.numel()])
            )


def _are_all(tensor: torch.Tensor, number: float) -> bool:
    here = numbers_of(tensor)
    with unwatched(), without_modes():
        return bool((here == number).all())


def _are_trained(facts: Facts, tensor: torch.Tensor | None) -> bool:
    """Whether weights were written since they were made, and not by an optimizer.

    An optimizer trains without a mean.
    """
    if tensor is None or not can_be_read(tensor):
        return False
    if any(
        address_of(parameter) == address_of(tensor) for parameter in facts.parameters()
    ):
        return False
    here = numbers_of(tensor)
    with unwatched(), without_modes():
        return bool((here != here[0]).any())
