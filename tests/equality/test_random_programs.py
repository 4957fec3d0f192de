"""Random programs: every one is what it is in plain PyTorch.

`python -m tests.random_programs` runs more of them.
"""

from __future__ import annotations

from collections import Counter

import pytest

from conditions import for_changes
from random_programs.generation import Generator
from random_programs.trials import Verdict, judged
from torchstrategy.testing import simulated_devices

AT_ONCE = 25
PROGRAMS = 100 if simulated_devices() else 300  # a simulated device takes its time


@for_changes
@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
def test_random_programs_leave_behind_what_they_leave_in_plain_torch(
    first: int,
) -> None:
    generator = Generator(len(simulated_devices()), most_steps=2)
    counts: Counter[Verdict] = Counter()
    for seed in range(first, first + AT_ONCE):
        program = generator.program(seed)
        outcome = judged(program)
        assert not outcome.is_fault, (
            f"seed {seed}: {outcome.kind}\n{program}\n{outcome.said}"
        )
        counts[outcome.verdict] += 1
    assert counts[Verdict.EQUAL] > AT_ONCE * 3 // 4, counts
