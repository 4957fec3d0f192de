"""Tensors whose memory a program takes away meanwhile, as `fully_shard` does.

It does while it does not use them.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from torchstrategy._base.memory import (
    has_lost_memory,
    memory_between_ends,
    own_storage,
    view_at,
)
from torchstrategy._base.writes import UncountedWrites

SMALL, LARGE = 100, 1 << 18  # the library keeps a copy of one, and sums of the other


def test_memory_is_there_until_it_is_taken_away() -> None:
    tensor = torch.ones(100)[10:]
    assert own_storage(tensor) is not None and not has_lost_memory(tensor)
    assert len(memory_between_ends(tensor)) == 360
    size = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(300)
    assert own_storage(tensor) is None and has_lost_memory(tensor)
    assert len(memory_between_ends(tensor)) == 0
    assert tensor.untyped_storage().nbytes() == 300  # nobody has made it larger
    tensor.untyped_storage().resize_(size)
    assert own_storage(tensor) is not None and not has_lost_memory(tensor)


def test_what_has_no_elements_has_lost_nothing() -> None:
    assert not has_lost_memory(torch.ones(3, 0)[1:])
    assert not has_lost_memory(torch.eye(3).to_sparse())


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_writes_are_found_until_memory_is_taken_away(size: int) -> None:
    """The next look read where the memory had been, which ended the process."""
    tensors = {i: torch.ones(size) for i in range(3)}
    writes = UncountedWrites(tensors, is_exact=True)
    tensors[1].untyped_storage().resize_(0)
    tensors[2].numpy()[3] = 2
    assert writes.take(set()) == ({2}, set())
    assert writes.take(set()) == (set(), set())
    tensors[0].numpy()[3] = 2
    assert writes.take(set()) == ({0}, set())


def test_a_tensor_without_memory_is_not_looked_at() -> None:
    tensor = torch.ones(1000)[10:]
    tensor.untyped_storage().resize_(0)
    assert UncountedWrites({0: tensor}, is_exact=True).take(set()) == (set(), set())
    assert tensor.untyped_storage().nbytes() == 0


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
