"""Recurrent layers as cuDNN has them on CUDA.

Their weights lie in one piece of memory, as `flatten_parameters` lays them. In eval
mode they have no backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchstrategy._base.recurrent_layers import may_be_moved
from torchstrategy._base.torch_internals import flat_weights
from torchstrategy.testing._simulation.backend import Backend, keys, operator
from torchstrategy.testing._simulation.ordinals import is_simulated


def install() -> None:
    """Replaces the method, which does nothing for other devices than CUDA."""
    layers: Any = nn.RNNBase
    layers.flatten_parameters = _also_simulated(layers.flatten_parameters)


def _also_simulated(
    flatten: Callable[[nn.RNNBase], None],
) -> Callable[[nn.RNNBase], None]:
    @functools.wraps(flatten)
    def flatten_parameters(self: nn.RNNBase) -> None:
        weights = flat_weights(self)
        if _can_be_laid(weights):
            if may_be_moved(self):
                _lay_in_one_piece(weights)
        else:
            flatten(self)

    return flatten_parameters


def _can_be_laid(weights: Sequence[Any]) -> bool:
    """Whether torch would lay such weights in one piece if they were on CUDA."""
    if not weights or not all(
        isinstance(weight, torch.Tensor) and is_simulated(weight) for weight in weights
    ):
        return False
    are_alike = len({(weight.device, weight.dtype) for weight in weights}) == 1
    return are_alike and len({weight.data_ptr() for weight in weights}) == len(weights)


def _lay_in_one_piece(weights: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        piece = torch.cat([weight.detach().reshape(-1) for weight in weights])
        parts = piece.split([weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.set_(part.view(weight.shape))


def register(backend: Backend) -> None:
    """Registers the layers, whose composite kernels stay what they are."""
    for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        for overload, train in (("input", 6), ("data", 7)):
            op = operator(f"{layer}.{overload}")
            backend.kernel(f"{layer}.{overload}", "AutogradPrivateUse1")(
                _as_of_cudnn(op, train)
            )


def _as_of_cudnn(op: Any, train: int) -> Callable[..., Any]:
    """Makes the kernel of a layer.

    Args:
        op: Its operator.
        train: The place of the argument that says whether it is in training mode.
    """

    # Torch's kernel in C++, which calls other operators.
    composite = keys("PrivateUse1")

    def layer(*args: Any) -> Any:
        results = op.redispatch(composite, *args)
        if not args[train] and torch.backends.cudnn.enabled:
            for result in results:
                if result.requires_grad:
                    result.register_hook(_refuse_backward)
        return results

    return layer


def _refuse_backward(gradient: torch.Tensor) -> None:
    raise RuntimeError("cudnn RNN backward can only be called in training mode")
