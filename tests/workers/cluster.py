"""Processes that are joined by gloo, and call functions of tests together."""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import pickle
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from recorded_lines import recorded_lines

# How long a call may take before the processes are ended: they wait for each other for
# ever.
LIMIT_S = 300.0


class Outcome(NamedTuple):
    """What a call came to in one process."""

    value: Any
    error: str | None  # the class and the text of the exception
    trace: str = ""


class Cluster:
    """Processes that wait for functions to call.

    Args:
        size: How many processes.
        timeout: How long an exchange between them may take, in seconds.
        joined: Whether they are a group of `torch.distributed`.
    """

    def __init__(self, size: int, timeout: float = 60.0, joined: bool = True) -> None:
        context = _context()
        # The store lives here, as torchrun's does in its agent: it outlives any worker.
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        pipes = [context.Pipe() for _ in range(size)]
        # What processes print goes to nobody where pytest runs in processes itself.
        self.crashes = tempfile.TemporaryDirectory()
        self.connections: list[Connection] = [ours for ours, _ in pipes]
        port = self.store.port if joined else 0
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, size, port, timeout, theirs, self.crashes.name),
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, call: Callable[..., Any], *args: Any) -> list[Any]:
        """What the call returns in each process. It must not fail in any."""
        outcomes = self.outcomes(call, *args)
        failed = [
            (rank, outcome)
            for rank, outcome in enumerate(outcomes)
            if outcome.error is not None
        ]
        assert not failed, "\n".join(
            f"worker {rank}: {outcome.error}\n{outcome.trace}"
            for rank, outcome in failed
        )
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, call: Callable[..., Any], *args: Any, without: Collection[int] = ()
    ) -> list[Outcome]:
        """What the call comes to in each process.

        A process that has ended has the error `"ended"`, and says how.

        Args:
            call: A function that pickle finds by its name.
            args: Its arguments.
            without: The processes that are not waited for.
        """
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        for connection in self.connections:
            connection.send_bytes(pickle.dumps((call, args, test)))
        outcomes = [Outcome(None, "not waited for")] * len(self.connections)
        waiting = [rank for rank in range(len(outcomes)) if rank not in without]
        end = time.monotonic() + LIMIT_S
        while waiting:
            # Children of a process that has ended may keep its end of the connection:
            # the process itself tells, too.
            watched = [
                one
                for rank in waiting
                for one in (self.connections[rank], self.processes[rank].sentinel)
            ]
            ready = wait(watched, max(0.0, end - time.monotonic()))
            if not ready:
                self.end()
                raise AssertionError(f"the workers {waiting} hang")
            for rank in list(waiting):
                if (
                    self.connections[rank] in ready
                    or self.processes[rank].sentinel in ready
                ):
                    outcomes[rank] = self._receive(rank)
                    waiting.remove(rank)
        return outcomes

    def _receive(self, rank: int) -> Outcome:
        """What a process has sent, or how it has ended."""
        with suppress(EOFError, ConnectionResetError):
            if self.connections[rank].poll():
                outcome: Outcome = pickle.loads(self.connections[rank].recv_bytes())
                return outcome
        process = self.processes[rank]
        process.join()
        crash = Path(self.crashes.name, str(rank)).read_text()
        return Outcome(
            None, "ended", f"its exit code: {process.exitcode}\n{crash}".strip()
        )

    def end(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            # Asked of the process itself: its number may be that of another one by now.
            if process.is_alive():
                process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        self.crashes.cleanup()

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)


@functools.cache
def _context() -> Any:
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # torch takes seconds to import.
    context.set_forkserver_preload(["torch", "torchstrategy"])
    return context


def alone(
    call: Callable[..., Any],
    environments: list[dict[str, str]],
    *args: Any,
    without: Collection[int] = (),
) -> list[Outcome]:
    """What a call comes to in processes that nobody has joined.

    Each has further environment variables.
    """
    cluster = Cluster(len(environments), joined=False)
    try:
        return cluster.outcomes(
            _with_environment, environments, call, args, without=without
        )
    finally:
        cluster.end()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, and that the system gives to nobody.

    Who asks for any would take one of those.

    The processes of tests listen at many ports that the system chooses, and a store may
    begin to listen seconds later.
    """
    held: list[socket.socket] = []
    while len(held) < count:
        with suppress(OSError):
            held.append(
                socket.create_server(("127.0.0.1", _drawn.randrange(15_000, 32_000)))
            )
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


_drawn = random.Random()  # other ports in each process


_started: dict[int, Cluster] = {}


def cluster(size: int) -> Cluster:
    """The processes that all tests of this size share."""
    if size not in _started or not _started[size].is_alive:
        _started[size] = Cluster(size)
    return _started[size]


def end_all() -> None:
    for one in _started.values():
        one.end()
    _started.clear()


_rank: list[int] = []  # of this process


def _with_environment(
    environments: list[dict[str, str]], call: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    os.environ.update(environments[_rank[0]])
    return call(*args)


def _serve(
    rank: int,
    size: int,
    port: int,
    timeout: float,
    connection: Connection,
    crashes: str,
) -> None:
    # A crash of the interpreter, and a hang, are told by nothing else.
    crash = Path(crashes, str(rank)).open("w")  # noqa: SIM115  for as long as it lives
    faulthandler.enable(crash)
    torch.set_num_threads(1)
    if port:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    _rank.append(rank)
    while True:
        try:
            call, args, test = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(LIMIT_S - 10, exit=True, file=crash)
        try:
            with recorded_lines(test):
                outcome = Outcome(call(*args), None)
        except BaseException as error:
            outcome = Outcome(
                None, f"{type(error).__name__}: {error}", traceback.format_exc()
            )
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(outcome))
