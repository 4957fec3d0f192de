"""Trainings broken off at random moments, and what the workers left say.

`python -m tests.workers.random_faults --runs 200 --seed 1` draws for each run how many
workers there are, whether torchrun starts them, whether their loaders have workers,
which of them is broken off, when, and how: by an exception or by SIGKILL, SIGTERM,
SIGINT or SIGSTOP. It prints what is wrong with each run, and a table.

A run is wrong if a worker names another one than the culprit, if it says nothing in
time, or if processes, files or shared memory are left. Under torchrun, workers may be
ended by torchrun before they say anything.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Which optimizers import, and which takes seconds: the processes of a run are forked
# from here.
import torch._dynamo
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy

from .cluster import free_ports

TIMEOUT_S = 8  # of the strategies
# Within which all are to hear; after the timeout, where the culprit was stopped or had
# not come.
LIMIT_S = 5.0
LONGEST_S = 90.0  # of a run
HOW = ("raises", "SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")


class Plan(NamedTuple):
    """What happens in one run."""

    how: str
    count: int
    culprit: int
    by_torchrun: bool
    loaders: int
    keeps_loaders: bool  # whether the workers of a loader live on from epoch to epoch
    when_joining: bool
    after: float  # seconds from when all train, or from when the culprit begins to join


class Outcome(NamedTuple):
    heard: float  # seconds until the last one heard
    wrong: list[str]
    is_void: bool  # whether the exception was raised where Python ignores it


def planned(seed: int) -> Plan:
    draw = random.Random(seed)
    count = draw.choice((2, 3, 4))
    return Plan(
        how=draw.choice(HOW),
        count=count,
        culprit=draw.randrange(count),
        by_torchrun=draw.random() < 0.5,
        loaders=draw.choice((0, 2)),
        keeps_loaders=draw.random() < 0.5,
        when_joining=draw.random() < 0.15,
        after=draw.random(),
    )


# In the processes of a run.


def train(plan: Plan, folder: str) -> None:
    """A training that goes on until something happens.

    What it says goes to a file of its own.
    """
    rank = int(os.environ["RANK"])
    output = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, _fail)
    say(f"PID {os.getpid()}")
    # torchrun's own process has a thread that looks up the names of those that connect.
    # A process that is forked meanwhile gets the lock of the C library for it, which
    # nobody gives back. So all are there before one connects.
    _wait(lambda: len(list(Path(folder).glob("[0-9].log"))) == plan.count, LONGEST_S)
    try:
        _train(plan)
    except BaseException as error:
        say(
            f"HEARD {time.time()} {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        )
        traceback.print_exc()
        raise


def _train(plan: Plan) -> None:
    strategy = torchstrategy.MultiWorkerMirroredStrategy(
        devices=["cpu"], timeout=timedelta(seconds=TIMEOUT_S)
    )
    with strategy.scope():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {}
    if plan.loaders:
        options = {
            "multiprocessing_context": "fork",
            "persistent_workers": plan.keeps_loaders,
        }
        options["worker_init_fn"] = partial(_end_with, os.getpid())
    loader = DataLoader(
        TensorDataset(torch.ones(40, 4)),
        batch_size=5,
        num_workers=plan.loaders,
        **options,
    )
    dataset = strategy.experimental_distribute_dataset(loader)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()

    steps = 0
    while True:
        for batch in dataset:
            strategy.run(step, args=(batch,))
            steps += 1
            if steps == 3:
                say("TRAINS")


def _end_with(parent: int, loader_worker: int) -> None:
    """Ends a worker of a loader whose parent has gone since it was forked.

    torch lets it ask later who its parent is, so that it would wait for ever for the
    end of a process that took it in.
    """
    if os.getppid() != parent:
        os._exit(1)


def _fail(number: int, frame: Any) -> None:
    raise ValueError("no such luck")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def _launch(plan: Plan, folder: str, port: int) -> None:
    """Starts the workers of a run, and ends with them."""
    os.setsid()
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    output = os.open(f"{folder}/launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if plan.by_torchrun:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=plan.count,
            run_id=str(port),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="fork",
            max_restarts=0,
            monitor_interval=0.1,
        )
        elastic_launch(config, train)(plan, folder)
        return
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(plan.count)
    )
    children = []
    for rank in range(plan.count):
        os.environ["RANK"] = str(rank)
        children.append(_forked(train, plan, folder))
    for child in children:
        os.waitpid(child, 0)


def _forked(call: Callable[..., None], *args: Any) -> int:
    """Calls a function in a process of its own, which ends as Python's programs do."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        call(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


# In the process that watches.


def run(plan: Plan, slack: float) -> Outcome:
    """Breaks one training off, and looks at what is left of it."""
    # No object, which forked processes would inherit, and end.
    folder = tempfile.mkdtemp()
    launcher = _forked(_launch, plan, folder, free_ports(1)[0])
    try:
        return _watched(plan, Path(folder), launcher, LIMIT_S + slack)
    finally:
        for pid in _processes(launcher):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(launcher, 0)
        shutil.rmtree(folder)


