"""The names of older versions of `tf.distribute`, for programs that use them."""

from torchstrategy.compat import v1

__all__ = ["v1"]
