"""Tensors whose memory a program takes away meanwhile, as `fully_shard` does.

It does while it does not use them.
"""

from __future__ import annotations

import ctypes

import torch

from torchstrategy._base.memory import (
    view_at,
)

SMALL, LARGE = 100, 1 << 18  # the library keeps a copy of one, and sums of the other


def test_reading_many_lengths_makes_few_classes() -> None:
    """There was one of 9 kB for each length.

    A program that has stopped Python's collector of cycles kept them all.
    """
    numbers = torch.arange(3000).to(torch.uint8)
    view_at(numbers.data_ptr(), 3000)
    before = len(ctypes.Array.__subclasses__())
    for length in range(3001):
        assert (
            bytes(view_at(numbers.data_ptr(), length))
            == numbers[:length].numpy().tobytes()
        )
    assert len(ctypes.Array.__subclasses__()) - before <= 12
