"""Lints of what an optimizer updates, and with what.

Right programs that look alike are left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    ReduceLROnPlateau,
)

from conditions import for_changes, for_releases
from linted import findings_of, findings_of_file, names_of
from torchstrategy.testing import run_ranks

RANKS = 2

# Torch's, of a scheduler whose optimizer makes no step.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")


def make_model(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *more, nn.ReLU(), nn.Linear(8, 1))


def rows(steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        yield torch.randn(32, 4, generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module, lr: float = 0.01, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 5,
    after: Callable[[], object] = list,
) -> None:
    dtype = next(model.parameters()).dtype
    for batch in rows(steps):
        optimizer.zero_grad()
        model(batch.to(dtype)).float().square().mean().backward()
        optimizer.step()
        after()


# NaN


def test_ranks_that_all_have_nan_are_alike() -> None:
    """A gradient that is NaN on all ranks was reduced.

    The NaN of a rank may have other bits.
    """

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(make_model())
        fit(model, sgd(model, 1e20))
        assert torch.isnan(model.module[0].weight).any()

    assert names_of(lambda: run_ranks(program, RANKS)) == ["same-rows"]


# Gradients of a scaled loss

Step = Callable[[torch.amp.GradScaler, torch.optim.Optimizer], object]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def train_scaled(step: Step, make: Make = sgd, **options: Any) -> nn.Module:
    model = make_model()
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **options})
    for batch in rows(4):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        step(scaler, optimizer)
    return model


def through_scaler(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> None:
    scaler.step(optimizer)
    scaler.update()


def plainly(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


MAKERS: dict[str, Make] = {
    "sgd": sgd,
    "for loops": lambda model: sgd(
        model, foreach=False, weight_decay=0.1, momentum=0.9
    ),
    "foreach": lambda model: sgd(model, foreach=True, weight_decay=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_past_the_scaler_is_named(name: str) -> None:
    (finding,) = findings_of(lambda: train_scaled(plainly, MAKERS[name]))
    assert finding.name == "gradient-still-scaled" and len(finding.lines) == 2
    assert (
        "multiplied by 1024" in finding.says
        and "scaler.step(optimizer)" in finding.write
    )


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_of_the_scaler_is_left_alone(name: str) -> None:
    assert names_of(lambda: train_scaled(through_scaler, MAKERS[name])) == []


@for_releases
@pytest.mark.parametrize("is_right", [False, True])
def test_scaled_gradients_that_ranks_reduce_themselves(is_right: bool) -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")

        def step(
            scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
        ) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= RANKS
            (through_scaler if is_right else plainly)(scaler, optimizer)

        train_scaled(step, init_scale=16.0)

    expected = [] if is_right else ["gradient-still-scaled"]
    assert [
        name
        for name in names_of(lambda: run_ranks(program, RANKS))
        if name != "same-rows"
    ] == expected


def each_gradient(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def unscale_and_step(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> None:
    scaler.unscale_(optimizer)
    optimizer.step()
    scaler.update()


def divide_by_hand(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> None:
    for parameter in each_gradient(optimizer):
        assert parameter.grad is not None
        parameter.grad.div_(scaler.get_scale())
    optimizer.step()


def divide_all_by_hand(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> None:
    torch._foreach_mul_(
        [parameter.grad for parameter in each_gradient(optimizer)],
        1 / scaler.get_scale(),
    )
    optimizer.step()


def put_other_gradients(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> None:
    for parameter in each_gradient(optimizer):
        assert parameter.grad is not None
        parameter.grad = parameter.grad / scaler.get_scale()
    optimizer.step()


def take_signs(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    for parameter in each_gradient(optimizer):
        assert parameter.grad is not None
        parameter.grad.sign_()
    optimizer.step()


@pytest.mark.parametrize(
    "step",
    [
        unscale_and_step,
        divide_by_hand,
        divide_all_by_hand,
        put_other_gradients,
        take_signs,
    ],
)
def test_gradients_that_were_written_are_left_alone(step: Step) -> None:
    assert names_of(lambda: train_scaled(step)) == []


class Dividing(torch.optim.Optimizer):
    """An optimizer that divides gradients by a scale that it knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in each_gradient(self):
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad.div_(1024)


def test_an_optimizer_that_divides_itself_is_left_alone() -> None:
    assert (
        names_of(
            lambda: train_scaled(plainly, lambda model: Dividing(model.parameters()))
        )
        == []
    )


