"""Datasets whose order each worker draws for itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    random_split,
)

import torchstrategy
from torchstrategy import InputContext, InputOptions
from workers.reading import Numbers, seen_of
from workers.trainings import strategy_of

ROWS = 27


class Augmented(Dataset[torch.Tensor]):
    """Draws for each row that it loads.

    So workers that load different numbers of rows part.
    """

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        random.random()
        np.random.rand()
        torch.rand(())
        return torch.tensor([index])


class Drawn(Sampler[int]):
    """The indices in the order of a function."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())


class DrawnBatches(Sampler[list[int]]):
    """Batches of other sizes, in the order of a function."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        order, batches = list(self.draw()), []
        while order:
            size = random.randint(1, 7)
            batches.append(order[:size])
            order = order[size:]
        return iter(batches)


def of_random() -> list[int]:
    return random.sample(range(ROWS), ROWS)


def of_numpy() -> Any:
    return np.random.permutation(ROWS)


def of_torch() -> list[int]:
    return torch.randperm(ROWS).tolist()


def of_shuffled_list() -> list[int]:
    order = list(range(ROWS))
    random.shuffle(order)
    np.random.shuffle(order)
    return order


DRAWS = {
    "random": of_random,
    "numpy": of_numpy,
    "torch": of_torch,
    "both": of_shuffled_list,
}


def seed_by_rank() -> int:
    rank = torch.distributed.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    return rank


def of_drawn(
    name: str,
    replicas: int,
    in_batches: bool,
    num_workers: int,
    load_ahead: bool | None,
) -> dict[str, Any]:
    """Two epochs, and a third that goes on from its middle in another dataset."""
    strategy = strategy_of(replicas)
    rank = seed_by_rank()
    options = InputOptions(load_ahead=load_ahead)

    def made() -> Any:
        if in_batches:
            loader = DataLoader(
                Augmented(),
                batch_sampler=DrawnBatches(DRAWS[name]),
                num_workers=num_workers,
            )
        else:
            loader = DataLoader(
                Augmented(),
                batch_size=6,
                sampler=Drawn(DRAWS[name]),
                num_workers=num_workers,
            )
        return strategy.experimental_distribute_dataset(loader, options)

    dataset = made()
    epochs = [
        [row for batch in seen_of(strategy, dataset) for row in batch] for _ in range(2)
    ]
    if in_batches or name == "torch":
        return {"epochs": epochs}
    before = random.getstate(), np.random.get_state()
    iterator = iter(dataset)
    first = seen_of(strategy, [next(iterator), next(iterator)])
    again = made()
    again.load_state_dict(dataset.state_dict())
    if not rank:  # the script has saved the state of the first worker
        random.setstate(before[0])
        np.random.set_state(before[1])
    rest = seen_of(strategy, again)
    return {
        "epochs": epochs,
        "resumed": [row for batch in [*first, *rest] for row in batch],
    }


class Streamed(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def _loader(**options: Any) -> Callable[[int], Any]:
    return lambda rank: DataLoader(
        Numbers(ROWS), **{name: given(rank) for name, given in options.items()}
    )


def _generated(rank: int) -> Any:
    return DataLoader(
        Numbers(ROWS),
        6,
        sampler=Drawn(lambda: np.random.default_rng(rank).permutation(ROWS)),
    )


def _subset(rank: int) -> Any:
    return DataLoader(random_split(Numbers(2 * ROWS), [ROWS, ROWS])[0], 6)


def _nested_subset(rank: int) -> Any:
    within = torch.utils.data.ConcatDataset(
        [Subset(Numbers(ROWS), range(rank, ROWS + rank - 1)), Numbers(3)]
    )
    return DataLoader(within, 6)


def _in_order(rows: list[Any]) -> Callable[[int], Any]:
    return lambda rank: DataLoader(Streamed(rows[::-1] if rank else rows), batch_size=4)


def _labelled(rank: int) -> Any:
    rows = [(torch.full((300, 9), 1.0), label) for label in range(8)]
    return DataLoader(Streamed(rows[::-1] if rank else rows), batch_size=4)


def _late(rank: int) -> Any:
    """The same rows in the first batch, and others in the second."""
    order = list(range(ROWS))
    order[10], order[11 + rank] = order[11 + rank], order[10]
    return DataLoader(Numbers(ROWS), 6, sampler=order)


class DrawnOneByOne(Sampler[int]):
    """Draws between the rows that are loaded, which draw from that generator, too."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(ROWS) for _ in range(ROWS))


