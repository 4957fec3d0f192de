"""Guards on torch's schedulers and scalers, which refuse a step in a replica of which the run knows nothing.

Schedulers count their own steps and `GradScaler` its updates, in objects that all replicas share. A proxy counts each
step once. But `step_references` does not find every object that a step uses. So while a run is under way, the classes
have guards, which refuse a step in a replica before it is counted. They are on the attributes that the steps of all
kinds use: a class may have a `step` of its own, and a step may have been bound before the run. Other threads, and code
that acts for all replicas, pass the guards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy._core.context import local_object


@final
class _SchedulerGuard:
    """An attribute of schedulers that a step in a replica may not use: a scheduler would count a step in each of them.

    Args:
        name: The name of the attribute.
        is_count: Whether the scheduler counts its steps in it. A step may read a count, and write none. It may read
            another attribute of a scheduler that acts for all replicas, since the proxy does the counting.
    """

    def __init__(self, name: str, is_count: bool) -> None:
        self._name = name
        self._is_count = is_count

    def __get__(self, scheduler: Any, owner: type) -> Any:
        if scheduler is None:
            return self
        if not self._is_count and local_object(scheduler) is scheduler:
            self._refuse_in_replica(scheduler)
        if self._name in vars(scheduler):
            return vars(scheduler)[self._name]
        raise AttributeError(f"{type(scheduler).__name__!r} object has no attribute {self._name!r}")

    def __set__(self, scheduler: Any, value: Any) -> None:
        self._refuse_in_replica(scheduler)
        vars(scheduler)[self._name] = value

    def _refuse_in_replica(self, scheduler: Any) -> None:
        optimizer = vars(scheduler).get("optimizer")
        if local_object(optimizer) is not optimizer:
            raise RuntimeError(_stepped_in_replica(scheduler, "scheduler.step()"))


def _guarded_method(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of scalers that takes an optimizer, and refuses that of a replica."""

    @functools.wraps(plain)
    def method(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if local_object(optimizer) is not optimizer:
            raise RuntimeError(_stepped_in_replica(scaler, "scaler.step(optimizer)\n    scaler.update()"))
        return plain(scaler, optimizer, *args, **kwargs)

    return method


def _stepped_in_replica(stepper: object, lines: str) -> str:
    return (
        f"{type(stepper).__name__} was stepped in a replica, by a step that does not name it, and it was "
        "not created in strategy.scope(): it would count one step for each of them. Create it in the scope, or name it "
        "in the step, and it counts once; or do it after the run, where gradients are those of the whole batch:\n"
        "    strategy.run(step, ...)\n"
        f"    {lines}"
    )


_GUARDS: dict[tuple[type, str], Callable[[Any], Any]] = {
    (LRScheduler, "optimizer"): lambda _: _SchedulerGuard("optimizer", is_count=False),
    (LRScheduler, "last_epoch"): lambda _: _SchedulerGuard("last_epoch", is_count=True),
    (LRScheduler, "_step_count"): lambda _: _SchedulerGuard("_step_count", is_count=True),
    (LRScheduler, "T_cur"): lambda _: _SchedulerGuard("T_cur", is_count=True),  # of CosineAnnealingWarmRestarts
    (torch.amp.GradScaler, "_unscale_grads_"): _guarded_method,  # which `step` and `unscale_` call first
}
_unguarded: dict[tuple[type, str], Any] = {}  # what the classes had before the first of the runs that are under way


def put_guards() -> None:
    """Puts the guards on the classes, if they are not there yet. Its caller holds the lock of the proxies."""
    for (owner, name), guard in _GUARDS.items():
        if (owner, name) not in _unguarded:
            _unguarded[owner, name] = plain = vars(owner).get(name)
            setattr(owner, name, guard(plain))


def remove_guards() -> None:
    """Gives the classes the attributes that they had before."""
    for (owner, name), plain in list(_unguarded.items()):
        if plain is not None:
            setattr(owner, name, plain)
        elif name in vars(owner):
            delattr(owner, name)
        del _unguarded[owner, name]
