"""Where the replicas of a strategy run, and whose turn it is.

Replicas that share a physical device run one at a time, in replica order: the next one
goes on when one has come to a synchronization point or to its end. Replicas on
different accelerators run at the same time. An instrument may have all replicas run one
at a time, in any order, and let another one go on also where a replica pauses.

Replicas that run one at a time, in order, run on the thread that called `run`, one
after the other, as long as none of them has to wait. If one comes to a synchronization
point, those after it run on threads of their own:

    caller's thread      replica 0 runs    give turn ......... combine   replica 0
                         to the point          \\           /              continues ...
    replica 1's thread                          run to the point
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, final

import torch

from torchstrategy._base.context import CallerState, outside_of_strategies, using_device
from torchstrategy._base.devices import memory_device
from torchstrategy._base.errors import add_note, described
from torchstrategy._base.torch_internals import (
    keep_graphs_here,
    keep_what_stands_in_for_gpus,
)
from torchstrategy._base.trace import traced
from torchstrategy._base.types import Device, Tree
from torchstrategy._group.device_streams import DeviceStreams
from torchstrategy._group.group import InlineReplica, Replica, ReplicaStopped, Watch
from torchstrategy._group.instruments import (
    Turns,
    call_step_alone,
    tell_held,
    tell_run_begins,
)
from torchstrategy._group.one_of_several import (
    STOP,
    Ended,
    OneOfSeveral,
    Paused,
    Report,
    Synchronizing,
    await_turn,
)
from torchstrategy._group.random_streams import RandomStreams


# Note [Who may call what on which thread]
# The single replica of a strategy runs on the caller's thread, and so does its
# `combine`. For that while, `InlineReplica` puts the replica's frame and default device
# aside. All that follows is about several replicas.
# The caller's thread runs everything of `_Run`: it gives the turns, switches the random
# streams, and calls `combine`. A replica's thread only runs the step, up to
# `stand_still`: there it reports and waits until the caller's thread answers. So at a
# synchronization point all replicas stand still, and `combine` may use all that
# replicas share without a lock.
# If all replicas are in one lane, and nobody gives the turns, the caller's thread also
# runs the step in a replica: in the first one, and in each one after it for as long as
# those before it have ended. Where such a replica stands still, the caller's thread
# goes on with `_Run._meet`, which lets the others come to the same point. Nothing but
# `ReplicaStopped` is raised there: the step must not catch an error of another replica.
# Who raises it is `result`. Between two such points, the replicas of one lane run one
# at a time. A lane is a physical device; if somebody gives the turns, or a `Watch` asks
# for it, all replicas are in one lane. The replicas of two lanes may run at the same
# time: a replica may then write only on its own objects, or under a lock. The
# exceptions are:
# - If all replicas are on one device, each adds its gradients to the shared total
#   before it waits or ends (`GradientReducer.accumulate`).
# - If an optimizer calls a closure, its loop runs on the thread of the lead, the first
#   replica, while the others wait.
# - When the step begins in a replica, `ReplicatedRun.local_objects` appends the replica
#   to a list of the run, and enters its objects in tables under its own id. Python does
#   each of these in one piece.
# - Whoever steps an optimizer or reads `.data`, on any thread, may write
#   `ReplicatedRun._on_other_thread`, or have `DataReads.note` add to a set. Python does
#   these in one piece, too.
# Only the thread of the step may synchronize, and only during the step: any other
# thread would wait for ever.
# The threads send each other messages by `SimpleQueue` only. Its `put` may also be
# called in a finalizer or a signal handler, while another `put` is under way; code with
# a lock could then wait for ever. To stop a replica that sends no message, the caller's
# thread sets `is_cancelled`, which the replica reads before its step, and has Python
# raise an exception on the thread that the replica has written in `thread`
# (`ReplicaThreads.abandon`).
def _serve(inbox: SimpleQueue[Any]) -> None:
    """Runs on a replica's thread: does one task after another, until it gets None."""
    keep_graphs_here()
    # Raised by `ReplicaThreads.abandon` after the step has ended.
    with suppress(ReplicaStopped):
        while (task := inbox.get()) is not None:
            if task is not STOP:
                task()
            del task  # or the step's arguments would live until the next run


