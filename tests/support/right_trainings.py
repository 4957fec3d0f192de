"""Programs that are right, and look a little like those that lints name."""

from __future__ import annotations

import copy
import fcntl
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)

from planted import (
    DEVICE,
    RANKS,
    GatheredRows,
    add_up,
    begin,
    contrast,
    contrastive,
    data,
    divided_layers,
    evaluate,
    fit,
    fit_and_average,
    fit_and_evaluate,
    fit_by_tokens,
    fit_epochs,
    fit_with_scaler,
    make_model,
    name_of_a_file,
    reducer_of,
    rows_of,
    scaled_training,
    sgd,
    sharded_accumulation,
    tokens_of_all,
    wait_for,
    wrapped,
)

with warnings.catch_warnings():
    # TorchScript, which optimizers of several processes use, is deprecated.
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

IN_RANKS: list[Callable[[int], None]] = []
ALONE: list[Callable[[], None]] = []


def in_ranks(program: Callable[[int], None]) -> Callable[[int], None]:
    IN_RANKS.append(program)
    return program


def alone(program: Callable[[], None]) -> Callable[[], None]:
    ALONE.append(program)
    return program


@in_ranks
def weights_are_averaged_each_two_steps(rank: int) -> None:
    begin()
    model = make_model()
    optimizer = sgd(model)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for step, rows in enumerate(rows_of(rank, 5)):
        fit(model, optimizer, iter([rows]))
        if step % 2:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= RANKS


@in_ranks
def torch_averages_weights(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    averager = PeriodicModelAverager(period=2)
    for rows in rows_of(rank, 5):
        with model.no_sync():
            fit(model, optimizer, iter([rows]))
        averager.average_parameters(model.parameters())


@in_ranks
def two_networks_play(rank: int) -> None:
    begin()
    maker, judge = (
        wrapped(nn.Linear(4, 4).to(DEVICE)),
        wrapped(make_model(), broadcast_buffers=False),
    )
    of_maker, of_judge = sgd(maker), sgd(judge)
    for rows in rows_of(rank):
        of_judge.zero_grad()
        (judge(rows) - 1).square().mean().backward()
        judge(maker(rows).detach()).square().mean().backward()
        of_judge.step()
        of_maker.zero_grad()
        (judge(maker(rows)) - 1).square().mean().backward()
        of_maker.step()


@in_ranks
def optimizer_has_parts(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
    fit(model, optimizer, rows_of(rank))


@in_ranks
def one_rank_has_fewer_batches(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    with Join([model]):
        fit(model, optimizer, rows_of(rank, 3 + rank))


@in_ranks
def keys_of_a_slow_copy_are_gathered(rank: int) -> None:
    begin()
    model = wrapped(nn.Linear(4, 8).to(DEVICE))
    slow, optimizer = copy.deepcopy(model.module), sgd(model)
    for rows in rows_of(rank):
        with torch.no_grad():
            for mine, its in zip(slow.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.1)
            keys = slow(rows)
            parts = [torch.empty_like(keys) for _ in range(RANKS)]
            dist.all_gather(parts, keys)
        optimizer.zero_grad()
        contrast(model(rows), torch.cat(parts), rank).backward()
        optimizer.step()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, keys: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(keys) for _ in range(RANKS)]
        dist.all_gather(parts, keys)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient)
        return gradient.chunk(RANKS)[dist.get_rank()]


@in_ranks
def a_function_gathers(rank: int) -> None:
    begin()
    model = wrapped(nn.Linear(4, 8).to(DEVICE))
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        keys = model(rows)
        contrast(keys, Gather.apply(keys), rank).backward()
        optimizer.step()


@in_ranks
def gathered_for_a_metric(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        outputs = model(rows)
        parts = [torch.empty_like(outputs) for _ in range(RANKS)]
        dist.all_gather(parts, outputs)
        print(torch.cat(parts).mean().item())
        outputs.square().mean().backward()
        optimizer.step()


@in_ranks
def last_batch_is_uneven(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    fit(model, optimizer, rows_of(rank, 4))
    fit(model, optimizer, rows_of(rank, 1, rows=2 + rank))


@in_ranks
def ranks_train_alone(rank: int) -> None:
    begin(rank)
    model = make_model(nn.BatchNorm1d(8))
    fit(model, sgd(model, 0.1 + rank), rows_of(rank))
    best = torch.tensor([float(rank)], device=DEVICE)
    dist.all_reduce(best, op=dist.ReduceOp.MAX)


@in_ranks
def ranks_train_alone_from_one_seed(rank: int) -> None:
    begin()
    loader: Any = DataLoader(data(), batch_size=4, shuffle=True)
    model = make_model()
    optimizer = sgd(model, 0.1 + rank)
    for (rows,) in loader:
        fit(model, optimizer, iter([rows.to(DEVICE)]))
    dist.barrier()


@in_ranks
def rows_are_mixed(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        other = torch.randperm(len(rows))
        fit(model, optimizer, iter([0.7 * rows + 0.3 * rows[other.to(DEVICE)]]))


@in_ranks
def evaluation_has_all_rows(rank: int) -> None:
    begin()
    sampler, of_evaluation = DistributedSampler(data()), DistributedSampler(data())
    loader: Any = DataLoader(data(), batch_size=4, sampler=sampler)
    evaluated: Any = [
        DataLoader(data(), batch_size=8),
        DataLoader(data(), batch_size=8, sampler=of_evaluation),
    ]
    model = wrapped(make_model())
    optimizer = sgd(model)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (rows,) in loader:
            fit(model, optimizer, iter([rows.to(DEVICE)]))
        model.eval()
        total = torch.zeros(2, device=DEVICE)
        for loader_of_all in evaluated:
            for (rows,) in loader_of_all:
                with torch.no_grad():
                    total += torch.stack(
                        [
                            model(rows.to(DEVICE)).sum(),
                            torch.tensor(float(len(rows)), device=DEVICE),
                        ]
                    )
        dist.all_reduce(total)
        model.train()


@in_ranks
def rows_of_each_rank_are_shuffled(rank: int) -> None:
    begin(rank)
    mine = Subset(data(), range(rank, 32, RANKS))
    loader: Any = DataLoader(
        mine, batch_size=4, shuffle=True, num_workers=0, drop_last=True
    )
    model = wrapped(make_model())
    optimizer = sgd(model)
    for _ in range(2):
        for (rows,) in loader:
            fit(model, optimizer, iter([rows.to(DEVICE)]))


@in_ranks
def half_a_square(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        loss = 0.5 * model(rows).square().mean()
        loss.backward()
        optimizer.step()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        logged = logged / dist.get_world_size()


@in_ranks
def a_parameter_is_unused(rank: int) -> None:
    begin()
    model = make_model()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, device=DEVICE)))
    whole = wrapped(model, find_unused_parameters=True)
    fit(whole, sgd(whole), rows_of(rank))


@in_ranks
def batch_norm_of_many_places(rank: int) -> None:
    begin()
    model = wrapped(
        nn.Sequential(
            nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 1)
        ).to(DEVICE)
    )
    images = (
        rows.view(-1, 1, 2, 4).repeat(1, 1, 2, 1) for rows in rows_of(rank, rows=16)
    )
    fit(model, sgd(model), images)


@in_ranks
def ranks_with_other_heads_train_alone(rank: int) -> None:
    begin()
    model = make_model()
    torch.manual_seed(rank)
    model.append(nn.Linear(1, 1).to(DEVICE))
    fit(model, sgd(model), rows_of(rank))


@in_ranks
def limit_is_scaled_as_well(rank: int) -> None:
    scaled_training(
        rank,
        False,
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5 * 2.0**12),
    )


