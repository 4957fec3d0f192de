"""The strategies: each constructor picks where replicas and parameters live.

A base class holds the constructor of those that TensorFlow 1 has, too: `compat.v1`
gives it the methods of version 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn

from torchstrategy._base.context import current_strategy, set_strategy
from torchstrategy._base.devices import (
    canonical_device,
    local_accelerators,
    memory_device,
)
from torchstrategy._base.distributed_values import (
    DistributedValues,
    check_component_counts,
)
from torchstrategy._base.errors import plural, require_type, warn
from torchstrategy._base.options import ReduceOp, RunOptions, ValueContext
from torchstrategy._base.result_leaves import map_results
from torchstrategy._base.types import Device, DeviceLike, Tree
from torchstrategy._data.options import (
    DatasetFn,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from torchstrategy._group.reductions import as_tensor, reduce_values
from torchstrategy._parity.cross_device_ops import (
    CrossDeviceOps,
    ReductionToOneDevice,
    default_for,
)
from torchstrategy._parity.options import CommunicationOptions
from torchstrategy._run.example_counts import check_count
from torchstrategy._run.given_values import gather_alone
from torchstrategy._run.own.own_objects import OwnObjects
from torchstrategy._run.placement import Placement
from torchstrategy._run.storage import Storage, is_nobodys
from torchstrategy._turns.switch import storage_of_several
from torchstrategy.replicated import ReplicatedExtended
from torchstrategy.strategy import ONE_DEFAULT, Strategy, StrategyBase, T


class OneDeviceExtended(ReplicatedExtended):
    """One replica, on the caller's thread and on the user's own objects.

    This class wraps no object, and has no values to bring together.
    """

    _makes_containers = False
    _run = ReplicatedExtended._run_alone

    def _reduce_leaves(
        self, op: ReduceOp, leaves: Sequence[Tree], options: CommunicationOptions
    ) -> list[Tree]:
        return list(map(_own_value, leaves))

    def _reduce_nested(self, op: ReduceOp, value: Tree) -> Tree:
        # This comes to the same as the method above, and costs less.
        return map_results(_own_value, value)

    def _reduce_along_axis(
        self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...]
    ) -> Tree:
        tensor = as_tensor(_own_value(value))
        return reduce_values(op, axis, [tensor], tensor.device)

    def _gather(self, value: Tree, axis: int) -> Tree:
        return gather_alone(_own_value(value), axis)

    def _distribute_from_function(
        self, dataset_fn: DatasetFn, options: InputOptions
    ) -> Any:
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "OneDeviceStrategy has one replica: leave out "
                "InputReplicationMode.PER_REPLICA."
            )
        return super()._distribute_from_function(dataset_fn, options)

    def _distribute_values(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        return value_fn(ValueContext())


@final
class DefaultExtended(OneDeviceExtended):
    """One replica, on whatever device the caller is; it owns nothing."""

    def __init__(self) -> None:
        super().__init__(
            Storage(Placement([torch.device("cpu", 0)], torch.device("cpu", 0)))
        )  # which stays empty
        self._alone_on, self._owns = None, is_nobodys

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        raise RuntimeError(
            "The default strategy has no devices of its own: it runs wherever its "
            "caller is."
        )

    parameter_devices = worker_devices

    @property
    def experimental_between_graph(self) -> bool:
        raise NotImplementedError(
            "The default strategy does not say: there are no graphs, and it has no "
            "devices."
        )

    def non_slot_devices(self, var_list: Iterable[Any]) -> tuple[Device, ...]:
        return (self._device_of(0),)

    def _broadcast_to(self, tensor: torch.Tensor, destinations: Any) -> Tree:
        raise NotImplementedError(
            "The default strategy has no devices of its own to broadcast to. Use "
            "tensor.to()."
        )

    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any:
        if options != InputOptions():
            raise ValueError(
                "The default strategy returns the dataset itself, so "
                f"options={options} would do nothing. Leave them out, or distribute "
                "the dataset with a strategy that has a device, such as "
                "OneDeviceStrategy."
            )
        return dataset

    def _distribute_from_function(
        self, dataset_fn: DatasetFn, options: InputOptions
    ) -> Any:
        # The options are checked before the call.
        return self._distribute_dataset(dataset_fn, options)(InputContext())

    def _distribute_module(self, module: nn.Module) -> nn.Module:
        return module

    def _device_of(self, replica: int) -> Device:
        return canonical_device(None)


def _own_value(value: Tree) -> Tree:
    """The value of a lone replica, wherever it was made."""
    if not isinstance(value, DistributedValues):
        return value
    check_component_counts([value], 1)
    return value.values[0]


@final
class DefaultStrategy(Strategy):
    """Plain PyTorch: one replica, wherever the caller is.

    There is one; `torchstrategy.get_strategy()` returns it.

    Raises:
        RuntimeError: When another one is made.
    """

    _made = False

    def __init__(self) -> None:
        if DefaultStrategy._made:
            raise RuntimeError(ONE_DEFAULT)
        DefaultStrategy._made = True
        super().__init__(DefaultExtended())


class OneDeviceBase(StrategyBase):
    """The constructor of `OneDeviceStrategy`."""

    def __init__(
        self, device: DeviceLike, *, examples: Callable[..., Any] | None = None
    ) -> None:
        one, count = canonical_device(device), check_count(examples)
        super().__init__(
            OneDeviceExtended(
                Storage(Placement([one], one, is_mirrored=True)), examples=count
            )
        )

    if TYPE_CHECKING:  # one replica's results are what the step returned

        def run(
            self,
            fn: Callable[..., T],
            args: Sequence[Any] = (),
            kwargs: Any = None,
            options: RunOptions | None = None,
        ) -> T: ...


@final
class OneDeviceStrategy(OneDeviceBase, Strategy):
    """Runs the step on one device, on the caller's thread.

    What is created in its scope is created on the device, batches are moved to it, and
    the step costs what it costs without a strategy. It is the strategy to write and
    debug a script with, before more devices are given to it.

    Args:
        device: `"cpu"`, `"cuda:0"`, `"/gpu:0"`, a `torch.device`, or the index of an
            accelerator.
        examples: As for strategies of several replicas. It is called and checked, and
            changes no number: the only replica is the whole batch.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(3, 1)
        >>> strategy.run(lambda x: model(x).shape, args=(torch.ones(2, 3),))
        torch.Size([2, 1])

    Differs from tf.distribute:
        A device that is not there is refused here, not at its first use. `examples` is
        ours.

    Raises:
        ValueError: If `device` is no device, or one that this machine does not have.
        TypeError: If `device` is of the wrong kind.

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/distribute/OneDeviceStrategy
    """


class CentralStorageBase(StrategyBase):
    """The constructor of `CentralStorageStrategy`."""

    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike = None,
        *,
        gradient_reduction: ReduceOp | str | None = None,
        buffer_aggregation: Literal["mean", "only_first_replica"] = "mean",
        examples: Callable[..., Any] | None = None,
    ) -> None:
        count = check_count(examples)
        devices = devices_of_replicas("compute_devices", compute_devices)
        if parameter_device in (None, ""):
            parameter_device = (
                devices[0] if len(devices) == 1 else _default_owner(devices)
            )
        storage = make_storage(
            devices, canonical_device(parameter_device), buffer_aggregation
        )
        super().__init__(
            ReplicatedExtended(storage, gradient_reduction, examples=count)
        )


@final
class CentralStorageStrategy(CentralStorageBase, Strategy):
    """Keeps parameters on one device, and runs the step on several with copies of them.

    Gradients are brought together on the parameter device, where the optimizer takes
    one step for all replicas. Each replica computes the loss of its own rows, so
    nothing but gradients is gathered.

    Args:
        compute_devices: The device of each replica. A device may stand there several
            times: `["cpu"] * 4` are four replicas on one CPU. None: all accelerators of
            this machine, or one CPU where there is none.
        parameter_device: Where parameters and the optimizer's state live. Default: the
            compute device if there is exactly one; with several, the CPU. This is slow
            on accelerators, and you are warned of it: name one of them, or `"cpu"` if
            their memory is too small.
        gradient_reduction: How the gradients of the replicas become one; see
            `RunOptions`. None: `"mean"`, with a `LossWeightWarning` where a loss is a
            mean over something else than rows.
        buffer_aggregation: What becomes of the running statistics of normalisation
            layers, which each replica takes of its own rows. `"mean"`: they are
            averaged, each replica weighing its rows. `"only_first_replica"`: the first
            replica's statistics are kept, as `torch.nn.DataParallel` does. All other
            buffers always get the first replica's values, so that counters count each
            step once.
        examples: A function that says how much each replica counts, for runs whose
            `RunOptions` do not say. It is called with the arguments of every step of
            the strategy; see `RunOptions`.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
        >>> strategy.num_replicas_in_sync
        3
        >>> def step():
        ...     context = torchstrategy.get_replica_context()
        ...     return context.replica_id_in_sync_group * 1000
        >>> strategy.run(step)
        PerReplica:{
          0: 0,
          1: 1000,
          2: 2000
        }

    Differs from tf.distribute:
        A device that is not there is refused. An empty list of devices is an error.
        `gradient_reduction`, `buffer_aggregation` and `examples` are ours.

    Raises:
        ValueError: If a name is not a device, or this machine does not have the device;
            or if there is no compute device.
        TypeError: If a device, or the list of them, is of the wrong kind.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/experimental/CentralStorageStrategy
    """


class MirroredBase(StrategyBase):
    """The constructor of `MirroredStrategy`."""

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        gradient_reduction: ReduceOp | str | None = None,
        buffer_aggregation: Literal["mean", "only_first_replica"] = "mean",
        examples: Callable[..., Any] | None = None,
    ) -> None:
        count = check_count(examples)
        on = devices_of_replicas("devices", devices)
        if devices is None:
            _warn_if_each_process_trains_alone()
        ops = default_for(on) if cross_device_ops is None else cross_device_ops
        require_type(
            ops,
            CrossDeviceOps,
            "cross_device_ops is a torchstrategy.CrossDeviceOps or None",
        )
        ops._check_devices(on)
        # Where nobody has chosen and there is no NCCL, gradients are added up as they
        # come, and the sums are sent.
        is_all_reduced = cross_device_ops is not None or not isinstance(
            ops, ReductionToOneDevice
        )
        all_reduce = ops._weighted_sums if is_all_reduced else None
        storage = make_storage(
            on, on[0], buffer_aggregation, is_mirrored=True, all_reduce=all_reduce
        )
        if len(on) == 1:
            ops = ReductionToOneDevice()
        super().__init__(ReplicatedExtended(storage, gradient_reduction, ops, count))


def _warn_if_each_process_trains_alone() -> None:
    """Warns in a process that a launcher started and that has not joined the others.

    With no list of devices, each of them would train the same job on all devices of its
    machine. Whoever names the devices, or has joined the processes before, may mean
    what the program says.
    """
    count = os.environ.get("WORLD_SIZE", "")
    is_one_of_several = (
        count.isdecimal()
        and int(count) > 1
        and {"RANK", "MASTER_ADDR"} <= os.environ.keys()
    )
    if not is_one_of_several or (dist.is_available() and dist.is_initialized()):
        return
    warn(
        f"MirroredStrategy() was made in process {os.environ['RANK']} of {count} that "
        "torchrun or another launcher started: RANK, WORLD_SIZE and MASTER_ADDR are "
        "set. It knows nothing of the others, so each of them trains alone: the same "
        "job, on all devices of its machine. To train together, write "
        "torchstrategy.MultiWorkerMirroredStrategy(). If each is to train alone, say "
        "on which devices: MirroredStrategy(devices) does not warn.",
        UserWarning,
    )


@final
class MirroredStrategy(MirroredBase, Strategy):
    """Every device holds and updates its own copy of the parameters.

    The user's own modules are those of the first replica, and the user's own optimizer
    updates them. Replicas on the same device share their memory: all replicas do on
    `["cpu", "cpu"]`. Each replica on another device has parameters, and an optimizer,
    in memory of its own. Whenever the user's optimizer takes a step, in a run or after
    it, theirs take the same on the same gradients, those of the whole batch; so all
    stay equal, bit by bit, and no parameter is sent. What is written on parameters by
    other ways, such as `load_state_dict`, is sent before the next run. So are the
    values that an optimizer has computed which is none of torch's own, or which writes
    on gradients in its step, as SGD does with nesterov momentum on accelerators.

    Args:
        devices: The device of each replica. A device may stand there several times:
            `["cpu"] * 4` are four replicas on one CPU. None: all accelerators of this
            machine, or one CPU where there is none; a warning says so in a process that
            `torchrun` started beside others.
        cross_device_ops: How gradients, and what `reduce` is given, are brought
            together. None: by NCCL where all devices are different CUDA devices, else
            on the first device.
        gradient_reduction: How the gradients of the replicas become one; see
            `RunOptions`. None: `"mean"`, with a `LossWeightWarning` where a loss is a
            mean over something else than rows.
        buffer_aggregation: What becomes of the running statistics of normalisation
            layers; see `CentralStorageStrategy`.
        examples: A function that says how much each replica counts; see
            `CentralStorageStrategy`.

    Example:
        >>> strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(3, 1)
        ...     optimizer = torch.optim.Adam(model.parameters())
        >>> def step(x):
        ...     optimizer.zero_grad()
        ...     model(x).mean().backward()
        ...     optimizer.step()
        >>> for batch in strategy.experimental_distribute_dataset([torch.ones(5, 3)]):
        ...     strategy.run(step, args=(batch,))
        >>> torchstrategy.testing.assert_replicas_agree(strategy, model, optimizer)

    Differs from tf.distribute:
        A device that is not there is refused. Without accelerators there is one
        replica, and not one for each logical CPU. A device may be listed twice.
        `gradient_reduction`, `buffer_aggregation` and `examples` are ours.

    Raises:
        ValueError: If a name is not a device, or this machine does not have the device;
            or if there is no device. Or if `cross_device_ops` cannot be used with these
            devices.
        TypeError: If a device, or the list of them, or `cross_device_ops` is of the
            wrong kind.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/MirroredStrategy
    """


def get_strategy() -> Strategy:
    """The strategy in whose scope, or in whose replica, the caller is.

    Outside of every scope and replica, it is the default strategy.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     torchstrategy.get_strategy() is strategy
        True
        >>> torchstrategy.get_strategy() is strategy
        False

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/get_strategy
    """
    # It is a strategy of compat.v1 only in the scope and replicas of that strategy.
    return current_strategy()  # type: ignore[return-value]


def experimental_set_strategy(strategy: StrategyBase | None) -> None:
    """Makes `strategy` the current one for the rest of this thread.

    What follows in this thread runs as if it stood in the scope of `strategy`.

    Calling it again replaces the strategy; `None` takes it away.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> torchstrategy.experimental_set_strategy(strategy)
        >>> torchstrategy.get_strategy() is strategy
        True
        >>> torchstrategy.experimental_set_strategy(None)

    Raises:
        RuntimeError: If called in a `scope()` block or in a replica.
        TypeError: If `strategy` is not a strategy.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/experimental_set_strategy
    """
    require_type(
        strategy,
        StrategyBase | None,
        "experimental_set_strategy takes a torchstrategy.Strategy or None",
    )
    set_strategy(strategy)


def devices_of_replicas(
    name: str, devices: Sequence[DeviceLike] | None
) -> list[Device]:
    """The device of each replica; for None all accelerators of this machine, or a CPU.

    `name` is that of the argument.

    Raises:
        ValueError: If there is none, or one is not there.
        TypeError: If a device, or the list of them, is of the wrong kind.
    """
    if devices is None:
        return local_accelerators() or [canonical_device("cpu:0")]
    if isinstance(devices, str):
        raise ValueError(
            f"{name} is a list of devices, one for each replica: write [{devices!r}]."
        )
    if isinstance(devices, int):
        count = max(devices, 1)
        here = [str(device) for device in local_accelerators()] or [
            f"cuda:{index}" for index in range(count)
        ]
        raise TypeError(
            f"{name} is a list of devices, one for each replica; got {devices!r}. For "
            f"{plural(count, 'replica')} write "
            f'["cpu"] * {count} on the CPU, or {here[:count]} on accelerators; leave '
            "it out for all accelerators."
        )
    if not isinstance(devices, Iterable) or isinstance(
        devices, (bytes, dict, set, frozenset)
    ):
        raise TypeError(
            f"{name} is a list of devices, one for each replica; got {devices!r}."
        )
    found = [canonical_device(device) for device in devices]
    if not found:
        raise ValueError(
            f"{name}=[] names no device to run on. Leave it out for all devices of "
            "this machine."
        )
    return found


def _default_owner(devices: Sequence[Device]) -> Device:
    """The CPU, as in TensorFlow, for parameters of replicas on several devices.

    This function warns if the devices are faster than the CPU.
    """
    places = list(
        dict.fromkeys(str(device) for device in devices if device.type != "cpu")
    )
    if places:
        listed = ", ".join(f'"{device}"' for device in devices)
        warn(
            "CentralStorageStrategy keeps parameters and the optimizer's state on the "
            "CPU by default, as TensorFlow's does, and its replicas are on "
            f"{', '.join(places)}: each step sends all parameters to them, and the CPU "
            f"updates them. For a faster step write MirroredStrategy([{listed}]), "
            "which keeps a copy on every device, "
            f'or CentralStorageStrategy([{listed}], "{places[0]}"), which keeps the '
            "only copy there. If their memory is too small, keep the CPU, and write "
            f'CentralStorageStrategy([{listed}], "cpu") so as not to see this.',
            UserWarning,
        )
    return canonical_device("cpu:0")


def make_storage(
    devices: list[Device], owner: Device, buffer_aggregation: str, **mirrored: Any
) -> Storage:
    """The storage of the parameters of a strategy.

    A replica on the parameter device uses the user's own objects if it is the only one.
    All other replicas have copies.

    Raises:
        ValueError: If there is no such `buffer_aggregation`.
    """
    if buffer_aggregation not in ("mean", "only_first_replica"):
        raise ValueError(
            f"buffer_aggregation={buffer_aggregation!r} is neither 'mean' nor "
            "'only_first_replica'."
        )
    placement = Placement(
        devices, owner, averages_buffers=buffer_aggregation == "mean", **mirrored
    )
    if len(devices) > 1 or memory_device(devices[0]) != memory_device(owner):
        return storage_of_several(placement)
    return Storage(placement) if placement.workers.count == 1 else OwnObjects(placement)
