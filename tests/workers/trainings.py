"""Trainings that are the same in plain PyTorch, and under a strategy.

It is one of one process or of several.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import torchstrategy
from torchstrategy import MultiWorkerMirroredStrategy

# Rows of the batches: some workers have fewer, and some none.
SIZES = (8, 8, 6, 2, 3, 8, 1)


def strategy_of(replicas: int, **options: Any) -> MultiWorkerMirroredStrategy:
    return MultiWorkerMirroredStrategy(devices=["cpu"] * replicas, **options)


def batches(sizes: Iterable[int] = SIZES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 4, generator=generator, dtype=torch.float64),
            torch.randint(3, (n,), generator=generator),
        )
        for n in sizes
    ]


class Net(nn.Module):
    """A small classifier.

    Args:
        norm: What normalises its hidden layer.
        seed: That of its weights.
    """

    def __init__(
        self, norm: nn.Module | None = None, seed: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(
            nn.Linear(4, 8), norm or nn.Identity(), nn.Tanh(), nn.Dropout(dropout)
        )
        self.head = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Embedded(nn.Module):
    """Adds up embeddings, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 3, sparse=True)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x * 2).long().abs() % 6).sum(1)


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


Step = Callable[[tuple[torch.Tensor, torch.Tensor]], Any]
Made = tuple[nn.Module, torch.optim.Optimizer, Step, list[Any]]


def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A step with nothing special in it."""

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def plainly(optimizer: str, **settings: Any) -> Made:
    model = Net()
    made = getattr(torch.optim, optimizer)(
        model.parameters(), **{"lr": 0.05, **settings}
    )
    return model, made, ordinary(model, made), []


def sgd() -> Made:
    return plainly("SGD", momentum=0.9, weight_decay=0.01)


def adam() -> Made:
    return plainly("Adam")


def adamw() -> Made:
    return plainly("AdamW")


def clipped() -> Made:
    model, optimizer, _, extra = adam()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return model, optimizer, step, extra


def two_backwards() -> Made:
    model, optimizer, _, extra = sgd()

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        cross_entropy(model, x * 0.5, y).backward()
        optimizer.step()

    return model, optimizer, step, extra


def gathered() -> Made:
    model, optimizer, _, extra = adam()

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        hidden = model.body(x)
        context = torchstrategy.get_replica_context()
        everyone = context.all_gather(hidden, axis=0)
        mean = context.all_reduce("sum", hidden.sum(0)) / everyone.shape[0]
        apart = (everyone @ everyone.T).tanh().mean() + ((everyone - mean) ** 2).sum()
        (nn.functional.cross_entropy(model.head(hidden), y) + apart).backward()
        optimizer.step()

    return model, optimizer, step, extra


def compiled() -> Made:
    """A compiled model. What the compiler makes of its graphs changes nothing."""
    model, optimizer, _, extra = sgd()
    model.body.compile(backend="eager")
    return (
        model,
        optimizer,
        ordinary(torch.compile(model, backend="eager"), optimizer),
        extra,
    )


def compiled_step() -> Made:
    model, optimizer, step, extra = sgd()
    return model, optimizer, torch.compile(step, backend="eager"), extra


def compiled_ahead() -> Made:
    """A compiled model, whose backward the compiler traces, too."""
    model, optimizer, _, extra = sgd()
    return (
        model,
        optimizer,
        ordinary(torch.compile(model, backend="aot_eager"), optimizer),
        extra,
    )


def compiled_by_inductor() -> Made:
    """A compiled model, whose forward and backward are programs in C++."""
    model, optimizer, _, extra = sgd()
    return model, optimizer, ordinary(torch.compile(model), optimizer), extra


def _normalised(norm: nn.Module) -> Made:
    model = Net(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, ordinary(model, optimizer), []


def sync_batch_norm() -> Made:
    norm = (
        torchstrategy.nn.SyncBatchNorm(8)
        if torchstrategy.has_strategy()
        else nn.BatchNorm1d(8)
    )
    return _normalised(norm)


def sync_batch_norm_by_turns() -> Made:
    """Backward stops at some parameters.

    A replica without rows did not come to the backward of the layer then.
    """
    model, optimizer, _, _ = sync_batch_norm()
    parameters = list(model.parameters())

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward(inputs=parameters[::2])
        optimizer.step()

    return model, optimizer, step, []


def sync_batch_norm_of_doubled() -> Made:
    """Hooks see what autograd saves.

    A replica without rows saved a mask, which is none when it has been doubled.
    """
    model, optimizer, _, _ = sync_batch_norm()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            outputs = model(batch[0])
        nn.functional.mse_loss(outputs[:, 0], batch[1].to(outputs)).backward()
        optimizer.step()

    return model, optimizer, step, []


def batch_norm() -> Made:
    """Whose statistics are those of each replica's rows.

    Only the same number of replicas computes the same.
    """
    return _normalised(nn.BatchNorm1d(8))


def over_micro_batches() -> Made:
    model, optimizer, _, _ = sgd()
    count = [0]

    def step(batch: Any) -> None:
        (cross_entropy(model, *batch) / 2).backward()

    def train(run: Callable[[Step, Any], Any], batch: Any) -> None:
        run(step, batch)
        count[0] += 1
        if count[0] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return model, optimizer, step, [train]


def scheduled() -> Made:
    model, optimizer, _, extra = sgd()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=0.5
    )

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        rows = torch.tensor(float(len(batch[0])), dtype=torch.float64)
        context = torchstrategy.get_replica_context()
        total, count = context.all_reduce("sum", (loss.detach() * rows, rows))
        plateau.step((total / count).item().__round__(9))

    return model, optimizer, step, extra


def sparse() -> Made:
    model = Embedded()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.05)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        assert model.table.weight.grad.is_sparse
        optimizer.step()

    return model, optimizer, step, []


def overflowing() -> Made:
    """A row of the second and the fourth batch makes the scaled gradients overflow.

    The scaler skips these updates.
    """
    model, optimizer, _, _ = sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    count = [0]

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        scaler.scale(loss * (torch.inf if (x > 100).any() else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    def train(run: Callable[[Step, Any], Any], batch: Any) -> None:
        run(step, batch)
        count[0] += 1
        model.unused.bias.data.fill_(scaler.get_scale())

    return model, optimizer, step, [train]


def lbfgs() -> Made:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def step(batch: Any) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, *batch)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return model, optimizer, step, []


def updated_outside() -> Made:
    model, optimizer, _, _ = adam()

    def step(batch: Any) -> None:
        cross_entropy(model, *batch).backward()

    def train(run: Callable[[Step, Any], Any], batch: Any) -> None:
        optimizer.zero_grad()
        run(step, batch)
        optimizer.step()

    return model, optimizer, step, [train]


def assigned() -> Made:
    """Each replica puts a gradient of its own rows in place of one it has seen."""
    model, optimizer, _, _ = sgd()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        loss.backward(retain_graph=True)
        assert model.head.weight.grad is not None
        (again,) = torch.autograd.grad(loss * 3, [model.head.weight])
        model.head.weight.grad = again
        optimizer.step()

    return model, optimizer, step, []


def hooked() -> Made:
    """Gradient hooks of the user's parameters see the gradient of the whole batch."""
    model, optimizer, step, extra = sgd()
    model.head.weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
    return model, optimizer, step, extra


