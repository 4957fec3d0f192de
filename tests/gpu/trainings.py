"""The same small trainings in plain PyTorch and under each strategy.

All replicas are on one device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from torchstrategy.testing import simulated_devices

ROWS, WIDTH, STEPS = 60, 32, 4
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def device() -> torch.device | None:
    """The device to test: that of the variable ON, or the first GPU.

    Without one, it is the first simulated one.
    """
    if "ON" in os.environ:
        return torch.device(os.environ["ON"])
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return next(iter(simulated_devices()), None)


def two_devices() -> list[torch.device]:
    """Two devices of the kind of `ON`, but not the same; none if there are too few."""
    if ON is None or ON.type == "cpu" or torch.accelerator.device_count() < 2:
        return []
    return [torch.device(ON.type, index) for index in range(2)]


ON: Any = device()
TWO = two_devices()
HAS_CUDA = ON is not None and ON.type == "cuda"
CPU = torch.device("cpu")

STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "one device": lambda: torchstrategy.OneDeviceStrategy(ON),
    "central, two replicas": lambda: torchstrategy.CentralStorageStrategy([ON, ON], ON),
    "central, parameters on the CPU": lambda: torchstrategy.CentralStorageStrategy(
        [ON], CPU
    ),
    "mirrored, two replicas": lambda: torchstrategy.MirroredStrategy([ON, ON]),
}

ON_SEVERAL_DEVICES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "central, several devices": lambda: torchstrategy.CentralStorageStrategy(
        TWO, TWO[0]
    ),
    "central, several devices, parameters on the CPU": lambda: (
        torchstrategy.CentralStorageStrategy(TWO, CPU)
    ),
    "mirrored, several devices": lambda: torchstrategy.MirroredStrategy(TWO),
}


def mlp() -> nn.Module:
    parts = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 1))


def normalised() -> nn.Module:
    parts = [
        part
        for _ in range(4)
        for part in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    ]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 1))


class Recurrent(nn.Module):
    """Two layers of an LSTM, which cuDNN runs in one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(WIDTH, 16, 2), nn.Linear(16, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(rows.unsqueeze(0))[0][0])


class Flattening(Recurrent):
    """Its forward calls `flatten_parameters`, as with `nn.DataParallel` programs."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.recurrent.flatten_parameters()
        return super().forward(rows)


def normalised_in_sync() -> nn.Module:
    return torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(normalised())


def compiled() -> nn.Module:
    model = mlp()
    model.compile(backend="inductor" if HAS_CUDA else "aot_eager")
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)


def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@dataclass
class Training:
    """How a model is trained."""

    make: Callable[[], nn.Module] = mlp
    optimizer: Optimizers = sgd
    clips: bool = False
    keeps_gradients: bool = False  # `zero_grad(set_to_none=False)`, twice in a step
    autocast: torch.dtype | None = None
    scales: bool = False
    on_side_stream: bool = False
    # The batches are in pinned memory, and so are parameters on the CPU.
    pins: bool = False
    options: torchstrategy.InputOptions | None = None
    runs: int = STEPS
    around_last_step: Callable[[], contextlib.AbstractContextManager[Any]] = field(
        default=contextlib.nullcontext
    )

    def trained(self, strategy: torchstrategy.Strategy | None) -> torch.Tensor:
        """All parameters after some steps, on the CPU.

        Without a strategy: those of plain PyTorch on the device.
        """
        torch.manual_seed(0)
        model = self.make()
        if strategy is None:
            model.to(ON)
            optimizer = self.optimizer(model)
        else:
            model.to(strategy.extended.parameter_devices[0])
            self._pin(model)
            strategy.distribute_module(model)
            optimizer = strategy.distribute_optimizer(self.optimizer(model))
        scaler = torch.amp.GradScaler(
            ON.type, enabled=self.scales, init_scale=2.0**18, growth_interval=2
        )

        def step(batch: Any) -> None:
            with self._stream():
                self._step(model, optimizer, scaler, *batch)

        for number, batch in enumerate(self._batches(strategy)):
            with (
                self.around_last_step()
                if number == self.runs - 1
                else contextlib.nullcontext()
            ):
                if strategy is None:
                    step(batch)
                else:
                    strategy.run(step, args=(batch,))
        return flat(model)

    def _pin(self, model: nn.Module) -> None:
        if self.pins and ON.type != "cpu":
            for parameter in model.parameters():
                parameter.data = (
                    parameter.data.pin_memory() if parameter.is_cpu else parameter.data
                )

    def _batches(self, strategy: torchstrategy.Strategy | None) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(7)
        x, y = (torch.randn(ROWS, width, generator=generator) for width in (WIDTH, 1))
        if self.pins and ON.type != "cpu":
            x, y = x.pin_memory(), y.pin_memory()
        if strategy is not None:
            return iter(
                strategy.experimental_distribute_dataset(
                    [(x, y)] * self.runs, self.options
                )
            )
        return iter([(x.to(ON), y.to(ON))] * self.runs)

    def _step(
        self, model: Any, optimizer: Any, scaler: Any, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        scaler.scale(self._loss(model, x, y)).backward()
        if self.keeps_gradients:
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(2 * self._loss(model, x, y)).backward()
        if self.clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    def _loss(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with (
            torch.autocast(ON.type, dtype=self.autocast)
            if self.autocast
            else contextlib.nullcontext()
        ):
            return F.mse_loss(model(x), y)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """A stream of the step's own.

        It comes after what the caller's has been given, and before what follows.
        """
        if not self.on_side_stream or ON.type == "cpu":
            yield
            return
        callers = torch.accelerator.current_stream(ON)
        own = torch.Stream(device=ON)
        own.wait_stream(callers)
        with own:
            yield
        callers.wait_stream(own)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().cpu().flatten() for parameter in model.parameters()]
    )


IN_ONE_PRECISION = {
    "usual": Training(),
    "loads ahead": Training(options=torchstrategy.InputOptions(load_ahead=True)),
    "on a side stream": Training(on_side_stream=True),
    "clipped": Training(clips=True),
    "keeps gradients": Training(keeps_gradients=True),
    "fused": Training(optimizer=fused_adam),
    "recurrent": Training(make=Recurrent),
    "recurrent, flattening": Training(make=Flattening),
    "pinned": Training(pins=True, options=torchstrategy.InputOptions(load_ahead=True)),
}
