"""Lints of what ranks call without gradients, and of what they make of its results.

Right programs are left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import linted
from conditions import for_changes, for_releases
from torchstrategy.testing import Finding, run_ranks

RANKS = 2

# Of torch, about names that programs use.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
Wrapped = DistributedDataParallel


def findings_of(program: Callable[[int], object]) -> list[Finding]:
    return linted.findings_of(lambda: run_ranks(program, RANKS))


def names_of(program: Callable[[int], object]) -> list[str]:
    return [finding.name for finding in findings_of(program)]


def begin(seed: int = 0) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(seed)


def make_model(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), *more, nn.Tanh(), nn.Linear(8, 1))


def rows_of(rank: int, steps: int = 4) -> Iterator[torch.Tensor]:
    for step in range(steps):
        yield torch.randn(
            32, 4, generator=torch.Generator().manual_seed(1000 * rank + step)
        )


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def fit(
    model: nn.Module, rank: int, steps: int = 4, after: Callable[[], object] = list
) -> None:
    optimizer = sgd(model)
    for rows in rows_of(rank, steps):
        optimizer.zero_grad()
        (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        after()


def evaluate(model: nn.Module, rank: int, is_reduced: bool = True) -> torch.Tensor:
    """The error on the rows of a rank, and of all ranks if it is reduced."""
    with torch.no_grad():
        rows = next(rows_of(7 + rank))
        total = (model(rows) - rows.sum(1, keepdim=True)).square().sum().clone()
    if is_reduced:
        dist.all_reduce(total)
    return total


# Models that differ between ranks


def frozen_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, share: float = 0.3) -> None:
    for mine, other in zip(average.parameters(), model.parameters(), strict=True):
        mine.lerp_(other, share)


def train_with_average(
    rank: int,
    *,
    updates_on: tuple[int, ...] = (0,),
    evaluates: Callable[[nn.Module, int], object] = evaluate,
    make: Callable[[nn.Module], nn.Module] = frozen_copy,
    times: int = 2,
) -> None:
    begin()
    model = Wrapped(make_model())
    average = make(model.module)
    for _ in range(times):
        fit(
            model,
            rank,
            after=lambda: follow(average, model.module) if rank in updates_on else None,
        )
        evaluates(average, rank)


@for_changes
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("make", [frozen_copy, AveragedModel])
def test_an_average_of_one_rank_that_all_evaluate_is_named(
    make: Callable[[nn.Module], nn.Module], times: int
) -> None:
    (finding,) = findings_of(
        lambda rank: train_with_average(rank, make=make, times=times)
    )
    assert finding.name == "models-differ" and len(finding.lines) == 2
    assert (
        "All 2 ranks call a copy of the trained model" in finding.says
        and "0.weight has" in finding.says
    )
    assert "On rank 1 it is still as it was made" in finding.write


@for_changes
def test_an_average_of_all_ranks_is_left_alone() -> None:
    assert names_of(lambda rank: train_with_average(rank, updates_on=(0, 1))) == []


def broadcast_and_evaluate(model: nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    evaluate(model, rank)


def differ_by_rounding(model: nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        parameter.data *= 1 + 1e-6 * rank
    evaluate(model, rank)


def reduce_alone(model: nn.Module, rank: int) -> None:
    groups = [dist.new_group([one]) for one in range(RANKS)]
    total = evaluate(model, rank, is_reduced=False)
    dist.all_reduce(total, group=groups[rank])


def wrap_another_model(model: nn.Module, rank: int) -> None:
    evaluate(model, rank, is_reduced=False)
    Wrapped(nn.Linear(2, 2))  # torch compares sizes, and gathers them


RIGHT: dict[str, Callable[[nn.Module, int], object]] = {
    "broadcast before": broadcast_and_evaluate,
    "only rank 0 calls it": lambda model, rank: (
        evaluate(model, rank, is_reduced=False) if rank == 0 else None
    ),
    "the same rows": lambda model, rank: evaluate(model, 0),
    "rounding": differ_by_rounding,
    "results of one rank are reduced": reduce_alone,
    "torch gathers something": wrap_another_model,
    "something is broadcast": lambda model, rank: dist.broadcast(
        evaluate(model, rank, is_reduced=False), 0
    ),
    "results stay on each rank": lambda model, rank: evaluate(
        model, rank, is_reduced=False
    ),
    "weights that have gradients": lambda model, rank: evaluate(
        model.requires_grad_(), rank
    ),
}


@for_changes
@pytest.mark.parametrize("name", RIGHT)
def test_evaluations_of_an_average_that_may_be_meant(name: str) -> None:
    assert names_of(lambda rank: train_with_average(rank, evaluates=RIGHT[name])) == []


class Scaled(nn.Module):
    """Its first layer gets what differs as the model does, for the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.rest = nn.Parameter(torch.ones(4)), make_model()

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(x * self.scale)


