"""Tensors that a step replaces by others, at a place that all replicas share.

If replicas have copies, what several assign is warned of. In turns it is one
assignment, as in plain PyTorch.
"""

from __future__ import annotations

import functools
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
from warned_of import messages_of

WARNING = torchstrategy.SharedWriteWarning
warned = functools.partial(messages_of, WARNING)
running = torch.zeros(())


def in_a_dict() -> Callable[[], torch.Tensor]:
    average = {"weight": torch.zeros(())}

    def assign() -> torch.Tensor:
        average["weight"] = average["weight"] + 1
        return average["weight"]

    return assign


def in_an_inner_list() -> Callable[[], torch.Tensor]:
    average = {"layers": [torch.zeros(()), torch.zeros(())]}

    def assign() -> torch.Tensor:
        average["layers"][1] = average["layers"][1] + 1
        return average["layers"][1]

    return assign


def in_a_queue() -> Callable[[], torch.Tensor]:
    recent = deque([torch.zeros(())])

    def assign() -> torch.Tensor:
        recent[0] = recent[0] + 1
        return recent[0]

    return assign


def in_an_attribute() -> Callable[[], torch.Tensor]:
    state = SimpleNamespace(total=torch.zeros(()))

    def assign() -> torch.Tensor:
        state.total = state.total + 1
        return state.total

    return assign


def by_nonlocal() -> Callable[[], torch.Tensor]:
    total = torch.zeros(())

    def assign() -> torch.Tensor:
        nonlocal total
        total = total + 1
        return total

    return assign


def by_global() -> Callable[[], torch.Tensor]:
    def assign() -> torch.Tensor:
        global running
        running = running + 1
        return running

    return assign


WAYS: dict[str, tuple[Callable[[], Callable[[], torch.Tensor]], str]] = {
    "dict": (in_a_dict, "average['weight']"),
    "inner list": (in_an_inner_list, "average['layers'][1]"),
    "queue": (in_a_queue, "recent[0]"),
    "attribute": (in_an_attribute, "state.total"),
    "nonlocal": (by_nonlocal, "total"),
    "global": (by_global, "running"),
}


@only_with_copies
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_several_replicas_replace_is_warned_of_once(
    several: torchstrategy.Strategy, way: str
) -> None:
    """A moving average decayed once in each replica, and nothing said so.

    It was `average[name] = average[name] * 0.9 + weight * 0.1`.
    """
    make, name = WAYS[way]
    assign = make()
    (text,) = warned(lambda: [several.run(lambda: assign()) for _ in range(4)])
    assert (
        f"{several.num_replicas_in_sync} replicas assigned another tensor to `{name}`"
        in text
    )


@only_in_turns
@pytest.mark.parametrize("way", WAYS)
def test_what_all_replicas_assign_alike_is_one_assignment(
    several: torchstrategy.Strategy, way: str
) -> None:
    make, _ = WAYS[way]
    assign = make()
    before = float(assign())
    assert warned(lambda: [several.run(lambda: assign()) for _ in range(4)]) == []
    assert float(assign()) == before + 5


@only_in_turns
def test_what_replicas_assign_of_their_own_rows_is_one_of_each(
    several: torchstrategy.Strategy,
) -> None:
    """And each replica goes on with its own in the next run."""
    total = {"loss": torch.zeros(())}

    def step() -> None:
        total["loss"] = total["loss"] + replica_id() + 1

    for _ in range(3):
        several.run(step)
    components = several.experimental_local_results(total["loss"])
    count = several.num_replicas_in_sync
    assert [float(one) for one in components] == [3 * r + 3 for r in range(count)]
    mean = several.reduce("mean", total["loss"], axis=None)
    assert float(mean) == pytest.approx(3 * (count + 1) / 2)


def test_an_average_of_weights_in_a_dict(
    in_one_place: torchstrategy.Strategy,
) -> None:
    """In turns it is that of plain PyTorch; copies apply it once in each replica."""
    average = averaged(in_one_place, is_warned_of=not IN_TURNS)
    if IN_TURNS:
        plain = averaged(torchstrategy.get_strategy(), is_warned_of=False)
        for name, value in average.items():
            torch.testing.assert_close(value, plain[name], check_device=False)


def averaged(
    strategy: torchstrategy.Strategy, is_warned_of: bool
) -> dict[str, torch.Tensor]:
    """Trains; gives the moving average of the parameters that the step makes."""
    torch.manual_seed(0)
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model)
    average = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters()
    }

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            average[name] = average[name] * 0.9 + parameter.detach() * 0.1

    batch = deal(strategy, data(9))
    texts = warned(lambda: [strategy.run(step, args=(batch,)) for _ in range(3)])
    if is_warned_of:
        (text,) = texts
        assert "`average['0.weight']`" in text and "and 1 more" in text
    else:
        assert texts == []
    return average


def test_what_one_replica_assigns_is_not_warned_of(
    several: torchstrategy.Strategy,
) -> None:
    kept, other = {"first": torch.zeros(())}, [torch.zeros(())]

    def step() -> None:
        if replica_id() == 0:
            kept["first"] = torch.ones(())
        if replica_id() == 1:
            other[0] = torch.ones(())

    assert warned(lambda: [several.run(step) for _ in range(4)]) == []


def test_what_a_merge_function_assigns_is_not_warned_of(
    several: torchstrategy.Strategy,
) -> None:
    average = {"weight": torch.zeros(())}

    def merge(strategy: torchstrategy.Strategy) -> None:
        average["weight"] = average["weight"] * 0.9 + 1

    def step() -> None:
        context = torchstrategy.get_replica_context()
        assert context is not None and average is not None
        context.merge_call(merge)

    assert warned(lambda: [several.run(step) for _ in range(4)]) == []


def test_attributes_of_a_trainer_are_each_replicas_own(
    several: torchstrategy.Strategy,
) -> None:
    with several.scope():
        model = nn.Linear(3, 2, dtype=torch.float64)

    class Trainer:
        def __init__(self) -> None:
            self.model, self.loss = model, torch.zeros(())

        def step(self, batch: Any) -> None:
            self.loss = mse(self.model, batch).detach()

    trainer = Trainer()
    assert (
        warned(
            lambda: [
                several.run(trainer.step, args=(deal(several, data(9)),))
                for _ in range(4)
            ]
        )
        == []
    )


def test_new_entries_are_not_warned_of(several: torchstrategy.Strategy) -> None:
    """A history grows by what each replica puts there."""
    history: list[torch.Tensor] = [torch.zeros(())]
    by_replica = {0: torch.zeros(())}

    def step() -> None:
        history.append(torch.ones(()))
        by_replica[replica_id()] = torch.ones(())

    assert warned(lambda: [several.run(step) for _ in range(4)]) == []
