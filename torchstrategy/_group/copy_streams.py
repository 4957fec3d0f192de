"""The streams on which values come to an accelerator and leave it.

Note [Three copy streams]
Each device has a stream for each kind of cargo. What is on one stream happens in its
order, and on one stream for all
- a batch that is loaded ahead would come only after the step before it: the copy of
  parameters before it in the stream has to wait for that step;
- a gradient that leaves would wait for a batch that comes, though a link carries both
  at the same time.
The program, too, waits for the gradients that leave, and for nothing else.
"""

from __future__ import annotations

import enum
import functools
import threading

import torch

from torchstrategy._base.types import Device


class Cargo(enum.Enum):
    """What a copy stream carries. See Note [Three copy streams]."""

    VALUES = "values of parameters and buffers, which come"
    BATCHES = "batches, which come"
    GRADIENTS = "gradients, which leave"


def copy_stream(device: Device, cargo: Cargo) -> torch.Stream:
    """The stream on which all of one cargo is copied to or from an accelerator.

    It lives as long as the process.
    """
    with _one_at_a_time:
        return _new_stream(device, cargo)


# Two threads that ask for a stream must not both make one.
_one_at_a_time = threading.Lock()


@functools.cache
def _new_stream(device: Device, cargo: Cargo) -> torch.Stream:
    try:
        # `torch.Stream` is looked up at each call, since simulated devices exchange it.
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):  # the backend has one stream
        return torch.accelerator.current_stream(device)


def begin_copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an accelerator's tensor in the CPU's memory.

    It is there once the current stream is done.

    It is in pinned memory, if the machine has some left. The caller keeps the tensor
    until then.
    """
    try:
        return tensor.to("cpu", non_blocking=True)
    except RuntimeError:
        # No pinned memory is left; if that is not the reason, the next line raises the
        # error again.
        return tensor.to("cpu")
