"""Lints of programs that update weights and reduce gradients themselves.

They have no optimizer of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conditions import for_changes, for_releases
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


def reduce(
    gradients: Sequence[torch.Tensor | None], *, are_divided: bool = True
) -> None:
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
            velocity = self._velocities.setdefault(
                parameter, torch.zeros_like(parameter)
            )
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(RATE * velocity)
            parameter.grad.zero_()


UPDATES: dict[str, Callable[[], Update]] = {
    "subtracts": lambda: subtracts,
    "writes_data": lambda: writes_data,
    "decays_first": lambda: decays_first,
    "updates_all_at_once": lambda: updates_all_at_once,
    "momentum": Momentum,
}
of_each_update = pytest.mark.parametrize(
    "make_update", UPDATES.values(), ids=UPDATES.keys()
)


def lints(program: Callable[[int], Any]) -> list[str]:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        program(rank)

    return names_of(lambda: run_ranks(main, RANKS))


@for_releases
@of_each_update
def test_a_gradient_that_a_loop_leaves_out_is_named(
    make_update: Callable[[], Update],
) -> None:
    def program(rank: int, is_right: bool) -> None:
        model, update = make_model(), make_update()
        parameters = list(model.parameters())
        for rows in rows_of(rank):
            loss_of(model, rows).backward()
            reduce(
                [one.grad for one in parameters if is_right or one is not parameters[1]]
            )
            update(parameters)

    assert lints(lambda rank: program(rank, False)) == ["gradient-not-reduced"]
    assert lints(lambda rank: program(rank, True)) == []


@for_releases
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
def test_a_module_that_is_called_past_the_wrapper_is_named(
    make_update: Callable[[], Update],
) -> None:
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
            reduce(
                [
                    one
                    for at, one in enumerate(gradients)
                    if fault != "left out" or at != 1
                ]
            )
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= rate * gradient

    names = {None: [], "left out": ["gradient-not-reduced"], "rate": ["replicas-part"]}
    assert lints(program) == names[fault]


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


def trains_a_task_of_its_own(rank: int) -> None:
    """The head has an optimizer of its own, which steps after that of the body."""
    body, head = make_model(), nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(model.parameters(), RATE) for model in (body, head)]
    for rows in rows_of(rank):
        loss_of(nn.Sequential(body, head), rows).backward()
        reduce([one.grad for one in body.parameters()])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


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
            parameter.data.add_(
                torch.randn(parameter.shape, generator=noise), alpha=0.01
            )


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
        inner = torch.autograd.grad(
            loss_of(model, rows), list(parameters.values()), create_graph=True
        )
        moved = {
            name: one - RATE * its
            for (name, one), its in zip(parameters.items(), inner, strict=True)
        }
        output: torch.Tensor = torch.func.functional_call(model, moved, (rows,))
        outer = torch.autograd.grad(output.square().mean(), list(parameters.values()))
        reduce(outer)
        with torch.no_grad():
            for parameter, gradient in zip(parameters.values(), outer, strict=True):
                parameter -= RATE * gradient


def divides_in_the_update(rank: int) -> None:
    """Gradients add up over micro-batches and ranks; they are divided when used."""
    model = make_model()
    for at, rows in enumerate(rows_of(rank, 8)):
        loss_of(model, rows).backward()
        if at % 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter -= RATE / (2 * RANKS) * parameter.grad  # type: ignore[operator]
                    parameter.grad = None


def moves_along_the_gradient_and_back(rank: int) -> None:
    """Sharpness-aware minimization: each rank moves along its own gradient first."""
    model = make_model()
    for rows in rows_of(rank):
        loss_of(model, rows).backward()
        moved = []
        with torch.no_grad():
            for parameter in model.parameters():
                moved.append(0.05 * parameter.grad)  # type: ignore[operator]
                parameter.add_(moved[-1])
                parameter.grad = None
        loss_of(model, rows).backward()
        reduce([one.grad for one in model.parameters()])
        with torch.no_grad():
            for parameter, change in zip(model.parameters(), moved, strict=True):
                parameter.sub_(change)
                parameter.sub_(RATE * parameter.grad)  # type: ignore[operator]
                parameter.grad = None


def looks_at_a_flat_tensor(rank: int) -> None:
    """The mean gradient is compared with those of the ranks.

    Then each gradient is reduced for itself.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        flat = flat_of(gradients_of(list(model.parameters())))
        dist.all_reduce(flat)
        flat /= RANKS
        reduce([one.grad for one in model.parameters()])
        optimizer.step()