class Scaled(torch.optim.Optimizer):
    """An optimizer that `GradScaler` tells the scale."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in each_gradient(self):
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad / self.grad_scale


def test_an_optimizer_that_is_told_the_scale_is_left_alone() -> None:
    assert (
        names_of(
            lambda: train_scaled(
                through_scaler, lambda model: Scaled(model.parameters())
            )
        )
        == []
    )


def test_hooks_that_divide_are_left_alone() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient / 1024)
        return sgd(model)

    assert names_of(lambda: train_scaled(plainly, make)) == []


def test_a_scaler_that_is_off_is_left_alone() -> None:
    assert names_of(lambda: train_scaled(plainly, enabled=False)) == []


def test_only_one_of_two_losses_is_scaled() -> None:
    def program() -> None:
        maker, judge = nn.Linear(4, 4), make_model()
        of_maker, of_judge, scaler = (
            sgd(maker),
            sgd(judge),
            torch.amp.GradScaler("cpu", init_scale=1024.0),
        )
        for batch in rows(4):
            of_maker.zero_grad()
            scaler.scale(judge(maker(batch)).square().mean()).backward()
            scaler.step(of_maker)
            scaler.update()
            of_judge.zero_grad()
            judge(maker(batch).detach()).square().mean().backward()
            of_judge.step()

    assert names_of(program) == []


# Parameters with the same memory


class Tied(nn.Module):
    """Two layers whose weights are to be one."""

    def __init__(
        self, tie: Callable[[nn.Embedding, nn.Linear], object], rows: int = 6
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, rows, bias=False)
        tie(self.embed, self.head)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        tokens = batch.abs().long().clamp(0, 5)[:, 0]
        result: torch.Tensor = self.head(torch.tanh(self.embed(tokens)))
        return result


def by_data(embed: nn.Embedding, head: nn.Linear) -> None:
    head.weight.data = embed.weight.data


def by_a_new_parameter(embed: nn.Embedding, head: nn.Linear) -> None:
    head.weight = nn.Parameter(embed.weight)


def by_storage(embed: nn.Embedding, head: nn.Linear) -> None:
    with torch.no_grad():
        head.weight.set_(embed.weight)  # type: ignore[call-overload]


def by_some_rows(embed: nn.Embedding, head: nn.Linear) -> None:
    head.weight.data = embed.weight.data[2:]


def turned(embed: nn.Embedding, head: nn.Linear) -> None:
    embed.weight.data = torch.randn(6, 8)[:, ::2]
    head.weight.data = embed.weight.data


@for_changes
@pytest.mark.parametrize(
    "tie", [by_data, by_a_new_parameter, by_storage, by_some_rows, turned]
)
def test_two_parameters_with_the_same_memory_are_named(
    tie: Callable[[nn.Embedding, nn.Linear], object],
) -> None:
    def program() -> None:
        model = Tied(tie)
        fit(model, torch.optim.AdamW(model.parameters()))

    (finding,) = findings_of(program)
    assert finding.name == "parameters-share-memory" and len(finding.lines) == 1
    assert (
        "embed.weight and head.weight are two" in finding.says
        or "head.weight and embed.weight" in finding.says
    )


def one_parameter(embed: nn.Embedding, head: nn.Linear) -> None:
    head.weight = embed.weight


def parts_of_a_buffer(embed: nn.Embedding, head: nn.Linear) -> None:
    buffer = torch.randn(48)
    embed.weight.data, head.weight.data = buffer[:24].view(6, 4), buffer[24:].view(6, 4)


def columns_of_a_buffer(embed: nn.Embedding, head: nn.Linear) -> None:
    buffer = torch.randn(6, 8)
    embed.weight.data, head.weight.data = buffer[:, :4], buffer[:, 4:]


def one_is_frozen(embed: nn.Embedding, head: nn.Linear) -> None:
    by_data(embed, head)
    head.requires_grad_(False)


@for_changes
@pytest.mark.parametrize(
    "tie", [one_parameter, parts_of_a_buffer, columns_of_a_buffer, one_is_frozen]
)
def test_one_parameter_and_parts_of_a_buffer_are_left_alone(
    tie: Callable[[nn.Embedding, nn.Linear], object],
) -> None:
    def program() -> None:
        model = Tied(tie)
        fit(model, sgd(model))

    assert names_of(program) == []


def test_gradients_that_the_program_adds_up_are_left_alone() -> None:
    def program() -> None:
        model = Tied(by_data)
        optimizer = sgd(model)
        for batch in rows(4):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            first, second = model.embed.weight.grad, model.head.weight.grad
            assert first is not None and second is not None
            first += second
            second.copy_(first)
            optimizer.step()

    assert names_of(program) == []


def test_the_weights_of_a_recurrent_layer_are_left_alone() -> None:
    def program() -> None:
        torch.manual_seed(0)
        model = nn.LSTM(4, 4, num_layers=2)
        model.flatten_parameters()
        optimizer = sgd(model)
        for batch in rows(4):
            optimizer.zero_grad()
            model(batch)[0].square().mean().backward()
            optimizer.step()

    assert names_of(program) == []


# Parameters that had the same memory


def fit_moved(
    tie: Callable[[nn.Embedding, nn.Linear], object],
    after: Callable[[Tied], object] = list,
) -> None:
    model = Tied(tie).double()
    after(model)
    fit(model, sgd(model))


def test_a_tie_by_data_is_lost_when_the_module_is_moved() -> None:
    (finding,) = findings_of(lambda: fit_moved(by_data, lambda model: None))
    assert finding.name == "tie-is-lost" and len(finding.lines) == 2
    assert finding.says.startswith("embed.weight and head.weight are two parameters")


def tie_again(model: Tied) -> None:
    model.head.weight = model.embed.weight


def freeze_one(model: Tied) -> None:
    model.head.requires_grad_(False)


@pytest.mark.parametrize("after", [tie_again, freeze_one])
def test_a_tie_that_is_made_again_or_not_trained_is_left_alone(
    after: Callable[[Tied], object],
) -> None:
    assert names_of(lambda: fit_moved(by_data, after)) == []


@pytest.mark.parametrize("tie", [one_parameter, parts_of_a_buffer, columns_of_a_buffer])
def test_moved_parameters_that_were_not_the_same_are_left_alone(
    tie: Callable[[nn.Embedding, nn.Linear], object],
) -> None:
    assert names_of(lambda: fit_moved(tie, lambda model: None)) == []


# Frozen parameters


def freeze(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    before: Callable[[], object] = list,
) -> None:
    """A part is frozen after three steps, and its gradients stay."""
    for step, batch in enumerate(rows(7)):
        if step == 3:
            model[0].requires_grad_(False)  # type: ignore[index]
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        before()
        optimizer.step()


@for_changes
def test_a_finding_says_what_is_frozen_and_since_when() -> None:
    def program() -> None:
        model = make_model()
        freeze(model, sgd(model, momentum=0.9))

    (finding,) = findings_of(program)
    assert finding.name == "frozen-but-updated" and len(finding.lines) == 1
    assert "0.weight, 0.bias" in finding.says and "since step 4" in finding.says


def test_frozen_parameters_that_stay_as_they_are_are_left_alone() -> None:
    def program() -> None:
        model = make_model()
        freeze(model, sgd(model))

    assert names_of(program) == []


def test_frozen_parameters_with_gradients_of_the_program_are_left_alone() -> None:
    def program() -> None:
        model = make_model()

        def write_gradients() -> None:
            for parameter in model[0].parameters():
                parameter.grad = torch.ones_like(parameter)

        freeze(model, sgd(model, momentum=0.9), write_gradients)

    assert names_of(program) == []


def test_parameters_that_are_frozen_only_during_the_step_are_left_alone() -> None:
    def program() -> None:
        model = make_model()
        model[2].weight.data.zero_()  # the first layer gets gradients of zeros
        optimizer = sgd(model[0], weight_decay=0.1)
        for batch in rows(5):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            model.requires_grad_(False)
            optimizer.step()
            model.requires_grad_(True)

    assert names_of(program) == []


# Frozen batch norm


def pretrained(model: nn.Module) -> nn.Module:
    """Statistics as a checkpoint has them."""
    torch.manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d) and layer.running_mean is not None:
            layer.running_mean.normal_()
    return model


class Probe(nn.Module):
    """A frozen body with a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)
        pretrained(self.body).requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(batch))
        return result


