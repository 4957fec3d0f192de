"""The same step in plain PyTorch and in replicas, compared; and what made them differ."""

from torchstrategy.testing._same_as_plain.same_as_plain import assert_same_as_plain

__all__ = ["assert_same_as_plain"]
