"""Everything on one device."""

from __future__ import annotations

from typing import final

from torchstrategy._core.devices import canonical_device
from torchstrategy._core.types import DeviceLike
from torchstrategy._replication.storage import Storage
from torchstrategy._strategy.single import SingleExtended
from torchstrategy._strategy.strategy import Strategy


@final
class OneDeviceStrategy(Strategy):
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

    def __init__(self, device: DeviceLike) -> None:
        one = canonical_device(device)
        super().__init__(SingleExtended(one, Storage([one], one)))