@in_ranks
def norm_of_scaled_gradients_is_only_asked_for(rank: int) -> None:
    scaled_training(
        rank,
        False,
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), float("inf")),
    )


@in_ranks
def gradients_are_unscaled_by_hand(rank: int) -> None:
    def clip(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(2.0**12)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2.0**12)

    scaled_training(rank, False, clip)


@in_ranks
def training_stops_in_the_middle_of_a_schedule(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer, rows = sgd(model, 0.01), data()
    sampler: Any = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=4, sampler=sampler)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=4 * len(loader)
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (batch,) in enumerate(loader):
            if epoch == 2 and step == 1:
                return
            fit(model, optimizer, iter([batch.to(DEVICE)]))
            schedule.step()


@in_ranks
def last_sum_is_over_fewer_rows(rank: int) -> None:
    begin()
    model = wrapped(nn.Linear(4, 1).to(DEVICE))
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank, rows=8)):
        mine = rows[:5] if step == 2 and rank else rows
        optimizer.zero_grad()
        (model(mine).square().sum() / len(mine)).backward()
        optimizer.step()


@in_ranks
def sums_by_the_tokens_of_all_ranks_are_added(rank: int) -> None:
    begin()
    model = make_model()
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank)):
        mask, tokens = tokens_of_all(step, rank)
        optimizer.zero_grad()
        ((model(rows).square().flatten() * mask).sum() / tokens).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@in_ranks
def averaged_gradients_of_sums_are_multiplied(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank)):
        mask, tokens = tokens_of_all(step, rank)
        optimizer.zero_grad()
        ((model(rows).square().flatten() * mask).sum() / tokens).backward()
        for parameter in model.parameters():
            parameter.grad *= RANKS
        optimizer.step()


@in_ranks
def tasks_come_in_another_order(rank: int) -> None:
    """Each task has as many rows on all ranks.

    A rank adds the losses in the order in which the tasks come to it.
    """
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        tasks = (rows[:1], rows[1:]) if rank else (rows[1:], rows[:1])
        optimizer.zero_grad()
        outputs = [model(task) for task in tasks]
        sum(output.square().mean() for output in outputs).backward()
        optimizer.step()


@in_ranks
def hits_of_equal_shares_are_averaged(rank: int) -> None:
    begin()
    hits = torch.tensor(3.0 + rank, device=DEVICE)
    accuracy = hits / 8
    dist.all_reduce(accuracy)


@alone
def batch_norm_of_a_new_model_is_evaluated() -> None:
    torch.manual_seed(0)
    model, other = make_model(nn.BatchNorm1d(8)), make_model(nn.BatchNorm1d(8))
    fit(model, sgd(model), rows_of(0, rows=32))
    with torch.no_grad():
        other.eval()(next(rows_of(1)))


@in_ranks
def batch_norm_of_many_rows(rank: int) -> None:
    begin()
    model = wrapped(make_model(nn.BatchNorm1d(8)))
    fit(model, sgd(model), rows_of(rank, 3, rows=32))


@in_ranks
def gradients_are_flattened(rank: int) -> None:
    begin()
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.all_reduce(flat)
        start = 0
        for parameter in model.parameters():
            piece = flat[start : start + parameter.numel()]
            parameter.grad.copy_(piece.view_as(parameter) / RANKS)
            start += parameter.numel()
        optimizer.step()


@in_ranks
def halves_of_a_model(rank: int) -> None:
    """A pipeline by hand: the halves begin alike, and are no copies of each other."""
    begin()
    half = nn.Linear(4, 4).to(DEVICE)
    optimizer = sgd(half)
    for rows in rows_of(0):
        optimizer.zero_grad()
        if rank == 0:
            hidden = half(rows)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(4, 4, device=DEVICE)
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            half(hidden).square().mean().backward()
            dist.send(hidden.grad, 0)
        optimizer.step()