def averaged() -> Made:
    """Losses of the whole batch that count rows by weights.

    There is a regularization loss beside them.
    """
    model, optimizer, _, _ = sgd()

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        of_rows = nn.functional.cross_entropy(model(x), y, reduction="none")
        loss = torchstrategy.nn.compute_average_loss(
            of_rows, sample_weight=1 + y.double()
        )
        size = sum(parameter.square().sum() for parameter in model.parameters())
        (loss + torchstrategy.nn.scale_regularization_loss(0.01 * size)).backward()
        optimizer.step()

    return model, optimizer, step, []


def penalized() -> Made:
    """A backward through a backward through an all-reduce.

    The inner gradient is that of each replica.
    """
    model, optimizer, _, _ = sgd()

    def step(batch: Any) -> None:
        x, _ = batch
        x = x.clone().requires_grad_()
        optimizer.zero_grad()
        context = torchstrategy.get_replica_context()
        total = context.all_reduce("sum", model(x).tanh().sum(0))
        (slope,) = torch.autograd.grad(total.tanh().sum() / 9, x, create_graph=True)
        slope.square().sum(1).mean().backward()
        optimizer.step()

    return model, optimizer, step, []


def nan_in_understudies() -> Made:
    """What workers without rows compute is NaN, and reaches nobody."""
    model, optimizer, _, _ = sgd()
    sizes = iter(SIZES * 10)
    size = [0]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        if (
            size[0] == 1
            and torchstrategy.get_replica_context().replica_id_in_sync_group
        ):
            loss = loss * torch.nan
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    def train(run: Callable[[Step, Any], Any], batch: Any) -> None:
        size[0] = next(sizes)
        run(step, batch)

    return model, optimizer, step, [train]


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


def counting() -> Made:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()

    return model, optimizer, step, []


EXACT = [
    sgd,
    adam,
    adamw,
    clipped,
    two_backwards,
    gathered,
    sync_batch_norm,
    over_micro_batches,
    scheduled,
    sparse,
]
EXACT += [sync_batch_norm_by_turns, sync_batch_norm_of_doubled]
EXACT += [overflowing, lbfgs, updated_outside, assigned, hooked]
EXACT += [averaged, nan_in_understudies, counting]
# Where a replica computes something of its own rows.
LIKE_ONE_PROCESS = [batch_norm, penalized]


# Which take the compiler some seconds.
COMPILED = [compiled, compiled_step, compiled_ahead]


def data_for(make: Callable[[], Made]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    # No replica normalises a single row.
    if make in (sync_batch_norm, sync_batch_norm_by_turns, sync_batch_norm_of_doubled):
        data = batches((8, 8, 6, 2, 3, 8))
    else:
        data = batches((8, 6, 8) if make is batch_norm else SIZES)
    if make is overflowing:
        data[1][0][0] = 1000.0
        data[4][0][1] = 1000.0
    return data


def trained(
    strategy: torchstrategy.Strategy, make: Callable[[], Made], epochs: int = 1
) -> dict[str, torch.Tensor]:
    """The parameters and buffers after the training, and the optimizer's settings."""
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, step, train = make()

    def run(step: Step, batch: Any) -> Any:
        return strategy.run(step, args=(batch,))

    for _ in range(epochs):
        for batch in strategy.experimental_distribute_dataset(data_for(make)):
            train[0](run, batch) if train else run(step, batch)
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found["lr"] = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
    return found


def table(
    replicas: int, makes: Sequence[Callable[[], Made]] = (*EXACT, *LIKE_ONE_PROCESS)
) -> dict[str, dict[str, torch.Tensor]]:
    """What a worker comes to, for each of the trainings."""
    return {make.__name__: trained(strategy_of(replicas), make) for make in makes}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(
        (one[name].double() - other[name].double()).abs().max().item() for name in one
    )
