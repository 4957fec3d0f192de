"""What the library puts into torch's classes for a while.

Its hooks tell the library what a program does with objects of these classes.

- While a scope is open, it is told of each module, optimizer, scheduler and scaler that
  is created. torch has hooks for parameters that are registered on a module, but none
  for the creation of one of these. So the constructors of their base classes are
  replaced. A module that is copied or unpickled does not call its constructor, but
  `__setstate__`, so this method is replaced, too.
- While a run is under way, guards refuse steps of schedulers and scalers in a replica
  of which the run knows nothing. Schedulers count their own steps and `GradScaler` its
  updates, in objects that all replicas share. A proxy counts each step once. But
  `step_references` does not find every object that a step uses. So guards refuse a step
  in a replica before it is counted. They are on the attributes that the steps of all
  kinds use: a class may have a `step` of its own, and a step may have been bound before
  the run. Other threads, and code that acts for all replicas, pass them.
- Storages are told of the steps that optimizers take. torch calls global hooks before
  and after every step of every optimizer. It iterates over these hooks without a lock,
  so other threads must not add or remove any. Therefore the library registers its hooks
  when they are first needed, and keeps its own set of those that are told. It looks
  into torch's tables whether they are there: ranks on threads have a table each, and a
  program may have emptied its own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchstrategy._base.context import current_frame, local_object
from torchstrategy._base.torch_internals import global_step_hooks

# An object that is stepped once per training step, and counts the steps.
Stepper = LRScheduler | torch.amp.GradScaler


@final
class _Exchange:
    """Replaces attributes of torch's classes for a while.

    Args:
        made: By the class and the name of an attribute: a function that gets torch's
            attribute, or None if the class has none, and returns what replaces it.
    """

    def __init__(self, made: Mapping[tuple[type, str], Callable[[Any], Any]]) -> None:
        self._made = made
        # What was replaced; None: the class had no such attribute.
        self._plain: dict[tuple[type, str], Any] = {}

    def begin(self) -> None:
        """Replaces the attributes that are not replaced yet.

        The caller holds a lock.
        """
        for (owner, name), made in self._made.items():
            if (owner, name) not in self._plain:
                self._plain[owner, name] = plain = vars(owner).get(name)
                setattr(owner, name, made(plain))

    def end(self) -> None:
        """Gives the classes the attributes that they had before."""
        for (owner, name), plain in list(self._plain.items()):
            if plain is not None:
                setattr(owner, name, plain)
            elif name in vars(owner):
                delattr(owner, name)
            del self._plain[owner, name]


# What is created


# The thread of a scope, and the storage that takes in its objects.
_watchers: list[tuple[int, Any]] = []
_lock = threading.Lock()


@contextmanager
def watched(storage: Any) -> Iterator[None]:
    """A block in which a storage takes in each object that this thread creates.

    The storage may get the same object several times.

    Its `take_part` is called with a new module, `take_stepper` with a new optimizer,
    scheduler or scaler, and `claim_parameter` with a module and a parameter, when the
    parameter is registered on the module.
    """
    thread = threading.get_ident()

    def tell(module: nn.Module, name: str, value: object) -> None:
        if threading.get_ident() == thread and isinstance(value, nn.Parameter):
            storage.claim_parameter(module, value)

    with _lock:
        _constructors.begin()
        _watchers.append((thread, storage))
    hook = torch_module.register_module_parameter_registration_hook(tell)
    try:
        yield
    finally:
        hook.remove()
        with _lock:
            _watchers.remove((thread, storage))
            if not _watchers:
                _constructors.end()


def _tell_when_called(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        for thread, storage in list(_watchers):
            if thread == threading.get_ident():
                (
                    storage.take_part
                    if isinstance(self, nn.Module)
                    else storage.take_stepper
                )(self)

    return method


# The constructors of the last three schedulers do not call that of LRScheduler.
_STEPPERS = (
    torch.amp.GradScaler,
    LRScheduler,
    ChainedScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)
_NEW = [(kind, "__init__") for kind in (nn.Module, Optimizer, *_STEPPERS)]
_COPIED = [(kind, "__setstate__") for kind in (nn.Module, torch.amp.GradScaler)]
_constructors = _Exchange(dict.fromkeys([*_NEW, *_COPIED], _tell_when_called))


# Which steps of schedulers and scalers are refused


@final
class _SchedulerGuard:
    """An attribute of schedulers that a step in a replica may not use.

    Otherwise the scheduler would count one step for each replica.

    Args:
        name: The name of the attribute.
        is_count: Whether the scheduler counts its steps in it. A step may read a count,
            and not write it. It may read an attribute that is no count only if the
            scheduler has a proxy, which counts a step once for all replicas.
    """

    def __init__(self, name: str, is_count: bool) -> None:
        self._name = name
        self._is_count = is_count

    def __get__(self, scheduler: Any, owner: type) -> Any:
        if scheduler is None:
            return self
        # In turns, the step of a scheduler that the run knows is replaced.
        is_known = local_object(scheduler) is not scheduler or (
            takes_turns_here() and "step" in vars(scheduler)
        )
        if not self._is_count and not is_known:
            _refuse_in_replica(
                scheduler, vars(scheduler).get("optimizer"), "scheduler.step()"
            )
        if self._name in vars(scheduler):
            return vars(scheduler)[self._name]
        raise AttributeError(
            f"{type(scheduler).__name__!r} object has no attribute {self._name!r}"
        )

    def __set__(self, scheduler: Any, value: Any) -> None:
        _refuse_in_replica(
            scheduler, vars(scheduler).get("optimizer"), "scheduler.step()"
        )
        vars(scheduler)[self._name] = value


def _guard_method(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of scalers that takes an optimizer, and refuses that of a replica."""

    @functools.wraps(plain)
    def method(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_in_replica(
            scaler, optimizer, "scaler.step(optimizer)\n    scaler.update()"
        )
        return plain(scaler, optimizer, *args, **kwargs)

    return method


def _refuse_in_replica(stepper: object, optimizer: object, lines: str) -> None:
    if local_object(optimizer) is not optimizer or takes_turns_here():
        raise RuntimeError(
            f"{type(stepper).__name__} was stepped in a replica, by a step that does "
            "not name it, and it was not created in strategy.scope(): it would count "
            "one step for each of them. Create it in the scope, or name it in the "
            "step, and it counts once; or do it after the run, where gradients are "
            "those of the whole batch:\n"
            f"    strategy.run(step, ...)\n    {lines}"
        )


guards = _Exchange(
    {
        (LRScheduler, "optimizer"): lambda _: _SchedulerGuard(
            "optimizer", is_count=False
        ),
        (LRScheduler, "last_epoch"): lambda _: _SchedulerGuard(
            "last_epoch", is_count=True
        ),
        (LRScheduler, "_step_count"): lambda _: _SchedulerGuard(
            "_step_count", is_count=True
        ),
        # CosineAnnealingWarmRestarts has this attribute.
        (LRScheduler, "T_cur"): lambda _: _SchedulerGuard("T_cur", is_count=True),
        # `step` and `unscale_` call this method first.
        (torch.amp.GradScaler, "_unscale_grads_"): _guard_method,
    }
)


def takes_turns_here() -> bool:
    """Whether this thread is in a replica that takes turns on the program's objects."""
    frame = current_frame()
    return frame is not None and frame.takes_turns


_num_guarded = 0  # runs in turns under way


def begin_guards() -> None:
    """A run in turns begins: unknown schedulers and scalers are guarded."""
    global _num_guarded
    with _lock:
        _num_guarded += 1
        guards.begin()


def end_guards() -> None:
    """The run has ended."""
    global _num_guarded
    with _lock:
        _num_guarded -= 1
        if not _num_guarded:
            guards.end()


# Who is told of the steps of optimizers


# One may be added or end on one thread while another one goes through them: so each
# goes through a copy. A list, since each step of an optimizer takes several looks, and
# that at a `WeakValueDictionary` takes several calls.
_told: list[weakref.ref[Any]] = []


def tell_of_steps(told: Any) -> None:
    """Calls methods of an object at every step, on the thread of the step.

    It does so for as long as the object lives.

    Args:
        told: Its `before_any_step` is called with the optimizer and the arguments of
            the step, and returns other arguments, or None. Its `after_any_step` is
            called with the optimizer.
    """
    _told.append(weakref.ref(told, _told.remove))
    before, after = global_step_hooks()
    with _lock:
        if on_step_begin not in before.values():
            register_optimizer_step_pre_hook(on_step_begin)
        if on_step_end not in after.values():
            register_optimizer_step_post_hook(on_step_end)


def others_are_told() -> bool:
    """Whether somebody else has registered global hooks.

    PyTorch calls such hooks with every optimizer, also with copies.
    """
    before, after = global_step_hooks()
    return len(before) > 1 or len(after) > 1


def on_step_begin(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """The hook that torch calls before each step of any optimizer.

    It may return other arguments.
    """
    changed = None
    for reference in tuple(_told):
        storage = reference()
        if storage is not None:
            changed = storage.before_any_step(optimizer, args, kwargs) or changed
    return changed


def on_step_end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The hook that torch calls after each step of any optimizer."""
    for reference in tuple(_told):
        storage = reference()
        if storage is not None:
            storage.after_any_step(optimizer)
