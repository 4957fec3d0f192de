"""Programs with one planted mistake each, and their right twins.

Lints have to name the former, and must not name the latter.

Each takes its rank and whether it `is_right`. They differ in a line or two.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
    random_split,
)

RANKS = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Pair(NamedTuple):
    """A program with a mistake.

    Attributes:
        lint: Which lint names it.
        main: The program, called with its rank and whether it is right.
        has_ranks: Whether it is for torchrun.
        needs_device: Whether it goes unnoticed on the CPU.
    """

    lint: str
    main: Callable[[int, bool], None]
    has_ranks: bool = True
    needs_device: bool = False


PAIRS: dict[str, Pair] = {}


def pair(
    lint: str, has_ranks: bool = True, needs_device: bool = False
) -> Callable[[Callable[[int, bool], None]], Callable[[int, bool], None]]:
    def add(main: Callable[[int, bool], None]) -> Callable[[int, bool], None]:
        PAIRS[main.__name__] = Pair(lint, main, has_ranks, needs_device)
        return main

    return add


def begin(seed: int = 0) -> None:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    torch.manual_seed(seed)


def make_model(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *more, nn.ReLU(), nn.Linear(8, 1)).to(DEVICE)


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


def rows_of(rank: int, steps: int = 3, rows: int = 4) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield torch.randn(rows, 4, generator=generator).to(DEVICE)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[torch.Tensor]
) -> None:
    for rows in batches:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


# Weights and gradients


@pair("gradient-not-reduced")
def no_sync_around_all(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank, 6)):
        is_last = step % 2 == 1
        with nullcontext() if is_last and is_right else model.no_sync():
            (model(rows).square().mean() / 2).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


@pair("clipped-before-reduced")
def each_rank_clips_its_own_gradients(rank: int, is_right: bool) -> None:
    begin()
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows * (1 + rank)).square().mean().backward()
        if not is_right:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        if is_right:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


@pair("clipped-before-reduced")
def each_rank_clips_before_one_collective(rank: int, is_right: bool) -> None:
    begin()
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows * (1 + rank)).square().mean().backward()
        if not is_right:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False)
        gradients = [
            parameter.grad
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(
            gradients, flat.split([one.numel() for one in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient) / RANKS)
        optimizer.step()


@pair("weights-differ")
def one_rank_loads_weights_before_they_are_sharded(rank: int, is_right: bool) -> None:
    begin()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    state = {
        name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()
    }
    if is_right or rank == 0:
        model.load_state_dict(state)
    model.to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (RANKS,)))
    fit(model, sgd(model), rows_of(rank))


@pair("same-rows")
def rows_are_drawn_with_one_seed(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    if is_right:
        torch.manual_seed(rank)
    fit(model, sgd(model), (torch.randn(4, 4, device=DEVICE) for _ in range(4)))


@pair("scaled-added-to-unscaled", has_ranks=False)
def gradients_are_unscaled_in_each_micro_batch(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer, scaler = sgd(model), torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for step, rows in enumerate(rows_of(rank, 6)):
        is_last = step % 2 == 1
        scaler.scale(model(rows).square().mean() / 2).backward()
        if is_last or not is_right:
            scaler.unscale_(optimizer)
        if is_last:
            scaler.step(optimizer)
            optimizer.zero_grad()
        if is_last or not is_right:
            scaler.update()


@pair("gradients-of-other-scales", has_ranks=False)
def one_scaler_for_two_optimizers_that_step_at_other_times(
    rank: int, is_right: bool
) -> None:
    torch.manual_seed(0)
    model, other = make_model(), make_model()
    optimizers = sgd(model), sgd(other)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=2)
    of_other = (
        torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=2)
        if is_right
        else scaler
    )
    for step, rows in enumerate(rows_of(rank, 8)):
        optimizers[1].zero_grad()
        of_other.scale(other(rows).square().mean()).backward()
        of_other.step(optimizers[1])
        of_other.update()
        scaler.scale(model(rows).square().mean() / 2).backward()
        if step % 2:
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[0].zero_grad()


@pair("gradients-of-other-scales")
def each_rank_looks_for_overflows_in_its_own_part(rank: int, is_right: bool) -> None:
    """A rank that skips a step alone lowers its scale alone: sums then mix scales.

    Later sums have two of them.
    """
    begin()
    model = make_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[rank::RANKS], 0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    for step, rows in enumerate(rows_of(rank)):
        model.zero_grad()
        scaler.scale(model(rows).square().mean()).backward()
        for parameter in parameters:
            assert parameter.grad is not None
            if step == 1 and parameter is parameters[0]:
                parameter.grad[0] = float("inf")
            parameter.grad /= RANKS
            dist.all_reduce(parameter.grad)
        scaler.unscale_(optimizer)
        if is_right:
            for found in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, dist.ReduceOp.MAX)
        scaler.step(optimizer)
        scaler.update()
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=number % RANKS)


@pair("gradients-of-other-scales", has_ranks=False)
def the_scale_is_updated_between_two_optimizers_of_a_step(
    rank: int, is_right: bool
) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizers = [sgd(model[0]), sgd(model[2])]
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=3)
    for rows in rows_of(rank, 6):
        model.zero_grad()
        scaler.scale(model(rows).square().mean()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            if not is_right:
                scaler.update()
        if is_right:
            scaler.update()


LossWithScaler = Callable[[nn.Module, torch.Tensor, torch.amp.GradScaler], torch.Tensor]


def fit_with_scaler(rank: int, loss_of: LossWithScaler) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer, scaler = sgd(model), torch.amp.GradScaler(DEVICE, init_scale=8.0)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rows, scaler)).backward()
        scaler.step(optimizer)
        scaler.update()


@pair("gradient-still-scaled", has_ranks=False)
def the_penalty_is_one_of_scaled_gradients(rank: int, is_right: bool) -> None:
    def loss_of(
        model: nn.Module, rows: torch.Tensor, scaler: torch.amp.GradScaler
    ) -> torch.Tensor:
        rows.requires_grad_()
        (slope,) = torch.autograd.grad(
            scaler.scale(model(rows).sum()), rows, create_graph=True
        )
        if is_right:
            slope = slope / scaler.get_scale()
        loss: torch.Tensor = (
            model(rows).square().mean() + (slope.norm(dim=1) - 1).square().mean()
        )
        return loss

    fit_with_scaler(rank, loss_of)


class Distilled(nn.Module):
    """A network that is trained to answer as a frozen one does."""

    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.teacher, self.student, self.is_right = (
            make_model(nn.Dropout(0.5)),
            make_model(),
            is_right,
        )
        self.teacher.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        if self.is_right:
            self.teacher.eval()
        return self

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(rows)
        return self.student(rows) - wanted


@pair("eval-mode-undone", has_ranks=False)
def a_teacher_drops_again(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = Distilled(is_right)
    optimizer = sgd(model.student)
    model.train()
    fit(model, optimizer, rows_of(rank))


@pair("gradient-not-reduced")
def no_sync_around_the_last(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank, 6)):
        is_last = step % 2 == 1
        with nullcontext() if is_last == is_right else model.no_sync():
            (model(rows).square().mean() / 2).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


@pair("gradient-not-reduced")
def module_called_past_the_wrapper(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    fit(model if is_right else model.module, sgd(model), rows_of(rank))


@pair("gradient-not-reduced")
def head_is_not_wrapped(rank: int, is_right: bool) -> None:
    begin()
    body, head = nn.Linear(4, 8).to(DEVICE), nn.Linear(8, 1).to(DEVICE)
    whole = nn.Sequential(wrapped(body), wrapped(head) if is_right else head)
    fit(whole, sgd(whole), rows_of(rank))


@pair("gradient-not-reduced")
def gradient_of_a_bias_is_left_out(rank: int, is_right: bool) -> None:
    begin()
    model = make_model()
    optimizer = sgd(model)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for parameter in model.parameters():
            if is_right or parameter.dim() > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= RANKS
        optimizer.step()


@pair("gradient-not-reduced")
def loss_is_added_after_backward(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        if not is_right:
            for parameter in model.parameters():
                parameter.grad += 0.1 * rows.mean() * parameter.detach()
        optimizer.step()


@pair("gradient-not-reduced")
def a_head_is_added_after_the_model_was_wrapped(rank: int, is_right: bool) -> None:
    begin()
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).to(DEVICE)
    if is_right:
        net.append(nn.Linear(8, 1).to(DEVICE))
    model = wrapped(net)
    if not is_right:
        net.append(nn.Linear(8, 1).to(DEVICE))
    fit(model, sgd(net), rows_of(rank))


@pair("gradient-not-reduced")
def body_is_unfrozen_after_it_was_wrapped(rank: int, is_right: bool) -> None:
    begin()
    net = make_model()
    net[0].requires_grad_(False)
    model = wrapped(net)
    optimizer = sgd(net)
    for epoch in range(2):
        if epoch == 1:
            net[0].requires_grad_(True)
            model = wrapped(net) if is_right else model
        fit(model, optimizer, rows_of(rank))


def reducer_of(model: nn.Module) -> list[Any]:
    """Reduces each gradient once it is there; returns what to wait for."""
    works: list[Any] = []

    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= RANKS
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        parameter.register_post_accumulate_grad_hook(reduce)
    return works


def wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()
    works.clear()


@pair("used-before-wait")
def step_is_made_before_gradients_are_there(rank: int, is_right: bool) -> None:
    begin()
    model = make_model()
    works, optimizer = reducer_of(model), torch.optim.Adam(model.parameters(), lr=0.01)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        if is_right:
            wait_for(works)
        optimizer.step()
        wait_for(works)


@pair("step-skipped-by-some")
def gradients_are_unscaled_before_they_are_reduced(rank: int, is_right: bool) -> None:
    scaled_by_hand(rank, is_right, torch.optim.SGD)


@pair("step-skipped-by-some")
def adamw_is_scaled_before_gradients_are_reduced(rank: int, is_right: bool) -> None:
    scaled_by_hand(rank, is_right, functools.partial(torch.optim.AdamW, fused=True))


@pair("step-skipped-by-some")
def fused_gradients_are_unscaled_before_they_are_reduced(
    rank: int, is_right: bool
) -> None:
    scaled_by_hand(rank, is_right, functools.partial(torch.optim.SGD, fused=True))


def scaled_by_hand(
    rank: int, is_right: bool, make: Callable[..., torch.optim.Optimizer]
) -> None:
    begin()
    model = make_model()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = make(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12)
    for step, rows in enumerate(rows_of(rank, 5)):
        is_too_large = step == 2 and rank == 1
        optimizer.zero_grad()
        scaler.scale(
            model(rows).square().mean() * (float("inf") if is_too_large else 1)
        ).backward()
        if not is_right:
            scaler.unscale_(optimizer)
        gradients = [
            parameter.grad
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        whole = torch.cat([gradient.flatten() for gradient in gradients]) / RANKS
        dist.all_reduce(whole)
        for gradient, part in zip(
            gradients, whole.split([one.numel() for one in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))
        scaler.step(optimizer)
        scaler.update()


@pair("weights-differ")
def seed_of_the_rank_before_the_model(rank: int, is_right: bool) -> None:
    begin(0 if is_right else rank)
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        optimizer.step()


@pair("weights-differ")
def checkpoint_loaded_on_one_rank(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    state = {
        name: torch.full_like(tensor, 0.1)
        for name, tensor in model.state_dict().items()
    }
    if is_right or rank == 0:
        model.load_state_dict(state)
    fit(model, sgd(model), rows_of(rank))


@pair("replicas-part")
def learning_rate_of_the_rank(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    fit(model, sgd(model, 0.1 if is_right else 0.1 * (rank + 1)), rows_of(rank))


@pair("replicas-part")
def weights_are_clamped_on_one_rank(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        fit(model, optimizer, iter([rows]))
        if is_right or rank == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.1, 0.1)


@pair("replicas-part")
def state_of_the_optimizer_is_loaded_on_one_rank(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    before = torch.optim.Adam(model.parameters())
    fit(model, before, rows_of(rank))
    optimizer = torch.optim.Adam(model.parameters())
    if is_right or rank == 0:
        optimizer.load_state_dict(before.state_dict())
    fit(model, optimizer, rows_of(rank))


@pair("metric-of-one-rank")
def a_sum_is_reduced_to_one_rank(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for rows in rows_of(rank):
        fit(model, optimizer, iter([rows]))
        with torch.no_grad():
            metric = model.module(rows).square().mean()
        if is_right:
            dist.all_reduce(metric)
        else:
            dist.reduce(metric, 0)
        schedule.step(metric.item())


class Centered(nn.Module):
    """Subtracts a running mean."""

    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.inner, self.is_right = make_model(), is_right

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean = rows.mean(0)
        if self.is_right:
            dist.all_reduce(mean)
            mean = mean / RANKS
        self.center.mul_(0.9).add_(mean, alpha=0.1)
        return self.inner(rows - self.center)


@pair("replicas-part")
def buffer_of_one_rank(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(Centered(is_right).to(DEVICE))
    fit(model, sgd(model), rows_of(rank))


# Rows


def fit_epochs(
    loader: DataLoader[Any], rank: int, sampler: Any = None, lr: float = 0.01
) -> None:
    model = wrapped(make_model())
    optimizer = sgd(model, lr)
    for epoch in range(3):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for (rows,) in loader:
            fit(model, optimizer, iter([rows.to(DEVICE)]))


def data(rows: int = 32) -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * rows).view(rows, 4) / (4 * rows))


@pair("same-rows")
def no_sampler(rank: int, is_right: bool) -> None:
    begin()
    sampler = DistributedSampler(data()) if is_right else None
    fit_epochs(
        DataLoader(data(), batch_size=4, shuffle=sampler is None, sampler=sampler),
        rank,
        sampler,
    )


@pair("same-rows")
def sampler_of_rank_0(rank: int, is_right: bool) -> None:
    begin()
    sampler = DistributedSampler(
        data(), num_replicas=RANKS, rank=rank if is_right else 0
    )
    fit_epochs(DataLoader(data(), batch_size=4, sampler=sampler), rank, sampler)


@pair("same-rows")
def sampler_with_a_seed_of_the_rank(rank: int, is_right: bool) -> None:
    begin()
    sampler = DistributedSampler(data(), seed=0 if is_right else rank)
    fit_epochs(DataLoader(data(), batch_size=4, sampler=sampler), rank, sampler)


@pair("same-rows")
def every_rank_shuffles_all_rows(rank: int, is_right: bool) -> None:
    begin(rank)
    whole = data()
    mine = Subset(whole, range(rank, len(whole), RANKS)) if is_right else whole
    fit_epochs(DataLoader(mine, batch_size=4, shuffle=True), rank)


@pair("same-rows")
def rows_chosen_alike(rank: int, is_right: bool) -> None:
    begin()
    model, rows = wrapped(make_model()), torch.randn(64, 4)
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(rank if is_right else 0)
    for _ in range(3):
        index = torch.randint(len(rows), (8,), generator=generator)
        fit(model, optimizer, iter([rows[index].to(DEVICE)]))


@pair("same-order")
def set_epoch_is_missing(rank: int, is_right: bool) -> None:
    begin()
    sampler = DistributedSampler(data(), shuffle=True)
    fit_epochs(
        DataLoader(data(), batch_size=4, sampler=sampler),
        rank,
        sampler if is_right else None,
        lr=1e-4,
    )


class BatchesOfSampler:
    """Batches of the program's own, such as sequences of one length together."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(self.sampler)
        return iter([sorted(rows[i : i + 4]) for i in range(0, len(rows), 4)])