def trains_apart_and_looks_at_a_flat_tensor(rank: int) -> None:
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for rows in rows_of(rank):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        dist.all_reduce(flat_of(gradients_of(list(model.parameters()))))
        optimizer.step()


def shows_maps_after_training(rank: int) -> None:
    """The optimizer is gone, and gradients of inputs are asked for.

    An average takes the place of the weights.
    """
    model = make_model()
    average = [one.detach().clone() for one in model.parameters()]

    def trains() -> None:
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for rows in rows_of(rank):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            reduce([one.grad for one in model.parameters()])
            optimizer.step()

    trains()
    for rows in rows_of(rank, 4):
        loss_of(model, rows.requires_grad_()).backward()
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), average, strict=True):
            parameter.copy_(mean)
            parameter.add_(0.0 * mean)


def asks_for_two_gradients(rank: int) -> None:
    """Of one batch, at two points: they are subtracted, and not added."""
    model, other = make_model(), make_model(1)
    parameters, others = list(model.parameters()), list(other.parameters())
    for rows in rows_of(rank):
        first = torch.autograd.grad(loss_of(model, rows), parameters)
        second = torch.autograd.grad(loss_of(other, rows), others)
        changes = [one - 0.5 * two for one, two in zip(first, second, strict=True)]
        reduce(changes)
        with torch.no_grad():
            for parameter, change in zip(parameters, changes, strict=True):
                parameter -= RATE * change


RIGHT = [
    divides_in_the_update,
    moves_along_the_gradient_and_back,
    looks_at_a_flat_tensor,
    trains_apart_and_looks_at_a_flat_tensor,
    shows_maps_after_training,
    asks_for_two_gradients,
    attacks,
    trains_a_head_of_its_own,
    trains_a_task_of_its_own,
    averages_weights_each_two_steps,
    shares_the_updates,
    two_networks_play,
    walks_at_random,
    looks_ahead,
    learns_to_learn,
]


@for_releases
@pytest.mark.parametrize("program", RIGHT)
def test_a_right_program_is_left_alone(program: Callable[[int], None]) -> None:
    assert lints(program) == []


# Gradients that are reduced in one flat tensor


