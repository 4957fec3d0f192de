"""Batch norm whose statistics are of the rows of one rank, and those are few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.facts import Facts, Model
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.places import Place, here
from torchstrategy.testing._lints.torch_internals import BatchNorm

_FEW = 16  # rows; with fewer, training with batch norm is known to get worse


class _Seen(NamedTuple):
    layers: list[str]
    rows: int
    ranks: int
    place: Place


@final
class FewStatistics(Lint):
    """Looks for layers of batch norm in models that are trained by `DistributedDataParallel`."""

    def __init__(self) -> None:
        self._called: dict[tuple[int, Any], _Seen] = {}
        self._most: dict[Any, int] = {}  # the most rows that a model was called with
        self._found: dict[Any, _Seen] = {}

    @override
    def calls(self, facts: Facts, model: Model, args: Sequence[Any]) -> None:
        rows = next((arg.shape[0] for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 1), None)
        wrapped = model.model()
        if rows is None or wrapped is None or len(model.ranks) < 2:
            return
        self._most[model.key] = max(rows, self._most.get(model.key, 0))
        if (facts.rank, model.key) not in self._called:
            layers = [name for name, module in wrapped.module.named_modules() if _is_of_one_rank(module)]
            self._called[facts.rank, model.key] = _Seen(layers, rows, len(model.ranks), here())

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        for key in facts.called:
            seen = self._called.get((facts.rank, key))
            if seen is not None and seen.layers:
                self._found.setdefault(key, seen)

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "statistics-of-one-rank",
                f"{some(seen.layers)} of the model that is called at {seen.place} normalize with the {rows} rows of "
                f"one rank, of the {rows * seen.ranks} of all ranks, and their running statistics are those of rank 0.",
                "`model = nn.SyncBatchNorm.convert_sync_batchnorm(model)` before it is wrapped, a norm without a "
                f"batch, or more than {_FEW} rows for each rank.",
                [seen.place],
            )
            for key, seen in self._found.items()
            if (rows := self._most[key]) <= _FEW
        ]


def _is_of_one_rank(module: nn.Module) -> bool:
    is_batch_norm = isinstance(module, BatchNorm)
    return is_batch_norm and not isinstance(module, nn.SyncBatchNorm) and module.training