@pair("same-order")
def set_epoch_is_called_on_the_sampler_of_the_loader(rank: int, is_right: bool) -> None:
    """With `batch_sampler=`, `loader.sampler` is a sequential one.

    The loader makes it and never uses it.
    """
    begin()
    batches = BatchesOfSampler(DistributedSampler(data(), shuffle=True))
    loader: Any = DataLoader(data(), batch_sampler=batches)
    set_on = batches.sampler if is_right else loader.sampler
    fit_epochs(loader, rank, set_on if hasattr(set_on, "set_epoch") else None, lr=1e-4)


@pair("same-order")
def set_epoch_is_looked_for_on_a_batch_sampler_of_torch(
    rank: int, is_right: bool
) -> None:
    begin()
    sampler = DistributedSampler(data(), shuffle=True)
    loader: Any = DataLoader(
        data(), batch_sampler=BatchSampler(sampler, batch_size=4, drop_last=True)
    )
    set_on: Any = sampler if is_right else loader.batch_sampler
    fit_epochs(loader, rank, set_on if hasattr(set_on, "set_epoch") else None, lr=1e-4)


@pair("same-rows")
def all_ranks_draw_from_the_same_part(rank: int, is_right: bool) -> None:
    begin(rank)
    rows = range(rank, 32, RANKS) if is_right else range(24)
    fit_epochs(
        DataLoader(data(), batch_size=4, sampler=SubsetRandomSampler(list(rows))),
        rank,
        lr=1e-4,
    )


class OwnSampler(Sampler[int]):
    """A part of one order of all rows, which a seed and the epoch choose."""

    def __init__(self, rank: int, rows: int = 32, seed: int = 0) -> None:
        self.rank, self.rows, self.seed, self.epoch = rank, rows, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows // RANKS

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(100 * self.seed + self.epoch)
        return iter(
            torch.randperm(self.rows, generator=generator)[self.rank :: RANKS].tolist()
        )


@pair("same-order")
def set_epoch_of_an_own_sampler_is_missing(rank: int, is_right: bool) -> None:
    begin()
    sampler = OwnSampler(rank)
    fit_epochs(
        DataLoader(data(), batch_size=4, sampler=sampler),
        rank,
        sampler if is_right else None,
        lr=1e-4,
    )


@pair("same-rows")
def an_own_sampler_has_a_seed_of_the_rank(rank: int, is_right: bool) -> None:
    """A half of the rows of a rank are on the other one.

    So it is with parts that know nothing of each other.
    """
    begin()
    sampler = OwnSampler(rank, rows=128, seed=0 if is_right else rank)
    fit_epochs(
        DataLoader(data(128), batch_size=8, sampler=sampler), rank, sampler, lr=1e-4
    )


@pair("same-rows", needs_device=True)
def each_rank_takes_its_part_of_another_order(rank: int, is_right: bool) -> None:
    """The model gets rows with noise, never the same ones.

    What is to be reconstructed shows which rows they are.
    """
    begin()
    model, rows = wrapped(nn.Linear(4, 4).to(DEVICE)), torch.randn(128, 4)
    optimizer, own = sgd(model), np.random.default_rng([7, rank])
    common = np.random.default_rng(7)
    for _ in range(2):
        order = (common if is_right else own).permutation(len(rows))[rank::RANKS]
        for at in range(0, len(order), 16):
            clean = rows[order[at : at + 16]]
            noisy = clean + 0.1 * torch.from_numpy(
                own.standard_normal(clean.shape).astype(np.float32)
            )
            optimizer.zero_grad()
            F.mse_loss(model(noisy.to(DEVICE)), clean.to(DEVICE)).backward()
            optimizer.step()


