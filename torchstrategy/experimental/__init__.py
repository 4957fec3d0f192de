"""The names of `tf.distribute.experimental`. They may change in any minor release."""

from torchstrategy._communication.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from torchstrategy._core.options import ValueContext
from torchstrategy._input.dataset import Optional
from torchstrategy._strategy.strategies import CentralStorageStrategy

CollectiveCommunication = CommunicationImplementation
"""The older name."""

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Optional",
    "ValueContext",
]

for _thing in (CollectiveHints, CommunicationImplementation, CommunicationOptions, Optional):
    _thing.__module__ = __name__  # their only home
del _thing
