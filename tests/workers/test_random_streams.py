"""Four replicas draw the same, whether they are in one process, in two or in four."""

from __future__ import annotations

import pytest
import torch

from conditions import for_changes
from workers import drawing
from workers.cluster import cluster
from workers.trainings import difference

pytestmark = pytest.mark.slow


@for_changes
def test_four_replicas_draw_the_same_in_two_processes() -> None:
    alone = drawing.of_one_process()
    for of_worker in cluster(2).run(drawing.of_workers, 2):
        assert difference(of_worker, alone) < 1e-12
        assert torch.equal(of_worker["noises"], alone["noises"])
        assert torch.equal(of_worker["drawn"], alone["drawn"])
        assert torch.equal(of_worker["after"], alone["after"])
    assert len(set(alone["drawn"].flatten().tolist())) == alone["drawn"].numel()


def test_lone_replicas_draw_other_numbers_and_their_callers_the_same() -> None:
    """Each mask is drawn once.

    What the program draws between runs, and an update, all workers draw alike.
    """
    first, second = cluster(2).run(drawing.of_lone_workers)
    assert torch.equal(first["shared"], second["shared"])
    assert torch.equal(first["weights"], second["weights"])
    drawn = torch.cat([first["own"], second["own"], first["shared"]]).flatten().tolist()
    assert len(set(drawn)) == len(drawn)


def test_workers_of_which_some_draw_follow_worker_0_and_say_so() -> None:
    first, second = cluster(2).run(drawing.of_unlike_draws)
    for warned, _, _ in (first, second):
        assert len(warned) == 1
        assert (
            "worker 0 in 1 run, worker 1 in 3 runs" in warned[0]
            or "worker 0 in 0 runs, worker 1 in 2 runs" in warned[0]
        )
    assert first[1:] == second[1:]


def test_a_run_in_a_run_is_refused() -> None:
    for outcome in cluster(2).outcomes(drawing.of_a_nested_run):
        assert outcome.error is not None
        assert outcome.error.startswith(
            "RuntimeError: strategy.run was called in a merge function"
        )
