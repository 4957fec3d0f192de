"""What experimental_make_numpy_dataset returns: the rows of arrays, one by one."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset

from problems import shown
from torchstrategy._base.tree import map_leaves
from torchstrategy._data.arrays import ArrayDataset

quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)
DTYPES = [
    "bool",
    "uint8",
    "uint16",
    "int8",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


class Pair(NamedTuple):
    first: Any
    second: Any


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def plain(element: Any) -> Any:
    """An element with Python's numbers and lists in place of tensors."""
    return map_leaves(
        lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, element
    )


# Elements


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 1)], ids=shown)
def test_an_element_is_a_row_as_a_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    dataset = ArrayDataset(array)
    assert len(dataset) == 3
    for element, row in zip(dataset, array, strict=True):
        assert torch.equal(element, torch.tensor(row))
        assert element.dtype is getattr(torch, dtype)


def test_an_element_is_in_the_containers_that_the_arrays_are_in() -> None:
    ones, twos = np.ones(2), np.full((2, 1), 2)
    numpy_input = {"a": (ones, Pair(twos, ones)), "b": collections.OrderedDict(c=twos)}
    element = ArrayDataset(numpy_input)[1]
    assert plain(element) == {"a": (1, Pair([2], 1)), "b": {"c": [2]}}
    assert [type(element["a"]), type(element["a"][1]), type(element["b"])] == [
        tuple,
        Pair,
        collections.OrderedDict,
    ]
    assert list(element) == ["a", "b"]


def test_no_rows_are_a_dataset_without_elements() -> None:
    for dataset in (
        ArrayDataset(np.ones(0)),
        ArrayDataset({"x": np.ones((0, 3)), "y": np.array([], str)}),
    ):
        assert len(dataset) == 0
        assert list(dataset) == list(DataLoader(dataset, batch_size=2)) == []


def test_tensors_are_arrays_too() -> None:
    rows = torch.arange(6).reshape(3, 2)
    dataset = ArrayDataset((rows, np.arange(3)))
    assert plain(list(dataset)) == [([0, 1], 0), ([2, 3], 1), ([4, 5], 2)]


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bb"]),
        np.array([b"a", b"bb"]),
        np.array([None, {"any": "thing"}]),
        np.array(["2020-01-01", "2021-01-01"], "M8[D]"),
        np.array([(1, 2.0), (3, 4.0)], [("a", "i1"), ("b", "f4")]),
        np.array([1, 2], np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_the_rows_of_what_torch_has_no_dtype_for_are_the_items_themselves(
    array: np.ndarray,
) -> None:
    dataset = ArrayDataset((array, np.arange(2)))
    for (item, number), expected in zip(dataset, array, strict=True):
        assert item == expected and type(item) is type(expected)
        assert isinstance(number, torch.Tensor)


# Lists


def test_a_list_of_arrays_is_stacked_and_a_tuple_is_not() -> None:
    three = [np.arange(2.0), np.arange(2.0) + 2, np.arange(2.0) + 4]
    assert plain(list(ArrayDataset(three))) == [[0, 1], [2, 3], [4, 5]]
    assert plain(list(ArrayDataset(tuple(three)))) == [(0, 2, 4), (1, 3, 5)]


def test_a_list_is_stacked_wherever_it_is() -> None:
    element = ArrayDataset(
        {
            "x": [np.ones(3), np.zeros(3)],
            "y": ([[np.ones(1), np.ones(1)]] * 2, np.arange(2)),
        }
    )[1]
    assert plain(element) == {"x": [0, 0, 0], "y": ([[1], [1]], 1)}


@pytest.mark.parametrize(
    "stacked",
    [
        [np.array(["a"]), np.array(["bcd"])],
        [np.arange(2, dtype=np.int8), np.arange(2, dtype=np.int32)],
        [torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)],
        [np.array(1.0), np.array(2.0)],
    ],
    ids=["strings", "integers", "tensors", "numbers"],
)
def test_arrays_of_one_kind_are_stacked(stacked: list[Any]) -> None:
    assert plain(list(ArrayDataset(stacked))) == [array.tolist() for array in stacked]


