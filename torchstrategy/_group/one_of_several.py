"""One of several replicas, on a thread, and what it reports to the run.

Its thread is the one that called `run`, or a thread of its own.

A replica reports when it comes to a synchronization point, pauses, ends or fails. It
stands still then, until the run answers. Note [Who may call what on which thread] in
`replica_threads` tells who waits for whom.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, final

from torchstrategy._base.trace import traced
from torchstrategy._base.types import Device, Tree
from torchstrategy._group.device_streams import NO_SIDE_STREAM, DeviceStreams, keep_for
from torchstrategy._group.group import Combine, Replica, ReplicaStopped
from torchstrategy._group.instruments import call_step, tell_reached


@final
@dataclass(eq=False)
class OneOfSeveral(Replica):
    """One of several replicas, on the caller's thread or on one of its own.

    Args:
        stand_still: Reports to the run, waits until it is this replica's turn again,
            and returns what it is told then.
    """

    stand_still: Callable[[Report], Tree] = field(kw_only=True)
    process: int = field(default_factory=os.getpid)
    # The thread on which the step runs; None before and after.
    thread: int | None = None
    is_cancelled: bool = False  # written by the caller's thread

    def perform(
        self, run_on_thread: RunOnThread, call: Callable[[Replica], Tree]
    ) -> Report:
        """Calls the step, and tells how it ended.

        The replica can synchronize during this call, on this thread.
        """
        # The traceback of an error refers to this frame: with the report in a variable,
        # that would be a cycle.
        self.thread = threading.get_ident()
        try:
            if self.is_cancelled:
                raise ReplicaStopped
            step = functools.partial(
                call_step, self.index, functools.partial(call, self)
            )
            if self.device_streams is not None:
                step = functools.partial(_call_on_streams, self.device_streams, step)
            return self._end(Ended(self.index, run_on_thread(self.device, step)))
        except BaseException as error:
            # Also SystemExit and KeyboardInterrupt: the other replicas are stopped
            # first, however the step ends. See Note [What happens on Ctrl-C] in
            # `replica_threads`.
            return self._end(Failed(self.index, error))

    def _end(self, outcome: Report) -> Report:
        if os.getpid() != self.process:
            _end_child(outcome)
        self.thread = None
        return outcome

    def serve(
        self,
        run_on_thread: RunOnThread,
        call: Callable[[Replica], Tree],
        reports: SimpleQueue[Report],
    ) -> None:
        """Performs the step on a thread of its own."""
        reports.put(self.perform(run_on_thread, call))

    def pause(self) -> None:
        self._report(Paused(self.index))

    def synchronize(
        self, name: str, combine: Combine, brought: Tree, is_for_some: bool = False
    ) -> Tree:
        tell_reached(self.index, name)
        # See Note [Who may call what on which thread].
        if threading.get_ident() != self.thread:
            raise RuntimeError(
                f"Replica {self.index} came to {name}, where it synchronizes with the "
                "others, after its run or on another thread than that of its step, and "
                "would wait for them for ever. Call backward in the step, on the "
                "thread of the step; or detach what the step returns."
            )
        if self.telling is not None:
            self.telling(name)
        block = (
            NO_SIDE_STREAM
            if self.device_streams is None
            else self.device_streams.standing_still()
        )
        with block as side, traced("wait at {}", name):
            point = Synchronizing(self.index, name, combine, brought, is_for_some)
            answer = self._report(point)
        if side:
            keep_for(side, answer)
        return answer

    def _report(self, report: Report) -> Tree:
        if os.getpid() != self.process:
            raise RuntimeError(_FORKED.format(replica=self.index))
        return self.stand_still(report)


def _call_on_streams(streams: DeviceStreams, step: Callable[[], Tree]) -> Tree:
    """Calls a step that works on streams."""
    try:
        return step()
    finally:
        streams.end_step()


def await_turn(
    inbox: SimpleQueue[Any], reports: SimpleQueue[Report], report: Report
) -> Tree:
    """Makes a replica on a thread of its own stand still.

    The replica reports, and waits for the message that wakes it.
    """
    reports.put(report)
    answer = inbox.get()
    if answer is STOP:
        raise ReplicaStopped
    return answer


_FORKED = (
    "This process was forked in replica {replica}, in strategy.run: the threads of the "
    "other replicas and the caller are not in it, and nobody answers. Let a child "
    "leave by os._exit, without synchronizing (all_reduce, merge_call, optimizer.step, "
    "the first read of a gradient after backward) or ending the step; or fork outside "
    "of the run."
)


class Synchronizing(NamedTuple):
    replica: int
    name: str
    combine: Combine
    brought: Tree
    is_for_some: bool = False  # whether replicas that stand elsewhere need not come


class Paused(NamedTuple):
    replica: int


class Ended(NamedTuple):
    replica: int
    result: Tree


class Failed(NamedTuple):
    replica: int
    error: BaseException


Report = Synchronizing | Paused | Ended | Failed
# Calls the step on a device, in the state of torch that the caller has: see
# `CallerState`.
RunOnThread = Callable[[Device, Callable[[], Tree]], Tree]


STOP = object()  # the message to a replica that shall not go on


def _end_child(outcome: Report) -> None:
    """Ends a child process that was forked in a step, as a script ends.

    In the child, no thread waits for the step.
    """
    error = (
        outcome.error
        if isinstance(outcome, Failed)
        else RuntimeError(_FORKED.format(replica=outcome.replica))
    )
    if isinstance(error, ReplicaStopped):
        return
    if not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else int(code is not None))