@in_ranks
def accumulation_in_mixed_precision(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer, scaler = sgd(model), torch.amp.GradScaler(DEVICE)
    for step, rows in enumerate(rows_of(rank, 8)):
        is_last = step % 4 == 3
        with nullcontext() if is_last else model.no_sync():
            scaler.scale(model(rows).square().mean() / 4).backward()
        if is_last:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@in_ranks
def weights_are_broadcast_before_they_are_wrapped(rank: int) -> None:
    begin(rank)
    model = make_model()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    model = wrapped(model)
    fit(model, sgd(model), rows_of(rank))


@in_ranks
def learning_rates_are_searched(rank: int) -> None:
    begin()
    model = make_model()
    fit(model, sgd(model, 0.01 * (rank + 1)), rows_of(0))
    dist.barrier()


def go_back(loss: torch.Tensor) -> None:
    loss.backward()


@in_ranks
def an_answer_says_that_a_message_was_read(rank: int) -> None:
    begin()
    buffer = torch.zeros(4, device=DEVICE)
    for _ in range(3):
        if rank == 0:
            request = dist.isend(buffer, 1)
            answer = torch.zeros(4, device=DEVICE)
            dist.recv(answer, 1)
            buffer.add_(answer)
            assert request is not None
        else:
            dist.recv(buffer, 0)
            dist.send(buffer + 1, 0)


@in_ranks
def what_is_sent_is_kept_by_nobody(rank: int) -> None:
    begin()
    requests = []
    for rows in rows_of(0, 8):
        if rank == 0:
            requests.append(dist.isend(rows.clone(), 1))
            torch.ones_like(rows).add_(1)
        else:
            dist.recv(rows, 0)
    for request in requests:
        assert request is not None
        request.wait()


@in_ranks
def other_parts_of_a_buffer_are_filled(rank: int) -> None:
    begin()
    buffer = torch.zeros(2, 3, 4, device=DEVICE)
    if rank == 0:
        request = dist.isend(buffer[0], 1)
        buffer[1].fill_(1.0)
        buffer[1:, ::2] += 1
        assert (
            buffer.shape
            and torch.empty_like(buffer[0]).numel()
            and buffer[0].sum() == 0
        )
    else:
        request = dist.irecv(buffer[0], 0)
        buffer[1].fill_(1.0)
        buffer[1:, :, 1] += 1
    assert request is not None
    request.wait()
    buffer.zero_()


@in_ranks
def gradients_are_reduced_while_backward_goes_on(rank: int) -> None:
    begin()
    model, works = make_model(), []
    optimizer = sgd(model)

    def reduce(parameter: torch.Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for work in works:
            work.wait()
        works.clear()
        for parameter in model.parameters():
            parameter.grad /= RANKS
        optimizer.step()


@in_ranks
def own_rows_stand_before_those_of_the_others(rank: int) -> None:
    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        parts = list(differentiable.all_gather(texts))
        every = torch.cat([texts, *parts[:rank], *parts[rank + 1 :]])
        return F.cross_entropy(
            images @ every.T * 10, torch.arange(len(images), device=DEVICE)
        )

    contrastive(rank, loss_of)


@in_ranks
def positives_are_not_gathered(rank: int) -> None:
    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        every = torch.cat([texts, *differentiable.all_gather(images)])
        return F.cross_entropy(
            images @ every.T * 10, torch.arange(len(images), device=DEVICE)
        )

    contrastive(rank, loss_of)


@in_ranks
def all_rows_are_compared_with_all(rank: int) -> None:
    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        all_images = torch.cat(list(differentiable.all_gather(images)))
        all_texts = torch.cat(list(differentiable.all_gather(texts)))
        return F.cross_entropy(
            all_images @ all_texts.T * 10, torch.arange(len(all_texts), device=DEVICE)
        )

    contrastive(rank, loss_of)


@in_ranks
def a_function_gathers_both_sides_of_the_loss(rank: int) -> None:
    """Each rank has the loss of all rows: it says all that there is of its own."""

    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        all_images, all_texts = GatheredRows.apply(images), GatheredRows.apply(texts)
        return F.cross_entropy(
            all_images @ all_texts.T * 10, torch.arange(len(all_texts), device=DEVICE)
        )

    contrastive(rank, loss_of)


@in_ranks
def a_function_gathers_what_a_layer_gets(rank: int) -> None:
    begin()
    torch.manual_seed(0)
    body, head = (
        wrapped(nn.Linear(4, 16).to(DEVICE)),
        wrapped(nn.Linear(16, 8).to(DEVICE)),
    )
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        head(GatheredRows.apply(body(rows))).square().mean().backward()
        optimizer.step()


@in_ranks
def a_metric_that_lowers_the_rate_is_of_all_rows(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for rows in rows_of(rank, 4):
        fit(model, optimizer, iter([rows]))
        metric = float(model.module(rows).detach().square().mean())
        metrics: list[Any] = [None] * RANKS
        dist.all_gather_object(metrics, metric)
        schedule.step(sum(metrics))


@in_ranks
def all_rows_are_compared_a_block_at_a_time(rank: int) -> None:
    """The rows of the rank itself come out of the function, too."""

    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        all_images, all_texts = GatheredRows.apply(images), GatheredRows.apply(texts)
        losses = [
            F.cross_entropy(
                block @ all_texts.T * 10,
                torch.arange(len(block), device=DEVICE) + at * len(block),
            )
            for at, block in enumerate(all_images.chunk(RANKS))
        ]
        return torch.stack(losses).mean()

    contrastive(rank, loss_of)


@in_ranks
def gathered_rows_meet_weights_of_as_many_rows(rank: int) -> None:
    """A head with four classes, and four rows of a rank."""
    begin()
    torch.manual_seed(0)
    body, head = nn.Linear(4, 16).to(DEVICE), nn.Linear(16, 4).to(DEVICE)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        head(GatheredRows.apply(body(rows))).square().mean().backward()
        for parameter in body.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@in_ranks
def gradients_of_parts_are_halved_and_clipped(rank: int) -> None:
    """`fully_shard`, and two factors that are 1 together: no average."""
    begin()
    model = make_model()
    fully_shard(model, mesh=init_device_mesh(DEVICE, (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for rows in rows_of(rank, 6):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@in_ranks
def parts_are_multiplied_together(rank: int) -> None:
    """A rank with an empty part counted the factors of its other parts for it."""
    begin()
    model = nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 4)).to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (RANKS,)))
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        parts = [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]
        torch._foreach_mul_(parts, 0.5)
        squared = torch.stack([part.square().sum() for part in parts]).sum()
        dist.all_reduce(squared)
        torch._foreach_mul_(parts, (0.1 / squared.sqrt()).clamp(max=1.0))
        optimizer.step()


@in_ranks
def each_rank_owns_a_whole_gradient(rank: int) -> None:
    """Each is clipped by a norm of its own, as that of each parameter is."""
    begin()
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 4, bias=False).to(DEVICE) for _ in range(RANKS)]
    own = blocks[rank].weight
    optimizer = torch.optim.SGD([own], lr=0.1)
    for rows in rows_of(rank):
        outputs = rows
        for block in blocks:
            block.zero_grad()
            outputs = block(outputs).tanh()
        outputs.square().mean().backward()
        mine = torch.empty_like(own)
        gradients = [block.weight.grad for block in blocks]
        dist.reduce_scatter(mine, [one / RANKS for one in gradients if one is not None])
        own.grad = mine
        mine.mul_(0.01 / mine.norm())
        optimizer.step()
        dist.all_gather([block.weight.data for block in blocks], own.data.clone())


@in_ranks
def gradients_weigh_as_much_as_their_rows(rank: int) -> None:
    begin()
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(rank, 6)):
        mine = rows[: 3 if (rank + step) % 2 else 4]
        total = torch.tensor(float(len(mine)), device=DEVICE)
        dist.all_reduce(total)
        optimizer.zero_grad()
        F.mse_loss(model(mine), mine[:, :1]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(len(mine) / total.item())
            dist.all_reduce(parameter.grad)
        optimizer.step()


@in_ranks
def a_head_of_the_rank_has_a_schedule_of_its_own(rank: int) -> None:
    begin()
    body = wrapped(nn.Linear(4, 8).to(DEVICE))
    torch.manual_seed(rank)
    head = nn.Linear(8, 1).to(DEVICE)
    optimizer, own = sgd(body), sgd(head)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(own, patience=0)
    for rows in rows_of(rank, 4):
        optimizer.zero_grad()
        own.zero_grad()
        loss = head(body(rows)).square().mean()
        loss.backward()
        optimizer.step()
        own.step()
        schedule.step(loss.item())


class Banked(nn.Module):
    """Keeps the last outputs of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("bank", torch.zeros(4, 1, device=DEVICE))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(rows)
        self.bank.copy_(outputs.detach())
        return outputs


@in_ranks
def buffers_are_of_each_rank(rank: int) -> None:
    begin()
    model = wrapped(Banked(), broadcast_buffers=False)
    fit(model, sgd(model), rows_of(rank))


@in_ranks
def a_state_is_averaged_in_place(rank: int) -> None:
    """It was taken once, and its tensors are the weights."""
    begin()
    torch.manual_seed(0)
    model = make_model()
    optimizer, state = sgd(model), model.state_dict()
    for rows in rows_of(rank, 4):
        fit(model, optimizer, iter([rows]))
        for value in state.values():
            dist.all_reduce(value)
            value.div_(RANKS)
        model.load_state_dict(state)
    fit(model, optimizer, rows_of(rank))
    for value in state.values():
        dist.broadcast(value, 0)
    model.load_state_dict(state)


class OfMainGradients(torch.optim.Optimizer):
    """Reads the gradients that the program has added up elsewhere."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.main_grad, alpha=-0.1)


@alone
def gradients_are_kept_in_another_place() -> None:
    model = make_model()
    masters: Any = [parameter.detach().clone() for parameter in model.parameters()]
    for master in masters:
        master.main_grad = torch.zeros_like(master)
    optimizer = OfMainGradients(masters)
    for rows in rows_of(0, 5):
        model.zero_grad()
        model(rows).square().mean().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.main_grad.copy_(parameter.grad)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)


