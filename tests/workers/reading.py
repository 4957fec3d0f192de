"""Datasets that several workers read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import torchstrategy
from torchstrategy import InputContext, InputOptions, InputReplicationMode
from torchstrategy.experimental import AutoShardPolicy
from workers.trainings import Net, cross_entropy, strategy_of


class Numbers(Dataset[torch.Tensor]):
    """Numbers, and how many of them were loaded."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return torch.tensor([index])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10).reshape(-1, 1))


def seen_of(strategy: torchstrategy.Strategy, dataset: Any) -> list[Any]:
    """For each step, the rows of all replicas of all workers."""
    return [
        strategy.gather(strategy.run(lambda rows: rows, args=(batch,)), axis=0)
        .flatten()
        .tolist()
        for batch in dataset
    ]


def of_own_rows(replicas: int, **loader: Any) -> dict[str, Any]:
    """Two shuffled epochs, and one that goes on from the middle."""
    strategy = strategy_of(replicas)
    rank = strategy.extended._workers.index
    torch.manual_seed(rank)  # the order is that of worker 0
    numbers = Numbers(18)
    dataset = strategy.experimental_distribute_dataset(
        DataLoader(numbers, batch_size=8, shuffle=True, **loader)
    )
    epochs = [seen_of(strategy, dataset), seen_of(strategy, dataset)]
    loaded = list(numbers.loaded)
    iterator = iter(dataset)
    first = seen_of(strategy, [next(iterator)])
    state = dataset.state_dict()
    rest = seen_of(strategy, iterator)
    again = strategy.experimental_distribute_dataset(
        DataLoader(numbers, batch_size=8, shuffle=True, **loader)
    )
    again.load_state_dict(state)
    resumed = seen_of(strategy, again)
    return {
        "epochs": epochs,
        "loaded": loaded,
        "third": first + rest,
        "rest": rest,
        "resumed": resumed,
        "state": state,
    }


def of_generators(replicas: int) -> list[Any]:
    strategy = strategy_of(replicas)
    generator = torch.Generator().manual_seed(strategy.extended._workers.index)
    loader = DataLoader(
        Numbers(9), batch_size=4, shuffle=True, generator=generator, drop_last=True
    )
    return seen_of(strategy, strategy.experimental_distribute_dataset(loader))


def of_whole_batches(replicas: int) -> list[Any]:
    """What every worker reads all of."""
    import warnings

    strategy = strategy_of(replicas)
    found = []
    for dataset in (
        DataLoader(Stream(), batch_size=4),
        [torch.arange(5), torch.arange(1)],
    ):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            distributed = strategy.experimental_distribute_dataset(dataset)
        found.append(
            (seen_of(strategy, distributed), [str(one.message) for one in warned])
        )
    return found


def of_shares(replicas: int) -> list[Any]:
    strategy = strategy_of(replicas)
    shares = [3.0] + [1.0] * (strategy.num_replicas_in_sync - 1)
    loader = DataLoader(Numbers(8), batch_size=8)
    dataset = strategy.experimental_distribute_dataset(
        loader, InputOptions(row_shares=shares)
    )
    return [
        [len(part) for part in strategy.experimental_local_results(batch)]
        for batch in dataset
    ]


def of_own_datasets(replicas: int, mode: str) -> dict[str, Any]:
    """Each worker has a dataset of another length: 3, 5 and 1 batches.

    They train what one device trains.
    """
    strategy = strategy_of(replicas)
    contexts = []

    def dataset_fn(context: InputContext) -> list[Any]:
        contexts.append(
            (
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.num_replicas_in_sync,
            )
        )
        return own_batches(context.input_pipeline_id)

    options = InputOptions(experimental_replication_mode=InputReplicationMode(mode))
    dataset = strategy.distribute_datasets_from_function(dataset_fn, options)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [
        strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)
        for batch in dataset
    ]
    length = ""
    try:
        len(dataset)
    except TypeError as error:
        length = str(error)
    return {
        "contexts": contexts,
        "losses": torch.stack(losses),
        "model": model.state_dict(),
        "length": length,
    }


