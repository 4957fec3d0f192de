"""The ranges that torch's profilers show of a run.

    torchstrategy.run train_step                    a call of `Strategy.run`, on the
                                                    thread that made it
    torchstrategy.wait for replicas                 that thread waits while the replicas
                                                    run on their threads
    torchstrategy.run train_step [replica 1]        the step in one replica
    torchstrategy.accumulate gradients              a replica adds its gradients to the
                                                    total, if it is its turn
    torchstrategy.wait at optimizer.step()          a replica has come to a
                                                    synchronization point and waits to
                                                    go on
    torchstrategy.synchronize at optimizer.step()   all replicas are at this
                                                    synchronization point
    torchstrategy.reduce gradients                  the gradients of the replicas are
                                                    reduced to one
    torchstrategy.update [Adam]                     the optimizer's own step
    torchstrategy.update [Adam] [replica 1]         the same step, by the copy of the
                                                    optimizer that a replica has
    torchstrategy.bring parameters                  changed parameters are copied to the
                                                    replicas
    torchstrategy.copy modules                      each replica gets its own copies of
                                                    the modules, once
    torchstrategy.split a batch                     a batch is read, split, and sent to
                                                    the devices

Without a profiler, the library makes no names and records nothing.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import record_function

from torchstrategy._base.torch_internals import (
    is_profiling,
    is_profiling_this_thread_only,
)

_UNSEEN: AbstractContextManager[None] = nullcontext()


def traced(words: str, *things: object) -> AbstractContextManager[object]:
    """A block that a profiler shows as `torchstrategy.` and `words`.

    Each `{}` in the words becomes the name of one of `things`.
    """
    if not is_profiling():
        return _UNSEEN
    return record_function(f"torchstrategy.{words.format(*map(_name, things))}")


def warn_of_unseen_threads() -> None:
    """Warns if a profiler is on that does not see other threads.

    By default, torch's profilers do not see them.
    """
    if is_profiling_this_thread_only():
        warnings.warn(
            "A profiler is on that sees this thread only, and replicas run on threads "
            "of their own: the operators that they call will be missing from its "
            "trace. Let it see all threads:\n"
            "    from torch._C._profiler import _ExperimentalConfig\n"
            "    "
            "torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))",
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