def flat_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def parts_of(
    flat: torch.Tensor, like: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    start = 0
    for one in like:
        yield flat[start : start + one.numel()].view_as(one)
        start += one.numel()


@pytest.mark.parametrize("is_right", [False, True])
def test_weights_that_differ_are_named_where_a_flat_tensor_is_reduced(
    is_right: bool,
) -> None:
    """No gradients have what ranks have in common.

    Neither those of `torch.autograd.grad` do nor any `.grad`.
    """

    def program(rank: int) -> None:
        model = make_model(0 if is_right else rank)
        parameters = list(model.parameters())
        for rows in rows_of(rank):
            flat = flat_of(torch.autograd.grad(loss_of(model, rows), parameters))
            dist.all_reduce(flat)
            flat /= RANKS
            with torch.no_grad():
                for parameter, gradient in zip(
                    parameters, parts_of(flat, parameters), strict=True
                ):
                    parameter.sub_(RATE * gradient)

    assert lints(program) == ([] if is_right else ["weights-differ"])


@for_changes
@pytest.mark.parametrize(
    ("of_loss", "of_flat", "names"),
    [
        (2, RANKS, []),
        (1, RANKS * 2, []),
        (2, RANKS * 2, ["loss-divided-twice"]),
        (1, RANKS, []),  # the update may divide
        (2, 1, []),
    ],
)
@pytest.mark.parametrize("is_divided_first", [False, True])
def test_a_flat_tensor_is_divided(
    of_loss: int, of_flat: int, names: list[str], is_divided_first: bool
) -> None:
    """Two micro-batches on two ranks.

    What the flat tensor is divided by counts as a divisor of the gradients.
    """

    def program(rank: int) -> None:
        model = make_model()
        parameters = list(model.parameters())
        for at, rows in enumerate(rows_of(rank, 8)):
            (loss_of(model, rows) / of_loss).backward()
            if not at % 2:
                continue
            flat = flat_of(gradients_of(parameters))
            if is_divided_first:
                flat.div_(of_flat)
            dist.all_reduce(flat)
            if not is_divided_first:
                flat.div_(of_flat)
            with torch.no_grad():
                for parameter, gradient in zip(
                    parameters, parts_of(flat, parameters), strict=True
                ):
                    parameter.sub_(RATE * gradient)
                    parameter.grad = None

    assert lints(program) == names


@for_changes
@pytest.mark.parametrize("of_loss", [1, 2])
@pytest.mark.parametrize("of_gradient", [1, 2, 4])
def test_micro_batches_and_a_sum_over_ranks(of_loss: int, of_gradient: int) -> None:
    """With as many ranks as micro-batches, a right program was said to divide twice."""

    def program(rank: int) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for at, rows in enumerate(rows_of(rank, 8)):
            (loss_of(model, rows) / of_loss).backward()
            if at % 2:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= of_gradient  # type: ignore[operator]
                optimizer.step()
                optimizer.zero_grad()

    share = of_loss * of_gradient  # of the four losses
    names = {
        1: ["loss-not-divided"],
        2: ["loss-not-divided"],
        4: [],
        8: ["loss-divided-twice"],
    }
    assert lints(program) == names[share]


@pytest.mark.parametrize("is_right", [False, True])
def test_means_over_other_numbers_that_are_divided_by_the_ranks(is_right: bool) -> None:
    """Each rank has other numbers of labelled rows.

    Its loss is divided by the ranks before gradients are added.
    """

    def program(rank: int) -> None:
        model, labelled = make_model(), 4 + 8 * rank
        parameters = list(model.parameters())
        total = torch.tensor(float(labelled))
        dist.all_reduce(total)
        for rows in rows_of(rank):
            outputs, targets = (
                model(rows[:labelled]),
                torch.zeros(labelled, dtype=torch.long),
            )
            if is_right:
                loss = (
                    nn.functional.cross_entropy(outputs, targets, reduction="sum")
                    / total
                )
            else:
                loss = nn.functional.cross_entropy(outputs, targets) / RANKS
            gradients = torch.autograd.grad(loss, parameters)
            reduce(gradients, are_divided=False)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= RATE * gradient

    assert lints(program) == ([] if is_right else ["mean-of-means"])


@for_releases
@pytest.mark.parametrize("is_right", [False, True])
def test_a_second_job_whose_state_one_rank_alone_has_loaded(is_right: bool) -> None:
    """It broadcasts its weights after the steps of the first job.

    That is no averaging of its own weights.
    """

    def trains(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for rows in rows_of(rank, 8):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            reduce([one.grad for one in model.parameters()])
            optimizer.step()

    def program(rank: int) -> None:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), RATE)
        trains(model, optimizer, rank)
        states = model.state_dict(), optimizer.state_dict()
        model = make_model(1)
        optimizer = torch.optim.Adam(model.parameters(), RATE)
        if rank == 0 or is_right:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        trains(model, optimizer, rank)

    assert lints(program) == ([] if is_right else ["replicas-part"])


# Copies of parameters


class Prompt(nn.Module):
    def __init__(self, is_copied_once: bool) -> None:
        super().__init__()
        self.prompt = nn.Parameter(
            torch.randn(4, generator=torch.Generator().manual_seed(0))
        )
        self.copy = self.prompt.to(torch.float64).float() if is_copied_once else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + (self.prompt.clone() if self.copy is None else self.copy)


@pytest.mark.parametrize("is_copied_once", [False, True])
def test_a_copy_of_a_parameter_that_is_made_once_is_named(is_copied_once: bool) -> None:
    """Its gradient comes to the parameter in each step.

    The loss never sees what the optimizer writes.
    """

    def program() -> None:
        model = Prompt(is_copied_once)
        optimizer = torch.optim.SGD([model.prompt], 0.1)
        for rows in rows_of(0):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()

    assert names_of(program) == (["copied-before-the-step"] if is_copied_once else [])


def test_views_that_are_made_once_are_no_copies() -> None:
    def program() -> None:
        weight = nn.Parameter(torch.randn(3, 4))
        # Changes with the parameter.
        shown = weight.view(-1)[2:].narrow(0, 0, 8).view(2, 4)
        optimizer = torch.optim.SGD([weight], 0.1)
        for rows in rows_of(0):
            optimizer.zero_grad()
            (rows + shown.sum()).square().mean().backward()
            optimizer.step()

    assert names_of(program) == []


