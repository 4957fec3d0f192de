"""Ways of reducing that work on all devices at once: by NCCL, and by copies within and between two groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import final

import torch

from torchstrategy._communication.cross_device_ops import (
    CrossDeviceOps,
    Destinations,
    Pair,
    ReductionToOneDevice,
    as_meant,
    devices_of,
    mean,
)
from torchstrategy._communication.options import CommunicationOptions
from torchstrategy._communication.reductions import check_addable
from torchstrategy._communication.transfer import Bucketing, added, nccl_sums, why_not_nccl
from torchstrategy._core.distributed_values import DistributedValues
from torchstrategy._core.errors import as_int
from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import Device, Tree

_by_one_device = ReductionToOneDevice()


class _AllReduce(CrossDeviceOps):
    """Sums values in buckets, on the devices of the values.

    A value whose result goes to other devices, or that is sparse, is reduced on one device.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self._num_packs = as_int(num_packs, f"num_packs is a whole number of packs; got {num_packs!r}.")
        if self._num_packs < 0:
            raise ValueError(f"num_packs is a number of packs, or 0 to send each value by itself; got {num_packs}.")

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Tree:
        """Does what `reduce` is called for. A single value that goes to host memory is reduced on one device."""
        pairs = [(per_replica_value, destinations)]
        if any(device.type == "cpu" for device in devices_of(destinations)):
            return _by_one_device.batch_reduce_implementation(reduce_op, pairs, options)[0]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[Pair], options: CommunicationOptions
    ) -> list[Tree]:
        """Does what `batch_reduce` is called for."""
        reduced: dict[int, Tree] = {}
        groups: dict[tuple[Device, ...] | None, list[int]] = {}  # None: values that are reduced on one device
        for index, pair in enumerate(value_destination_pairs):
            devices = tuple(devices_of(pair[0])) if self._is_all_reduce(*pair) else None
            groups.setdefault(devices, []).append(index)
        for devices, indices in groups.items():
            reduce = self._reduced_together if devices else _by_one_device.batch_reduce_implementation
            results = reduce(reduce_op, [value_destination_pairs[index] for index in indices], options)
            reduced.update(zip(indices, results, strict=True))
        return [reduced[index] for index in range(len(value_destination_pairs))]

    def _is_all_reduce(self, value: DistributedValues, destinations: Destinations) -> bool:
        tensors = value.values
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return False  # gradients flow only through sums on one device
        is_dense = all(tensor.layout is torch.strided for tensor in tensors)
        return is_dense and len(tensors) > 1 and devices_of(value) == devices_of(destinations)

    def _reduced_together(
        self, reduce_op: ReduceOp, pairs: Sequence[Pair], options: CommunicationOptions
    ) -> list[Tree]:
        """The results of pairs whose values and destinations are all on the same devices."""
        columns = [value.values for value, _ in pairs]
        for column in columns:
            check_addable(column)
        self._check_devices([tensor.device for tensor in columns[0]])
        limit = options.bytes_per_pack
        packing = Bucketing.by_size(columns, limit) if limit else Bucketing.by_number(columns, self._num_packs)
        sums = [self._sums(pack, turn) for turn, pack in enumerate(packing.packed())]
        by_replica = [packing.unpacked(packs) for packs in zip(*sums, strict=True)]
        if reduce_op is ReduceOp.MEAN:
            by_replica = [[mean(total, len(columns[0])) for total in totals] for totals in by_replica]
        copies = zip(*by_replica, strict=True)
        return [as_meant(list(column), where) for column, (_, where) in zip(copies, pairs, strict=True)]

    @abstractmethod
    def _sums(self, tensors: Sequence[torch.Tensor], turn: int) -> Sequence[torch.Tensor]:
        """The sum of several tensors, on the device of each of them. `turn` is the number of the bucket, from 0."""


@final
class NcclAllReduce(_AllReduce):
    """Reduces among CUDA devices by NCCL; several values are sent together in buckets.

    Only an all-reduce uses NCCL: the destinations are the devices of the value. These are reduced on one device: a
    value with other destinations, a single value in host memory, a sparse value, and a value that requires grad.

    Args:
        num_packs: How many buckets (packs) the values of each dtype are put together in. 0: each value is sent by
            itself.

    Example:
        >>> ops = torchstrategy.NcclAllReduce(num_packs=2)
        >>> ops.reduce(torchstrategy.ReduceOp.SUM, torch.ones(2), "cpu")
        tensor([1., 1.])

    Differs from tf.distribute:
        Where there is no NCCL, an all-reduce of several values raises an error that says why.

    Raises:
        ValueError: If `num_packs` is negative; when it reduces, if NCCL cannot join the devices.
        TypeError: If `num_packs` is no integer.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/NcclAllReduce
    """

    def _check_devices(self, devices: Sequence[Device]) -> None:
        why = why_not_nccl(devices)
        if why is not None:
            raise ValueError(
                f"NcclAllReduce cannot reduce here: {why}. Use HierarchicalCopyAllReduce or ReductionToOneDevice."
            )

    def _sums(self, tensors: Sequence[torch.Tensor], turn: int) -> Sequence[torch.Tensor]:
        return nccl_sums(tensors)


@final
class HierarchicalCopyAllReduce(_AllReduce):
    """Reduces by copies, in two groups of devices: within each group, then between the groups, and back.

    It is for machines on which each device has a fast connection to some devices and a slow one to others: a value goes
    from group to group only once in each direction. The first half of the devices is one group. Each bucket is added
    up on the next device of a group, so that the work is spread over the devices.

    Args:
        num_packs: How many buckets (packs) the values of each dtype are put together in. 0: each value is sent by
            itself.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 4)
        >>> value = strategy.run(lambda: torch.ones(2))
        >>> torchstrategy.HierarchicalCopyAllReduce().batch_reduce(torchstrategy.ReduceOp.MEAN, [(value, value)])[0][0]
        tensor(1.)

    Differs from tf.distribute:
        The number of devices may be odd.

    Raises:
        ValueError: If `num_packs` is negative.
        TypeError: If it is no integer.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/HierarchicalCopyAllReduce
    """

    def _sums(self, tensors: Sequence[torch.Tensor], turn: int) -> Sequence[torch.Tensor]:
        middle = (len(tensors) + 1) // 2
        groups = [range(middle), range(middle, len(tensors))]
        leaders = [group[turn % len(group)] for group in groups]
        parts = [
            added([tensors[i] for i in group], tensors[leader].device)
            for group, leader in zip(groups, leaders, strict=True)
        ]
        total = added(parts, tensors[leaders[turn % 2]].device)
        sums: dict[int, torch.Tensor] = {}
        for group, leader in zip(groups, leaders, strict=True):
            sums[leader] = total if leader == leaders[turn % 2] else total.to(tensors[leader].device, copy=True)
            sums.update((i, sums[leader].to(tensors[i].device, copy=True)) for i in group if i != leader)
        return [sums[i] for i in range(len(tensors))]


def default_for(devices: Sequence[Device]) -> CrossDeviceOps:
    """The default way of a strategy to reduce among these devices: NCCL where it works, else on one device."""
    return ReductionToOneDevice() if why_not_nccl(devices) else NcclAllReduce()
