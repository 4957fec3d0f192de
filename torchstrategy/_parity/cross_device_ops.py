"""Ways to reduce and broadcast across devices: on one device, or on all at once.

The latter is done by NCCL, or by copies within and between two groups of devices.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import torch

from torchstrategy._base.devices import canonical_device, memory_device
from torchstrategy._base.distributed_values import (
    ABSENT,
    DistributedValues,
    Mirrored,
    PerReplica,
    local_results,
)
from torchstrategy._base.errors import as_int, plural, require_type
from torchstrategy._base.options import ReduceOp
from torchstrategy._base.types import Device, DeviceLike, Tree
from torchstrategy._group.reductions import as_tensor, check_addable
from torchstrategy._group.transfer import (
    Column,
    exchange_in_buckets,
    sum_by_nccl,
    sum_each_on,
    sum_on,
    why_not_nccl,
)
from torchstrategy._group.weighing import scale
from torchstrategy._parity.options import (
    USUAL_OPTIONS,
    CommunicationOptions,
    as_options,
    check_usable,
)

# A device, a tensor on the device that is meant, or a distributed value: the device of
# each of its components.
Destinations: TypeAlias = "str | Device | torch.Tensor | DistributedValues"

# How values are reduced: on one device, or among several, on which the sum is then.
_Route: TypeAlias = "Device | tuple[Device, ...]"

# What is reduced, and where the result goes.
Pair = tuple[DistributedValues, Destinations]
_Given: TypeAlias = "tuple[DistributedValues | torch.Tensor, Destinations]"


def devices_of(where: Destinations) -> list[Device]:
    """The devices of destinations, as tensors report them.

    Raises:
        ValueError: If it is nothing that is on a device and names none; if there is no
            such device, or a component is on none.
    """
    if isinstance(where, DistributedValues):
        for component in where.values:
            if not isinstance(component, torch.Tensor):
                raise ValueError(
                    f"destinations has a component {component!r}, which is no tensor "
                    "and on no device."
                )
        return [component.device for component in where.values]
    if isinstance(where, torch.Tensor):
        return [where.device]
    if not isinstance(where, (str, torch.device)) or where == "":
        raise ValueError(
            "destinations says where the result goes: a device such as 'cuda:0', a "
            "tensor, whose device is meant, or a distributed value, for a copy on the "
            f"device of each component; got {where!r}."
        )
    return [memory_device(canonical_device(where))]


def devices_of_each(pairs: Sequence[Pair]) -> list[list[Device]]:
    """`devices_of` the destinations of each pair.

    Many pairs mostly share one destination, which is read once.
    """
    known = {id(where): where for _, where in pairs}
    devices = {key: devices_of(where) for key, where in known.items()}
    return [devices[id(where)] for _, where in pairs]


def deliver(value: torch.Tensor, destinations: Destinations) -> Tree:
    """`value` on its destinations: a tensor, or a mirrored value if there are several.

    It may return `value` itself.
    """
    return wrap_copies(copy_to_each(value, devices_of(destinations)), destinations)


def copy_to_each(value: torch.Tensor, devices: Sequence[Device]) -> list[torch.Tensor]:
    """`value` on each of several devices; on the first, `value` itself if it is there.

    Nobody else may write on it.
    """
    return [value.to(device, copy=i > 0) for i, device in enumerate(devices)]


def wrap_copies(copies: list[torch.Tensor], destinations: Destinations) -> Tree:
    """Equal tensors, one on each device of the destinations, as one value."""
    if (
        not isinstance(destinations, DistributedValues)
        or len(destinations._components) == 1
    ):
        return copies[0]
    there = iter(copies)
    return Mirrored(
        [
            ABSENT if component is ABSENT else next(there)
            for component in destinations._components
        ]
    )


class CrossDeviceOps:
    """Reduces values of several devices to one, and copies it back to them.

    You may derive classes from it.

    A subclass implements `reduce_implementation`. It may also implement
    `batch_reduce_implementation`, if it has a better way for many values than one by
    one, or for all of them; and `broadcast_implementation`, if it has a better way than
    copies. The arguments of these methods have been checked.

    Example:
        >>> class Largest(torchstrategy.CrossDeviceOps):
        ...     def reduce_implementation(
        ...         self, reduce_op, per_replica_value, destinations, options
        ...     ):
        ...         largest = torch.stack(
        ...             [value.cpu() for value in per_replica_value.values]
        ...         ).amax(0)
        ...         return self.broadcast(largest, destinations)
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> values = strategy.experimental_distribute_values_from_function(
        ...     lambda context: torch.tensor([context.replica_id_in_sync_group])
        ... )
        >>> Largest().reduce(torchstrategy.ReduceOp.SUM, values, "cpu")
        tensor([1])

    Differs from tf.distribute:
        `batch_reduce_implementation` need not be overridden. The mean of integers is of
        torch's default dtype.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/CrossDeviceOps
    """

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues | torch.Tensor,
        destinations: Destinations,
        options: CommunicationOptions | None = None,
    ) -> Tree:
        """The sum or mean of the components of a value, on its destinations.

        The value itself stays as it is.

        With the value itself as destinations, this is an all-reduce.

        Args:
            reduce_op: `SUM` or `MEAN`; not a string.
            per_replica_value: A distributed value. A tensor counts as one with a single
                component, which is the result.
            destinations: A device; or a tensor on the device that is meant; or a
                distributed value, for a copy on the device of each of its components.
            options: How values are sent.

        Returns:
            A tensor, or a mirrored value for destinations with several components.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> value = strategy.run(lambda: torch.ones(2))
            >>> torchstrategy.ReductionToOneDevice().reduce(
            ...     torchstrategy.ReduceOp.SUM, value, destinations=value
            ... )
            Mirrored:{
              0: tensor([2., 2.]),
              1: tensor([2., 2.])
            }

        Raises:
            ValueError: If there is no such destination, `reduce_op` is no `ReduceOp`,
                the components differ in shape or dtype, or an option asks for what
                cannot be done.
            NotImplementedError: If the class does not say how.
        """
        checked, options = self._check(
            "reduce", reduce_op, [(per_replica_value, destinations)], options
        )
        ((value, where),) = checked
        if _is_delivered(value, where):
            return _deliver_first(value, where)
        return self.reduce_implementation(reduce_op, value, where, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[_Given],
        options: CommunicationOptions | None = None,
    ) -> list[Tree]:
        """`reduce` for several (value, destinations) pairs, which may be sent together.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> first, second = strategy.run(lambda: (torch.ones(2), torch.zeros(())))
            >>> ops = torchstrategy.HierarchicalCopyAllReduce(num_packs=1)
            >>> ops.batch_reduce(
            ...     torchstrategy.ReduceOp.SUM, [(first, "cpu"), (second, "cpu")]
            ... )
            [tensor([2., 2.]), tensor(0.)]

        Raises:
            ValueError: If an entry is not a pair, or `reduce` would raise one.
            NotImplementedError: If the class does not say how.
        """
        pairs = list(value_destination_pairs)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(
                    f"batch_reduce takes (value, destinations) pairs; got {pair!r}."
                )
        checked, options = self._check("batch_reduce", reduce_op, pairs, options)
        if all(_is_delivered(value, where) for value, where in checked):
            return [_deliver_first(value, where) for value, where in checked]
        return self.batch_reduce_implementation(reduce_op, checked, options)

    def broadcast(self, tensor: torch.Tensor, destinations: Destinations) -> Tree:
        """Copies of a tensor on its destinations.

        Args:
            tensor: The tensor that is copied.
            destinations: The same as for `reduce`.

        Returns:
            A tensor, or a mirrored value for destinations with several components.

        Example:
            >>> torchstrategy.ReductionToOneDevice().broadcast(torch.ones(2), "cpu")
            tensor([1., 1.])

        Raises:
            ValueError: If it is no tensor, or there is no such destination.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"broadcast takes a tensor; got {tensor!r}.")
        devices_of(destinations)  # raises an error for what is none
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Tree:
        """Reduces one value; `reduce` calls it.

        Subclasses implement it, or `batch_reduce_implementation`.

        Args:
            reduce_op: `SUM` or `MEAN`.
            per_replica_value: A distributed value of tensors.
            destinations: The destinations of the result.
            options: How values are sent.
        """
        if (
            type(self).batch_reduce_implementation
            is CrossDeviceOps.batch_reduce_implementation
        ):
            raise NotImplementedError(
                f"{type(self).__name__} does not say how to reduce: override "
                "reduce_implementation, or take one that does, such as "
                "ReductionToOneDevice."
            )
        return self.batch_reduce_implementation(
            reduce_op, [(per_replica_value, destinations)], options
        )[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[Pair],
        options: CommunicationOptions,
    ) -> list[Tree]:
        """Does what `batch_reduce` is called for.

        Subclasses may override it; by default, it reduces one by one.

        Args:
            reduce_op: `SUM` or `MEAN`.
            value_destination_pairs: Distributed values of tensors, and the destinations
                of the results.
            options: How values are sent.
        """
        return [
            self.reduce_implementation(reduce_op, value, to, options)
            for value, to in value_destination_pairs
        ]

    def broadcast_implementation(
        self, tensor: torch.Tensor, destinations: Destinations
    ) -> Tree:
        """Does what `broadcast` is called for.

        Subclasses may override it; by default, it copies to each destination.

        Args:
            tensor: The tensor that is copied.
            destinations: The destinations of the copies.
        """
        return deliver(tensor.clone(), destinations)

    def _check_devices(self, devices: Sequence[Device]) -> None:
        """Raises an error if this class cannot all-reduce among these devices.

        It needs no values yet.

        Raises:
            ValueError: If it cannot be done.
        """

    def _weighted_sums(
        self,
        by_replica: Sequence[Sequence[torch.Tensor | None]],
        weights: Sequence[float],
        destinations: Sequence[Sequence[torch.Tensor]],
    ) -> list[list[torch.Tensor | None]]:
        """The weighted sums of the replicas' tensors, for each replica.

        All replicas get sums that are equal to the last bit.

        See Note [Where a gradient is weighed] in `_group/weighing`.

        Args:
            by_replica: A list for each replica with its tensors, such as gradients;
                None where it has no tensor.
            weights: The weight of each replica. The tensors of weight 0 are dropped,
                also if they are NaN.
            destinations: For each replica, tensors on the devices on which it needs the
                sums, such as its parameters.

        Returns:
            A sum for each of the destinations, or None where no replica has a tensor.
        """
        weighted = [
            scale(tensors, weight)
            for tensors, weight in zip(by_replica, weights, strict=True)
        ]
        # A column has what the replicas have of one tensor. One that is empty has no
        # sum.
        columns = [
            [t for t in column if t is not None]
            for column in zip(*weighted, strict=True)
        ]
        places = [PerReplica(column) for column in zip(*destinations, strict=True)]
        pairs = [
            (PerReplica(column), where)
            for column, where in zip(columns, places, strict=True)
            if column
        ]
        totals = iter(
            self.batch_reduce_implementation(ReduceOp.SUM, pairs, USUAL_OPTIONS)
        )
        sums_of_replicas: list[list[torch.Tensor | None]] = [[] for _ in destinations]
        for column in columns:
            sums = (
                self._for_each(next(totals), len(destinations))
                if column
                else [None] * len(destinations)
            )
            for sums_of_replica, one in zip(sums_of_replicas, sums, strict=True):
                sums_of_replica.append(one)
        return sums_of_replicas

    def _for_each(self, total: Tree, replicas: int) -> Sequence[torch.Tensor]:
        found = local_results(total, replicas)
        if len(found) != replicas or not all(
            isinstance(tensor, torch.Tensor) for tensor in found
        ):
            raise ValueError(
                f"{type(self).__name__} reduced to {total!r}, for destinations of "
                f"{plural(replicas, 'component')}: it has to return a tensor for each, "
                "as broadcast(tensor, destinations) does."
            )
        return found

    def _check(
        self,
        method: str,
        reduce_op: object,
        pairs: Sequence[_Given],
        options: CommunicationOptions | None,
    ) -> tuple[list[Pair], CommunicationOptions]:
        if not isinstance(reduce_op, ReduceOp):
            raise ValueError(
                f"{method} takes a torchstrategy.ReduceOp, SUM or MEAN; got "
                f"{reduce_op!r}."
            )
        checked = [(_of_tensors(value), destinations) for value, destinations in pairs]
        said = as_options(method, options)
        devices_of_each(checked)  # raises an error for what is none
        if said != USUAL_OPTIONS:
            for value, _ in checked:
                check_usable(method, said, partial(devices_of, value))
        return checked, said


