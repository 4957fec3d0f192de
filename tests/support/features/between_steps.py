"""What is done to a model and its optimizer between steps."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from features.layers import linear
from features.training import F64, Training, alike, feature
from problems import sgd


@feature
class FrozenAndThawed(Training):
    def between(self, k: int) -> None:
        self.model[0].requires_grad_(k != 1)


@feature
class FrozenInTheStep(Training):
    """As GANs do with the other network while one learns."""

    def backward(self, batch: Any, k: int) -> None:
        self.model[0].requires_grad_(False)
        super().backward(batch, k)
        self.model[0].requires_grad_(True)


@feature
class LayerSwapped(Training):
    def between(self, k: int) -> None:
        if k == 1:
            torch.manual_seed(5)
            self.model[2] = nn.Linear(4, 2, **F64).to(self.device)
            gc.collect()  # of the old one only the optimizer knows
            self.optimizer.add_param_group(
                {"params": list(self.model[2].parameters()), "lr": 0.2}
            )


@alike
class LayerAdded(Training):
    def between(self, k: int) -> None:
        if k == 1:
            torch.manual_seed(5)
            self.model.append(nn.Linear(2, 2, **F64).to(self.device))
            with self.scope():
                self.optimizer = sgd(self.model)


@alike
class ParametrizedAndNotAnyMore(Training):
    def between(self, k: int) -> None:
        if k == 1:
            parametrizations.weight_norm(self.model[0])
        if k == 2:
            parametrize.remove_parametrizations(self.model[0], "weight")
        with self.scope():
            self.optimizer = sgd(self.model)


@feature
class StatesLoaded(Training):
    """The model and the optimizer go back to where they were a step before."""

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.05)

    def between(self, k: int) -> None:
        if k == 1:
            self._saved = copy.deepcopy(
                (self.model.state_dict(), self.optimizer.state_dict())
            )
        if k == 2:
            self.model.load_state_dict(self._saved[0])
            self.optimizer.load_state_dict(self._saved[1])


@alike
class StatesLoadedByAssignment(StatesLoaded):
    """`assign=True` puts other parameters in place of those of the optimizer."""

    def between(self, k: int) -> None:
        if k == 1:
            self.model.load_state_dict(
                copy.deepcopy(self.model.state_dict()), assign=True
            )
            with self.scope():
                self.optimizer = sgd(self.model)


@feature
class DtypeChanged(Training):
    """To float32 and back: each weight loses 1e-7 on the way, in both trainings."""

    tolerance = 1e-5

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def between(self, k: int) -> None:
        self.model.to(torch.float32 if k == 1 else torch.float64)
        self.optimizer.zero_grad()

    def loss(self, batch: Any) -> torch.Tensor:
        dtype = self.model[0].weight.dtype
        return F.mse_loss(self.model(batch[0].to(dtype)), batch[1].to(dtype))


@alike
class ModesChanged(Training):
    """Evaluation and training in turn, and a rate of dropout that comes to be zero."""

    def build(self) -> nn.Module:
        return nn.Sequential(linear(), nn.Dropout(0.5), nn.Linear(4, 2, **F64))

    def between(self, k: int) -> None:
        self.model.train(k > 0)
        self.model[1].p = 0.5 if k == 0 else 0.0


@alike
class WeightsWrittenByHand(Training):
    def between(self, k: int) -> None:
        with torch.no_grad():
            self.model[0].weight.clamp_(-0.2, 0.2)
            nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(self.model[2].parameters()) * 0.9,
                [*self.model[2].parameters()],
            )


@feature
class GroupAdded(Training):
    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def between(self, k: int) -> None:
        if k == 1:
            self.optimizer.add_param_group(
                {"params": self.model[0].parameters(), "lr": 0.01}
            )


@feature
class RateWritten(Training):
    """By hand, between the steps and in them, on groups of their own rates."""

    def optimized(self, model: nn.Module) -> Any:
        groups = [
            {"params": model[0].parameters(), "lr": 0.3},
            {"params": model[2].parameters(), "weight_decay": 0.1},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def between(self, k: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.3 / (k + 1)

    def update(self, k: int) -> None:
        self.optimizer.param_groups[1]["lr"] *= 0.5
        super().update(k)
