"""A worker that fails is named by all others, and nothing is left of the training.

How soon they hear of it, `python -m tests.workers.faults` says; a test on a busy
machine has time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conditions import for_changes, for_releases
from workers import failing, faults
from workers.cluster import cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@for_changes
@pytest.mark.parametrize("name", faults.FAULTS)
def test_the_others_hear_who_failed_and_why(name: str) -> None:
    """Once, tensors of different shapes in `all_reduce` hung for 80 seconds.

    Workers brought them.
    """
    found = faults.run(faults.FAULTS[name])
    assert (found.unnamed, found.left) == ([], [])
    # No timeout of torch has passed, and nobody waits for ever: those are of minutes.
    assert found.heard < faults.FAULTS[name].heard_after + 60
    assert found.ended < found.heard + 60


@pytest.mark.skipif(
    sys.platform != "linux", reason="what is left is looked for in /proc"
)
@for_releases
def test_at_random_moments_the_others_hear_who_is_lost() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.workers.random_faults",
        "--runs",
        "4",
        "--seed",
        "1",
        "--slack",
        "30",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_strategy_that_failed_is_not_used_again() -> None:
    for first, second, total in cluster(2).run(failing.after_failure):
        assert "KeyError" in first or "WorkerError: worker" in first
        assert (
            second.startswith("WorkerError: ")
            and "the strategy cannot be used any more" in second
        )
        assert total == "2.0"


@for_changes
def test_the_others_hear_of_an_interrupt_where_an_epoch_begins() -> None:
    """They heard of it 5 s later.

    Torch waited so long for a worker of the loader, before this worker left.
    """
    first, second = cluster(2).run(failing.interrupted_where_an_epoch_begins)
    assert first == "KeyboardInterrupt: "
    assert "worker 0 of 2" in second and "failed: KeyboardInterrupt" in second
