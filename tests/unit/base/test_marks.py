"""Whether a tensor was written, and whether two have the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from torchstrategy._base.marks import Versions, checksum, checksum_of_slice, digest_of, mark_of, sum_of_bits, version_of


def test_versions_tell_which_tensors_were_written_and_how_often() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    versions = Versions(tensors)
    assert not versions.have_changed()
    tensors[1].add_(1)
    tensors[1].add_(1)
    assert versions.have_changed() and versions.written() == [1] and versions.num_writes() == [0, 2, 0]
    versions.take()
    assert not versions.have_changed() and versions.written() == []


def test_an_inference_tensor_counts_no_writes_and_is_no_error() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert version_of(tensor) == 0
    assert Versions([tensor, torch.zeros(1).add_(1)]).num_writes() == [0, 0]


def test_a_mark_differs_where_a_tensor_was_written_or_exchanged() -> None:
    tensor, other = torch.zeros(2), torch.zeros(2)
    before = mark_of(tensor)
    assert mark_of(tensor) == before != mark_of(other)
    tensor.zero_()
    assert mark_of(tensor) != before
    assert mark_of(None) == mark_of(None)


FINGERPRINTS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum_of_bits": lambda tensor: int(sum_of_bits(tensor)),
    "checksum": checksum,
    "digest_of": digest_of,
}
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool, torch.uint8]


@pytest.mark.parametrize("name", FINGERPRINTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fingerprint_is_that_of_the_numbers(name: str, dtype: torch.dtype) -> None:
    fingerprint = FINGERPRINTS[name]
    numbers = torch.arange(24).remainder(2).view(4, 6)
    tensor = numbers.to(dtype)
    elsewhere = torch.empty(6, 4, dtype=dtype).t().copy_(tensor)
    assert fingerprint(tensor) == fingerprint(elsewhere)
    elsewhere[2, 3] = 1 - numbers[2, 3]
    assert fingerprint(tensor) != fingerprint(elsewhere)


def test_checksum_and_digest_see_the_order_and_the_sum_does_not() -> None:
    tensor = torch.arange(4.0)
    assert sum_of_bits(tensor) == sum_of_bits(tensor.flip(0))
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert digest_of(tensor) != digest_of(tensor.flip(0))


def test_a_sparse_gradient_has_the_sum_of_the_dense_one() -> None:
    indices = torch.tensor([[3, 1, 3]])
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sparse = torch.sparse_coo_tensor(indices, values, (9, 2), check_invariants=True)
    assert sum_of_bits(sparse) == sum_of_bits(sparse.to_dense())
    assert digest_of(sparse) == digest_of(sparse.clone()) != digest_of(sparse * 2)


def test_a_checksum_of_a_part_looks_at_no_more() -> None:
    tensor = torch.arange(10.0)
    assert checksum(tensor, most=8) == checksum(tensor[:2])
    assert checksum(tensor[2:], before=checksum(tensor[:2])) == checksum(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_checksum_of_a_slice_is_that_of_its_elements(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).view(3, 4).to(dtype)
    assert checksum_of_slice(tensor, 2, 7) == checksum(tensor.view(-1)[2:7])
    assert checksum_of_slice(tensor.clone().requires_grad_(dtype.is_floating_point), 2, 7) == checksum(
        tensor.view(-1)[2:7]
    )


def test_memory_without_elements_has_a_fingerprint() -> None:
    empty = torch.empty(0, 3)
    assert checksum(empty) == 0 and int(sum_of_bits(empty)) == 0
    assert digest_of(empty) == digest_of(torch.from_numpy(np.empty(0)))