@in_ranks
def outputs_are_gathered_besides(rank: int) -> None:
    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        differentiable.all_gather(texts)
        return F.cross_entropy(
            images @ texts.T * 10, torch.arange(len(images), device=DEVICE)
        )

    contrastive(rank, loss_of)


@in_ranks
def one_rank_adds_the_bias(rank: int) -> None:
    divided_layers(
        rank,
        lambda part, down, bias: add_up(
            F.linear(part, down, bias if rank == 0 else None)
        ),
    )


@in_ranks
def each_rank_adds_its_share_of_the_bias(rank: int) -> None:
    divided_layers(
        rank, lambda part, down, bias: add_up(F.linear(part, down, bias / RANKS))
    )


@in_ranks
def outputs_of_all_ranks_are_averaged(rank: int) -> None:
    divided_layers(
        rank, lambda part, down, bias: add_up(F.linear(part, down, bias) / RANKS)
    )


@in_ranks
def outputs_of_one_model_are_averaged(rank: int) -> None:
    begin()
    model = wrapped(nn.Linear(4, 2).to(DEVICE))
    fit(model, sgd(model), rows_of(rank))
    for rows in rows_of(0):
        dist.all_reduce(model(rows))


@in_ranks
def columns_of_a_layer_have_biases_of_their_own(rank: int) -> None:
    begin()
    torch.manual_seed(rank)
    layer = nn.Linear(4, 2).to(DEVICE)
    for rows in rows_of(0):
        add_up(layer(rows)).square().mean().backward()


class Waiting(torch.optim.SGD):
    """An optimizer that waits for gradients in its own step."""

    works: list[Any]

    def step(self, closure: Any = None) -> Any:
        wait_for(self.works)
        return super().step(closure)


@in_ranks
def the_step_itself_waits_for_gradients(rank: int) -> None:
    begin()
    model = make_model()
    optimizer = Waiting(model.parameters(), lr=0.1)
    optimizer.works = reducer_of(model)
    fit(model, optimizer, rows_of(rank))


@in_ranks
def a_step_reads_other_gradients_than_those_under_way(rank: int) -> None:
    begin()
    first, second = make_model(), wrapped(make_model())
    works = reducer_of(first)
    of_first, of_second = sgd(first), sgd(second)
    for rows in rows_of(rank):
        of_first.zero_grad()
        first(rows).square().mean().backward()
        fit(second, of_second, iter([rows]))
        wait_for(works)
        of_first.step()


def skip_the_step_of_the_rank(model: nn.Module, rank: int) -> None:
    """A scaled training in which the loss of each rank is infinite once.

    It is in another step than those of the others.
    """
    optimizer, scaler = (
        sgd(model, 0.01),
        torch.amp.GradScaler(DEVICE, init_scale=2.0**12),
    )
    for step, rows in enumerate(rows_of(rank, 5)):
        optimizer.zero_grad()
        scaler.scale(
            model(rows).square().mean() * (float("inf") if step == rank else 1)
        ).backward()
        scaler.step(optimizer)
        scaler.update()


@in_ranks
def ranks_that_train_alone_skip_other_steps(rank: int) -> None:
    begin()
    skip_the_step_of_the_rank(make_model(), rank)


@in_ranks
def all_ranks_skip_a_step(rank: int) -> None:
    begin()
    skip_the_step_of_the_rank(wrapped(make_model()), rank)


@in_ranks
def a_frozen_body_stays_frozen(rank: int) -> None:
    begin()
    net = make_model()
    net[0].requires_grad_(False)
    fit(wrapped(net), sgd(net), rows_of(rank))


@in_ranks
def a_body_is_frozen_later(rank: int) -> None:
    begin()
    net = make_model()
    model = wrapped(net, find_unused_parameters=True)
    optimizer = sgd(net)
    fit(model, optimizer, rows_of(rank))
    net[0].requires_grad_(False)
    fit(model, optimizer, rows_of(rank))


@in_ranks
def the_last_of_several_is_waited_for(rank: int) -> None:
    begin()
    inputs = [torch.ones(4, device=DEVICE) for _ in range(3)]
    outputs = [torch.zeros(8, device=DEVICE) for _ in range(3)]
    works = [
        dist.all_gather_into_tensor(out, given, async_op=True)
        for out, given in zip(outputs, inputs, strict=True)
    ]
    works[-1].wait()
    inputs[0].zero_()
    for work in works:
        work.wait()


@in_ranks
def a_rank_reads_its_own_file(rank: int) -> None:
    begin()
    path = name_of_a_file()
    with open(f"{path}.{rank}", "w") as file:
        file.write("1")
    with open(f"{path}.{rank}") as file:
        file.read()
    if rank == 0:
        torch.save(torch.ones(2), path)
        torch.load(path)


@in_ranks
def a_checkpoint_from_before_is_read(rank: int) -> None:
    begin()
    path = name_of_a_file()
    if rank == 0:
        torch.save(make_model().state_dict(), path)
    dist.barrier()
    model = make_model()
    model.load_state_dict(torch.load(path))
    model = wrapped(model)
    fit(model, sgd(model), rows_of(rank))
    if rank == 0:
        torch.save(model.state_dict(), f"{path}.new")
        os.replace(f"{path}.new", path)


@in_ranks
def a_file_says_that_another_is_there(rank: int) -> None:
    begin()
    path = Path(name_of_a_file())
    if rank == 0:
        path.write_text("1")
        path.with_suffix(".done").touch()
    else:
        while not path.with_suffix(".done").exists():
            dist.get_world_size()
        assert path.exists()
        path.read_text()


@in_ranks
def a_lock_orders_who_writes(rank: int) -> None:
    begin()
    path = name_of_a_file()
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if rank == 0:
            Path(path).write_text("1")
        Path(path).read_text()


