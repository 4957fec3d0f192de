"""Programs in which one worker is lost, each in processes of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy
from torchstrategy._group.processes.meeting import Meeting


def rank() -> int:
    return int(os.environ["RANK"])


def strategy_of(seconds: float) -> torchstrategy.MultiWorkerMirroredStrategy:
    return torchstrategy.MultiWorkerMirroredStrategy(
        devices=["cpu"], timeout=timedelta(seconds=seconds)
    )


def run_until_lost(strategy: torchstrategy.Strategy, runs: int = 10**6) -> str:
    """What a worker hears."""
    try:
        for _ in range(runs):
            strategy.reduce("sum", strategy.run(lambda: torch.ones(()) * 1), axis=None)
    except torchstrategy.WorkerError as error:
        return str(error)
    return "nothing"


def of_killed(culprit: int, busy: int | None) -> Any:
    """One worker is killed.

    Another one may have to work for a while before it can hear of it.
    """
    strategy = strategy_of(60)
    run_until_lost(strategy, 3)
    if rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == busy:
        time.sleep(5)
    return run_until_lost(strategy)


def of_stopped(culprit: int) -> Any:
    strategy = strategy_of(3)
    run_until_lost(strategy, 3)
    if rank() == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    return run_until_lost(strategy)


def of_stopped_between(culprit: int) -> Any:
    """A worker is stopped, and the others wait for it at different places.

    They are where one of them has heard from it last.
    """
    strategy = strategy_of(5)
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    run = functools.partial(
        strategy.run, lambda: model(torch.ones(1, 2)).sum().backward()
    )
    run()
    run()
    if rank() == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    dataset = strategy.experimental_distribute_dataset(
        DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=3)
    )
    try:
        if rank() == 0:
            next(iter(dataset))
        else:
            run()
    except torchstrategy.WorkerError as error:
        return str(error)
    return "nothing"


def of_forked_child(how: str) -> Any:
    """A worker is killed of which forked children live on."""
    strategy = strategy_of(60)
    run_until_lost(strategy, 3)
    if rank() == 1 and how == "fork":
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
    elif how == "loader":
        rows = TensorDataset(torch.ones(400, 1))
        loader = DataLoader(
            rows,
            batch_size=1,
            num_workers=2,
            multiprocessing_context="fork",
            persistent_workers=True,
        )
        batches = iter(loader)
        next(batches)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    return run_until_lost(strategy), time.monotonic() - began


def run_in_forked_child() -> Any:
    """What a forked child is told that calls `run`.

    What it does to its parent's training, and which sockets it has.
    """
    strategy = strategy_of(60)
    run_until_lost(strategy, 3)
    dataset = strategy.experimental_distribute_dataset([torch.ones(4, 1)])
    theirs, ours = os.pipe()
    if os.fork() == 0:
        told = []
        for call in (lambda: strategy.run(lambda: None), lambda: next(iter(dataset))):
            try:
                call()
            except RuntimeError as error:
                told.append(f"{type(error).__name__}: {error}")
        del strategy, call
        os.write(ours, "\n".join([*told, str(num_sockets())]).encode())
        os._exit(0)
    os.close(ours)
    with open(theirs) as answer:
        told = answer.read()
    os.wait()
    return told.split("\n"), run_until_lost(strategy, 3), num_sockets()


def num_sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def of_joining(culprit: int, how: str) -> Any:
    """A worker does not come, or ends when it has come."""
    if rank() == culprit:
        if how == "does not come":
            return None
        if how == "is killed":
            _before_groups(lambda: os.kill(os.getpid(), signal.SIGKILL))
        if how == "is stopped at the door":
            _when_come(lambda: os.kill(os.getpid(), signal.SIGSTOP))
        if how == "is stopped":
            _before_groups(lambda: os.kill(os.getpid(), signal.SIGSTOP))
        if how == "raises":
            _before_groups(_raise)
    began = time.monotonic()
    try:
        # Worker 0 is patient, since it has called nobody and so was right.
        strategy_of(
            60
            if how in ("is killed", "raises")
            or (how == "is stopped at the door" and rank() == 0)
            else 4
        )
    except (ValueError, torchstrategy.WorkerError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


def _when_come(call: Any) -> None:
    """Lets this process act when others can call it, and it has answered nobody."""
    come = Meeting._come

    def come_and_call(self: Meeting, port: int) -> None:
        come(self, port)
        call()

    Meeting._come = come_and_call  # type: ignore[method-assign]


def _before_groups(call: Any) -> None:
    """Lets this process do something when all have found each other.

    Torch is about to make its groups then.
    """
    call_watched = Meeting.call_watched
    Meeting.call_watched = lambda self, make: call_watched(self, call)  # type: ignore[method-assign]


def _raise() -> None:
    raise ValueError("no such luck")


def of_surrogate() -> str:
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])

    def step() -> None:
        if strategy.extended._workers.index == 1:
            raise ValueError("bad name \udce9")
        torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))

    try:
        strategy.run(step)
        strategy.run(step)
    except (ValueError, torchstrategy.WorkerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def of_other_settings() -> str:
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.1 * (1 + strategy.extended._workers.index)
        )

    def step() -> None:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    try:
        strategy.run(step)
    except torchstrategy.WorkerError as error:
        return str(error)
    return "nothing"
