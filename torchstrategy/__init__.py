"""Your PyTorch training step on one device or on several, with the result of one.

A strategy splits each batch among replicas, runs your step in each, and gives their
gradients the weights of their rows. It brings the API of `tf.distribute` to PyTorch,
and takes the place of `torch.nn.DataParallel`.

    import torch, torchstrategy

    strategy = torchstrategy.MirroredStrategy()  # (["cpu"] * 4) on a laptop
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())

    def train_step(inputs, targets):  # plain PyTorch
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for batch in strategy.experimental_distribute_dataset(loader):
        loss = strategy.run(train_step, args=batch)
    print(strategy.reduce("mean", loss, axis=None, weights=batch))

Which strategy:
    MirroredStrategy             all GPUs of one machine, each with copied parameters
    MultiWorkerMirroredStrategy  one process for each GPU, which torchrun starts
    OneDeviceStrategy            one device, to write and debug a script with
    CentralStorageStrategy       one copy of the parameters, on a device that you name
    DataParallel                 a module in place of torch.nn.DataParallel

What you call: `run`, `reduce`, `gather`, `count_rows`, `barrier`, `scope`,
`experimental_distribute_dataset`, `experimental_local_results`, `distribute_module` and
`distribute_optimizer` of a strategy; in the step `get_replica_context()`, which has
`all_reduce` and `all_gather`.

`torchstrategy.testing` tests all this without a GPU, and `python -m torchstrategy`
prints what your machine has. Names that TensorFlow 1 had are in
`torchstrategy.compat.v1`, and names that may change in `torchstrategy.experimental`.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from torchstrategy import cluster_resolver, compat, experimental, nn
from torchstrategy._base.context import (
    has_strategy,
    in_cross_replica_context,
    set_default,
)
from torchstrategy._base.distributed_values import DistributedValues, PerReplica
from torchstrategy._base.errors import (
    LossWeightWarning,
    ReplicaBufferWarning,
    SharedWriteWarning,
    UndistributedBatchWarning,
)
from torchstrategy._base.errors import did_you_mean as _did_you_mean
from torchstrategy._base.errors import explain_keywords as _explain_keywords
from torchstrategy._base.options import (
    ReduceOp,
    RunOptions,
    ValueContext,
    VariableAggregation,
    VariableSynchronization,
)
from torchstrategy._data.batch_types import register_batch_type
from torchstrategy._data.dataset import (
    DistributedDataset,
    DistributedIterator,
    OutOfRangeError,
)
from torchstrategy._data.options import InputContext, InputOptions, InputReplicationMode
from torchstrategy._data.steps import PerReplicaSpec, TensorSpec
from torchstrategy._group.workers import WorkerError
from torchstrategy._parity.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from torchstrategy._variables.variable import Variable
from torchstrategy.data_parallel import DataParallel, data_parallel
from torchstrategy.extended import StrategyExtended
from torchstrategy.multi_worker_mirrored import MultiWorkerMirroredStrategy
from torchstrategy.replica_context import LoneFrame, ReplicaContext, get_replica_context
from torchstrategy.strategies import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    experimental_set_strategy,
    get_strategy,
)
from torchstrategy.strategy import Strategy

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
    "LossWeightWarning",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "OutOfRangeError",
    "PerReplica",
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
    "WorkerError",
    "cluster_resolver",
    "compat",
    "data_parallel",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "nn",
    "register_batch_type",
]

__version__ = "0.2.0"  # the one place that says it

# The one fact that looks up: what `_base/context` answers where nothing was entered
# stands on a floor above it.
_default_strategy = DefaultStrategy()
set_default(_default_strategy, LoneFrame(_default_strategy).replica_context)

for _name in __all__:
    if getattr(globals()[_name], "__module__", "").startswith("torchstrategy."):
        globals()[_name].__module__ = "torchstrategy"
# Those that a run makes are left out: it makes many of them. So is a function that is
# the same object in `compat.v1`.
_LEFT_OUT = {
    "DistributedValues",
    "PerReplica",
    "ReplicaContext",
    "ValueContext",
    "experimental_set_strategy",
}
_called = [_name for _name in __all__ if _name not in _LEFT_OUT]
_explain_keywords(
    globals(), _called, methods_of=(Strategy, ReplicaContext, DistributedDataset)
)
del _name, _called, DefaultStrategy, LoneFrame, set_default

if TYPE_CHECKING:
    from torchstrategy import testing as testing
else:
    # Programs that do not test start sooner without `testing`. It comes when somebody
    # says `torchstrategy.testing`.

    def __getattr__(name: str) -> object:
        if name == "testing":
            return _import_module("torchstrategy.testing")
        meant = _did_you_mean(name, (*__all__, "testing"))
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}.{meant}",
            name=name,
            obj=_sys.modules[__name__],
        )

    def __dir__() -> list[str]:
        # What users need.
        return sorted({*__all__, "testing", "__version__", "__doc__"} - {"compat"})


del TYPE_CHECKING