@pair("same-rows")
def each_rank_cuts_another_order_into_batches(rank: int, is_right: bool) -> None:
    begin()
    rows = torch.randn(128, 4)
    model = wrapped(make_model())
    generator = torch.Generator().manual_seed(0 if is_right else rank)
    parts = torch.randperm(len(rows), generator=generator)[rank::RANKS].split(8)
    fit(model, sgd(model), (rows[part].to(DEVICE) for part in parts))


@pair("same-order", has_ranks=False)
def generator_is_seeded_in_each_epoch(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    loader: Any = DataLoader(data(), batch_size=4, shuffle=True, generator=generator)
    model = make_model()
    optimizer = sgd(model)
    for _ in range(2):
        if not is_right:
            generator.manual_seed(0)
        for (rows,) in loader:
            fit(model, optimizer, iter([rows.to(DEVICE)]))


@pair("rows-on-none")
def rows_are_divided_twice(rank: int, is_right: bool) -> None:
    begin()
    whole = data()
    mine = whole if is_right else Subset(whole, range(rank, len(whole), RANKS))
    sampler: Any = DistributedSampler(mine, shuffle=False)
    fit_epochs(DataLoader(mine, batch_size=4, sampler=sampler), rank, sampler)


@pair("rows-on-none")
def last_row_is_left_out(rank: int, is_right: bool) -> None:
    begin()
    whole = data(33)
    each = len(whole) // RANKS
    if is_right:
        sampler: Any = DistributedSampler(whole, shuffle=False)
        fit_epochs(DataLoader(whole, batch_size=4, sampler=sampler), rank, sampler)
    else:
        fit_epochs(
            DataLoader(
                Subset(whole, range(rank * each, (rank + 1) * each)), batch_size=4
            ),
            rank,
        )


@pair("rows-on-none")
def too_many_replicas(rank: int, is_right: bool) -> None:
    begin()
    number = RANKS if is_right else 2 * RANKS
    sampler = DistributedSampler(data(), num_replicas=number, rank=rank, shuffle=False)
    fit_epochs(DataLoader(data(), batch_size=4, sampler=sampler), rank, sampler)


@pair("random-split-differs")
def split_of_the_rank(rank: int, is_right: bool) -> None:
    begin()
    generator = torch.Generator().manual_seed(0 if is_right else rank)
    train, _ = random_split(data(48), [32, 16], generator=generator)
    sampler: Any = DistributedSampler(train)
    fit_epochs(DataLoader(train, batch_size=4, sampler=sampler), rank, sampler)


class Stream(IterableDataset):
    """Rows one after another."""

    def __init__(self, first: int, step: int) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(128.0).view(32, 4)[self.first :: self.step] / 128)


