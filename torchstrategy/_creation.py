"""What is created in a scope: torch is asked to tell of every module and optimizer while a scope is open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer

Watcher = Callable[[Any], None]

_optimizer_watchers: list[tuple[int, Watcher]] = []  # the thread of the scope, and whom to tell
_lock = threading.Lock()
_inits: list[Callable[..., None]] = []  # what `Optimizer.__init__` was before the first open scope


@contextmanager
def watched(
    on_module: Callable[[nn.Module], None],
    on_parameter: Callable[[nn.Parameter], None],
    on_optimizer: Callable[[Optimizer], None],
) -> Iterator[None]:
    """For the length of the block, tells of each module, parameter and optimizer that this thread creates.

    A module is told of whenever it is given a parameter, buffer or child; one that is never given any holds nothing
    that a replica would need a copy of. A parameter is told of when a module is given it.
    """
    thread = threading.get_ident()

    def tell(module: nn.Module, name: str, value: object) -> None:
        if threading.get_ident() == thread:
            on_module(module)
            if isinstance(value, nn.Parameter):
                on_parameter(value)

    hooks = [
        torch_module.register_module_parameter_registration_hook(tell),
        torch_module.register_module_buffer_registration_hook(tell),
        torch_module.register_module_module_registration_hook(tell),
    ]
    entry = (thread, on_optimizer)
    with _lock:
        if not _optimizer_watchers:
            _inits[:] = [Optimizer.__init__]
        _optimizer_watchers.append(entry)
        Optimizer.__init__ = _telling_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with _lock:
            _optimizer_watchers.remove(entry)
            if not _optimizer_watchers and Optimizer.__init__ is _telling_init:
                Optimizer.__init__ = _inits[0]  # type: ignore[method-assign]


def _telling_init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
    # torch offers no hook for a new optimizer; every optimizer's own `__init__` ends up in this one.
    _inits[0](self, *args, **kwargs)
    for thread, watcher in list(_optimizer_watchers):
        if thread == threading.get_ident():
            watcher(self)
