"""Parameters on one device, replicas on others, as version 1 has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import DeviceLike
from torchstrategy._strategy import central_storage
from torchstrategy.compat.v1._strategy import Strategy


@final
class CentralStorageStrategy(Strategy):
    """What `torchstrategy.CentralStorageStrategy` is, with the methods of version 1.

    Args:
        compute_devices: As there.
        parameter_device: As there.
        gradient_reduction: As there.
        buffer_aggregation: As there.

    Example:
        >>> strategy = torchstrategy.compat.v1.experimental.CentralStorageStrategy(["cpu", "cpu"])
        >>> strategy.reduce("sum", strategy.experimental_run(lambda: torch.ones(1) * 2))
        tensor([4.])

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/experimental/CentralStorageStrategy
    """

    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike = None,
        *,
        gradient_reduction: ReduceOp | str = ReduceOp.MEAN,
        buffer_aggregation: Literal["mean", "only_first_replica"] = "mean",
    ) -> None:
        super().__init__(
            central_storage.CentralStorageStrategy(
                compute_devices,
                parameter_device,
                gradient_reduction=gradient_reduction,
                buffer_aggregation=buffer_aggregation,
            ).extended
        )