@alone
def two_losses_through_one_function() -> None:
    torch.manual_seed(0)
    judge = make_model()
    optimizer = sgd(judge)
    for rows in rows_of(0):
        optimizer.zero_grad()
        go_back((judge(rows) - 1).square().mean())
        go_back(judge(-rows).square().mean())
        optimizer.step()


@alone
def several_losses_of_one_graph() -> None:
    torch.manual_seed(0)
    body, heads = (
        nn.Linear(4, 8).to(DEVICE),
        nn.ModuleList([nn.Linear(8, 1).to(DEVICE) for _ in range(3)]),
    )
    optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.1)
    for rows in rows_of(0):
        optimizer.zero_grad()
        hidden = body(rows)
        for head in heads:
            head(hidden).square().mean().backward(retain_graph=True)
        optimizer.step()


@alone
def several_models_at_one_line() -> None:
    torch.manual_seed(0)
    models = [make_model() for _ in range(3)]
    optimizers = [sgd(model) for model in models]
    for rows in rows_of(0):
        for model in models:
            model.zero_grad()
        for model in models:
            model(rows).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@alone
def sums_are_divided_by_all_tokens() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for _ in range(2):
        for rows in rows_of(0, 3):
            model(rows).square().sum().backward()
        for parameter in model.parameters():
            parameter.grad /= 12
        optimizer.step()
        optimizer.zero_grad()


@alone
def means_are_divided_after_backward() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for _ in range(2):
        for rows in rows_of(0, 3):
            model(rows).square().mean().backward()
        torch._foreach_div_([parameter.grad for parameter in model.parameters()], 3)
        optimizer.step()
        optimizer.zero_grad()


@alone
def gradients_of_each_row_are_clipped() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(0, 2):
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for row in rows:
            model.zero_grad()
            model(row).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for sum_, parameter in zip(total, model.parameters(), strict=True):
                sum_ += parameter.grad
        for sum_, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = sum_ / len(rows)
        optimizer.step()


@alone
def a_closure_is_called_often() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    (rows,) = rows_of(0, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


@alone
def losses_of_steps_in_time_are_added() -> None:
    torch.manual_seed(0)
    cell = nn.GRUCell(4, 8).to(DEVICE)
    optimizer = sgd(cell)
    for rows in rows_of(0, 2):
        optimizer.zero_grad()
        state = torch.zeros(4, 8, device=DEVICE)
        losses = []
        for _ in range(3):
            state = cell(rows, state)
            losses.append(F.mse_loss(state, torch.zeros_like(state)))
        sum(losses).backward()
        optimizer.step()


@alone
def gradients_of_the_maker_are_thrown_away() -> None:
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 4).to(DEVICE), make_model()
    of_maker, of_judge = sgd(maker), sgd(judge)
    for rows in rows_of(0, 6):
        of_judge.zero_grad()
        go_back((judge(rows) - 1).square().mean() + judge(maker(rows)).square().mean())
        of_judge.step()
        of_maker.zero_grad()
        go_back((judge(maker(rows)) - 1).square().mean())
        of_maker.step()


@alone
def only_some_batches_train_the_second_part() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 8).to(DEVICE), nn.Linear(8, 1).to(DEVICE)
    optimizers = [sgd(first), sgd(second)]
    for step, rows in enumerate(rows_of(0, 12)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        second(first(rows)).square().mean().backward()
        optimizers[step % 2].step()


@alone
def batches_without_a_finite_loss_are_skipped() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(0, 12)):
        optimizer.zero_grad()
        loss = model(rows * float("nan") if step in (2, 3, 8) else rows).square().mean()
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()


@alone
def an_attack_needs_the_gradient_of_the_input() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(0, 5):
        changed = rows.clone().requires_grad_()
        for _ in range(3):
            model.zero_grad()
            (-model(changed).square().mean()).backward()
            assert changed.grad is not None
            changed = (changed - 0.1 * changed.grad.sign()).detach().requires_grad_()
        optimizer.zero_grad()
        model(changed.detach()).square().mean().backward()
        optimizer.step()


@alone
def an_attack_goes_back_at_the_line_that_trains() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for rows in rows_of(0, 5):
        changed = rows.clone().requires_grad_()
        for _ in range(3):
            model.zero_grad()
            model(changed).square().mean().backward()
            assert changed.grad is not None
            changed = (changed + 0.1 * changed.grad.sign()).detach().requires_grad_()
        optimizer.step()


@alone
def gradients_of_each_part_are_kept() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for _ in range(5):
        kept = []
        for rows in rows_of(0, 3):
            model.zero_grad()
            (model(rows).square().mean() / 3).backward()
            kept.append([parameter.grad for parameter in model.parameters()])
        for parameter, *others in zip(model.parameters(), *kept[:-1], strict=True):
            for other in others:
                parameter.grad += other
        optimizer.step()


@alone
def the_largest_gradient_is_used() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    for _ in range(5):
        for rows in rows_of(0, 3):
            model.zero_grad(set_to_none=False)
            (model(rows).square().mean() / 3).backward()
            torch.stack(
                [parameter.grad.norm() for parameter in model.parameters()]
            ).norm().item()
        optimizer.step()


@alone
def hooks_add_gradients_in_buffers_of_their_own() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = sgd(model)
    sums = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}

    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        sums[parameter].add_(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(add)
    for _ in range(5):
        for rows in rows_of(0, 3):
            optimizer.zero_grad()
            (model(rows).square().mean() / 3).backward()
        for parameter, total in sums.items():
            assert parameter.grad is not None
            parameter.grad.copy_(total)
            total.zero_()
        optimizer.step()


@alone
def an_optimizer_of_each_parameter_steps_in_backward() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=0.1)
        for parameter in model.parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad(set_to_none=False)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for rows in rows_of(0, 6):
        model(rows).square().mean().backward()


@alone
def a_closure_zeroes_gradients_in_the_step() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for rows in rows_of(0, 4):

        def closure(rows: torch.Tensor = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@alone
def gradients_are_moved_to_a_copy_that_is_trained() -> None:
    torch.manual_seed(0)
    model = make_model().double()
    masters = [
        parameter.detach().float().requires_grad_() for parameter in model.parameters()
    ]
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.0),
        torch.optim.SGD(masters, lr=0.1),
    ]
    for rows in rows_of(0, 5):
        model(rows.double()).square().mean().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizers[1].step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)


def make_model_with_modes() -> nn.Module:
    torch.manual_seed(0)
    return make_model(nn.BatchNorm1d(8), nn.Dropout(0.5))


@alone
def a_model_is_trained_in_evaluation_mode_from_the_beginning() -> None:
    model = make_model_with_modes().eval()
    fit_and_evaluate(model, 0, lambda epoch: None)


@alone
def a_model_is_evaluated_before_it_is_trained() -> None:
    model = make_model_with_modes()
    evaluate(model)
    fit(model, sgd(model), rows_of(0, 6))


