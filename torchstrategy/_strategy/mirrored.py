"""MirroredStrategy: parameters on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

from torchstrategy._communication.cross_device_ops.all_reduce import default_for
from torchstrategy._communication.cross_device_ops.cross_device_ops import CrossDeviceOps
from torchstrategy._communication.cross_device_ops.reduction_to_one_device import ReductionToOneDevice
from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import Device, DeviceLike
from torchstrategy._execution.replicas import Replicas
from torchstrategy._replication.replicated_storage import ReplicatedStorage
from torchstrategy._replication.storage import Storage
from torchstrategy._strategy.choices import averages, devices_of_replicas
from torchstrategy._strategy.replicated import ReplicatedExtended
from torchstrategy._strategy.strategy import Strategy


@final
class MirroredStrategy(Strategy):
    """Keeps parameters on the device of every replica, where each replica updates its own.

    The user's own modules are those of the first replica, and the user's own optimizer updates them. Each other replica
    has parameters, and an optimizer, in memory of its own. Whenever the user's optimizer takes a step, in a run or
    after it, theirs take the same on the same gradients, those of the whole batch; so all stay equal, bit by bit, and
    no parameter is sent. What is written on parameters by other ways, such as `load_state_dict`, is sent before the
    next run. So are the values that an optimizer which is none of torch's own has computed.

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
        ValueError: If a device is none, or one that this machine does not have; or if there is no device.
            Or if `cross_device_ops` cannot be used with these devices.
        TypeError: If a device, or the list of them, or `cross_device_ops` is of the wrong kind.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/MirroredStrategy
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        gradient_reduction: ReduceOp | str = ReduceOp.MEAN,
        buffer_aggregation: Literal["mean", "only_first_replica"] = "mean",
    ) -> None:
        on = devices_of_replicas("devices", devices)
        averages_buffers = averages(buffer_aggregation)
        ops = default_for(on) if cross_device_ops is None else _checked(cross_device_ops, on)
        reduction = ReduceOp.of(gradient_reduction)
        if len(on) == 1:
            super().__init__(ReplicatedExtended(Replicas(on), Storage(on, on[0]), reduction))
            return
        # Where nobody has chosen and there is no NCCL, gradients are added up as they come, and the sums are sent.
        is_all_reduced = cross_device_ops is not None or not isinstance(ops, ReductionToOneDevice)
        storage = ReplicatedStorage(
            on,
            on[0],
            averages_buffers=averages_buffers,
            is_mirrored=True,
            all_reduce=ops._weighted_sums if is_all_reduced else None,
        )
        super().__init__(ReplicatedExtended(Replicas(on), storage, reduction, cross_device_ops=ops))


def _checked(ops: CrossDeviceOps, devices: Sequence[Device]) -> CrossDeviceOps:
    if not isinstance(ops, CrossDeviceOps):
        raise TypeError(f"cross_device_ops is a torchstrategy.CrossDeviceOps or None; got {ops!r}.")
    ops._check_devices(devices)
    return ops
