"""Tensors that no replica has of its own.

If replicas have copies of the rest, several replicas that write on one are warned of,
and nobody else is. In turns, what all replicas write alike is one write, as in plain
PyTorch.
"""

from __future__ import annotations

import copy
import functools
import re
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from conditions import only_in_turns, only_with_copies
from problems import data, deal, mlp, mse, replica_id, sgd
from torchstrategy._turns.switch import IN_TURNS
from torchstrategy.testing import Lockstep
from warned_of import messages_of

Warned = Callable[..., list[str]]
WARNING = torchstrategy.SharedWriteWarning
warned = functools.partial(messages_of, WARNING)


def context() -> torchstrategy.ReplicaContext:
    found = torchstrategy.get_replica_context()
    assert found is not None
    return found


class Meter:
    """An object of the user's."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total
        self.inner = SimpleNamespace(sums={"loss": total.clone()})

    def update(self) -> None:
        self.total += 1

    def update_inside(self) -> None:
        self.inner.sums["loss"].add_(1)

    def __call__(self) -> None:
        self.total.mul_(0.5)


def by_default(total: torch.Tensor) -> Callable[[], Any]:
    def write(held: torch.Tensor = total) -> None:
        held.add_(1)

    return write


def by_container(total: torch.Tensor) -> Callable[[], Any]:
    shadow = {"layers": [{"w": total}]}
    return lambda: shadow["layers"][0]["w"].mul_(0.9)


def by_class(total: torch.Tensor) -> Callable[[], Any]:
    class Stats:
        sums = total

    return lambda: Stats.sums.add_(1)


def by_class_of_an_object(total: torch.Tensor) -> Callable[[], Any]:
    class Stats:
        sums = total

    stats = Stats()
    return lambda: stats.sums.add_(1)


def by_queue(total: torch.Tensor) -> Callable[[], Any]:
    recent = deque([total])
    return lambda: recent[0].add_(1)


def by_function(total: torch.Tensor) -> Callable[[], Any]:
    def inner() -> None:
        total[0] = 5.0

    return lambda: inner()


WAYS: dict[str, tuple[Callable[[torch.Tensor], Callable[[], Any]], str]] = {
    "closure": (lambda total: lambda: total.add_(1), "total"),
    "out": (lambda total: lambda: torch.add(total, 1, out=total), "total"),
    "container": (by_container, "shadow['layers'][0]['w']"),
    "class": (by_class, "Stats.sums"),
    "class of an object": (by_class_of_an_object, "stats.sums"),
    "queue": (by_queue, "recent[0]"),
    "default": (by_default, "a default argument"),
    "function": (by_function, "total"),
    "partial": (
        lambda total: functools.partial(torch.Tensor.add_, total, 1),
        "an argument of functools.partial",
    ),
    "method": (lambda total: Meter(total).update, "self.total"),
    "attribute": (
        lambda total: Meter(total.clone()).update_inside,
        "self.inner.sums['loss']",
    ),
    "callable": (lambda total: Meter(total), "note.total"),
    "data": (lambda total: lambda: total.data.add_(1), "total"),
    "numpy": (lambda total: lambda: total.numpy().__iadd__(1), "total"),
}


@only_with_copies
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_several_replicas_write_is_warned_of_once(
    several: torchstrategy.Strategy, way: str
) -> None:
    """`total.add_(loss)` in n replicas adds n losses, and nothing said so."""
    total = torch.zeros(2)
    make, name = WAYS[way]
    note = make(total)

    (text,) = warned(lambda: [several.run(lambda: [note(), None][1]) for _ in range(4)])
    assert f"{several.num_replicas_in_sync} replicas wrote in place on `{name}`" in text


@only_with_copies
def test_the_warning_is_at_the_users_line(in_one_place: torchstrategy.Strategy) -> None:
    total = torch.zeros(())
    with pytest.warns(WARNING, match="torchstrategy.Variable") as caught:
        in_one_place.run(lambda: total.add_(1) and None)
    assert caught[0].filename == __file__


@only_with_copies
def test_each_tensor_is_warned_of(in_one_place: torchstrategy.Strategy) -> None:
    one, two = torch.zeros(()), torch.zeros(())
    is_late = [False]

    def step() -> None:
        one.add_(1)
        if is_late[0]:
            two.add_(1)

    (first,) = warned(lambda: in_one_place.run(step))
    is_late[0] = True
    (second,) = warned(lambda: in_one_place.run(step))
    assert (
        "`one`" in first,
        "`two`" in first,
        "`one`" in second,
        "`two`" in second,
    ) == (True, False, False, True)
    new = torch.zeros(())
    (third,) = warned(lambda: in_one_place.run(lambda: new.add_(1)))
    assert "`new`" in third


@only_with_copies
def test_a_plain_argument_is_one_for_all_replicas(
    several: torchstrategy.Strategy,
) -> None:
    total = torch.zeros(())
    (text,) = warned(
        lambda: several.run(lambda held: held.add_(1) and None, args=(total,))
    )
    assert "`an argument`" in text


@only_with_copies
def test_what_begins_late_is_found(several: torchstrategy.Strategy) -> None:
    """An average that begins after a warm-up.

    On several devices it takes one run more to know who wrote.
    """
    average, steps = torch.zeros(()), [0]

    def step() -> None:
        if steps[0] > 5:
            average.mul_(0.5).add_(1)

    def train() -> None:
        for _ in range(8):
            several.run(step)
            steps[0] += 1

    (text,) = warned(train)
    assert "`average`" in text


# In turns


def in_plain_torch(note: Callable[[], Any]) -> None:
    for _ in range(4):
        note()


@only_in_turns
@pytest.mark.parametrize("way", WAYS)
def test_what_all_replicas_write_alike_is_one_write(
    several: torchstrategy.Strategy, way: str
) -> None:
    total, plain = torch.ones(2), torch.ones(2)
    note, plain_note = (WAYS[way][0](held) for held in (total, plain))

    assert (
        warned(lambda: [several.run(lambda: [note(), None][1]) for _ in range(4)]) == []
    )
    in_plain_torch(plain_note)
    if way == "attribute":
        total, plain = (one.__self__.inner.sums["loss"] for one in (note, plain_note))
    assert float(plain[0]) != 1 and torch.equal(total, plain)


@only_in_turns
@pytest.mark.parametrize("kind", ["argument", "transposed", "late"])
def test_so_it_is_for_each_kind_of_tensor(
    several: torchstrategy.Strategy, kind: str
) -> None:
    whole = total = torch.zeros(3, 4)
    if kind == "transposed":
        total = total.t()
    steps = [0]

    def step(held: torch.Tensor) -> None:
        if kind != "late" or steps[0] > 1:
            (held if kind == "argument" else total).add_(1)

    def train() -> None:
        for _ in range(4):
            several.run(step, args=(whole,))
            steps[0] += 1

    assert warned(train) == []
    assert torch.equal(whole, torch.full((3, 4), 2.0 if kind == "late" else 4.0))


@only_in_turns
def test_numbers_that_replicas_write_in_the_same_place_are_the_first_ones(
    several: torchstrategy.Strategy,
) -> None:
    """Such as hits.add_(hits_in_these_rows): their sum is no mean, nor the reverse."""
    hits = torch.zeros(2)

    def step() -> None:
        hits.add_(replica_id() + 1)

    with pytest.warns(torchstrategy.ReplicaBufferWarning, match="hits"):
        several.run(step)
    assert hits.tolist() == [1, 1]


@only_in_turns
def test_numbers_that_replicas_write_in_places_of_their_own_are_all_kept(
    several: torchstrategy.Strategy,
) -> None:
    count = several.num_replicas_in_sync
    bank = torch.zeros(count + 1)

    def step() -> None:
        bank[replica_id()] = replica_id() + 1.0

    assert warned(lambda: several.run(step)) == []
    assert bank.tolist() == [*range(1, count + 1), 0]


def averaging_model(strategy: torchstrategy.Strategy) -> tuple[nn.Module, Any]:
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model)
    return model, optimizer


@pytest.mark.parametrize("how", ["parameters", "buffers", "attributes"])
def test_a_model_that_is_averaged_through_data(
    several: torchstrategy.Strategy, how: str
) -> None:
    """Writes through `.data` count no version.

    So an averaged model decayed n times in each step, silently. In turns it is that of
    plain PyTorch.
    """
    average, texts = averaged_through_data(several, how)
    if IN_TURNS:
        plain, _ = averaged_through_data(torchstrategy.get_strategy(), how)
        for mine, theirs in zip(average, plain, strict=True):
            torch.testing.assert_close(mine, theirs, check_device=False)
        assert texts == []
        return
    path = {
        "parameters": "average.0.weight",
        "buffers": "average.0_weight",
        "attributes": "average.shadow['0_weight']",
    }
    (text,) = texts
    assert f"`{path[how]}`" in text
    assert "and 1 more" in text


def averaged_through_data(
    strategy: torchstrategy.Strategy, how: str
) -> tuple[list[torch.Tensor], list[str]]:
    """Trains; gives the averages that the step makes, and what was warned of."""
    torch.manual_seed(0)
    model, optimizer = averaging_model(strategy)
    average = copy.deepcopy(model).cpu()
    if how != "parameters":
        holder = nn.Module()
        shadow = {
            name.replace(".", "_"): p.detach().clone()
            for name, p in average.named_parameters()
        }
        if how == "buffers":
            for name, value in shadow.items():
                holder.register_buffer(name, value)
        else:
            holder.shadow = shadow  # type: ignore[assignment]
        average = holder

    def tensors() -> list[torch.Tensor]:
        held = {"parameters": average.parameters, "buffers": average.buffers}.get(how)
        return list(average.shadow.values() if held is None else held())  # type: ignore[operator, union-attr]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        for mine, theirs in zip(tensors(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data.cpu(), alpha=0.1)

    batch = deal(strategy, data(9))
    texts = warned(lambda: [strategy.run(step, args=(batch,)) for _ in range(3)])
    return [tensor.detach() for tensor in tensors()], texts


# What is not warned of


def test_one_writer_is_not_warned_of(several: torchstrategy.Strategy) -> None:
    average, other, numbers = torch.zeros(()), torch.zeros(()), torch.zeros(3)

    def step() -> None:
        if replica_id() == 0:
            average.mul_(0.9).add_(1)
            numbers.data.add_(1)
        if replica_id() == 1:
            other.add_(1)
            other.add_(1)

    assert warned(lambda: [several.run(step) for _ in range(4)]) == []


def test_merge_functions_and_hooks_of_updates_are_not_warned_of(
    several: torchstrategy.Strategy,
) -> None:
    model, optimizer = averaging_model(several)
    merged, hooked = torch.zeros(()), torch.zeros(())
    average = copy.deepcopy(model)
    optimizer.register_step_post_hook(lambda *_: hooked.add_(1))

    def merge(strategy: torchstrategy.Strategy) -> None:
        merged.add_(1)
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        context().merge_call(merge)
        assert float(merged) and float(hooked) and average is not None

    batch = deal(several, data(9))
    assert warned(lambda: [several.run(step, args=(batch,)) for _ in range(4)]) == []
    assert (float(merged), float(hooked)) == (4, 4)


def test_an_ordinary_step_is_not_warned_of(several: torchstrategy.Strategy) -> None:
    """It reads tensors, replaces attributes, and writes buffers and gradients.

    It holds views of what others write.
    """
    with several.scope():
        model = nn.Sequential(
            nn.Linear(3, 2, dtype=torch.float64), nn.BatchNorm1d(2, dtype=torch.float64)
        )
        optimizer = torch.optim.Adam(model.parameters())
        seen = torchstrategy.Variable(
            0.0, aggregation=torchstrategy.VariableAggregation.SUM
        )
        held = {"weight": model[0].weight.data, "bias": model[0].bias.detach()}
        statistics = [model[1].running_mean, model[1].running_var]
    weights, history = torch.ones(2, dtype=torch.float64), []
    teacher = copy.deepcopy(model).eval()
    gradients: list[Any] = []

    class Trainer:
        def __init__(self) -> None:
            self.model, self.total = model, torch.zeros(())

        def step(self, batch: Any) -> None:
            losses = (model(batch[0]) - batch[1]).square() * weights.to(batch[0].device)
            losses.mean().backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
            batch[0].add_(1)
            optimizer.step()
            self.total = self.total + 1
            seen.assign_add(torch.tensor(1.0))
            history.append(losses.detach())
            assert held and statistics and teacher is not None and gradients is not None

    trainer = Trainer()
    for _ in range(4):
        batch = deal(several, data(9))
        assert warned(lambda: several.run(trainer.step, args=(batch,))) == []  # noqa: B023
        gradients[:] = [parameter.grad for parameter in model.parameters()]


def test_a_lone_replica_is_not_warned_of(strategy: torchstrategy.Strategy) -> None:
    if strategy.num_replicas_in_sync == 1:
        total = torch.zeros(())
        assert warned(lambda: strategy.run(lambda: total.add_(1) and None)) == []


def test_a_replica_whose_rows_are_all_there_are_is_alone(
    several: torchstrategy.Strategy,
) -> None:
    total = torch.zeros(())
    batch = deal(several, data(1))
    assert (
        warned(lambda: several.run(lambda batch: total.add_(1) and None, args=(batch,)))
        == []
    )
    assert float(total) == 1


@only_with_copies
def test_an_inference_tensor_is_looked_at_by_its_numbers(
    several: torchstrategy.Strategy,
) -> None:
    with torch.inference_mode():
        total = torch.zeros(3)

    def step() -> None:
        with torch.inference_mode():
            total.add_(1)

    (text,) = warned(lambda: several.run(step))
    assert "`total`" in text


@only_with_copies
def test_numbers_in_strides_are_read(in_one_place: torchstrategy.Strategy) -> None:
    """What lies between the numbers of a view is not its own."""
    matrix = torch.zeros(3, 4)
    turned, column, empty = matrix.t(), torch.zeros(3, 4)[:, 1], torch.zeros(0)

    def step() -> None:
        turned.data.add_(1)
        assert column is not None and empty is not None

    (text,) = warned(lambda: in_one_place.run(step))
    assert re.search("on `turned`:", text)


@only_with_copies
def test_turns_change_nothing(several: torchstrategy.Strategy) -> None:
    """The first run with such a tensor is taken in turns on all devices.

    Somebody else may give the turns.
    """
    total = torch.zeros(())
    with Lockstep([1, 0]) as lockstep:
        (text,) = warned(lambda: several.run(lambda: total.add_(1) and None))
    assert lockstep.history[0] == (1, "start")
    assert "`total`" in text


@only_in_turns
def test_a_write_on_an_inference_tensor_is_refused_and_taken_back(
    several: torchstrategy.Strategy,
) -> None:
    with torch.inference_mode():
        total = torch.zeros(3)

    def step() -> None:
        with torch.inference_mode():
            total.add_(1)

    with pytest.raises(RuntimeError, match="total was written in place in a replica"):
        several.run(step)
    assert not total.any()
