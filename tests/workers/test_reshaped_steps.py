"""What a worker with one replica was once wrong about in silence.

Each is right now, or is refused by name.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

import torchstrategy
from conditions import for_changes, for_releases
from workers import reshaped_steps
from workers.cluster import cluster
from workers.exact_steps import Program, come_to, differ

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
]


@functools.cache
def of_plain_torch(program: Program) -> list[torch.Tensor]:
    return come_to(torchstrategy.get_strategy(), program)


@for_changes
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("size", [1, math.inf], ids=["sent early", "sent in the end"])
def test_objects_that_change_between_runs_are_those_of_plain_torch(
    workers: int, size: float
) -> None:
    found = cluster(workers).run(reshaped_steps.of_workers, size)
    wrong = {}
    for program in reshaped_steps.PROGRAMS:
        name, expected = program.__name__, of_plain_torch(program)
        most = max(differ(of_worker[name], expected) for of_worker in found)
        if not most < 1e-12:
            wrong[name] = most
    assert wrong == {}


@pytest.mark.parametrize(
    ("workers", "replicas"), [(2, 1), (2, 2), pytest.param(3, 1, marks=for_releases)]
)
def test_running_statistics_are_averaged_where_gradients_are_added_up(
    workers: int, replicas: int
) -> None:
    """They were added up, too."""
    for found in cluster(workers).run(reshaped_steps.statistics_of_a_sum, replicas):
        torch.testing.assert_close(found, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "no object of the scope",
            (
                "SGD.step() was called in a replica, and it updates a parameter of "
                "shape (8, 4)"
            ),
        ),
        (
            "an update by hand",
            (
                "Sequential.0.weight has other numbers in worker 1 than in worker 0. "
                "Only some workers"
            ),
        ),
        (
            "a layer of forward",
            "Linear.weight has other numbers in worker 1 than in worker 0",
        ),
        ("a hook on several", "register_multi_grad_hook was given a parameter"),
        (
            "a sparse buffer",
            "Net.edges is a sparse buffer, and the step has written it",
        ),
        ("a copy of its own", "nothing"),
    ],
)
def test_what_each_worker_would_do_for_itself_is_refused(what: str, told: str) -> None:
    """All but the last: a step may train a copy that it makes.

    The inner loop of MAML does.
    """
    for message in cluster(2).run(reshaped_steps.told_of, what):
        assert message.startswith(told), message


def test_a_step_that_is_called_without_run_is_warned_of() -> None:
    for warned in cluster(2).run(reshaped_steps.warned_of_a_step_by_itself):
        assert len(warned) == 1
        assert warned[0].startswith(
            "SGD.step() was called outside of strategy.run, with gradients that no run"
        )
