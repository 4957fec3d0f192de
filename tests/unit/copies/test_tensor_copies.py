"""Copies of tensors share memory where the tensors do."""

from __future__ import annotations

import pytest
import torch

from torchstrategy._copies.tensor_copies import copy_tensors, group_by_memory

CPU = torch.device("cpu", 0)


def test_copies_of_views_see_each_others_writes() -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = [whole, whole[1], whole.T[2:], torch.zeros(2)]
    copies = copy_tensors(tensors, CPU)
    for tensor, copied in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copied)
        assert tensor.stride() == copied.stride()
    copies[1].fill_(-1)
    assert copies[0][1].tolist() == [-1] * 4
    assert copies[2][0].tolist() == [2, -1, 10]
    assert whole[1].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.float64, torch.complex64, torch.bool]
)
def test_views_of_another_dtype_share_the_bytes(dtype: torch.dtype) -> None:
    whole = torch.arange(37, dtype=torch.uint8).remainder(2)
    part = whole[16:32]
    copies = copy_tensors([part, part.view(dtype)], CPU)
    assert torch.equal(copies[1], part.view(dtype))
    copies[0].zero_()
    assert not copies[1].any()


def test_parts_that_do_not_overlap_have_memory_of_their_own() -> None:
    """Two rows of a large table are not copied with all the rows between them."""
    table = torch.zeros(1000, 3)
    assert group_by_memory([table[0], table[999], table[0, 1:]]) == [[0, 2]]
    first, last, part = copy_tensors([table[0], table[999], table[0, 1:]], CPU)
    assert last.untyped_storage().nbytes() == 12
    assert first.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.cfloat).conj(),
    ],
)
def test_what_has_no_plain_memory_is_copied_by_itself(tensor: torch.Tensor) -> None:
    assert not group_by_memory([tensor, tensor])
    copied, again = copy_tensors([tensor, tensor], CPU)
    assert copied is not again
    assert torch.equal(copied.to_dense(), tensor.to_dense())
