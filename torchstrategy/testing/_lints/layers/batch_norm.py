"""Batch norm whose statistics are of the rows of one rank, and those are few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, Model
from torchstrategy.testing._lints.evidence.modules import modules_in
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.torch_internals import BatchNorm

# Values of a channel: with fewer, training with batch norm is known to get worse.
_FEW = 16
# Which argument of the operators says that statistics are those of the batch.
_TRAINING = 5
_aten = torch.ops.aten
# Those with the arguments input, weight, bias, mean, variance, training.
BATCH_NORMS = (
    _aten.native_batch_norm.default,
    _aten.cudnn_batch_norm.default,
    _aten._native_batch_norm_legit.default,
)
# With the arguments input, means, inverses of deviations, mean, variance: those of
# `SyncBatchNorm` in training.
SYNCHRONIZED = _aten.batch_norm_gather_stats_with_counts.default


class _Seen(NamedTuple):
    layers: dict[str, int]  # their names and ids
    ranks: int
    place: Place


@final
class FewStatistics(Lint):
    """Looks for batch norm in models that `DistributedDataParallel` trains."""

    def __init__(self, is_named: Callable[[int], bool]) -> None:
        """`is_named` says whether another lint names a layer, by its id."""
        self._is_named = is_named
        self._called: dict[tuple[int, Any], _Seen] = {}
        # The most values of a channel that a model was called with.
        self._most: dict[Any, int] = {}
        # By rank: a model, and the fewest values of its layers.
        self._running: dict[int, tuple[Any, int | None]] = {}
        self._found: dict[Any, _Seen] = {}

    @override
    def operators(self) -> dict[Any, Seen]:
        return dict.fromkeys(BATCH_NORMS, self._normalizes)

    @override
    def calls(self, facts: Facts, model: Model, args: Sequence[Any]) -> None:
        wrapped = model.model()
        if wrapped is None or len(model.ranks) < 2:
            return
        self._ends(facts)
        self._running[facts.rank] = model.key, None
        if (facts.rank, model.key) not in self._called:
            layers = {
                name: id(module)
                for name, module in modules_in(wrapped.module)
                if _is_of_one_rank(module)
            }
            self._called[facts.rank, model.key] = _Seen(
                layers, len(model.ranks), here()
            )

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._ends(facts)
        for key in facts.called:
            seen = self._called.get((facts.rank, key))
            if seen is not None and seen.layers:
                self._found.setdefault(key, seen)

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "statistics-of-one-rank",
                f"{some(layers)} of the model that is called at {seen.place} normalize "
                f"with only {values} values of each channel, those of one rank, of the "
                f"{values * seen.ranks} of all ranks, and their running statistics are "
                "those of rank 0.",
                "`model = nn.SyncBatchNorm.convert_sync_batchnorm(model)` before it is "
                "wrapped, a norm without a batch, or more rows for each rank: more "
                f"than {_FEW} values of a channel.",
                [seen.place],
            )
            for key, seen in self._found.items()
            if 0 < (values := self._most.get(key, 0)) <= _FEW
            and (
                layers := [
                    name for name, own in seen.layers.items() if not self._is_named(own)
                ]
            )
        ]

    def _normalizes(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """A layer has run: how many values of each channel its statistics are of.

        It has several places then.
        """
        if facts.rank not in self._running or not args[_TRAINING] or args[0].dim() < 2:
            return
        key, fewest = self._running[facts.rank]
        values = args[0].numel() // max(1, args[0].shape[1])
        self._running[facts.rank] = (
            key,
            values if fewest is None else min(values, fewest),
        )

    def _ends(self, facts: Facts) -> None:
        """The last call of a model is over."""
        key, fewest = self._running.pop(facts.rank, (None, None))
        if fewest is not None:
            self._most[key] = max(fewest, self._most.get(key, 0))


def _is_of_one_rank(module: nn.Module) -> bool:
    is_batch_norm = isinstance(module, BatchNorm)
    return (
        is_batch_norm and not isinstance(module, nn.SyncBatchNorm) and module.training
    )
