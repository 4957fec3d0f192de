"""How workers find each other."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchstrategy.testing
from torchstrategy.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    SlurmClusterResolver,
)


def of_resolver(kind: str, task: int, addresses: list[str]) -> Any:
    resolver: Any = None
    if kind == "slurm":
        resolver = SlurmClusterResolver(port_base=int(addresses[0].partition(":")[2]))
    elif kind == "simple":
        spec = ClusterSpec({"worker": addresses[1:], "chief": addresses[:1]})
        job, index = ("chief", 0) if task == 0 else ("worker", task - 1)
        resolver = SimpleClusterResolver(spec, task_type=job, task_id=index)
    strategy = torchstrategy.MultiWorkerMirroredStrategy(resolver, devices=["cpu"])
    ids = strategy.gather(
        strategy.run(
            lambda: torch.tensor(
                [torchstrategy.get_replica_context().replica_id_in_sync_group]
            )
        ),
        axis=0,
    )
    return (
        strategy.num_replicas_in_sync,
        ids.tolist(),
        dist.is_initialized(),
        strategy.cluster_resolver is resolver,
    )


def of_task(kind: str, addresses: list[str]) -> Any:
    return of_resolver(kind, int(os.environ.get("TASK", "0")), addresses)


def of_a_part() -> Any:
    """Processes 0 and 2 of three train together; process 0 has one more group."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    strategy = torchstrategy.MultiWorkerMirroredStrategy(
        devices=["cpu"], process_group=group
    )
    total = strategy.reduce(
        "sum", strategy.run(lambda: torch.ones(()) * (rank + 1)), axis=None
    )
    return strategy.num_replicas_in_sync, total.item()


def after_a_group_of_one() -> float:
    """The sum over all workers, of which the first has made a group.

    Torch counts that group there, and nowhere else.
    """
    if dist.get_rank() == 0:
        distributed: Any = dist.distributed_c10d
        before = distributed._world.group_count
        dist.new_group([0], use_local_synchronization=True)
        distributed._world.group_count = before + 1  # as torch leaves it since 2.14
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    return strategy.reduce(
        "sum", strategy.run(lambda: torch.ones(())), axis=None
    ).item()


def of_two_worlds(folder: str) -> list[float]:
    """The sums over both workers of a world of tasks 0 and 1, then 0 and 2."""
    task = int(os.environ["TASK"])
    sums = []
    for world in (0, 1), (0, 2):
        if task in world:
            store = f"file://{folder}/{world}"
            dist.init_process_group(
                "gloo", init_method=store, rank=world.index(task), world_size=2
            )
            strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
            sums.append(
                strategy.reduce(
                    "sum", strategy.run(lambda: torch.ones(())), axis=None
                ).item()
            )
            dist.destroy_process_group()
    return sums


def of_a_group_for_devices() -> Any:
    """The script has made its group as one for DDP does.

    It has a backend for CUDA only, which gloo plays here.
    """
    dist.init_process_group("cuda:gloo")
    config = dist.get_backend_config()
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(rows: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        torch.nn.functional.dropout(model(rows), 0.5).square().mean().backward()
        optimizer.step()
        return rows.sum()

    loader = torch.utils.data.DataLoader(torch.ones(7, 2), batch_size=4, shuffle=True)
    sums = [
        strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None).item()
        for batch in strategy.experimental_distribute_dataset(loader)
    ]
    return config, dist.get_backend_config() == config, sums, model.weight.tolist()


def of_unequal_workers(counts: Sequence[int]) -> tuple[str, float]:
    """What the workers are told, which then make a strategy that fits."""
    own = counts[dist.get_rank()]
    try:
        torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"] * own)
        told = "nothing"
    except ValueError as error:
        told = str(error)
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"] * counts[0])
    return told, strategy.reduce(
        "sum", strategy.run(lambda: torch.ones(()) * 1), axis=None
    ).item()


def drifted(how: str) -> None:
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    torchstrategy.testing.assert_workers_agree(strategy, model, optimizer)
    with torch.no_grad():
        if how == "value" and dist.get_rank() == 1:
            model.bias += 1
        elif how == "state" and dist.get_rank() == 1:
            optimizer.state[model.weight]["exp_avg"][0, 1] += 0.5
        elif how == "structure":
            model = torch.nn.Linear(2, 1, bias=dist.get_rank() == 0)
            model.weight.fill_(1)
    torchstrategy.testing.assert_workers_agree(strategy, model, optimizer)


def of_dropped_strategies() -> tuple[int, int]:
    """How many threads of gloo there are while there is a strategy, and afterwards.

    It counts them beyond those without one.
    """
    before = num_gloo_threads()
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    strategy.run(lambda: None)
    meanwhile = num_gloo_threads()
    del strategy
    gc.collect()
    return meanwhile - before, num_gloo_threads() - before


def num_gloo_threads() -> int:
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the listing and the look at its name.
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)