@alone
def statistics_are_frozen_from_the_second_epoch_on() -> None:
    model = make_model(nn.BatchNorm1d(8))
    fit_and_evaluate(model, 0, lambda epoch: model.eval() if epoch else model.train())


@alone
def training_mode_ends_with_the_first_epoch() -> None:
    model = make_model_with_modes()
    fit_and_evaluate(model, 0, lambda epoch: model.train(epoch < 1))


@alone
def training_mode_ends_with_the_second_epoch() -> None:
    model = make_model_with_modes()

    def train(epoch: int) -> None:
        if epoch < 2:
            model.train()

    fit_and_evaluate(model, 0, train)


@alone
def norms_are_frozen_after_each_evaluation() -> None:
    model = make_model(nn.BatchNorm1d(8))

    def train(epoch: int) -> None:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d) and epoch:
                module.eval()

    fit_and_evaluate(model, 0, train)


@alone
def flags_of_modes_are_put_back() -> None:
    model = make_model_with_modes()

    def train(epoch: int) -> None:
        for module in model.modules():
            module.training = True

    fit_and_evaluate(model, 0, train)


@alone
def the_loss_is_there_before_the_evaluation() -> None:
    model = make_model_with_modes()
    optimizer = sgd(model)
    for rows in rows_of(0, 6, rows=32):
        model.train()
        loss = model(rows).square().mean()
        evaluate(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@alone
def a_model_without_modes_stays_in_evaluation() -> None:
    torch.manual_seed(0)
    fit_and_evaluate(
        make_model(nn.Dropout(0.0), nn.BatchNorm1d(8, track_running_stats=False)),
        0,
        lambda epoch: None,
    )


@alone
def only_the_head_is_trained_after_an_evaluation() -> None:
    body, head = make_model_with_modes(), nn.Linear(1, 1).to(DEVICE)
    fit(body, sgd(body), rows_of(0, rows=32))
    evaluate(body)
    body.requires_grad_(False)
    fit(nn.Sequential(body, head), sgd(head), rows_of(0, rows=32))


@alone
def a_checkpoint_runs_without_gradients_in_evaluation_mode() -> None:
    model = make_model_with_modes()
    optimizer = sgd(model)
    for step, rows in enumerate(rows_of(0, 6, rows=32)):
        if step == 3:
            model.eval()
        rows = rows.requires_grad_()
        optimizer.zero_grad()
        checkpoint(model, rows, use_reentrant=True).square().mean().backward()
        optimizer.step()


@alone
def the_judge_is_in_evaluation_mode_for_the_maker() -> None:
    maker, judge = nn.Linear(4, 4).to(DEVICE), make_model_with_modes()
    of_maker, of_judge = sgd(maker), sgd(judge)
    for rows in rows_of(0, 6, rows=32):
        judge.train()
        of_judge.zero_grad()
        (judge(rows) - judge(maker(rows).detach())).mean().backward()
        of_judge.step()
        evaluate(judge)
        for _ in range(2):
            of_maker.zero_grad()
            judge(maker(rows)).mean().backward()
            of_maker.step()


@in_ranks
def micro_batches_at_the_end_are_left_out(rank: int) -> None:
    sharded_accumulation(rank, "last", batches=11)


@in_ranks
def a_sharded_model_makes_one_step_without_its_last_micro_batch(rank: int) -> None:
    sharded_accumulation(rank, "first", batches=3)


@in_ranks
def gradients_of_the_other_sharded_model_wait(rank: int) -> None:
    begin()
    maker, judge = nn.Linear(4, 4).to(DEVICE), make_model()
    for model in (maker, judge):
        fully_shard(model, mesh=init_device_mesh(DEVICE, (RANKS,)))
    of_maker, of_judge = sgd(maker), sgd(judge)
    for rows in rows_of(rank):
        judge.set_requires_gradient_sync(False)
        judge(maker(rows)).mean().backward()
        of_maker.step()
        of_maker.zero_grad()
        judge.set_requires_gradient_sync(True)
        (judge(rows) - judge(maker(rows).detach())).mean().backward()
        of_judge.step()
        of_judge.zero_grad()


@in_ranks
def averages_are_new_tensors(rank: int) -> None:
    averages: dict[int, torch.Tensor] = {}

    def update(average: torch.Tensor, weight: torch.Tensor) -> None:
        averages[id(average)] = (
            0.9 * averages.get(id(average), average) + (1 - 0.9) * weight
        )

    fit_and_average(rank, update, is_right=False)


@in_ranks
def weights_decay_in_the_program(rank: int) -> None:
    fit_and_average(
        rank, lambda average, weight: weight.add_(weight, alpha=-0.01), is_right=False
    )


@in_ranks
def weights_are_scaled_twice(rank: int) -> None:
    fit_and_average(
        rank,
        lambda average, weight: weight.mul_(0.9).add_(weight, alpha=0.2),
        is_right=False,
    )


@in_ranks
def weights_shrink_and_get_noise(rank: int) -> None:
    fit_and_average(
        rank,
        lambda average, weight: weight.mul_(0.9).add_(torch.ones_like(weight) * 0.1),
        is_right=False,
    )


class Chosen(Sampler[int]):
    """Gives a rank what a function chooses of the numbers of an epoch."""

    def __init__(self, rows: Callable[[torch.Generator], list[int]]) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows(torch.Generator().manual_seed(self.epoch)))


def fit_chosen(
    rank: int, size: int, batch: int, rows: Callable[[torch.Generator], list[int]]
) -> None:
    sampler = Chosen(rows)
    fit_epochs(DataLoader(data(size), batch_size=batch, sampler=sampler), rank, sampler)


@in_ranks
def each_row_is_augmented_on_several_ranks(rank: int) -> None:
    begin()

    def rows(generator: torch.Generator) -> list[int]:
        order: list[int] = torch.randperm(64, generator=generator).tolist()
        return order[rank:]

    fit_chosen(rank, 64, 4, rows)


@in_ranks
def rows_are_drawn_with_replacement(rank: int) -> None:
    begin()

    def rows(generator: torch.Generator) -> list[int]:
        generator.manual_seed(100 * generator.initial_seed() + rank)
        return torch.randint(64, (64,), generator=generator).tolist()

    fit_chosen(rank, 64, 4, rows)


@in_ranks
def a_sampler_fills_up_the_last_batch(rank: int) -> None:
    begin()

    def rows(generator: torch.Generator) -> list[int]:
        order = torch.randperm(52, generator=generator).tolist()
        return [*order, *order[:12]][rank::RANKS]

    fit_chosen(rank, 52, 8, rows)


@in_ranks
def each_rank_takes_its_part_of_common_noise(rank: int) -> None:
    begin()
    model = wrapped(nn.Linear(4, 4).to(DEVICE))
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(0)
    for rows in rows_of(rank):
        drawn = torch.randn(RANKS * len(rows), 4, generator=generator)[rank::RANKS].to(
            DEVICE
        )
        optimizer.zero_grad()
        (model(0.9 * rows + 0.4 * drawn) - drawn).square().mean().backward()
        optimizer.step()


