"""What a block left behind: threads, open scopes and changed settings of torch."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.optim import Optimizer
from torch.optim import optimizer as of_optimizers

from torchstrategy._base.context import CallerState, Frame, current_frame
from torchstrategy._base.errors import add_note
from torchstrategy._base.objects import torch_hooks
from torchstrategy._group.replica_threads import ReplicaThreads

_Look: TypeAlias = Callable[[], list[str]]
"""Says what is there now and was not when the look was prepared, line by line."""

_PATIENCE_S = 10.0  # a thread that was told to end may have a batch to finish


@contextmanager
def no_thread_leaks(*, timeout: float = _PATIENCE_S) -> Iterator[None]:
    """Fails if a thread that was started in the block outlives it.

    The threads of a strategy's replicas live as long as the strategy, so those of one
    that is still in use are no leak. All others are, daemons too: a loader that
    prefetches, a logger, a replica that cannot be stopped.

    Args:
        timeout: For how many seconds to wait, in all, for threads that were told to
            end.

    Raises:
        AssertionError: Naming each thread and where it is. If the block raised, that
            error is raised, with a note.

    Example:
        >>> with torchstrategy.testing.no_thread_leaks():
        ...     strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        ...     values = strategy.run(lambda: torch.ones(2))
    """
    with _nothing_left(_threads(timeout)):
        yield


@contextmanager
def no_scope_leaks() -> Iterator[None]:
    """Fails if this thread leaves the block in another strategy's scope.

    The scope has to be the one in which the thread began the block.

    Raises:
        AssertionError: Saying where the thread was, and where it is. If the block
            raised, that error is raised, with a note.

    Example:
        >>> with torchstrategy.testing.no_scope_leaks():
        ...     with torchstrategy.OneDeviceStrategy("cpu").scope():
        ...         model = torch.nn.Linear(2, 1)
        >>> with torchstrategy.testing.no_scope_leaks():  # doctest: +ELLIPSIS
        ...     torchstrategy.experimental_set_strategy(
        ...         torchstrategy.OneDeviceStrategy("cpu")
        ...     )
        Traceback (most recent call last):
        AssertionError: This thread was outside of every scope, and is in the scope of OneDeviceStrategy(...).
        >>> torchstrategy.experimental_set_strategy(None)
    """  # noqa: E501
    with _nothing_left(_scope()):
        yield


@contextmanager
def no_torch_state_leaks() -> Iterator[None]:
    """Fails if the block leaves a setting of torch changed.

    It looks at the settings of this thread and at those of the process.

    Grad mode and inference mode, autocast, modes and hooks that are in force, default
    dtype and device, determinism, numbers of threads, the current accelerator, global
    hooks of modules and optimizers, and the constructors that an open scope exchanges.
    Random numbers that were drawn are no leak.

    Raises:
        AssertionError: Naming each setting, its value before and its value now. If the
            block raised, that error is raised, with a note.

    Example:
        >>> with torchstrategy.testing.no_torch_state_leaks():
        ...     with torch.no_grad():
        ...         x = torch.ones(2) * 3
        >>> with torchstrategy.testing.no_torch_state_leaks():
        ...     mode = torch.set_grad_enabled(False)
        Traceback (most recent call last):
        AssertionError: grad was True, and is False.
        >>> mode = torch.set_grad_enabled(True)
    """
    with _nothing_left(_torch_state()):
        yield


@contextmanager
def no_leaks(*, timeout: float = _PATIENCE_S) -> Iterator[None]:
    """`no_thread_leaks`, `no_scope_leaks` and `no_torch_state_leaks`, in one report.

    Args:
        timeout: For how many seconds to wait, in all, for threads that were told to
            end.

    Raises:
        AssertionError: Naming all that was left. If the block raised, that error is
            raised, with a note.

    Example:
        >>> with torchstrategy.testing.no_leaks():
        ...     strategy = torchstrategy.OneDeviceStrategy("cpu")
        ...     with strategy.scope():
        ...         model = torch.nn.Linear(2, 1)
        ...     strategy.run(lambda: model(torch.ones(1, 2)).shape)
        torch.Size([1, 1])
    """
    with _nothing_left(_threads(timeout), _scope(), _torch_state()):
        yield


@contextmanager
def _nothing_left(*looks: _Look) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # it is the cause, or nearer to it
        for line in _found(looks):
            add_note(error, line)
        raise
    if lines := _found(looks):
        raise AssertionError("\n".join(lines))


def _found(looks: tuple[_Look, ...]) -> list[str]:
    return [line for look in looks for line in look()]


def _threads(timeout: float) -> _Look:
    before = set(threading.enumerate())

    def look() -> list[str]:
        if not set(threading.enumerate()) - before:
            return []
        gc.collect()  # a strategy in a cycle ends its threads only now
        deadline = time.monotonic() + timeout
        started = set(threading.enumerate()) - before - _threads_in_use()
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sorted(_still_running(thread) for thread in started if thread.is_alive())

    return look


def _threads_in_use() -> set[threading.Thread]:
    """The threads of replicas whose strategy is still there."""
    teams = [thing for thing in gc.get_objects() if type(thing) is ReplicaThreads]
    return {
        thread for threads in teams if threads.is_fit for thread in threads._threads
    }


def _still_running(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    where = f", in {frame.f_code.co_filename}, line {frame.f_lineno}" if frame else ""
    return f"The thread {thread.name!r} is still running{where}."


def _scope() -> _Look:
    before = current_frame()

    def look() -> list[str]:
        now = current_frame()
        return (
            []
            if now is before
            else [f"This thread was {_described(before)}, and is {_described(now)}."]
        )

    return look


def _described(frame: Frame | None) -> str:
    if frame is None:
        return "outside of every scope"
    if frame.replica_context is None:
        return f"in the scope of {frame.strategy!r}"
    return (
        f"in replica {frame.replica_context.replica_id_in_sync_group} of "
        f"{frame.strategy!r}"
    )


def _torch_state() -> _Look:
    before = _settings()

    def look() -> list[str]:
        now = _settings()
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        return [
            f"{name} was {before.get(name)!r}, and is {now.get(name)!r}."
            for name in changed
        ]

    return look


def _settings() -> dict[str, object]:
    return {**_of_the_thread(), **_of_the_process()}


def _of_the_thread() -> dict[str, object]:
    """What a replica's thread would take over from this one."""
    # To ask accelerators for their streams would start them.
    state = CallerState(streams={})
    torch_state: dict[str, object] = {
        "grad": state.grad,
        "inference": state.inference,
        **state.torch_state._asdict(),
    }
    del torch_state["autocast"], torch_state["autocast_nesting"]
    torch_state |= {
        f"autocast on {device_type}": rest
        for device_type, *rest in state.torch_state.autocast
    }
    return {name.replace("_", " "): value for name, value in torch_state.items()}


