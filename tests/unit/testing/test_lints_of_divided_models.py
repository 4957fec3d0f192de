"""Lints of models that ranks divide, without a wrapper that keeps the rest alike.

Right twins are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import linted
from conditions import for_releases
from planted import Added, Copied
from torchstrategy.testing import Finding, run_ranks

RANKS, WIDTH, STEPS = 2, 8, 4

# Of torch, about names that programs use.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
Main = Callable[[int], object]


def findings_of(main: Main) -> list[Finding]:
    return linted.findings_of(lambda: run_ranks(main, RANKS))


def begin(seed: int = 0) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(seed)


def batches(seed: int, steps: int = STEPS, rows: int = 8) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    for _ in range(steps):
        yield torch.randn(rows, WIDTH, generator=generator)


def sgd(*parts: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [parameter for part in parts for parameter in part.parameters()], lr=0.05
    )


def fit(
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rows: Iterator[torch.Tensor],
    before_the_step: Callable[[], None] = lambda: None,
) -> None:
    for batch in rows:
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        before_the_step()
        optimizer.step()


def reduce(*parameters: nn.Parameter) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    whole = rows.new_empty(RANKS * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(whole, rows.contiguous())
    return whole


def sum_and_scatter_rows(whole: torch.Tensor) -> torch.Tensor:
    rows = whole.new_empty(len(whole) // RANKS, *whole.shape[1:])
    dist.reduce_scatter_tensor(rows, whole.contiguous())
    return rows


class Gather(torch.autograd.Function):
    """The rows of all ranks; backwards the sum of the gradients of a rank's rows."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return gather_rows(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return sum_and_scatter_rows(gradient)


