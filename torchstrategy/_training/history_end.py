"""A tensor whose history ends: a backward that comes to it raises, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch


@final
class _HistoryEnd(torch.autograd.Function):
    """Copies a tensor. A backward through the copy raises an error, so that no gradient is lost without a word."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, why: str) -> torch.Tensor:
        ctx.why = why
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(ctx.why)


_apply: Callable[[torch.Tensor, str], torch.Tensor] = _HistoryEnd.apply


def end_history(tensor: torch.Tensor, why: str) -> torch.Tensor:
    """A copy of a tensor without history that requires grad, so that a loss of it runs a backward, which raises `why`.

    It does so in no_grad mode, too, in which `clip_grad_norm_` reads gradients.
    """
    with torch.enable_grad():
        return _apply(tensor.requires_grad_(), why)
