"""Learning-rate schedulers and `GradScaler`, which count each step once for all replicas.

The methods that they run once a step (`step`, `update`, `unscale_`) are synchronization points in a replica: when all
replicas have come to one, the user's own object runs the method once, on the optimizer and the gradients of the whole
batch. Everything else about them can be asked anywhere.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy._core.devices import memory_device
from torchstrategy._core.types import Device, Tree
from torchstrategy._execution.replica import Replica

Together = Callable[[Callable[[], Tree]], Tree]
"""Calls a function once for all replicas while they wait, with the user's own optimizers and all gradients."""


@final
class SharedStepper:
    """A scheduler or scaler in one replica, for one run.

    Args:
        counter: The user's own.
        replica: The replica.
        together: Calls a function once for all replicas.
    """

    def __init__(self, counter: LRScheduler | torch.amp.GradScaler, replica: Replica, together: Together) -> None:
        self._counter = counter
        self._replica = replica
        self._together = together

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """A synchronization point, at which the scheduler or the scaler takes its step."""
        return self._synchronize("step", args, kwargs)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """A synchronization point, at which the scaler chooses its next scale."""
        return self._synchronize("update", args, kwargs)

    def unscale_(self, *args: Any, **kwargs: Any) -> Any:
        """A synchronization point, at which the gradients of the whole batch are divided by the scale."""
        return self._synchronize("unscale_", args, kwargs)

    def _synchronize(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counter, name = self._counter, f"{type(self._counter).__name__}.{method}()"

        def combine(brought: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
            for other in brought[1:]:
                refuse_different(name, brought[0], other)
            result = self._together(lambda: getattr(counter, method)(*args, **kwargs))
            return [result] * len(brought)

        return self._replica.synchronize(name, combine, (args, kwargs))


_ready: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()


def make_ready(steppers: Iterable[object], device: Device) -> None:
    """Lets scalers make the tensor of their scale before the replicas run."""
    # A scaler makes it when it sees its first loss. In a run, several replicas would make it at the same time.
    for counter in steppers:
        if isinstance(counter, torch.amp.GradScaler) and counter not in _ready:
            counter.scale(torch.zeros((), device=memory_device(device)))
            _ready.add(counter)


def refuse_bound_methods(named: Iterable[tuple[str, object]]) -> None:
    """Refuses steps that hold a bound method of a scheduler, a scaler or an optimizer.

    Such a method is bound to the user's own object, so the step would pass by the object that acts for all replicas.

    Raises:
        RuntimeError: Naming it.
    """
    for name, thing in named:
        if isinstance(thing, types.MethodType):
            kind = type(thing.__self__).__name__
            raise RuntimeError(
                f"The step holds {kind}.{name}, a method that was taken from its object before the run: each replica "
                f"would call it, and it acts once for all of them. Name the object in the step, and call its {name} "
                "there; or call it after the run."
            )


def refuse_different(name: str, first: Any, other: Any) -> None:
    """Refuses different arguments from the replicas for a method that runs once for all of them.

    Raises:
        ValueError: Naming what they call.
    """
    (args, kwargs), (other_args, other_kwargs) = first, other
    alike = len(args) == len(other_args) and kwargs.keys() == other_kwargs.keys()
    pairs = [*zip(args, other_args, strict=False), *((value, other_kwargs.get(key)) for key, value in kwargs.items())]
    if not alike or not all(_is_same(value, other) for value, other in pairs):
        raise ValueError(
            f"{name} acts once for all replicas, and they gave it different arguments. Give it the same in each: "
            "get_replica_context().all_reduce(...) makes one value of all."
        )


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and torch.equal(value, other.to(value.device))
    return value is other or (isinstance(value, (int, float, str)) and value == other)
