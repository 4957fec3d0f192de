"""element_spec: what a distributed dataset's elements are, seen without a trace."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from problems import shown
from topologies import TOPOLOGIES, central
from torchstrategy import (
    DistributedValues,
    InputOptions,
    InputReplicationMode,
    OneDeviceStrategy,
    PerReplicaSpec,
    Strategy,
    TensorSpec,
)

CHOSEN = [name for name in TOPOLOGIES if name != "default"]
ALONE = ["one_device", "central_1", "copies_1"]
ONE, TWO, THREE, FOUR = OneDeviceStrategy("cpu"), central(2), central(3), central(4)
F32, I64 = torch.float32, torch.int64
PER_REPLICA = InputOptions(
    experimental_replication_mode=InputReplicationMode.PER_REPLICA
)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class Counted(IterableDataset):
    """Rows of three numbers, and how many were read."""

    def __init__(self, n: int = 5) -> None:
        self.n = n
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for k in range(self.n):
            self.read += 1
            yield torch.full((3,), float(k))


def spec(strategy: Strategy, dataset: Any, **options: Any) -> Any:
    """The spec of a dataset, which is that of its iterators, too."""
    distributed = strategy.experimental_distribute_dataset(
        dataset, InputOptions(**options)
    )
    found = distributed.element_spec
    assert iter(distributed).element_spec == found == distributed.element_spec
    return found


def of_each(
    *sizes: int | None, rest: tuple[int, ...] = (3,), dtype: torch.dtype = F32
) -> PerReplicaSpec:
    """The spec of tensors of so many rows."""
    return PerReplicaSpec(tuple(TensorSpec((size, *rest), dtype) for size in sizes))


def rows(n: int = 5) -> torch.Tensor:
    return torch.arange(3.0 * n).reshape(n, 3)


def read(strategy: Strategy, batches: Any) -> list[list[Any]]:
    """All batches as lists, and the random numbers that are drawn beside them."""
    return [
        [
            *(p.tolist() for p in strategy.experimental_local_results(b)),
            torch.rand(1).item(),
        ]
        for b in batches
    ]


# The specs themselves


def test_a_tensor_spec_is_its_shape_and_dtype() -> None:
    one = TensorSpec((None, 3), F32)
    assert (one.shape, one.dtype) == ((None, 3), F32)
    assert one == TensorSpec([None, 3], F32) == TensorSpec(shape=(None, 3), dtype=F32)  # type: ignore[arg-type]
    assert (
        len(
            {
                one,
                TensorSpec([None, 3], F32),
                TensorSpec((2, 3), F32),
                TensorSpec((None, 3), I64),
            }
        )
        == 3
    )  # type: ignore[arg-type]
    assert one not in (
        TensorSpec((2, 3), F32),
        TensorSpec((None, 3), I64),
        TensorSpec((None,), F32),
        ((None, 3), F32),
    )
    assert repr(one) == "TensorSpec(shape=(None, 3), dtype=torch.float32)"
    assert (
        repr(TensorSpec(torch.Size([2]), I64))
        == "TensorSpec(shape=(2,), dtype=torch.int64)"
    )


def test_a_per_replica_spec_is_the_specs_of_the_replicas() -> None:
    one = of_each(2, 1)
    assert one.value_specs == (TensorSpec((2, 3), F32), TensorSpec((1, 3), F32))
    assert one == of_each(2, 1)
    assert len({one, of_each(2, 1), of_each(1, 2), of_each(2, 1, 0)}) == 3
    assert repr(PerReplicaSpec((TensorSpec((), I64),))) == (
        "PerReplicaSpec(value_specs=(TensorSpec(shape=(), dtype=torch.int64),))"
    )


@pytest.mark.parametrize(
    "one", [TensorSpec((None, 3), F32), of_each(2, None)], ids=["tensor", "per replica"]
)
def test_specs_cannot_be_changed_and_can_be_copied_and_sent(one: Any) -> None:
    for copied in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert copied == one
    with pytest.raises(AttributeError):
        one.shape = ()


# How many rows there are


@pytest.mark.parametrize(
    ("strategy", "size", "drop_last", "sizes"),
    [
        (TWO, 4, False, (None, None)),
        (TWO, 4, True, (2, 2)),
        (TWO, 3, True, (None, None)),
        (THREE, 4, True, (None, None, None)),
        (THREE, 3, True, (1, 1, 1)),
        (FOUR, 4, False, (None,) * 4),
    ],
)
def test_rows_are_known_where_every_batch_is_cut_into_equal_pieces(
    strategy: Strategy, size: int, drop_last: bool, sizes: tuple[int | None, ...]
) -> None:
    assert spec(strategy, DataLoader(rows(), size, drop_last=drop_last)) == of_each(
        *sizes
    )


@pytest.mark.parametrize("topology", ALONE)
def test_a_lone_replica_has_plain_specs(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    assert spec(strategy, DataLoader(rows(), 4)) == TensorSpec((None, 3), F32)
    assert spec(strategy, DataLoader(rows(), 4, drop_last=True)) == TensorSpec(
        (4, 3), F32
    )
    assert spec(strategy, {"x": rows()}.values()) == TensorSpec((None, 3), F32)


def test_where_shares_are_given_whole_batches_are_cut_alike() -> None:
    assert spec(
        TWO, DataLoader(rows(), 5, drop_last=True), row_shares=[3, 1]
    ) == of_each(4, 1)
    assert spec(
        TWO, DataLoader(rows(), 4, drop_last=True), row_shares=[1, 0]
    ) == of_each(4, 0)
    assert spec(TWO, DataLoader(rows(), 4), row_shares=[3, 1]) == of_each(None, None)


def test_a_batch_sampler_that_drops_says_how_many_rows_there_are() -> None:
    sampler = BatchSampler(range(5), 4, drop_last=True)  # type: ignore[arg-type]
    assert spec(TWO, DataLoader(rows(), batch_sampler=sampler)) == of_each(2, 2)
    sampler = BatchSampler(range(5), 4, drop_last=False)  # type: ignore[arg-type]
    assert spec(TWO, DataLoader(rows(), batch_sampler=sampler)) == of_each(None, None)
    assert spec(TWO, DataLoader(rows(), batch_sampler=[[0, 1], [2, 3]])) == of_each(
        None, None
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_load_is_seen_without_them(workers: int) -> None:
    loader = DataLoader(rows(), 4, num_workers=workers, drop_last=True)
    assert TWO.experimental_distribute_dataset(loader).element_spec == of_each(2, 2)


# What elements are seen in


SOURCES: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(rows(), 2),
    "loader of a TensorDataset": lambda: DataLoader(
        TensorDataset(rows()), 2, collate_fn=lambda s: torch.cat(s[0])
    ),
    "loader of ready batches": lambda: DataLoader([rows(2), rows(1)], batch_size=None),  # type: ignore[arg-type]
    "loader of a stream": lambda: DataLoader(Counted(), 2),
    "loader of a stream of batches": lambda: DataLoader(TwoRows(), batch_size=None),
    "stream of batches": lambda: TwoRows(),
    "list": lambda: [rows(2), rows(1)],
    "generator": lambda: (rows(k) for k in (2, 1)),
}


class TwoRows(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([rows(2), rows(2)])


@pytest.mark.parametrize(
    "kind", [kind for kind in SOURCES if kind != "loader of a TensorDataset"]
)
@pytest.mark.parametrize("topology", CHOSEN)
def test_every_source_shows_what_it_yields(topology: str, kind: str) -> None:
    strategy = TOPOLOGIES[topology]()
    replicas = strategy.num_replicas_in_sync
    wanted = (
        TensorSpec((None, 3), F32) if replicas == 1 else of_each(*[None] * replicas)
    )
    assert spec(strategy, SOURCES[kind]()) == wanted


def test_single_elements_have_no_rows() -> None:
    assert spec(ONE, TensorDataset(rows(), torch.arange(5))) == (
        TensorSpec((3,), F32),
        TensorSpec((), I64),
    )


def test_a_sample_of_a_loader_that_makes_no_batches_may_be_a_batch() -> None:
    assert spec(ONE, DataLoader(rows(), batch_size=None)) == TensorSpec((None,), F32)
    assert spec(ONE, DataLoader(torch.arange(5), batch_size=None)) == TensorSpec(
        (), I64
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize(
    "empty",
    [[], DataLoader([], 2), iter(()), DataLoader(Counted(0), 2)],
    ids=["list", "loader", "iterator", "stream"],
)
def test_without_an_element_nothing_is_known(strategy: Strategy, empty: Any) -> None:
    dataset = strategy.experimental_distribute_dataset(empty)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"^The dataset has no element to look at, so it is not known what",
        ):
            _ = dataset.element_spec
    assert list(dataset) == []


# Leaves


def test_containers_are_those_of_the_loader() -> None:
    element = {
        "a": rows(),
        "b": [
            (torch.arange(5),),
            Pair(torch.ones(5, 1), collections.OrderedDict(c=torch.ones(5))),
        ],
    }
    found = spec(TWO, [element])
    assert found == {
        "a": of_each(None, None),
        "b": [
            (of_each(None, None, rest=(), dtype=I64),),
            Pair(
                of_each(None, None, rest=(1,)),
                collections.OrderedDict(c=of_each(None, None, rest=())),
            ),
        ],
    }
    assert type(found["b"][1]) is Pair
    assert type(found["b"][1].second) is collections.OrderedDict


def test_an_array_of_numbers_is_the_tensor_that_it_becomes() -> None:
    assert spec(TWO, [np.zeros((4, 2), "float32")]) == of_each(None, None, rest=(2,))
    assert spec(ONE, [np.zeros((4, 2), "float32")]) == TensorSpec((None, 2), F32)
    fixed = np.zeros((4, 2))
    fixed.flags.writeable = False
    assert spec(ONE, [fixed]) == TensorSpec((None, 2), torch.float64)


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (["a", "b"], list),
        ([None, None], list),
        (np.array(["a", "b"]), np.ndarray),
        (Batch(torch.ones(2)), Batch),
        (pack_sequence([torch.ones(2), torch.ones(1)]), PackedSequence),
        (collections.UserDict(x=torch.ones(2)), collections.UserDict),
    ],
    ids=lambda value: type(value).__name__,
)
def test_of_other_things_with_rows_it_is_the_type(leaf: Any, kind: type) -> None:
    assert spec(TWO, [{"x": torch.ones(2), "y": leaf}])["y"] == PerReplicaSpec(
        (kind, kind)
    )
    assert spec(ONE, [{"y": leaf}])["y"] is kind


@pytest.mark.parametrize("leaf", [3, 2.5, "text", None, b"bytes", True], ids=shown)
def test_of_what_every_replica_is_given_whole_there_is_one(leaf: Any) -> None:
    assert spec(TWO, [{"x": torch.ones(2), "y": leaf}])["y"] is type(leaf)
    assert spec(ONE, [{"y": leaf}])["y"] is type(leaf)


def test_a_spec_is_made_of_what_an_element_is_made_of(several: Strategy) -> None:
    """Of a per-replica value where that is dealt out, of others where they are."""
    element = {
        "x": torch.ones(2),
        "scalar": torch.tensor(3),
        "array": np.array(3.0),
        "k": 3,
        "words": ["a", "b"],
    }
    dataset = several.experimental_distribute_dataset([element])
    (dealt,) = dataset
    for name, found in dataset.element_spec.items():
        assert isinstance(found, PerReplicaSpec) == isinstance(
            dealt[name], DistributedValues
        ), name
    assert spec(ONE, [torch.tensor(3)]) == TensorSpec((), I64)


def test_sparse_and_nested_tensors_are_tensors() -> None:
    assert spec(TWO, [rows().to_sparse()]) == of_each(None, None)
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged
    )
    assert spec(TWO, [nested]) == PerReplicaSpec(
        (TensorSpec((None, None, 3), F32),) * 2
    )
    assert spec(ONE, [nested]) == TensorSpec((None, None, 3), F32)


def test_elements_that_cannot_be_dealt_out_have_no_spec() -> None:
    for element, error in (
        ({"x": torch.ones(2), "s": {1}}, TypeError),
        ((torch.ones(2), torch.ones(3)), ValueError),
    ):
        dataset = TWO.experimental_distribute_dataset([element])
        with pytest.raises(error, match="batch"):
            _ = dataset.element_spec
        with pytest.raises(error, match="batch"):
            next(iter(dataset))


# Datasets from functions


def test_each_replica_is_given_what_the_function_makes(several: Strategy) -> None:
    replicas = several.num_replicas_in_sync
    element = {"x": rows(2), "scalar": torch.tensor(3), "k": 3}
    dataset = several.distribute_datasets_from_function(lambda _: [element])
    assert dataset.element_spec == iter(dataset).element_spec
    assert dataset.element_spec == {
        "x": of_each(*[None] * replicas),
        "scalar": PerReplicaSpec((TensorSpec((), I64),) * replicas),
        "k": PerReplicaSpec((int,) * replicas),
    }


@pytest.mark.parametrize("topology", ALONE)
def test_a_lone_replica_is_given_all_that_the_function_makes(topology: str) -> None:
    dataset = TOPOLOGIES[topology]().distribute_datasets_from_function(
        lambda _: DataLoader(rows(), 4, drop_last=True)
    )
    assert dataset.element_spec == TensorSpec((4, 3), F32)


def test_the_data_may_run_out_in_a_step_so_rows_are_not_known() -> None:
    dataset = TWO.distribute_datasets_from_function(
        lambda _: DataLoader(rows(), 2, drop_last=True)
    )
    assert dataset.element_spec == of_each(None, None)


def test_of_a_pipeline_for_each_replica_each_is_seen() -> None:
    dataset = TWO.distribute_datasets_from_function(
        lambda context: [torch.ones(2, 3 + context.input_pipeline_id)], PER_REPLICA
    )
    assert dataset.element_spec == PerReplicaSpec(
        (TensorSpec((None, 3), F32), TensorSpec((None, 4), F32))
    )


def test_single_elements_from_a_function_have_no_rows() -> None:
    dataset = TWO.distribute_datasets_from_function(
        lambda _: TensorDataset(rows(), torch.arange(5))
    )
    assert dataset.element_spec == (
        PerReplicaSpec((TensorSpec((3,), F32),) * 2),
        PerReplicaSpec((TensorSpec((), I64),) * 2),
    )


# Without a trace


class Noisy(Dataset):
    """Draws from torch's generator, and from one of its own, for each element."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.rng = generator

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1) + torch.rand(1, generator=self.rng)


