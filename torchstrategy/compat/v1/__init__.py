"""The names of `tf.compat.v1.distribute`.

They are the names of `torchstrategy`, and strategies with the methods of version 1.

A strategy of version 1 is the same as that of the same name in `torchstrategy`, but for
what `compat.v1.Strategy` says; scopes, replicas, modules and datasets are the same.
"""

import sys

from torchstrategy import cluster_resolver
from torchstrategy._base.context import has_strategy, in_cross_replica_context
from torchstrategy._base.options import ReduceOp, RunOptions
from torchstrategy._data.dataset import InputIterator
from torchstrategy._data.options import InputContext, InputReplicationMode
from torchstrategy._parity.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from torchstrategy.compat.v1 import experimental
from torchstrategy.compat.v1._strategies import (
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    get_loss_reduction,
)
from torchstrategy.extended import StrategyExtended
from torchstrategy.replica_context import ReplicaContext, get_replica_context
from torchstrategy.strategies import experimental_set_strategy, get_strategy

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputIterator",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "distribute",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

# `tf.compat.v1.distribute.Strategy` is `torchstrategy.compat.v1.distribute.Strategy`,
# too.
distribute = sys.modules[__name__]

for _only_here in (
    InputIterator,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    get_loss_reduction,
):
    _only_here.__module__ = __name__
del _only_here, sys
