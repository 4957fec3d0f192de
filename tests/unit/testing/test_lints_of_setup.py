"""Lints of what a program sets up: its optimizer, its process groups and its schedule.

Right twins are left alone.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from conditions import for_changes, for_releases
from linted import findings_of, findings_of_file, names_of
from torchstrategy.testing import run_ranks

RANKS = 2

# Torch's, of a schedule by micro-batches.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for _ in range(steps):
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# Optimizers


def shard(is_right: bool) -> None:
    dist.init_process_group("gloo")
    model = make_model()
    early = sgd(model)
    fully_shard(model)
    torch.manual_seed(1 + dist.get_rank())
    fit(model, sgd(model) if is_right else early)


@for_releases
@pytest.mark.parametrize("is_right", [False, True])
def test_an_optimizer_made_before_the_model_is_sharded(is_right: bool) -> None:
    found = findings_of(lambda: run_ranks(lambda rank: shard(is_right), RANKS))
    if is_right:
        assert found == []
        return
    (finding,) = found
    assert finding.name == "optimizer-of-other-parameters" and len(finding.lines) == 2
    assert (
        "has made 4 steps" in finding.says
        and "none of its 4 parameters" in finding.says
    )


@for_changes
def test_an_optimizer_of_a_model_that_was_copied() -> None:
    def program() -> None:
        model = make_model()
        optimizer = sgd(model)
        fit(copy.deepcopy(model), optimizer)

    (finding,) = findings_of(program)
    assert finding.name == "optimizer-of-other-parameters"


@for_changes
def test_a_model_that_was_trained_before_is_left_alone() -> None:
    """It was said to have got the gradients.

    An earlier test had left a model of the same shapes.
    """
    earlier = make_model()
    earlier(torch.ones(2, 4)).sum().backward()

    def program() -> None:
        model = make_model()
        optimizer = sgd(model)
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
            optimizer.step()

    assert "optimizer-of-other-parameters" not in [
        finding.name for finding in findings_of(program)
    ]


def test_two_steps_without_gradients_are_left_alone() -> None:
    assert findings_of(lambda: fit(make_model(), sgd(make_model()), steps=2)) == []


def test_an_optimizer_of_a_part_that_waits_is_left_alone() -> None:
    def program() -> None:
        first, second = make_model(), make_model()
        optimizers = [sgd(first), sgd(second)]
        for _ in range(4):
            first(torch.randn(6, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert findings_of(program) == []


# Process groups


def make_groups(rank: int, is_right: bool) -> None:
    dist.init_process_group("gloo")
    if is_right:
        for member in range(RANKS):
            dist.new_group([member])
    else:
        dist.new_group([rank])


@pytest.mark.parametrize("is_right", [False, True])
def test_groups_of_other_ranks(is_right: bool) -> None:
    found = findings_of(
        lambda: run_ranks(lambda rank: make_groups(rank, is_right), RANKS)
    )
    assert [finding.name for finding in found] == (
        [] if is_right else ["groups-differ"]
    )
    if found:
        assert (
            "the ranks [0] on rank 0" in found[0].says
            and "[1] on rank 1" in found[0].says
        )


def test_groups_that_only_their_members_make_are_left_alone() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        dist.new_group([rank], use_local_synchronization=True)
        dist.new_group([1, 0] if rank else [0, 1])

    assert findings_of(lambda: run_ranks(program, RANKS)) == []


# Schedules


def accumulate(
    schedule: Callable[[torch.optim.Optimizer], LRScheduler],
    each: bool,
    repeats: int = 1,
) -> None:
    """Six steps of four micro-batches each.

    The schedule is stepped after each micro-batch, or after each step.
    """
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedule(optimizer)
    for micro in range(1, 25):
        (model(torch.randn(6, 4)).square().mean() / 4).backward()
        if micro % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(repeats if each or micro % 4 == 0 else 0):
            scheduler.step()


def falls_to_zero(steps: int) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    return lambda optimizer: LambdaLR(
        optimizer, lambda step: max(0.0, 1 - step / steps)
    )


def test_a_schedule_that_counts_micro_batches_is_over_early() -> None:
    (finding,) = findings_of(lambda: accumulate(falls_to_zero(6), each=True))
    assert finding.name == "scheduler-counts-backwards" and len(finding.lines) == 2
    assert "4 times" in finding.says and "0 in the last 5 of 6 steps" in finding.says


def test_a_schedule_that_counts_steps_is_left_alone() -> None:
    assert findings_of(lambda: accumulate(falls_to_zero(6), each=False)) == []


def test_a_schedule_as_long_as_there_are_micro_batches_is_left_alone() -> None:
    assert findings_of(lambda: accumulate(falls_to_zero(24), each=True)) == []


def test_a_schedule_stepped_for_each_rank_is_left_alone() -> None:
    assert (
        findings_of(lambda: accumulate(falls_to_zero(6), each=False, repeats=4)) == []
    )


@for_changes
def test_several_schedules_in_a_chain_are_left_alone() -> None:
    def chain(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return ChainedScheduler(
            [falls_to_zero(6)(optimizer), falls_to_zero(8)(optimizer)]
        )

    assert findings_of(lambda: accumulate(chain, each=False)) == []


# Schedules by a function


def fit_by_function(
    rank: int, make: Callable[[int], Callable[[int], float]], is_of_epochs: bool = False
) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer, data = (
        sgd(model),
        TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0))),
    )
    sampler: Any = DistributedSampler(data)
    schedule = LambdaLR(optimizer, make(3 * 8))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data, 4, sampler=sampler):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if not is_of_epochs:
                schedule.step()
        if is_of_epochs:
            schedule.step()


def falls(step: int, total: int) -> float:
    return 1 - min(step, total) / total


class Trainer:
    """An object that knows how many batches all ranks have.

    It has a schedule that does not ask for it.
    """

    def __init__(self, total: int) -> None:
        self.batches_of_all, self.total = total, total // RANKS

    def rate(self, step: int) -> float:
        return falls(step, self.total)


WORLD = RANKS
BY_FUNCTION: dict[str, Callable[[int], Callable[[int], float]]] = {
    "the steps of all ranks are counted": lambda total: (
        lambda step: falls(step * WORLD, total)
    ),
    "torch is asked for the ranks": lambda total: (
        lambda step: falls(step * dist.get_world_size(), total)
    ),
    "the other number belongs to the object": lambda total: Trainer(total).rate,
    "the length is that of a rank": lambda total: (
        lambda step, total=total // RANKS: falls(step, total)
    ),
    "a factor stands in the function": lambda total: (
        lambda step: falls(step, 10 * total)
    ),
    "a longer schedule is cut": lambda total: functools.partial(
        falls, total=10 * total
    ),
}


@pytest.mark.parametrize("name", BY_FUNCTION)
def test_a_function_that_counts_as_it_should_is_left_alone(name: str) -> None:
    assert (
        names_of(
            lambda: run_ranks(
                lambda rank: fit_by_function(rank, BY_FUNCTION[name]), RANKS
            )
        )
        == []
    )


def test_a_function_of_the_epoch_is_left_alone() -> None:
    def program(rank: int) -> None:
        fit_by_function(
            rank, lambda total: lambda epoch: falls(epoch, 3), is_of_epochs=True
        )

    assert names_of(lambda: run_ranks(program, RANKS)) == []


def test_a_function_that_calls_another_one_and_counts_all_batches() -> None:
    """The number is two functions deep, as where a warmup wraps a schedule's rest."""

    def after_warmup(rest: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: step / 3 if step < 3 else rest(step)

    def program(rank: int) -> None:
        fit_by_function(
            rank, lambda total: after_warmup(lambda step: falls(step, total))
        )

    (finding,) = findings_of(lambda: run_ranks(program, RANKS))
    assert (
        finding.name == "schedule-of-all-ranks"
        and "The LambdaLR" in finding.says
        and "total=24" in finding.says
    )


# Silence


SETUPS = {
    "optimizer-of-other-parameters": """
import copy, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # COMMENT
model = copy.deepcopy(model)
for _ in range(4):
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
""",
    "scheduler-counts-backwards": """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 6))
for micro in range(1, 13):
    (model(torch.randn(2, 4)).square().mean() / 2).backward()
    if micro % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()  # COMMENT
""",  # noqa: E501
    "groups-differ": """
import torch.distributed as dist
from torchstrategy.testing import run_ranks
def program(rank):
    dist.init_process_group("gloo")
    dist.new_group([rank])  # COMMENT
run_ranks(program, 2)
""",
}


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("is_silenced", [False, True])
def test_a_comment_silences_each(name: str, is_silenced: bool, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        SETUPS[name].replace(
            "COMMENT", f"torchstrategy: ignore[{name if is_silenced else 'same-order'}]"
        )
    )
    found = findings_of_file(file)
    assert [finding.name for finding in found] == ([] if is_silenced else [name])


def replace_the_head(is_right: bool, keeps_it: bool = False) -> None:
    model: Any = make_model()
    if is_right:
        model[2] = nn.Linear(8, 1)
    optimizer, kept = sgd(model), model[2] if keeps_it else None
    if not is_right:
        model[2] = nn.Linear(8, 1)
    fit(model, optimizer)
    assert (kept is not None) == keeps_it


@for_changes
def test_an_optimizer_with_a_part_that_was_replaced_is_named() -> None:
    """The old head was in the optimizer, the new one not, and the body was trained."""
    (finding,) = findings_of(lambda: replace_the_head(is_right=False))
    assert finding.name == "optimizer-of-other-parameters" and len(finding.lines) == 2
    assert (
        "2 of its parameters never had a gradient, and no module has them"
        in finding.says
    )
    assert "2.weight, 2.bias" in finding.says
    assert names_of(lambda: replace_the_head(is_right=True)) == []


@for_changes
def test_a_part_that_is_still_there_is_left_alone() -> None:
    assert names_of(lambda: replace_the_head(is_right=False, keeps_it=True)) == []


@for_changes
def test_parameters_of_no_module_that_are_not_used_are_left_alone() -> None:
    def program() -> None:
        model = make_model()
        unused = nn.Parameter(torch.zeros(8, 4))
        fit(model, torch.optim.SGD([*model.parameters(), unused], lr=0.1))

    assert names_of(program) == []


@for_changes
def test_a_part_that_is_trained_later_is_left_alone() -> None:
    def program() -> None:
        model: Any = make_model()
        head = nn.Parameter(torch.zeros(1, 8))
        optimizer = torch.optim.SGD([*model[0].parameters(), head], lr=0.1)
        fit(model, optimizer)
        for _ in range(2):
            (model[1](model[0](torch.randn(6, 4))) @ head.T).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert names_of(program) == []


# Settings of groups


def train_groups(
    rates: list[Any],
    before: Callable[[torch.optim.Optimizer, int], object],
    steps: int = 4,
    **settings: Any,
) -> None:
    model: Any = make_model()
    parts = zip([model[0], model[2]], rates, strict=True)
    optimizer = torch.optim.SGD(
        [{"params": list(part.parameters()), "lr": rate} for part, rate in parts],
        **settings,
    )
    for step in range(steps):
        before(optimizer, step)
        fit(model, optimizer, 1)


def write_rates(*rates: float) -> Callable[[torch.optim.Optimizer, int], None]:
    def write(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / (step + 1)

    return write


def test_a_finding_says_which_settings_groups_were_made_with() -> None:
    (finding,) = findings_of(lambda: train_groups([0.01, 0.1], write_rates(0.5, 0.5)))
    assert finding.name == "group-settings-overwritten" and len(finding.lines) == 2
    assert (
        "'lr' of their own" in finding.says and "0.01, 0.1. All 4 steps" in finding.says
    )


def test_a_decay_of_weights_that_a_program_writes_into_all_groups_is_named() -> None:
    """A decay schedule, and one group that was to have none, such as biases."""

    def program() -> None:
        model: Any = make_model()
        groups = [
            {"params": [model[0].weight], "weight_decay": 0.1},
            {"params": [model[0].bias], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        for step in range(3):
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.1 + step / 100
            fit(model, optimizer, 1)

    (finding,) = findings_of(program)
    assert (
        finding.name == "group-settings-overwritten"
        and "'weight_decay'" in finding.says
    )


@pytest.mark.parametrize(
    ("rates", "before"),
    [
        ([0.01, 0.1], list),
        ([0.01, 0.1], write_rates(0.05, 0.5)),
        ([0.1, 0.1], write_rates(0.5, 0.5)),
        # A warmup from zero, and a rate that all groups come to in the end.
        (
            [0.01, 0.1],
            lambda optimizer, step: write_rates(
                *((0.0, 0.0) if step < 2 else (0.1, 0.2))
            )(optimizer, step),
        ),
        (
            [0.01, 0.1],
            lambda optimizer, step: write_rates(
                *((0.3, 0.2) if step < 1 else (0.1, 0.1))
            )(optimizer, step),
        ),
        # A warmup that is below the rates of all groups.
        ([0.01, 0.1], write_rates(0.01, 0.01)),
        # One step is no habit.
        (
            [0.01, 0.1],
            lambda optimizer, step: write_rates(
                *((0.1, 0.1) if step < 1 else (0.1, 0.2))
            )(optimizer, step),
        ),
        ([torch.tensor(0.01), torch.tensor(0.1)], write_rates(0.5, 0.5)),
    ],
)
def test_groups_that_have_settings_of_their_own_are_left_alone(
    rates: list[Any], before: Any
) -> None:
    options = {"foreach": False} if isinstance(rates[0], torch.Tensor) else {}
    assert (
        names_of(
            lambda: train_groups(
                rates, lambda *_: before(*_) if before is not list else None, **options
            )
        )
        == []
    )


def test_settings_of_a_checkpoint_are_left_alone() -> None:
    def program() -> None:
        state: list[Any] = []

        def load(optimizer: torch.optim.Optimizer, step: int) -> None:
            if step == 0:
                state.append(copy.deepcopy(optimizer.state_dict()))
                for group in state[0]["param_groups"]:
                    group["lr"] = 0.3
                optimizer.load_state_dict(state[0])

        train_groups([0.01, 0.1], load)

    assert names_of(program) == []


# Generators in the workers of loaders


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from a generator that it has had from the beginning."""

    def __init__(self, generator: Any = None) -> None:
        self.numbers = np.random.default_rng(0) if generator is None else generator

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((4,), float(self.draw()) + at)

    def draw(self) -> Any:
        return self.numbers.random()


class OfTorch(Rows):
    def draw(self) -> torch.Tensor:
        return torch.rand((), generator=self.numbers)


class OfSeveralClasses(Rows):
    """The generator is that of a transform."""

    def __init__(self) -> None:
        self.transforms = [Add(), Add()]

    def __getitem__(self, at: int) -> torch.Tensor:
        row = torch.full((4,), float(at))
        for transform in self.transforms:
            row = transform(row)
        return row


class Add:
    def __init__(self) -> None:
        self.numbers = random.Random(0)

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return row + self.numbers.random()


class OfTheSplit(Rows):
    """The generator has divided the rows, and nothing is drawn from it later."""

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((4,), float(at))


class OfAFunction(Rows):
    """A variable has the name of the generator, which was for the beginning."""

    def __getitem__(self, at: int) -> torch.Tensor:
        numbers = generator_of(at)
        return torch.full((4,), numbers.random())


def generator_of(at: int) -> np.random.Generator:
    return np.random.default_rng(at)


class SeedsItsTransform(Rows):
    """As MONAI does."""

    def __init__(self) -> None:
        self.add = Add()

    def __getitem__(self, at: int) -> torch.Tensor:
        self.add.numbers.seed(at)
        return self.add(torch.full((4,), float(at)))


class OfAnEvaluation(Rows):
    """The same class for both: the rows of training draw nothing."""

    is_training = True

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full(
            (4,), float(at) if self.is_training else self.numbers.random()
        )


class Fails(Rows):
    def __getitem__(self, at: int) -> torch.Tensor:
        if at == 0:
            raise KeyError(at)
        return super().__getitem__(at)


class OfEachRow(Rows):
    def __getitem__(self, at: int) -> torch.Tensor:
        self.numbers = np.random.default_rng(at)
        return super().__getitem__(at)


class SeededForEachRow(OfTorch):
    def __getitem__(self, at: int) -> torch.Tensor:
        self.numbers.manual_seed(at)
        return super().__getitem__(at)


IN_ORDER = SequentialSampler(range(8))


def seed_the_worker(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.numbers = np.random.default_rng(info.seed)  # type: ignore[attr-defined]


def load(rows: Any, epochs: int = 2, **options: Any) -> None:
    settings = {"batch_size": 4, "shuffle": True, "num_workers": 2, **options}
    context = "fork" if settings["num_workers"] else None
    loader: DataLoader[Any] = DataLoader(
        rows, multiprocessing_context=context, **settings
    )
    for _ in range(epochs):
        for _ in loader:
            pass


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Rows, "Rows.numbers"),
        (lambda: Rows(np.random.RandomState(0)), "Rows.numbers"),
        (lambda: OfTorch(torch.Generator()), "OfTorch.numbers"),
        (lambda: Subset(Rows(), range(8)), "Rows.numbers"),
        (OfSeveralClasses, "Add.numbers"),
    ],
)
def test_a_generator_that_workers_copy_is_named(
    make: Callable[[], Any], name: str
) -> None:
    (finding,) = set(findings_of(lambda: load(make())))
    assert finding.name == "loader-workers-draw-alike" and len(finding.lines) == 1
    assert (
        name in finding.says
        and "2 epochs" in finding.says
        and "2 workers" in finding.says
    )


def test_one_worker_draws_the_same_in_each_epoch() -> None:
    (finding,) = findings_of(lambda: load(Rows(), num_workers=1))
    assert (
        "2 epochs" in finding.says
        and "the worker of the loader gets a copy" in finding.says
    )


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Rows, {"num_workers": 0}),
        (Rows, {"shuffle": False}),  # an evaluation
        (Rows, {"num_workers": 1, "epochs": 1}),
        # It goes on in the next epoch.
        (Rows, {"num_workers": 1, "persistent_workers": True}),
        (Rows, {"worker_init_fn": seed_the_worker}),
        (OfTheSplit, {}),
        (OfEachRow, {}),
        (OfAFunction, {}),
        (SeedsItsTransform, {}),
        (OfAnEvaluation, {}),
        (lambda: Subset(Fails(), [*range(1, 8)]), {}),
        (
            Rows,
            {
                "shuffle": False,
                "sampler": DistributedSampler(range(8), 1, 0, shuffle=False),
            },
        ),
        (
            Rows,
            {
                "batch_size": 1,
                "shuffle": False,
                "batch_sampler": BatchSampler(IN_ORDER, 4, False),
            },
        ),
        (lambda: SeededForEachRow(torch.Generator()), {}),
        (lambda: TensorDataset(torch.arange(8.0)), {}),
    ],
)
def test_workers_that_draw_their_own_numbers_are_left_alone(
    make: Callable[[], Any], options: dict[str, Any]
) -> None:
    assert names_of(lambda: load(make(), **options)) == []
