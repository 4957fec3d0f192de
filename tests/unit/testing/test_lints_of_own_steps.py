"""Lints of programs that update weights themselves, and reduce gradients themselves: without an optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from linted import findings_of, names_of
from torchstrategy.testing import run_ranks

RANKS = 2
RATE = 0.05
Update = Callable[[Sequence[nn.Parameter]], None]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def rows_of(rank: int, steps: int = 6) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(16, 4, generator=generator)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(rows)
    return (output - rows[:, :3]).square().mean()


def reduce(gradients: Sequence[torch.Tensor | None], *, are_divided: bool = True) -> None:
    for gradient in gradients:
        assert gradient is not None
        dist.all_reduce(gradient)
        if are_divided:
            gradient /= RANKS


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


# How programs update weights.


@torch.no_grad()
def subtracts(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter -= RATE * parameter.grad
        parameter.grad = None


def writes_data(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad.data, alpha=-RATE)
        parameter.grad.data.zero_()


@torch.no_grad()
def copies(parameters: Sequence[nn.Parameter]) -> None:
    for parameter, gradient in zip(parameters, gradients_of(parameters), strict=True):
        parameter.copy_(parameter - RATE * gradient)
    for parameter in parameters:
        parameter.grad = None


@torch.no_grad()
def decays_first(parameters: Sequence[nn.Parameter]) -> None:
    gradients = gradients_of(parameters)
    for parameter in parameters:
        parameter.mul_(1 - 0.01 * RATE)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(gradient, alpha=-RATE)
        parameter.grad = None


@torch.no_grad()
def updates_all_at_once(parameters: Sequence[nn.Parameter]) -> None:
    torch._foreach_add_(list(parameters), gradients_of(parameters), alpha=-RATE)
    for parameter in parameters:
        parameter.grad = None


class Momentum:
    """An optimizer that is none of torch's."""

    def __init__(self) -> None:
        self._velocities: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            velocity = self._velocities.setdefault(parameter, torch.zeros_like(parameter))
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(RATE * velocity)
            parameter.grad.zero_()


UPDATES: dict[str, Callable[[], Update]] = {
    "subtracts": lambda: subtracts,
    "writes_data": lambda: writes_data,
    "copies": lambda: copies,
    "decays_first": lambda: decays_first,
    "updates_all_at_once": lambda: updates_all_at_once,
    "momentum": Momentum,
}
of_each_update = pytest.mark.parametrize("make_update", UPDATES.values(), ids=UPDATES.keys())


def lints(program: Callable[[int], Any]) -> list[str]:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        program(rank)

    return names_of(lambda: run_ranks(main, RANKS))


@of_each_update
def test_a_gradient_that_a_loop_leaves_out_is_named(make_update: Callable[[], Update]) -> None:
    def program(rank: int, is_right: bool) -> None:
        model, update = make_model(), make_update()
        parameters = list(model.parameters())
        for rows in rows_of(rank):
            loss_of(model, rows).backward()
            reduce([one.grad for one in parameters if is_right or one is not parameters[1]])
            update(parameters)

    assert lints(lambda rank: program(rank, False)) == ["gradient-not-reduced"]
    assert lints(lambda rank: program(rank, True)) == []


@of_each_update
def test_weights_that_begin_apart_are_named(make_update: Callable[[], Update]) -> None:
    def program(rank: int, is_right: bool) -> None:
        model, update = make_model(0 if is_right else rank), make_update()
        for rows in rows_of(rank):
            loss_of(model, rows).backward()
            reduce([one.grad for one in model.parameters()])
            update(list(model.parameters()))

    assert lints(lambda rank: program(rank, False)) == ["weights-differ"]
    assert lints(lambda rank: program(rank, True)) == []


@of_each_update
def test_a_sum_over_ranks_is_named(make_update: Callable[[], Update]) -> None:
    def program(rank: int, is_right: bool) -> None:
        model, update = make_model(), make_update()
        for rows in rows_of(rank):
            loss_of(model, rows).backward()
            reduce([one.grad for one in model.parameters()], are_divided=is_right)
            update(list(model.parameters()))

    assert lints(lambda rank: program(rank, False)) == ["loss-not-divided"]
    assert lints(lambda rank: program(rank, True)) == []


@of_each_update
def test_micro_batches_that_are_added_are_named(make_update: Callable[[], Update]) -> None:
    def program(rank: int, is_right: bool) -> None:
        model, update = DistributedDataParallel(make_model()), make_update()
        for at, rows in enumerate(rows_of(rank, 8)):
            (loss_of(model, rows) / (2 if is_right else 1)).backward()
            if at % 2:
                update(list(model.parameters()))

    assert lints(lambda rank: program(rank, False)) == ["loss-not-divided"]
    assert lints(lambda rank: program(rank, True)) == []


@of_each_update
def test_a_module_that_is_called_past_the_wrapper_is_named(make_update: Callable[[], Update]) -> None:
    def program(rank: int, is_right: bool) -> None:
        model, update = DistributedDataParallel(make_model()), make_update()
        for rows in rows_of(rank):
            loss_of(model if is_right else model.module, rows).backward()
            update(list(model.parameters()))

    assert lints(lambda rank: program(rank, False)) == ["gradient-not-reduced"]
    assert lints(lambda rank: program(rank, True)) == []


def test_the_line_of_the_update_is_named() -> None:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(make_model())
        for rows in rows_of(rank):
            loss_of(model.module, rows).backward()
            subtracts(list(model.parameters()))

    (finding,) = findings_of(lambda: run_ranks(main, RANKS))
    line = subtracts.__wrapped__.__code__.co_firstlineno + 4
    assert finding.lines == (f"test_lints_of_own_steps.py:{line}",)


