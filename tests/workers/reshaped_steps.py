"""Trainings whose objects change between runs, or hold what has no average.

They are the same as in plain PyTorch.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import torchstrategy
from workers.exact_steps import Program, Run, come_to, large_from, sgd, squared
from workers.trainings import Net, batches, cross_entropy, ordinary, strategy_of


def changed_after_two_runs(change: Callable[[Net], None]) -> Any:
    """A training in which something happens to the model, with a new optimizer."""
    model = Net()
    steps, count = [ordinary(model, sgd(model))], [0]

    def train(run: Run, batch: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            change(model)
            steps[0] = ordinary(model, sgd(model))
        run(steps[0], batch)

    return model, train


def another_head(_: Any) -> Any:
    """Outside of the scope, as a program for fine-tuning does.

    Its gradients were those of each worker's rows.
    """

    def change(model: Net) -> None:
        torch.manual_seed(5)
        model.head = nn.Linear(8, 3).double()

    return changed_after_two_runs(change)


def normalised_from_now_on(_: Any) -> Any:
    """Its running statistics were those of each worker's rows."""

    def change(model: Net) -> None:
        # In evaluation, so that a worker's rows are not normalised by themselves.
        model.body.append(nn.BatchNorm1d(8).double().eval())

    return changed_after_two_runs(change)


def more_hidden_units(_: Any) -> Any:
    """Resized by `data`, which leaves the parameter object.

    Only a part of its gradient was weighed.
    """

    def change(model: Net) -> None:
        model.body[0].weight.data = torch.linspace(-1, 1, 48).double().view(12, 4)
        model.body[0].bias.data = torch.linspace(-1, 1, 12).double()
        model.head.weight.data = torch.linspace(-1, 1, 36).double().view(3, 12)
        for parameter in model.parameters():
            parameter.grad = None

    return changed_after_two_runs(change)


def hook_that_removes_itself(_: Any) -> Any:
    """It stayed for ever."""
    model = Net()
    step, count = ordinary(model, sgd(model)), [0]

    def train(run: Run, batch: Any) -> None:
        count[0] += 1
        if count[0] in (1, 3):

            def triple(gradient: torch.Tensor) -> torch.Tensor:
                handle.remove()
                return gradient * 3

            handle = model.head.weight.register_hook(triple)
        run(step, batch)

    return model, train


def hook_that_removes_another(_: Any) -> Any:
    """Backward comes to the head first, and its hook removes that of the body."""
    model = Net()
    step, count = ordinary(model, sgd(model)), [0]

    def train(run: Run, batch: Any) -> None:
        count[0] += 1
        if count[0] == 1:
            other = model.body[0].weight.register_hook(lambda gradient: gradient * 5)
            model.head.weight.register_hook(lambda _: other.remove())
        run(step, batch)

    return model, train


def hook_that_raises_once(_: Any) -> Any:
    """Afterwards, the hooks of later parameters were lost."""
    model = Net()
    optimizer, count = sgd(model), [0]

    def raise_once(gradient: torch.Tensor) -> None:
        if count[0] == 2:
            raise ValueError("a bad gradient")

    model.head.weight.register_hook(raise_once)
    model.body[0].weight.register_hook(lambda gradient: gradient * 2)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        try:
            cross_entropy(model, *batch).backward()
        except ValueError:
            optimizer.zero_grad()
            return
        optimizer.step()

    def train(run: Run, batch: Any) -> None:
        count[0] += 1
        run(step, batch)

    return model, train


