"""What a program may do with sharded or wrapped models besides an ordinary training."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchstrategy
from torchstrategy._group.processes.process_group import ProcessGroup
from workers.sharding import (
    Make,
    Net,
    in_scope,
    mesh_of,
    numbers_of,
    ordinary,
    sgd,
    shard,
    split,
    split_and_sharded,
    whole,
)
from workers.trainings import batches, strategy_of

X, Y = batches()[0]


def without_rows(make: Make) -> list[torch.Tensor]:
    """Worker 1 runs the step on no rows at all: its mean is NaN, and does not count."""
    strategy = strategy_of(1)
    with strategy.scope():
        model = make(Net())
        optimizer = sgd(model)
    step = ordinary(model, optimizer)
    options = torchstrategy.RunOptions(run_empty_replicas=True)
    for batch in strategy.experimental_distribute_dataset(batches((1, 3, 1))):
        strategy.run(step, args=(batch,), options=options)
    return numbers_of(model, ordinary)


def summed(make: Make) -> list[torch.Tensor]:
    """The step makes the mean over all workers' rows, and gradients are added up."""
    strategy = strategy_of(1)
    with strategy.scope():
        model = make(Net())
        optimizer = sgd(model)

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        torchstrategy.nn.compute_average_loss(losses).backward()
        optimizer.step()

    options = torchstrategy.RunOptions(gradient_reduction="sum")
    for batch in strategy.experimental_distribute_dataset(batches()):
        strategy.run(step, args=(batch,), options=options)
    return numbers_of(model, ordinary)


def in_low_precision() -> list[torch.Tensor]:
    """What comes of bfloat16, after few steps with even and uneven rows."""
    strategy = strategy_of(1)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    with strategy.scope():
        model = shard(Net(), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ordinary(model, optimizer)
    for batch in strategy.experimental_distribute_dataset(batches((8, 3, 1))):
        strategy.run(step, args=(batch,))
    return numbers_of(model, ordinary)


class Dropping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.blocks(x), 0.5))


def drawn(strategy: Any, make: Callable[[Any], Any]) -> list[list[torch.Tensor]]:
    """Parameters after each of some steps that draw random numbers."""
    with strategy.scope():
        model = make(Dropping())
        optimizer = sgd(model)
    torch.manual_seed(4)
    found = []
    for _ in range(3):
        strategy.run(ordinary(model, optimizer), args=((X, Y),))
        found.append([whole(parameter) for parameter in model.parameters()])
    return found


def drawn_together() -> list[list[torch.Tensor]]:
    return drawn(strategy_of(1), split)


def step_outside(make: Make) -> list[torch.Tensor]:
    """After some runs, a step out of any run is torch's own: the workers' mean."""
    strategy = strategy_of(1)
    model, optimizer = in_scope(strategy, make, sgd)
    for batch in strategy.experimental_distribute_dataset(batches()):
        strategy.run(ordinary(model, optimizer), args=(batch,))
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    ordinary(model, optimizer)((X[mine], Y[mine]))
    return numbers_of(model, ordinary)


# Checkpoints


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def saved(folder: Path, make: Make, num_batches: int) -> list[torch.Tensor]:
    """Trains with some batches, saves, and goes on with the others.

    Returns what it comes to.
    """
    strategy = strategy_of(1)
    model, optimizer = in_scope(strategy, make, adam)
    for i, batch in enumerate(strategy.experimental_distribute_dataset(batches())):
        if i == num_batches:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        strategy.run(ordinary(model, optimizer), args=(batch,))
    return [whole(parameter) for parameter in model.parameters()]


def loaded(
    folder: Path, make: Make, num_batches: int, after: bool
) -> list[torch.Tensor]:
    """Goes on from what was saved, with a model already trained or a new one."""
    strategy = strategy_of(1)
    model, optimizer = in_scope(strategy, make, adam)
    if after:
        for batch in strategy.experimental_distribute_dataset(batches()):
            strategy.run(ordinary(model, optimizer), args=(batch,))
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for batch in strategy.experimental_distribute_dataset(batches()[num_batches:]):
        strategy.run(ordinary(model, optimizer), args=(batch,))
    return [whole(parameter) for parameter in model.parameters()]


# A worker that is lost


def killed() -> str:
    """Worker 1 is killed; worker 0 waits for it in the model's own communication."""
    strategy = strategy_of(1)
    model, optimizer = in_scope(strategy, shard, sgd)
    step = ordinary(model, optimizer)
    strategy.run(step, args=((X, Y),))

    def failing(batch: Any) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(batch)

    try:
        strategy.run(failing, args=((X, Y),))
    except torchstrategy.WorkerError as error:
        return str(error)
    return ""


def read_together() -> list[torch.Tensor]:
    """Two of four workers have the same rows, by a sampler.

    The weights, and the rows that this worker has had.
    """
    strategy = strategy_of(1)
    mesh = mesh_of(2, 2)
    with strategy.scope():
        model = split_and_sharded(Net())
        optimizer = sgd(model)
    data = TensorDataset(X, Y)
    rows = mesh["rows"]
    sampler = DistributedSampler(
        data, num_replicas=rows.size(), rank=rows.get_local_rank(), shuffle=False
    )
    loader = DataLoader(data, batch_size=4 // rows.size(), sampler=sampler)
    seen = []

    def step(batch: Any) -> None:
        seen.append(batch[0])
        ordinary(model, optimizer)(batch)

    for batch in strategy.distribute_datasets_from_function(lambda _: loader):
        strategy.run(step, args=(batch,))
    return [torch.cat(seen), *numbers_of(model, ordinary)]


def what_happens_in_a_backward() -> list[str]:
    """In the order in which it does.

    The mark begins to travel, and backward comes to the gradient of the output.
    """
    strategy, happened = strategy_of(1), []
    with strategy.scope():
        model = shard(Net())
        optimizer = sgd(model)
    begin = ProcessGroup.begin_all_reduce

    def telling(
        self: ProcessGroup, flat: torch.Tensor, name: str
    ) -> Callable[[], None]:
        happened.append("the mark")
        return begin(self, flat, name)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        output = model(batch[0])
        output.register_hook(lambda _: happened.append("the gradient"))
        output.square().mean().backward()
        optimizer.step()

    ProcessGroup.begin_all_reduce = telling  # type: ignore[method-assign]
    try:
        for batch in strategy.experimental_distribute_dataset(batches((8, 5, 8))):
            strategy.run(step, args=(batch,))
    finally:
        ProcessGroup.begin_all_reduce = begin  # type: ignore[method-assign]
    return happened


class Counting(nn.Module):
    """Counts in a buffer how often backward has come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_backwards", torch.zeros(()))
        self.register_full_backward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.num_backwards += 1 + dist.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def buffers_of_backward() -> list[float]:
    """After each of three runs, a buffer that backward writes in each worker.

    It is another one in each worker.
    """
    strategy = strategy_of(1)
    with strategy.scope():
        model, counting = shard(Net()), Counting()
        optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        counting(model(batch[0])).square().mean().backward()
        optimizer.step()

    found = []
    for batch in strategy.experimental_distribute_dataset(batches((8, 5, 8))):
        strategy.run(step, args=(batch,))
        found.append(float(counting.num_backwards))
    return found