@final
class ReplicaThreads:
    """Long-lived threads, one for each of several replicas, for one run at a time.

    Between runs, the threads hold no objects of the user's. They do not keep this
    object alive, and end with it.

    Args:
        devices: The device of each replica.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in devices]
        self._threads = [
            threading.Thread(
                target=_serve, args=(inbox,), name=f"{_NAME}{r}", daemon=True
            )
            for r, inbox in enumerate(self.inboxes)
        ]
        # A replica's thread may be the first one that compiles; at its end it would
        # free what torch needs for others.
        keep_what_stands_in_for_gpus()
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _dismiss, self.inboxes)
        self._finalizer.atexit = False  # `_end_all` does it
        _alive.add(self)

    @property
    def is_fit(self) -> bool:
        """Whether the threads can be used.

        They cannot once they were stopped, and do not exist in a forked process.
        """
        return self._finalizer.alive and all(
            thread.is_alive() for thread in self._threads
        )

    def abandon(self, replicas: Mapping[int, OneOfSeveral]) -> None:
        """Stops the replicas, whatever they do, and waits for their threads to end.

        After this, `is_fit` is false. The method does not use what `_Run` knows about
        the replicas, since this may be wrong: see Note [What happens on Ctrl-C]. If a
        second exception interrupts the method, or it is called again, every thread has
        still been told to end.
        """
        self._finalizer.detach()
        for replica in replicas.values():
            replica.is_cancelled = True
        for inbox in self.inboxes:
            inbox.put(STOP)  # stops a replica that waits at a synchronization point
            inbox.put(None)  # ends the thread
        for r, replica in replicas.items():
            # A replica that waited at a synchronization point runs its `finally` blocks
            # now, and may finish them.
            self._threads[r].join(_PATIENCE_S)
            while self._threads[r].is_alive():
                # The replica's step raises at its next line of Python.
                if (thread := replica.thread) is not None:
                    stop = ctypes.py_object(ReplicaStopped)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), stop
                    )
                self._threads[r].join(_PATIENCE_S)


# Torch's words where tensors, or a tensor and a generator, are on different devices.
_OTHER_DEVICE = re.compile(
    "device type for generator|on the same device|at least two devices"
)
_DEFAULT_DEVICE = (
    "In this replica the default device is {device}, whatever torch.set_default_device "
    "has set: what the step creates without device=..., as in torch.zeros(3), is "
    "there. Move what was made elsewhere: mask.to(x.device). A generator draws on its "
    "own device: torch.rand(3, generator=g, device=g.device).to(x.device)."
)

_NAME = "torchstrategy-replica-"  # of a thread, before the number of its replica
_BEGIN = object()  # the message to a replica that has not begun
_LOOK_UP_S = 1.0  # how long the caller's thread waits before it looks for signals
# The time before a replica is interrupted, and before the next time if it has caught
# the exception.
_PATIENCE_S = 0.1


def _dismiss(inboxes: list[SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


_alive: weakref.WeakSet[ReplicaThreads] = weakref.WeakSet()


def _end_all() -> None:
    """Ends all threads of replicas before the interpreter ends.

    They are daemons, so that one that does not end keeps no process alive. But torch
    may keep Python objects with a thread, such as the tables of CUDA graphs, and if the
    interpreter ends first, the process aborts.
    """
    for threads in list(_alive):
        _dismiss(threads.inboxes)
    until = time.monotonic() + _LOOK_UP_S
    for thread in threading.enumerate():
        if thread.name.startswith(_NAME) and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
            # Before Python 3.13, that waits for Python's part of the thread. Torch's
            # part ends after it.
            while (
                os.path.exists(f"/proc/self/task/{thread.native_id}")
                and time.monotonic() < until
            ):
                time.sleep(0.001)


atexit.register(_end_all)


_here = threading.local()


def runs_under_way() -> int:
    """How many nested runs of several replicas are under way on this thread.

    Runs nest if a merge function calls `run`.
    """
    depth: int = getattr(_here, "depth", 0)
    return depth


# Note [What happens on Ctrl-C]
# Python calls the handler of a signal on the main thread only, between two lines of
# Python code, and the handler of Ctrl-C raises KeyboardInterrupt there. The main thread
# is mostly the one that called `run`. So this exception, as that of any other handler,
# may come out of every line that this thread runs, also of one that takes something
# back. Hence:
# 1. This thread waits for nobody without looking up. A signal that comes just before it
#    begins to wait would be handled only when it wakes. `_Run._receive` and
#    `Prefetcher.next` wait for a second at most, and then again;
#    `ProcessGroup._finish_one`, which waits for other workers, for a quarter of a
#    second.
# 2. In the step of a replica that is on this thread, it is an error of this replica as
#    any other (`OneOfSeveral.perform`). All replicas stand still then, and those that
#    wait are stopped one by one, which lets their `finally` blocks run
#    (`_Run._stop_waiting`). A lone replica is left as a plain step is: its frame is
#    taken away by a `finally`, and not by a `with`, since the exception may come on the
#    way into `__exit__`.
# 3. In the code of a run, the lines that were broken off may have left anything, and
#    replicas may be at work. So `ReplicaThreads.abandon` uses nothing that the run
#    knows. It tells all threads to end, raises `ReplicaStopped` in those that compute,
#    at their next line of Python, and waits until they have ended: after that, nobody
#    writes on what is taken back. A second Ctrl-C ends this waiting, so that a replica
#    that is stuck in C code holds nobody up.
# 4. What the run has done is taken back as after any failure: see Note [The order of a
#    run and of its undoing] in `_copies/replicated_storage`. Each part of it works,
#    too, where what it takes back was not done, or done half.
# 5. Other workers are told, as of any other failure (`Workers.tell_why`): each raises a
#    `WorkerError` that says so.
# 6. A batch stays in the queue of a `Prefetcher` until the program has got it, so none
#    is lost.
# The strategy can be used again then, unless it has other workers.
# `tests/contract/test_ctrl_c.py` holds all this.
@final
class _Run:
    """One run of several replicas.

    Its methods are called only on the thread that called `run`.
    """

    def __init__(
        self,
        replicas: Replicas,
        call: Callable[[Replica], Tree],
        present: Sequence[int],
        watch: Watch | None,
        device_streams: DeviceStreams | None,
    ) -> None:
        turns, devices = tell_run_begins(len(replicas.devices)), replicas.devices
        streams = {} if device_streams is None else device_streams.callers
        self._state, self._callers_device = (
            CallerState(streams),
            torch.get_default_device(),
        )
        self._replica = functools.partial(OneOfSeveral, device_streams=device_streams)
        # Calls what acts for the caller where a replica is on this thread: it sees the
        # caller's context variables.
        self._outside: Callable[..., Tree] = self._state.variables.copy().run
        self._all, self._call = replicas, call
        # Borrowed when a replica first has to run on one of them.
        self._threads: ReplicaThreads | None = None
        self._on_threads: dict[int, OneOfSeveral] = {}
        self._reports: SimpleQueue[Report] = SimpleQueue()
        self._process = os.getpid()
        # For each replica that stands still, the message that wakes it: `_BEGIN`,
        # `STOP`, or what it is told.
        self._to_send: dict[int, Any] = dict.fromkeys(present, _BEGIN)
        self._running: set[int] = set()
        self._arrived: dict[int, Synchronizing] = {}
        self._results: dict[int, Tree] = {}
        self._errors: dict[int, BaseException] = {}
        # What was raised where a replica of this thread stood still.
        self._interruption: BaseException | None = None
        self._stopped_here: int | None = None  # that replica, once it was stopped
        # If somebody gives the turns, all replicas are in one lane.
        self._lanes: dict[int, Device | None] = dict.fromkeys(present)
        if turns is None:
            self._lanes = {r: replicas.lanes[r] for r in present}
        # See Note [Random streams of replicas]. The streams are chosen before a watch
        # puts all replicas in one lane: a replica draws from the same kind of stream
        # with and without the watch.
        one_at_a_time = len(set(self._lanes.values())) == 1
        self._streams = RandomStreams(
            devices, one_at_a_time, runs_under_way(), replicas.first
        )
        if watch is not None and watch.take_turns:
            self._lanes = dict.fromkeys(present)
        self._is_in_order = turns is None and len(set(self._lanes.values())) == 1
        self._next: Turns = turns or min
        self._look = watch.look if watch is not None else lambda running: None
        self._begin_turn = watch.begin_turn if watch is not None else lambda r: None

    def result(self) -> dict[int, Tree]:
        _here.depth = runs_under_way() + 1
        try:
            self._look(())
            if self._is_in_order:
                self._run_here()
            while self._to_send and not self._errors:
                self._go_on()
            if self._errors:
                raise self._error()
            return self._results
        except BaseException as error:
            # A replica, a merge function or a signal handler has raised. If all
            # replicas stand still, the waiting ones are stopped one by one, and the
            # threads can be used again. Else the threads are ended. See Note [What
            # happens on Ctrl-C].
            if self._is_orderly(error):
                self._stop_waiting()
            if self._threads is not None and (
                self._running or self._arrived or self._to_send
            ):
                self._threads.abandon(self._on_threads)
            raise
        finally:
            _here.depth -= 1
            self._all.has_drawn = self._streams.give_back()
            # Their tracebacks refer to this frame: that would be a cycle.
            self._errors.clear()
            self._interruption = None
            if self._threads is not None:
                self._all.idle.append(self._threads)

    def _run_here(self) -> None:
        """Calls the step in one replica after the other on this thread.

        It stops when a replica has waited for those after it.
        """
        for r in sorted(self._to_send):
            if self._to_send.get(r) is not _BEGIN or self._errors:
                return
            stand_still = functools.partial(self._outside, self._meet)
            here = self._replica(r, self._all.devices[r], stand_still=stand_still)
            self._take_turn(r)
            report = here.perform(self._state.run_on_callers_thread, self._call)
            # Otherwise the replica and this run would refer to each other.
            del here.stand_still
            self._take(report)
            del report  # its error may refer to this frame
            if self._interruption is not None:
                raise self._interruption

    def _meet(self, report: Report) -> Tree:
        """Lets the other replicas come to where the one on this thread stands still.

        Returns what this one gets.

        What this thread does here, it does for all replicas: outside of the one that it
        runs.
        """
        try:
            with outside_of_strategies(self._callers_device):
                self._take(report)
                if not self._is_over and isinstance(report, Synchronizing):
                    self._go_on()
                if not self._is_over:
                    return self._take_turn(report.replica)
        except BaseException as error:
            self._interruption = error
        self._arrived.pop(report.replica, None)
        self._to_send.pop(report.replica, None)
        self._stopped_here = report.replica
        raise ReplicaStopped

    @property
    def _is_over(self) -> bool:
        """Whether something was raised, so that the replicas stop."""
        return bool(self._errors) or self._interruption is not None

    def _go_on(self) -> None:
        """Lets every replica run to a synchronization point or its end.

        If they are at one, they synchronize.

        The replicas of one lane run one by one, and those of different lanes all at
        once.
        """
        with traced("wait for replicas"):
            for lane in dict.fromkeys(self._lanes[r] for r in sorted(self._to_send)):
                self._wake_one(lane)
            while self._running:
                lane = self._lanes[self._receive()]
                if not self._errors:
                    self._wake_one(lane)
        if self._arrived and not self._errors:
            self._hold_synchronization_point()

    def _wake_one(self, lane: Device | None) -> None:
        waiting = [r for r in sorted(self._to_send) if self._lanes[r] == lane]
        if waiting:
            self._wake(self._next(waiting))

    def _take_turn(self, r: int) -> Any:
        """Says that a replica runs from here on. Returns the message that wakes it."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "This process was forked during strategy.run: the replicas' threads "
                "are not in it."
            )
        # See Note [Random streams of replicas]: while the replica still stands still.
        self._streams.put_in_force(r)
        self._begin_turn(r)
        if self._running:
            self._look(self._running)
        self._running.add(r)
        return self._to_send.pop(r)

    def _wake(self, r: int) -> None:
        message = self._take_turn(r)
        self._threads = self._threads or self._all.borrow()
        inbox = self._threads.inboxes[r]
        if message is _BEGIN:
            wait = functools.partial(await_turn, inbox, self._reports)
            self._on_threads[r] = replica = self._replica(
                r, self._all.devices[r], stand_still=wait
            )
            message = functools.partial(
                replica.serve,
                self._state.run_on_other_thread,
                self._call,
                self._reports,
            )
        inbox.put(message)

    def _receive(self) -> int:
        report = None
        # It must not wait for ever: see Note [What happens on Ctrl-C].
        while report is None:
            with suppress(Empty):
                report = self._reports.get(timeout=_LOOK_UP_S)
        self._take(report)
        return report.replica

    def _take(self, report: Report) -> None:
        """Notes what a replica has reported, which stands still from here on."""
        self._look(self._running)
        self._running.discard(report.replica)
        if isinstance(report, Synchronizing):
            self._arrived[report.replica] = report
        elif isinstance(report, Paused):
            self._to_send[report.replica] = None
        elif isinstance(report, Ended):
            self._results[report.replica] = report.result
        else:
            was_stopped_here = report.replica == self._stopped_here
            if not (isinstance(report.error, ReplicaStopped) or was_stopped_here):
                self._errors[report.replica] = report.error

    def _hold_synchronization_point(self) -> None:
        points = [self._arrived[r] for r in sorted(self._arrived)]
        some = [point for point in points if point.is_for_some]
        if some:
            points = some
        elif self._results or any(point.name != points[0].name for point in points):
            raise RuntimeError(self._unequal())
        # See Note [Who may call what on which thread] and Note [Random streams of
        # replicas].
        self._streams.put_callers_in_force()
        tell_held(points[0].name)
        with traced("synchronize at {}", points[0].name):
            answers = points[0].combine([point.brought for point in points])
        self._to_send = {
            point.replica: answer for point, answer in zip(points, answers, strict=True)
        }
        for point in points:
            del self._arrived[point.replica]
        self._look(())

    def _is_orderly(self, error: BaseException) -> bool:
        """Whether every replica stands still.

        If so, the waiting replicas can be stopped one by one.
        """
        if self._running or (self._threads is not None and not self._threads.is_fit):
            return False
        return isinstance(error, Exception) or any(
            error is raised for raised in self._errors.values()
        )

    def _stop_waiting(self) -> None:
        """Stops every replica that waits at a synchronization point, one at a time.

        Others have not begun, or ended.
        """
        self._to_send = {
            r: message for r, message in self._to_send.items() if message is not _BEGIN
        }
        # A replica may come here again: code in a `finally` block of the step may have
        # synchronized, or paused.
        while waiting := self._to_send.keys() | self._arrived.keys():
            r = min(waiting)
            self._arrived.pop(r, None)
            self._to_send[r] = STOP
            self._wake(r)
            self._receive()

    def _error(self) -> BaseException:
        first = min(self._errors)
        error = self._errors[first]
        note = (
            f"raised by replica {first} of {len(self._all.devices)} on "
            f"{self._all.devices[first]}"
        )
        others = [
            f"; replica {r} also failed: {described(other)}"
            for r, other in self._errors.items()
            if r != first
        ]
        add_note(error, note + "".join(others))
        if _OTHER_DEVICE.search(str(error)):
            add_note(error, _DEFAULT_DEVICE.format(device=self._all.devices[first]))
        return error

    def _unequal(self) -> str:
        where = [
            f"replica {r} is at {point.name}" for r, point in self._arrived.items()
        ]
        where += [f"replica {r} has ended" for r in self._results]
        hint = ""
        if any("gradient" in point.name for point in self._arrived.values()):
            hint = (
                " A replica that runs no backward, since none of its rows asks for "
                "one, runs one of zero: (outputs.sum() * 0).backward()."
            )
        return (
            "The replicas synchronized a different number of times, or in a different "
            f"order: {', '.join(sorted(where))}. Every replica must come to the same "
            "synchronization points (merge_call, all_reduce, all_gather, "
            "optimizer.step, the first read of a gradient after backward) in the same "
            f"order: let no such call depend on the replica or on its data.{hint}"
        )