def _of_tensors(value: object) -> DistributedValues:
    if isinstance(value, torch.Tensor):
        return PerReplica([value])
    if not isinstance(value, DistributedValues):
        raise ValueError(
            f"What is reduced is a distributed value or a tensor; got {value!r}."
        )
    if type(value) is PerReplica and {torch.Tensor}.issuperset(
        map(type, value._components)
    ):
        return value
    return PerReplica([as_tensor(component) for component in value.values])


def _deliver_first(value: DistributedValues, destinations: Destinations) -> Tree:
    return deliver(value.values[0].clone(), destinations)


def _is_delivered(value: DistributedValues, destinations: Destinations) -> bool:
    """Whether a value is one tensor that is already on its destination."""
    return len(value.values) == 1 and devices_of(value) == devices_of(destinations)


class _ByRoutes(CrossDeviceOps):
    """Reduces together what takes the same route: to one device, or among several."""

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[Pair],
        options: CommunicationOptions,
    ) -> list[Tree]:
        """Does what `batch_reduce` is called for."""
        columns, places = (
            [v.values for v, _ in value_destination_pairs],
            devices_of_each(value_destination_pairs),
        )
        routes = list(map(self._route, columns, places))
        totals: dict[int, list[torch.Tensor]] = {}
        for route in dict.fromkeys(routes):
            indices = [index for index, other in enumerate(routes) if other == route]
            found = self._totals(
                [columns[index] for index in indices], route, options.bytes_per_pack
            )
            totals.update(zip(indices, found, strict=True))
        results = []
        for index, (_, destinations) in enumerate(value_destination_pairs):
            count = len(columns[index]) if reduce_op is ReduceOp.MEAN else 1
            copies = totals[index]
            if count > 1:  # one value keeps its dtype
                copies = [total / count for total in copies]
            if len(copies) == 1:
                copies = copy_to_each(copies[0], places[index])
            results.append(wrap_copies(copies, destinations))
        return results

    @abstractmethod
    def _route(self, tensors: Column, devices: list[Device]) -> _Route:
        """How tensors are reduced for some devices."""

    def _totals(
        self, columns: Sequence[Column], route: Any, limit: int
    ) -> list[list[torch.Tensor]]:
        """The sum of each column, or a sum for each device that `_route` returned.

        `limit` is how many bytes are sent together.
        """
        for column in columns:
            check_addable(column)
        if not limit:
            return [[total] for total in sum_each_on(columns, route)]
        return exchange_in_buckets(
            columns, limit, lambda column: [sum_on(column, route)]
        )