class Scatter(torch.autograd.Function):
    """The sum of what all ranks give, of which each has some rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return sum_and_scatter_rows(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gather_rows(gradient)


def copied(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Copied.apply(x)  # type: ignore[no-untyped-call]
    return result


def added(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Added.apply(x)  # type: ignore[no-untyped-call]
    return result


def gathered(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Gather.apply(x)  # type: ignore[no-untyped-call]
    return result


def scattered(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Scatter.apply(x)  # type: ignore[no-untyped-call]
    return result


def gathered_by_torch(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(differentiable.all_gather(x))


def scattered_by_torch(x: torch.Tensor) -> torch.Tensor:
    rows = x.new_empty(len(x) // RANKS, *x.shape[1:])
    result: torch.Tensor = differentiable.reduce_scatter(rows, list(x.chunk(RANKS)))
    return result


Pass = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A feed-forward layer whose hidden units are divided among the ranks."""

    def __init__(
        self, rank: int, enter: Pass, leave: Pass, dropout: float = 0.0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(
            torch.randn(16, WIDTH, generator=generator).chunk(RANKS)[rank] / 4
        )
        self.bias = nn.Parameter(torch.zeros(16 // RANKS))
        self.down = nn.Parameter(
            torch.randn(WIDTH, 16, generator=generator).chunk(RANKS, 1)[rank] / 4
        )
        self.enter, self.leave, self.dropout = enter, leave, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(F.linear(self.enter(self.norm(x)), self.up, self.bias))
        return x + F.dropout(
            self.leave(hidden @ self.down.T), self.dropout, self.training
        )


def blocks(rank: int, enter: Pass, leave: Pass, dropout: float = 0.0) -> list[Block]:
    return [Block(rank, enter, leave, dropout) for _ in range(2)]


# Sequences that are divided


def divided_rows(
    rank: int, enter: Pass, leave: Pass, is_right: bool, has_a_head: bool = False
) -> None:
    begin()
    parts = blocks(rank, enter, leave)
    head = nn.Linear(WIDTH, 1) if has_a_head else nn.Identity()
    model = nn.Sequential(*parts, head)
    whole = [
        parameter
        for part in (*parts, head)
        for name, parameter in part.named_parameters()
        if "norm" in name
    ]
    whole += list(head.parameters())
    fit(model, sgd(model), batches(rank), lambda: reduce(*whole) if is_right else None)


@for_releases
@pytest.mark.parametrize("has_a_head", [False, True])
@pytest.mark.parametrize(
    ("enter", "leave"),
    [(gathered, scattered), (gathered_by_torch, scattered_by_torch)],
    ids=["own", "torch"],
)
def test_gradients_of_each_ranks_rows_are_not_added(
    enter: Pass, leave: Pass, has_a_head: bool
) -> None:
    (finding,) = findings_of(
        lambda rank: divided_rows(rank, enter, leave, False, has_a_head)
    )
    assert finding.name == "gradient-not-reduced" and len(finding.lines) == 1
    assert (
        "Ranks 0, 1 divide a model, and in step 1 they have called the optimizer"
        in finding.says
    )
    assert ("of 6 parameters" if has_a_head else "of 4 parameters") in finding.says
    assert "0.norm.weight, 0.norm.bias, 1.norm.weight and" in finding.says
    assert "up" not in finding.says and "down" not in finding.says
    assert (
        findings_of(lambda rank: divided_rows(rank, enter, leave, True, has_a_head))
        == []
    )


# Layers that are divided


def divided_layers(rank: int, dropout: float, seed: int, rows: int) -> None:
    begin()
    model = nn.Sequential(*blocks(rank, copied, added, dropout), nn.Linear(WIDTH, 1))
    torch.manual_seed(seed)
    fit(model, sgd(model), batches(rows))


@for_releases
def test_ranks_that_divide_a_model_drop_other_numbers_that_are_alike() -> None:
    (finding,) = findings_of(lambda rank: divided_layers(rank, 0.5, 10 + rank, 0))
    assert finding.name == "random-numbers-differ" and len(finding.lines) == 1
    assert "drop other ones of 64 numbers that are alike on all of them" in finding.says
    assert "2.weight" in finding.says
    assert findings_of(lambda rank: divided_layers(rank, 0.5, 10, 0)) == []


@for_releases
def test_ranks_that_divide_a_model_get_other_rows() -> None:
    (finding,) = findings_of(lambda rank: divided_layers(rank, 0.0, 10, rank))
    assert finding.name == "gradient-not-reduced" and "2.weight" in finding.says
    assert findings_of(lambda rank: divided_layers(rank, 0.0, 10 + rank, 0)) == []


# Parameters beside those of `fully_shard`


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.gain * self.layers(x))
        return result


def beside_shards(rank: int, is_ignored: bool, is_right: bool) -> None:
    begin()
    mesh, model = init_device_mesh("cpu", (RANKS,)), Gained()
    fully_shard(model.layers, mesh=mesh)
    if is_ignored:
        fully_shard(model, mesh=mesh, ignored_params={model.gain})
    whole = [model.gain] if is_ignored else [model.gain, *model.head.parameters()]

    def average() -> None:
        reduce(*whole)
        for parameter in whole:
            assert parameter.grad is not None
            parameter.grad /= RANKS

    fit(model, sgd(model), batches(rank), average if is_right else lambda: None)


@for_releases
@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_parameter_that_fully_shard_does_not_have(is_ignored: bool) -> None:
    (finding,) = findings_of(lambda rank: beside_shards(rank, is_ignored, False))
    assert finding.name == "gradient-not-reduced" and len(finding.lines) == 1
    assert "In step 1, ranks 0, 1 have called the optimizer" in finding.says
    count = "1 parameter that" if is_ignored else "3 parameters that"
    assert (
        f"{count} `fully_shard` does not have, beside {6 if is_ignored else 4} that it "
        "has" in finding.says
    )
    assert "gain" in finding.says and ("head.weight" in finding.says) != is_ignored
    assert findings_of(lambda rank: beside_shards(rank, is_ignored, True)) == []


# Right programs


def experts_beside_shards(rank: int, seed: int, passes: Pass) -> None:
    begin()
    mesh, model = init_device_mesh("cpu", (RANKS,)), Gained()
    torch.manual_seed(seed)
    expert = nn.Linear(WIDTH, 1)
    nn.init.zeros_(expert.bias)
    fully_shard(model, mesh=mesh)
    fit(lambda x: model(x) + passes(expert(x)), sgd(model, expert), batches(rank))


def a_gain_that_is_averaged_each_two_steps(rank: int) -> None:
    begin()
    mesh, model = init_device_mesh("cpu", (RANKS,)), Gained()
    fully_shard(model, mesh=mesh, ignored_params={model.gain})
    optimizer = sgd(model)
    for step, rows in enumerate(batches(rank, 6)):
        fit(model, optimizer, iter([rows]))
        if step % 2:
            dist.all_reduce(model.gain.data)
            model.gain.data /= RANKS


def all_ranks_have_the_same_rows_beside_shards(rank: int) -> None:
    begin()
    mesh, model = init_device_mesh("cpu", (RANKS,)), Gained()
    fully_shard(model, mesh=mesh, ignored_params={model.gain})
    fit(model, sgd(model), batches(0))


class Units(nn.Module):
    """A layer whose hidden units are divided, with parts that begin alike.

    They all begin with zeros, or with ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.up, self.bias = (
            nn.Parameter(torch.zeros(4, WIDTH)),
            nn.Parameter(torch.zeros(4)),
        )
        self.gain = nn.Parameter(torch.ones(4))
        self.within = nn.LayerNorm(4)
        self.down = nn.Parameter(torch.ones(WIDTH, 4))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        hidden = F.linear(copied(self.norm(x)), self.up, self.bias)
        units = torch.arange(4.0) + 4 * rank  # so that the gradients of ranks differ
        hidden = self.within(torch.sin(self.gain * hidden + units))
        result: torch.Tensor = self.head(x + added(hidden @ self.down.T))
        return result


def parts_begin_with_zeros_and_ones(rank: int) -> None:
    begin()
    model, beside = Units(), nn.Sequential(*blocks(rank, copied, added))
    fit(lambda x: model(beside(x), rank), sgd(model, beside), batches(0))


def each_rank_has_a_tower(rank: int) -> None:
    begin(rank)
    tower = nn.Sequential(
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 1),
    )
    fit(lambda x: added(tower(x)), sgd(tower), batches(0))


def outputs_of_an_ensemble_are_averaged(rank: int) -> None:
    begin()
    model = Gained()
    fit(lambda x: added(model(x)) / RANKS, sgd(model), batches(rank))


def each_rank_has_a_task(rank: int) -> None:
    begin()
    trunk, head = (
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)),
    )
    fit(lambda x: head(copied(trunk(x))) * (1 + rank), sgd(trunk, head), batches(0))


def each_rank_has_classes_of_its_own(rank: int) -> None:
    begin()
    trunk, head = nn.Sequential(*blocks(rank, copied, added)), nn.Linear(WIDTH, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    # Each rank has the loss of its classes, and the trunk gets the gradients of all.
    fit(lambda x: head(copied(trunk(x))) + rank, sgd(trunk, head), batches(0))


def experts_get_the_rows_of_all(rank: int) -> None:
    begin()
    gate, head = nn.Linear(WIDTH, RANKS), nn.Linear(WIDTH, 1)
    torch.manual_seed(5 + rank)
    expert = nn.Sequential(
        nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, WIDTH)
    )
    for parameter in (expert[0].bias, expert[3].bias):
        assert isinstance(parameter, nn.Parameter)
        nn.init.zeros_(parameter)

    def model(x: torch.Tensor) -> torch.Tensor:
        weights = copied(gate(x).softmax(1))[:, rank : rank + 1]
        result: torch.Tensor = head(x + added(expert(x) * weights))
        return result

    fit(model, sgd(gate, head, expert), batches(0))


def stages_of_a_pipeline(rank: int) -> None:
    begin()
    stage = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = sgd(stage)
    for rows in batches(0):
        if rank == 0:
            made = stage(rows)
            dist.send(made.detach(), 1)
            gradient = torch.empty_like(made)
            dist.recv(gradient, 1)
            made.backward(gradient)
        else:
            given = torch.empty(len(rows), WIDTH)
            dist.recv(given, 0)
            stage(given.requires_grad_()).square().mean().backward()
            assert given.grad is not None
            dist.send(given.grad, 0)
        optimizer.step()
        optimizer.zero_grad()


def each_rank_experiments_alone(rank: int) -> None:
    begin()
    model = Gained()
    torch.manual_seed(rank)
    fit(lambda x: F.dropout(model(x), 0.1), sgd(model), batches(0))


def an_actor_gets_the_weights_of_the_learner(rank: int) -> None:
    begin()
    policy, values = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
    optimizer = sgd(policy if rank == 0 else values)
    for rows in batches(rank):
        fit(policy if rank == 0 else values, optimizer, iter([rows]))
        for parameter in policy.parameters():
            dist.broadcast(parameter.data, 0)


def each_rank_steps_a_part_of_the_parameters(rank: int) -> None:
    begin()
    model = nn.Sequential(*blocks(rank, gathered, scattered))
    norms = [part.norm for part in model if isinstance(part, Block)]
    parts = [
        parameter for name, parameter in model.named_parameters() if "norm" not in name
    ]
    optimizer = torch.optim.SGD([*norms[rank].parameters(), *parts], lr=0.05)

    def reduce_norms() -> None:
        reduce(*(parameter for norm in norms for parameter in norm.parameters()))

    for rows in batches(rank):
        model.zero_grad()
        fit(model, optimizer, iter([rows]), reduce_norms)
        for owner, norm in enumerate(norms):
            for parameter in norm.parameters():
                dist.broadcast(parameter.data, owner)


def norms_are_averaged_after_steps(rank: int) -> None:
    begin()
    model = nn.Sequential(*blocks(rank, gathered, scattered))
    optimizer = sgd(model)
    for rows in batches(rank):
        fit(model, optimizer, iter([rows]))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                dist.all_reduce(parameter.data)
                parameter.data /= RANKS


@for_releases
@pytest.mark.parametrize(
    "program",
    [
        lambda rank: experts_beside_shards(rank, 5 + rank, lambda x: x),
        lambda rank: experts_beside_shards(rank, 5 + rank, added),
        lambda rank: experts_beside_shards(rank, 5, added),
        a_gain_that_is_averaged_each_two_steps,
        parts_begin_with_zeros_and_ones,
        each_rank_has_a_tower,
        outputs_of_an_ensemble_are_averaged,
        each_rank_has_a_task,
        each_rank_has_classes_of_its_own,
        experts_get_the_rows_of_all,
        stages_of_a_pipeline,
        each_rank_experiments_alone,
        an_actor_gets_the_weights_of_the_learner,
        each_rank_steps_a_part_of_the_parameters,
        norms_are_averaged_after_steps,
        all_ranks_have_the_same_rows_beside_shards,
    ],
    ids=lambda program: program.__name__,
)
def test_a_right_program_is_left_alone(program: Main) -> None:
    assert findings_of(program) == []
