"""One of several replicas, on the thread that called `run` or on a thread of its own, and what it reports to the run.

A replica reports when it comes to a synchronization point, pauses, ends or fails. It stands still then, until the run
answers. Note [Who may call what on which thread] in `replica_threads` tells who waits for whom.
"""

from __future__ import annotations

import contextvars
import functools
import os
import sys
import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, final

from torchstrategy._core.context import in_use, nowhere
from torchstrategy._core.trace import traced
from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.instruments import performed, reached
from torchstrategy._execution.replica import Combine, Replica, ReplicaStopped


@dataclass(eq=False)
class OneOfSeveral(Replica):
    """One of several replicas, on the caller's thread or on one of its own."""

    process: int = field(default_factory=os.getpid)
    thread: int | None = None  # the thread on which the step runs; None before and after
    is_cancelled: bool = False  # written by the caller's thread

    def perform(self, run_in: RunIn, call: Callable[[Replica], Tree]) -> Report:
        """Calls the step, and tells how it ended. The replica can synchronize during this call, on this thread."""
        # The traceback of an error refers to this frame: with the report in a variable, that would be a cycle.
        self.thread = threading.get_ident()
        try:
            if self.is_cancelled:
                raise ReplicaStopped
            step = functools.partial(call, self)
            return self._ended(Ended(self.index, run_in(self.device, lambda: performed(self.index, step))))
        except BaseException as error:
            # Also SystemExit and KeyboardInterrupt: the other replicas are stopped first, however the step ends.
            return self._ended(Failed(self.index, error))

    def _ended(self, outcome: Report) -> Report:
        if os.getpid() != self.process and not was_stopped(outcome):
            _end_child(outcome)
        self.thread = None
        return outcome

    def pause(self) -> None:
        self._report(Paused(self.index))

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
            return self._report(Synchronizing(self.index, name, known, brought))

    def _report(self, report: Report) -> Tree:
        if os.getpid() != self.process:
            raise RuntimeError(_FORKED.format(replica=self.index))
        return self._stand_still(report)

    @abstractmethod
    def _stand_still(self, report: Report) -> Tree:
        """Waits until it is this replica's turn again, and returns what it is told then."""


@final
@dataclass(eq=False)
class CallersReplica(OneOfSeveral):
    """A replica on the thread that called `run`: all replicas before it have ended."""

    meet: Callable[[Report], Tree] = field(kw_only=True)
    callers_device: Device = field(kw_only=True)
    callers_variables: contextvars.Context = field(kw_only=True)

    def _stand_still(self, report: Report) -> Tree:
        # What the caller's thread does for all replicas, it does outside of this one.
        with nowhere(), in_use(self.callers_device):
            return self.callers_variables.run(self.meet, report)


@final
@dataclass(eq=False)
class ThreadReplica(OneOfSeveral):
    """A replica on a thread of its own."""

    inbox: SimpleQueue[Any] = field(kw_only=True)  # of messages that wake it: its task, an answer, or `STOP`
    reports: SimpleQueue[Report] = field(kw_only=True)

    def _stand_still(self, report: Report) -> Tree:
        self.reports.put(report)
        answer = self.inbox.get()
        if answer is STOP:
            raise ReplicaStopped
        return answer.value

    def serve(self, run_in: RunIn, call: Callable[[Replica], Tree]) -> None:
        """Performs the step on this replica's thread."""
        self.reports.put(self.perform(run_in, call))


_FORKED = (
    "This process was forked in replica {replica}, in the middle of strategy.run: the threads of the other replicas, "
    "and that of the caller, are not in it, and nobody answers here. Let a child do what it is for and leave by "
    "os._exit, without synchronizing (all_reduce, merge_call, optimizer.step, the first read of a gradient after "
    "backward) and without coming to the end of the step; or fork outside of strategy.run."
)


class Synchronizing(NamedTuple):
    replica: int
    name: str
    combine: Combine
    brought: Tree


class Paused(NamedTuple):
    replica: int


class Ended(NamedTuple):
    replica: int
    result: Tree


class Failed(NamedTuple):
    replica: int
    error: BaseException


Report = Synchronizing | Paused | Ended | Failed
# Calls the step on a device, in the state of torch that the caller has: see `CallerState`.
RunIn = Callable[[Device, Callable[[], Tree]], Tree]


class Answer(NamedTuple):
    value: Tree


def was_stopped(report: Report) -> bool:
    return isinstance(report, Failed) and isinstance(report.error, ReplicaStopped)


BEGIN, STOP = object(), object()


def nobody(report: Report) -> Tree:
    raise AssertionError("a replica stands still only during its step")


def _end_child(outcome: Report) -> None:
    """Ends a child process that was forked in a step, as a script ends. In the child, no thread waits for the step."""
    error = outcome.error if isinstance(outcome, Failed) else RuntimeError(_FORKED.format(replica=outcome.replica))
    if not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else int(code is not None))
