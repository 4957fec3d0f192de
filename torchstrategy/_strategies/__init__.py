"""The choices: each strategy is a constructor that picks the parts."""

from torchstrategy._strategies._central_storage import CentralStorageStrategy
from torchstrategy._strategies._default import DefaultStrategy
from torchstrategy._strategies._mirrored import MirroredStrategy
from torchstrategy._strategies._one_device import OneDeviceStrategy

__all__ = ["CentralStorageStrategy", "DefaultStrategy", "MirroredStrategy", "OneDeviceStrategy"]
