"""Parameters on every device, as version 1 has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

from torchstrategy._communication.cross_device_ops import CrossDeviceOps
from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import DeviceLike
from torchstrategy._strategy import mirrored
from torchstrategy.compat.v1._strategy import Strategy


@final
class MirroredStrategy(Strategy):
    """What `torchstrategy.MirroredStrategy` is, with the methods of version 1.

    Args:
        devices: As there.
        cross_device_ops: As there.
        gradient_reduction: As there.
        buffer_aggregation: As there.

    Example:
        >>> strategy = torchstrategy.compat.v1.MirroredStrategy(["cpu", "cpu"])
        >>> strategy.reduce("sum", strategy.experimental_run(lambda: torch.ones(1) * 2))
        tensor([4.])

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/MirroredStrategy
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        gradient_reduction: ReduceOp | str = ReduceOp.MEAN,
        buffer_aggregation: Literal["mean", "only_first_replica"] = "mean",
    ) -> None:
        super().__init__(
            mirrored.MirroredStrategy(
                devices, cross_device_ops, gradient_reduction=gradient_reduction, buffer_aggregation=buffer_aggregation
            ).extended
        )
