"""Where the replicas of a strategy run, and whose turn it is: one on the caller's thread, several on threads.

Replicas that share a physical device run one at a time, in replica order: the next one goes on when one has come to a
synchronization point or to its end. Replicas on different accelerators run at the same time. An instrument may have
all replicas run one at a time, in any order, and let another one go on also where a replica pauses.

    caller's thread      give turn ......... give turn ......... combine ... give turn ...
                              \\           /     \\           /                 \\
    replica 0's thread         run to the point    |           |                continue
                                                   \\          /
    replica 1's thread                              run to the point
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, final

import torch

from torchstrategy._core.context import CallerState, in_use
from torchstrategy._core.devices import memory_device
from torchstrategy._core.errors import add_note, described
from torchstrategy._core.torch_internals import keep_what_stands_in_for_gpus
from torchstrategy._core.trace import traced
from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.instruments import Turns, begins, held, performed, performed_alone, reached
from torchstrategy._execution.random_streams import RandomStreams
from torchstrategy._execution.replica import Combine, InlineReplica, Replica, ReplicaStopped, Watch


# Note [Who may call what on which thread]
# The single replica of a strategy runs on the caller's thread, and so does its `combine`. For that while,
# `InlineReplica` puts the replica's frame and default device aside. All that follows is about several replicas.
# The caller's thread runs everything of `_Run`: it gives the turns, switches the random streams, and calls `combine`.
# A replica's thread only runs the step, up to `_stand_still`: there it reports and waits until the caller's thread
# answers. So at a synchronization point all replicas stand still, and `combine` may use all that replicas share without
# a lock.
# Between two such points, the replicas of one lane run one at a time. A lane is a physical device; if somebody gives
# the turns, or a `Watch` asks for it, all replicas are in one lane. The replicas of two lanes may run at the same time:
# a replica may then write only on its own objects, or under a lock. The exceptions are:
# - If all replicas are on one device, each adds its gradients to the shared total before it waits or ends
#   (`GradientReducer.accumulate`).
# - If an optimizer calls a closure, its loop runs on the thread of the lead, the first replica, while the others wait.
# - When the step begins in a replica, `ReplicatedRun.local_objects` appends the replica to a list of the run, and
#   enters its objects in tables under its own id. Python does each of these in one piece.
# - Whoever steps an optimizer or reads `.data`, on any thread, may write `ReplicatedRun._on_other_thread`, or have
#   `DataReads.note` add to a set. Python does these in one piece, too.
# Only the thread of the step may synchronize, and only during the step: any other thread would wait for ever.
# The threads send each other messages by `SimpleQueue` only. Its `put` may also be called in a finalizer or a signal
# handler, while another `put` is under way; code with a lock could then wait for ever. To stop a replica that sends no
# message, the caller's thread sets `is_cancelled`, which the replica reads before its step, and has Python raise an
# exception on the thread that the replica has written in `thread` (`ReplicaThreads.abandon`).
@final
@dataclass(eq=False)
class _ThreadReplica(Replica):
    """One of several replicas, on a thread of its own."""

    inbox: SimpleQueue[Any]  # of messages that wake it: its task, an answer at a synchronization point, or `_STOP`
    reports: SimpleQueue[_Report]
    process: int = field(default_factory=os.getpid)
    thread: int | None = None  # the thread on which the step runs; None before and after
    is_cancelled: bool = False  # written by the caller's thread

    def perform(self, state: CallerState, call: Callable[[Replica], Tree]) -> None:
        """Calls the step, and reports how it ended. The replica can synchronize during this call, on this thread."""
        outcome: _Report
        self.thread = threading.get_ident()
        try:
            if self.is_cancelled:
                raise ReplicaStopped
            step = functools.partial(call, self)
            outcome = _Ended(self.index, state.run_in(self.device, lambda: performed(self.index, step)))
        except BaseException as error:
            # Also SystemExit and KeyboardInterrupt: the caller waits for a report, however the step ends.
            outcome = _Failed(self.index, error)
        if os.getpid() != self.process:
            _end_child(outcome)
        self.thread = None
        self.reports.put(outcome)
        del outcome  # the traceback of an error refers to this frame: with `outcome`, that would be a cycle

    def pause(self) -> None:
        self._stand_still(_Paused(self.index))

    def synchronize(self, name: str, combine: Combine, brought: Tree) -> Tree:
        reached(self.index, name)
        # See Note [Who may call what on which thread].
        if threading.get_ident() != self.thread:
            raise RuntimeError(
                f"Replica {self.index} came to {name}, where it synchronizes with the others, after its run or on "
                "another thread than that of its step, and would wait for them for ever. Call backward in the step, on "
                "the thread of the step; or detach what the step returns."
            )
        with traced("wait at {}", name):
            known = combine if self.telling is None else self._told(name, combine)
            return self._stand_still(_Synchronizing(self.index, name, known, brought))

    def _stand_still(self, report: _Report) -> Tree:
        if os.getpid() != self.process:
            raise RuntimeError(_FORKED.format(replica=self.index))
        self.reports.put(report)
        answer = self.inbox.get()
        if answer is _STOP:
            raise ReplicaStopped
        return answer.value


_FORKED = (
    "This process was forked in replica {replica}, in the middle of strategy.run: the threads of the other replicas, "
    "and that of the caller, are not in it, and nobody answers here. Let a child do what it is for and leave by "
    "os._exit, without synchronizing (all_reduce, merge_call, optimizer.step, the first read of a gradient after "
    "backward) and without coming to the end of the step; or fork outside of strategy.run."
)


class _Synchronizing(NamedTuple):
    replica: int
    name: str
    combine: Combine
    brought: Tree


class _Paused(NamedTuple):
    replica: int


class _Ended(NamedTuple):
    replica: int
    result: Tree


class _Failed(NamedTuple):
    replica: int
    error: BaseException


_Report = _Synchronizing | _Paused | _Ended | _Failed


class _Answer(NamedTuple):
    value: Tree


_STOP = object()


def _end_child(outcome: _Report) -> None:
    """Ends a child process that was forked in a step, as a script ends. In the child, no thread waits for the step."""
    error = outcome.error if isinstance(outcome, _Failed) else RuntimeError(_FORKED.format(replica=outcome.replica))
    if not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else int(code is not None))


def _serve(inbox: SimpleQueue[Any]) -> None:
    """Runs on a replica's thread: does one task after another, until it gets None."""
    with suppress(ReplicaStopped):  # raised by `ReplicaThreads.abandon` after the step has ended
        while (task := inbox.get()) is not None:
            if task is not _STOP:
                task()
            del task  # or the step's arguments would live until the next run


