"""Layers that keep, share or make something of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import torchstrategy
from features.training import F64, Training, family, feature
from problems import data


def _deprecated(make: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def _pruned() -> nn.Module:
    layer = nn.Linear(3, 4, **F64)
    prune.l1_unstructured(layer, "weight", amount=3)
    prune.random_unstructured(layer, "bias", amount=1)
    return layer


def linear() -> nn.Linear:
    return nn.Linear(3, 4, **F64)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


class _Counting(nn.Module):
    """State that is written in forward.

    Counters that count each step once, and a mean over all rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running_mean", torch.zeros(3, **F64))
        self.register_buffer("last", None)
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.5)
        return self.layer(x) * self.calls

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class _Remembering(nn.Module):
    """Keeps tensors in plain attributes.

    Where it stood in a sequence of each row, and a loss for the step to read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 2, **F64)
        self.hidden: torch.Tensor | None = None
        self.auxiliary_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = None if self.hidden is None else self.hidden.detach()
        self.hidden = self.cell(x, before)
        self.auxiliary_loss = self.hidden.square().mean()
        return self.hidden


@feature
class TensorsKeptInForward(Training):
    """From step to step each replica has the same rows."""

    def build(self) -> nn.Module:
        return _Remembering()

    def batches(self) -> list[Any]:
        return [data(7, seed=k) for k in range(3)]

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.model.auxiliary_loss


class _Scaled(nn.Module):
    """Scales by an attribute of its weight, as muP does, and counts on its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.randn(3, 2, **F64))
        self.weight.width_mult = 4.0
        shift: Any = torch.zeros(2, **F64)
        shift.calls = 0
        self.register_buffer("shift", shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift: Any = self.shift
        shift.calls += 1
        return x @ self.weight / self.weight.width_mult + shift.calls


@feature
class AttributesOfTensors(Training):
    """A penalty leaves out what is marked."""

    def build(self) -> nn.Module:
        return _Scaled()

    def between(self, k: int) -> None:
        self.model.weight.width_mult /= 2
        self.model.weight.no_decay = k == 1

    def loss(self, batch: Any) -> torch.Tensor:
        decayed = [
            p for p in self.model.parameters() if not getattr(p, "no_decay", False)
        ]
        return super().loss(batch) + 0.1 * sum(p.square().sum() for p in decayed)


class WithLayer(Training):
    """The layer is the first of the model."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        self._layer = layer
        super().__init__()

    def build(self) -> nn.Module:
        return nn.Sequential(self._layer(), nn.Tanh(), nn.Linear(4, 2, **F64))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "orthogonal_by_cayley": lambda: parametrizations.orthogonal(
        nn.Linear(3, 4, **F64), orthogonal_map="cayley"
    ),
    "old_weight_norm": lambda: _deprecated(lambda: nn.utils.weight_norm(linear())),
    "old_spectral_norm": lambda: _deprecated(lambda: nn.utils.spectral_norm(linear())),
    "pruned": _pruned,
    "complex": _Complex,
    "counting": _Counting,
    "layer_norm": lambda: nn.Sequential(linear(), nn.LayerNorm(4, **F64)),
    "group_norm": lambda: nn.Sequential(linear(), nn.GroupNorm(2, 4, **F64)),
    "batch_norm_in_evaluation": lambda: nn.Sequential(
        linear(), nn.BatchNorm1d(4, **F64).eval()
    ),
    "dropout_in_evaluation": lambda: nn.Sequential(linear(), nn.Dropout(0.5).eval()),
}
family("layer", WithLayer, LAYERS)


@feature
class Lazy(Training):
    """It has seen a batch before the first step.

    Torch asks that of those who make an optimizer for one.
    """

    def build(self) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(
                nn.LazyLinear(4, **F64), nn.Tanh(), nn.LazyLinear(2, **F64)
            )
        model(torch.ones(1, 3, **F64))
        return model


@feature
class SyncBatchNorm(Training):
    """Statistics of the whole batch, of all replicas."""

    def build(self) -> nn.Module:
        layers = [
            linear(),
            torchstrategy.nn.SyncBatchNorm(4, **F64),
            nn.Tanh(),
            nn.Linear(4, 2, **F64),
        ]
        return nn.Sequential(*layers)

    def batches(self) -> list[Any]:
        return [data(rows) for rows in (7, 4, 2)]  # of one row there is no variance


@feature
class TiedWeights(Training):
    def build(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(3, 3, **F64),
            nn.Tanh(),
            nn.Linear(3, 3, **F64),
            nn.Linear(3, 2, **F64),
        )
        model[2].weight = model[0].weight
        return model


class SparseEmbedding(Training):
    """Sparse gradients, of rows that differ between replicas."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        self._optimizer = optimizer
        super().__init__()

    def build(self) -> nn.Module:
        return nn.Embedding(5, 2, sparse=True, **F64)

    def optimized(self, model: nn.Module) -> Any:
        return self._optimizer(model.parameters())

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.model((batch[0][:, 0].abs() * 2).long() % 5), batch[1])


family(
    "sparse_embedding",
    SparseEmbedding,
    {
        "adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    },
)


class _Heads(nn.Module):
    """One head for some of the rows, one for the others, and one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.unused = (nn.Linear(3, 2, **F64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, is_high = x.new_zeros(len(x), 2), x[:, 1] > 0.3
        for head, rows in ((self.high, is_high), (self.low, ~is_high)):
            if rows.any():
                output[rows] = head(x[rows])
        return output


@feature
class ParametersWithoutGradient(Training):
    """In some replicas only, and in all.

    The optimizer leaves those alone, and their weights do not decay.
    """

    def build(self) -> nn.Module:
        return _Heads()

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