class NoisyStream(IterableDataset):
    def __init__(self, generator: torch.Generator) -> None:
        self.rng = generator

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(1, generator=self.rng) + torch.rand(1) for _ in range(5))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


NOISY: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(Noisy(), 2, shuffle=True),
    "generator of the loader": lambda: DataLoader(
        Noisy(), 2, shuffle=True, generator=generator()
    ),
    "generator of the sampler": lambda: DataLoader(
        Noisy(), 2, sampler=RandomSampler(range(5), generator=generator())
    ),
    "generator of the dataset": lambda: DataLoader(Noisy(generator()), 2, shuffle=True),
    "within a batch sampler": lambda: DataLoader(
        Noisy(),
        batch_sampler=BatchSampler(
            RandomSampler(range(5), generator=generator()), 2, False
        ),
    ),
    "ready batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(NoisyStream(generator()), 2),
    "stream of batches": lambda: NoisyStream(generator()),
}


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("when", [0, 1, 3])
def test_nothing_that_is_random_changes(kind: str, when: int) -> None:
    torch.manual_seed(1)
    dataset = TWO.experimental_distribute_dataset(NOISY[kind]())
    expected = [*read(TWO, dataset), *read(TWO, dataset)]
    torch.manual_seed(1)
    dataset = TWO.experimental_distribute_dataset(NOISY[kind]())
    _ = dataset.element_spec if when == 0 else None
    iterator = iter(dataset)
    found = read(TWO, itertools.islice(iterator, when))
    _, _ = dataset.element_spec, iterator.element_spec
    found += [*read(TWO, iterator), *read(TWO, dataset)]
    assert found == expected