AccumulationFn = Callable[[list[torch.Tensor]], torch.Tensor]


@final
class ReductionToOneDevice(_ByRoutes):
    """Adds values up on one device, and copies the result to its destinations.

    First, it copies the values to that device.

    Args:
        reduce_to_device: The device on which values are added. None: the first
            destination.
        accumulation_fn: A function that makes one tensor of the list of all values, on
            that device. None: it is their sum. For a mean, the result is divided by the
            number of values.

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

    def __init__(
        self,
        reduce_to_device: DeviceLike = None,
        accumulation_fn: AccumulationFn | None = None,
    ) -> None:
        require_type(
            accumulation_fn,
            Callable | None,
            "accumulation_fn is a function that makes one tensor of several",
        )
        self._device = (
            None
            if reduce_to_device is None
            else memory_device(canonical_device(reduce_to_device))
        )
        self._accumulation_fn = accumulation_fn

    def _route(self, tensors: Column, devices: list[Device]) -> Device:
        return self._device or devices[0]

    def _totals(
        self, columns: Sequence[Column], route: Any, limit: int
    ) -> list[list[torch.Tensor]]:
        if self._accumulation_fn is None:
            return super()._totals(columns, route, limit)
        if limit:
            raise ValueError(
                f"CommunicationOptions(bytes_per_pack={limit}) and an accumulation_fn, "
                "which is given each value as it is, do not go together. Leave one of "
                "them out."
            )
        totals = []
        for column in columns:
            tensors = [tensor.to(route) for tensor in column]
            total = self._accumulation_fn(list(tensors))
            require_type(total, torch.Tensor, "accumulation_fn has to return a tensor")
            is_given = any(total is tensor for tensor in tensors)
            totals.append([total.clone() if is_given else total])
        return totals


ON_ONE_DEVICE = ReductionToOneDevice()


class _AllReduce(_ByRoutes):
    """Sums values in buckets, on the devices of the values.

    A value whose result goes to other devices, or that is sparse, is reduced on one
    device.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self._num_packs = as_int(
            num_packs, f"num_packs is a whole number of packs; got {num_packs!r}."
        )
        if self._num_packs < 0:
            raise ValueError(
                "num_packs is a number of packs, or 0 to send each value by itself; "
                f"got {num_packs}."
            )

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Tree:
        """Does what `reduce` is called for.

        A single value that goes to host memory is reduced on one device.
        """
        goes_to_host = any(device.type == "cpu" for device in devices_of(destinations))
        ops = ON_ONE_DEVICE if goes_to_host else self
        return ops.batch_reduce_implementation(
            reduce_op, [(per_replica_value, destinations)], options
        )[0]

    def _route(self, tensors: Column, devices: list[Device]) -> _Route:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return devices[0]  # gradients flow only through sums on one device
        is_dense = all(tensor.layout is torch.strided for tensor in tensors)
        is_all_reduce = (
            is_dense
            and len(tensors) > 1
            and [tensor.device for tensor in tensors] == devices
        )
        return tuple(devices) if is_all_reduce else devices[0]

    def _totals(
        self, columns: Sequence[Column], route: Any, limit: int
    ) -> list[list[torch.Tensor]]:
        if not isinstance(route, tuple):
            return super()._totals(columns, route, limit)
        for column in columns:
            check_addable(column)
        self._check_devices(route)
        turns, in_packs = itertools.count(), self._num_packs > 0 and not limit
        most, count = (math.inf, self._num_packs) if in_packs else (limit, 1)
        return exchange_in_buckets(
            columns, most, lambda bucket: self._sums(bucket, next(turns)), count
        )

    @abstractmethod
    def _sums(self, tensors: Column, turn: int) -> Column:
        """The sum of several tensors, on the device of each of them.

        `turn` is the number of the bucket, from 0.
        """