# Rows that are taken by their numbers


@for_changes
@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("selects", [False, True])
def test_parts_of_an_order_that_each_rank_draws_itself(
    is_right: bool, selects: bool
) -> None:
    """The rows have one number each, which two rows may have in common."""
    table = torch.arange(512) % 40

    def program(rank: int) -> None:
        model = DistributedDataParallel(nn.Embedding(40, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(rank)
        order = torch.Generator().manual_seed(7 if is_right else rank)
        for _ in range(2):
            mine = torch.randperm(len(table), generator=order)[rank::RANKS]
            for numbers in mine.split(16):
                rows = table.index_select(0, numbers) if selects else table[numbers]
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()

    assert lints(program) == ([] if is_right else ["same-rows"])


@for_releases
@pytest.mark.parametrize("memory", ["each its own", "drawn again"])
def test_rows_of_a_memory_that_are_drawn_at_random_are_left_alone(memory: str) -> None:
    def program(rank: int) -> None:
        model = DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        own = torch.Generator().manual_seed(rank)
        kept = torch.randn(
            2000,
            4,
            generator=own
            if memory == "each its own"
            else torch.Generator().manual_seed(0),
        )
        for _ in range(60):
            numbers = torch.randint(len(kept), (16,), generator=own)
            optimizer.zero_grad()
            model(kept[numbers]).square().mean().backward()
            optimizer.step()

    assert lints(program) == []


# Rows of two views, beside those of all ranks


class Gather(torch.autograd.Function):
    is_right = True

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [torch.empty_like(rows) for _ in range(RANKS)]
        dist.all_gather(found, rows.contiguous())
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        together = torch.stack(gradients)
        dist.all_reduce(together)
        return together[dist.get_rank()]


class Slice(Gather):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[dist.get_rank()].clone()


@pytest.mark.parametrize("gather", [Gather, Slice])
@pytest.mark.parametrize("are_both", [False, True])
def test_rows_of_two_views_are_compared_with_those_of_all_ranks(
    gather: Any, are_both: bool
) -> None:
    """Those of one view, or of both beside each other, as SimCLR has them."""

    def program(rank: int) -> None:
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for rows in rows_of(rank):
            first, second = model(torch.cat([rows, rows + 0.1])).split(len(rows))
            keys = torch.cat(
                [torch.cat(gather.apply(first)), torch.cat(gather.apply(second))]
            )
            targets = torch.arange(len(rows)) + (RANKS + rank) * len(rows)
            anchors = first
            if are_both:
                anchors, targets = (
                    torch.cat([first, second]),
                    torch.cat([targets, targets - RANKS * len(rows)]),
                )
            optimizer.zero_grad()
            nn.functional.cross_entropy(anchors @ keys.T, targets).backward()
            optimizer.step()

    assert lints(program) == ([] if gather is Gather else ["gradient-not-sent-back"])


@pytest.mark.parametrize("is_right", [False, True])
def test_sums_of_micro_batches_that_are_divided_by_the_tokens_of_all_ranks(
    is_right: bool,
) -> None:
    def program(rank: int) -> None:
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        batches = list(rows_of(rank, 8))
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            masks = [batch[:, 0] > -0.5 for batch in (first, second)]
            count = sum(mask.sum() for mask in masks).float()  # type: ignore[union-attr]
            dist.all_reduce(count)
            for at, (batch, mask) in enumerate(
                zip((first, second), masks, strict=True)
            ):
                model.require_backward_grad_sync = at == 1
                targets = torch.where(mask, 1, -100)
                total = nn.functional.cross_entropy(
                    model(batch), targets, reduction="sum"
                )
                (total * RANKS / count if is_right else total / count).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert lints(program) == ([] if is_right else ["loss-divided-twice"])


@for_releases
def test_gradients_that_are_reduced_among_one_group_after_another() -> None:
    """Two by two, and then across: a mean over four ranks."""

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for rows in rows_of(rank):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=groups[rank // 2])
                dist.all_reduce(parameter.grad, group=groups[2 + rank % 2])
                parameter.grad /= 4  # type: ignore[operator]
            optimizer.step()

    assert names_of(lambda: run_ranks(main, 4)) == []