@pytest.mark.parametrize(
    ("arrays", "first", "other"),
    [
        (
            [np.ones(3), np.ones(3), np.ones(2)],
            r"\[0\] is float64 of shape \(3,\)",
            r"\[2\] is float64 of shape \(2,\)",
        ),
        (
            [np.ones(3), np.arange(3)],
            r"\[0\] is float64 of shape \(3,\)",
            r"\[1\] is int64 of shape \(3,\)",
        ),
        (
            [np.arange(2), np.array(["a", "b"])],
            r"\[0\] is int64 of shape \(2,\)",
            r"\[1\] is <U1 of shape \(2,\)",
        ),
        (
            [np.ones(2), torch.ones(2)],
            r"\[0\] is float64 of shape \(2,\)",
            r"\[1\] is torch\.float32 of shape \(2,\)",
        ),
    ],
    ids=["shapes", "numbers", "strings", "tensors"],
)
def test_arrays_that_cannot_be_stacked_are_refused_by_name(
    arrays: list[Any], first: str, other: str
) -> None:
    sentence = (
        r"^numpy_input\['x'\] is a list, so the arrays in it are stacked; "
        rf"but numpy_input\['x'\]{first} and numpy_input\['x'\]{other}\. "
    )
    with pytest.raises(ValueError, match=sentence):
        ArrayDataset({"x": arrays})


# Indices


@quickly
@given(st.integers(1, 9), st.data())
def test_an_index_means_what_it_means_to_a_list(rows: int, data: st.DataObject) -> None:
    dataset, expected = (
        ArrayDataset((np.arange(rows), read_only(np.arange(rows)))),
        list(range(rows)),
    )
    index = data.draw(st.integers(-rows, rows - 1))
    assert plain(dataset[index]) == (expected[index], expected[index])
    assert (
        plain(dataset[np.int64(index)])
        == plain(dataset[torch.tensor(index)])
        == plain(dataset[index])
    )
    indices = data.draw(st.lists(st.integers(-rows, rows - 1)))
    assert plain(dataset.__getitems__(indices)) == [
        (expected[i], expected[i]) for i in indices
    ]


@pytest.mark.parametrize("index", [3, -4, 10**30])
def test_an_index_beyond_the_rows_is_refused(index: int) -> None:
    with pytest.raises(
        IndexError,
        match=rf"^Index {index} is out of range for a dataset of 3 elements\.$",
    ):
        ArrayDataset(np.arange(3))[index]


@pytest.mark.parametrize("index", [slice(2), 1.0, "x", None, [0, 1]], ids=shown)
def test_an_index_is_a_whole_number(index: Any) -> None:
    with pytest.raises(TypeError):
        ArrayDataset(np.arange(3))[index]


# Memory


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6.0)[1::2],
        np.frombuffer(bytearray(16), np.int32),
    ],
    ids=["contiguous", "transposed", "sliced", "buffer"],
)
def test_the_rows_of_an_array_are_not_copied(array: np.ndarray) -> None:
    dataset = ArrayDataset({"x": array})
    assert [row["x"].data_ptr() for row in dataset] == [
        array[i : i + 1].ctypes.data for i in range(len(array))
    ]
    array[0] = 99
    assert torch.all(dataset[0]["x"] == 99)


def test_the_rows_of_a_tensor_are_not_copied() -> None:
    rows = torch.arange(6).reshape(3, 2)
    assert [row.data_ptr() for row in ArrayDataset(rows)] == [
        row.data_ptr() for row in rows
    ]


UNSHAREABLE = {
    "read only": read_only(np.arange(6.0).reshape(3, 2)),
    "read only numbers": read_only(np.arange(3)),
    "broadcast": np.broadcast_to(np.float32(7), (3, 2)),
    "reversed": np.arange(6).reshape(3, 2)[::-1, ::-1],
    "other byte order": np.arange(6).reshape(3, 2).astype(">i4"),
    "packed field": np.array(
        [(1, 2.0), (3, 4.0), (5, 6.0)], [("a", "i1"), ("b", "f4")]
    )["b"],
}


@pytest.mark.parametrize("name", UNSHAREABLE)
def test_rows_that_torch_cannot_share_are_copied_when_they_are_read(name: str) -> None:
    array = UNSHAREABLE[name]
    before = array.tolist()
    dataset = ArrayDataset(array)
    assert plain(list(dataset)) == before
    assert plain(next(iter(DataLoader(dataset, batch_size=3)))) == before
    element = dataset[1]
    assert (
        element.dtype
        is torch.from_numpy(array.astype(array.dtype.newbyteorder("="))).dtype
    )
    element.zero_()
    assert array.tolist() == before


def test_an_array_that_is_larger_than_the_memory_is_read_row_by_row() -> None:
    dataset = ArrayDataset(np.broadcast_to(np.float32(7), (2**40, 2)))
    assert len(dataset) == 2**40
    assert plain([dataset[0], dataset[-1]]) == [[7, 7], [7, 7]]


# What has no rows


