"""state_dict and load_state_dict of a distributed dataset: an iteration goes on where it was, with the next row."""

from __future__ import annotations

import copy
import io
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from problems import mse, parameters, sgd, shown
from topologies import central
from torchstrategy import (
    CentralStorageStrategy,
    DistributedDataset,
    InputOptions,
    InputReplicationMode,
    OneDeviceStrategy,
    Strategy,
    get_strategy,
)

STRATEGIES: dict[str, Strategy] = {"one_device": OneDeviceStrategy("cpu"), **{str(n): central(n) for n in (1, 2, 3, 4)}}
TWO = STRATEGIES["2"]
ROWS = 11
BATCH = 2
STEPS = 6
quickly = settings(max_examples=3, deadline=None, derandomize=True, database=None)
Make = Callable[[], Any]


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(batch: Any) -> list[int]:
    """The rows of a batch, over all replicas, in order."""
    pieces = get_strategy().experimental_local_results(batch)
    return [int(row) for piece in pieces for row in piece.reshape(-1).tolist()]


def read(batches: Iterable[Any], steps: int | None = None) -> list[list[int]]:
    """The rows of each batch, of so many of them; as in a step with dropout, something is drawn after each."""
    found = []
    for batch in itertools.islice(batches, steps):
        found.append(rows_of(batch))
        torch.rand(3)
    return found


def over(loader: Any, strategy: Strategy = TWO, **options: Any) -> DistributedDataset:
    return strategy.experimental_distribute_dataset(loader, InputOptions(**options))


def saved_and_loaded(state: Any) -> Any:
    """What becomes of a checkpoint on its way to another process."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def checkpoint(dataset: DistributedDataset) -> Any:
    return saved_and_loaded({"data": dataset.state_dict(), "torch": torch.get_rng_state()})


def restore(dataset: DistributedDataset, saved: Any) -> None:
    torch.set_rng_state(saved["torch"])
    dataset.load_state_dict(saved["data"])


# Loaders


class Numbers(Dataset):
    """Each element is its own index. The indices that were loaded are written down."""

    def __init__(self, n: int = ROWS) -> None:
        self.n = n
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Unbatched(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(super().__getitem__(index))


class Ready(Dataset):
    """Its elements are batches."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(2 * index, 2 * index + 2)


class DrawsAtEachIndex(Sampler):
    """Whatever else is drawn meanwhile, its indices are drawn one by one."""

    def __init__(self, n: int, generator: torch.Generator | None = None) -> None:
        self.n = n
        self.rng = generator

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(1000, (), generator=self.rng)) for _ in range(self.n))


