"""Lints of sums over ranks.

Rows that count twice, sums that are added up again, hooks that are no mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import linted
from conditions import for_changes
from torchstrategy.testing import Finding, run_ranks

RANKS = 2

Program = Callable[[int], object]


def findings_of(program: Program, ranks: int = RANKS) -> list[Finding]:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        program(rank)

    return linted.findings_of(lambda: run_ranks(main, ranks))


def names_of(program: Program, ranks: int = RANKS) -> list[str]:
    return [finding.name for finding in findings_of(program, ranks)]


# Rows that count twice


def rows_of_evaluation(size: int = 13) -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * size).view(size, 4))


def evaluate(data: Any, sampler: Any, apart: bool = False, workers: int = 0) -> None:
    """Counts hits and rows in one tensor, or in two."""
    totals = torch.zeros(2)
    for (rows,) in DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers):
        totals += torch.tensor([(rows.sum(1) > 90).sum(), len(rows)])
    if apart:
        hits, count = totals.clone()
        dist.all_reduce(hits)
        dist.all_reduce(count, async_op=True).wait()
    else:
        dist.all_reduce(totals)


@pytest.mark.parametrize("options", [{}, {"apart": True}, {"workers": 1}], ids=str)
def test_rows_of_a_padded_evaluation(options: dict[str, Any]) -> None:
    data = rows_of_evaluation()
    (finding,) = findings_of(
        lambda rank: evaluate(data, DistributedSampler(data, shuffle=False), **options)
    )
    assert finding.name == "rows-counted-twice" and len(finding.lines) == 2
    assert (
        "each of 2 ranks 7 rows" in finding.says
        and "is 14, of 13 rows that there are: one row counts" in finding.says
    )


def test_several_rows_of_a_padded_evaluation() -> None:
    data = rows_of_evaluation(22)
    (finding,) = findings_of(lambda rank: evaluate(data, DistributedSampler(data)), 4)
    assert "2 rows count twice" in finding.says


def test_a_part_for_each_rank_is_left_alone() -> None:
    data = rows_of_evaluation()
    assert (
        names_of(
            lambda rank: evaluate(Subset(data, range(rank, len(data), RANKS)), None)
        )
        == []
    )


@pytest.mark.parametrize(("size", "drop_last"), [(14, False), (13, True)])
def test_samplers_without_padding_are_left_alone(size: int, drop_last: bool) -> None:
    data = rows_of_evaluation(size)
    assert (
        names_of(
            lambda rank: evaluate(
                data, DistributedSampler(data, shuffle=False, drop_last=drop_last)
            )
        )
        == []
    )


def test_rows_that_are_cut_before_they_are_counted_are_left_alone() -> None:
    data = rows_of_evaluation()

    def program(rank: int) -> None:
        sampler = DistributedSampler(data, shuffle=False)
        rows = torch.cat(
            [rows for (rows,) in DataLoader(data, batch_size=4, sampler=sampler)]
        )
        # What is left was a row of another rank.
        rows = rows[: len(range(rank, len(data), RANKS))]
        dist.all_reduce(torch.tensor([(rows.sum(1) > 90).sum(), len(rows)]))

    assert names_of(program) == []


def test_gathered_rows_that_are_cut_are_left_alone() -> None:
    data = rows_of_evaluation()

    def program(rank: int) -> None:
        sampler = DistributedSampler(data, shuffle=False)
        rows = torch.cat(
            [rows for (rows,) in DataLoader(data, batch_size=4, sampler=sampler)]
        )
        numbers = [torch.zeros(1, dtype=torch.long) for _ in range(RANKS)]
        dist.all_gather(numbers, torch.tensor([len(rows)]))
        most = torch.tensor([len(rows)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        parts = [torch.empty_like(rows) for _ in range(RANKS)]
        dist.all_gather(parts, rows)
        assert torch.stack(parts, 1).flatten(0, 1)[: len(data)].equal(data.tensors[0])

    assert names_of(program) == []


def test_rows_of_training_are_left_alone() -> None:
    data = rows_of_evaluation()

    def program(rank: int) -> None:
        model = DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        sampler, count = DistributedSampler(data), torch.zeros(1)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            count.zero_()
            for (rows,) in DataLoader(data, batch_size=4, sampler=sampler):
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()
                count += len(rows)
            dist.all_reduce(count)

    assert names_of(program) == []


def test_an_evaluation_that_is_left_early_is_left_alone() -> None:
    data = rows_of_evaluation()

    def program(rank: int) -> None:
        for _ in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
            break
        dist.all_reduce(torch.tensor(7))

    assert names_of(program) == []


# Sums that are added up again


def in_place(total: torch.Tensor, rank: int) -> torch.Tensor:
    total += rank + 1
    return total


def in_parts(total: torch.Tensor, rank: int) -> torch.Tensor:
    total[0] += rank + 1
    total[1:].add_(1)
    return total


def in_other_memory(total: torch.Tensor, rank: int) -> torch.Tensor:
    return total + (rank + 1)


def by_rows(total: torch.Tensor, rank: int) -> torch.Tensor:
    return total.index_add_(0, torch.tensor([0, 1]), torch.ones(2) * (rank + 1))


def add_up(
    add: Callable[[torch.Tensor, int], torch.Tensor],
    between: Callable[[torch.Tensor, int], Any],
) -> Program:
    def program(rank: int) -> None:
        total = torch.zeros(2)
        for _ in range(3):
            total = add(total, rank)
            dist.all_reduce(total)
            between(total, rank)

    return program


ADDS = [in_place, in_parts, in_other_memory, by_rows]


@pytest.mark.parametrize("add", ADDS, ids=lambda add: add.__name__)
def test_a_total_that_is_added_up_again(
    add: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    (finding,) = findings_of(add_up(add, lambda total, rank: None))
    assert finding.name == "sum-added-up-again" and len(finding.lines) == 2
    assert "the earlier sum counts 2 times now" in finding.says


@pytest.mark.parametrize(
    "between",
    [
        lambda total, rank: total.div_(RANKS),
        lambda total, rank: total.mul_(0.5),
        lambda total, rank: total.zero_(),
        lambda total, rank: total.fill_(0),
        lambda total, rank: total.copy_(torch.zeros(2)),
        lambda total, rank: total.sub_(1),
        lambda total, rank: total.zero_() if rank else None,  # one rank keeps the sum
        lambda total, rank: dist.all_reduce(total, op=dist.ReduceOp.MAX),
    ],
    ids=[
        "div",
        "mul",
        "zero",
        "fill",
        "copy",
        "sub",
        "one keeps it",
        "another reduction",
    ],
)
@pytest.mark.parametrize("add", ADDS, ids=lambda add: add.__name__)
def test_a_total_that_is_changed_between_is_left_alone(
    add: Callable[[torch.Tensor, int], torch.Tensor],
    between: Callable[[torch.Tensor, int], Any],
) -> None:
    assert names_of(add_up(add, between)) == []


def test_a_copy_that_is_reduced_is_left_alone() -> None:
    def program(rank: int) -> None:
        total = torch.zeros(2)
        for _ in range(3):
            total += rank + 1
            copy = total.clone()
            dist.all_reduce(copy)

    assert names_of(program) == []


def test_a_mean_over_ranks_is_left_alone() -> None:
    def program(rank: int) -> None:
        total = torch.zeros(2)
        for _ in range(3):
            total += rank + 1
            dist.all_reduce(total, op=dist.ReduceOp.AVG)

    assert names_of(program) == []


def test_a_flag_that_is_zero_is_left_alone() -> None:
    def program(rank: int) -> None:
        stop = torch.zeros(1)
        for step in range(4):
            stop += float(step == 3 and rank == 0)
            dist.all_reduce(stop)
            if stop > 0:
                break

    assert names_of(program) == []


def test_what_all_ranks_have_already_is_left_alone() -> None:
    def program(rank: int) -> None:
        total = torch.zeros(2)
        dist.all_reduce(total.add_(rank + 1))
        total += 3.0
        dist.all_reduce(total)  # the mean of what is the same on all ranks
        total /= RANKS

    assert names_of(program) == []


def test_sums_over_other_groups_are_left_alone() -> None:
    def program(rank: int) -> None:
        rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        squared = torch.ones(1) * (rank + 1)
        dist.all_reduce(squared, group=rows[rank // 2])
        squared += rank
        dist.all_reduce(squared, group=columns[rank % 2])

    assert names_of(program, 4) == []


def test_parts_of_one_buffer_are_left_alone() -> None:
    def program(rank: int) -> None:
        buffer = torch.ones(4) * (rank + 1)
        first, second = buffer[:2], buffer[2:]
        for part in (first, second):
            part += rank
            dist.all_reduce(part)

    assert names_of(program) == []


@for_changes
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_reduced_in_each_step_are_left_alone(
    set_to_none: bool,
) -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            (model(torch.ones(2, 4) * (rank + 1)).square().mean() / RANKS).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()

    assert names_of(program) == []


# Hooks of gradients


def without_annotations(hook: Callable[..., Any]) -> Callable[..., Any]:
    hook.__annotations__.clear()  # DistributedDataParallel compares them with its own
    return hook


def hook_that(scales: float, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """A hook that multiplies the sum over ranks by a number."""

    @without_annotations
    def hook(state: Any, bucket: Any) -> Any:
        sent = bucket.buffer().to(dtype).mul(scales)
        future = dist.all_reduce(sent, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    return hook


def a_step(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    out: torch.Tensor = model(rows).square()
    return out


def mean_loss(out: torch.Tensor) -> torch.Tensor:
    return out.mean()


def train_with(
    hook: Callable[..., Any],
    state: Any = None,
    loss: Callable[[torch.Tensor], torch.Tensor] = mean_loss,
    after: Callable[[torch.Tensor], Any] | None = None,
    micro: int = 1,
    steps: int = 3,
) -> Program:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model = DistributedDataParallel(net)
        model.register_comm_hook(state() if callable(state) else state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(micro):
                with model.no_sync() if part < micro - 1 else torch.enable_grad():
                    (loss(a_step(model, rank, step * micro + part)) / micro).backward()
            for parameter in model.parameters() if after else ():
                after(parameter.grad)
            optimizer.step()

    return program


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (1.0, "returns the sum of what 2 ranks have given it, and not the mean"),
        (
            0.25,
            "returns the mean of what 2 ranks have given it, divided by 2 once more",
        ),
        (4.0, "returns about 8.0 times the mean of what 2 ranks have given it"),
    ],
)
def test_a_hook_that_is_no_mean(
    scales: float, words: str, dtype: torch.dtype, micro: int
) -> None:
    (finding,) = findings_of(train_with(hook_that(scales, dtype), micro=micro))
    assert finding.name == "hook-is-no-mean" and len(finding.lines) == 1
    assert words in finding.says


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro", [1, 3])
def test_a_hook_that_is_a_mean_is_left_alone(dtype: torch.dtype, micro: int) -> None:
    assert names_of(train_with(hook_that(1 / RANKS, dtype), micro=micro)) == []


@pytest.mark.parametrize(
    ("hook", "state"),
    [
        (default_hooks.allreduce_hook, None),
        (default_hooks.fp16_compress_hook, None),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None),
        (
            powerSGD_hook.powerSGD_hook,
            lambda: powerSGD_hook.PowerSGDState(
                None, start_powerSGD_iter=2, min_compression_rate=0.5
            ),
        ),
    ],
    ids=["allreduce", "fp16", "wrapped", "PowerSGD"],
)
def test_hooks_of_torch_are_left_alone(hook: Callable[..., Any], state: Any) -> None:
    assert names_of(train_with(hook, state, steps=6)) == []


def sum_over_all_rows(out: torch.Tensor) -> torch.Tensor:
    return out.sum() / (RANKS * len(out))


@pytest.mark.parametrize(
    "options",
    [
        {"loss": sum_over_all_rows},
        {"loss": lambda out: out.mean() / RANKS},
        {"loss": torch.sum},
        {"after": lambda gradient: gradient.div_(RANKS)},
        {"after": lambda gradient: gradient.mul_(1 / RANKS)},
    ],
    ids=["sum / all rows", "mean / ranks", "sum", "divided later", "multiplied later"],
)
def test_a_sum_that_is_divided_elsewhere_is_left_alone(options: dict[str, Any]) -> None:
    assert names_of(train_with(hook_that(1.0), **options)) == []


def test_hooks_that_clip_or_send_a_part_are_left_alone() -> None:
    @without_annotations
    def clip(state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        buffer.div_(RANKS * buffer.norm() * 3)
        future = dist.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    @without_annotations
    def send_signs(state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        buffer.copy_(buffer.sign())
        return (
            dist.all_reduce(buffer, async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

    assert names_of(train_with(clip)) == []
    assert names_of(train_with(send_signs)) == []


def test_one_step_is_left_alone() -> None:
    assert names_of(train_with(hook_that(1.0), steps=1)) == []


# Silence
