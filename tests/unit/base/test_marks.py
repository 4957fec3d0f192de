"""Whether a tensor was written, and whether two have the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from torchstrategy._base.marks import (
    Versions,
    checksum,
    checksum_of_piece,
    digest_of,
    mark_of,
    sum_of_bits,
    version_of,
)


class Wrapping(torch.Tensor):
    """A tensor that says nothing of what it wraps, and has no storage.

    It begins behind the beginning of a storage that it does not have.

    Its class would also give other answers about its size, if it were asked.
    """

    @staticmethod
    def __new__(cls) -> Wrapping:
        return torch.Tensor._make_wrapper_subclass(
            cls, (3000,), strides=(1,), storage_offset=100
        )

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> None:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return 10**9


def freed(size: int) -> torch.Tensor:
    """A part of some memory, of which so many bytes are left."""
    tensor = torch.ones(1 << 20)[1000:]
    tensor.untyped_storage().resize_(size)
    return tensor


WITHOUT_MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "freed": lambda: freed(0),
    "too small": lambda: freed(8000),
    "wrapping": Wrapping,
    "zeros of autograd": lambda: torch._efficientzerotensor((3000,))[1000:],
    "on no device": lambda: torch.ones(3000, device="meta")[1000:],
    "without elements": lambda: torch.ones(3, 0)[1:],
}


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(3000)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2)[::2]


def in_a_larger_one(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=1)[:, 1].view(2, 1500)


def test_versions_tell_which_tensors_were_written_and_how_often() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    versions = Versions(tensors)
    assert not versions.have_changed()
    tensors[1].add_(1)
    tensors[1].add_(1)
    assert (
        versions.have_changed()
        and versions.written() == [1]
        and versions.num_writes() == [0, 2, 0]
    )
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
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.int16,
    torch.bool,
    torch.uint8,
]


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


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.float8_e5m2],
)
def test_checksums_of_pieces_are_those_of_the_elements_by_turns(
    dtype: torch.dtype,
) -> None:
    in_piece = 4096 // dtype.itemsize
    tensor = torch.arange(2 * in_piece + 60).view(4, -1).to(dtype)
    first, second, last = tensor.view(-1).split(in_piece)
    expected = [checksum(first), checksum(second), checksum(last), checksum(first)]
    assert [checksum_of_piece(tensor, number) for number in range(4)] == expected
    trained = tensor.clone().requires_grad_(dtype.is_floating_point)
    assert [checksum_of_piece(trained, number) for number in range(4)] == expected
    elsewhere = torch.empty(tensor.shape[::-1], dtype=dtype).t().copy_(tensor)
    assert [checksum_of_piece(elsewhere, number) for number in range(4)] == expected


@pytest.mark.parametrize("make", [expanded, every_other, in_a_larger_one])
def test_pieces_are_read_whatever_the_layout(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = make(torch.arange(3000.0))
    pieces = [checksum_of_piece(tensor, number) for number in range(3)]
    assert pieces == [
        checksum_of_piece(tensor.contiguous(), number) for number in range(3)
    ]
    tensor[..., :1] += 1
    assert checksum_of_piece(tensor, 0) != pieces[0]


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_tensor_without_memory_is_not_read(kind: str) -> None:
    """Its address is not 0 where it begins behind the beginning of its storage.

    To read there ended the process.
    """
    tensor = WITHOUT_MEMORY[kind]()
    assert [checksum_of_piece(tensor, number) for number in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["freed", "too small"])
def test_a_tensor_whose_memory_was_taken_away_has_the_digest_of_nothing(
    kind: str,
) -> None:
    assert digest_of(WITHOUT_MEMORY[kind]()) == digest_of(torch.empty(0))


def test_a_tensor_that_wraps_others_has_the_fingerprints_of_these() -> None:
    def wrapping(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return TwoTensor(first[1000:], second[1000:])

    def looked_at(tensor: torch.Tensor) -> list[object]:
        return [
            digest_of(tensor),
            *(checksum_of_piece(tensor, number) for number in range(4)),
        ]

    ones, other = torch.ones(3000), torch.ones(3000)
    other[-1] = 2
    known = looked_at(wrapping(ones, ones.clone()))
    assert looked_at(wrapping(ones.clone(), ones.clone())) == known
    assert [
        a != b for a, b in zip(looked_at(wrapping(ones, other)), known, strict=True)
    ] == [True, *_OF_SECOND]


_OF_SECOND = [False, False, False, True]  # the last piece of the second tensor


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_the_digest_of_a_quantized_tensor_is_that_of_its_numbers() -> None:
    """To view it as bytes ended the process."""
    one, same, other = (
        torch.quantize_per_tensor(torch.full((9,), x), 0.1, 0, torch.quint8)
        for x in (1.0, 1.0, 2.0)
    )
    assert digest_of(one) == digest_of(same) != digest_of(other)


def test_memory_without_elements_has_a_fingerprint() -> None:
    empty = torch.empty(0, 3)
    assert checksum(empty) == 0 and int(sum_of_bits(empty)) == 0
    assert digest_of(empty) == digest_of(torch.from_numpy(np.empty(0)))
