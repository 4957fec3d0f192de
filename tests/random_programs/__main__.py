"""The command: `python -m tests.random_programs --help`."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from .generation import Generator
from .programs import parsed
from .shrinking import shrunk
from .trials import Outcome, Verdict, judged
from .workers import Task, begin, done, of_all, together


def main() -> int:
    """Runs programs; 0 if none is different and none fails unexpectedly.

    A documented refusal is expected.
    """
    options = _options()
    if options.replay:
        begin(options.simulate_devices)
        outcome = judged(parsed(options.replay.read_text()))
        print(f"{outcome.verdict.value}: {outcome.kind}\n{outcome.said}")
        return int(outcome.is_fault)
    counts: Counter[Verdict] = Counter()
    kinds: Counter[tuple[Verdict, str]] = Counter()
    examples: dict[tuple[Verdict, str], int] = {}
    began = time.perf_counter()
    for seed, outcome in _outcomes(options):
        counts[outcome.verdict] += 1
        kinds[outcome.verdict, outcome.kind] += 1
        examples.setdefault((outcome.verdict, outcome.kind), seed)
        if outcome.is_fault and kinds[outcome.verdict, outcome.kind] == 1:
            print(f"seed {seed}: {outcome.verdict.value}: {outcome.kind}", flush=True)
            if options.workers:  # a shorter program is looked for in one process only
                print(outcome.said, flush=True)
    took = time.perf_counter() - began
    print(f"\n{options.count} programs from seed {options.seed} in {took:.0f} s")
    for verdict in Verdict:
        print(f"{counts[verdict]:8d} {verdict.value}")
        for (of, kind), count in kinds.most_common():
            if of is verdict and kind:
                print(f"{'':8s} {count:6d} {kind}  (seed {examples[of, kind]})")
    for (verdict, _), seed in examples.items():
        if (
            verdict in (Verdict.DIFFERENT, Verdict.FAILED)
            and options.shrink
            and not options.workers
        ):
            _show(seed, options)
    return int(counts[Verdict.DIFFERENT] + counts[Verdict.FAILED] > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_programs", description=__doc__
    )
    parser.add_argument("--count", type=int, default=300, help="how many programs")
    parser.add_argument("--seed", type=int, default=1, help="the first one's")
    parser.add_argument(
        "--simulate-devices",
        type=int,
        default=0,
        metavar="N",
        help="replicas on N simulated devices",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="replicas in N processes, which run each program together",
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument(
        "--without",
        default="",
        help="parts of programs to leave out, as a regular expression",
    )
    parser.add_argument(
        "--kinds", type=lambda text: text.split("/"), help="topologies, with slashes"
    )
    parser.add_argument(
        "--shrink",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one program of each kind of fault",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="a program as it was printed, and no other",
    )
    return parser.parse_args()


def _outcomes(options: argparse.Namespace) -> Iterator[tuple[int, Outcome]]:
    size = 10 if options.workers else 50
    every = range(options.seed, options.seed + options.count)
    tasks = [
        Task(
            every[i : i + size],
            options.simulate_devices,
            options.without,
            options.kinds,
        )
        for i in range(0, len(every), size)
    ]
    if options.workers:
        # The folder beside this one, whose name depends on from where this module was
        # imported.
        processes = importlib.import_module(
            f"{__package__}.workers.cluster".replace("random_programs.", "")
        )
        for task in tasks:
            for of_each in zip(
                *processes.cluster(options.workers).run(together, task), strict=True
            ):
                yield of_each[0][0], of_all([outcome for _, outcome in of_each])
        processes.end_all()
        return
    begin(options.simulate_devices)
    if options.jobs == 1:
        for task in tasks:
            yield from done(task)
        return
    with ProcessPoolExecutor(
        options.jobs, get_context("spawn"), begin, (options.simulate_devices,)
    ) as pool:
        for outcomes in pool.map(done, tasks):
            yield from outcomes


def _show(seed: int, options: argparse.Namespace) -> None:
    program = Generator(
        options.simulate_devices, options.without, options.kinds
    ).program(seed)
    program, outcome = shrunk(program, judged(program))
    print(
        f"\n--- seed {seed}: {outcome.verdict.value}: "
        f"{outcome.kind}\n{program}\n{outcome.said}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
