"""What a trace of torch's profilers shows of a run, in the words of the user.

    torchstrategy.run train_step                a call of `Strategy.run`, on the thread that made it
    torchstrategy.wait for replicas             that thread, while they run on theirs
    torchstrategy.run train_step [replica 1]    the step in one replica
    torchstrategy.hand in gradients             it adds what it has collected to the total, if it is its turn
    torchstrategy.wait at optimizer.step()      that replica has come to a meeting, and has to go on after it
    torchstrategy.meeting optimizer.step()      all replicas are there
    torchstrategy.settle gradients              the gradients of the replicas become one
    torchstrategy.update [Adam]                 the optimizer's own step
    torchstrategy.bring parameters              what has changed goes to the replicas' copies
    torchstrategy.copy modules                  each replica is given modules of its own, once
    torchstrategy.deal a batch                  a batch is read, cut into pieces, and sent

Where no profiler is on, no name is made and nothing is recorded.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import record_function

from torchstrategy._core.torch_internals import is_profiling, is_profiling_this_thread_only

_UNSEEN: AbstractContextManager[None] = nullcontext()


def traced(words: str, *things: object) -> AbstractContextManager[object]:
    """A block that a profiler shows as `torchstrategy.` and some words, with the names of things for each `{}`."""
    if not is_profiling():
        return _UNSEEN
    return record_function(f"torchstrategy.{words.format(*map(_name, things))}")


def warn_of_unseen_threads() -> None:
    """Says that a profiler is on which sees nothing of other threads: by default, those of torch do not."""
    if is_profiling_this_thread_only():
        warnings.warn(
            "A profiler is on that sees this thread only, and replicas run on threads of their own: the operators that "
            "they call will be missing from its trace. Let it see all threads:\n"
            "    from torch._C._profiler import _ExperimentalConfig\n"
            "    torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))",
            stacklevel=2,
        )


def _name(thing: object) -> str:
    if isinstance(thing, (str, int)):
        return str(thing)
    while isinstance(thing, functools.partial):
        thing = thing.func
    name = getattr(thing, "__qualname__", None)
    if not isinstance(name, str):
        name = thing.__class__.__qualname__  # a callable object, or an optimizer
    return name.rpartition("<locals>.")[2]