def fit_head(model: nn.Module, head: nn.Module, steps: int = 5) -> None:
    fit(model, sgd(head), steps)


@for_changes
@pytest.mark.parametrize("is_right", [False, True])
def test_batch_norm_of_a_frozen_body(is_right: bool) -> None:
    def program() -> None:
        model = Probe().train()
        if is_right:
            model.body.eval()
        fit_head(model, model.head)

    found = findings_of(program)
    assert [finding.name for finding in found] == (
        [] if is_right else ["frozen-norm-in-training"]
    )
    if found:
        assert found[0].says.startswith(
            "body.1 is frozen, as all weights before it, but in training mode"
        )
        assert "in 5 steps" in found[0].says and ".eval()" in found[0].write


@pytest.mark.parametrize("is_right", [False, True])
def test_batch_norm_before_a_head_in_one_sequence(is_right: bool) -> None:
    def program() -> None:
        model = pretrained(make_model(nn.BatchNorm1d(8)))
        model[:2].requires_grad_(False)  # type: ignore[index]
        model[1].train(not is_right)  # type: ignore[index]
        fit_head(model, model[3])  # type: ignore[index]

    assert names_of(program) == ([] if is_right else ["frozen-norm-in-training"])


@for_changes
def test_a_frozen_body_of_few_rows_is_not_told_to_synchronize() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(Probe())
        optimizer = sgd(model.module.head)
        for batch in rows(5):
            optimizer.zero_grad()
            model(batch[8 * rank : 8 * rank + 8]).square().mean().backward()
            optimizer.step()

    assert names_of(lambda: run_ranks(program, RANKS)) == ["frozen-norm-in-training"]