LENGTHS = (3, 5, 1)


def own_batches(pipeline: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(pipeline)
    return [
        (
            torch.randn(2, 4, generator=generator).double(),
            torch.randint(3, (2,), generator=generator),
        )
        for _ in range(LENGTHS[pipeline % 3])
    ]


def of_own_loaders(replicas: int) -> dict[str, Any]:
    """Each worker has a loader of its own, whose batches its replicas share.

    They have 3, 2 and 2 batches, the last ones of 1.
    """
    strategy = strategy_of(replicas)
    rank, count = strategy.extended._workers.index, strategy.extended._workers.count
    numbers = Numbers(7)
    loader = DataLoader(numbers, batch_size=2, sampler=range(rank, 7, count))
    options = InputOptions(experimental_auto_shard_policy=AutoShardPolicy.OFF)
    dataset = strategy.experimental_distribute_dataset(loader, options)
    seen = seen_of(strategy, dataset)
    iterator = iter(dataset)
    next(iterator)
    again = strategy.experimental_distribute_dataset(loader, options)
    again.load_state_dict(dataset.state_dict())
    shares = InputOptions(
        experimental_auto_shard_policy=AutoShardPolicy.OFF,
        row_shares=[1.0] + [0.0] * (replicas - 1),
    )
    shared = next(iter(strategy.experimental_distribute_dataset(loader, shares)))
    distributed = DataLoader(
        numbers,
        batch_size=4,
        sampler=DistributedSampler(numbers, count, rank, shuffle=False),
    )
    try:
        len(dataset)
    except TypeError as error:
        length = str(error)
    return {
        "seen": seen,
        "loaded": list(numbers.loaded),
        "resumed": seen_of(strategy, again),
        "shares": [len(part) for part in strategy.experimental_local_results(shared)],
        "of DistributedSampler": seen_of(
            strategy, strategy.experimental_distribute_dataset(distributed, options)
        ),
        "length": length,
    }


def of_failing_rows(kind: str, num_workers: int) -> None:
    """One of two workers cannot load a row of its second batch."""
    strategy = strategy_of(1)
    numbers = FailingNumbers(8)
    if kind == "sharded":
        dataset = strategy.experimental_distribute_dataset(
            DataLoader(numbers, 4, num_workers=num_workers)
        )
    else:
        dataset = strategy.distribute_datasets_from_function(
            lambda context: DataLoader(
                numbers,
                2,
                num_workers=num_workers,
                sampler=range(context.input_pipeline_id, 8, 2),
            )
        )
    for batch in dataset:
        strategy.reduce("sum", strategy.run(lambda rows: rows, args=(batch,)), axis=0)


class FailingNumbers(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise OSError(f"row {index} cannot be read")
        return super().__getitem__(index)


def refused(what: str) -> None:
    strategy = strategy_of(1)
    if what == "sampler":
        numbers = Numbers(4)
        strategy.experimental_distribute_dataset(
            DataLoader(numbers, 2, sampler=DistributedSampler(numbers, 2, 0))
        )
    else:
        loader = DataLoader(
            Numbers(4), 4, collate_fn=lambda rows: torch.cat([*rows, rows[0]])
        )
        for batch in strategy.experimental_distribute_dataset(loader):
            strategy.run(lambda rows: rows, args=(batch,))


def of_an_empty_dataset(replicas: int) -> list[Any]:
    """The first worker has no batch: it runs the step on one of another worker."""
    strategy = strategy_of(replicas)
    given = []

    def dataset_fn(context: InputContext) -> list[Any]:
        return [
            {"rows": torch.tensor([i]), "name": f"batch {i}"}
            for i in range(context.input_pipeline_id * 3)
        ]

    def step(batch: Any) -> torch.Tensor:
        given.append((batch["rows"].tolist(), batch["name"]))
        return batch["rows"]

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    seen = [
        strategy.gather(strategy.run(step, args=(batch,)), axis=0).tolist()
        for batch in dataset
        for _ in range(2)
    ]
    return [seen, given]