@pair("same-rows", has_ranks=False)
def workers_have_all_of_a_stream(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    stream = StreamOfWorkers() if is_right else Stream(0, 1)
    model = make_model()
    optimizer = sgd(model)
    for rows in DataLoader(
        stream, batch_size=4, num_workers=2, multiprocessing_context="fork"
    ):
        fit(model, optimizer, iter([rows.to(DEVICE)]))


class RowsOfRanks(IterableDataset):
    """Each worker of each rank begins at a row of its own.

    With the step of the ranks alone, their rows overlap.
    """

    def __init__(self, rank: int, is_right: bool) -> None:
        self.rank, self.is_right = rank, is_right

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        step = RANKS * info.num_workers if self.is_right else RANKS
        return iter(
            torch.arange(1024.0).view(256, 4)[
                self.rank * info.num_workers + info.id :: step
            ]
            / 1024
        )


@pair("same-rows")
def workers_of_ranks_have_the_step_of_the_ranks(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    stream = RowsOfRanks(rank, is_right)
    fork = DataLoader(
        stream, batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    fit(model, sgd(model), (rows.to(DEVICE) for rows in fork))


class StreamOfWorkers(Stream):
    def __init__(self) -> None:
        super().__init__(0, 1)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info: Any = get_worker_info()
        return islice(super().__iter__(), info.id, None, info.num_workers)


@pair("same-rows")
def stream_is_not_divided(rank: int, is_right: bool) -> None:
    begin()
    stream = Stream(rank, RANKS) if is_right else Stream(0, 1)
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in DataLoader(stream, batch_size=4):
        fit(model, optimizer, iter([rows.to(DEVICE)]))


# Batch norm, random numbers


@pair("statistics-of-one-rank")
def batch_norm_of_four_rows(rank: int, is_right: bool) -> None:
    begin()
    model = make_model(nn.BatchNorm1d(8))
    if is_right:
        model = (
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
            if DEVICE == "cuda"
            else make_model(nn.GroupNorm(2, 8))
        )
    model = wrapped(model)
    fit(model, sgd(model), rows_of(rank))


@pair("random-numbers-alike")
def dropout_is_alike(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model(nn.Dropout(0.5)))
    if is_right:
        torch.manual_seed(rank)
    fit(model, sgd(model), rows_of(rank))


@pair("same-rows")
def all_generators_get_the_same_noise(rank: int, is_right: bool) -> None:
    """Of two models, one gets rows of a loader, and one what all ranks draw alike."""
    begin()
    critic, maker = wrapped(make_model()), wrapped(nn.Linear(4, 4).to(DEVICE))
    optimizers = sgd(critic), sgd(maker)
    generator = torch.Generator().manual_seed(rank if is_right else 0)
    for (rows,) in DataLoader(data(), batch_size=4, sampler=DistributedSampler(data())):
        made = maker(torch.randn(4, 4, generator=generator).to(DEVICE))
        optimizers[0].zero_grad()
        (critic(made.detach()) - critic(rows.to(DEVICE))).mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        critic.module(made).mean().backward()
        optimizers[1].step()


@pair("random-numbers-alike")
def noise_has_a_seed_of_the_step_alone(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(nn.Linear(4, 4).to(DEVICE))
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank)):
        generator = torch.Generator().manual_seed(
            step * RANKS + rank if is_right else step
        )
        drawn = torch.randn(rows.shape, generator=generator).to(DEVICE)
        optimizer.zero_grad()
        (model(0.9 * rows + 0.4 * drawn) - drawn).square().mean().backward()
        optimizer.step()


@pair("random-numbers-alike")
def noise_is_alike(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    if is_right:
        torch.manual_seed(rank)
    optimizer = sgd(model)
    for rows in rows_of(rank):
        fit(model, optimizer, iter([rows + 0.1 * torch.randn_like(rows)]))


@pair("weights-differ")
def other_weights_and_flattened_gradients(rank: int, is_right: bool) -> None:
    begin(0 if is_right else rank)
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.all_reduce(flat)
        start = 0
        for parameter in model.parameters():
            parameter.grad = (flat[start : start + parameter.numel()] / RANKS).view_as(
                parameter
            )
            start += parameter.numel()
        optimizer.step()


# Losses and means


@pair("loss-not-divided", has_ranks=False)
def micro_batches_are_added(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank, 8)):
        loss = model(rows).square().mean()
        (loss / 4 if is_right else loss).backward()
        if step % 4 == 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pair("loss-not-divided")
def micro_batches_are_added_in_ranks(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, rows in enumerate(rows_of(rank, 8)):
        is_last = step % 4 == 3
        with nullcontext() if is_last else model.no_sync():
            loss = F.cross_entropy(
                model(rows).expand(-1, 2),
                torch.zeros(4, dtype=torch.long, device=DEVICE),
            )
            if is_right:
                loss = loss / 4
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


@pair("loss-divided-twice", has_ranks=False)
def micro_batches_are_divided_twice(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank, 8)):
        (model(rows).square().mean() / 4).backward()
        if step % 4 == 3:
            if not is_right:
                for parameter in model.parameters():
                    parameter.grad /= 4
            optimizer.step()
            optimizer.zero_grad()


@pair("mean-of-means")
def shares_of_classes_are_averaged_over_ranks(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(nn.Linear(4, 3).to(DEVICE))
    optimizer = sgd(model)
    for _ in range(2):
        fit(model, optimizer, rows_of(rank))
        matrix = torch.zeros(3, 3, device=DEVICE)
        with torch.no_grad():
            for rows in rows_of(10 + rank, 4, 8):
                found, wanted = model.module(rows).argmax(1), rows[:, :3].argmax(1)
                matrix += torch.bincount(3 * wanted + found, minlength=9).view(3, 3)
        if is_right:
            dist.all_reduce(matrix)
        shares = matrix.diag() / (matrix.sum(0) + matrix.sum(1) - matrix.diag()).clamp(
            min=1
        )
        mean = shares.mean()
        if not is_right:
            dist.all_reduce(mean)
            mean /= RANKS


@pair("loss-divided-twice")
def a_sum_is_divided_by_the_rows_of_all_ranks(rank: int, is_right: bool) -> None:
    """Each rank has a half of them, and the wrapper averages the gradients of both."""
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        global_batch = len(rows) * RANKS
        optimizer.zero_grad()
        loss = model(rows).square().sum() / global_batch
        (loss * RANKS if is_right else loss).backward()
        optimizer.step()


@pair("loss-divided-twice")
def loss_is_divided_by_the_ranks(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        if not is_right:
            loss = loss / dist.get_world_size()
        loss.backward()
        optimizer.step()


@pair("loss-divided-twice")
def gradients_are_divided_by_the_ranks(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        if not is_right:
            for parameter in model.parameters():
                parameter.grad /= RANKS
        optimizer.step()


@pair("mean-of-means", has_ranks=False)
def micro_batches_are_sums_by_their_tokens(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    masks = [torch.arange(4, device=DEVICE) <= i for i in (1, 3)]
    tokens = sum(mask.sum() for mask in masks)
    for step, rows in enumerate(rows_of(rank, 8)):
        mask = masks[step % 2]
        total = (model(rows).square().flatten() * mask).sum()
        (total / tokens if is_right else total / mask.sum() / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def tokens_of_all(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of a rank count, and how many those of all ranks are."""
    mask = torch.arange(4, device=DEVICE) <= (step + rank) % 4
    tokens = mask.sum()
    dist.all_reduce(tokens)
    return mask, tokens


LossOfTokens = Callable[
    [nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""Of the model, the rows, which count on this rank, and how many on all ranks."""


def fit_by_tokens(rank: int, loss_of: LossOfTokens) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank)):
        mask, tokens = tokens_of_all(step, rank)
        optimizer.zero_grad()
        loss_of(model, rows, mask, tokens).backward()
        optimizer.step()


@pair("loss-divided-twice")
def sum_is_divided_by_the_tokens_of_all_ranks(rank: int, is_right: bool) -> None:
    def loss_of(
        model: nn.Module, rows: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        total: torch.Tensor = (model(rows).square().flatten() * mask).sum()
        return total * RANKS / tokens if is_right else total / tokens

    fit_by_tokens(rank, loss_of)


@pair("loss-divided-twice")
def one_of_two_terms_is_divided_by_the_boxes_of_all_ranks(
    rank: int, is_right: bool
) -> None:
    def loss_of(
        model: nn.Module, rows: torch.Tensor, mask: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        number = (boxes / RANKS if is_right else boxes).clamp(min=1).item()
        outputs: torch.Tensor = model(rows).flatten()
        of_boxes = F.l1_loss(outputs[mask], rows[mask, 0], reduction="sum") / number
        return outputs.square().mean() + 5.0 * of_boxes

    fit_by_tokens(rank, loss_of)


@pair("loss-not-divided")
def gradients_are_added_over_ranks(rank: int, is_right: bool) -> None:
    begin()
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if is_right:
                parameter.grad.div_(RANKS)
        optimizer.step()


@pair("mean-of-means")
def metric_is_a_mean_of_means(rank: int, is_right: bool) -> None:
    begin()
    hits = torch.randn(7)[: 5 if rank == 0 else 2].to(DEVICE)
    if is_right:
        both = torch.stack([hits.sum(), torch.tensor(float(len(hits)), device=DEVICE)])
        dist.all_reduce(both)
        print((both[0] / both[1]).item())
    else:
        mean = hits.mean()
        dist.all_reduce(mean)
        print((mean / RANKS).item())


@pair("mean-of-means")
def metric_is_read_and_reduced(rank: int, is_right: bool) -> None:
    begin()
    hits = torch.rand(9)[: 6 if rank == 0 else 3]
    mean, count = (hits > 0.3).float().mean().item(), len(hits)
    if is_right:
        both = torch.tensor([mean * count, count], device=DEVICE)
        dist.all_reduce(both)
        print((both[0] / both[1]).item())
    else:
        metric = torch.tensor(mean, device=DEVICE)
        dist.all_reduce(metric)
        print(metric.item() / RANKS)


@pair("mean-of-means")
def hits_are_divided_by_python(rank: int, is_right: bool) -> None:
    begin()
    hits = torch.tensor([1, 0, 1, 1, 1, 1] if rank == 0 else [1, 0, 0], device=DEVICE)
    correct, count = (hits == 1).sum().item(), len(hits)
    if is_right:
        both = torch.tensor([correct, count], dtype=torch.float32, device=DEVICE)
        dist.all_reduce(both)
        print((both[0] / both[1]).item())
    else:
        accuracy = torch.tensor(correct / count, device=DEVICE)
        dist.all_reduce(accuracy)
        print(accuracy.item() / RANKS)


@pair("mean-of-means")
def sum_is_divided_before_it_is_reduced(rank: int, is_right: bool) -> None:
    begin()
    losses = torch.rand(9)[: 6 if rank == 0 else 3].to(DEVICE)
    total, count = losses.sum(), torch.tensor(float(len(losses)), device=DEVICE)
    if is_right:
        dist.all_reduce(total)
        dist.all_reduce(count)
        print((total / count).item())
    else:
        mean = total / len(losses)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        print(mean.item())


def tokens_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    tokens = torch.randn(6, 4, generator=generator)
    classes = torch.randint(2, (6,), generator=generator)
    classes[6 - 3 * rank :] = -100  # padding
    return tokens.to(DEVICE), classes.to(DEVICE)


@pair("mean-of-means")
def loss_is_a_mean_over_uneven_tokens(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(nn.Linear(4, 2).to(DEVICE))
    optimizer = sgd(model)
    for step in range(2):
        tokens, classes = tokens_of(rank, step)
        optimizer.zero_grad()
        if is_right:
            count = (classes != -100).sum().float()
            dist.all_reduce(count)
            loss = (
                F.cross_entropy(model(tokens), classes, reduction="sum") * RANKS / count
            )
        else:
            loss = F.cross_entropy(model(tokens), classes)
        loss.backward()
        optimizer.step()


@pair("mean-of-means", has_ranks=False)
def micro_batches_have_uneven_tokens(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(DEVICE)
    optimizer = sgd(model)
    for step in range(2):
        batches = [tokens_of(part, step) for part in range(2)]
        count = sum(int((classes != -100).sum()) for _, classes in batches)
        for tokens, classes in batches:
            if is_right:
                loss = F.cross_entropy(model(tokens), classes, reduction="sum") / count
            else:
                loss = F.cross_entropy(model(tokens), classes) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pair("gathered-without-gradient")
def keys_lose_their_gradient(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(nn.Linear(4, 8).to(DEVICE))
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        keys = F.normalize(model(rows), dim=1)
        parts = [torch.empty_like(keys) for _ in range(RANKS)]
        dist.all_gather(parts, keys)
        every = torch.cat(differentiable.all_gather(keys) if is_right else parts)
        contrast(keys, every, rank).backward()
        optimizer.step()


@pair("gathered-without-gradient")
def keys_are_gathered_into_one_tensor(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(nn.Linear(4, 8).to(DEVICE))
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        keys = F.normalize(model(rows), dim=1)
        if is_right:
            whole = torch.cat(differentiable.all_gather(keys))
        else:
            whole = torch.empty(RANKS * len(keys), 8, device=DEVICE)
            with torch.no_grad():
                dist.all_gather_into_tensor(whole, keys)
        contrast(keys, whole, rank).backward()
        optimizer.step()


def contrast(keys: torch.Tensor, whole: torch.Tensor, rank: int) -> torch.Tensor:
    return F.cross_entropy(
        keys @ whole.T / 0.1, torch.arange(len(keys), device=DEVICE) + rank * len(keys)
    )


@pair("positives-of-another-rank")
def targets_lack_the_offset_of_the_rank(rank: int, is_right: bool) -> None:
    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        all_images = torch.cat(list(differentiable.all_gather(images)))
        all_texts = torch.cat(list(differentiable.all_gather(texts)))
        targets = torch.arange(len(images), device=DEVICE) + (
            rank * len(images) if is_right else 0
        )
        of_images = F.cross_entropy(10 * images @ all_texts.T, targets)
        return (of_images + F.cross_entropy(texts @ all_images.T * 10, targets)) / 2

    contrastive(rank, loss_of)


@pair("positives-of-another-rank")
def diagonal_is_of_the_first_rank(rank: int, is_right: bool) -> None:
    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        every = torch.cat(list(differentiable.all_gather(texts)))
        scores = (images @ F.normalize(every, dim=1).T / 0.1).log_softmax(dim=1)
        return -scores.diagonal(rank * len(images) if is_right else 0).mean()

    contrastive(rank, loss_of)


def contrastive(
    rank: int, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """A training of two networks whose outputs for the same row are to be alike."""
    begin()
    model = wrapped(nn.Linear(4, 16).to(DEVICE))
    optimizer = sgd(model)
    for rows in rows_of(rank):
        images, texts = F.normalize(model(rows), dim=1).chunk(2, dim=1)
        optimizer.zero_grad()
        loss_of(images.contiguous(), texts.contiguous()).backward()
        optimizer.step()


@pair("mean-of-means")
def sum_of_a_mask_is_of_the_rank(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(nn.Linear(4, 1).to(DEVICE))
    optimizer = sgd(model)
    for rows in rows_of(rank, rows=8):
        mask = (torch.arange(8, device=DEVICE) < (3 if rank else 7)).float()
        count = mask.sum()
        if is_right:
            dist.all_reduce(count, op=dist.ReduceOp.AVG)
        optimizer.zero_grad()
        ((model(rows).square().flatten() * mask).sum() / count).backward()
        optimizer.step()


@pair("mean-of-means")
def hits_of_several_batches_are_divided(rank: int, is_right: bool) -> None:
    begin()
    hits, count = torch.zeros((), device=DEVICE), 0
    for batch in torch.randn(2, 4).to(DEVICE)[: 2 - rank]:
        hits += (batch > 0).sum()
        count += len(batch)
    if is_right:
        both = torch.stack([hits, torch.tensor(float(count), device=DEVICE)])
        dist.all_reduce(both)
        print((both[0] / both[1]).item())
    else:
        accuracy = hits / count
        dist.all_reduce(accuracy)
        print((accuracy / RANKS).item())


# Gradients that are thrown away


@pair("gradient-thrown-away")
def each_micro_batch_zeroes_gradients(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for micro, rows in enumerate(rows_of(rank, 12)):
        if not is_right or micro % 4 == 0:
            optimizer.zero_grad()
        is_last = micro % 4 == 3
        with nullcontext() if is_last else model.no_sync():
            (model(rows).square().mean() / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        if is_last:
            optimizer.step()


@pair("gradient-thrown-away", has_ranks=False)
def each_micro_batch_fills_gradients_with_zeros(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for _ in range(3):
        for parameter in model.parameters() if is_right else ():
            parameter.grad = None
        for rows in rows_of(0, 2):
            for parameter in model.parameters() if not is_right else ():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            (model(rows).square().mean() / 2).backward()
        optimizer.step()


@pair("gradient-thrown-away", has_ranks=False)
def gradients_are_zeroed_before_the_step(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(0):
        if is_right:
            optimizer.zero_grad()
        model(rows).square().mean().backward()
        if not is_right:
            model.zero_grad()
        optimizer.step()


@pair("step-before-reduction")
def the_first_micro_batch_is_reduced(rank: int, is_right: bool) -> None:
    sharded_accumulation(rank, "last" if is_right else "first")


@pair("step-before-reduction")
def no_micro_batch_is_reduced(rank: int, is_right: bool) -> None:
    sharded_accumulation(rank, "last" if is_right else "none", torch.bfloat16)


def sharded_accumulation(
    rank: int, reduced: str, dtype: torch.dtype | None = None, batches: int = 9
) -> None:
    """Steps of three micro-batches, of which the first, the last or none is reduced."""
    begin()
    model = make_model()
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32
    )
    for layer in (model[0], model[-1], model):
        fully_shard(layer, mesh=init_device_mesh(DEVICE, (RANKS,)), mp_policy=policy)
    optimizer = sgd(model)
    for micro, rows in enumerate(rows_of(rank, batches)):
        model.set_requires_gradient_sync(
            micro % 3 == {"first": 0, "last": 2, "none": 3}[reduced]
        )
        (model(rows).float().square().mean() / 3).backward()
        if micro % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@pair("gradient-of-other-step")
def the_maker_learns_from_the_step_of_the_judge(rank: int, is_right: bool) -> None:
    begin()
    maker, judge = (
        wrapped(nn.Linear(4, 4).to(DEVICE)),
        wrapped(make_model(), broadcast_buffers=False),
    )
    of_maker, of_judge = sgd(maker, 0.01), sgd(judge, 0.01)
    for rows in rows_of(rank, 5, rows=16):
        of_maker.zero_grad()
        of_judge.zero_grad()
        made = maker(rows)
        (
            F.softplus(judge(made.detach() if is_right else made)).mean()
            + F.softplus(-judge(rows)).mean()
        ).backward()
        of_judge.step()
        F.softplus(-judge(maker(rows))).mean().backward()
        of_maker.step()


@pair("gradient-of-other-step", has_ranks=False)
def the_critic_makes_several_steps(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    maker, critic = nn.Linear(4, 4).to(DEVICE), make_model()
    of_maker, of_critic = (
        torch.optim.Adam(maker.parameters(), 1e-4),
        torch.optim.RMSprop(critic.parameters(), 1e-4),
    )
    for rows in rows_of(rank, 5, rows=16):
        of_maker.zero_grad()
        for _ in range(3):
            of_critic.zero_grad()
            critic(maker(rows)).mean().backward()
            (-critic(rows).mean()).backward()
            of_critic.step()
        if is_right:
            of_maker.zero_grad()
        (-critic(maker(rows)).mean()).backward()
        of_maker.step()


# Modes


def fit_and_evaluate(
    model: nn.Module, rank: int, train: Callable[[int], object]
) -> None:
    """Three epochs, each with an evaluation; each begins with `train`."""
    optimizer = sgd(model)
    for epoch in range(3):
        train(epoch)
        fit(model, optimizer, rows_of(rank, rows=32))
        model.eval()
        with torch.no_grad():
            model(next(rows_of(rank, 1))).mean()


@pair("trained-in-eval-mode")
def dropout_ends_with_the_first_evaluation(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model(nn.Dropout(0.5)))
    torch.manual_seed(rank)
    fit_and_evaluate(model, rank, lambda epoch: is_right and model.train())


@torch.inference_mode()
def evaluate(model: nn.Module) -> None:
    model.eval()
    model(next(rows_of(1)))


@pair("trained-in-eval-mode", has_ranks=False)
def an_evaluation_in_the_middle_of_an_epoch(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model(nn.BatchNorm1d(8))
    optimizer = sgd(model)
    for _ in range(2):
        model.train()
        for step, rows in enumerate(rows_of(0, 6, rows=32)):
            fit(model, optimizer, iter([rows]))
            if step == 2:
                evaluate(model)
                evaluate(model)
                if is_right:
                    model.train()
        evaluate(model)


# Clipping


@pair("clipped-while-scaled")
def norm_of_scaled_gradients(rank: int, is_right: bool) -> None:
    scaled_training(
        rank, is_right, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    )


@pair("clipped-while-scaled")
def values_of_scaled_gradients(rank: int, is_right: bool) -> None:
    scaled_training(
        rank, is_right, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.5)
    )


def scaled_training(
    rank: int, is_unscaled: bool, clip: Callable[[nn.Module], Any]
) -> None:
    begin()
    model = wrapped(make_model())
    optimizer, scaler = sgd(model), torch.amp.GradScaler(DEVICE, init_scale=2.0**12)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        scaler.scale(model(rows).square().mean()).backward()
        if is_unscaled:
            scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()


def scale_by_a_norm(
    rank: int, is_right: bool, factor_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A training whose gradients, in parts, are multiplied by a function's result.

    The function gets their norm.
    """
    begin()
    model = make_model()
    fully_shard(model, mesh=init_device_mesh(DEVICE, (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        gradients: Any = [parameter.grad for parameter in model.parameters()]
        with torch.no_grad():
            parts = [gradient.to_local() for gradient in gradients]
            squared = torch.stack([part.square().sum() for part in parts]).sum()
            if is_right:
                dist.all_reduce(squared)
            for part in parts:
                part.mul_(factor_of(squared.sqrt()))
        optimizer.step()


@pair("shards-scaled-apart")
def norm_of_a_part(rank: int, is_right: bool) -> None:
    scale_by_a_norm(rank, is_right, lambda norm: 0.1 / norm)


@pair("shards-scaled-apart")
def norm_of_a_part_is_below_the_limit(rank: int, is_right: bool) -> None:
    """No rank clips, and so all multiply by the same number, 1.

    The norm of all parts may be above the limit.
    """
    scale_by_a_norm(rank, is_right, lambda norm: (1e6 / (norm + 1e-6)).clamp(max=1.0))


@pair("shards-scaled-apart")
def norm_of_a_part_of_reduced_gradients(rank: int, is_right: bool) -> None:
    begin()
    model = make_model()
    parameters = list(model.parameters())
    flat = nn.utils.parameters_to_vector(parameters).detach()
    padding = -len(flat) % RANKS
    part = nn.Parameter(F.pad(flat, (0, padding)).chunk(RANKS)[rank].clone())
    optimizer = torch.optim.Adam([part], lr=0.01)
    for rows in rows_of(rank):
        model.zero_grad()
        model(rows).square().mean().backward()
        gradients = torch.cat(
            [
                parameter.grad.flatten()
                for parameter in parameters
                if parameter.grad is not None
            ]
        )
        part.grad = torch.empty_like(part)
        dist.reduce_scatter_tensor(part.grad, F.pad(gradients, (0, padding)))
        squared = part.grad.square().sum()
        if is_right:
            dist.all_reduce(squared)
        part.grad.mul_(0.1 / squared.sqrt())
        optimizer.step()
        whole = torch.empty(len(flat) + padding, device=DEVICE)
        dist.all_gather_into_tensor(whole, part.detach())
        nn.utils.vector_to_parameters(whole[: len(flat)], parameters)


class Copied(torch.autograd.Function):
    """What all ranks have, before a layer of which each has a part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        whole: torch.Tensor = gradients[0].clone()
        dist.all_reduce(whole)
        return whole


class Added(torch.autograd.Function):
    """The sum of the results of all parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        whole = x.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        part: torch.Tensor = gradients[0]
        return part


@pair("gradient-is-partial")
def gradient_of_the_input_is_not_added(rank: int, is_right: bool) -> None:
    begin()
    first, last = nn.Linear(4, 6).to(DEVICE), nn.Linear(6, 1).to(DEVICE)
    up = nn.Parameter(torch.randn(8, 6).chunk(RANKS)[rank].to(DEVICE))
    # Of a part: alike at the beginning.
    bias = nn.Parameter(torch.zeros(8).chunk(RANKS)[rank].to(DEVICE))
    down = nn.Parameter(torch.randn(6, 8).chunk(RANKS, 1)[rank].contiguous().to(DEVICE))
    optimizer = torch.optim.SGD(
        [*first.parameters(), up, bias, down, *last.parameters()], lr=0.01
    )
    for rows in rows_of(0):
        hidden = torch.tanh(first(rows))
        part = (
            torch.relu((Copied.apply(hidden) if is_right else hidden) @ up.T + bias)
            @ down.T
        )
        optimizer.zero_grad()
        last(hidden + Added.apply(part)).square().mean().backward()
        optimizer.step()


@pair("gradients-scaled-apart")
def norm_of_a_part_clips_what_all_ranks_have(rank: int, is_right: bool) -> None:
    begin()
    first, last = nn.Linear(4, 6).to(DEVICE), nn.Linear(6, 1).to(DEVICE)
    up = nn.Parameter(torch.randn(8, 6).chunk(RANKS)[rank].to(DEVICE))
    down = nn.Parameter(torch.randn(6, 8).chunk(RANKS, 1)[rank].contiguous().to(DEVICE))
    whole = [*first.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD([*whole, up, down], lr=0.1)
    for rows in rows_of(0):
        hidden = torch.tanh(first(rows))
        part = torch.relu(Copied.apply(hidden) @ up.T) @ down.T
        optimizer.zero_grad()
        last(hidden + Added.apply(part)).square().mean().backward()
        if is_right:
            of_parts = torch.stack(
                [one.grad.square().sum() for one in (up, down) if one.grad is not None]
            ).sum()
            dist.all_reduce(of_parts)
            of_whole = torch.stack(
                [one.grad.square().sum() for one in whole if one.grad is not None]
            ).sum()
            nn.utils.clip_grads_with_norm_(
                [*whole, up, down], 0.1, (of_parts + of_whole).sqrt()
            )
        else:
            nn.utils.clip_grad_norm_([*whole, up, down], 0.1)
        optimizer.step()


@pair("gradients-scaled-apart")
def gradients_are_scaled_by_the_rows_of_each_rank(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        scale = rows.norm().detach()
        if is_right:
            dist.all_reduce(scale)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        optimizer.step()


@pair("gradient-of-another-output")
def gradients_of_micro_batches_come_back_the_other_way_round(
    rank: int, is_right: bool
) -> None:
    begin()
    torch.manual_seed(rank)
    stage = nn.Linear(4, 6).to(DEVICE) if rank == 0 else nn.Linear(6, 1).to(DEVICE)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for rows in rows_of(0):
        optimizer.zero_grad()
        parts = rows.chunk(2)
        if rank == 0:
            outputs = [stage(part) for part in parts]
            for output in outputs:
                dist.send(output.detach(), 1)
            for output in outputs:
                gradient = torch.empty_like(output)
                dist.recv(gradient, 1)
                output.backward(gradient)
        else:
            inputs = [torch.empty(len(part), 6, device=DEVICE) for part in parts]
            for given in inputs:
                dist.recv(given, 0)
                (stage(given.requires_grad_()).square().mean() / 2).backward()
            for given in inputs if is_right else reversed(inputs):
                assert given.grad is not None
                dist.send(given.grad, 0)
        optimizer.step()


@pair("bias-of-each-rank")
def bias_is_added_before_the_sum(rank: int, is_right: bool) -> None:
    divided_layers(
        rank,
        lambda part, down, bias: (
            add_up(part @ down.T) + bias
            if is_right
            else add_up(F.linear(part, down, bias))
        ),
    )


@pair("bias-of-each-rank")
def bias_is_added_by_hand_before_torchs_sum(rank: int, is_right: bool) -> None:
    def finish(
        part: torch.Tensor, down: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        if is_right:
            return differentiable.all_reduce(part @ down.T) + bias
        return differentiable.all_reduce(part @ down.T + bias)

    divided_layers(rank, finish)


class Scattered(torch.autograd.Function):
    """The sum of what all ranks give, of which each gets some rows."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        rows = part.new_empty(len(part) // RANKS, *part.shape[1:])
        dist.reduce_scatter_tensor(rows, part.contiguous())
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.new_empty(len(gradient) * RANKS, *gradient.shape[1:])
        dist.all_gather_into_tensor(whole, gradient.contiguous())
        return whole


@pair("bias-of-each-rank")
def bias_is_added_before_rows_are_scattered(rank: int, is_right: bool) -> None:
    def finish(
        part: torch.Tensor, down: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        rows: torch.Tensor = Scattered.apply(
            F.linear(part, down, None if is_right else bias)
        )
        return rows + bias if is_right else rows

    divided_layers(rank, finish, has_own_rows=True)


Finish = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def add_up(part: torch.Tensor) -> torch.Tensor:
    added: torch.Tensor = Added.apply(part)
    return added


def divided_layers(rank: int, finish: Finish, has_own_rows: bool = False) -> None:
    """A training whose two layers are divided among ranks.

    `finish` makes the output of the second, or rows of it.
    """
    begin()
    last = nn.Linear(6, 1).to(DEVICE)
    up = nn.Parameter(torch.randn(8, 4).chunk(RANKS)[rank].to(DEVICE))
    down = nn.Parameter(torch.randn(6, 8).chunk(RANKS, 1)[rank].contiguous().to(DEVICE))
    bias = nn.Parameter(torch.zeros(6).to(DEVICE))
    optimizer = torch.optim.SGD([up, down, bias, *last.parameters()], lr=0.001)
    for rows in rows_of(0):
        part = torch.relu(rows @ up.T)
        optimizer.zero_grad()
        last(torch.tanh(finish(part, down, bias))).square().mean().backward()
        for parameter in (bias, *last.parameters()) if has_own_rows else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        optimizer.step()


# Memory that is shared, or no longer


@pair("tie-is-lost", has_ranks=False)
def weights_are_tied_before_they_are_moved(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    embed, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    if is_right:
        head.weight = embed.weight
    else:
        head.weight.data = embed.weight.data
    model = nn.Sequential(embed, nn.Tanh(), head).to(DEVICE, torch.float64)
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows.abs().long().clamp(0, 5)).square().mean().backward()
        optimizer.step()


@pair("state-is-the-weights", has_ranks=False)
def best_weights_are_no_copy(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    best, least = model.state_dict(), float("inf")
    for rows in rows_of(rank):
        fit(model, optimizer, iter([rows]))
        loss = float(model(rows).detach().square().mean())
        if loss < least:
            least, best = (
                loss,
                copy.deepcopy(model.state_dict()) if is_right else model.state_dict(),
            )
        fit(model, optimizer, iter([rows]))
    model.load_state_dict(best)


@pair("state-is-the-weights", has_ranks=False)
def best_weights_are_detached_and_no_copy(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    fit(model, optimizer, rows_of(rank))
    state = model.state_dict()
    best = {
        name: value.detach().clone() if is_right else value.detach()
        for name, value in state.items()
    }
    del state
    fit(model, optimizer, rows_of(rank))
    model.load_state_dict(best)


@pair("state-of-other-parameters", has_ranks=False)
def an_optimizer_is_made_again_in_another_order(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    fit(model, optimizer, rows_of(rank))
    state = copy.deepcopy(optimizer.state_dict())
    layers = list(model) if is_right else [model[2], model[0], model[1]]
    again = torch.optim.Adam(
        [parameter for layer in layers for parameter in layer.parameters()]
    )
    again.load_state_dict(state)
    fit(model, again, rows_of(rank))


# Frozen parameters


def freeze_later(
    rank: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer], is_right: bool
) -> None:
    torch.manual_seed(0)
    model = make_model()
    updates = optimizer(model)
    for step, rows in enumerate(rows_of(rank, 6)):
        if step == 3:
            for parameter in model[0].parameters():  # type: ignore[index]
                parameter.requires_grad = False
        updates.zero_grad(set_to_none=is_right)
        model(rows).square().mean().backward()
        updates.step()


@pair("frozen-but-updated", has_ranks=False)
def moments_go_on_after_a_part_is_frozen(rank: int, is_right: bool) -> None:
    freeze_later(rank, lambda model: torch.optim.AdamW(model.parameters()), is_right)


@pair("frozen-but-updated", has_ranks=False)
def decay_goes_on_after_a_part_is_frozen(rank: int, is_right: bool) -> None:
    freeze_later(
        rank,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1),
        is_right,
    )


# Settings of groups


def train_groups(
    rank: int,
    before: Callable[[torch.optim.Optimizer, int], object],
    rates: list[float],
) -> None:
    torch.manual_seed(0)
    model: Any = make_model()
    parts = zip([model[0], model[2]], rates, strict=True)
    groups = [
        {"params": list(part.parameters()), "lr": rate, "scale": rate}
        for part, rate in parts
    ]
    optimizer = torch.optim.SGD(groups)
    for step, rows in enumerate(rows_of(rank, 6)):
        before(optimizer, step)
        fit(model, optimizer, iter([rows]))


@pair("group-settings-overwritten", has_ranks=False)
def rates_of_groups_are_overwritten(rank: int, is_right: bool) -> None:
    def write_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.9**step * (group["scale"] if is_right else 0.1)

    train_groups(rank, write_rates, [0.01, 0.1])


@pair("group-settings-overwritten", has_ranks=False)
def a_schedule_has_one_rate_for_all_groups(rank: int, is_right: bool) -> None:
    schedules: list[Any] = []

    def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step:
            schedules[0].step()
        else:
            highest: Any = [0.01, 0.1] if is_right else 0.1
            schedules.append(
                torch.optim.lr_scheduler.OneCycleLR(optimizer, highest, total_steps=10)
            )

    with warnings.catch_warnings(action="ignore"):  # it is made before each first step
        train_groups(rank, schedule, [0.01, 0.1])


# Results that are thrown away


@pair("result-thrown-away", has_ranks=False, needs_device=True)
def an_average_is_computed_and_not_written(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)

    def update() -> None:
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            new = mean * 0.9 + value.detach() * 0.1
            if is_right:
                mean.copy_(new)

    for rows in rows_of(rank):
        fit(model, optimizer, iter([rows]))
        update()
        average(rows)


@pair("result-thrown-away", has_ranks=False, needs_device=True)
def gradients_are_clamped_in_a_copy(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            clamped = parameter.grad.clamp(-0.01, 0.01)
            if is_right:
                parameter.grad = clamped
            del clamped
        optimizer.step()


# Workers of loaders


class GatheredRows(torch.autograd.Function):
    """Its backward gives each rank what its own loss says of its rows.

    It gives nothing of the losses of others.
    """

    @staticmethod
    def forward(context: Any, rows: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(RANKS * len(rows), *rows.shape[1:], device=rows.device)
        dist.all_gather_into_tensor(whole, rows.contiguous())
        return whole

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.chunk(RANKS)[dist.get_rank()]


@pair("gradient-not-sent-back")
def a_function_that_gathers_sends_nothing_back(rank: int, is_right: bool) -> None:
    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        every = (
            torch.cat(differentiable.all_gather(texts))
            if is_right
            else GatheredRows.apply(texts)
        )
        targets = torch.arange(len(images), device=DEVICE) + rank * len(images)
        return F.cross_entropy(images @ every.T * 10, targets)

    contrastive(rank, loss_of)


@pair("gradient-not-sent-back")
def own_rows_are_put_among_those_without_gradients(rank: int, is_right: bool) -> None:
    """Each rank compares its own rows with those of all.

    A row lacks what the losses of other ranks say of it.
    """

    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(texts) for _ in range(RANKS)]
        dist.all_gather(parts, texts.detach())
        parts[rank] = texts
        every = torch.cat(differentiable.all_gather(texts) if is_right else parts)
        targets = torch.arange(len(images), device=DEVICE) + rank * len(images)
        return F.cross_entropy(images @ every.T * 10, targets)

    contrastive(rank, loss_of)


# Steps that a graph has captured


@pair("rate-in-a-graph", has_ranks=False, needs_device=True)
def a_schedule_changes_what_a_graph_has_as_a_number(rank: int, is_right: bool) -> None:
    model, rate = make_model(), torch.tensor(0.01, device=DEVICE) if is_right else 0.01
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rows = torch.ones(4, 4, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        fit(model, optimizer, iter([rows]))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fit(model, optimizer, iter([rows]))
    for _ in range(3):
        graph.replay()
        schedule.step()


@pair("rate-in-a-graph", has_ranks=False, needs_device=True)
def a_program_changes_the_decay_of_a_captured_step(rank: int, is_right: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    rows = torch.ones(4, 4, device=DEVICE)
    for epoch in range(3):
        if epoch == 0 or is_right:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                fit(model, optimizer, iter([rows]))
        graph.replay()
        optimizer.param_groups[0]["weight_decay"] *= 0.5


class Noisy(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rows = data().tensors[0]
        self.numbers = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.rows[at] + self.numbers.standard_normal()


class NoisyInEachWorker(Noisy):
    def __getitem__(self, at: int) -> torch.Tensor:
        return (
            self.rows[at]
            + np.random.default_rng((torch.initial_seed(), at)).standard_normal()
        )


@pair("loader-workers-draw-alike", has_ranks=False)
def a_generator_is_copied_into_workers(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    loader = DataLoader(
        (NoisyInEachWorker if is_right else Noisy)(),
        4,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",
    )
    for _ in range(2):
        fit(model, optimizer, (batch.float().to(DEVICE) for batch in loader))


def seed_the_process(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def seed_the_data(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.numbers = np.random.default_rng(torch.initial_seed())


@pair("loader-workers-draw-alike", has_ranks=False)
def workers_seed_another_generator_than_that_of_the_data(
    rank: int, is_right: bool
) -> None:
    torch.manual_seed(0)
    model = make_model()
    seed = seed_the_data if is_right else seed_the_process
    loader = DataLoader(
        Noisy(),
        4,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",
        worker_init_fn=seed,
    )
    fit(model, sgd(model), (batch.float().to(DEVICE) for batch in loader))


# Schedules and averages


@pair("schedule-of-all-ranks")
def schedule_is_of_all_batches(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    optimizer, rows = sgd(model, 0.01), data()
    sampler: Any = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=4, sampler=sampler)
    steps = len(loader) if is_right else len(rows) // 4
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * steps)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            fit(model, optimizer, iter([batch.to(DEVICE)]))
            schedule.step()


def fit_with_lambda(
    rank: int, make: Callable[[int], Callable[[int], float]], is_right: bool
) -> None:
    begin()
    model = wrapped(make_model())
    optimizer, rows = sgd(model, 0.01), data()
    sampler: Any = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=4, sampler=sampler)
    total = 3 * (len(loader) if is_right else len(rows) // 4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, make(total))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            fit(model, optimizer, iter([batch.to(DEVICE)]))
            schedule.step()


@pair("schedule-of-all-ranks")
def function_of_the_rate_counts_all_batches(rank: int, is_right: bool) -> None:
    fit_with_lambda(
        rank, lambda total: lambda step: 1 - min(step, total) / total, is_right
    )


def falling(step: int, *, warmup: int, total: int) -> float:
    return step / warmup if step < warmup else (total - step) / (total - warmup)


@pair("schedule-of-all-ranks")
def argument_of_the_rate_counts_all_batches(rank: int, is_right: bool) -> None:
    fit_with_lambda(
        rank, lambda total: functools.partial(falling, warmup=3, total=total), is_right
    )


class Falling:
    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, step: int) -> float:
        return 1 - step / self.total


@pair("schedule-of-all-ranks")
def attribute_of_the_rate_counts_all_batches(rank: int, is_right: bool) -> None:
    fit_with_lambda(rank, Falling, is_right)


def average_without_statistics(
    rank: int, own: nn.Module, model: nn.Module, is_right: bool
) -> None:
    """Trains a model, `own` or a wrapper of it, and evaluates an average of it."""
    average = copy.deepcopy(own).eval().requires_grad_(False)
    optimizer = sgd(model)
    for rows in rows_of(rank, rows=32):
        fit(model, optimizer, iter([rows]))
        for mine, its in zip(average.parameters(), own.parameters(), strict=True):
            mine.lerp_(its.detach(), 0.1)
        for mine, its in zip(average.buffers(), own.buffers(), strict=True):
            if is_right:
                mine.copy_(its)
    with torch.no_grad():
        average(next(rows_of(1)))


@pair("statistics-not-averaged", has_ranks=False)
def average_has_no_statistics(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model(nn.BatchNorm1d(8))
    average_without_statistics(rank, model, model, is_right)


@pair("statistics-not-averaged", has_ranks=False)
def functional_training_throws_statistics_away(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model(nn.BatchNorm1d(8))
    parameters = {name: one.detach().clone() for name, one in model.named_parameters()}
    buffers = {name: one.clone() for name, one in model.named_buffers()}

    def loss_of(
        parameters: dict[str, torch.Tensor], rows: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        state = {name: one.clone() for name, one in buffers.items()}
        return functional_call(
            model, {**parameters, **state}, rows
        ).square().mean(), state

    for rows in rows_of(rank, 8, rows=32):
        gradients, state = torch.func.grad(loss_of, has_aux=True)(parameters, rows)
        parameters = {
            name: one - 0.1 * gradients[name] for name, one in parameters.items()
        }
        if is_right:
            buffers = state
    model.eval()
    with torch.no_grad():
        functional_call(model, {**parameters, **buffers}, next(rows_of(1)))


@pair("statistics-not-averaged", needs_device=True)
def average_has_no_statistics_of_all_ranks(rank: int, is_right: bool) -> None:
    begin()
    own = nn.SyncBatchNorm.convert_sync_batchnorm(make_model(nn.BatchNorm1d(8)))
    average_without_statistics(rank, own, wrapped(own), is_right)


def fit_and_average(
    rank: int, update: Callable[[torch.Tensor, torch.Tensor], object], is_right: bool
) -> None:
    begin()
    model = wrapped(make_model())
    average = {
        name: one.data.clone() if is_right else one.data
        for name, one in model.named_parameters()
    }
    optimizer = sgd(model, 0.01)
    for rows in rows_of(rank, 4):
        fit(model, optimizer, iter([rows]))
        for name, parameter in model.named_parameters():
            update(average[name], parameter.detach())


@pair("average-is-the-weights")
def average_is_multiplied_and_added_to(rank: int, is_right: bool) -> None:
    fit_and_average(
        rank,
        lambda average, weight: average.mul_(0.9).add_(weight, alpha=1 - 0.9),
        is_right,
    )


@pair("average-is-the-weights")
def average_gets_a_share(rank: int, is_right: bool) -> None:
    fit_and_average(
        rank,
        lambda average, weight: average.mul_(0.9).add_((1 - 0.9) * weight),
        is_right,
    )


@pair("average-is-the-weights")
def average_is_interpolated(rank: int, is_right: bool) -> None:
    fit_and_average(rank, lambda average, weight: average.lerp_(weight, 0.1), is_right)


@pair("average-is-the-weights", has_ranks=False)
def average_is_the_model(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    average = (copy.deepcopy(model) if is_right else model).state_dict()
    optimizer = torch.optim.Adam(model.parameters())
    for rows in rows_of(rank, 4):
        fit(model, optimizer, iter([rows]))
        torch._foreach_mul_(list(average.values()), 0.9)
        torch._foreach_add_(
            list(average.values()), list(model.state_dict().values()), alpha=0.1
        )


# Checkpoints


def training_from(
    file: io.BytesIO, restores: bool
) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model with weights from a checkpoint, its optimizer, and the checkpoint."""
    file.seek(0)
    checkpoint = torch.load(file, map_location=DEVICE)
    torch.manual_seed(0)
    net = make_model()
    net.load_state_dict(checkpoint["model"])
    model = wrapped(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if restores:
        optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer, checkpoint


def checkpoint_of_an_earlier_job(**more: int) -> io.BytesIO:
    begin()
    net = make_model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    fit(net, optimizer, rows_of(0, 2))
    file = io.BytesIO()
    torch.save(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict(), **more}, file
    )
    return file


@pair("optimizer-not-restored")
def optimizer_begins_anew_after_a_checkpoint(rank: int, is_right: bool) -> None:
    file = checkpoint_of_an_earlier_job(step=20)
    model, optimizer, checkpoint = training_from(file, restores=is_right)
    batches = rows_of(rank)
    for _step in range(checkpoint["step"], checkpoint["step"] + 3):
        optimizer.zero_grad()
        model(next(batches)).square().mean().backward()
        optimizer.step()


@pair("epoch-again")
def epochs_begin_anew_after_a_checkpoint(rank: int, is_right: bool) -> None:
    file = checkpoint_of_an_earlier_job(epoch=3)
    model, optimizer, checkpoint = training_from(file, restores=True)
    rows = data()
    sampler = DistributedSampler(rows)
    for epoch in range(checkpoint["epoch"] if is_right else 0, 5):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(rows, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            model(batch.to(DEVICE)).square().mean().backward()
            optimizer.step()


# Sums over ranks


@pair("rows-counted-twice")
def padding_is_counted(rank: int, is_right: bool) -> None:
    begin()
    rows = data(13)
    part = Subset(rows, range(rank, 13, RANKS)) if is_right else rows
    sampler = None if is_right else DistributedSampler(rows, shuffle=False)
    totals = torch.zeros(2, device=DEVICE)
    for (batch,) in DataLoader(part, batch_size=4, sampler=sampler):
        totals += torch.tensor([batch.sum(), len(batch)], device=DEVICE)
    dist.all_reduce(totals)


@pair("nothing-loaded")
def state_of_the_wrapper_is_loaded(rank: int, is_right: bool) -> None:
    begin()
    wrapper = wrapped(make_model())
    state = wrapper.module.state_dict() if is_right else wrapper.state_dict()
    model = make_model()
    model.load_state_dict(state, strict=False)
    # Right in both: a part of the names.
    model.load_state_dict(
        {next(iter(model.state_dict())): next(iter(state.values())), "head": state},
        strict=False,
    )


@pair("outputs-share-memory")
def outputs_are_one_tensor(rank: int, is_right: bool) -> None:
    begin()
    own = torch.full((2,), float(rank), device=DEVICE)
    empty = torch.zeros(2, device=DEVICE)
    parts = (
        [torch.zeros_like(empty) for _ in range(RANKS)] if is_right else [empty] * RANKS
    )
    dist.all_gather(parts, own)
    # Right in both: columns of one matrix share a range of memory, and no number of it.
    columns = torch.zeros(2, RANKS, device=DEVICE)
    dist.all_gather(list(columns.unbind(1)), own)


@pair("sum-added-up-again")
def running_total_is_reduced(rank: int, is_right: bool) -> None:
    begin()
    totals = torch.zeros(2, device=DEVICE)
    for batch in rows_of(rank):
        totals[0] += batch.square().sum()
        totals[1] += len(batch)
        reduced = totals.clone() if is_right else totals
        dist.all_reduce(reduced)


@pair("hook-is-no-mean")
def hook_returns_the_sum(rank: int, is_right: bool) -> None:
    begin()

    def in_half_the_bytes(state, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        sent = buffer.to(torch.bfloat16) / (RANKS if is_right else 1)
        future = dist.all_reduce(sent, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    model = wrapped(make_model())
    model.register_comm_hook(None, in_half_the_bytes)
    fit(model, sgd(model), rows_of(rank))


# Evaluations, and what is called without gradients


@pair("models-differ")
def statistics_of_a_model_without_wrapper_stay_apart(rank: int, is_right: bool) -> None:
    begin()
    model = make_model(nn.BatchNorm1d(8))
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        flat = nn.utils.parameters_to_vector(
            [one.grad for one in model.parameters() if one.grad is not None]
        )
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(
            flat / RANKS,
            [one.grad for one in model.parameters() if one.grad is not None],
        )
        optimizer.step()
    for buffer in model.buffers() if is_right else ():
        dist.broadcast(buffer, 0)
    model.eval()
    with torch.no_grad():
        dist.all_reduce(model(next(rows_of(10 + rank))).sum())


@pair("models-differ")
def average_is_updated_on_one_rank(rank: int, is_right: bool) -> None:
    begin()
    model = wrapped(make_model())
    average = copy.deepcopy(model.module).requires_grad_(False)
    for _ in range(2):
        fit(model, sgd(model), rows_of(rank))
        if is_right or rank == 0:
            for mine, other in zip(
                average.parameters(), model.parameters(), strict=True
            ):
                mine.lerp_(other.detach(), 0.5)
        dist.all_reduce(average(next(rows_of(10 + rank))).sum())


@pair("rows-in-other-order")
def predictions_come_rank_after_rank(rank: int, is_right: bool) -> None:
    begin()
    rows = data(16)
    loader = DataLoader(
        rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False)
    )
    mine = torch.cat([batch for (batch,) in loader]).to(DEVICE)
    parts = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(parts, mine)
    predicted = torch.stack(parts, 1).flatten(0, 1) if is_right else torch.cat(parts)
    F.mse_loss(predicted, rows.tensors[0].to(DEVICE))


@pair("recomputed-with-other-dropout", has_ranks=False)
def random_state_is_not_restored(rank: int, is_right: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1)).to(
        DEVICE
    )
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        result: Any = checkpoint(
            model, rows, use_reentrant=False, preserve_rng_state=is_right
        )
        result.square().mean().backward()
        optimizer.step()


# Memory and files


@pair("used-before-wait")
def buffer_of_a_message_is_filled_again(rank: int, is_right: bool) -> None:
    begin()
    sent, request = torch.zeros(4, 4, device=DEVICE), None
    for rows in rows_of(0):
        if rank == 1:
            dist.recv(sent, 0)
            continue
        if is_right and request is not None:
            request.wait()
        sent.copy_(rows)
        request = dist.isend(sent, 1)
    if request is not None:
        request.wait()


@pair("used-before-wait")
def message_is_read_too_early(rank: int, is_right: bool) -> None:
    begin()
    got = torch.zeros(4, device=DEVICE)
    if rank == 0:
        dist.send(torch.ones(4, device=DEVICE), 1)
        return
    request = dist.irecv(got, 0)
    assert request is not None
    if is_right:
        request.wait()
    total = got + 1
    request.wait()
    total.sum()


@pair("used-before-wait")
def gathered_tensor_is_scaled_meanwhile(rank: int, is_right: bool) -> None:
    begin()
    mine, all_of_them = torch.ones(4, device=DEVICE), torch.zeros(8, device=DEVICE)
    work = dist.all_gather_into_tensor(all_of_them, mine, async_op=True)
    if is_right:
        work.wait()
    mine.mul_(2)
    work.wait()


def name_of_a_file() -> str:
    """A file of this run, the same in all ranks."""
    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, 0)
    return os.path.join(names[0], "best.pt")


@pair("file-not-awaited")
def checkpoint_is_loaded_without_a_barrier(rank: int, is_right: bool) -> None:
    begin()
    path = name_of_a_file()
    model = wrapped(make_model())
    for _ in range(2):
        fit(model, sgd(model), rows_of(rank))
        if rank == 0:
            torch.save(model.module.state_dict(), path)
    if is_right:
        dist.barrier()
    model.module.load_state_dict(torch.load(path))


@pair("file-not-awaited")
def numbers_are_read_without_a_barrier(rank: int, is_right: bool) -> None:
    begin()
    path = name_of_a_file()
    if rank == 0:
        Path(path).write_text("1")
    if is_right:
        dist.all_reduce(torch.ones(1, device=DEVICE))
    with open(path) as file:
        file.read()


@pair("divided-twice")
def a_subset_of_the_rank_and_a_sampler(rank: int, is_right: bool) -> None:
    begin()
    rows = data()
    mine = rows if is_right else Subset(rows, list(range(rank, len(rows), RANKS)))
    sampler = DistributedSampler(mine, drop_last=True)
    model = wrapped(make_model())
    optimizer = sgd(model)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = DataLoader(mine, batch_size=4, sampler=sampler, drop_last=True)
        fit(model, optimizer, (batch[0].to(DEVICE) for batch in batches))


@pair("gradient-not-reduced")
def values_of_sparse_gradients_are_added(rank: int, is_right: bool) -> None:
    begin()
    table = nn.Embedding(20, 4, sparse=True).to(DEVICE)
    dist.broadcast(table.weight.data, 0)
    optimizer = sgd(table)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        table(
            torch.randperm(20, generator=generator)[:6].to(DEVICE)
        ).square().mean().backward()
        gradient = table.weight.grad
        assert gradient is not None
        if is_right:
            table.weight.grad = None
            dense = gradient.to_dense() / RANKS
            dist.all_reduce(dense)
            table.weight.grad = dense
        else:
            values = gradient._values()
            dist.all_reduce(values)
            averaged = values / RANKS
            table.weight.grad = torch.sparse_coo_tensor(
                gradient._indices(), averaged, gradient.shape, check_invariants=False
            )
        optimizer.step()


if __name__ == "__main__":  # as a script: its name, and `bad` or `good`
    name, which = os.environ["PLANTED"].split()
    PAIRS[name].main(int(os.environ.get("LOCAL_RANK", 0)), which == "good")
