"""Modules with tensors that carry more than numbers.

Attributes that a program sets on them, and variables.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import torchstrategy

from .modules import changed, count, filled, new_count, new_setting, read_setting

PLACES = ["weight", "shift", "kept", "deep"]


class Marked(nn.Module):
    """Scales by an attribute of a parameter, of a buffer or of a tensor it holds.

    In training, it counts there.

    Args:
        place: Which of its tensors has the attributes.
        setting: How the attribute is kept by which it scales.
        counts: How forward counts; None: it does not.
        width: Of its rows.
    """

    def __init__(
        self, place: str, setting: str, counts: str | None, width: int
    ) -> None:
        super().__init__()
        self.place, self.setting, self.counts = place, setting, counts
        self.weight = filled(nn.Linear(width, width)).weight
        self.register_buffer("shift", torch.full((width,), 0.1))
        self.kept = torch.full((width,), 0.2)
        self.table = {"deep": [torch.full((width,), 0.3)]}
        self.tensor().gain = new_setting(setting)
        self.reset()

    def tensor(self) -> Any:
        """The tensor that has the attributes."""
        return (
            self.table["deep"][0] if self.place == "deep" else getattr(self, self.place)
        )

    def change(self, value: float) -> None:
        """What a user does between steps."""
        tensor = self.tensor()
        tensor.gain = changed(
            self.setting, getattr(tensor, "gain", new_setting(self.setting)), value
        )

    def reset(self) -> None:
        """What a user does after an epoch."""
        if self.counts is not None:
            self.tensor().seen = new_count(self.counts)

    def forget(self) -> None:
        """Takes the attribute away by which it scales."""
        vars(self.tensor()).pop("gain", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensor = self.tensor()
        gain = (
            read_setting(self.setting, tensor.gain) if hasattr(tensor, "gain") else 0.5
        )
        if self.counts is not None and self.training and hasattr(tensor, "seen"):
            count(self.counts, tensor, x.shape[1])
        gain = gain.to(x.device) if isinstance(gain, torch.Tensor) else gain
        shifts = sum(
            shift.to(x.device)
            for shift in (self.shift, self.kept, self.table["deep"][0])
        )
        return nn.functional.linear(x, self.weight) * gain + shifts


class Varied(nn.Module):
    """Scales by a variable that a step assigns."""

    def __init__(self, each_replica: bool, width: int) -> None:
        super().__init__()
        wanted = torchstrategy.VariableSynchronization
        self.held = [
            torchstrategy.Variable(
                torch.ones(width),
                trainable=False,
                synchronization=wanted.ON_READ if each_replica else wanted.AUTO,
                aggregation=torchstrategy.VariableAggregation.MEAN,
            )
        ]

    def grow(self) -> None:
        """What a step does."""
        self.held[0].assign_add(torch.full_like(self.held[0].read_value(), 0.125))

    def copy(self) -> None:
        """Goes on with a copy of the variable."""
        self.held = copy.deepcopy(self.held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.held[0].read_value().to(x.device)
