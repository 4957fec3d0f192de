"""One training step, run on one device, on all devices of a machine, or on simulated ones, by changing one line.

A *strategy* runs an ordinary PyTorch step in several *replicas* and makes of their work what one device would have
made of the whole batch. It brings the API of `tf.distribute.Strategy` to PyTorch, and replaces
`torch.nn.DataParallel`.

    replica           one copy of the step, with an id from 0 to n - 1, on a device
    cross-replica     speaking for all replicas at once: in a `scope()`, in a merge function
    per-replica       a value with one component for each replica, which may differ
    mirrored          a value with one component for each replica, known to be equal
    present, absent   a replica that got no rows sits the step out: it is absent
    fraction          a replica's rows, divided by the rows of the whole batch
    weight            what a replica's gradient is multiplied by: if gradients are averaged (`ReduceOp.MEAN`), its
                      fraction; if they are added up (`SUM`), 1; if its gradient is dropped, 0
    weighing          said of a replica whose weight is not 0
    accumulated       the `.grad` of an owner from before the run, and all gradients that were reduced since
    owner             a parameter of the user's own module, which the optimizer updates
    local             a replica's own: its copy of a module, its parameter, its gradient
    plain attribute   an attribute of a module that is no parameter, buffer, layer or table of torch's: `model.config`;
                      and what a program sets on a tensor: `weight.is_expert`
    trainer           an object of the user's that holds models or what trains them
    stepper           a learning-rate scheduler or a `GradScaler`, which counts steps
    merge function    what `get_replica_context().merge_call` calls, once for all replicas
    outsider          a trainable tensor that a step names and of which replicas have no copies
    lead              the first replica that is present: where one replica speaks for all of them, it does
    worker            one of several processes that train together, each with replicas of its own
    understudy        a worker without rows: its first replica runs the step on others' rows, and nothing of it counts
    lane              the replicas that take turns: those on one physical device, or all of them

At a *synchronization point* every replica brings something, and all go on together: `optimizer.step()`, a collective.

The rooms of the package, from the lowest floor up. A room imports only from lower floors, which stand before it here; a
file imports only files that stand before it in its room's docstring.

    _core             what every other room uses: types, errors, options, devices, values, where a thread is
    ----
    _communication    copies and sums between devices
    _binding          how a name in the step comes to mean the replica's own object
    cluster_resolver  who is in a cluster, and which process this is
    ----
    _execution        threads, turns, synchronization points, random streams
    _input            datasets: reading, splitting, prefetching
    _variables        tensors that replicas share and assign
    ----
    _training         the gradients of all replicas become one, and one update follows
    ----
    nn                losses and batch normalisation over the whole batch
    _replication      a model and its optimizers in several replicas
    ----
    _run              one replica in each of several workers, on the user's own objects
    ----
    _strategy         the public classes, and the story of a step: begin with `_strategy/replicated`
    ----
    _data_parallel    a module whose forward runs in replicas, in place of `torch.nn.DataParallel`
    experimental      names that may still change
    ----
    testing           simulated devices, and checks for tests of the user's own
    compat            the names of TensorFlow 1
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from torchstrategy import cluster_resolver, compat, experimental, nn
from torchstrategy._communication.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from torchstrategy._communication.workers import WorkerError
from torchstrategy._core.context import has_strategy, in_cross_replica_context, set_default
from torchstrategy._core.distributed_values import DistributedValues, PerReplica
from torchstrategy._core.errors import (
    LossWeightWarning,
    ReplicaBufferWarning,
    SharedWriteWarning,
    UndistributedBatchWarning,
)
from torchstrategy._core.options import ReduceOp, RunOptions, ValueContext, VariableAggregation, VariableSynchronization
from torchstrategy._data_parallel.data_parallel import DataParallel, data_parallel
from torchstrategy._input.batch_types import register_batch_type
from torchstrategy._input.dataset import DistributedDataset, DistributedIterator, OutOfRangeError
from torchstrategy._input.options import InputContext, InputOptions, InputReplicationMode
from torchstrategy._input.steps import PerReplicaSpec, TensorSpec
from torchstrategy._strategy.multi_worker_mirrored import MultiWorkerMirroredStrategy
from torchstrategy._strategy.replica_context import LoneFrame, ReplicaContext, get_replica_context
from torchstrategy._strategy.strategies import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    experimental_set_strategy,
    get_strategy,
)
from torchstrategy._strategy.strategy import Strategy
from torchstrategy._strategy.strategy_extended import StrategyExtended
from torchstrategy._variables.variable import Variable

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

__version__ = "0.1.0"  # the one place that says it

# The one fact that looks up: what `_core/context` answers where nothing was entered stands on a floor above it.
_default_strategy = DefaultStrategy()
set_default(_default_strategy, LoneFrame(_default_strategy).replica_context)

for _name in __all__:
    if getattr(globals()[_name], "__module__", "").startswith("torchstrategy."):
        globals()[_name].__module__ = "torchstrategy"
del _name, DefaultStrategy, LoneFrame, set_default

if TYPE_CHECKING:
    from torchstrategy import testing as testing
else:
    # Programs that do not test start sooner without `testing`. It comes when somebody says `torchstrategy.testing`.

    def __getattr__(name: str) -> object:
        if name == "testing":
            return _import_module("torchstrategy.testing")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=_sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted({*globals(), "testing"})


del TYPE_CHECKING