def scale_alone_is_frozen() -> None:
    model = pretrained(make_model(nn.BatchNorm1d(8)))
    model[1].requires_grad_(False)  # type: ignore[index]
    fit(model, sgd(model))


def statistics_are_new() -> None:
    model = make_model(nn.BatchNorm1d(8))
    model[:2].requires_grad_(False)  # type: ignore[index]
    fit(model, sgd(model[3]))  # type: ignore[index]


def inputs_are_normalized() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), make_model())
    fit(pretrained(model), sgd(model))


def frozen_norm_comes_first() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4).requires_grad_(False), make_model())
    fit(pretrained(model), sgd(model))


def statistics_stay() -> None:
    model = Probe()
    model.body[1].momentum = 0.0
    fit_head(model, model.head)


def a_part_before_it_is_trained() -> None:
    first, model = nn.Linear(4, 4), Probe()
    fit(
        nn.Sequential(first, model),
        torch.optim.SGD([*first.parameters(), *model.head.parameters()], lr=0.01),
    )


def body_is_trained_later() -> None:
    model = Probe()
    fit_head(model, model.head)
    model.requires_grad_(True)
    fit(model, sgd(model), 2)


def body_was_trained_before() -> None:
    model = Probe().requires_grad_(True)
    fit(model, sgd(model))
    model.body.requires_grad_(False)
    fit_head(model, model.head)


def teacher_is_an_average() -> None:
    student = make_model(nn.BatchNorm1d(8))
    teacher = pretrained(copy.deepcopy(student)).requires_grad_(False)
    optimizer = sgd(student, 0.1)
    for batch in rows(9):
        optimizer.zero_grad()
        (student(batch) - teacher(batch)).square().mean().backward()
        optimizer.step()
        for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.data.mul_(0.9).add_(its.data, alpha=0.1)


def judge_is_frozen_in_turns() -> None:
    maker, judge = nn.Linear(4, 4), pretrained(make_model(nn.BatchNorm1d(8)))
    of_maker, of_judge = sgd(maker), sgd(judge)
    for batch in rows(6):
        judge.requires_grad_(False)
        of_maker.zero_grad()
        (judge(maker(batch)) + judge(batch)).square().mean().backward()
        of_maker.step()
        judge.requires_grad_(True)
        of_judge.zero_grad()
        judge(batch).square().mean().backward()
        of_judge.step()


def keys_come_from_a_slow_copy() -> None:
    query, key = (
        make_model(),
        pretrained(make_model(nn.BatchNorm1d(8))).requires_grad_(False),
    )
    optimizer = sgd(query)
    for batch in rows(6):
        with torch.no_grad():
            targets = key(batch)
        optimizer.zero_grad()
        (query(batch) - targets).square().mean().backward()
        optimizer.step()


