"""Parameters on one device, replicas on others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

from torchstrategy._core.devices import canonical_device, memory_device
from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import DeviceLike
from torchstrategy._execution.replicas import Replicas
from torchstrategy._replication.replicated_storage import ReplicatedStorage
from torchstrategy._replication.storage import Storage
from torchstrategy._strategy.choices import averages, devices_of_replicas
from torchstrategy._strategy.replicated import ReplicatedExtended
from torchstrategy._strategy.strategy import Strategy


@final
class CentralStorageStrategy(Strategy):
    """Keeps parameters on one device, and runs the step on each of several with copies of them.

    Gradients are brought together on the parameter device, where the optimizer takes one step for all replicas. Each
    replica computes the loss of its own rows, so nothing but gradients is gathered.

    Args:
        compute_devices: The device of each replica. A device may stand there several times: `["cpu"] * 4` are four
            replicas on one CPU. None: all accelerators of this machine, or one CPU where there is none.
        parameter_device: Where parameters live. None: the compute device if there is one, else the CPU.
        gradient_reduction: How the gradients of the replicas become one; see `RunOptions`.
        buffer_aggregation: What becomes of the running statistics of normalisation layers, which each replica takes
            of its own rows. `"mean"`: they are averaged, each replica weighing its rows. `"only_first_replica"`: those
            of the first one are kept, as `torch.nn.DataParallel` does. All other buffers are always those of the first
            replica, so that counters count each step once.

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
        ValueError: If a device is none, or one that this machine does not have; or if there is no compute device.
        TypeError: If a device, or the list of them, is of the wrong kind.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/experimental/CentralStorageStrategy
    """

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
        owner = canonical_device(parameter_device)
        is_in_place = len(devices) == 1 and memory_device(devices[0]) == memory_device(owner)
        averages_buffers = averages(buffer_aggregation)
        storage = (
            Storage(devices, owner)
            if is_in_place
            else ReplicatedStorage(devices, owner, averages_buffers=averages_buffers)
        )
        reduction = ReduceOp.of(gradient_reduction)
        super().__init__(ReplicatedExtended(Replicas(devices), storage, reduction, between_graph=True))
