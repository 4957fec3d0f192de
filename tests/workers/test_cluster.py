"""The processes that tests of workers share say how they ended, and end nobody else."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from workers.cluster import Cluster

pytestmark = pytest.mark.slow


def test_a_process_that_crashes_says_how() -> None:
    """A process once ended in the middle of a test, and nothing said by what.

    It happened once in thirty runs of the suite.
    """
    one = Cluster(1, joined=False)
    try:
        (outcome,) = one.outcomes(os.abort)
    finally:
        one.end()
    assert outcome.error == "ended"
    assert outcome.trace.startswith("its exit code: -6\nFatal Python error: Aborted")


def test_the_number_of_a_process_that_has_ended_is_not_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system gives the number of a process that has ended to another one.

    After some minutes, that is one of another test.
    """
    one = Cluster(1, joined=False)
    try:
        one.outcomes(os._exit, 3)
    finally:
        killed: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda *args: killed.append(args))
            one.end()
    assert killed == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_whose_child_lives_on_has_ended(tmp_path: Path) -> None:
    """The child has inherited the connection, which ends only when the child does."""
    one = Cluster(1, joined=False)
    number = tmp_path / "child"
    try:
        (outcome,) = one.outcomes(_end_beside_child, number)
    finally:
        one.end()
        os.kill(int(number.read_text()), signal.SIGKILL)
    assert (outcome.error, outcome.trace) == ("ended", "its exit code: 3")


def _end_beside_child(number: Path) -> None:
    child = os.fork()
    if child == 0:
        select.select([], [], [], 120)  # longer than the test, which ends it
        os._exit(0)
    number.write_text(str(child))
    os._exit(3)
