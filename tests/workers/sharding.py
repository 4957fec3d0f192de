"""Trainings of models that are sharded or wrapped already, in workers.

The plain model is trained in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from workers.trainings import batches, cross_entropy, ordinary, strategy_of

Step = Callable[[Any], Any]


class Block(nn.Module):
    """Two layers: tensor parallelism splits one by columns and one by rows.

    It splits the first by columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.wide, self.narrow = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Net(nn.Module):
    """Blocks, and a head of odd sizes, so that some workers have more of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def mesh_of(*sizes: int) -> Any:
    names = ("rows", "parts") if len(sizes) > 1 else ("rows",)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def halves() -> tuple[int, int]:
    return 2, dist.get_world_size() // 2


# Ways to shard a model


def shard(model: Net, mesh: Any = None, **policies: Any) -> Any:
    mesh = mesh_of(dist.get_world_size()) if mesh is None else mesh
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **policies)
    return fully_shard(model, mesh=mesh, **policies)


def blocks_only(model: Net) -> Any:
    """The head is a plain parameter beside sharded ones."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(dist.get_world_size()))
    return model


def hybrid(model: Net) -> Any:
    return shard(model, mesh_of(*halves()))


def offloaded(model: Net) -> Any:
    return shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def kept_whole(model: Net) -> Any:
    return shard(model, reshard_after_forward=False)


def reduced_in_double(model: Net) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    return shard(model, mp_policy=policy)


def splitting(model: Net, mesh: Any) -> Any:
    for block in model.blocks:
        parallelize_module(
            block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        )
    return model


def split(model: Net) -> Any:
    return splitting(model, mesh_of(dist.get_world_size()))


def split_and_sharded(model: Net) -> Any:
    mesh = mesh_of(dist.get_world_size() // 2, 2)
    splitting(model, mesh["parts"])
    return shard(model, mesh["rows"])


def wrapped(model: Net) -> Any:
    return DistributedDataParallel(model)


def wrapped_in_views(model: Net) -> Any:
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters=True
    )


# Steps


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return step