@final
class ReplicaThreads:
    """Long-lived threads, one for each of several replicas, for one run at a time.

    Between runs, the threads hold no objects of the user's. They do not keep this object alive, and end with it.

    Args:
        devices: The device of each replica.
        first: How many replicas other processes have before these.
    """

    def __init__(self, devices: Sequence[Device], first: int = 0) -> None:
        self.devices, self.first = tuple(devices), first
        # Replicas of one lane run one at a time, so that what they write and draw comes in the same order in every run.
        # See Note [Who may call what on which thread].
        self.lanes: list[Device | None] = [memory_device(device) for device in devices]
        self.inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in devices]
        self._threads = [
            threading.Thread(target=_serve, args=(inbox,), name=f"torchstrategy-replica-{r}", daemon=True)
            for r, inbox in enumerate(self.inboxes)
        ]
        # A replica's thread may be the first one that compiles; at its end it would free what torch needs for others.
        keep_what_stands_in_for_gpus()
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _dismiss, self.inboxes)
        self._finalizer.atexit = False  # the threads are daemons, so they end with the interpreter anyway

    @property
    def is_fit(self) -> bool:
        """Whether the threads can be used: they were not stopped, and exist here, unlike in a forked process."""
        return self._finalizer.alive and all(thread.is_alive() for thread in self._threads)

    def abandon(self, replicas: Mapping[int, _ThreadReplica]) -> None:
        """Stops the replicas whatever they are doing, and waits until their threads have ended.

        After this, `is_fit` is false. The method does not use what `_Run` knows about the replicas, since this may be
        wrong: a signal handler can raise between any two lines of `_Run`. If a second exception interrupts the method,
        or it is called again, every thread has still been told to end.
        """
        self._finalizer.detach()
        for replica in replicas.values():
            replica.is_cancelled = True
        for inbox in self.inboxes:
            inbox.put(_STOP)  # stops a replica that waits at a synchronization point
            inbox.put(None)  # ends the thread
        for r, replica in replicas.items():
            # A replica that waited at a synchronization point runs its `finally` blocks now, and may finish them.
            self._threads[r].join(_PATIENCE_S)
            while self._threads[r].is_alive():
                if (thread := replica.thread) is not None:  # its step raises at its next line of Python
                    stop = ctypes.py_object(ReplicaStopped)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), stop)
                self._threads[r].join(_PATIENCE_S)


