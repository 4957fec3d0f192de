"""What a step does with gradients is as in plain PyTorch.

It is with a worker's own objects and with copies of them.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

import torchstrategy
from conditions import for_changes, for_releases, some_of
from workers import exact_steps
from workers.cluster import cluster

pytestmark = [
    pytest.mark.slow,
    # torch warns of a graph of gradients that is kept in `.grad`, in plain PyTorch too.
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]


@functools.cache
def of_plain_torch(program: exact_steps.Program) -> list[torch.Tensor]:
    return exact_steps.come_to(torchstrategy.get_strategy(), program)


@for_changes
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=for_releases)])
@pytest.mark.parametrize("size", [1, math.inf], ids=["sent early", "sent in the end"])
def test_steps_compute_the_numbers_of_plain_torch(workers: int, size: float) -> None:
    programs = some_of(exact_steps.PROGRAMS)
    found = cluster(workers).run(exact_steps.of_workers, size, programs)
    wrong = {}
    for program in programs:
        name, expected = program.__name__, of_plain_torch(program)
        most = max(exact_steps.differ(of_worker[name], expected) for of_worker in found)
        if not most < exact_steps.LOOSE.get(name, 1e-12):
            wrong[name] = most
        if any(
            exact_steps.differ(of_worker[name], found[0][name])
            for of_worker in found[1:]
        ):
            wrong[f"{name} in some workers"] = math.inf
    assert wrong == {}


@for_changes
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=for_releases)])
def test_steps_of_copies_compute_the_numbers_of_plain_torch(workers: int) -> None:
    """Some batches have rows for some of a worker's replicas only, or for none."""
    programs = some_of(exact_steps.PROGRAMS)
    first, *others = cluster(workers).run(exact_steps.of_copies, programs)
    wrong = {}
    for program in programs:
        name, expected = program.__name__, of_plain_torch(program)
        if name in first:
            most = exact_steps.differ(first[name], expected)
            apart = max(
                exact_steps.differ(other[name], first[name]) for other in others
            )
            if apart or not most < exact_steps.LOOSE.get(name, 1e-12):
                wrong[name] = most, apart
    assert wrong == {}


@for_changes
def test_a_strategy_over_some_of_the_processes_computes_plain_torchs_numbers() -> None:
    program = exact_steps.cleared_here_and_there
    *found, left_out = cluster(3).run(exact_steps.of_a_part, program)
    assert left_out is None
    assert (
        max(
            exact_steps.differ(of_worker, of_plain_torch(program))
            for of_worker in found
        )
        < 1e-12
    )


@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_the_first_run_a_training_sends_nothing_but_gradients(
    set_to_none: bool,
) -> None:
    for before, first, *others in cluster(2).run(
        exact_steps.messages_of_a_training, set_to_none
    ):
        assert before <= 1  # that of the iteration
        assert first == 2  # that of the model, and that of the first backward
        assert others == [0] * 19
