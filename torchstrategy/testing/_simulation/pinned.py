"""Pinned memory, which here is memory of the CPU with a mark."""

from __future__ import annotations

import torch

_MARK = "_torchstrategy_pinned"


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the CPU is in pinned memory."""
    return _MARK in tensor.untyped_storage().__dict__


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Makes the memory of a tensor of the CPU pinned memory, and returns the tensor."""
    tensor.untyped_storage().__dict__[_MARK] = True
    return tensor
