"""Where the copies of a user's modules are, and how they are kept in step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torchstrategy._base.types import Device
from torchstrategy._group.worker_streams import WorkerStreams
from torchstrategy._group.workers import LONE, Workers

_OfOne = Sequence[torch.Tensor | None]  # the gradients of one replica
# Adds up the gradients of several replicas, times weights; returns the sums for each,
# on the devices of the parameters.
AllReduce = Callable[
    [Sequence[_OfOne], Sequence[float], Sequence[Sequence[torch.Tensor]]],
    Sequence[_OfOne],
]


class Placement(NamedTuple):
    """Where copies are, and how they are kept in step.

    Args:
        devices: The device of each replica.
        parameter_device: The device of the user's parameters.
        may_alias: Whether replicas on that device share the memory of the user's
            parameters. If not, they have real copies, as replicas on several devices
            have; the numbers are the same.
        averages_buffers: Whether running statistics become the mean of the replicas';
            else the first replica's.
        is_mirrored: Whether replicas on other devices update their parameters
            themselves, with optimizers of their own; else values are sent to them.
        all_reduce: Sums gradients and leaves the sums on all devices, for replicas that
            update their parameters themselves.
        workers: The processes that train together.
        streams: The caller's random generators, which several workers keep alike. None:
            there is one.
    """

    devices: Sequence[Device]
    parameter_device: Device
    may_alias: bool = True
    averages_buffers: bool = True
    is_mirrored: bool = False
    all_reduce: AllReduce | None = None
    workers: Workers = LONE
    streams: WorkerStreams | None = None