DIFFERENT: dict[str, Callable[[int], Any]] = {
    "a generator of its own": _generated,
    "a list": _loader(
        sampler=lambda rank: list(range(ROWS))[:: -1 if rank else 1],
        batch_size=lambda rank: 6,
    ),
    "the second batch": _late,
    "draws during the epoch": lambda rank: DataLoader(
        Augmented(), 5, sampler=DrawnOneByOne()
    ),
    "the length": lambda rank: DataLoader(Numbers(ROWS + rank), 6),
    "the batch size": _loader(batch_size=lambda rank: 6 + rank),
    "the number of batches": _loader(
        batch_size=lambda rank: 6, drop_last=lambda rank: bool(rank)
    ),
    "a split": _subset,
    "a split within": _nested_subset,
    "the class": lambda rank: DataLoader([Numbers(ROWS), list(range(ROWS))][rank], 6),
    "streamed floats": _in_order([torch.tensor(float(i)) for i in range(12)]),
    "streamed integers": _in_order([(0.5, i) for i in range(12)]),
    "streamed texts": _in_order([f"row {i}" for i in range(12)]),
    "streamed labels": _labelled,
    "streamed dicts": _in_order(
        [{"x": torch.ones(3), "name": f"row {i}"} for i in range(12)]
    ),
    "listed batches": lambda rank: [torch.arange(6.0) + rank],
    "shapes": lambda rank: [torch.ones(6, 2 + rank)],
}


def of_different(name: str, only_gathers: bool) -> tuple[str, float]:
    """What a worker is told, and whether the strategy can be used then."""
    import warnings

    strategy = strategy_of(1)
    rank = seed_by_rank()
    told = "nothing"
    with strategy.scope():
        layer = torch.nn.Linear(1, 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # every worker reads all of it
            dataset = strategy.experimental_distribute_dataset(DIFFERENT[name](rank))
        for batch in dataset:
            if only_gathers:
                first = batch[0] if isinstance(batch, (list, tuple)) else batch
                strategy.gather(first, axis=0)
            else:
                # What one replica has read is compared beside its gradients.
                strategy.run(lambda given: layer.weight.sum().backward(), args=(batch,))
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return told, strategy.reduce(
        "sum", strategy.run(lambda: torch.ones(()) * 1), axis=None
    ).item()


def of_alike(replicas: int) -> list[Any]:
    """What may differ: workers' own datasets, and streams that draw.

    They draw from what all have alike.
    """
    import warnings

    strategy = strategy_of(replicas)
    rank = seed_by_rank()

    class Shuffled(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(
                [
                    torch.tensor([i + random.randrange(100)])
                    for i in np.random.permutation(12)
                ]
            )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        streamed = strategy.experimental_distribute_dataset(
            DataLoader(Shuffled(), batch_size=5)
        )
    found: list[Any] = [seen_of(strategy, streamed), seen_of(strategy, streamed)]

    def dataset_fn(context: InputContext) -> Any:
        return DataLoader(Numbers(4 + rank), 2, sampler=range(4 + rank))

    found.append(
        seen_of(strategy, strategy.distribute_datasets_from_function(dataset_fn))
    )
    off = InputOptions(
        experimental_auto_shard_policy=torchstrategy.experimental.AutoShardPolicy.OFF
    )
    own = strategy.experimental_distribute_dataset(
        DataLoader(Numbers(4), 2, sampler=Drawn(lambda: [rank, 3])), off
    )
    found.append(seen_of(strategy, own))
    return found


def num_messages() -> list[int]:
    """How many messages a run takes with a batch, and without one."""
    strategy = strategy_of(1)
    workers = strategy.extended._workers
    found = []
    for batch in [
        *strategy.experimental_distribute_dataset(DataLoader(Numbers(12), 4)),
        3,
    ]:
        before = workers.num_exchanges
        strategy.run(lambda rows: None, args=(batch,))
        found.append(workers.num_exchanges - before)
    return found
