"""The names of `tf.distribute.experimental`. They may change in any minor release."""

from torchstrategy._base.errors import explain_keywords as _explain_keywords
from torchstrategy._base.options import ValueContext
from torchstrategy._data.dataset import Optional
from torchstrategy._data.options import AutoShardPolicy
from torchstrategy._parity.options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from torchstrategy.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy,
    PreemptionCheckpointHandler,
)
from torchstrategy.strategies import CentralStorageStrategy

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

for _name in __all__:
    globals()[
        _name
        # Names that are also in `torchstrategy` get that module in the end.
    ].__module__ = __name__
# A run makes contexts, many of them, and `CollectiveHints` is the same object in
# `compat.v1`.
_called = [
    _name for _name in __all__ if _name not in ("CollectiveHints", "ValueContext")
]
_explain_keywords(globals(), _called)
del _name, _called