class Drawing:
    """An iterator that draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = generator()

    def __iter__(self) -> Drawing:
        return self

    def __next__(self) -> torch.Tensor:
        return torch.rand(1, generator=self.rng)


@pytest.mark.parametrize(
    "make",
    [Drawing, lambda: (k + torch.rand(1) for k in range(9))],
    ids=["own", "torch's"],
)
def test_what_an_iterator_draws_for_the_element_that_is_seen_is_drawn_once(
    make: Callable[[], Any],
) -> None:
    found = []
    for is_seen in (False, True):
        torch.manual_seed(1)
        dataset = ONE.experimental_distribute_dataset(make())
        assert not is_seen or dataset.element_spec == TensorSpec((None,), F32)
        found.append(read(ONE, itertools.islice(dataset, 3)))
    assert found[0] == found[1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("when", [None, 0, 1, 3, 5])
def test_no_element_of_a_generator_is_lost(ahead: bool, when: int | None) -> None:
    dataset = ONE.experimental_distribute_dataset(
        map(torch.tensor, range(5)), InputOptions(load_ahead=ahead)
    )
    wanted = TensorSpec((), I64)
    assert when is not None or dataset.element_spec == wanted
    iterator = iter(dataset)
    found = [int(element) for element in itertools.islice(iterator, when or 0)]
    assert dataset.element_spec == iterator.element_spec == wanted
    found += map(int, iterator)
    assert found == list(range(5))
    assert dataset.element_spec == wanted  # also when nothing is left


def test_a_generator_is_not_read_further_than_it_has_to_be() -> None:
    read_so_far: list[int] = []

    def load() -> Iterator[torch.Tensor]:
        for k in range(5):
            read_so_far.append(k)
            yield torch.ones(2)

    dataset = TWO.experimental_distribute_dataset(load())
    assert read_so_far == []
    _ = dataset.element_spec
    _ = dataset.element_spec
    iterator = iter(dataset)
    _ = iterator.element_spec
    assert read_so_far == [0]
    next(iterator)
    _ = iterator.element_spec
    assert read_so_far == [0]
    next(iterator)
    assert read_so_far == [0, 1]


def test_a_generator_whose_first_element_is_an_error_is_not_read_twice() -> None:
    class Flaky:
        asked = 0

        def __iter__(self) -> Flaky:
            return self

        def __next__(self) -> torch.Tensor:
            self.asked += 1
            if self.asked == 1:
                raise OSError("once")
            if self.asked == 4:
                raise StopIteration
            return torch.tensor([self.asked])

    dataset = ONE.experimental_distribute_dataset(Flaky())
    iterator = iter(dataset)
    with pytest.raises(OSError, match="once"):
        next(iterator)
    assert iterator.element_spec == TensorSpec((None,), I64)
    assert [int(element) for element in iterator] == [2, 3]


def test_one_element_is_read_and_nothing_before_it_is_asked_for() -> None:
    source = Counted(100)
    dataset = TWO.experimental_distribute_dataset(DataLoader(source, 50))
    assert source.read == 0
    _ = dataset.element_spec
    assert source.read == 1
    _ = dataset.element_spec
    assert source.read == 1


class Stream(IterableDataset):
    """A dataset that can be read once."""

    def __init__(self) -> None:
        self.source = iter(torch.arange(6))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> torch.Tensor:
        return next(self.source)


def test_a_loader_that_reads_from_an_iterator_is_not_robbed() -> None:
    dataset = TWO.experimental_distribute_dataset(DataLoader(Stream(), 2))
    with pytest.raises(
        ValueError,
        match=(
            r"a Stream, is an iterator: to look at an element .* when the first batch "
            r"was"
        ),
    ):
        _ = dataset.element_spec
    iterator = iter(dataset)
    found = read(TWO, itertools.islice(iterator, 1))
    assert (
        dataset.element_spec
        == iterator.element_spec
        == of_each(None, None, rest=(), dtype=I64)
    )
    found += read(TWO, iterator)
    assert [batch[:2] for batch in found] == [[[0], [1]], [[2], [3]], [[4], [5]]]


class Remembers:
    """A loader that keeps its own state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 4:
            self.position += 1
            yield torch.tensor([self.position - 1])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_loader_that_keeps_its_state_stays_where_it_is(when: int) -> None:
    dataset = ONE.experimental_distribute_dataset(Remembers())
    before = dataset.state_dict()
    wanted = TensorSpec((None,), I64)
    assert when or dataset.element_spec == wanted
    assert dataset.state_dict() == before
    iterator = iter(dataset)
    found = [int(element) for element in itertools.islice(iterator, when)]
    assert iterator.element_spec == wanted
    state = dataset.state_dict()
    resumed = ONE.experimental_distribute_dataset(Remembers())
    resumed.load_state_dict(state)
    assert resumed.element_spec == wanted
    assert [int(element) for element in resumed] == [
        int(element) for element in iterator
    ]
    assert found == list(range(when))


