"""Which modules, optimizers and schedulers are created while a scope is open.

torch has hooks for parameters that are registered on a module, but none for the creation of a module, an optimizer, a
scheduler or a scaler. So the constructors of their base classes are replaced while a scope is open. A module that is
copied or unpickled does not call its constructor, but `__setstate__`, so this method is replaced, too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

_HOOKED: tuple[tuple[type, str], ...] = (
    (nn.Module, "__init__"),
    (nn.Module, "__setstate__"),
    (Optimizer, "__init__"),
    (LRScheduler, "__init__"),
    # The constructors of these schedulers do not call that of LRScheduler.
    *((kind, "__init__") for kind in (ChainedScheduler, ReduceLROnPlateau, SequentialLR)),
    (torch.amp.GradScaler, "__init__"),
    (torch.amp.GradScaler, "__setstate__"),
)

Stepper = LRScheduler | torch.amp.GradScaler
"""An object that is stepped once per training step, and counts the steps."""


class _Watcher(NamedTuple):
    thread: int  # the thread of the scope: the watcher is not told of what other threads create
    on_module: Callable[[nn.Module], None]
    on_optimizer: Callable[[Optimizer], None]
    on_counter: Callable[[Stepper], None]

    def tell(self, thing: nn.Module | Optimizer | Stepper) -> None:
        if isinstance(thing, nn.Module):
            self.on_module(thing)
        elif isinstance(thing, Optimizer):
            self.on_optimizer(thing)
        else:
            self.on_counter(thing)


_watchers: list[_Watcher] = []
_plain: dict[tuple[type, str], Callable[..., None]] = {}  # the methods as they were before the first open scope
_lock = threading.Lock()


@contextmanager
def watched(
    on_module: Callable[[nn.Module], None],
    on_parameter: Callable[[nn.Module, nn.Parameter], None],
    on_optimizer: Callable[[Optimizer], None],
    on_counter: Callable[[Stepper], None],
) -> Iterator[None]:
    """A block in which functions are called with each object that this thread creates, some of them several times.

    Args:
        on_module: Called with a new module.
        on_parameter: Called with a module and a parameter, when the parameter is registered on the module.
        on_optimizer: Called with a new optimizer.
        on_counter: Called with a new scheduler or scaler.
    """
    thread = threading.get_ident()

    def tell(module: nn.Module, name: str, value: object) -> None:
        if threading.get_ident() == thread and isinstance(value, nn.Parameter):
            on_parameter(module, value)

    watcher = _Watcher(thread, on_module, on_optimizer, on_counter)
    with _lock:
        if not _watchers:
            _exchange()
        _watchers.append(watcher)
    hook = torch_module.register_module_parameter_registration_hook(tell)
    try:
        yield
    finally:
        hook.remove()
        with _lock:
            _watchers.remove(watcher)
            if not _watchers:
                _exchange_back()


def _exchange() -> None:
    for owner, name in _HOOKED:
        plain = getattr(owner, name)
        _plain[owner, name] = plain
        setattr(owner, name, _telling(plain))


def _exchange_back() -> None:
    for (owner, name), plain in _plain.items():
        setattr(owner, name, plain)
    _plain.clear()


def _telling(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        for watcher in list(_watchers):
            if watcher.thread == threading.get_ident():
                watcher.tell(self)

    return method
