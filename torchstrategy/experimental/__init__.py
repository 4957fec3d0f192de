"""The names of `tf.distribute.experimental`. They may change in any minor release."""

from torchstrategy._options import ValueContext
from torchstrategy._strategies import CentralStorageStrategy

__all__ = ["CentralStorageStrategy", "ValueContext"]