@for_changes
def test_the_same_rows_of_which_no_layer_is_the_first() -> None:
    def program(rank: int) -> None:
        begin()
        model = Wrapped(Scaled())
        average = frozen_copy(model.module)
        for _ in range(2):
            fit(
                model,
                rank,
                after=lambda: follow(average, model.module) if rank == 0 else None,
            )
            evaluate(average, 0)

    assert names_of(program) == []


@for_changes
def test_results_that_come_together_after_the_next_step_are_something_else() -> None:
    def program(rank: int) -> None:
        train_with_average(
            rank, evaluates=lambda model, rank: evaluate(model, rank, is_reduced=False)
        )
        dist.all_reduce(torch.zeros(1))

    def between(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        average = frozen_copy(model.module)
        for _ in range(2):
            fit(
                model,
                rank,
                after=lambda: follow(average, model.module) if rank == 0 else None,
            )
            evaluate(average, rank, is_reduced=False)
            fit(model, rank, steps=1)
            dist.all_reduce(torch.zeros(1))

    assert names_of(program) == ["models-differ"]  # nothing is in between
    assert names_of(between) == []


@for_releases
@pytest.mark.parametrize("is_evaluated_before", [False, True])
def test_a_copy_that_each_rank_trains_is_left_alone(is_evaluated_before: bool) -> None:
    def program(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        mine = frozen_copy(model.module)
        if is_evaluated_before:
            evaluate(mine, rank)
        for _ in range(3):
            fit(model, rank)
            fit(mine.requires_grad_(), rank)
            evaluate(mine.requires_grad_(False), rank)

    assert "models-differ" not in names_of(program)


@for_changes
def test_opponents_that_each_rank_loads_are_left_alone() -> None:
    """Each rank plays against another state of the model."""

    def program(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        opponent = frozen_copy(model.module)
        states = []
        for _ in range(3):
            fit(model, rank)
            states.append(copy.deepcopy(model.module.state_dict()))
            opponent.load_state_dict(states[-1 if rank else 0])
            evaluate(opponent, rank)

    assert names_of(program) == []


@for_changes
def test_a_pool_of_opponents_is_left_alone() -> None:
    def program(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        pool = [frozen_copy(model.module)]
        for _ in range(3):
            fit(model, rank)
            pool.append(frozen_copy(model.module))
            evaluate(pool[-1 if rank else 0], rank)

    assert names_of(program) == []


@for_changes
def test_candidates_that_nobody_trains_by_gradients_are_left_alone() -> None:
    """Each rank tries other changes of the model, as evolution strategies do."""

    def program(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        torch.manual_seed(rank)
        for _ in range(3):
            candidate = frozen_copy(model.module)
            for parameter in candidate.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            evaluate(candidate, rank)

    assert names_of(program) == []


@for_changes
def test_parts_that_are_no_copies_are_left_alone() -> None:
    """A single layer may have any shape.

    Here it is another projection on each rank, which the program scales.
    """

    def program(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        torch.manual_seed(rank)
        projection = nn.Linear(4, 8).requires_grad_(False)
        for _ in range(2):
            fit(model, rank)
            projection.weight.mul_(0.9)
            dist.all_reduce(projection(next(rows_of(7 + rank))).sum())

    assert names_of(program) == []


@for_changes
def test_parameters_without_a_shape_do_no_harm() -> None:
    def program(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        other = nn.ModuleList([nn.Linear(4, 8), nn.LazyLinear(2)])
        with torch.no_grad():
            other[0](next(rows_of(rank)))
        fit(model, rank)

    assert names_of(program) == []


@for_changes
def test_experts_that_the_wrapper_was_told_to_leave_alone() -> None:
    def program(rank: int) -> None:
        begin()
        net = make_model()
        Wrapped._set_params_and_buffers_to_ignore_for_model(net, ["2.weight", "2.bias"])
        torch.manual_seed(rank)
        nn.init.normal_(net[2].weight)
        model = Wrapped(net)
        average = frozen_copy(net)
        fit(model, rank, after=lambda: follow(average, net))
        evaluate(average, rank)
        evaluate(model, rank)

    assert "models-differ" not in names_of(program)


# Batch norm


def broadcast_statistics(model: nn.Module) -> None:
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def average_statistics(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if "running" in name:
            dist.all_reduce(buffer)
            buffer /= RANKS


def train_with_batch_norm(
    rank: int,
    *,
    before: Callable[[nn.Module], object] = id,
    call: Callable[[Any], nn.Module] = lambda model: model,
    evaluates: Callable[[nn.Module, int], object] = evaluate,
    **options: Any,
) -> None:
    begin()
    model = Wrapped(make_model(nn.BatchNorm1d(8)), **options)
    for _ in range(2):
        fit(model.train(), rank)
        before(model.eval())
        evaluates(call(model), rank)


def test_statistics_of_each_rank_are_named() -> None:
    (finding,) = findings_of(
        lambda rank: train_with_batch_norm(rank, broadcast_buffers=False)
    )
    assert finding.name == "models-differ" and "1.running_mean has" in finding.says
    assert "The wrapper was told not to broadcast buffers" in finding.write


@for_changes
@pytest.mark.parametrize("before", [average_statistics, broadcast_statistics])
def test_statistics_that_ranks_make_alike_are_left_alone(
    before: Callable[[nn.Module], None],
) -> None:
    def program(rank: int) -> None:
        train_with_batch_norm(rank, before=before, broadcast_buffers=False)

    assert names_of(program) == []


@for_changes
@pytest.mark.parametrize("call", [lambda model: model, lambda model: model.module])
def test_statistics_that_the_wrapper_broadcasts_are_left_alone(
    call: Callable[[Any], nn.Module],
) -> None:
    assert names_of(lambda rank: train_with_batch_norm(rank, call=call)) == []


def test_statistics_in_training_mode_are_left_alone() -> None:
    """Those of the batch are used: the running ones, which differ, are not."""

    def program(rank: int) -> None:
        train_with_batch_norm(
            rank, before=lambda model: model.train(), broadcast_buffers=False
        )

    assert names_of(program) == []


# Weights that are put in the place of the trained ones


@for_changes
def test_averages_that_one_rank_puts_into_the_model_are_named() -> None:
    def program(rank: int, is_right: bool) -> None:
        begin()
        model = Wrapped(make_model())
        averages = {
            name: value.detach().clone()
            for name, value in model.module.named_parameters()
        }

        def update() -> None:
            for name, value in model.module.named_parameters():
                averages[name].lerp_(value.detach(), 0.3)

        for _ in range(2):
            fit(model, rank, after=lambda: update() if is_right or rank == 0 else None)
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(averages)
            evaluate(model, rank)
            model.module.load_state_dict(kept)

    (finding,) = findings_of(lambda rank: program(rank, is_right=False))
    assert (
        finding.name == "models-differ"
        and "that DistributedDataParallel has wrapped" in finding.says
    )
    assert names_of(lambda rank: program(rank, is_right=True)) == []


def test_weights_that_a_rank_adapts_to_its_rows_are_left_alone() -> None:
    def program(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        for _ in range(2):
            fit(model, rank)
            kept = copy.deepcopy(model.module.state_dict())
            loss = model.module(next(rows_of(20 + rank))).square().mean()
            gradients = torch.autograd.grad(loss, list(model.module.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(
                    model.module.parameters(), gradients, strict=True
                ):
                    parameter -= 0.5 * gradient
            evaluate(model.module, rank)
            model.module.load_state_dict(kept)

    assert names_of(program) == []


def test_weights_that_are_not_reduced_are_named_once() -> None:
    def program(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        fit(model.module, rank)
        evaluate(model, rank)

    assert names_of(program) == ["gradient-not-reduced"]


# Teachers


def distill(
    rank: int,
    make_teacher: Callable[[nn.Module, nn.Module], nn.Module],
    *,
    moves: bool = True,
) -> None:
    begin(seed=rank)
    student = nn.Sequential(make_model(), nn.Linear(1, 1))
    early = make_teacher(student[0], student[0])
    model = Wrapped(student)
    teacher = make_teacher(early, student[0])
    optimizer = sgd(model)
    for rows in rows_of(rank):
        with torch.no_grad():
            targets = teacher(rows) * 0.5
        optimizer.zero_grad()
        F.mse_loss(model(rows), targets).backward()
        optimizer.step()
        if moves:
            follow(teacher, student[0])


def is_unlike(finding: Finding) -> bool:
    return finding.name == "models-differ"


@for_changes
@pytest.mark.parametrize("moves", [False, True])
def test_a_teacher_that_was_copied_before_ranks_are_alike_is_named(moves: bool) -> None:
    def make_teacher(early: nn.Module, student: nn.Module) -> nn.Module:
        return early if early is not student else frozen_copy(student)

    (finding,) = filter(
        is_unlike, findings_of(lambda rank: distill(rank, make_teacher, moves=moves))
    )
    assert (
        "a copy of '0' of the trained model" in finding.says
        and "the loss is made of" in finding.says
    )
    assert "Make the copy after `DistributedDataParallel(model)`" in finding.write


@for_changes
def test_a_teacher_that_was_copied_later_is_left_alone() -> None:
    assert not [
        *filter(
            is_unlike,
            findings_of(
                lambda rank: distill(rank, lambda _, student: frozen_copy(student))
            ),
        )
    ]


@for_changes
def test_another_teacher_on_each_rank_is_left_alone() -> None:
    def make_teacher(early: nn.Module, student: nn.Module) -> nn.Module:
        teacher = frozen_copy(student)
        torch.manual_seed(100 + dist.get_rank())
        teacher.load_state_dict(make_model().state_dict())
        return teacher

    assert not [
        *filter(
            is_unlike,
            findings_of(lambda rank: distill(rank, make_teacher, moves=False)),
        )
    ]


@for_changes
def test_a_teacher_whose_outputs_no_loss_is_made_of_is_left_alone() -> None:
    def program(rank: int) -> None:
        begin()
        model = Wrapped(make_model())
        average = frozen_copy(model.module)

        def log() -> None:
            if rank == 0:
                follow(average, model.module)
            assert evaluate(average, rank, is_reduced=False) * 2 > 0
            with torch.no_grad():
                (average(next(rows_of(7 + rank))) * model.module[2].bias).sum()

        fit(model, rank, after=log)

    assert names_of(program) == []


# Rows that are gathered in another order


class Labelled(Dataset[Any]):
    def __init__(self, size: int, *, is_constant: bool = False) -> None:
        self.images = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
        self.labels = [0 if is_constant else int(row.sum() > 0) for row in self.images]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


def predict(
    data: Dataset[Any], model: Callable[[torch.Tensor], torch.Tensor], **options: Any
) -> torch.Tensor:
    sampler: Any = DistributedSampler(data, shuffle=False, **options)
    return torch.cat(
        [model(batch[0]) for batch in DataLoader(data, batch_size=8, sampler=sampler)]
    )


def gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(parts, mine)
    return parts


def gathered_at_once(mine: torch.Tensor) -> torch.Tensor:
    whole = mine.new_empty(RANKS * len(mine), *mine.shape[1:])
    dist.all_gather_into_tensor(whole, mine)
    return whole


def numbers(size: int = 64) -> TensorDataset:
    rows = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(rows, rows.sum(1))


def row_sums(rows: torch.Tensor) -> torch.Tensor:
    return rows.sum(1)


def scores(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([-rows.sum(1), rows.sum(1)], 1)


WRONG_ORDERS: dict[str, Callable[[], object]] = {
    "cat": lambda: F.mse_loss(
        torch.cat(gathered(predict(numbers(), row_sums))), numbers().tensors[1]
    ),
    "stack": lambda: F.mse_loss(
        torch.stack(gathered(predict(numbers(), row_sums))).flatten(),
        numbers().tensors[1],
    ),
    "at once": lambda: F.mse_loss(
        gathered_at_once(predict(numbers(), row_sums)), numbers().tensors[1]
    ),
    "padding": lambda: F.mse_loss(
        torch.cat(gathered(predict(numbers(63), row_sums)))[:63], numbers(63).tensors[1]
    ),
    "labels": lambda: (
        torch.cat([part.argmax(1) for part in gathered(predict(Labelled(64), scores))])
        == torch.tensor(Labelled(64).labels)
    ),
    "a column": lambda: (
        torch.cat(gathered(predict(numbers(), scores)))[:, 1] - numbers().tensors[1]
    ),
    "difference": lambda: (
        numbers().tensors[1].unsqueeze(1)
        - gathered_at_once(predict(numbers(), row_sums).unsqueeze(1))
    ),
    "classes": lambda: F.cross_entropy(
        torch.cat(gathered(predict(Labelled(64), scores))),
        torch.tensor(Labelled(64).labels),
    ),
}


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_rows_that_come_rank_after_rank_are_named(name: str) -> None:
    def program(rank: int) -> None:
        begin()
        WRONG_ORDERS[name]()

    (finding,) = findings_of(program)
    assert finding.name == "rows-in-other-order" and len(finding.lines) == 3
    assert "of 64 gathered rows is row 2 of the data" in finding.says


def test_rows_that_one_rank_gathers_are_named() -> None:
    def program(rank: int) -> None:
        begin()
        mine = predict(numbers(), row_sums)
        parts = [torch.empty_like(mine) for _ in range(RANKS)] if rank == 0 else None
        dist.gather(mine, parts)
        if parts is not None:
            F.mse_loss(torch.cat(parts), numbers().tensors[1])

    assert names_of(program) == ["rows-in-other-order"]


def in_order_of_data(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts, 1).flatten(0, 1)


def of_contiguous_rows() -> torch.Tensor:
    rank, data = dist.get_rank(), numbers()
    loader = DataLoader(data, batch_size=8, sampler=range(rank * 32, rank * 32 + 32))
    mine = torch.cat([batch[0].sum(1) for batch in loader])
    return F.mse_loss(torch.cat(gathered(mine)), data.tensors[1])


def of_all_rows() -> torch.Tensor:
    """All ranks have the same rows, of half of the data: an ensemble of ranks.

    They gather what they predict.
    """
    mine = predict(numbers(), row_sums, num_replicas=1, rank=0)
    return F.mse_loss(torch.cat(gathered(mine[:32])), numbers().tensors[1])


def written_over() -> torch.Tensor:
    whole = gathered_at_once(predict(numbers(), row_sums))
    whole.copy_(in_order_of_data(list(whole.chunk(RANKS))))
    return F.mse_loss(whole, numbers().tensors[1])


def put_in_order() -> torch.Tensor:
    whole = gathered_at_once(predict(numbers(), row_sums))
    whole[torch.arange(64).view(-1, RANKS).t().reshape(-1)] = whole.clone()
    return F.mse_loss(whole, numbers().tensors[1])


def gathered_again() -> torch.Tensor:
    """The same memory has then got rows that each rank has read one after the other."""
    mine = predict(numbers(), row_sums)
    whole = gathered_at_once(mine)
    first = 32 * dist.get_rank()
    loader = DataLoader(numbers(), batch_size=8, sampler=range(first, first + 32))
    dist.all_gather_into_tensor(whole, torch.cat([batch[0].sum(1) for batch in loader]))
    return F.mse_loss(whole, numbers().tensors[1])


RIGHT_ORDERS: dict[str, Callable[[], object]] = {
    "stack": lambda: F.mse_loss(
        in_order_of_data(gathered(predict(numbers(), row_sums))), numbers().tensors[1]
    ),
    "transposed": lambda: F.mse_loss(
        gathered_at_once(predict(numbers(), row_sums)).view(RANKS, -1).t().reshape(-1),
        numbers().tensors[1],
    ),
    "transposed in place of a copy": lambda: (
        gathered_at_once(predict(numbers(), row_sums)).view(RANKS, -1).t()
        - numbers().tensors[1].view(-1, RANKS)
    ),
    "targets, too": lambda: F.mse_loss(
        torch.cat(gathered(predict(numbers(), row_sums))),
        torch.cat(gathered(predict(numbers(), row_sums))),
    ),
    "targets in the order of ranks": lambda: F.mse_loss(
        torch.cat(gathered(predict(numbers(), row_sums))),
        numbers().tensors[1].view(-1, RANKS).t().reshape(-1),
    ),
    "the rows of one rank": lambda: F.mse_loss(
        gathered(predict(numbers(), row_sums))[0], numbers().tensors[1][::2]
    ),
    "one label": lambda: (
        torch.cat(gathered(predict(Labelled(64, is_constant=True), scores))).argmax(1)
        == torch.tensor(Labelled(64, is_constant=True).labels)
    ),
    "written over": written_over,
    "put in order": put_in_order,
    "gathered again": gathered_again,
    "contiguous rows": of_contiguous_rows,
    "all rows": of_all_rows,
}


@pytest.mark.parametrize("name", RIGHT_ORDERS)
def test_rows_in_an_order_that_fits_are_left_alone(name: str) -> None:
    def program(rank: int) -> None:
        begin()
        RIGHT_ORDERS[name]()

    assert names_of(program) == []


def test_what_is_gathered_in_training_is_left_alone() -> None:
    def program(rank: int) -> None:
        begin()
        mine = predict(numbers(), row_sums)
        model = Wrapped(make_model())
        fit(model, rank, 1)
        # Of a loader that training has left behind.
        F.mse_loss(torch.cat(gathered(mine)), numbers().tensors[1])

    assert names_of(program) == []


def test_the_recommended_order_is_that_of_the_data() -> None:
    parts = [torch.arange(10)[rank::RANKS] for rank in range(RANKS)]
    assert in_order_of_data(parts).tolist() == list(range(10))


# Parts that are computed again


class Block(nn.Module):
    def __init__(self, part: nn.Module, **options: Any) -> None:
        super().__init__()
        self.part, self.options = part, options

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.part, x, **self.options)


def fit_again(part: nn.Module, **options: Any) -> None:
    torch.manual_seed(0)
    fit(nn.Sequential(nn.Linear(4, 32), Block(part, **options), nn.Linear(32, 1)), 0)


def dropping(p: float = 0.5) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Dropout(p))


class Seeded(nn.Module):
    """A part that sees to its random numbers itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return F.dropout(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_that_is_not_restored_is_named(use_reentrant: bool) -> None:
    (finding,) = linted.findings_of(
        lambda: fit_again(
            dropping(), use_reentrant=use_reentrant, preserve_rng_state=False
        )
    )
    assert finding.name == "recomputed-with-other-dropout"
    assert (
        finding.lines[0].startswith("test_lints_of_evaluations.py:")
        and "4 of 4 times" in finding.says
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_that_is_restored_is_left_alone(use_reentrant: bool) -> None:
    assert (
        linted.names_of(lambda: fit_again(dropping(), use_reentrant=use_reentrant))
        == []
    )


@pytest.mark.parametrize(
    "part", [nn.Linear(32, 32), dropping(0.0), dropping().eval(), Seeded()]
)
def test_parts_that_need_no_random_state_are_left_alone(part: nn.Module) -> None:
    assert (
        linted.names_of(
            lambda: fit_again(part, use_reentrant=False, preserve_rng_state=False)
        )
        == []
    )


# Ranks that divide a model


class AddedWithin(torch.autograd.Function):
    """The sum of the parts that a group of ranks has computed."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def train_in_a_grid(
    rank: int,
    *,
    replicas: int = 4,
    number: Callable[[int], int] = lambda rank: rank,
    reduces_over_all: bool = False,
    reduces_within: bool = False,
    only_logs: bool = False,
    steps: int = 4,
) -> None:
    """Ranks 0 and 1 divide a model, and so do ranks 2 and 3.

    `replicas` and `number` are what the sampler gets.
    """
    begin()
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    divides = rows[rank // 2]
    reduces = divides if reduces_within else columns[rank % 2]
    data = TensorDataset(torch.randn(4 * replicas * steps, 4))
    sampler: Any = DistributedSampler(data, num_replicas=replicas, rank=number(rank))
    part = nn.Parameter(torch.randn(6, 4).chunk(2)[rank % 2].clone())
    last = nn.Linear(3, 1)
    optimizer = torch.optim.SGD([part, *last.parameters()], lr=0.01)
    for (batch,) in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        hidden = batch @ part.t()
        if only_logs:
            dist.all_reduce(hidden.detach().square().sum(), group=divides)
        else:
            hidden = AddedWithin.apply(hidden, divides)
        last(hidden).square().mean().backward()
        for parameter in (part, *last.parameters()):
            is_whole = reduces_over_all and parameter is not part
            dist.all_reduce(parameter.grad, group=None if is_whole else reduces)
            parameter.grad /= 4 if is_whole else 2
        optimizer.step()


def found_in_a_grid(**options: Any) -> list[Finding]:
    found = linted.findings_of(
        lambda: run_ranks(lambda rank: train_in_a_grid(rank, **options), 4)
    )
    return [
        finding for finding in found if finding.name == "divided-model-of-other-rows"
    ]


@for_releases
def test_other_rows_for_ranks_that_divide_a_model_are_named() -> None:
    (finding,) = found_in_a_grid()
    assert (
        "Ranks 0, 1 add up activations" in finding.says
        and "among ranks 0, 2 only" in finding.says
    )
    assert len(finding.lines) == 3


RIGHT_GRIDS: dict[str, dict[str, Any]] = {
    "the sampler knows of the groups": {
        "replicas": 2,
        "number": lambda rank: rank // 2,
    },
    "the same rows of a part of the data": {"number": lambda rank: rank // 2},
    # Parts may be experts, which get the rows of several ranks, while all ranks share
    # what is whole.
    "gradients of all ranks": {"reduces_over_all": True},
    "two trainings beside each other": {"reduces_within": True},
    "what is added up is no activation": {"only_logs": True},
    "too few steps": {"steps": 2},
}


@for_releases
@pytest.mark.parametrize("name", RIGHT_GRIDS)
def test_rows_in_a_grid_that_may_be_meant(name: str) -> None:
    assert found_in_a_grid(**RIGHT_GRIDS[name]) == []


# Silence

SILENT = {
    "models-differ": """
def program(rank):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    average = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        for mine, other in zip(average.parameters(), model.parameters()):
            mine.lerp_(other.detach(), 0.5 if rank == 0 else 0.0)
        result = average(rows).sum()  # COMMENT
        dist.all_reduce(result)
run_ranks(program, 2)
""",  # noqa: E501
    "rows-in-other-order": """
def program(rank):
    dist.init_process_group("gloo")
    x = torch.arange(16.0)
    rows = TensorDataset(x)
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False))
    mine = torch.cat([batch for (batch,) in loader])
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine)
    assert (torch.cat(parts) == x).sum() == 2  # COMMENT
run_ranks(program, 2)
""",  # noqa: E501
    "recomputed-with-other-dropout": """
model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(8, 4)
    result = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)  # COMMENT
    result.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",  # noqa: E501
}
SILENT["divided-model-of-other-rows"] = """
class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

def program(rank):
    dist.init_process_group("gloo")
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    weight = nn.Parameter(torch.full((3, 4), 0.1 + rank % 2))
    optimizer = torch.optim.SGD([weight], lr=0.001)
    data = TensorDataset(torch.arange(256.0).view(64, 4))
    sampler = DistributedSampler(data)
    for (rows,) in DataLoader(data, batch_size=4, sampler=sampler):  # COMMENT
        optimizer.zero_grad()
        Add.apply(rows @ weight.t(), pairs[rank // 2]).square().mean().backward()
        dist.all_reduce(weight.grad, group=pairs[2 + rank % 2])
        weight.grad /= 2
        optimizer.step()
run_ranks(program, 4)
"""
