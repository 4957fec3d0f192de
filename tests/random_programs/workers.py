"""What a process does that runs programs, of which there may be several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchstrategy.testing import simulate_devices

from .generation import Generator
from .topologies import WORKERS
from .trials import Outcome, Verdict, judged


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


def together(task: Task) -> list[tuple[int, Outcome]]:
    """What came of each seed in this process.

    The other processes of a group run the same programs with it.
    """
    return done(
        task._replace(
            kinds=[WORKERS],
            without="|".join(filter(None, (task.without, *_NOT_IN_WORKERS))),
        )
    )


_NOT_IN_WORKERS = (
    # A strategy of several processes cannot be used any more after a step that failed.
    "Fail",
    # A gradient that a step assigns is that of the worker's own rows until the update.
    r"Peek\(what='gradients'",
    # A hook of a worker without rows has seen borrowed rows, and what it keeps stays in
    # its worker.
    "LookAtKept",
    # Each backward is an exchange, and a worker with a single row would make one less.
    "micro=2",
    # Nobody can tell a gradient that a step adds in place from clipping: the parameters
    # differ later.
    "way='add'",
    # A gradient lies beside others, in the memory in which they were sent.
    r"WriteGradients\(how='storage'",
)


def of_all(outcomes: Sequence[Outcome]) -> Outcome:
    """What came of one program: the same in all processes, or a fault."""
    if len({outcome.verdict for outcome in outcomes}) == 1:
        return outcomes[0]
    said = "\n".join(
        f"{outcome.verdict.value} {outcome.kind}\n{outcome.said}"
        for outcome in outcomes
    )
    return Outcome(Verdict.FAILED, "the processes came to different ends", said)


def done(task: Task) -> list[tuple[int, Outcome]]:
    """What came of each seed."""
    generator = Generator(task.simulated, task.without, task.kinds)
    return [(seed, judged(generator.program(seed))) for seed in task.seeds]
