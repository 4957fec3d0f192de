"""How a dataset is dealt out to the replicas.

To read it, begin with `_dataset`; then `_dealing` (which rows go where), `_kinds` (what rows are), `_reading` and
`_ahead` (when and on which thread), `_transfer` (which stream), `_source` (where a pass stands).
"""

from torchstrategy._input._arrays import ArrayDataset
from torchstrategy._input._dataset import DatasetFn, DistributedDataset, distributed, distributed_from_function
from torchstrategy._input._input_iterator import InputIterator, from_input_fn, next_of
from torchstrategy._input._iterator import DistributedIterator, Optional, OutOfRangeError
from torchstrategy._input._kinds import moved
from torchstrategy._input._options import InputContext, InputOptions, InputReplicationMode
from torchstrategy._input._registration import register_batch_type
from torchstrategy._input._spec import PerReplicaSpec, TensorSpec

__all__ = [
    "ArrayDataset",
    "DatasetFn",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputIterator",
    "InputOptions",
    "InputReplicationMode",
    "Optional",
    "OutOfRangeError",
    "PerReplicaSpec",
    "TensorSpec",
    "distributed",
    "distributed_from_function",
    "from_input_fn",
    "moved",
    "next_of",
    "register_batch_type",
]