class DrawsAtOnce(Sampler):
    """Draws when an iteration begins, before the loader does."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(self.n).tolist())


class TwoByTwo(Sampler):
    """A batch sampler of one's own."""

    def __init__(self, sampler: Sampler) -> None:
        self.chosen = sampler

    def __len__(self) -> int:
        return -(-ROWS // 2)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.chosen)
        while pair := list(itertools.islice(indices, 2)):
            yield pair


class Stream(IterableDataset):
    """Shuffles what it reads, with a generator of its own or with torch's."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.rng = generator

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ROWS, generator=self.rng).tolist())


class Longer(DataLoader):
    """A loader that iterates in a way of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()
        yield torch.tensor([-1, -1])


class Collated(DataLoader):
    """A loader that is made in a way of its own, and iterates as all do."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, collate_fn=torch.tensor, **options)


def batched(dataset: Any = None, **options: Any) -> DataLoader:
    return DataLoader(Numbers() if dataset is None else dataset, batch_size=BATCH, **options)


def with_workers(loader: Any, workers: int, **options: Any) -> Any:
    """A loader like this one, which has so many workers."""
    names = ("dataset", "collate_fn", "generator")
    chosen = {"sampler": loader.sampler, "batch_size": loader.batch_size}
    if isinstance(loader.dataset, IterableDataset):
        del chosen["sampler"]
    alike = {name: getattr(loader, name) for name in names}
    return type(loader)(**alike, **chosen, num_workers=workers, **options)


LOADERS: dict[str, Make] = {
    "in order": batched,
    "shuffled": lambda: batched(shuffle=True),
    "last batch dropped": lambda: batched(shuffle=True, drop_last=True),
    "generator of the loader": lambda: batched(shuffle=True, generator=generator()),
    "generator of the sampler": lambda: batched(sampler=RandomSampler(range(ROWS), generator=generator())),
    "two generators": lambda: batched(
        sampler=RandomSampler(range(ROWS), generator=generator()), generator=generator(6)
    ),
    "with replacement": lambda: batched(sampler=RandomSampler(range(99), True, ROWS)),
    "with replacement and a generator": lambda: batched(
        Numbers(99), sampler=RandomSampler(range(99), True, 50, generator=generator())
    ),
    "weighted": lambda: batched(sampler=WeightedRandomSampler([k + 1.0 for k in range(ROWS)], ROWS)),
    "subset": lambda: batched(sampler=SubsetRandomSampler(range(0, ROWS, 2))),
    "drawn one by one": lambda: batched(Numbers(1000), sampler=DrawsAtEachIndex(ROWS)),
    "drawn one by one with a generator": lambda: batched(
        Numbers(1000), sampler=DrawsAtEachIndex(ROWS, generator()), generator=generator(6)
    ),
    "drawn at once": lambda: batched(sampler=DrawsAtOnce(ROWS)),
    "drawn at once, ready batches": lambda: DataLoader(Ready(), batch_size=None, sampler=DrawsAtOnce(STEPS)),
    "ready batches": lambda: DataLoader(Ready(), batch_size=None, shuffle=True),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=TwoByTwo(RandomSampler(range(ROWS)))),
    "generator within a batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=TwoByTwo(RandomSampler(range(ROWS), generator=generator()))
    ),
    "generator within torch's batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(range(ROWS), generator=generator()), BATCH, False)
    ),
    "stream": lambda: batched(Stream()),
    "stream with a generator": lambda: batched(Stream(generator())),
    "stream of batches": lambda: DataLoader(Ready(), batch_size=None),
    "subclass": lambda: Collated(Numbers(), batch_size=BATCH, shuffle=True),
    "subclass that iterates by itself": lambda: Longer(Numbers(), batch_size=BATCH, shuffle=True),
    "list": lambda: [torch.arange(2 * k, 2 * k + 2) for k in range(STEPS)],
}
AHEAD = [kind for kind in LOADERS if kind != "drawn one by one"]  # which draws beside the step, so in no certain order
# How many epochs were read, and how many batches of another; None: there is no other.
PLACES: dict[str, tuple[int, int | None]] = {
    "before all": (0, None),
    "before the first batch": (0, 0),
    "after a batch": (0, 1),
    "in the middle": (0, 3),
    "after an epoch": (1, None),
    "in the second epoch": (1, 2),
}


def goes_on(make: Callable[[], DistributedDataset], place: str, later: int = 1) -> None:
    """What follows a place, and so many later epochs, are the same after a checkpoint as without one."""
    epochs, steps = PLACES[place]
    torch.manual_seed(1)
    dataset = make()
    for _ in range(epochs):
        read(dataset)
    iterator = iter(() if steps is None else dataset)
    torch.rand(2)  # what is drawn between the beginning and the first batch does not touch the order
    read(iterator, steps)
    saved = checkpoint(dataset)
    expected = [*read(iterator), *(read(dataset) for _ in range(later))]
    torch.manual_seed(2)
    resumed = make()
    restore(resumed, saved)
    assert [*([] if steps is None else read(resumed)), *(read(resumed) for _ in range(later))] == expected


# Just as if it had not been interrupted


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_training_reads_what_an_uninterrupted_one_reads(kind: str, place: str) -> None:
    goes_on(lambda: over(LOADERS[kind]()), place)


@pytest.mark.parametrize("kind", AHEAD)
def test_so_it_does_when_it_reads_ahead(kind: str) -> None:
    options = {"load_ahead": True, "experimental_per_replica_buffer_size": 5}
    goes_on(lambda: over(LOADERS[kind](), **options), "in the second epoch")


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("shuffled", "in the middle"),
        ("weighted", "before the first batch"),
        ("generator of the loader", "in the second epoch"),
        ("drawn one by one with a generator", "in the middle"),
        ("drawn at once, ready batches", "after a batch"),
        ("subclass that iterates by itself", "in the middle"),
    ],
)
def test_so_it_does_when_its_loader_has_workers(kind: str, place: str) -> None:
    workers = 2 if kind == "shuffled" else 1
    goes_on(lambda: over(with_workers(LOADERS[kind](), workers)), place, later=workers - 1)


@pytest.mark.parametrize("place", ["in the middle", "in the second epoch"])
def test_so_it_does_when_these_workers_outlive_an_epoch(place: str) -> None:
    def make() -> DistributedDataset:
        return over(with_workers(LOADERS["generator of the loader"](), 1, persistent_workers=True))

    goes_on(make, place, later=0)


def test_so_it_does_when_the_loader_was_used_before() -> None:
    def make() -> DistributedDataset:
        loader = with_workers(LOADERS["shuffled"](), 1, persistent_workers=True)
        next(iter(loader))
        return over(loader)

    goes_on(make, "after a batch", later=0)


@pytest.mark.parametrize("place", PLACES)
def test_a_lone_replica_goes_on_with_single_elements(place: str) -> None:
    goes_on(lambda: over(Unbatched(), STRATEGIES["one_device"]), place)


@pytest.mark.parametrize("steps", [0, 1, 3, STEPS])
def test_a_generator_is_read_to_where_it_was(steps: int) -> None:
    def make() -> DistributedDataset:
        return over(torch.arange(2 * k, 2 * k + 2) for k in range(STEPS))

    dataset = make()
    iterator = iter(dataset)
    read(iterator, steps)
    resumed = make()
    resumed.load_state_dict(saved_and_loaded(dataset.state_dict()))
    assert read(resumed) == read(iterator)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("kind", ["shuffled", "generator of the loader", "drawn at once, ready batches"])
def test_the_number_of_workers_may_be_another(kind: str, before: int, after: int) -> None:
    dataset = over(with_workers(LOADERS[kind](), before))
    iterator = iter(dataset)
    torch.rand(2)
    read(iterator, 2)
    saved = saved_and_loaded(dataset.state_dict())
    again = over(with_workers(LOADERS[kind](), after))
    again.load_state_dict(saved)
    resumed = iter(again)
    expected = read(iterator)
    assert read(resumed, 1) == expected[:1]
    once_more = over(LOADERS[kind]())
    once_more.load_state_dict(again.state_dict())
    assert read(resumed) == read(once_more) == expected[1:]


@pytest.mark.parametrize("place", ["after a batch", "in the second epoch"])
def test_two_datasets_that_are_read_side_by_side_both_go_on(place: str) -> None:
    epochs, steps = PLACES[place]

    def make() -> list[DistributedDataset]:
        return [over(LOADERS["shuffled"]()), over(LOADERS["shuffled"]())]

    def read_both(iterators: Any, steps: int | None = None) -> list[Any]:
        return [(rows_of(a), rows_of(b)) for a, b in itertools.islice(zip(*iterators, strict=True), steps)]

    both = make()
    for _ in range(epochs):
        read_both(both)
    iterators = [iter(dataset) for dataset in both]
    read_both(iterators, steps)
    saved = [saved_and_loaded(dataset.state_dict()) for dataset in both]
    resumed = make()
    for dataset, state in zip(resumed, saved, strict=True):
        dataset.load_state_dict(state)
    assert read_both(resumed) == read_both(iterators)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Augmented(Dataset):
    """Draws from torch's generator for each element."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(3.0) + index
        return x + torch.rand(3), x[:2]


class Training:
    """All that a training script has, made anew in each process."""

    def __init__(self, strategy: Strategy, seed: int) -> None:
        torch.manual_seed(seed)
        self.strategy = strategy
        with strategy.scope():
            self.model = Net()
            self.optimizer = sgd(self.model)
        self.dataset = over(batched(Augmented(), shuffle=True), strategy)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        mse(self.model, batch).backward()
        self.optimizer.step()

    def train(self, batches: Iterable[Any], steps: int | None = None) -> None:
        for batch in itertools.islice(batches, steps):
            self.strategy.run(self.step, args=(batch,))

    def save(self) -> Any:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **checkpoint(self.dataset)}
        return saved_and_loaded(state)

    def load(self, saved: Any) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        restore(self.dataset, saved)


