"""experimental_distribute_dataset: which rows of a batch go to which replica."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from problems import shown
from topologies import SIMULATED, TOPOLOGIES, central
from torchstrategy import (
    DistributedDataset,
    DistributedValues,
    RunOptions,
    Strategy,
    get_replica_context,
    get_strategy,
)

DEFAULT = get_strategy()
CHOSEN = [name for name in TOPOLOGIES if name != "default"]
ALONE = ["one_device", "central_1", "copies_1"]
STRATEGIES = {replicas: central(replicas) for replicas in range(1, 5)}
quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)


class Pair(NamedTuple):
    first: Any
    second: Any


class Squares(Dataset):
    """A map-style dataset of single elements."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * index)


class Counted(IterableDataset):
    """0 to n - 1, and how many were asked for."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for k in range(self.n):
            self.read += 1
            yield k


def batches(strategy: Strategy, dataset: Any) -> list[Any]:
    return list(strategy.experimental_distribute_dataset(dataset))


def batch(strategy: Strategy, source: Any) -> Any:
    """What becomes of a dataset's only batch."""
    (only,) = batches(strategy, [source])
    return only


def pieces(value: Any) -> list[Any]:
    """The components as lists."""
    assert isinstance(value, DistributedValues)
    return [component.tolist() for component in value.values]


# Which rows go where

TABLE: dict[int, dict[int, list[int]]] = {
    8: {2: [4, 4], 3: [3, 3, 2], 4: [2, 2, 2, 2]},
    4: {2: [2, 2], 3: [2, 2, 0], 4: [1, 1, 1, 1]},
    3: {2: [2, 1], 3: [1, 1, 1], 4: [1, 1, 1, 0]},
    2: {2: [1, 1], 3: [1, 1, 0], 4: [1, 1, 0, 0]},
    1: {2: [1, 0], 3: [1, 0, 0], 4: [1, 0, 0, 0]},
    6: {2: [3, 3], 3: [2, 2, 2], 4: [2, 2, 2, 0]},
    7: {2: [4, 3], 3: [3, 3, 1], 4: [2, 2, 2, 1]},
    5: {2: [3, 2], 3: [2, 2, 1], 4: [2, 2, 1, 0]},
    0: {2: [0, 0], 3: [0, 0, 0], 4: [0, 0, 0, 0]},
}


@pytest.mark.parametrize("rows", TABLE)
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_batch_is_dealt_as_tensorflow_deals_it(rows: int, replicas: int) -> None:
    value = batch(STRATEGIES[replicas], torch.arange(rows))
    assert [len(component) for component in value.values] == TABLE[rows][replicas]
    assert list(itertools.chain(*pieces(value))) == list(range(rows))


@quickly
@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 9), max_size=4),
    st.lists(st.integers(0, 3), max_size=2),
)
def test_each_batch_is_one_step_and_keeps_its_rows(
    replicas: int, rows: list[int], shape: list[int]
) -> None:
    strategy = STRATEGIES[replicas]
    source = [torch.randn(b, *shape) for b in rows]
    steps = batches(strategy, source)
    assert len(steps) == len(rows)
    for whole, step in zip(source, steps, strict=True):
        components = strategy.experimental_local_results(step)
        assert len(components) == replicas
        assert torch.equal(
            torch.cat([component.cpu() for component in components]), whole
        )
        size = -(-len(whole) // replicas)
        assert all(
            len(component) == size
            for component in components[: len(whole) // size if size else 0]
        )


@quickly
@given(st.integers(2, 4), st.integers(0, 9))
def test_the_record_of_rows_says_how_many_each_replica_got(
    replicas: int, rows: int
) -> None:
    value = batch(
        STRATEGIES[replicas], {"x": torch.zeros(rows, 2), "y": torch.zeros(rows)}
    )
    for leaf in value.values():
        assert leaf.rows == tuple(len(component) for component in leaf.values)


def test_partial_batches_are_dealt_by_their_own_size() -> None:
    assert [
        pieces(step)
        for step in batches(STRATEGIES[2], DataLoader(range(14), batch_size=8))
    ] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10], [11, 12, 13]],
    ]
    assert [
        pieces(step)
        for step in batches(STRATEGIES[2], DataLoader(range(9), batch_size=4))
    ][-1] == [[8], []]


def test_rows_that_the_loader_drops_are_not_dealt() -> None:
    assert [
        pieces(step)
        for step in batches(
            STRATEGIES[2], DataLoader(range(8), batch_size=3, drop_last=True)
        )
    ] == [
        [[0, 1], [2]],
        [[3, 4], [5]],
    ]


def test_batches_of_changing_size_are_each_dealt_on_their_own() -> None:
    source = [torch.arange(b) for b in (3, 1, 5, 4)]
    assert [
        [len(piece) for piece in pieces(step)]
        for step in batches(STRATEGIES[2], source)
    ] == [
        [2, 1],
        [1, 0],
        [3, 2],
        [2, 2],
    ]