def test_it_can_be_asked_for_between_loading_a_state_and_going_on() -> None:
    dataset = TWO.experimental_distribute_dataset(NOISY["generator of the loader"]())
    iterator = iter(dataset)
    read(TWO, itertools.islice(iterator, 1))
    state, drawn = dataset.state_dict(), torch.get_rng_state()
    expected = read(TWO, iterator)
    resumed = TWO.experimental_distribute_dataset(NOISY["generator of the loader"]())
    torch.set_rng_state(drawn)
    resumed.load_state_dict(state)
    assert resumed.element_spec == of_each(None, None, rest=(1,))
    assert read(TWO, resumed) == expected


def test_what_a_loader_shows_is_not_changed() -> None:
    element = {"x": torch.ones(2, 3), "y": [torch.zeros(2)], "z": Batch(torch.ones(2))}
    before = copy.deepcopy(element)
    containers = [id(value) for value in (element, element["y"], element["z"])]
    spec(TWO, [element])
    spec(ONE, [element])
    assert containers == [id(value) for value in (element, element["y"], element["z"])]
    assert torch.equal(element["x"], before["x"])
    assert torch.equal(element["z"].x, before["z"].x)


def test_a_dataset_holds_no_element_for_its_spec() -> None:
    """A first batch may be large, and would stay for the life of the dataset."""
    first = [torch.ones(2)]
    gone = weakref.ref(first[0])
    dataset = ONE.experimental_distribute_dataset(first.pop() for _ in range(1))
    _ = dataset.element_spec
    iterator = iter(dataset)
    next(iterator)
    _ = dataset.element_spec
    assert gone() is None
