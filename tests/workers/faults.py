"""Trainings of three processes in which one goes wrong.

How soon and in which words the others say so.

`python -m tests.workers.faults --runs 20` runs each fault 20 times, and prints a table.
The processes are those of a user: nobody catches an error, and the first worker keeps
the store.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .cluster import free_ports

TIMEOUT_S = 3  # of the strategy, where a worker hangs
HANGS_FOR_S = TIMEOUT_S + 6
LIMIT_S = 300.0  # of a run, on a machine that is busy with something else
# The time after which a worker says where it is; Python can crash in saying so of one
# that goes on.
STUCK_S = 240

PROGRAM = f"""
import faulthandler, os, signal, sys, time
from datetime import timedelta

import torch, torch._dynamo  # which take seconds, so the three processes fork off here
import torchstrategy

how, culprit, *outputs = sys.argv[1], *map(int, sys.argv[2:])
for rank, output in enumerate(outputs):
    if os.fork() == 0:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        break
for output in outputs:
    os.close(output)
if os.getsid(0) != os.getpid():
    for _ in outputs:
        pid, status = os.wait()
        print(pid, os.waitstatus_to_exitcode(status), time.time(), flush=True)
    sys.exit()

# Whoever is started in the background of a shell ignores Ctrl-C, and so do its children, unless they say otherwise.
signal.signal(signal.SIGINT, signal.default_int_handler)
print("PID", os.getpid(), flush=True)
faulthandler.dump_traceback_later({STUCK_S})
os.environ["RANK"] = str(rank)
timeout = timedelta(seconds={TIMEOUT_S}) if how in ("hangs", "is stopped") else None
strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"], timeout=timeout)
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = 0


def step():
    if count == 3 and rank == culprit and how == "goes another way":
        print("NOW", time.time(), flush=True)
        return
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    if count == 3 and rank == culprit:
        print("NOW", time.time(), flush=True)
        if how == "raises":
            raise ValueError("no such luck")
        elif how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exits":
            os._exit(3)
        elif how == "hangs":
            time.sleep({HANGS_FOR_S})
        elif how == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    if count == 3 and how == "brings another shape":
        torchstrategy.get_replica_context().all_reduce("sum", torch.ones(3 if rank == culprit else 2))
    optimizer.step()


while count < 10 or how == "is interrupted" and count < 100000:
    count += 1
    strategy.run(step)