def test_rows_are_along_the_outermost_dimension() -> None:
    assert pieces(batch(STRATEGIES[2], torch.arange(6).reshape(3, 2))) == [
        [[0, 1], [2, 3]],
        [[4, 5]],
    ]


def test_an_empty_piece_keeps_shape_and_dtype() -> None:
    value = batch(STRATEGIES[2], torch.ones(1, 3, 2, dtype=torch.float16))
    assert value.values[1].shape == (0, 3, 2)
    assert value.values[1].dtype is torch.float16


def test_a_dataset_without_batches_has_no_steps(strategy: Strategy) -> None:
    assert batches(strategy, []) == []
    assert batches(strategy, DataLoader(range(0), batch_size=2)) == []


# Nested batches


def test_containers_stay_as_the_loader_makes_them_with_a_value_at_each_leaf(
    several: Strategy,
) -> None:
    rows = torch.arange(5)
    source = {
        "x": rows,
        "rest": [(rows * 2,), Pair(rows * 3, collections.OrderedDict(z=rows * 4))],
    }
    value = batch(several, source)
    assert type(value) is dict
    assert type(value["rest"]) is list
    assert type(value["rest"][0]) is tuple
    assert type(value["rest"][1]) is Pair
    assert type(value["rest"][1].second) is collections.OrderedDict
    leaves = [
        value["x"],
        value["rest"][0][0],
        value["rest"][1].first,
        value["rest"][1].second["z"],
    ]
    for factor, leaf in enumerate(leaves, start=1):
        assert list(itertools.chain(*pieces(leaf))) == [
            factor * row for row in range(5)
        ]


def test_what_a_loader_collates_is_dealt(several: Strategy) -> None:
    rows = [{"x": torch.tensor([float(k)]), "y": k} for k in range(6)]
    steps = batches(several, DataLoader(rows, batch_size=4))
    assert [list(itertools.chain(*pieces(step["y"]))) for step in steps] == [
        [0, 1, 2, 3],
        [4, 5],
    ]
    assert [list(itertools.chain(*pieces(step["x"]))) for step in steps] == [
        [[0], [1], [2], [3]],
        [[4], [5]],
    ]


@pytest.mark.parametrize("topology", ALONE)
def test_one_replica_gets_plain_batches_in_the_loaders_containers(
    topology: str,
) -> None:
    source = {"x": torch.arange(3), "n": [2, "text", torch.tensor(1.0)]}
    value = batch(TOPOLOGIES[topology](), source)
    assert torch.equal(value["x"].cpu(), source["x"])
    assert value["n"][:2] == [2, "text"]


def test_arrays_are_dealt_as_tensors() -> None:
    value = batch(STRATEGIES[2], np.arange(6.0).reshape(3, 2))
    assert pieces(value) == [[[0, 1], [2, 3]], [[4, 5]]]
    assert all(isinstance(component, torch.Tensor) for component in value.values)
    assert value.values[0].dtype is torch.float64


WHOLE = [3, 2.5, 1j, True, None, "text", b"bytes", np.float32(2), np.array(3)]
# Where each replica has a tensor of its own: tests/simulated/test_arriving.py.
if not SIMULATED:
    WHOLE += [torch.tensor(3.0)]


@pytest.mark.parametrize("scalar", WHOLE, ids=shown)
def test_what_has_no_rows_is_given_whole_to_every_replica(scalar: Any) -> None:
    value = batch(STRATEGIES[3], {"x": torch.arange(3), "s": scalar})
    assert value["s"] is scalar
    received = STRATEGIES[3].run(lambda b: b["s"] is scalar, args=(value,))
    assert received is True


def test_old_batches_stay_as_they_are_while_one_iterates_on() -> None:
    steps = iter(
        STRATEGIES[2].experimental_distribute_dataset(
            DataLoader(range(6), batch_size=2)
        )
    )
    kept = [next(steps), next(steps), next(steps)]
    assert [pieces(value) for value in kept] == [[[0], [1]], [[2], [3]], [[4], [5]]]


@quickly
@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 3))
def test_what_was_dealt_can_be_gathered_again(
    replicas: int, rows: int, leaves: int
) -> None:
    strategy = STRATEGIES[replicas]
    # A list of them may be one of rows.
    source = tuple(torch.randn(rows, 2) for _ in range(leaves))
    value = batch(strategy, source)
    for whole, gathered in zip(source, strategy.gather(value, axis=0), strict=True):
        assert torch.equal(gathered.cpu(), whole)
    again = strategy.gather(
        strategy.run(
            lambda b: [x * 1 for x in b],
            args=(value,),
            options=RunOptions(run_empty_replicas=True),
        ),
        axis=0,
    )
    assert all(
        torch.equal(gathered.cpu(), whole)
        for gathered, whole in zip(again, source, strict=True)
    )


