"""The names of `tf.distribute.experimental`. They may change in any minor release."""

from torchstrategy._communication.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from torchstrategy._core.options import ValueContext
from torchstrategy._input.dataset import Optional
from torchstrategy._input.options import AutoShardPolicy
from torchstrategy._strategy.multi_worker_mirrored import MultiWorkerMirroredStrategy, PreemptionCheckpointHandler
from torchstrategy._strategy.strategies import CentralStorageStrategy

CollectiveCommunication = CommunicationImplementation
"""The older name."""

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "Optional",
    "PreemptionCheckpointHandler",
    "ValueContext",
]

_OPTIONS = (AutoShardPolicy, CollectiveHints, CommunicationImplementation, CommunicationOptions)
for _thing in (*_OPTIONS, Optional, PreemptionCheckpointHandler):
    _thing.__module__ = __name__  # their only home
del _OPTIONS, _thing
