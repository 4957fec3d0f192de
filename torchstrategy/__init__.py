"""One training step, run on one device, on all devices of a machine, or on simulated ones, by changing one line.

A *strategy* runs an ordinary PyTorch step in several *replicas* and makes of their work what one device would have
made of the whole batch. It brings the API of `tf.distribute.Strategy` to PyTorch, and replaces
`torch.nn.DataParallel`.

    replica           one copy of the step, with an id from 0 to n - 1, on a device
    cross-replica     speaking for all replicas at once: in a `scope()`, in a merge function
    per-replica       a value with one component for each replica, which may differ
    mirrored          a value with one component for each replica, known to be equal
    present, absent   a replica that was dealt no rows sits the step out: it is absent
    share             how much a replica's gradient counts: its rows, of all the rows of the batch
    owner             a parameter of the user's own module, which the optimizer updates
    local             a replica's own: its copy of a module, its parameter, its gradient
    trainer           an object of the user's that holds models or what trains them
    meeting           where every replica brings something and all go on together

To read the package, begin with `_strategy_base` (what a user calls) and `_extended` (the parts put together); then
`_values`, `_context`, `_team` (whose turn it is), `_storage` (who owns a parameter), `_mirrors`, `_gradients`,
`_stand_ins`, `_trainers`.
"""

from torchstrategy import cluster_resolver, compat, experimental, nn
from torchstrategy._context import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    set_default,
)
from torchstrategy._cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from torchstrategy._data_parallel import DataParallel
from torchstrategy._input import (
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
    OutOfRangeError,
    PerReplicaSpec,
    TensorSpec,
    register_batch_type,
)
from torchstrategy._options import (
    ReduceOp,
    RunOptions,
    ValueContext,
    VariableAggregation,
    VariableSynchronization,
)
from torchstrategy._replica_context import ALONE, ReplicaContext, running_context
from torchstrategy._strategies import CentralStorageStrategy, DefaultStrategy, MirroredStrategy, OneDeviceStrategy
from torchstrategy._strategy import Strategy
from torchstrategy._strategy_extended import StrategyExtended
from torchstrategy._values import DistributedValues
from torchstrategy._variables import Variable
from torchstrategy._warnings import ReplicaBufferWarning, SharedWriteWarning, UndistributedBatchWarning

__all__ = [
    "CentralStorageStrategy",
    "CrossDeviceOps",
    "DataParallel",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "OutOfRangeError",
    "PerReplicaSpec",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaBufferWarning",
    "ReplicaContext",
    "RunOptions",
    "SharedWriteWarning",
    "Strategy",
    "StrategyExtended",
    "TensorSpec",
    "UndistributedBatchWarning",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "compat",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "nn",
    "register_batch_type",
]

__version__ = "0.1.0"

# The one fact that looks up: what `_context` answers where nothing was entered stands on a floor above it.
_default_strategy = DefaultStrategy()
set_default(_default_strategy, running_context(_default_strategy, ALONE))

for _name in __all__:
    if getattr(globals()[_name], "__module__", "").startswith("torchstrategy._"):
        globals()[_name].__module__ = "torchstrategy"
del _name, ALONE, DefaultStrategy, running_context, set_default