# What cannot be dealt


@pytest.mark.parametrize(
    "mask",
    [torch.ones(1), torch.ones(0), torch.ones(3), np.ones(5)],
    ids=lambda m: str(m.shape),
)
def test_no_number_of_rows_is_stretched_to_another(mask: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"batch\[0\] has 4 and batch\[1\] has {len(mask)}\."
    ):
        batch(STRATEGIES[2], (torch.ones(4), mask))


@pytest.mark.parametrize("topology", ALONE)
def test_one_replica_needs_no_agreement(topology: str) -> None:
    value = batch(TOPOLOGIES[topology](), (torch.ones(4), torch.ones(6)))
    assert [len(leaf) for leaf in value] == [4, 6]


@pytest.mark.parametrize(
    "single", [torch.tensor(1.0), 3, "text", (1, torch.tensor(2)), {}], ids=shown
)
def test_an_element_without_rows_is_refused_with_how_to_batch(single: Any) -> None:
    sentence = (
        r"^An element of the dataset has no rows to distribute to 2 replicas: it is "
        r"not batched\. Batch it with "
    )
    with pytest.raises(ValueError, match=sentence):
        batch(STRATEGIES[2], single)


@pytest.mark.parametrize("topology", ALONE)
def test_one_replica_takes_unbatched_elements(topology: str) -> None:
    assert [
        int(element)
        for element in batches(
            TOPOLOGIES[topology](), [torch.tensor(1), torch.tensor(2)]
        )
    ] == [1, 2]


@pytest.mark.parametrize(
    "array",
    [np.array(["a", "b"]), np.array([None, {}]), np.array(["2020"] * 2, "M8[D]")],
    ids=shown,
)
def test_an_array_that_torch_has_no_dtype_for_stays_one(array: Any) -> None:
    value = batch(STRATEGIES[2], {"x": torch.ones(2), "s": array})["s"]
    assert [list(piece) for piece in value.values] == [list(array[:1]), list(array[1:])]
    assert all(piece.dtype == array.dtype for piece in value.values)


@pytest.mark.parametrize(
    "junk", [3, None, 2.5, object(), "text", b"bytes", len], ids=shown
)
@pytest.mark.parametrize("topology", ["one_device", "central_1", "central_2"])
def test_what_is_no_dataset_is_refused_at_once(topology: str, junk: Any) -> None:
    sentence = (
        r"^A dataset to distribute is a torch\.utils\.data\.DataLoader, or another "
        r"iterable of batches; got an? "
    )
    with pytest.raises(TypeError, match=sentence):
        TOPOLOGIES[topology]().experimental_distribute_dataset(junk)


@pytest.mark.parametrize(
    "dataset",
    [Squares(), TensorDataset(torch.arange(4))],
    ids=lambda d: type(d).__name__,
)
def test_a_map_style_dataset_is_refused_at_once_with_how_to_batch(
    several: Strategy, dataset: Any
) -> None:
    n, name = several.num_replicas_in_sync, type(dataset).__name__
    sentence = (
        rf"^{name} yields single elements, which cannot be distributed to {n} "
        r"replicas\. Batch it: "
    )
    with pytest.raises(ValueError, match=sentence):
        several.experimental_distribute_dataset(dataset)


@pytest.mark.parametrize("topology", ALONE)
def test_one_replica_is_dealt_a_map_style_dataset_by_element(topology: str) -> None:
    dataset = TOPOLOGIES[topology]().experimental_distribute_dataset(Squares())
    assert (
        [int(element) for element in dataset]
        == [int(element) for element in dataset]
        == [0, 1, 4, 9, 16]
    )
    assert len(dataset) == 5


@pytest.mark.parametrize("options", [3, {}, "options"], ids=shown)
def test_options_are_refused_and_none_are_not(strategy: Strategy, options: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^options is a torchstrategy\.InputOptions; got "
    ):
        strategy.experimental_distribute_dataset([torch.ones(2)], options)
    assert (
        len(
            list(
                strategy.experimental_distribute_dataset([torch.ones(2)], options=None)
            )
        )
        == 1
    )


# The distributed dataset itself


@pytest.mark.parametrize("topology", CHOSEN)
def test_it_is_a_distributed_dataset_and_no_dataset(topology: str) -> None:
    dataset = TOPOLOGIES[topology]().experimental_distribute_dataset([torch.ones(2)])
    assert isinstance(dataset, DistributedDataset)
    assert not isinstance(dataset, Dataset)
    assert not hasattr(dataset, "map")


@pytest.mark.parametrize(
    "dataset", [[torch.ones(2)], 3, None, "text", Squares(), object()], ids=shown
)
def test_the_default_strategy_returns_the_very_object(dataset: Any) -> None:
    assert DEFAULT.experimental_distribute_dataset(dataset) is dataset