def _watched(plan: Plan, folder: Path, launcher: int, limit: float) -> Outcome:
    logs = [folder / f"{rank}.log" for rank in range(plan.count)]
    begun = logs[plan.culprit : plan.culprit + 1] if plan.when_joining else logs
    if not _wait(
        lambda: all(
            ("PID" if plan.when_joining else "TRAINS") in _text(log) for log in begun
        ),
        LONGEST_S,
    ):
        return Outcome(0.0, ["the training did not begin: " + _shown(folder)], False)
    time.sleep(plan.after * (0.3 if plan.when_joining else 1.0))
    (pid,) = re.findall(r"PID (\d+)", _text(logs[plan.culprit]))
    before = time.time()
    os.kill(
        int(pid), signal.SIGUSR1 if plan.how == "raises" else getattr(signal, plan.how)
    )
    others = [log for rank, log in enumerate(logs) if rank != plan.culprit]
    if plan.how == "SIGSTOP" or plan.when_joining:
        limit += TIMEOUT_S
    _wait(
        lambda: all("HEARD" in _text(log) for log in others) or _is_over(launcher),
        limit + 15,
    )
    if plan.how == "SIGSTOP":
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    # Python ignores an exception that is raised in a destructor, or where it forks: the
    # culprit trains on, or hangs.
    told = _text(logs[plan.culprit])
    trains_on = not any("HEARD" in _text(log) for log in logs) and not _is_over(
        launcher
    )
    if plan.how in ("raises", "SIGINT") and (
        trains_on or ("HEARD" not in told and "Exception ignored" in told)
    ):
        return Outcome(0.0, [], True)
    heard, wrong = _judge(plan, others, before, limit)
    _wait(lambda: not _processes(launcher), 20)
    wrong += [f"left: process {left}" for left in _processes(launcher)]
    pids = [found for log in logs for found in re.findall(r"PID (\d+)", _text(log))]
    wrong += [
        f"left: {path}"
        for path in Path("/dev/shm").glob("torch_*")
        if path.name.split("_")[1] in pids
    ]
    wrong += [
        f"left: {path}"
        for path in folder.rglob("*")
        if path.is_file() and _is_ours(path)
    ]
    return Outcome(heard, [f"{one}\n{_shown(folder)}" for one in wrong], False)


def _judge(
    plan: Plan, others: list[Path], before: float, limit: float
) -> tuple[float, list[str]]:
    """Seconds until all had heard, and what is wrong with what they said."""
    wrong, heard = [], 0.0
    for log in others:
        said = re.search(r"^HEARD (\S+) (.*)$", _text(log), re.M)
        if said is None:
            if not plan.by_torchrun:
                wrong.append(f"{log.stem} heard nothing")
            continue
        if plan.by_torchrun and "SignalException" in said[2]:
            continue
        heard = max(heard, float(said[1]) - before)
        blaming = said[2].partition("This is worker")[0]
        named = {int(worker) for worker in re.findall(r"[Ww]orker (\d+)", blaming)}
        # An exception out of a signal's handler, in a call that may refuse its
        # arguments, looks like such a refusal.
        is_told = (
            said[2].startswith("WorkerError") or " refused what it was given" in said[2]
        )
        if not is_told or named != {plan.culprit}:
            wrong.append(f"{log.stem} heard of {sorted(named)}")
    if heard > limit:
        wrong.append(f"heard after {heard:.1f} s")
    return heard, wrong


def _wait(is_there: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _is_over(launcher: int) -> bool:
    """Whether a child of this process has ended."""
    try:
        return (
            os.waitid(os.P_PID, launcher, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            is not None
        )
    except ChildProcessError:
        return True


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _shown(folder: Path) -> str:
    told = []
    for path in sorted(folder.glob("*.log")):
        kept = [
            line[:400]
            for line in _text(path).splitlines()
            if not line.startswith((" ", "E1"))
        ]
        told += [f"--- {path.name}", *kept[-8:]]
    return "\n".join(told)


def _is_ours(path: Path) -> bool:
    return path.suffix != ".log" and not any(
        part.startswith(("torchelastic", "pytorch-errorfile")) for part in path.parts
    )


def _processes(session: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, of_process = (
                (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            )
            if state != "Z" and int(of_process) == session:
                found.append(int(entry.name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.workers.random_faults", description=__doc__
    )
    parser.add_argument("--runs", type=int, default=20, help="how many; default: 20")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first run; the others follow"
    )
    parser.add_argument(
        "--slack",
        type=float,
        default=0.0,
        help="seconds that are added to each limit, on a busy machine",
    )
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    heard: dict[str, float] = {}
    is_good = True
    for seed in range(options.seed, options.seed + options.runs):
        plan = planned(seed)
        outcome = run(plan, options.slack)
        kind = f"{plan.how}{' while joining' if plan.when_joining else ''}"
        outcomes[f"{kind}{' (ignored by Python)' if outcome.is_void else ''}"] += 1
        heard[kind] = max(heard.get(kind, 0.0), outcome.heard)
        is_good &= not outcome.wrong
        print(
            f"seed {seed}: {plan.count} workers, {kind}: heard within "
            f"{outcome.heard:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        for text in outcome.wrong:
            print(f"seed {seed}: {plan}\n{text}", flush=True)
    print("| fault | runs | heard within (s) |\n|---|---|---|")
    for kind, number in sorted(outcomes.items()):
        print(f"| {kind} | {number} | {heard.get(kind, 0.0):.1f} |")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