@for_changes
@pytest.mark.parametrize(
    "program",
    [
        scale_alone_is_frozen,
        statistics_are_new,
        inputs_are_normalized,
        frozen_norm_comes_first,
        statistics_stay,
        a_part_before_it_is_trained,
        body_is_trained_later,
        body_was_trained_before,
        teacher_is_an_average,
        judge_is_frozen_in_turns,
        keys_come_from_a_slow_copy,
    ],
    ids=lambda program: program.__name__,
)
def test_batch_norm_that_has_to_follow_is_left_alone(
    program: Callable[[], None],
) -> None:
    assert names_of(program) == []


# Updates that are rounded away


def fit_in(dtype: torch.dtype, make: Make, steps: int = 10) -> None:
    model = make_model(nn.LayerNorm(8)).to(dtype)
    fit(model, make(model), steps)


SMALL: dict[str, Make] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    "fused": lambda model: torch.optim.Adam(model.parameters(), lr=1e-4, fused=True),
    "sgd": lambda model: sgd(model, 1e-4, momentum=0.9),
}


@for_changes
@pytest.mark.parametrize("name", SMALL)
def test_updates_too_small_for_bfloat16_are_named(name: str) -> None:
    (finding,) = findings_of(lambda: fit_in(torch.bfloat16, SMALL[name]))
    assert finding.name == "updates-rounded-away" and len(finding.lines) == 1
    assert (
        "on weights in bfloat16" in finding.says and "1.weight (100%)" in finding.says
    )


@pytest.mark.parametrize("name", SMALL)
def test_the_same_updates_in_float32_are_left_alone(name: str) -> None:
    assert names_of(lambda: fit_in(torch.float32, SMALL[name])) == []


@for_releases
@pytest.mark.parametrize("is_right", [False, True])
def test_shards_in_bfloat16(is_right: bool) -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        model = make_model(nn.LayerNorm(8))
        fully_shard(model if is_right else model.to(torch.bfloat16))
        fit(model, torch.optim.AdamW(model.parameters(), lr=1e-4), 10)

    found = [
        name
        for name in names_of(lambda: run_ranks(program, RANKS))
        if name != "same-rows"
    ]
    assert found == ([] if is_right else ["updates-rounded-away"])


class Rounding(torch.optim.Optimizer):
    """Rounds at random, so that small updates are kept on the average."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in each_gradient(self):
                assert parameter.grad is not None
                exact = parameter.float() - 1e-4 * parameter.grad.float().sign()
                noise = (torch.rand_like(exact) - 0.5) * exact.abs() * 2**-8
                parameter.copy_(exact + noise)


class Mastered(torch.optim.AdamW):
    """Keeps weights in float32."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in each_gradient(self):
                assert parameter.grad is not None
                master = self.state[parameter].setdefault("master", parameter.float())
                master -= 1e-4 * parameter.grad.float().sign()
                parameter.copy_(master)


def test_optimizers_that_keep_small_updates_are_left_alone() -> None:
    assert (
        names_of(
            lambda: fit_in(torch.bfloat16, lambda model: Rounding(model.parameters()))
        )
        == []
    )
    assert (
        names_of(
            lambda: fit_in(
                torch.bfloat16, lambda model: Mastered(model.parameters(), lr=1e-4)
            )
        )
        == []
    )


def test_updates_that_are_large_enough_are_left_alone() -> None:
    assert (
        names_of(
            lambda: fit_in(
                torch.bfloat16,
                lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
            )
        )
        == []
    )


def test_a_learning_rate_that_still_rises_is_left_alone() -> None:
    def program() -> None:
        model = make_model().to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = LambdaLR(optimizer, lambda step: step / 1000)
        fit(model, optimizer, 20, scheduler.step)

    assert names_of(program) == []


def test_parameters_that_are_not_to_be_trained_are_left_alone() -> None:
    assert (
        names_of(
            lambda: fit_in(
                torch.bfloat16,
                lambda model: torch.optim.AdamW(model.parameters(), lr=0.0),
            )
        )
        == []
    )


# Schedulers of another optimizer


