"""Everything on one device, as version 1 has it."""

from __future__ import annotations

from typing import final

from torchstrategy._core.types import DeviceLike
from torchstrategy._strategy import one_device
from torchstrategy.compat.v1._strategy import Strategy


@final
class OneDeviceStrategy(Strategy):
    """What `torchstrategy.OneDeviceStrategy` is, with the methods of version 1.

    Args:
        device: As there.

    Example:
        >>> strategy = torchstrategy.compat.v1.OneDeviceStrategy("cpu")
        >>> strategy.run(lambda: torchstrategy.get_strategy() is strategy)
        True

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/OneDeviceStrategy
    """

    def __init__(self, device: DeviceLike) -> None:
        super().__init__(one_device.OneDeviceStrategy(device).extended)