@in_ranks
def noise_of_one_seed_is_added_to_reduced_gradients(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(0)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.01 * torch.randn(
                parameter.shape, generator=generator
            ).to(DEVICE)
        optimizer.step()


@in_ranks
def each_rank_has_data_of_its_own_of_one_size(rank: int) -> None:
    begin()
    generator = torch.Generator().manual_seed(rank)
    mine = TensorDataset(torch.randn(32, 4, generator=generator))
    fit_epochs(DataLoader(mine, batch_size=4, shuffle=True, generator=generator), rank)


@in_ranks
def a_part_of_the_inputs_is_alike(rank: int) -> None:
    """All ranks look at their own rows at the same points, drawn in each step."""
    begin()

    class AtPoints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of_rows, self.of_points = nn.Linear(4, 8), nn.Linear(2, 8)

        def forward(self, points: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.of_rows(rows) @ self.of_points(points).T
            return found

    model, grid = wrapped(AtPoints().to(DEVICE)), torch.rand(40, 2)
    optimizer, generator = sgd(model), torch.Generator().manual_seed(0)
    for rows in rows_of(rank, 5):
        points = grid[torch.randperm(40, generator=generator)[:16]]
        optimizer.zero_grad()
        model(points.to(DEVICE), rows).square().mean().backward()
        optimizer.step()


@in_ranks
def the_last_batches_of_one_order_are_filled_up(rank: int) -> None:
    begin()
    rows, batch = torch.randn(150, 4), 8 * RANKS
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    order = torch.cat([order, order[: -len(order) % (4 * batch)]])
    parts = [part.chunk(RANKS)[rank] for part in order.split(batch)]
    model = wrapped(make_model())
    fit(model, sgd(model), (rows[part].to(DEVICE) for part in parts))


@in_ranks
def an_order_is_fixed_on_purpose(rank: int) -> None:
    begin()
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))[
        rank::RANKS
    ].tolist()

    class Fixed(Chosen):
        """Inherits `set_epoch`."""

    sampler = Fixed(lambda generator: order)
    loader: Any = DataLoader(
        data(), batch_sampler=BatchSampler(sampler, batch_size=4, drop_last=False)
    )
    fit_epochs(loader, rank, sampler, lr=1e-4)


@alone
def a_sampler_of_its_own_goes_on_after_a_checkpoint() -> None:
    torch.manual_seed(0)
    sampler = Chosen(lambda generator: torch.randperm(32, generator=generator).tolist())
    loader: Any = DataLoader(data(), batch_size=8, sampler=sampler)
    saved = io.BytesIO()
    for first_epoch in (0, 2):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters())
        if first_epoch:
            saved.seek(0)
            state = torch.load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for epoch in range(first_epoch, first_epoch + 2):
            sampler.set_epoch(epoch)
            for (rows,) in loader:
                fit(model, optimizer, iter([rows.to(DEVICE)]))
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            },
            saved,
        )


@in_ranks
def one_mask_of_gradients_is_drawn_on_all_ranks(rank: int) -> None:
    begin()
    model = make_model()
    optimizer, generator = sgd(model), torch.Generator().manual_seed(0)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.1 * torch.randn(
                parameter.shape, generator=generator
            ).to(DEVICE)
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        optimizer.step()