def falls(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=20)


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_an_optimizer_that_was_replaced(steps_before: int, is_right: bool) -> None:
    def program() -> None:
        model = make_model()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.01
        )
        scheduler = falls(optimizer)
        fit(model, optimizer, steps_before, scheduler.step)
        optimizer = sgd(model, 0.05)
        if is_right:
            scheduler = falls(optimizer)
        fit(model, optimizer, 6, scheduler.step)

    found = findings_of(program)
    assert [finding.name for finding in found] == (
        [] if is_right else ["scheduler-of-other-optimizer"]
    )
    if found:
        assert (
            "has made 3 steps and is no longer used"
            if steps_before
            else "has made no step"
        ) in found[0].says
        assert (
            "a learning rate of 0.05 in all of its 6 steps" in found[0].says
            and len(found[0].lines) == 2
        )


class Wrapper(torch.optim.Optimizer):
    """An optimizer that lets another one make its steps."""

    def __init__(self, inner: torch.optim.Optimizer, shares_groups: bool) -> None:
        self.inner = inner
        groups = (
            inner.param_groups
            if shares_groups
            else [{"params": list(each_gradient(inner)), "lr": 1.0}]
        )
        super().__init__(groups, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def a_wrapper_has_its_groups(model: nn.Module) -> None:
    inner = sgd(model)
    fit(model, Wrapper(inner, shares_groups=True), 6, falls(inner).step)


def groups_are_those_of_another_one(model: nn.Module) -> None:
    first = sgd(model)
    fit(model, torch.optim.Adam(first.param_groups), 6, falls(first).step)


def a_wrapper_calls_it(model: nn.Module) -> None:
    inner = sgd(model)
    fit(model, Wrapper(inner, shares_groups=False), 6, falls(inner).step)


def two_optimizers_take_turns(model: nn.Module) -> None:
    first, second = sgd(model), sgd(model)
    schedule = falls(first)
    for _ in range(2):
        for optimizer in (first, second):
            fit(model, optimizer, 4, schedule.step)


def both_have_a_schedule(model: nn.Module) -> None:
    first, second = sgd(model), sgd(model)
    schedules = [falls(first), ReduceLROnPlateau(second)]
    fit(model, second, 6, schedules[0].step)


def its_rates_are_copied(model: nn.Module) -> None:
    template, optimizer = sgd(model), sgd(model)
    schedule = falls(template)

    def copy_rates() -> None:
        schedule.step()
        optimizer.param_groups[0]["lr"] = template.param_groups[0]["lr"]

    fit(model, optimizer, 6, copy_rates)


def the_last_steps_are_of_another_one(model: nn.Module) -> None:
    first, second = sgd(model), sgd(model)
    schedule = falls(first)
    fit(model, first, 6, schedule.step)
    fit(model, second, 2, schedule.step)


def an_optimizer_waits(model: nn.Module) -> None:
    fit(model, sgd(model), 6, falls(sgd(make_model())).step)


@pytest.mark.parametrize(
    "program",
    [
        a_wrapper_has_its_groups,
        groups_are_those_of_another_one,
        a_wrapper_calls_it,
        two_optimizers_take_turns,
        both_have_a_schedule,
        its_rates_are_copied,
        the_last_steps_are_of_another_one,
        an_optimizer_waits,
    ],
    ids=lambda program: program.__name__,
)
def test_a_schedule_that_has_an_effect_is_left_alone(
    program: Callable[[nn.Module], None],
) -> None:
    assert names_of(lambda: program(make_model())) == []


# Silence


UPDATES = {
    "gradient-still-scaled": """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(3):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
    optimizer.step()  # COMMENT
""",
    "parameters-share-memory": """
model[2].weight.data = model[0].weight.data
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()  # COMMENT
""",
    "frozen-norm-in-training": """
model[:2].requires_grad_(False)
model[1].running_mean.normal_()
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()  # COMMENT
    optimizer.step()
""",
    "updates-rounded-away": """
model = model.bfloat16()
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 4).bfloat16()).float().square().mean().backward()
    optimizer.step()  # COMMENT
""",
    "scheduler-of-other-optimizer": """
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    scheduler.step()  # COMMENT
""",
}
BEGINNING = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
"""  # noqa: E501


@for_changes
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("is_silenced", [False, True])
def test_a_comment_silences_each(name: str, is_silenced: bool, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    comment = f"torchstrategy: ignore[{name if is_silenced else 'same-order'}]"
    file.write_text(BEGINNING + UPDATES[name].replace("COMMENT", comment))
    found = findings_of_file(file)
    assert [finding.name for finding in found] == ([] if is_silenced else [name])
