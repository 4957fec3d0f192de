"""The processes that tests of workers share say how they ended, and end nobody else."""

from __future__ import annotations

import os

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
