"""Reducing on one device, and copying the result from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from torchstrategy._communication.cross_device_ops import (
    CrossDeviceOps,
    Destinations,
    Pair,
    as_meant,
    copied_to,
    devices_of,
)
from torchstrategy._communication.options import CommunicationOptions
from torchstrategy._communication.reductions import check_addable
from torchstrategy._communication.transfer import added, in_buckets, sums
from torchstrategy._core.devices import canonical_device, memory_device
from torchstrategy._core.distributed_values import DistributedValues
from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import Device, DeviceLike, Tree

AccumulationFn = Callable[[list[torch.Tensor]], torch.Tensor]


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Brings values to one device, adds them up there, and copies the result to its destinations.

    Args:
        reduce_to_device: The device on which values are added. None: the first destination.
        accumulation_fn: A function that makes one tensor of the list of all values, on that device. None: it is their
            sum. For a mean, the result is divided by the number of values.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> values = strategy.experimental_distribute_values_from_function(
        ...     lambda context: torch.tensor([float(context.replica_id_in_sync_group)])
        ... )
        >>> ops = torchstrategy.ReductionToOneDevice(reduce_to_device="cpu:0")
        >>> ops.reduce(torchstrategy.ReduceOp.MEAN, values, destinations="cpu:0")
        tensor([0.5000])

    Raises:
        ValueError: If there is no such device.
        TypeError: If `accumulation_fn` cannot be called.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/ReductionToOneDevice
    """

    def __init__(self, reduce_to_device: DeviceLike = None, accumulation_fn: AccumulationFn | None = None) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                f"accumulation_fn makes one tensor of a list of tensors; {accumulation_fn!r} is no function."
            )
        self._device = None if reduce_to_device is None else memory_device(canonical_device(reduce_to_device))
        self._accumulation_fn = accumulation_fn

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Tree:
        """Does what `reduce` is called for."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[Pair], options: CommunicationOptions
    ) -> list[Tree]:
        """Does what `batch_reduce` is called for."""
        totals: dict[int, torch.Tensor] = {}
        places = [devices_of(destinations) for _, destinations in value_destination_pairs]
        targets = [self._device or devices[0] for devices in places]
        for target in dict.fromkeys(targets):
            indices = [index for index, other in enumerate(targets) if other == target]
            columns = [value_destination_pairs[index][0].values for index in indices]
            totals.update(zip(indices, self._accumulated(columns, target, options), strict=True))
        if reduce_op is ReduceOp.MEAN:
            counts = (len(value.values) for value, _ in value_destination_pairs)
            totals = {index: mean(totals[index], count) for index, count in enumerate(counts)}
        return [
            as_meant(copied_to(totals[index], devices), destinations)
            for index, (devices, (_, destinations)) in enumerate(zip(places, value_destination_pairs, strict=True))
        ]

    def _accumulated(
        self, columns: Sequence[Sequence[torch.Tensor]], device: Device, options: CommunicationOptions
    ) -> list[torch.Tensor]:
        if self._accumulation_fn is None:
            for column in columns:
                check_addable(column)
            if not options.bytes_per_pack:
                return sums(columns, device)
            return in_buckets(columns, options.bytes_per_pack, lambda column: added(column, device))
        if options.bytes_per_pack:
            raise ValueError(
                f"CommunicationOptions(bytes_per_pack={options.bytes_per_pack}) and an accumulation_fn, which is given "
                "each value as it is, do not go together. Leave one of them out."
            )
        return [self._combined([tensor.to(device) for tensor in column]) for column in columns]

    def _combined(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        assert self._accumulation_fn is not None
        total = self._accumulation_fn(list(tensors))
        if not isinstance(total, torch.Tensor):
            raise TypeError(f"accumulation_fn returned {total!r}, and has to return a tensor.")
        return total.clone() if any(total is tensor for tensor in tensors) else total


def mean(total: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of `count` values whose sum is `total`; the mean of one value is this value, whatever its dtype."""
    return total / count if count > 1 else total
