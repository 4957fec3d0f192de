"""The type aliases of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Device: TypeAlias = torch.device
"""A canonical device, which always has an index: `cpu:0`, never `cpu`."""

DeviceLike: TypeAlias = "str | int | torch.device | None"
"""What a user may write for a device; see `torchstrategy._core.devices.canonical_device`."""

Tree: TypeAlias = Any
"""A value, or lists, tuples, named tuples and dicts of values to any depth."""

ReplicaFn: TypeAlias = Callable[..., Tree]
"""The step function, which `Strategy.run` calls once in each replica."""
