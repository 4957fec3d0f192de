"""The names of `tf.distribute.experimental`. They may change in any minor release."""

from torchstrategy._input import Optional
from torchstrategy._options import ValueContext
from torchstrategy._strategies import CentralStorageStrategy

__all__ = ["CentralStorageStrategy", "Optional", "ValueContext"]

Optional.__module__ = __name__  # its only home
