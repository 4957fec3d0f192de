"""Mixed precision: autocast and gradient scalers."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from features.training import STATEFUL, Training, alike, feature


@feature
class AutocastAround(Training):
    """Each replica rounds to bfloat16 what plain PyTorch rounds for all rows at once.

    That is 2**-8 of the gradient.
    """

    dtype = torch.float32
    tolerance = 1e-2

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16)

    def loss(self, batch: Any) -> torch.Tensor:
        output = self.model(batch[0])
        self.noted.add(output.dtype)
        return F.mse_loss(output.float(), batch[1])


@feature
class AutocastInside(AutocastAround):
    def around(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            return super().loss(batch)


@feature
class Scaler(Training):
    """The second batch overflows, in one of its replicas only.

    The update is skipped and the scale halved, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def batches(self) -> list[Any]:
        batches = super().batches()
        batches[1][1][-1] = math.inf
        return batches

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(batch)).backward()

    def update(self, k: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.noted.add((k, self.scaler.get_scale()))


@feature
class ScalerUnscaledAndClipped(Scaler):
    def update(self, k: int) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().update(k)


@feature
class ScalerWithAutocastToFloat16(Scaler):
    """What scalers are for. Each replica rounds as under bfloat16, to 2**-11."""

    dtype = torch.float32
    tolerance = 2e-3

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, torch.float16):
            output = self.model(batch[0])
        self.noted.add(output.dtype)
        return F.mse_loss(output.float(), batch[1])


@feature
class Everything(ScalerUnscaledAndClipped):
    """A scaler and a scheduler count steps: a run has to let them count once.

    It has to find them for that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def update(self, k: int) -> None:
        super().update(k)
        self.scheduler.step()

    def parts(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, STATEFUL)
        }


@alike
class ScalerOfAFusedOptimizer(Scaler):
    """It is told of infinities, and leaves the update out itself."""

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


@alike
class ScalerThatIsDisabled(Scaler):
    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def batches(self) -> list[Any]:
        return Training.batches(self)


@feature
class ScalerWithAutocastAccumulationAndScheduler(Scaler):
    """All of it, as in scripts that grew."""

    dtype = torch.float32
    tolerance = 1e-2

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def batches(self) -> list[Any]:
        return Training.batches(self)

    def backward(self, batch: Any, k: int) -> None:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            loss = F.mse_loss(self.model(batch[0]).float(), batch[1]) / 2
        self.scaler.scale(loss).backward()

    def update(self, k: int) -> None:
        if k % 2:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