_LOOK_UP_S = 1.0  # how long the caller's thread waits before it looks for signals
_PATIENCE_S = 0.1  # the time before a replica is interrupted, and before it is again if it has caught the exception


def _dismiss(inboxes: list[SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


class _Here(threading.local):
    """How many nested runs are under way on this thread: a merge function may call `run`, too."""

    depth = 0


_here = _Here()


def runs_under_way() -> int:
    """How many nested runs of several replicas are under way on this thread."""
    return _here.depth


@final
class _Run:
    """One run of several replicas. Its methods are called only on the thread that called `run`."""

    def __init__(
        self, threads: ReplicaThreads, call: Callable[[Replica], Tree], present: Sequence[int], watch: Watch | None
    ) -> None:
        turns, state = begins(len(threads.devices)), CallerState(threads.devices)
        self._team = threads
        self._reports: SimpleQueue[_Report] = SimpleQueue()
        self._replicas = {r: _ThreadReplica(r, threads.devices[r], threads.inboxes[r], self._reports) for r in present}
        self._process = os.getpid()
        # For each replica that stands still, the message that wakes it.
        self._to_send: dict[int, Any] = {
            r: functools.partial(replica.perform, state, call) for r, replica in self._replicas.items()
        }
        self._running: set[int] = set()
        self._arrived: dict[int, _Synchronizing] = {}
        self._results: dict[int, Tree] = {}
        self._errors: dict[int, BaseException] = {}
        self._lanes = {r: threads.lanes[r] if turns is None else None for r in present}
        # See Note [Random streams of replicas]. The streams are chosen before a watch puts all replicas in one lane: a
        # replica draws from the same kind of stream with and without the watch.
        self._streams = RandomStreams(threads.devices, len(set(self._lanes.values())) == 1, _here.depth, threads.first)
        self.has_drawn = False  # after the run: whether a replica other than replica 0 of all has drawn
        if watch is not None and watch.take_turns:
            self._lanes = dict.fromkeys(present)
        self._next: Turns = turns or min
        self._look = watch.look if watch is not None else lambda running: None

    def result(self) -> dict[int, Tree]:
        _here.depth += 1
        try:
            self._look(())
            while self._to_send and not self._errors:
                with traced("wait for replicas"):
                    self._let_run()
                if self._arrived and not self._errors:
                    self._hold_synchronization_point()
            if self._errors:
                raise self._error()
            return self._results
        except BaseException as error:
            # A replica, a merge function or a signal handler has raised. If all replicas stand still, the waiting ones
            # are stopped one by one, and the threads can be used again. Else the threads are ended.
            if self._is_orderly(error):
                self._stop_waiting()
            if self._running or self._arrived or self._to_send:
                self._team.abandon(self._replicas)
            raise
        finally:
            _here.depth -= 1
            self.has_drawn = self._streams.give_back()
            self._errors.clear()  # their tracebacks refer to this frame: that would be a cycle

    def _let_run(self) -> None:
        """Lets every replica run to a synchronization point or its end; in one lane one by one, else all at once."""
        for lane in dict.fromkeys(self._lanes[r] for r in sorted(self._to_send)):
            self._wake_one(lane)
        while self._running:
            lane = self._lanes[self._receive()]
            if not self._errors:
                self._wake_one(lane)

    def _wake_one(self, lane: Device | None) -> None:
        waiting = [r for r in sorted(self._to_send) if self._lanes[r] == lane]
        if waiting:
            self._wake(self._next(waiting))

    def _wake(self, r: int) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "This process was forked in the middle of strategy.run: the replicas' threads are not in it."
            )
        # See Note [Random streams of replicas]: while the replica still stands still.
        self._streams.put_in_force(r)
        if self._running:
            self._look(self._running)
        self._running.add(r)
        self._replicas[r].inbox.put(self._to_send.pop(r))

    def _receive(self) -> int:
        report = self._next_report()
        self._look(self._running)
        self._running.discard(report.replica)
        if isinstance(report, _Synchronizing):
            self._arrived[report.replica] = report
        elif isinstance(report, _Paused):
            self._to_send[report.replica] = _Answer(None)
        elif isinstance(report, _Ended):
            self._results[report.replica] = report.result
        elif not isinstance(report.error, ReplicaStopped):
            self._errors[report.replica] = report.error
        return report.replica

    def _next_report(self) -> _Report:
        # If a signal comes just when this thread begins to wait, Python handles it only when the thread wakes again. So
        # the thread must not wait for ever.
        while True:
            with suppress(Empty):
                return self._reports.get(timeout=_LOOK_UP_S)

    def _hold_synchronization_point(self) -> None:
        points = [self._arrived[r] for r in sorted(self._arrived)]
        if self._results or any(point.name != points[0].name for point in points):
            raise RuntimeError(self._unequal())
        # See Note [Who may call what on which thread] and Note [Random streams of replicas].
        self._streams.put_callers_in_force()
        held(points[0].name)
        with traced("synchronize at {}", points[0].name):
            answers = points[0].combine([point.brought for point in points])
        self._to_send = {point.replica: _Answer(answer) for point, answer in zip(points, answers, strict=True)}
        self._arrived.clear()
        self._look(())

    def _is_orderly(self, error: BaseException) -> bool:
        """Whether every replica stands still, so that the waiting replicas can be stopped one by one."""
        if self._running or not self._team.is_fit:
            return False
        return isinstance(error, Exception) or any(error is raised for raised in self._errors.values())

    def _stop_waiting(self) -> None:
        """Stops every replica that waits at a synchronization point, one at a time. Others have not begun, or ended."""
        waiting = {r for r, message in self._to_send.items() if isinstance(message, _Answer)} | self._arrived.keys()
        self._to_send.clear()
        self._arrived.clear()
        while waiting:
            r = min(waiting)
            waiting.discard(r)
            self._to_send[r] = _STOP
            self._wake(r)
            self._receive()
            # Code in a `finally` block of the step may have synchronized, or paused: then it has to be stopped again.
            if self._arrived.pop(r, None) or self._to_send.pop(r, None):
                waiting.add(r)

    def _error(self) -> BaseException:
        first = min(self._errors)
        error = self._errors[first]
        note = f"raised by replica {first} of {len(self._team.devices)} on {self._team.devices[first]}"
        for r, other in self._errors.items():
            if r != first:
                note += f"; replica {r} also failed: {described(other)}"
        add_note(error, note)
        return error

    def _unequal(self) -> str:
        where = [f"replica {r} is at {point.name}" for r, point in self._arrived.items()]
        where += [f"replica {r} has ended" for r in self._results]
        hint = ""
        if any("gradient" in point.name for point in self._arrived.values()):
            hint = (
                " A replica that runs no backward, since none of its rows asks for one, runs one of zero: "
                "(outputs.sum() * 0).backward()."
            )
        return (
            "The replicas synchronized a different number of times, or in a different order: "
            f"{', '.join(sorted(where))}. Every replica must come to the same synchronization points (merge_call, "
            "all_reduce, all_gather, optimizer.step, the first read of a gradient after backward) in the same order: "
            f"let no such call depend on the replica or on its data.{hint}"
        )


@final
class Replicas:
    """Runs the replicas of a strategy: one on the caller's thread, several on threads.

    Each run borrows a set of threads. So several runs at the same time, of several threads or from a merge function, do
    not wait for each other.

    Args:
        devices: The device of each replica.
        first: How many replicas other processes have before these. See Note [Random streams of workers].
    """

    def __init__(self, devices: Sequence[Device], first: int = 0) -> None:
        self.devices = tuple(devices)
        self.has_drawn = False  # whether a replica other than replica 0 of all has drawn in the last run
        self._first = first
        self._idle: list[ReplicaThreads] = []

    def run(
        self, call: Callable[[Replica], Tree], present: Sequence[int], watch: Watch | None = None
    ) -> dict[int, Tree]:
        """Calls `call` for each of the replicas `present`, while `watch` observes, and returns the result of each.

        Raises:
            BaseException: Whatever the lowest replica that failed raised: the same object, when all have stopped.
            RuntimeError: If the replicas came to different synchronization points.
        """
        # A single replica has nobody to take turns with, so it runs as a plain step would: on the caller's thread.
        if len(self.devices) == 1:
            replica = InlineReplica(0, self.devices[0], torch.get_default_device())
            with in_use(replica.device):
                return {0: performed_alone(call, (replica,), {})}
        threads = self._borrow()
        try:
            run = _Run(threads, call, present, watch)
            result = run.result()
            self.has_drawn = run.has_drawn
            return result
        finally:
            # After an interrupted run the threads have ended, and cannot be used again.
            if threads.is_fit:
                self._idle.append(threads)

    def _borrow(self) -> ReplicaThreads:
        while self._idle:
            threads = self._idle.pop()
            if threads.is_fit:
                return threads
        return ReplicaThreads(self.devices, self._first)