def several_backwards(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        loss.backward()
        model(batch[0]).square().mean().backward()
        optimizer.step()
        return loss.detach()

    return step


def sending_later(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Two backwards, of which only the second one sends gradients."""

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        set_sync = getattr(model, "set_requires_gradient_sync", lambda _: None)
        set_sync(False)
        model(batch[0]).square().mean().backward()
        set_sync(True)
        loss = cross_entropy(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def over_runs(
    model: nn.Module, optimizer: torch.optim.Optimizer, sends: bool = False
) -> Step:
    """Runs of unlike rows are added up before an update.

    In the last one, all but one worker have none.
    """
    count = [0]

    def step(batch: Any) -> torch.Tensor:
        count[0] += 1
        is_last = count[0] in (4, 7)
        getattr(model, "set_requires_gradient_sync", lambda _: None)(is_last or sends)
        loss = cross_entropy(model, *batch)
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def over_runs_sending(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return over_runs(model, optimizer, sends=True)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The third loss overflows in one row only, so that a worker alone knows of it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    count = [0]

    def step(batch: Any) -> torch.Tensor:
        count[0] += 1
        x, y = batch
        weight = (
            torch.where(x[:, 0] == x[:, 0].max(), torch.inf, 1.0)
            if count[0] == 3
            else torch.ones(len(x))
        )
        optimizer.zero_grad()
        loss = (
            nn.functional.cross_entropy(model(x), y, reduction="none") * weight
        ).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def checkpointed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Any) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        hidden = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        loss = nn.functional.cross_entropy(hidden, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def line_search(model: nn.Module, _: torch.optim.Optimizer) -> Step:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def step(batch: Any) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, *batch)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return ordinary(torch.compile(model, backend="eager"), optimizer)


Make = Callable[[Net], Any]
Train = Callable[[nn.Module, torch.optim.Optimizer], Step]


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor of which this worker may have a part."""
    tensor = tensor.detach()
    return (
        tensor.full_tensor().clone()
        if hasattr(tensor, "full_tensor")
        else tensor.clone()
    )


def numbers_of(model: nn.Module, train: Train) -> list[torch.Tensor]:
    found = [whole(parameter) for parameter in model.parameters()]
    # There, the gradients that were not sent yet are nowhere.
    if train is not over_runs:
        # Where there is none: NaN, which is equal to nothing else.
        for parameter in model.parameters():
            found.append(
                torch.tensor(torch.nan)
                if parameter.grad is None
                else whole(parameter.grad)
            )
    return found


def plainly(train: Train, make_optimizer: Any = sgd) -> list[torch.Tensor]:
    """What plain PyTorch comes to."""
    model = Net()
    step = train(model, make_optimizer(model))
    found = []
    for batch in batches():
        loss = step(batch)
        found += [loss, *numbers_of(model, train)]
    return found


def in_scope(strategy: Any, make: Make, make_optimizer: Any) -> tuple[Any, Any]:
    with strategy.scope():
        model = make(Net())
        return model, make_optimizer(model)


def given_after(strategy: Any, make: Make, make_optimizer: Any) -> tuple[Any, Any]:
    """Model and optimizer are made out of the scope.

    The model was sharded when the strategy gets it.
    """
    model = strategy.distribute_module(make(Net()))
    return model, strategy.distribute_optimizer(make_optimizer(model))


def given_before(strategy: Any, make: Make, make_optimizer: Any) -> tuple[Any, Any]:
    """The strategy gets the plain model, which is sharded later, out of any scope."""
    model = make(strategy.distribute_module(Net()))
    return model, make_optimizer(model)


def run_before(strategy: Any, make: Make, make_optimizer: Any) -> tuple[Any, Any]:
    """The plain model was run before it is sharded."""
    with strategy.scope():
        model = Net()
    strategy.run(lambda: model(torch.ones(1, 4, dtype=torch.float64)).sum().backward())
    model.zero_grad()
    model = make(model)
    return model, make_optimizer(model)


def from_meta(strategy: Any, make: Make, make_optimizer: Any) -> tuple[Any, Any]:
    """The sharded model gets memory after sharding, and values from a whole one.

    It gets them by loading.
    """
    with strategy.scope():
        with torch.device("meta"):
            model = Net()
        model = make(model).to_empty(device="cpu")
        optimizer = make_optimizer(model)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, Net().state_dict(), options=options)
    return model, optimizer


def unlike_at_first(strategy: Any, make: Make, make_optimizer: Any) -> tuple[Any, Any]:
    """Workers that have the same part of a parameter begin with other values.

    They take those of the first of them.
    """
    model, optimizer = in_scope(strategy, make, make_optimizer)
    replica = model.head.weight.device_mesh.get_local_rank(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(replica)
    return model, optimizer


def in_workers(
    make: Make, train: Train, begin: Any = in_scope, make_optimizer: Any = sgd
) -> list[torch.Tensor]:
    """What this worker comes to."""
    strategy = strategy_of(1)
    model, optimizer = begin(strategy, make, make_optimizer)
    step = train(model, optimizer)
    found = []
    for batch in data_of(strategy, make):
        loss = strategy.run(step, args=(batch,))
        found += [
            strategy.reduce("mean", loss, axis=None, weights=batch),
            *numbers_of(model, train),
        ]
    return found


def data_of(strategy: Any, make: Make) -> Iterator[Any]:
    """The batches, split over the workers.

    Those that compute one model together have the same rows.
    """
    if make not in (split, split_and_sharded):
        return iter(strategy.experimental_distribute_dataset(batches()))
    rank, size = dist.get_rank(), dist.get_world_size()
    num, own = (1, 0) if make is split else (size // 2, rank // 2)
    rows = [
        tuple(torch.tensor_split(part, num)[own] for part in batch)
        for batch in batches()
    ]
    return iter(strategy.distribute_datasets_from_function(lambda _: rows))


Case = tuple[Make, Train, Any]
TRAININGS: Sequence[Train] = [
    ordinary,
    clipped,
    several_backwards,
    sending_later,
    over_runs,
    over_runs_sending,
]
TRAININGS = [*TRAININGS, scaled, checkpointed]
CASES: dict[int, Sequence[Case]] = {
    2: [
        *((shard, train, in_scope) for train in [*TRAININGS, compiled]),
        *((wrapped, train, in_scope) for train in [*TRAININGS, compiled, line_search]),
        *(
            (make, several_backwards, in_scope)
            for make in (blocks_only, offloaded, kept_whole, reduced_in_double)
        ),
        *((make, over_runs, in_scope) for make in (kept_whole, reduced_in_double)),
        *(
            (make, ordinary, begin)
            for make in (shard, wrapped)
            for begin in (given_after, given_before, run_before)
        ),
        (wrapped_in_views, several_backwards, in_scope),
        (split, several_backwards, in_scope),
        (split, over_runs, in_scope),
        (shard, ordinary, from_meta),
    ],
    4: [
        *((make, several_backwards, in_scope) for make in (shard, wrapped, split)),
        *((hybrid, train, in_scope) for train in TRAININGS),
        # torch clips no gradients of several meshes.
        *(
            (split_and_sharded, train, in_scope)
            for train in TRAININGS
            if train not in (clipped, scaled)
        ),
        (hybrid, ordinary, unlike_at_first),
    ],
}


def name_of(case: Case) -> str:
    return " ".join(one.__name__ for one in case)


def of_workers(cases: Sequence[Case]) -> dict[str, list[torch.Tensor]]:
    """What this worker comes to, by the names of the cases."""
    return {name_of(case): in_workers(*case) for case in cases}
