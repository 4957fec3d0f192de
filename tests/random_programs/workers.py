"""What a process does that runs programs, of which there may be several."""

from __future__ import annotations

from typing import NamedTuple

from torchstrategy.testing import simulate_devices

from .generation import Generator
from .trials import Outcome, judged


class Task(NamedTuple):
    """Some seeds, and how programs are made of them."""

    seeds: range
    simulated: int
    without: str
    kinds: list[str] | None


def begin(simulated: int) -> None:
    """Done once, in each process."""
    if simulated:
        simulate_devices(simulated)


def done(task: Task) -> list[tuple[int, Outcome]]:
    """What came of each seed."""
    generator = Generator(task.simulated, task.without, task.kinds)
    return [(seed, judged(generator.program(seed))) for seed in task.seeds]
