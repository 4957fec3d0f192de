"""How values that are on several devices become one, and get back to all of them."""

from torchstrategy._cross_device_ops._all_reduce import HierarchicalCopyAllReduce, NcclAllReduce, default_for
from torchstrategy._cross_device_ops._cross_device_ops import CrossDeviceOps
from torchstrategy._cross_device_ops._reduction_to_one_device import ReductionToOneDevice

__all__ = ["CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice", "default_for"]
