"""The names of `tf.compat.v1.distribute.experimental`."""

from torchstrategy._parity.options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from torchstrategy.compat.v1._strategies import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
)
from torchstrategy.experimental import CollectiveCommunication

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
]

CentralStorageStrategy.__module__ = MultiWorkerMirroredStrategy.__module__ = __name__