def test_each_iteration_starts_afresh(several: Strategy) -> None:
    dataset = several.experimental_distribute_dataset(
        DataLoader(range(5), batch_size=4)
    )
    whole = [[0, 1, 2, 3], [4]]
    for _ in range(2):
        assert [list(itertools.chain(*pieces(step))) for step in dataset] == whole


def test_each_iteration_is_shuffled_as_the_loader_shuffles() -> None:
    loader = DataLoader(range(64), batch_size=64, shuffle=True)
    dataset = STRATEGIES[2].experimental_distribute_dataset(loader)
    torch.manual_seed(3)
    expected = [next(iter(loader)).tolist() for _ in range(2)]
    torch.manual_seed(3)
    dealt_out = [list(itertools.chain(*pieces(next(iter(dataset))))) for _ in range(2)]
    assert dealt_out == expected
    assert expected[0] != expected[1]


def test_two_iterators_do_not_disturb_each_other() -> None:
    dataset = STRATEGIES[2].experimental_distribute_dataset(
        DataLoader(range(6), batch_size=2)
    )
    first, second = iter(dataset), iter(dataset)
    assert pieces(next(first)) == [[0], [1]]
    assert pieces(next(first)) == [[2], [3]]
    assert pieces(next(second)) == [[0], [1]]
    assert iter(first) is first


def test_an_iterator_that_has_ended_stays_ended() -> None:
    steps = iter(STRATEGIES[2].experimental_distribute_dataset([torch.ones(2)]))
    next(steps)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(steps)


@pytest.mark.parametrize("topology", CHOSEN)
def test_nothing_is_read_before_it_is_asked_for(topology: str) -> None:
    source = Counted(100)
    dataset = TOPOLOGIES[topology]().experimental_distribute_dataset(
        DataLoader(source, batch_size=2)
    )
    assert source.read == 0
    steps = iter(dataset)
    assert source.read == 0
    next(steps)
    assert source.read == 2
    next(steps)
    assert source.read == 4


def test_a_dataset_may_have_no_end() -> None:
    steps = STRATEGIES[2].experimental_distribute_dataset(
        torch.full((2,), k) for k in itertools.count()
    )
    assert [pieces(step) for step in itertools.islice(steps, 3)] == [
        [[k], [k]] for k in range(3)
    ]


@pytest.mark.parametrize("topology", CHOSEN)
def test_its_length_is_the_sources_where_it_has_one(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    assert (
        len(
            strategy.experimental_distribute_dataset(DataLoader(range(9), batch_size=4))
        )
        == 3
    )
    assert len(strategy.experimental_distribute_dataset([torch.ones(2)] * 5)) == 5
    for endless in (
        DataLoader(Counted(3), batch_size=2),
        (torch.ones(2) for _ in range(2)),
    ):
        dataset = strategy.experimental_distribute_dataset(endless)
        with pytest.raises(TypeError, match=r"has no len\(\)"):
            len(dataset)
        assert len(list(dataset)) == 2


def test_an_iterable_dataset_is_taken_as_batches() -> None:
    class Batches(IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.arange(3), torch.arange(2)])

    assert [pieces(step) for step in batches(STRATEGIES[2], Batches())] == [
        [[0, 1], [2]],
        [[0], [1]],
    ]


def test_an_error_of_the_loader_comes_out_at_its_batch() -> None:
    def load() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        raise KeyError("mine")

    steps = iter(STRATEGIES[2].experimental_distribute_dataset(load()))
    next(steps)
    with pytest.raises(KeyError, match="mine"):
        next(steps)


def test_a_dataset_can_be_distributed_in_a_replica(several: Strategy) -> None:
    n = several.num_replicas_in_sync

    def step() -> bool:
        (value,) = several.experimental_distribute_dataset([torch.arange(n)])
        return pieces(value) == [[row] for row in range(n)]

    assert several.run(step) is True


def test_what_was_dealt_arrives_in_the_step(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    (value,) = batches(several, DataLoader(range(2 * n), batch_size=2 * n))
    received = several.run(
        lambda rows: (rows.tolist(), get_replica_context().replica_id_in_sync_group),
        args=(value,),
    )
    assert several.experimental_local_results(received) == tuple(
        ([2 * r, 2 * r + 1], r) for r in range(n)
    )


def test_an_epoch_adds_up() -> None:
    strategy = STRATEGIES[3]
    dataset = strategy.experimental_distribute_dataset(
        DataLoader(range(10), batch_size=4)
    )
    assert [strategy.reduce("sum", value, axis=0).item() for value in dataset] == [
        6,
        22,
        17,
    ]
    assert [strategy.reduce("mean", value, axis=0).item() for value in dataset] == [
        1.5,
        5.5,
        8.5,
    ]