@pytest.mark.parametrize("replicas", [0, 3])
@pytest.mark.parametrize("steps", [None, 0, 2, STEPS, STEPS + 1])
def test_a_training_goes_on_to_the_last_bit(replicas: int, steps: int | None) -> None:
    # On the CPU, whose generator is the one in the checkpoint.
    strategy = CentralStorageStrategy(["cpu"] * replicas) if replicas else OneDeviceStrategy("cpu")
    through = Training(strategy, seed=1)
    iterator = iter(() if steps is None else through.dataset)
    through.train(iterator, steps)  # the step after the last one finds the end
    saved = through.save()
    through.train(iterator)
    through.train(through.dataset)
    drawn = torch.rand(1)

    resumed = Training(strategy, seed=2)
    resumed.load(saved)
    if steps is not None and steps <= STEPS:
        resumed.train(resumed.dataset)
    resumed.train(resumed.dataset)
    assert torch.equal(torch.rand(1), drawn)
    expected, found = parameters(through.model), parameters(resumed.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Another number of replicas


@pytest.mark.parametrize("after", STRATEGIES)
@pytest.mark.parametrize("before", STRATEGIES)
@quickly
@given(st.integers(0, 4), st.integers(1, 12), st.integers(1, 5), st.integers(0, 9))
def test_another_number_of_replicas_goes_on_with_the_very_next_row(
    before: str, after: str, epochs: int, rows: int, size: int, steps: int
) -> None:
    def make(strategy: str) -> DistributedDataset:
        loader = DataLoader(Numbers(rows), batch_size=size, shuffle=True, generator=generator())
        return over(loader, STRATEGIES[strategy])

    dataset = make(before)
    for _ in range(epochs % 2):
        read(dataset)
    iterator = iter(dataset)
    head = read(iterator, steps)
    resumed = make(after)
    resumed.load_state_dict(saved_and_loaded(dataset.state_dict()))
    tail = read(resumed)
    assert sorted(itertools.chain(*head, *tail)) == list(range(rows)) or steps > len(dataset)
    assert tail == (read(dataset) if steps > len(dataset) else read(iterator))


@quickly
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6))
def test_another_batch_size_goes_on_with_the_very_next_row(before: int, after: int, steps: int) -> None:
    def make(size: int) -> DistributedDataset:
        return over(DataLoader(Numbers(24), batch_size=size, shuffle=True, generator=generator()))

    dataset = make(before)
    iterator = iter(dataset)
    head = read(iterator, min(steps, len(dataset)))
    resumed = make(after)
    rows = sum(map(len, head))
    if rows % after:
        with pytest.raises(ValueError, match=rf"stands at row {rows} .* with batch_size={after} no batch begins there"):
            resumed.load_state_dict(dataset.state_dict())
    else:
        resumed.load_state_dict(dataset.state_dict())
        assert list(itertools.chain(*read(resumed))) == list(itertools.chain(*read(iterator)))


