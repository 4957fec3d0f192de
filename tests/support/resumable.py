"""Loaders of every kind, and how an iteration over them is saved and goes on."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
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

from topologies import central
from torchstrategy import (
    DistributedDataset,
    InputOptions,
    InputReplicationMode,
    OneDeviceStrategy,
    Strategy,
    get_strategy,
)

STRATEGIES: dict[str, Strategy] = {
    "one_device": OneDeviceStrategy("cpu"),
    **{str(n): central(n) for n in (1, 2, 3, 4)},
}
TWO = STRATEGIES["2"]
ROWS = 11
BATCH = 2
STEPS = 6
Make = Callable[[], Any]


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(batch: Any) -> list[int]:
    """The rows of a batch, over all replicas, in order."""
    pieces = get_strategy().experimental_local_results(batch)
    return [int(row) for piece in pieces for row in piece.reshape(-1).tolist()]


def read(batches: Iterable[Any], steps: int | None = None) -> list[list[int]]:
    """The rows of each batch, of so many of them.

    As in a step with dropout, something is drawn after each.
    """
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
    return saved_and_loaded(
        {"data": dataset.state_dict(), "torch": torch.get_rng_state()}
    )


def restore(dataset: DistributedDataset, saved: Any) -> None:
    torch.set_rng_state(saved["torch"])
    dataset.load_state_dict(saved["data"])


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
    return DataLoader(
        Numbers() if dataset is None else dataset, batch_size=BATCH, **options
    )


LOADERS: dict[str, Make] = {
    "in order": batched,
    "shuffled": lambda: batched(shuffle=True),
    "last batch dropped": lambda: batched(shuffle=True, drop_last=True),
    "generator of the loader": lambda: batched(shuffle=True, generator=generator()),
    "generator of the sampler": lambda: batched(
        sampler=RandomSampler(range(ROWS), generator=generator())
    ),
    "two generators": lambda: batched(
        sampler=RandomSampler(range(ROWS), generator=generator()),
        generator=generator(6),
    ),
    "with replacement": lambda: batched(sampler=RandomSampler(range(99), True, ROWS)),
    "with replacement and a generator": lambda: batched(
        Numbers(99), sampler=RandomSampler(range(99), True, 50, generator=generator())
    ),
    "weighted": lambda: batched(
        sampler=WeightedRandomSampler([k + 1.0 for k in range(ROWS)], ROWS)
    ),
    "subset": lambda: batched(sampler=SubsetRandomSampler(range(0, ROWS, 2))),
    "drawn one by one": lambda: batched(Numbers(1000), sampler=DrawsAtEachIndex(ROWS)),
    "drawn one by one with a generator": lambda: batched(
        Numbers(1000),
        sampler=DrawsAtEachIndex(ROWS, generator()),
        generator=generator(6),
    ),
    "drawn at once": lambda: batched(sampler=DrawsAtOnce(ROWS)),
    "drawn at once, ready batches": lambda: DataLoader(
        Ready(), batch_size=None, sampler=DrawsAtOnce(STEPS)
    ),
    "ready batches": lambda: DataLoader(Ready(), batch_size=None, shuffle=True),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=TwoByTwo(RandomSampler(range(ROWS)))
    ),
    "generator within a batch sampler": lambda: DataLoader(
        Numbers(),
        batch_sampler=TwoByTwo(RandomSampler(range(ROWS), generator=generator())),
    ),
    "generator within torch's batch sampler": lambda: DataLoader(
        Numbers(),
        batch_sampler=BatchSampler(
            RandomSampler(range(ROWS), generator=generator()), BATCH, False
        ),
    ),
    "stream": lambda: batched(Stream()),
    "stream with a generator": lambda: batched(Stream(generator())),
    "stream of batches": lambda: DataLoader(Ready(), batch_size=None),
    "subclass": lambda: Collated(Numbers(), batch_size=BATCH, shuffle=True),
    "subclass that iterates by itself": lambda: Longer(
        Numbers(), batch_size=BATCH, shuffle=True
    ),
    "list": lambda: [torch.arange(2 * k, 2 * k + 2) for k in range(STEPS)],
}

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
    """What follows a place is the same after a checkpoint as without one.

    So are so many later epochs.
    """
    epochs, steps = PLACES[place]
    torch.manual_seed(1)
    dataset = make()
    for _ in range(epochs):
        read(dataset)
    iterator = iter(() if steps is None else dataset)
    # What is drawn between the beginning and the first batch does not touch the order.
    torch.rand(2)
    read(iterator, steps)
    saved = checkpoint(dataset)
    expected = [*read(iterator), *(read(dataset) for _ in range(later))]
    torch.manual_seed(2)
    resumed = make()
    restore(resumed, saved)
    assert [
        *([] if steps is None else read(resumed)),
        *(read(resumed) for _ in range(later)),
    ] == expected


def a_pipeline_for_each(strategy: Strategy = TWO, **options: Any) -> DistributedDataset:
    def dataset_fn(context: Any) -> DataLoader:
        first = 10 * context.input_pipeline_id
        numbers = range(first, first + 5 + context.input_pipeline_id)
        return DataLoader(numbers, batch_size=2, shuffle=True, **options)  # type: ignore[arg-type]

    mode = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    return strategy.distribute_datasets_from_function(dataset_fn, mode)


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, down to their tensors."""
    bytes_of = io.BytesIO(), io.BytesIO()
    for state, file in zip((one, other), bytes_of, strict=True):
        torch.save(copy.deepcopy(state), file)
    return bytes_of[0].getvalue() == bytes_of[1].getvalue()


class Remembers:
    """A loader that says where it stands, and draws a seed for each iteration."""

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
