"""Random programs, each in two processes together, are what they are plainly.

Plainly is in plain PyTorch.
"""

from __future__ import annotations

from collections import Counter

import pytest

from random_programs.trials import Verdict
from random_programs.workers import Task, of_all, together
from workers.cluster import cluster

pytestmark = pytest.mark.slow

AT_ONCE = 6


@pytest.mark.parametrize("first", range(0, 8 * AT_ONCE, AT_ONCE))
def test_random_programs_leave_behind_what_they_leave_in_plain_torch(
    first: int,
) -> None:
    task = Task(range(first, first + AT_ONCE), 0, "", None)
    counts: Counter[Verdict] = Counter()
    for of_processes in zip(*cluster(2).run(together, task), strict=True):
        outcome = of_all([one for _, one in of_processes])
        assert not outcome.is_fault, (
            f"seed {of_processes[0][0]}: {outcome.kind}\n{outcome.said}"
        )
        counts[outcome.verdict] += 1
    assert counts[Verdict.EQUAL] > AT_ONCE // 2, counts
