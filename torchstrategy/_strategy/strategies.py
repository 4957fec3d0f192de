"""The strategies: each is a constructor, which picks where the replicas run and where parameters live.

A base class holds the constructor of those that TensorFlow 1 has, too: `compat.v1` gives it the methods of version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

from torchstrategy._communication.cross_device_ops import CrossDeviceOps, ReductionToOneDevice, default_for
from torchstrategy._core.devices import canonical_device, local_accelerators, memory_device
from torchstrategy._core.options import ReduceOp, RunOptions
from torchstrategy._core.types import Device, DeviceLike
from torchstrategy._replication.placement import Placement
from torchstrategy._replication.storage import ReplicatedStorage, Storage
from torchstrategy._strategy.one_machine import DefaultExtended, OneDeviceExtended
from torchstrategy._strategy.replicated import ReplicatedExtended
from torchstrategy._strategy.strategy import Strategy
from torchstrategy._strategy.strategy_base import ONE_DEFAULT, StrategyBase

T = TypeVar("T")


@final
class DefaultStrategy(Strategy):
    """Plain PyTorch: one replica, wherever the caller is. There is one; `torchstrategy.get_strategy()` returns it.

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

    def __init__(self, device: DeviceLike) -> None:
        one = canonical_device(device)
        super().__init__(OneDeviceExtended(Storage(Placement([one], one))))

    if TYPE_CHECKING:  # one replica's results are what the step returned

        def run(
            self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Any = None, options: RunOptions | None = None
        ) -> T: ...


@final
class OneDeviceStrategy(OneDeviceBase, Strategy):
    """Runs the step on one device, on the caller's thread.

    What is created in its scope is created on the device, batches are moved to it, and the step costs what it costs
    without a strategy. It is the strategy to write and debug a script with, before more devices are given to it.

    Args:
        device: `"cpu"`, `"cuda:0"`, `"/gpu:0"`, a `torch.device`, or the index of an accelerator.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(3, 1)
        >>> strategy.run(lambda x: model(x).shape, args=(torch.ones(2, 3),))
        torch.Size([2, 1])

    Differs from tf.distribute:
        A device that is not there is refused here, not at its first use.

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
        gradient_reduction: ReduceOp | str = ReduceOp.MEAN,
        buffer_aggregation: Literal["mean", "only_first_replica"] = "mean",
    ) -> None:
        devices = devices_of_replicas("compute_devices", compute_devices)
        if parameter_device in (None, ""):
            parameter_device = devices[0] if len(devices) == 1 else "cpu:0"
        storage = storage_of(devices, canonical_device(parameter_device), buffer_aggregation)
        super().__init__(ReplicatedExtended(storage, ReduceOp.of(gradient_reduction), between_graph=True))


@final
class CentralStorageStrategy(CentralStorageBase, Strategy):
    """Keeps parameters on one device, and runs the step on each of several with copies of them.

    Gradients are brought together on the parameter device, where the optimizer takes one step for all replicas. Each
    replica computes the loss of its own rows, so nothing but gradients is gathered.

    Args:
        compute_devices: The device of each replica. A device may stand there several times: `["cpu"] * 4` are four
            replicas on one CPU. None: all accelerators of this machine, or one CPU where there is none.
        parameter_device: Where parameters live. None: the compute device if there is one, else the CPU.
        gradient_reduction: How the gradients of the replicas become one; see `RunOptions`.
        buffer_aggregation: What becomes of the running statistics of normalisation layers, which each replica takes
            of its own rows. `"mean"`: they are averaged, each replica weighing its rows. `"only_first_replica"`: the
            first replica's statistics are kept, as `torch.nn.DataParallel` does. All other buffers always get the first
            replica's values, so that counters count each step once.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
        >>> strategy.num_replicas_in_sync
        3
        >>> strategy.run(lambda: torchstrategy.get_replica_context().replica_id_in_sync_group * 1000)
        PerReplica:{
          0: 0,
          1: 1000,
          2: 2000
        }

    Differs from tf.distribute:
        A device that is not there is refused. An empty list of devices is an error. `gradient_reduction`
        and `buffer_aggregation` are ours.

    Raises:
        ValueError: If a name is not a device, or this machine does not have the device; or if there is no compute
            device.
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
        gradient_reduction: ReduceOp | str = ReduceOp.MEAN,
        buffer_aggregation: Literal["mean", "only_first_replica"] = "mean",
    ) -> None:
        on = devices_of_replicas("devices", devices)
        ops = default_for(on) if cross_device_ops is None else cross_device_ops
        if not isinstance(ops, CrossDeviceOps):
            raise TypeError(f"cross_device_ops is a torchstrategy.CrossDeviceOps or None; got {ops!r}.")
        ops._check_devices(on)
        # Where nobody has chosen and there is no NCCL, gradients are added up as they come, and the sums are sent.
        is_all_reduced = cross_device_ops is not None or not isinstance(ops, ReductionToOneDevice)
        all_reduce = ops._weighted_sums if is_all_reduced else None
        storage = storage_of(on, on[0], buffer_aggregation, is_mirrored=True, all_reduce=all_reduce)
        if len(on) == 1:
            ops = ReductionToOneDevice()
        super().__init__(ReplicatedExtended(storage, ReduceOp.of(gradient_reduction), cross_device_ops=ops))