class Trainer:
    """Refers to itself, so that only Python's collector of cycles frees it."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.optimizer = SGD(model.parameters(), lr=rate)
        self.step = ordinary(model, self.optimizer)
        self.itself = self


def trainers_that_are_dropped(scope: Any) -> Any:
    """Python's collector ran in one worker only.

    The settings of optimizers that nobody had were said to differ.
    """
    model = Net()
    count, kept = [0], [Trainer(model, 0.1)]

    def train(run: Run, batch: Any) -> None:
        if count[0] % 2 == 1:
            with scope():
                kept[0] = Trainer(model, 0.1 / count[0])
            if dist.is_initialized() and dist.get_rank() == 0:
                # A report, during which the collector runs.
                _ = [[i] for i in range(200_000)]
        count[0] += 1
        run(kept[0].step, batch)

    return model, train


def models_that_are_dropped(_: Any) -> Any:
    """Models that nobody has any longer were there in one worker and not in another.

    The collector had run in the other.
    """
    gc.disable()
    Trainer(Net(), 0.1)
    if dist.is_initialized() and dist.get_rank() == 0:
        gc.collect()
    model = Net()
    step = ordinary(model, sgd(model))

    def train(run: Run, batch: Any) -> None:
        run(step, batch)
        gc.enable()

    return model, train


class WithGraph(Net):
    """Has a sparse buffer, such as a graph's edges, and one that nobody can add up.

    Its dtype does not allow that.
    """

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        edges = torch.eye(4).double()
        self.register_buffer(
            "edges",
            edges.to_sparse() if layout is torch.sparse_coo else edges.to_sparse_csr(),
        )
        self.register_buffer("table", torch.linspace(0, 1, 5).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward((self.edges @ x.T).T)


def with_graph(layout: torch.layout) -> Any:
    model = WithGraph(layout)
    step = ordinary(model, sgd(model))
    seen = nn.ParameterList(model.parameters())  # what is compared: no sparse tensors
    return seen, lambda run, batch: run(step, batch)


def coordinates(_: Any) -> Any:
    return with_graph(torch.sparse_coo)


def compressed_rows(_: Any) -> Any:
    return with_graph(torch.sparse_csr)


PROGRAMS: list[Program] = [
    another_head,
    normalised_from_now_on,
    more_hidden_units,
    hook_that_removes_itself,
    hook_that_removes_another,
    hook_that_raises_once,
    trainers_that_are_dropped,
    models_that_are_dropped,
    coordinates,
    compressed_rows,
]


def of_workers(size: float) -> dict[str, list[torch.Tensor]]:
    with large_from(size):
        return {
            program.__name__: come_to(strategy_of(1), program) for program in PROGRAMS
        }


def statistics_of_a_sum(replicas: int) -> torch.Tensor:
    """Running statistics of rows that are the same everywhere.

    Gradients are added up there and not averaged.
    """
    strategy = strategy_of(replicas)
    with strategy.scope():
        norm = nn.BatchNorm1d(3, momentum=0.5).double()
    options = torchstrategy.RunOptions(gradient_reduction="sum")

    def step(batch: Any) -> None:
        norm(batch[0]).sum().backward()

    data = [(torch.full((8, 3), 2.0, dtype=torch.float64), batches()[0][1])]
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=(batch,), options=options)
    assert norm.running_mean is not None
    return norm.running_mean.clone()


def told_of(what: str) -> str:
    """What this worker hears of a training that cannot be right."""
    strategy = strategy_of(1)
    with strategy.scope():
        model = Net()
        optimizer = sgd(model)
    torch.manual_seed(dist.get_rank())
    outside = Net()
    other = sgd(outside)

    def step(batch: Any) -> None:
        if what == "no object of the scope":
            ordinary(outside, other)(batch)
        elif what == "an update by hand":
            gradients = torch.autograd.grad(
                cross_entropy(model, *batch),
                list(model.parameters()),
                allow_unused=True,
            )
            with torch.no_grad():
                for parameter, gradient in zip(
                    model.parameters(), gradients, strict=True
                ):
                    if gradient is not None:
                        parameter -= 0.1 * gradient
        elif what == "a layer of forward":
            if not hasattr(model, "late"):
                model.late = nn.Linear(3, 3).double()
            squared(nn.Sequential(model, model.late), batch[0]).backward()
        elif what == "a hook on several":
            torch.autograd.graph.register_multi_grad_hook(
                list(model.head.parameters()), lambda gradients: None
            )
            ordinary(model, optimizer)(batch)
        elif what == "a copy of its own":
            ordinary(copy := Net(), sgd(copy))(batch)
        elif what == "a sparse buffer":
            model.register_buffer("edges", torch.eye(4).to_sparse() * len(batch[0]))
            ordinary(model, optimizer)(batch)

    try:
        for batch in strategy.experimental_distribute_dataset(batches()):
            strategy.run(step, args=(batch,))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def warned_of_a_step_by_itself() -> list[str]:
    """What is warned of where the program forgot `strategy.run`."""
    strategy = strategy_of(1)
    with strategy.scope():
        model = Net()
        optimizer = sgd(model)
    step = ordinary(model, optimizer)
    (batch, *_) = batches()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(step, args=(batch,))
        optimizer.step()  # an update between runs, by gradients of a run
        before = len(caught)
        step(batch)
    assert before == 0
    return [str(one.message) for one in caught]
