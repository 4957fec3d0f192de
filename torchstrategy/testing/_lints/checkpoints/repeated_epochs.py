"""Samplers that begin again with epochs trained before the checkpoint was saved."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DistributedSampler
from typing_extensions import override

from torchstrategy.testing._lints.checkpoints.checkpoints import Checkpoint, Checkpoints
from torchstrategy.testing._lints.evidence.asking import attribute, is_set, number_in
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint

_NAMES = (
    "epoch",
    "current_epoch",
    "cur_epoch",
    "start_epoch",
    "next_epoch",
    "last_epoch",
    "epoch_idx",
    "epoch_index",
    "epoch_num",
    "epochs_done",
    "epochs_run",
    "epochs_trained",
    "epochs_completed",
    "completed_epochs",
)


class _Case(NamedTuple):
    checkpoint: Checkpoint
    name: str
    epoch: int
    place: Place


@final
class RepeatedEpochs(Lint):
    """Compares the first epoch of a sampler with that of the checkpoint.

    An optimizer goes on from this checkpoint.

    Who takes the weights alone begins with the first epoch, as one should.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        # From which models have their weights.
        self._restored: dict[int, set[Checkpoint]] = defaultdict(set)
        # The one that a rank goes on from, until it has made a step.
        self._resumed: dict[int, Checkpoint] = {}
        self._epochs: Objects[Any, tuple[int, Place]] = Objects()
        # What was set for the rows that a rank has now.
        self._open: dict[int, tuple[int, Place]] = {}
        self._found: dict[Place, _Case] = {}

    @override
    def restored(
        self, facts: Facts, module: torch.nn.Module, state: dict[str, Any], misfits: Any
    ) -> None:
        checkpoint = self._checkpoints.of_tensors(facts, state.values())
        if checkpoint is not None:
            self._restored[facts.rank].add(checkpoint)

    @override
    def restored_optimizer(
        self, facts: Facts, optimizer: torch.optim.Optimizer, state: Any
    ) -> None:
        checkpoint = self._checkpoints.of_optimizer(facts, state)
        if checkpoint is not None:
            self._resumed[facts.rank] = checkpoint
            self._open.pop(facts.rank, None)

    @override
    def sets_epoch(self, facts: Facts, sampler: Any) -> None:
        if (
            facts.rank in self._resumed
            and isinstance(sampler, DistributedSampler)
            and is_set(sampler, "shuffle")
        ):
            epoch = number_in(sampler, "epoch")
            if epoch is not None:
                self._epochs[sampler] = epoch, here()

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        self._open.pop(facts.rank, None)
        sampler = attribute(loader, "sampler")
        if (
            facts.rank in self._resumed
            and isinstance(sampler, DistributedSampler)
            and sampler in self._epochs
        ):
            self._open[facts.rank] = self._epochs[sampler]

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        opened = self._open.pop(facts.rank, None)
        checkpoint = None if opened is None else self._resumed.pop(facts.rank, None)
        if (
            opened is None
            or checkpoint is None
            or checkpoint not in self._restored[facts.rank]
        ):
            return
        epoch, place = opened
        name = next((name for name in _NAMES if name in checkpoint.numbers), None)
        if name is not None and epoch < checkpoint.numbers[name]:
            self._found.setdefault(place, _Case(checkpoint, name, epoch, place))

    @override
    def findings(self) -> list[Finding | None]:
        return [_finding(case) for case in self._found.values()]


def _finding(case: _Case) -> Finding | None:
    number = case.checkpoint.numbers[case.name]
    first, last = case.epoch, number - 1
    which = (
        f"order of epoch {first} comes"
        if first == last
        else f"orders of epochs {first} to {last} come"
    )
    return finding(
        "epoch-again",
        f"Weights and optimizer go on from a checkpoint with `{case.name}` {number} "
        f"({case.checkpoint.place}), and the first `set_epoch` after it sets {first} "
        f"({case.place}): the {which} a second time.",
        f'Count on from the checkpoint: `for epoch in range(checkpoint["{case.name}"], '
        "epochs)`.",
        [case.place, case.checkpoint.place],
    )
