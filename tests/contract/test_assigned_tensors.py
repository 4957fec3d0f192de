"""Tensors that a step replaces by others, at a place that all replicas share.

What several assign is warned of.
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
from problems import data, deal, mlp, mse, replica_id, sgd
from warned_of import messages_of

WARNING = torchstrategy.SharedWriteWarning
warned = functools.partial(messages_of, WARNING)
running = torch.zeros(())


def in_a_dict() -> Callable[[], None]:
    average = {"weight": torch.zeros(())}

    def assign() -> None:
        average["weight"] = torch.ones(())

    return assign


def in_an_inner_list() -> Callable[[], None]:
    average = {"layers": [torch.zeros(()), torch.zeros(())]}

    def assign() -> None:
        average["layers"][1] = torch.ones(())

    return assign


def in_a_queue() -> Callable[[], None]:
    recent = deque([torch.zeros(())])

    def assign() -> None:
        recent[0] = torch.ones(())

    return assign


def in_an_attribute() -> Callable[[], None]:
    state = SimpleNamespace(total=torch.zeros(()))

    def assign() -> None:
        state.total = torch.ones(())

    return assign


def by_nonlocal() -> Callable[[], None]:
    total = torch.zeros(())

    def assign() -> None:
        nonlocal total
        total = torch.ones(())

    return assign


def by_global() -> Callable[[], None]:
    def assign() -> None:
        global running
        running = torch.ones(())

    return assign


WAYS: dict[str, tuple[Callable[[], Callable[[], None]], str]] = {
    "dict": (in_a_dict, "average['weight']"),
    "inner list": (in_an_inner_list, "average['layers'][1]"),
    "queue": (in_a_queue, "recent[0]"),
    "attribute": (in_an_attribute, "state.total"),
    "nonlocal": (by_nonlocal, "total"),
    "global": (by_global, "running"),
}


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


def test_an_average_of_weights_in_a_dict_is_warned_of(
    in_one_place: torchstrategy.Strategy,
) -> None:
    with in_one_place.scope():
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

    batch = deal(in_one_place, data(9))
    (text,) = warned(lambda: [in_one_place.run(step, args=(batch,)) for _ in range(3)])
    assert "`average['0.weight']`" in text and "and 1 more" in text


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