@final
class MirroredStrategy(MirroredBase, Strategy):
    """Keeps parameters on the device of every replica, where each replica updates its own.

    The user's own modules are those of the first replica, and the user's own optimizer updates them. Replicas on the
    same device share their memory: all replicas do on `["cpu", "cpu"]`. Each replica on another device has parameters,
    and an optimizer, in memory of its own. Whenever the user's optimizer takes a step, in a run or after it, theirs
    take the same on the same gradients, those of the whole batch; so all stay equal, bit by bit, and no parameter is
    sent. What is written on parameters by other ways, such as `load_state_dict`, is sent before the next run. So are
    the values that an optimizer has computed which is none of torch's own, or which writes on gradients in its step, as
    SGD does with nesterov momentum on accelerators.

    Args:
        devices: The device of each replica. A device may stand there several times: `["cpu"] * 4` are four replicas on
            one CPU. None: all accelerators of this machine, or one CPU where there is none.
        cross_device_ops: How gradients, and what `reduce` is given, are brought together. None: by NCCL where all
            devices are different CUDA devices, else on the first device.
        gradient_reduction: How the gradients of the replicas become one; see `RunOptions`.
        buffer_aggregation: What becomes of the running statistics of normalisation layers; see
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
        A device that is not there is refused. Without accelerators there is one replica, and not one for each logical
        CPU. A device may be listed twice. `gradient_reduction` and `buffer_aggregation` are ours.

    Raises:
        ValueError: If a name is not a device, or this machine does not have the device; or if there is no device.
            Or if `cross_device_ops` cannot be used with these devices.
        TypeError: If a device, or the list of them, or `cross_device_ops` is of the wrong kind.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/MirroredStrategy
    """


def devices_of_replicas(name: str, devices: Sequence[DeviceLike] | None) -> list[Device]:
    """The device of each replica; for None all accelerators of this machine, or a CPU. `name` is that of the argument.

    Raises:
        ValueError: If there is none, or one is not there.
        TypeError: If a device, or the list of them, is of the wrong kind.
    """
    if devices is None:
        return local_accelerators() or [canonical_device("cpu:0")]
    if isinstance(devices, str):
        raise ValueError(f"{name} is a list of devices, one for each replica: write [{devices!r}].")
    if not isinstance(devices, Iterable) or isinstance(devices, (bytes, dict, set, frozenset)):
        raise TypeError(f"{name} is a list of devices, one for each replica; got {devices!r}.")
    found = [canonical_device(device) for device in devices]
    if not found:
        raise ValueError(f"{name}=[] names no device to run on. Leave it out for all devices of this machine.")
    return found


def storage_of(devices: list[Device], owner: Device, buffer_aggregation: str, **mirrored: Any) -> Storage:
    """The storage: plain for one replica on the parameter device, else one that makes copies.

    Raises:
        ValueError: If there is no such `buffer_aggregation`.
    """
    if buffer_aggregation not in ("mean", "only_first_replica"):
        raise ValueError(f"buffer_aggregation={buffer_aggregation!r} is neither 'mean' nor 'only_first_replica'.")
    layout = Placement(devices, owner, averages_buffers=buffer_aggregation == "mean", **mirrored)
    is_lone = len(devices) == layout.workers.count == 1 and memory_device(devices[0]) == memory_device(owner)
    return Storage(layout) if is_lone else ReplicatedStorage(layout)