@final
class Replicas:
    """Runs the replicas of a strategy on the caller's thread and on further threads.

    A single replica runs on the caller's thread.

    Each run borrows a set of threads if it needs them. So several runs at the same
    time, of several threads or from a merge function, do not wait for each other.

    Args:
        devices: The device of each replica.
        first: How many replicas other processes have before these. See Note [Random
            streams of workers].
    """

    def __init__(self, devices: Sequence[Device], first: int = 0) -> None:
        self.devices, self.first = tuple(devices), first
        # Replicas of one lane run one at a time, so that what they write and draw comes
        # in the same order in every run. See Note [Who may call what on which thread].
        self.lanes: list[Device | None] = [memory_device(device) for device in devices]
        # Whether a replica other than replica 0 of all has drawn in the last run.
        self.has_drawn = False
        # Threads that no run has. After an interrupted run they have ended, and are not
        # used again.
        self.idle: list[ReplicaThreads] = []

    def run(
        self,
        call: Callable[[Replica], Tree],
        present: Sequence[int],
        watch: Watch | None = None,
        device_streams: DeviceStreams | None = None,
    ) -> dict[int, Tree]:
        """Calls `call` for each of the replicas `present`; returns the result of each.

        Meanwhile, `watch` observes the replicas.

        Raises:
            BaseException: Whatever the lowest replica that failed raised: the same
                object, when all have stopped.
            RuntimeError: If the replicas came to different synchronization points.
        """
        # A single replica has nobody to take turns with, so it runs as a plain step
        # would: on the caller's thread.
        if device_streams is not None:
            with device_streams.steps():
                return self._run(call, present, watch, device_streams)
        return self._run(call, present, watch, None)

    def _run(
        self,
        call: Callable[[Replica], Tree],
        present: Sequence[int],
        watch: Watch | None,
        device_streams: DeviceStreams | None,
    ) -> dict[int, Tree]:
        if len(self.devices) == 1:
            return {0: self._run_alone(call, watch, device_streams)}
        return _Run(self, call, present, watch, device_streams).result()

    def _run_alone(
        self,
        call: Callable[[Replica], Tree],
        watch: Watch | None,
        device_streams: DeviceStreams | None,
    ) -> Tree:
        device = self.devices[0]
        replica = InlineReplica(
            0, device, torch.get_default_device(), device_streams=device_streams
        )
        if watch is not None:
            replica.go_on = functools.partial(watch.begin_turn, 0)
        replica.go_on()
        with using_device(device):
            try:
                return call_step_alone(call, (replica,), {})
            finally:
                if device_streams is not None:
                    device_streams.end_step()

    def borrow(self) -> ReplicaThreads:
        """Threads that no other run has."""
        while self.idle:
            threads = self.idle.pop()
            if threads.is_fit:
                return threads
        return ReplicaThreads(self.devices)