"""  # noqa: E501

RAISED = (
    r"worker {culprit} of 3 \([^()]+, process {pid}\) failed: ValueError: no such "
    r"luck\."
)
GONE = (
    r"worker {culprit} of 3 \([^()]+, process {pid}\) (is gone: the process has "
    r"ended|has not answered for \d+ s)"
)
APART = (
    "The workers came to different synchronization points: .*worker {culprit} is at "
)


class Fault(NamedTuple):
    """What goes wrong in the third run of one worker, and what comes of it."""

    how: str
    culprit: int
    message: str  # of the others, as a pattern
    exits: Sequence[int]  # codes with which the culprit may end
    heard_by_all: bool = False  # also by the culprit
    heard_after: float = 5.0


FAULTS = {
    "raises": Fault("raises", 1, RAISED, [1]),
    "keeper-raises": Fault("raises", 0, RAISED, [1]),
    "killed": Fault("is killed", 1, GONE, [-signal.SIGKILL]),
    "keeper-killed": Fault(
        "is killed",
        0,
        r"worker 0 of 3 \([^()]+, process {pid}\) is gone: the process has ended",
        [-signal.SIGKILL],
    ),
    "exits": Fault("exits", 1, GONE, [3]),
    "stopped": Fault("is stopped", 1, GONE, [1], heard_after=TIMEOUT_S + 5),
    "hangs": Fault("hangs", 1, GONE, [1], heard_after=TIMEOUT_S + 5),
    "another-way": Fault(
        "goes another way",
        1,
        APART + r".*of run 4 \(the gradients of backward 1",
        [1],
        True,
    ),
    "interrupted": Fault(
        "is interrupted",
        1,
        r"worker 1 of 3 \([^()]+, process {pid}\) (failed: KeyboardInterrupt\.|is "
        r"gone: |has left: )",
        [1, -signal.SIGINT],
    ),
    "another-shape": Fault(
        "brings another shape",
        1,
        APART + r"all_reduce\(SUM\) of run 3 .*with \[\(torch.float32, \(3,\)\)\]",
        [1],
        True,
    ),
}


class Run(NamedTuple):
    """What came of one fault. Seconds count from it."""

    heard: float  # by the last one
    ended: float  # the last one
    unnamed: list[str]  # outputs of workers that do not say who and why
    left: list[str]  # what is left, or ended badly


def run(fault: Fault) -> Run:
    """Starts three processes, and watches them until all have ended."""
    port = free_ports(1)[0]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as watchers:
        settings = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "3",
        }
        pipes = [os.pipe() for _ in range(3)]
        theirs = [end for _, end in pipes]
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            fault.how,
            *map(str, [fault.culprit, *theirs]),
        ]
        starter = subprocess.Popen(
            command,
            cwd=folder,
            env=settings,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=theirs,
        )
        for end in theirs:
            os.close(end)
        workers = [Worker() for _ in pipes]
        for one, (end, _) in zip(workers, pipes, strict=True):
            watchers.submit(_watch, one, end, fault)
        with suppress(subprocess.TimeoutExpired):
            starter.wait(LIMIT_S)
        left = [
            f"process of worker {rank}"
            for rank, one in enumerate(workers)
            if _end_group(one.pid)
        ]
        ends = [line.split() for line in starter.communicate()[0].splitlines()]
        left += [f"file {path}" for path in Path(folder).rglob("*") if path.is_file()]
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        left.append(f"port: {error}")
    culprit = workers[fault.culprit]
    codes = {int(pid): int(code) for pid, code, _ in ends}
    unnamed = []
    message = re.compile(
        "WorkerError: " + fault.message.format(pid=culprit.pid, culprit=fault.culprit)
    )
    hearing = [one for one in workers if fault.heard_by_all or one is not culprit]
    for rank, one in enumerate(workers):
        if one in hearing and not message.search(one.error):
            unnamed.append(f"worker {rank}: {one.error or one.output}")
        if codes[one.pid] not in (fault.exits if one is culprit else [1]):
            left.append(f"worker {rank} ended with {codes[one.pid]}: {one.output}")
    heard, ended = (
        max(one.heard_at for one in hearing),
        max(float(at) for _, _, at in ends),
    )
    return Run(heard - culprit.began_at, ended - culprit.began_at, unnamed, left)


@dataclass(eq=False)
class Worker:
    """What a process printed, and when."""

    pid: int = 0
    began_at: float = 0.0  # the fault, if it came in this process
    output: str = ""
    error: str = ""  # the line that says which worker failed
    heard_at: float = float("inf")


def _watch(worker: Worker, output: int, fault: Fault) -> None:
    with open(output) as lines, ThreadPoolExecutor(1) as signals:
        for line in lines:
            worker.output += line
            if line.startswith("PID"):
                worker.pid = int(line.split()[1])
            elif line.startswith("NOW"):
                worker.began_at = float(line.split()[1])
                signals.submit(_signal, worker.pid, fault)
            # torch puts the rank before it.
            elif "torchstrategy.WorkerError: " in line and not worker.error:
                worker.error, worker.heard_at = line, time.time()


def _signal(pid: int, fault: Fault) -> None:
    """What comes to the culprit from outside."""
    if fault.how == "is interrupted":  # twice, as by somebody without patience
        for longest in (0.02, 0.5):
            time.sleep(random.uniform(0, longest))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
    elif fault.how == "is stopped":
        time.sleep(HANGS_FOR_S)
        os.kill(pid, signal.SIGCONT)


def _end_group(session: int) -> bool:
    """Whether processes of a session are left; they are ended."""
    assert session, "a process has not begun"
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    """Prints the table; 0 if nothing is over the limits, unnamed or left."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.workers.faults", description=__doc__
    )
    parser.add_argument("--runs", type=int, default=20, help="how many of each fault")
    parser.add_argument(
        "--fault", choices=FAULTS, action="append", help="which; all if it is not said"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many runs at the same time"
    )
    options = parser.parse_args()
    print(
        "| fault | runs | heard within (s) | all ended within (s) | messages without "
        "name or cause | left |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    is_good = True
    for name in options.fault or FAULTS:
        with ThreadPoolExecutor(options.jobs) as several:
            runs = list(several.map(run, [FAULTS[name]] * options.runs))
        heard, ended = max(one.heard for one in runs), max(one.ended for one in runs)
        unnamed, left = (
            [item for one in runs for item in getattr(one, kind)]
            for kind in ("unnamed", "left")
        )
        shown = ", ".join(left) or "nothing"
        print(
            f"| {name} | {len(runs)} | {heard:.1f} | {ended:.1f} | {len(unnamed)} | "
            f"{shown} |",
            flush=True,
        )
        print("\n".join(unnamed[:3]), end="", file=sys.stderr, flush=True)
        is_good &= (
            heard < FAULTS[name].heard_after
            and ended < heard + 15
            and not unnamed
            and not left
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
