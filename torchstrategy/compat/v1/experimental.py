"""The names of `tf.compat.v1.distribute.experimental`."""

from torchstrategy._communication import CollectiveHints, CommunicationImplementation, CommunicationOptions
from torchstrategy.compat.v1._central_storage import CentralStorageStrategy

CollectiveCommunication = CommunicationImplementation
"""The older name."""

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
]

CentralStorageStrategy.__module__ = __name__
