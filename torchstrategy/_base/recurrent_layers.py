"""The weights of recurrent layers, which cuDNN wants in one piece of memory.

Where they are not, torch copies them into one piece at each forward, and warns.
`flatten_parameters` puts them there: it gives each weight other memory. Torch calls it
where a layer comes to a GPU, and so do many forwards of programs that were written for
`torch.nn.DataParallel`, whose copies were never in one piece.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from torchstrategy._base.torch_internals import flat_weights


# Note [Weights of replicas in one piece]
# The library lays the weights of a replica in one piece when it makes them. A step may
# not: a weight that shares the memory of the user's would leave it, and no longer have
# the values that the optimizer writes. So in a replica `flatten_parameters` does
# nothing: the weights are in one piece already, or the user's are not, either.
@final
class _Laying(threading.local):
    is_ours = False  # whether it is the library that lays weights on this thread


_laying = _Laying()


def may_be_moved(layer: nn.RNNBase) -> bool:
    """Whether the weights of a layer may get other memory.

    See Note [Weights of replicas in one piece].
    """
    return _laying.is_ours or not any(
        hasattr(weight, _OF_REPLICAS) for weight in flat_weights(layer)
    )


_OF_REPLICAS = "torchstrategy_state"  # the slot that only parameters of replicas have


def flatten_weights(layer: nn.RNNBase) -> None:
    """Puts the weights of a layer into one piece of memory, if that matters there."""
    _laying.is_ours = True
    try:
        with torch.no_grad():
            layer.flatten_parameters()
    finally:
        _laying.is_ours = False


def _leave_replicas_alone(
    flatten: Callable[[nn.RNNBase], None],
) -> Callable[[nn.RNNBase], None]:
    @functools.wraps(flatten)
    def flatten_parameters(self: nn.RNNBase) -> None:
        if may_be_moved(self):
            flatten(self)

    return flatten_parameters


_layers: Any = nn.RNNBase
_layers.flatten_parameters = _leave_replicas_alone(_layers.flatten_parameters)
