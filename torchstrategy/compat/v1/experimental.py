"""The names of `tf.compat.v1.distribute.experimental`."""

from torchstrategy.compat.v1._central_storage import CentralStorageStrategy

__all__ = ["CentralStorageStrategy"]

CentralStorageStrategy.__module__ = __name__