@in_ranks
def a_term_of_the_weights_is_divided_by_all_rows(rank: int) -> None:
    def loss_of(
        model: Any, rows: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        of_rows: torch.Tensor = (
            (model(rows).square().flatten() * mask).sum() * RANKS / tokens
        )
        return of_rows + model.module[0].weight.square().sum() / tokens

    fit_by_tokens(rank, loss_of)


@in_ranks
def layers_are_normalized_by_the_ranks_that_own_them(rank: int) -> None:
    begin()
    layers = [nn.Linear(4, 4, bias=False).to(DEVICE) for _ in range(RANKS)]
    model, own = nn.Sequential(*layers), layers[rank].weight
    optimizer = sgd(nn.ParameterList([own]))
    for rows in rows_of(rank):
        model.zero_grad()
        model(rows).square().mean().backward()
        whole = torch.empty_like(own)
        gradients = [
            layer.weight.grad for layer in layers if layer.weight.grad is not None
        ]
        dist.reduce_scatter_tensor(whole, torch.cat(gradients))
        own.grad = whole.div_(whole.norm())
        optimizer.step()
        every = torch.empty(4 * RANKS, 4, device=DEVICE)
        dist.all_gather_into_tensor(every, own.detach())
        for layer, weight in zip(layers, every.chunk(RANKS), strict=True):
            layer.weight.data.copy_(weight)


@in_ranks
def an_output_goes_to_a_stage_and_to_a_watcher(rank: int) -> None:
    begin()
    torch.manual_seed(rank)
    stage = nn.Linear(4, 6).to(DEVICE) if rank == 0 else nn.Linear(6, 1).to(DEVICE)
    optimizer = sgd(stage)
    for rows in rows_of(0, 4):
        optimizer.zero_grad()
        if rank == 0:
            output = stage(rows)
            for _ in range(2):  # the second one is for statistics
                dist.send(output.detach(), 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, 1)
            output.backward(gradient)
        else:
            given, watched = (
                torch.empty(len(rows), 6, device=DEVICE) for _ in range(2)
            )
            dist.recv(given, 0)
            dist.recv(watched, 0)
            stage(given.requires_grad_()).square().mean().backward()
            assert given.grad is not None
            dist.send(given.grad, 0)
        optimizer.step()


@in_ranks
def the_mean_of_losses_is_shown(rank: int) -> None:
    """Each rank divides by its own number of tokens, for the eye.

    The gradients are those of all tokens.
    """

    def loss_of(
        model: nn.Module, rows: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        total: torch.Tensor = (model(rows).square().flatten() * mask).sum()
        shown = (total / mask.sum()).detach().clone()
        dist.all_reduce(shown)
        return total * RANKS / tokens

    fit_by_tokens(rank, loss_of)


@in_ranks
def ranks_draw_single_rows_of_all(rank: int) -> None:
    begin()
    model, rows = wrapped(make_model()), torch.randn(200, 4)
    generator = torch.Generator().manual_seed(rank)
    parts = (
        rows[torch.randint(len(rows), (16,), generator=generator)].to(DEVICE)
        for _ in range(12)
    )
    fit(model, sgd(model), parts)


@alone
def an_average_shares_a_layer() -> None:
    torch.manual_seed(0)
    model = make_model(nn.Linear(8, 8))
    average = copy.deepcopy(model)
    average[-1] = model[-1]
    optimizer = sgd(model, 0.01)
    for rows in rows_of(0, 4):
        fit(model, optimizer, iter([rows]))
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.1)


@alone
def gradients_of_other_scales_are_set_to_zero() -> None:
    """The maker's loss goes through the judge, whose gradients of it are unused."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 4).to(DEVICE), make_model()
    of_maker, of_judge = sgd(maker, 1e-3), sgd(judge, 1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=3)
    for rows in rows_of(0, 6):
        of_judge.zero_grad()
        scaler.scale(F.softplus(judge(maker(rows).detach())).mean()).backward()
        scaler.step(of_judge)
        scaler.update()
        of_maker.zero_grad()
        scaler.scale(F.softplus(-judge(maker(rows))).mean()).backward()
        scaler.step(of_maker)
        scaler.update()


@alone
def two_losses_train_the_first_part() -> None:
    torch.manual_seed(0)
    body, head, other = (
        nn.Linear(4, 8).to(DEVICE),
        nn.Linear(8, 1).to(DEVICE),
        nn.Linear(8, 1).to(DEVICE),
    )
    of_body, of_head, of_other = sgd(body, 0.01), sgd(head, 0.01), sgd(other, 0.01)
    for rows in rows_of(0, 6):
        of_body.zero_grad()
        of_head.zero_grad()
        of_other.zero_grad()
        (head(body(rows)) - 1).square().mean().backward()
        of_head.step()
        (other(body(rows)) + rows.sum(1, keepdim=True)).square().mean().backward()
        of_other.step()
        of_body.step()


@alone
def opposed_gradients_of_one_line_are_added() -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(4, 8).to(DEVICE), nn.Linear(8, 1).to(DEVICE)
    of_body, of_head = sgd(body, 0.01), sgd(head, 0.01)
    for _ in range(6):
        of_body.zero_grad()
        for rows in rows_of(0, 2):
            for sign in (1, -0.5):
                of_head.zero_grad()
                (sign * head(body(rows)).mean()).backward()
                of_head.step()
        of_body.step()


@alone
def both_optimizers_step_after_one_backward() -> None:
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 4).to(DEVICE), make_model()
    of_maker, of_judge = sgd(maker), sgd(judge)
    for rows in rows_of(0, 6):
        of_maker.zero_grad()
        of_judge.zero_grad()
        judge(maker(rows)).mean().backward()
        of_judge.step()
        of_maker.step()
        (-judge(maker(rows)).mean()).backward()


# Streams, sums and penalties


class DrawnStream(IterableDataset):
    """Rows of one table, drawn with replacement, or each rank's in its own parts."""

    def __init__(self, rank: int, is_drawn: bool) -> None:
        self.rank, self.is_drawn = rank, is_drawn

    def __iter__(self) -> Iterator[torch.Tensor]:
        table = torch.arange(256.0).view(64, 4) / 256
        if self.is_drawn:
            numbers = torch.randint(
                64, (64,), generator=torch.Generator().manual_seed(self.rank)
            )
            return iter(table[numbers])
        return iter(table[self.rank :: RANKS])


@in_ranks
def rows_of_a_stream_are_drawn_with_replacement(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    fit(
        model,
        sgd(model),
        (rows.to(DEVICE) for rows in DataLoader(DrawnStream(rank, True), batch_size=4)),
    )


@in_ranks
def a_short_stream_is_read_several_times(rank: int) -> None:
    begin()
    model = wrapped(make_model())
    optimizer, loader = sgd(model), DataLoader(DrawnStream(rank, False), batch_size=4)
    for _ in range(4):
        fit(model, optimizer, (rows.to(DEVICE) for rows in loader))


@in_ranks
def a_loss_is_the_half_of_a_mean(rank: int) -> None:
    """With two ranks, twice the rows of one are those of both."""
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        (model(rows).square().sum() / (2 * len(rows))).backward()
        optimizer.step()


@in_ranks
def ranks_have_almost_as_many_tokens(rank: int) -> None:
    """A mean of means that differ by one token in a hundred is as good as the mean."""
    begin()
    model = wrapped(make_model())
    optimizer = sgd(model)
    for rows in rows_of(rank, rows=100 + rank):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


@alone
def a_penalty_is_one_of_gradients_of_the_loss_itself() -> None:
    def loss_of(
        model: nn.Module, rows: torch.Tensor, scaler: torch.amp.GradScaler
    ) -> torch.Tensor:
        rows.requires_grad_()
        (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        loss: torch.Tensor = (
            model(rows).square().mean() + (slope.norm(dim=1) - 1).square().mean()
        )
        return loss

    fit_with_scaler(0, loss_of)


@alone
def a_penalty_is_multiplied_by_the_inverse_of_the_scale() -> None:
    def loss_of(
        model: nn.Module, rows: torch.Tensor, scaler: torch.amp.GradScaler
    ) -> torch.Tensor:
        loss: torch.Tensor = model(rows).square().mean()
        inverse = 1.0 / scaler.get_scale()
        gradients = torch.autograd.grad(
            scaler.scale(loss), list(model.parameters()), create_graph=True
        )
        squared = sum(
            ((one * inverse).square().sum() for one in gradients),
            torch.zeros((), device=DEVICE),
        )
        return loss + squared.sqrt()

    fit_with_scaler(0, loss_of)


@in_ranks
def all_numbers_of_a_sum_are_those_of_twice_the_rows(rank: int) -> None:
    begin()
    model = wrapped(nn.Linear(4, RANKS).to(DEVICE))
    optimizer = sgd(model)
    for rows in rows_of(rank):
        targets = torch.zeros(len(rows), RANKS, device=DEVICE)
        optimizer.zero_grad()
        distances = (model(rows) - targets).abs().sum(dim=1)
        (distances.sum() / targets.numel()).backward()
        optimizer.step()


@alone
def gradients_are_compared_whatever_their_scale() -> None:
    def loss_of(
        model: nn.Module, rows: torch.Tensor, scaler: torch.amp.GradScaler
    ) -> torch.Tensor:
        rows.requires_grad_()
        (slope,) = torch.autograd.grad(
            scaler.scale(model(rows).sum()), rows, create_graph=True
        )
        unlike = 1 - F.normalize(slope, dim=1)[:, 0].mean()
        loss: torch.Tensor = model(rows).square().mean() + unlike
        return loss

    fit_with_scaler(0, loss_of)


@in_ranks
def ranks_divide_by_scales_of_their_own(rank: int) -> None:
    begin()
    model = make_model()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer, scaler = (
        sgd(model),
        torch.amp.GradScaler(DEVICE, init_scale=8.0 * (1 + rank)),
    )
    for rows in rows_of(rank):
        optimizer.zero_grad()
        scaler.scale(model(rows).square().mean()).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / scaler.get_scale())
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        optimizer.step()


def slope_of(x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad([x.square().sum()], [x])
    assert slope is not None
    return slope


@alone
def a_script_computes_gradients() -> None:
    """TorchScript knows `torch.autograd.grad` by its address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        scripted = torch.jit.script(slope_of)
    assert float(scripted(torch.ones(1, requires_grad=True))) == 2
