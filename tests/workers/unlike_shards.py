"""What is refused of workers with sharded or wrapped models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchstrategy
from workers.sharding import Net, ordinary, sgd, shard, split
from workers.trainings import batches, strategy_of

X, Y = batches()[0]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained(make: Callable[[Net], Any], own: bool = True, **options: Any) -> str:
    """What a run says with a model that was made so.

    Args:
        make: Shards or wraps a model.
        own: Whether the rows are not split by the strategy.
        options: Those of the strategy.
    """
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"], **options)

    def train() -> None:
        with strategy.scope():
            model = make(Net())
            optimizer = sgd(model)
        step = ordinary(model, optimizer)
        if own:
            strategy.run(step, args=((X, Y),))
        else:
            for batch in strategy.experimental_distribute_dataset(batches()):
                strategy.run(step, args=(batch,))

    return error_of(train)


def other_rows() -> str:
    strategy = strategy_of(1)
    with strategy.scope():
        model = split(Net())
        optimizer = sgd(model)
    return error_of(
        lambda: strategy.run(
            ordinary(model, optimizer), args=((X + dist.get_rank(), Y),)
        )
    )


def of_pairs(model: Net) -> Any:
    """Processes 0 and 1 have a mesh, and so have 2 and 3.

    Nobody averages the gradients of both.
    """
    meshes = [DeviceMesh("cpu", [first, first + 1]) for first in (0, 2)]
    return shard(model, meshes[dist.get_rank() // 2])


def of_unlike_meshes(model: Net) -> Any:
    """Blocks are sharded over some of the processes.

    The head is split by tensor parallelism over all.
    """
    some = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "parts"))["rows"]
    for block in model.blocks:
        fully_shard(block, mesh=some)
    parallelize_module(model.head, init_device_mesh("cpu", (4,)), ColwiseParallel())
    return model


def in_one_worker(model: Net) -> Any:
    return shard(model) if dist.get_rank() else model


def with_hook(model: Net) -> Any:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def static(model: Net) -> Any:
    return DistributedDataParallel(model, static_graph=True)


def over_some(model: Net) -> Any:
    group, _ = dist.new_subgroups(2)
    return DistributedDataParallel(model, process_group=group)


def flat(model: Net) -> Any:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


REFUSED: dict[str, Callable[[], str]] = {
    "split rows": lambda: trained(split, own=False),
    "other rows": other_rows,
    "flat": lambda: trained(flat),
    "in one worker": lambda: trained(in_one_worker),
    "a hook": lambda: trained(with_hook),
    "static": lambda: trained(static),
    "in a step": lambda: sharded_in_a_step(),
    "a write": lambda: written_in_one(),
    "several replicas": lambda: in_several_replicas(),
    "pairs": lambda: trained(of_pairs, own=False),
    "unlike meshes": lambda: trained(of_unlike_meshes),
    "some processes": lambda: trained(over_some),
    "strangers": lambda: of_a_part(),
}


def of_refusal(what: str) -> str:
    return REFUSED[what]()


def sharded_in_a_step() -> str:
    strategy = strategy_of(1)
    with strategy.scope():
        model = Net()

    def step() -> None:
        shard(model)
        model(X).sum().backward()

    return error_of(lambda: strategy.run(step))


def written_in_one() -> str:
    strategy = strategy_of(1)
    with strategy.scope():
        model = shard(Net())
        optimizer = sgd(model)
    step = ordinary(model, optimizer)

    def train() -> None:
        for _ in range(3):
            strategy.run(step, args=((X, Y),))
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.head.weight.mul_(2)
        strategy.run(step, args=((X, Y),))

    return error_of(train)


def in_several_replicas() -> str:
    strategy = strategy_of(2)

    def train() -> None:
        with strategy.scope():
            model = shard(Net())
        strategy.run(lambda: model(X))

    return error_of(train)


def of_a_part() -> str:
    """The strategy has processes 0 and 1 of four, and the model is sharded over all."""
    group = dist.new_group([0, 1])
    model = shard(Net())
    if dist.get_rank() > 1:
        return ""
    strategy = torchstrategy.MultiWorkerMirroredStrategy(
        devices=["cpu"], process_group=group
    )
    strategy.distribute_module(model)
    return error_of(lambda: strategy.run(lambda: model(X).sum().backward()))