@final
class NcclAllReduce(_AllReduce):
    """Reduces among CUDA devices by NCCL; several values are sent together in buckets.

    Only an all-reduce uses NCCL: the destinations are the devices of the value. These
    are reduced on one device: a value with other destinations, a single value in host
    memory, a sparse value, and a value that requires grad.

    Args:
        num_packs: How many buckets (packs) the values of each dtype are put together
            in. 0: each value is sent by itself.

    Example:
        >>> ops = torchstrategy.NcclAllReduce(num_packs=2)
        >>> ops.reduce(torchstrategy.ReduceOp.SUM, torch.ones(2), "cpu")
        tensor([1., 1.])

    Differs from tf.distribute:
        Where there is no NCCL, an all-reduce of several values raises an error that
        says why.

    Raises:
        ValueError: If `num_packs` is negative; when it reduces, if NCCL cannot join the
            devices.
        TypeError: If `num_packs` is no integer.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/NcclAllReduce
    """

    def _check_devices(self, devices: Sequence[Device]) -> None:
        if why := why_not_nccl(devices):
            raise ValueError(
                f"NcclAllReduce fails here: {why}. Use HierarchicalCopyAllReduce or "
                "ReductionToOneDevice."
            )

    def _sums(self, tensors: Column, turn: int) -> Column:
        return sum_by_nccl(tensors)