def test_a_state_in_batches_of_unknown_size_is_not_counted_in_others() -> None:
    dataset = over(LOADERS["batch sampler"]())
    read(iter(dataset), 2)
    with pytest.raises(ValueError, match=r"batch_size=None, and this one has batch_size=2: .* cannot be known\. Make"):
        over(LOADERS["shuffled"]()).load_state_dict(dataset.state_dict())


# Datasets from functions


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_dataset_from_a_function_goes_on_with_the_very_next_row(before: int, after: int, steps: int) -> None:
    def make(replicas: int) -> DistributedDataset:
        return STRATEGIES[str(replicas)].distribute_datasets_from_function(
            lambda context: DataLoader(
                Numbers(22), context.get_per_replica_batch_size(4), shuffle=True, generator=generator()
            )
        )

    dataset = make(before)
    iterator = iter(dataset)
    read(iterator, steps)
    resumed = make(after)
    resumed.load_state_dict(saved_and_loaded(dataset.state_dict()))
    assert list(itertools.chain(*read(resumed))) == list(itertools.chain(*read(iterator)))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(range(1, 5), repeat=2)))
@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_single_elements_from_a_function_are_counted(before: int, after: int, steps: int) -> None:
    def make(replicas: int) -> DistributedDataset:
        return STRATEGIES[str(replicas)].distribute_datasets_from_function(lambda _: map(torch.tensor, range(7)))

    dataset = make(before)
    consumed = list(itertools.chain(*read(itertools.islice(iter(dataset), min(steps, -(-7 // before))))))
    resumed = make(after)
    resumed.load_state_dict(dataset.state_dict())
    assert [*consumed, *itertools.chain(*read(resumed))] == list(range(7))


def a_pipeline_for_each(strategy: Strategy = TWO, **options: Any) -> DistributedDataset:
    def dataset_fn(context: Any) -> DataLoader:
        first = 10 * context.input_pipeline_id
        numbers = range(first, first + 5 + context.input_pipeline_id)
        return DataLoader(numbers, batch_size=2, shuffle=True, **options)  # type: ignore[arg-type]

    mode = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    return strategy.distribute_datasets_from_function(dataset_fn, mode)


@pytest.mark.parametrize("place", PLACES)
def test_a_pipeline_for_each_replica_goes_on_in_each(place: str) -> None:
    goes_on(a_pipeline_for_each, place)
    goes_on(lambda: a_pipeline_for_each(STRATEGIES["3"]), place)


def test_a_pipeline_for_each_replica_is_for_as_many_replicas() -> None:
    dataset = a_pipeline_for_each()
    three = a_pipeline_for_each(STRATEGIES["3"])
    with pytest.raises(ValueError, match=r"^The state is of a dataset that reads 2 loaders, and this one reads 3: "):
        three.load_state_dict(dataset.state_dict())
    assert sum(map(len, read(three))) == 18


# What is counted


@pytest.mark.parametrize("depth", [1, 5])
def test_batches_that_were_read_ahead_and_not_handed_out_are_not_lost(depth: int) -> None:
    numbers = Numbers(40)
    dataset = over(batched(numbers), load_ahead=True, experimental_per_replica_buffer_size=depth)
    iterator = iter(dataset)
    for step in range(1, 15):
        read(iterator, 1)
        resumed = over(batched(Numbers(40)))
        resumed.load_state_dict(dataset.state_dict())
        assert rows_of(next(iter(resumed))) == [2 * step, 2 * step + 1]


def test_batches_that_workers_loaded_and_that_were_not_handed_out_are_not_lost() -> None:
    dataset = over(batched(Numbers(40), num_workers=2))
    iterator = iter(dataset)
    read(iterator, 3)
    resumed = over(batched(Numbers(40)))
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [6, 7]


@pytest.mark.parametrize(
    ("kind", "loads_again"),
    [
        ("in order", False),
        ("shuffled", False),
        ("generator within a batch sampler", False),
        ("subclass", False),
        ("subclass that iterates by itself", True),
    ],
)
def test_what_is_left_out_is_not_loaded(kind: str, loads_again: bool) -> None:
    dataset = over(LOADERS[kind]())
    read(iter(dataset), 4)
    loader = LOADERS[kind]()
    resumed = over(loader)
    resumed.load_state_dict(dataset.state_dict())
    assert loader.dataset.loaded == []
    iterator = iter(resumed)
    assert bool(loader.dataset.loaded) is loads_again
    next(iterator)
    assert len(loader.dataset.loaded) == (10 if loads_again else 2)


def test_single_elements_that_are_left_out_are_not_loaded() -> None:
    dataset, numbers = over(Unbatched(), STRATEGIES["one_device"]), Unbatched()
    read(iter(dataset), 4)
    resumed = over(numbers, STRATEGIES["one_device"])
    resumed.load_state_dict(dataset.state_dict())
    read(resumed, 1)
    assert numbers.loaded == [4]


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("a file that cannot be read")
        return super().__getitem__(index)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_that_could_not_be_read_is_not_read_again_once_the_next_was(ahead: bool) -> None:
    dataset = over(batched(Broken(), shuffle=True, generator=generator(2)), load_ahead=ahead)
    iterator = iter(dataset)
    found: list[list[int]] = []
    while len(found) < 4:
        try:
            found += read(iterator, 1)
        except KeyError:
            found.append([])
    resumed = over(batched(shuffle=True, generator=generator(2)))
    resumed.load_state_dict(dataset.state_dict())
    whole = read(over(batched(shuffle=True, generator=generator(2))))
    assert [] in found[:3]
    assert found + read(resumed) == [[] if 5 in batch else batch for batch in whole]


def test_a_batch_that_could_not_be_read_is_the_next_one_until_then() -> None:
    dataset = over(batched(Broken()))
    iterator = iter(dataset)
    read(iterator, 2)
    with pytest.raises(KeyError):
        next(iterator)
    resumed = over(batched())
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [4, 5]


def test_a_resumption_that_fails_can_be_tried_again() -> None:
    class Flaky(IterableDataset):
        fails = True

        def __iter__(self) -> Iterator[int]:
            for k in range(ROWS):
                if k == 3 and self.fails:
                    self.fails = False
                    raise OSError("the network is away")
                yield k

    dataset = over(LOADERS["in order"]())
    read(iter(dataset), 3)
    resumed = over(batched(Flaky()))
    resumed.load_state_dict(dataset.state_dict())
    with pytest.raises(OSError, match="the network is away"):
        iter(resumed)
    assert read(resumed) == [[6, 7], [8, 9], [10]]
    assert len(read(resumed)) == STEPS


# Where it stands


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, down to their tensors."""
    bytes_of = io.BytesIO(), io.BytesIO()
    for state, file in zip((one, other), bytes_of, strict=True):
        torch.save(copy.deepcopy(state), file)
    return bytes_of[0].getvalue() == bytes_of[1].getvalue()


@pytest.mark.parametrize("make", [LOADERS["two generators"], lambda: Remembers()], ids=["counted", "kept"])
def test_a_state_stays_as_it_was_taken(make: Make) -> None:
    dataset = over(make())
    iterator = iter(dataset)
    read(iterator, 2)
    state = dataset.state_dict()
    kept = copy.deepcopy(state)
    read(iterator)
    read(dataset)
    assert same(state, kept)


def test_to_ask_for_the_state_draws_nothing() -> None:
    dataset = over(LOADERS["two generators"]())
    before = torch.get_rng_state()
    dataset.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    expected, asked = read(over(LOADERS["two generators"]())), []
    for batch in dataset:
        dataset.state_dict()
        asked.append(rows_of(batch))
    assert asked == expected


def test_the_state_is_that_of_the_iteration_that_was_begun_last() -> None:
    dataset = over(LOADERS["in order"]())
    first = iter(dataset)
    read(first, 3)
    second = iter(dataset)
    read(second, 1)
    read(first, 1)
    resumed = over(LOADERS["in order"]())
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [2, 3]
    read(first)  # also its end is not that of the other
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [2, 3]


def test_an_iteration_that_was_broken_off_stands_where_it_was() -> None:
    dataset = over(LOADERS["in order"]())
    for batch in dataset:
        if 4 in rows_of(batch):
            break
    resumed = over(LOADERS["in order"]())
    resumed.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(resumed))) == [6, 7]
    assert rows_of(next(iter(dataset))) == [0, 1]


@pytest.mark.parametrize("kind", ["two generators", "shuffled", "list"])
@pytest.mark.parametrize("place", PLACES)
def test_what_was_loaded_is_the_state_until_one_iterates(kind: str, place: str) -> None:
    epochs, steps = PLACES[place]
    dataset = over(LOADERS[kind]())
    for _ in range(epochs):
        read(dataset)
    iterator = iter(() if steps is None else dataset)
    read(iterator, steps)
    state = dataset.state_dict()
    resumed = over(LOADERS[kind]())
    resumed.load_state_dict(state)
    assert same(resumed.state_dict(), state)
    unread = iter(() if steps is None else resumed)
    if steps:
        assert same(resumed.state_dict(), state)
    assert len(list(unread)) == (0 if steps is None else STEPS - steps)


def test_what_was_loaded_last_counts() -> None:
    dataset = over(LOADERS["generator of the loader"]())
    iterator = iter(dataset)
    states = [dataset.state_dict() for _ in read(iterator, 0) or range(1)]
    for _ in range(3):
        read(iterator, 1)
        states.append(dataset.state_dict())
    expected = read(iterator)
    resumed = over(LOADERS["generator of the loader"]())
    for state in (states[1], states[0], states[3]):
        resumed.load_state_dict(state)
    assert read(resumed) == expected


def test_it_can_be_turned_back_while_it_is_read() -> None:
    dataset = over(LOADERS["in order"]())
    iterator = iter(dataset)
    read(iterator, 1)
    state = dataset.state_dict()
    read(iterator, 2)
    dataset.load_state_dict(state)
    assert rows_of(next(iterator)) == [6, 7]  # which was begun before, and goes on
    assert rows_of(next(iter(dataset))) == [2, 3]


@pytest.mark.parametrize("kind", ["shuffled", "two generators", "with replacement and a generator", "stream"])
def test_it_can_be_interrupted_again_and_again(kind: str) -> None:
    expected = read(over(LOADERS[kind]()))
    torch.manual_seed(0)
    dataset, found = over(LOADERS[kind]()), []
    saved: Any = None
    for _ in expected:
        torch.manual_seed(9)
        dataset = over(LOADERS[kind]())
        if saved is not None:
            restore(dataset, saved)
        else:
            torch.manual_seed(0)
        found += read(iter(dataset), 1)
        saved = checkpoint(dataset)
    assert found == expected


# Loaders that keep their own state


class Remembers:
    """A loader that says where it stands, and draws a seed whenever it is iterated over."""

    def __init__(self, batches: int = 4) -> None:
        self.batches = batches
        self.now = {"position": 0, "epoch": 0}
        self.read: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.rand(1)
        while self.now["position"] < self.batches:
            self.now["position"] += 1
            self.read.append(self.now["position"] - 1)
            yield torch.tensor([100 * self.now["epoch"] + self.read[-1]] * 2)
        self.now.update(position=0, epoch=self.now["epoch"] + 1)

    def state_dict(self) -> dict[str, int]:
        return self.now  # the very object that it goes on changing

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.now = dict(state)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_loader_that_keeps_its_state_is_asked_for_it(ahead: bool, place: str) -> None:
    goes_on(lambda: over(Remembers(), load_ahead=ahead, experimental_per_replica_buffer_size=5), place)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loader_that_keeps_its_state_reads_nothing_again(ahead: bool) -> None:
    dataset = over(Remembers(), load_ahead=ahead)
    iterator = iter(dataset)
    read(iterator, 3)
    loader = Remembers()
    resumed = over(loader)
    resumed.load_state_dict(saved_and_loaded(dataset.state_dict()))
    assert read(resumed) == [[3, 3]]
    assert loader.read == [3]


def test_an_iterator_that_keeps_its_state_goes_on() -> None:
    class Counter:
        def __init__(self) -> None:
            self.n = 0

        def __iter__(self) -> Counter:
            return self

        def __next__(self) -> torch.Tensor:
            self.n += 1
            return torch.tensor([self.n])

        def state_dict(self) -> dict[str, int]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.n = state["n"]

    dataset = over(Counter())
    iterator = iter(dataset)
    assert read(iterator, 2) == [[1], [2]]
    state = dataset.state_dict()
    resumed = over(Counter())
    resumed.load_state_dict(state)
    assert read(resumed, 2) == [[3], [4]]
    dataset.load_state_dict(state)
    assert read(dataset, 2) == [[3], [4]]


# What cannot be loaded


def counted() -> Any:
    dataset = over(LOADERS["generator of the loader"]())
    read(iter(dataset), 2)
    return dataset.state_dict()


def changed(name: str, value: Any) -> Any:
    state = counted()
    state["sources"][0][name] = value
    return state


def refuses(state: Any) -> None:
    """Nothing of what is no state is taken."""
    dataset = over(LOADERS["generator of the loader"]())
    read(iter(dataset), 3)
    before = dataset.state_dict()
    with pytest.raises(TypeError, match=r"returned|returns"):
        dataset.load_state_dict(state)
    assert same(dataset.state_dict(), before)
    assert len(read(dataset)) == STEPS


JUNK = [None, 3, "state", [], {}, {"sources": None}, {"sources": [3]}, {"sources": [{}]}, {"batches": 3}, nn.ReLU()]


@pytest.mark.parametrize("junk", JUNK, ids=shown)
def test_what_is_no_state_is_refused(junk: Any) -> None:
    refuses(junk)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("batches", wrong) for wrong in (-1, 1.5, None, "2")),
        *(("batch_size", wrong) for wrong in (-1, 1.5, "2")),
        *(("began", wrong) for wrong in (None, 3, [None], [torch.ones(3)], [torch.tensor(3, dtype=torch.uint8)])),
        *(("asked", wrong) for wrong in (3, "no", {}, [None])),
        *(("is_begun", wrong) for wrong in (None, 1, "yes")),
        *(("batches", wrong) for wrong in (True, 10**30, torch.tensor(1))),
        *(("batch_size", wrong) for wrong in (0, True, 10**30)),
        ("more", 1),
    ],
    ids=shown,
)
def test_a_state_with_something_wrong_in_it_is_refused(name: str, wrong: Any) -> None:
    refuses(changed(name, wrong))
    with pytest.raises(TypeError, match=repr(name)):
        over(LOADERS["generator of the loader"]()).load_state_dict(changed(name, wrong))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("batches", STEPS + 1, rf"batches={STEPS + 1} were consumed, and this loader has {STEPS}\."),
        ("batches", sys.maxsize, rf"were consumed, and this loader has {STEPS}\."),
        ("began", [], "'began', is of a loader with 0 random generators"),
        (
            "began",
            [torch.zeros(7, dtype=torch.uint8)] * 2,
            r"began\[0\] in the state is not that of",
        ),
        (
            "asked",
            [torch.zeros(7, dtype=torch.uint8)] * 2,
            r"asked\[0\] in the state is not that of",
        ),
        ("is_begun", False, "is_begun=False, and batches=2"),
    ],
    ids=shown,
)
def test_a_state_that_cannot_be_of_this_loader_is_refused(name: str, wrong: Any, message: str) -> None:
    """It was accepted, and the next iteration had no batches, other ones, or failed with an error of torch's."""
    dataset = over(LOADERS["generator of the loader"]())
    with pytest.raises(ValueError, match=message):
        dataset.load_state_dict(changed(name, wrong))
    assert len(read(dataset)) == STEPS


@pytest.mark.parametrize("kind", ["stream", "list"])
def test_more_batches_than_there_are_are_not_silently_left_out(kind: str) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    source: Any = batched(Stream()) if kind == "stream" else [torch.ones(2)] * 4
    state = over(source).state_dict()
    state["sources"][0].update(is_begun=True, batches=9)
    resumed = over(source)
    with pytest.raises(ValueError, match="batches=9 were consumed"):
        resumed.load_state_dict(state)
        next(iter(resumed))


def test_a_state_with_further_entries_is_refused() -> None:
    with pytest.raises(TypeError, match="sources"):
        over(LOADERS["generator of the loader"]()).load_state_dict({**counted(), "epoch": 3})


@pytest.mark.parametrize("name", ["is_begun", "batches", "batch_size", "began", "asked"])
def test_a_state_in_which_something_is_missing_is_refused(name: str) -> None:
    state = counted()
    del state["sources"][0][name]
    refuses(state)


def test_the_state_of_a_loader_of_another_kind_is_refused() -> None:
    plain, remembers = over(LOADERS["in order"]()), over(Remembers())
    with pytest.raises(
        ValueError, match=r"^The state is of a loader that keeps its own state \(state_dict\), and this"
    ):
        plain.load_state_dict(remembers.state_dict())
    with pytest.raises(ValueError, match=r"this one, a Remembers, is one that keeps its own state"):
        remembers.load_state_dict(plain.state_dict())
    assert len(read(plain)) == STEPS
    assert len(read(remembers)) == 4


def test_the_state_of_a_loader_with_other_generators_is_refused() -> None:
    with pytest.raises(ValueError, match="with 1 random generators of its own, and this one has 0"):
        over(LOADERS["shuffled"]()).load_state_dict(counted())
    with pytest.raises(ValueError, match="with 1 random generators of its own, and this one has 2"):
        over(LOADERS["two generators"]()).load_state_dict(counted())
    with pytest.raises(ValueError, match=r"'asked', is of a loader with 0 random generators .*, and this one has 1"):
        over(LOADERS["generator of the loader"]()).load_state_dict(
            changed("asked", counted()["sources"][0]["began"][:1])
        )


def test_of_several_states_either_all_are_taken_or_none() -> None:
    dataset = a_pipeline_for_each()
    read(iter(dataset), 1)
    state = dataset.state_dict()
    state["sources"][1] = counted()["sources"][0]
    resumed = a_pipeline_for_each()
    with pytest.raises(ValueError, match="random generators"):
        resumed.load_state_dict(state)
    assert sum(map(len, read(resumed))) == 11


def test_a_generator_that_was_read_cannot_be_turned_back() -> None:
    dataset = over(torch.ones(2) for _ in range(3))
    read(iter(dataset), 1)
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(RuntimeError, match=r"^The dataset is a generator, which can be iterated over once, and has"):
        iter(dataset)
