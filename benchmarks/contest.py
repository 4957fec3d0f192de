"""How contenders are compared: in turns, in one process, in the same round.

Each has its own measure.

A row shows the median of what a contender took, and the median and the middle half of
its ratios: how often that is what the other took in the same round. So a machine that
is busy for a while slows both, and one bad round changes nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

Work = Callable[[], Any]
Measure = Callable[[], float]
"""Takes one measurement: the seconds of a step, as a rule."""

WORKER = "worker"
Amounts = dict[str, float]
"""What each contender took in one round."""

UNITS = {
    "s": 1.0,
    "ms": 1e3,
    "µs": 1e6,
    "B": 1.0,
    "MB": 1e-6,
    "GB/s": 1e-9,
    "waits": 1.0,
}


class Contender(NamedTuple):
    """Who takes part: how it is measured, and what it is compared with.

    It is compared with the largest of those, with a bar for the ratio.

    One that is compared with nothing may have a limit, in seconds or bytes.
    """

    measure: Measure
    against: Sequence[str] = ()
    bar: float | None = None
    limit: float | None = None


class Row(NamedTuple):
    """One line of the table."""

    contest: str
    name: str
    amount: float  # seconds, bytes or bytes a second: the median
    unit: str  # to print it in, one of `UNITS`
    against: str  # what `ratio` is a ratio to; empty: to nothing
    ratio: float
    low: float  # a quarter of the rounds are below
    high: float  # a quarter of the rounds are above
    # That the ratio should not exceed; or the amount, where there is no ratio.
    bar: float | None


def compared(
    contest: str, contenders: dict[str, Contender], rounds: int, unit: str = "ms"
) -> list[Row]:
    """Measures all contenders in every round, each time in another order.

    The first round does not count.

    One round alone shows that everything runs, and its figures mean nothing: nothing is
    warmed up for it.
    """
    if rounds > 1:
        for contender in contenders.values():
            contender.measure()
    # Torch's generators and Python's own are those of the contenders.
    shuffled = random.Random(0)
    orders = [shuffled.sample(list(contenders), len(contenders)) for _ in range(rounds)]
    amounts = [{name: contenders[name].measure() for name in order} for order in orders]
    return rows_of(contest, contenders, amounts, unit)


def rows_of(
    contest: str,
    contenders: dict[str, Contender],
    amounts: Sequence[dict[str, float]],
    unit: str,
) -> list[Row]:
    """The rows of what was measured of each contender in each round."""
    made = []
    for name, (_, against, bar, limit) in contenders.items():
        allowed = bar if against else limit
        ratios = [
            amount[name] / max(amount[other] for other in against or [name])
            for amount in amounts
        ]
        low, middle, high = (
            statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        )
        median = statistics.median(amount[name] for amount in amounts)
        made.append(
            Row(
                contest,
                name,
                median,
                unit,
                " or ".join(against),
                middle,
                low,
                high,
                allowed,
            )
        )
    return made


def timed(
    work: Work, repeats: int, clock: Callable[[], float] = time.thread_time
) -> Measure:
    """The seconds of one call.

    By default it is of this thread's CPU time, which other processes do not touch.
    """

    def measure() -> float:
        began = clock()
        for _ in range(repeats):
            work()
        return (clock() - began) / repeats

    return measure


def clock(device: torch.device) -> Callable[[], float]:
    """A wall clock that waits for what is queued on a device before it is read."""
    module = torch.get_device_module(device)

    def read() -> float:
        module.synchronize()
        return time.perf_counter()

    return read


def in_fresh_processes(
    script: str,
    arguments: Sequence[Any],
    timeout: float = 120,
    before: Sequence[Sequence[str]] | None = None,
) -> list[Any]:
    """What a script's `worker` returns for each argument.

    Each runs in an interpreter of its own, all at the same time.

    A script calls `work` first thing under `__main__`.

    Args:
        script: The script.
        arguments: What each of the workers is given.
        timeout: How many seconds they may take.
        before: The words that stand before each command, as `ip netns exec NAME`. None:
            none do.

    Raises:
        subprocess.TimeoutExpired: If one takes longer. None is left behind.
    """
    words = before or [()] * len(arguments)
    own = [sys.executable, script, WORKER]
    commands = [
        [*first, *own, json.dumps(argument)]
        for first, argument in zip(words, arguments, strict=True)
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        return [
            json.loads(process.communicate(timeout=timeout)[0]) for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def work(worker: Callable[[Any], Any]) -> None:
    """In a process of `in_fresh_processes`: prints what `worker` returns, and ends.

    Elsewhere: nothing.
    """
    if sys.argv[1:2] == [WORKER]:
        print(json.dumps(worker(json.loads(sys.argv[2]))))
        raise SystemExit


def left_out(what: str, why: object) -> None:
    """Says that something cannot be measured here."""
    print(f"{what}: left out, {why}", file=sys.stderr, flush=True)


HEADER = "| | | | times | spread | of | bar |\n|---|---|---:|---:|---:|---|---:|"
# Of what was not measured.
PREDICTED = HEADER.replace("| | | |", "| | | predicted |", 1)


def line(row: Row) -> str:
    """A row in Markdown."""
    scale = UNITS[row.unit]
    amount = f"{row.amount * scale:,.2f} {row.unit}"
    if not row.against:
        bar = "" if row.bar is None else f"{row.bar * scale:,.2f} {row.unit}"
        return f"| {row.contest} | {row.name} | {amount} | | | | {bar} |"
    bar = "" if row.bar is None else f"{row.bar:.2f}"
    times, spread = f"{row.ratio:.3f}", f"{row.low:.3f} to {row.high:.3f}"
    return (
        f"| {row.contest} | {row.name} | {amount} | {times} | {spread} | {row.against} "
        f"| {bar} |"
    )


def machine() -> str:
    """What the figures are of."""
    device = torch.accelerator.current_accelerator(check_available=True)
    name = (
        "no accelerator"
        if device is None
        else torch.get_device_module(device).get_device_name(0)
    )
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {torch.get_num_threads()} thread, {name}"
    )


Contest = Callable[[int], Iterable[Row]]
"""Compares some contenders over as many rounds as it is told."""


def arguments(description: str) -> argparse.ArgumentParser:
    """What every script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds", type=int, default=15, help="how often each contender has its turn"
    )
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    return parser


def hold(
    contests: Sequence[Contest],
    description: str,
    told: argparse.Namespace | None = None,
    header: str = HEADER,
) -> None:
    """What each script does.

    It holds its contests, prints their rows as one table, and writes them if it is told
    to.
    """
    told = told or arguments(description).parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # a collection of all that torch has made would fall on one contender
    print(f"{machine()}\n\n{header}", flush=True)
    rows: list[Row] = []
    for contest in contests:
        for row in contest(told.rounds):
            rows.append(row)
            print(line(row), flush=True)
    if told.json:
        write(told.json, machine(), [row._asdict() for row in rows])


def write(path: Path, where: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes figures, and the machine that they are of."""
    path.write_text(json.dumps({"machine": where, "rows": rows}, indent=1))
