"""Who is told of the steps that optimizers take.

torch calls global hooks before and after every step of every optimizer. It iterates over these hooks without a lock,
so other threads must not add or remove any. Therefore the library registers its hooks once, when they are first needed,
and keeps its own list of functions that the hooks call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Told = Callable[[Optimizer], None]

_before: dict[object, Told] = {}
_always: list[tuple[weakref.WeakMethod[Told], weakref.WeakMethod[Told]]] = []
_hooks: list[Any] = []


def tell_before(key: object, told: Told) -> None:
    """Calls `told` before each step of any optimizer, on the thread of the step, until `stop_telling(key)`."""
    _hook()
    _before[key] = told


def stop_telling(key: object) -> None:
    """The reverse of `tell_before`. May be called again."""
    _before.pop(key, None)


def tell_always(before: Told, after: Told) -> None:
    """Calls two bound methods before and after every step, for as long as their object lives."""
    _hook()
    _always[:] = [pair for pair in _always if pair[0]() is not None]
    _always.append((weakref.WeakMethod(before), weakref.WeakMethod(after)))


def others_are_told() -> bool:
    """Whether somebody else has registered global hooks, which torch calls with every optimizer, copies included."""
    return any(len(handle.hooks_dict_ref()) > 1 for handle in _hooks)


def _hook() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_on_step_begin))
        _hooks.append(register_optimizer_step_post_hook(_on_step_end))


def _on_step_begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for told in list(_before.values()):
        told(optimizer)
    _tell(0, optimizer)


def _on_step_end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _tell(1, optimizer)


def _tell(which: int, optimizer: Optimizer) -> None:
    for pair in list(_always):
        told = pair[which]()
        if told is not None:
            told(optimizer)