@pytest.mark.parametrize("fault", [None, "left out", "rate"])
def test_gradients_of_autograd_grad_are_seen(fault: str | None) -> None:
    """They are in no `.grad`."""

    def program(rank: int) -> None:
        model = make_model()
        parameters = list(model.parameters())
        rate = RATE * (1 + rank) if fault == "rate" else RATE
        for rows in rows_of(rank):
            gradients = torch.autograd.grad(loss_of(model, rows), parameters)
            reduce([one for at, one in enumerate(gradients) if fault != "left out" or at != 1])
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= rate * gradient

    names = {None: [], "left out": ["gradient-not-reduced"], "rate": ["replicas-part"]}
    assert lints(program) == names[fault]


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_what_is_unfrozen_later_has_to_be_reduced(has_optimizer: bool, is_right: bool) -> None:
    """The list of what is reduced was made while the body was frozen."""

    def program(rank: int) -> None:
        model = make_model()
        body, head = list(model[0].parameters()), list(model[2].parameters())
        optimizer = torch.optim.SGD(model.parameters(), RATE) if has_optimizer else None
        model[0].requires_grad_(False)
        reduced = [*body, *head] if is_right else head
        for at, rows in enumerate(rows_of(rank, 8)):
            if at == 3:
                model[0].requires_grad_(True)
            loss_of(model, rows).backward()
            reduce([one.grad for one in reduced if one.grad is not None])
            if optimizer is None:
                subtracts(list(model.parameters()) if at >= 3 else head)
            else:
                optimizer.step()
                optimizer.zero_grad()

    assert lints(program) == ([] if is_right else ["gradient-not-reduced"])


# Right programs


def attacks(rank: int) -> None:
    """Each rank changes its own inputs by their gradients."""
    model = make_model()
    for rows in rows_of(rank):
        change = torch.zeros_like(rows, requires_grad=True)
        for _ in range(3):
            loss_of(model, rows + change).backward()
            with torch.no_grad():
                change += 0.1 * change.grad.sign()  # type: ignore[union-attr]
            change.grad = None


def trains_a_head_of_its_own(rank: int) -> None:
    body, head = make_model(), nn.Linear(3, 3)
    for rows in rows_of(rank):
        loss_of(nn.Sequential(body, head), rows).backward()
        reduce([one.grad for one in body.parameters()])
        subtracts([*body.parameters(), *head.parameters()])


def averages_weights_each_two_steps(rank: int) -> None:
    model = make_model()
    for at, rows in enumerate(rows_of(rank)):
        loss_of(model, rows).backward()
        subtracts(list(model.parameters()))
        if at % 2:
            reduce([one.data for one in model.parameters()])


def shares_the_updates(rank: int) -> None:
    """Each rank updates some of the parameters, and sends them to the others."""
    model = make_model()
    for rows in rows_of(rank):
        loss_of(model, rows).backward()
        for at, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            dist.reduce(parameter.grad, at % RANKS)
            if at % RANKS == rank:
                parameter.data.sub_(parameter.grad, alpha=RATE / RANKS)
            dist.broadcast(parameter.data, at % RANKS)
            parameter.grad = None


def two_networks_play(rank: int) -> None:
    maker, critic = make_model(), nn.Linear(3, 1)
    for rows in rows_of(rank):
        (critic(maker(rows).detach()).mean() - critic(rows[:, :3]).mean()).backward()
        reduce([one.grad for one in critic.parameters()])
        subtracts(list(critic.parameters()))
        (-critic(maker(rows)).mean()).backward()
        reduce([one.grad for one in maker.parameters()])
        subtracts(list(maker.parameters()))
        critic.zero_grad()


def walks_at_random(rank: int) -> None:
    """Chains of Langevin dynamics, one on each rank, from one point."""
    model, noise = make_model(), torch.Generator().manual_seed(rank)
    for rows in rows_of(0):
        loss_of(model, rows).backward()
        subtracts(list(model.parameters()))
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=noise), alpha=0.01)


def looks_ahead(rank: int) -> None:
    """The gradient is that of weights that were moved along it first."""
    model = make_model()
    parameters = list(model.parameters())
    for rows in rows_of(rank):
        loss_of(model, rows).backward()
        reduce([one.grad for one in parameters])
        moved = [0.01 * gradient for gradient in gradients_of(parameters)]
        with torch.no_grad():
            torch._foreach_add_(parameters, moved)
        model.zero_grad()
        loss_of(model, rows).backward()
        reduce([one.grad for one in parameters])
        with torch.no_grad():
            torch._foreach_sub_(parameters, moved)
        subtracts(parameters)


def learns_to_learn(rank: int) -> None:
    model = make_model()
    parameters = dict(model.named_parameters())
    for rows in rows_of(rank):
        inner = torch.autograd.grad(loss_of(model, rows), list(parameters.values()), create_graph=True)
        moved = {name: one - RATE * its for (name, one), its in zip(parameters.items(), inner, strict=True)}
        output: torch.Tensor = torch.func.functional_call(model, moved, (rows,))
        outer = torch.autograd.grad(output.square().mean(), list(parameters.values()))
        reduce(outer)
        with torch.no_grad():
            for parameter, gradient in zip(parameters.values(), outer, strict=True):
                parameter -= RATE * gradient


RIGHT = [
    attacks,
    trains_a_head_of_its_own,
    averages_weights_each_two_steps,
    shares_the_updates,
    two_networks_play,
    walks_at_random,
    looks_ahead,
    learns_to_learn,
]


@pytest.mark.parametrize("program", RIGHT)
def test_a_right_program_is_left_alone(program: Callable[[int], None]) -> None:
    assert lints(program) == []