@final
class HierarchicalCopyAllReduce(_AllReduce):
    """Reduces by copies, in two groups of devices.

    It reduces within each group, then between the groups, and copies the result back.

    It is for machines on which each device has a fast connection to some devices and a
    slow one to others: a value goes from group to group only once in each direction.
    The first half of the devices is one group. Each bucket is added up on the next
    device of a group, so that the work is spread over the devices.

    Args:
        num_packs: How many buckets (packs) the values of each dtype are put together
            in. 0: each value is sent by itself.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 4)
        >>> value = strategy.run(lambda: torch.ones(2))
        >>> torchstrategy.HierarchicalCopyAllReduce().batch_reduce(
        ...     torchstrategy.ReduceOp.MEAN, [(value, value)]
        ... )[0][0]
        tensor(1.)

    Differs from tf.distribute:
        The number of devices may be odd.

    Raises:
        ValueError: If `num_packs` is negative.
        TypeError: If it is no integer.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/HierarchicalCopyAllReduce
    """

    def _route(self, tensors: Column, devices: list[Device]) -> _Route:
        # Among values of one device nothing has to be sent.
        return super()._route(tensors, devices) if len(set(devices)) > 1 else devices[0]

    def _sums(self, tensors: Column, turn: int) -> Column:
        middle = (len(tensors) + 1) // 2
        groups = range(middle), range(middle, len(tensors))
        # The groups by their leaders, on whose devices they add up.
        led = {group[turn % len(group)]: group for group in groups}
        parts = [
            sum_on([tensors[i] for i in group], tensors[leader].device)
            for leader, group in led.items()
        ]
        first = list(led)[turn % 2]
        total = sum_on(parts, tensors[first].device)
        sums: dict[int, torch.Tensor] = {}
        for leader, group in led.items():
            sums[leader] = (
                total
                if leader == first
                else total.to(tensors[leader].device, copy=True)
            )
            sums.update(
                (i, sums[leader].to(tensors[i].device, copy=True))
                for i in group
                if i != leader
            )
        return [sums[i] for i in range(len(tensors))]


def default_for(devices: Sequence[Device]) -> CrossDeviceOps:
    """The default way of a strategy to reduce among these devices.

    This is NCCL where it works, and else a reduction on one device.
    """
    return ReductionToOneDevice() if why_not_nccl(devices) else NcclAllReduce()