def _of_the_process() -> dict[str, object]:
    backends: Any = torch.backends  # in part without annotations
    cudnn = backends.cudnn
    products = (backends.cuda.matmul, backends.mkldnn.matmul)
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the current accelerator": _current_accelerator(),
        "determinism": torch.get_deterministic_debug_mode(),
        "anomaly detection": torch.is_anomaly_enabled(),
        # torch.get_float32_matmul_precision raises where the backends differ.
        # A backend begins with "none", which is as good as "ieee". Putting the
        # precision back leaves "ieee".
        "the precision of float32 products": [
            backend.fp32_precision.replace("none", "ieee") for backend in products
        ],
        "cuDNN's choice of algorithms": (
            cudnn.enabled,
            cudnn.benchmark,
            cudnn.deterministic,
        ),
        "threads between operations": torch.get_num_interop_threads(),
        "backward on several threads": torch.autograd.is_multithreading_enabled(),
        "torch.distributed's process group": _has_process_group(),
        "Module.__init__": nn.Module.__init__,
        "Module.__setstate__": nn.Module.__setstate__,
        "Optimizer.__init__": Optimizer.__init__,
        **{
            name: tuple(filter(_is_of_others, hooks))
            for name, hooks in _global_hooks().items()
        },
    }


def _global_hooks() -> dict[str, tuple[Callable[..., Any], ...]]:
    """The global hooks of all modules and all optimizers, by kind.

    PyTorch has no public function that lists them.
    """
    kinds = {**vars(of_modules), **vars(of_optimizers)}
    found = {
        name: hooks
        for name, hooks in kinds.items()
        if name.startswith("_global_") and name.endswith("_hooks")
    }
    return {
        name.strip("_").replace("_", " "): tuple(hooks.values())
        for name, hooks in found.items()
    }


def _is_of_others(hook: Callable[..., object]) -> bool:
    """Whether it is none of those that the first strategy puts up for good."""
    return hook not in (torch_hooks.on_step_begin, torch_hooks.on_step_end)


def _current_accelerator() -> int:
    """The index of this thread's current accelerator; 0 where none was used.

    A thread begins with 0, and to ask torch would start an accelerator.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not torch.get_device_module(accelerator).is_initialized():
        return 0
    return torch.accelerator.current_device_index()


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