@pytest.mark.parametrize(
    ("numpy_input", "name", "kind"),
    [
        ([1.0, 2.0], r"numpy_input\[0\]", "a float"),
        ((np.ones(2), [[1, 2]]), r"numpy_input\[1\]\[0\]\[0\]", "an int"),
        ({"x": np.ones(2), "y": None}, r"numpy_input\['y'\]", "a NoneType"),
        (Pair(np.ones(2), "text"), r"numpy_input\.second", "a str"),
        ([], "numpy_input", "an empty list"),
        (3, "numpy_input", "an int"),
        (np.float32(3), "numpy_input", "a float32"),
        ([{"x": np.ones(2)}], r"numpy_input\[0\]", "a dict"),
    ],
    ids=shown,
)
def test_what_is_no_array_is_refused_by_name_with_what_to_write(
    numpy_input: Any, name: str, kind: str
) -> None:
    sentence = (
        rf"^{name} is {kind}, and has no rows\. .* Make one array of .*, as in "
        r"numpy\.array\(\[1\.0, 2\.0\]\)\.$"
    )
    with pytest.raises(TypeError, match=sentence):
        ArrayDataset(numpy_input)


def test_a_mask_is_refused_and_not_ignored() -> None:
    with pytest.raises(
        TypeError,
        match=r"^numpy_input\['x'\] is a masked array, and a tensor has no mask\.",
    ):
        ArrayDataset({"x": np.ma.array([1, 2], mask=[False, True])})


@pytest.mark.parametrize(
    "array", [np.array(3.0), torch.tensor(3.0), np.array("text")], ids=shown
)
def test_an_array_without_dimensions_is_refused_by_name(array: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^numpy_input\[1\] has no dimensions, and so no rows\. "
    ):
        ArrayDataset((np.ones(3), array))


@pytest.mark.parametrize("empty", [{}, (), ({}, ())], ids=shown)
def test_no_array_at_all_is_refused(empty: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^numpy_input has no array in it, and so no rows\. "
    ):
        ArrayDataset(empty)


@pytest.mark.parametrize(
    "other", [np.ones(3), np.ones((1, 4)), torch.ones(0), [np.ones(4)] * 5], ids=shown
)
def test_arrays_with_different_numbers_of_rows_are_refused_by_name(other: Any) -> None:
    sentence = (
        r"^The arrays have different numbers of rows: "
        rf"numpy_input\['x'\] has 4 and numpy_input\['y'\]\[1\] has {len(other)}\. "
    )
    with pytest.raises(ValueError, match=sentence):
        ArrayDataset({"x": np.ones(4), "y": (np.ones((4, 2)), other)})


# In a DataLoader


@quickly
@given(st.integers(0, 9), st.integers(1, 4))
def test_a_loader_batches_the_rows_in_order(rows: int, batch_size: int) -> None:
    arrays = {
        "x": np.random.default_rng(rows).normal(size=(rows, 2)),
        "s": np.array([str(i) for i in range(rows)]),
    }
    batches = list(DataLoader(ArrayDataset(arrays), batch_size=batch_size))
    assert [len(batch["x"]) for batch in batches] == [
        len(batch["s"]) for batch in batches
    ]
    assert (
        list(itertools.chain(*(batch["x"].tolist() for batch in batches)))
        == arrays["x"].tolist()
    )
    assert (
        list(itertools.chain(*(batch["s"] for batch in batches)))
        == arrays["s"].tolist()
    )


NESTED = {
    "x": np.arange(10.0).reshape(5, 2),
    "y": Pair(read_only(np.arange(5)), np.array(list("abcde"))),
}


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(),
    reason="forks a process, which this system cannot: run it on Linux or macOS",
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_read_what_the_main_process_reads() -> None:
    dataset = ArrayDataset(NESTED)
    loaded = DataLoader(
        dataset, batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    assert plain(list(loaded)) == plain(list(DataLoader(dataset, batch_size=2)))


def test_a_dataset_can_be_sent_to_a_worker_that_is_spawned() -> None:
    for numpy_input in (NESTED, np.arange(3), read_only(np.arange(3))):
        dataset = ArrayDataset(numpy_input)
        again = pickle.loads(pickle.dumps(dataset))
        assert len(again) == len(dataset)
        assert plain(list(again)) == plain(list(dataset))


def test_it_is_shuffled_and_divided_as_any_dataset_is() -> None:
    dataset = ArrayDataset(np.arange(8))
    assert sorted(
        plain(next(iter(DataLoader(dataset, batch_size=8, shuffle=True))))
    ) == list(range(8))
    assert plain(list(DataLoader(Subset(dataset, [5, 3, 1]), batch_size=2))) == [
        [5, 3],
        [1],
    ]
    assert plain(list(dataset + dataset)) == [*range(8), *range(8)]
