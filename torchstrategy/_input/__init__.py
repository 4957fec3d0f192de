"""How a dataset is dealt out to the replicas."""

from torchstrategy._input._dataset import DistributedDataset, check_is_dataset
from torchstrategy._input._dealing import dealt, moved

__all__ = ["DistributedDataset", "check_is_dataset", "dealt", "moved"]
