"""Every type alias of the package, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Device: TypeAlias = torch.device
"""A canonical device: its index is always there (`cpu:0`, never `cpu`)."""

DeviceLike: TypeAlias = "str | int | torch.device | None"
"""What a person may write for a device; see `torchstrategy._core.devices.canonical_device`."""

Tree: TypeAlias = Any
"""A value, or lists, tuples, named tuples and dicts of values to any depth. The only home of `Any` in signatures."""

ReplicaFn: TypeAlias = Callable[..., Tree]
"""The step: what `Strategy.run` calls once for each replica."""
