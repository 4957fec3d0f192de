"""Sees the copies of a program, and where it waits for a device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch

from torchstrategy._base.torch_internals import (
    TorchDispatchMode,
    sparse_indices,
    sparse_values,
)
from torchstrategy.testing._ranks.lines import line_of_the_user
from torchstrategy.testing._simulation.ordinals import NAME, is_simulated
from torchstrategy.testing._simulation.replacing import replacing
from torchstrategy.testing._simulation.thread_modes import starting_in
from torchstrategy.testing._virtual_time.steps import following_steps

_aten = torch.ops.aten
_WAITING = {
    _aten._local_scalar_dense.default: "a number is read",
    _aten.nonzero.default: "the size of a result is read",
    _aten.masked_select.default: "the size of a result is read",
    _aten._unique2.default: "the size of a result is read",
}


@final
@dataclass
class Observations:
    """What was seen so far. Lines are those of the program: `train.py:31`."""

    steps: int = 0
    bytes_by_route: Counter[tuple[str, str]] = field(default_factory=Counter)
    copies_by_route: Counter[tuple[str, str]] = field(default_factory=Counter)
    blocking_copies: Counter[str] = field(default_factory=Counter)
    pageable_copies: Counter[str] = field(default_factory=Counter)
    synchronizations: Counter[tuple[str, str]] = field(default_factory=Counter)


@final
class _Stopped(SystemExit):
    """Ends a program that has made enough steps."""


@final
class Observer(TorchDispatchMode):
    """Sees the operators of a thread that is in it, and of threads it starts."""

    supports_higher_order_operators = True  # such as `flex_attention`

    def __init__(self, most_steps: int | None, progress: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Observations()
        # Called with each operator and its arguments before it runs.
        self.before: Callable[..., None] | None = None
        # This is called with each operator, its arguments and its result.
        self.also: Callable[..., None] | None = None
        self._most_steps, self._progress = most_steps, progress

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.before is not None:
            self.before(func, args)
        result = func(*args, **(kwargs or {}))
        options = kwargs or {}
        if func is _aten.copy_.default:
            waits = not (
                args[2] if len(args) > 2 else options.get("non_blocking", False)
            )
            self._copied(args[1], args[0], waits)
        elif func is _aten._to_copy.default:
            self._copied(args[0], result, not options.get("non_blocking", False))
        elif func is _aten._foreach_copy_.default:
            waits = not (
                args[2] if len(args) > 2 else options.get("non_blocking", False)
            )
            for target, source in zip(args[0], args[1], strict=True):
                self._copied(source, target, waits)
        elif func in _WAITING and is_simulated(args[0]):
            self.waited(_WAITING[func])
        if self.also is not None:
            self.also(func, args, options, result)
        return result

    def waited(self, why: str) -> None:
        """Counts a place where the program waits for a device."""
        self.seen.synchronizations[why, line_of_the_user()] += 1

    def stepped(self, rank: int, steps: int) -> None:
        """Counts the steps of the thread that made most.

        After enough steps, it ends the thread's program.
        """
        if steps > self.seen.steps:
            self.seen.steps = steps
            self._progress(steps)
        if steps == self._most_steps:
            raise _Stopped(0)

    def _copied(self, source: Any, target: torch.Tensor, waits: bool) -> None:
        # In `vmap`, torch copies the 2 of `x * 2` to its dtype as a tensor, which is a
        # number again where it is seen.
        if not isinstance(source, torch.Tensor) or source.device == target.device:
            return
        route = str(source.device), str(target.device)
        self.seen.copies_by_route[route] += 1
        self.seen.bytes_by_route[route] += _bytes_of(source)
        on_cpu = [tensor for tensor in (source, target) if not is_simulated(tensor)]
        if on_cpu:
            line, is_pageable = line_of_the_user(), not on_cpu[0].is_pinned()
            self.seen.pageable_copies[line] += is_pageable
            # Without pinned memory, even a copy that is not to block waits.
            if waits or is_pageable:
                self.seen.blocking_copies[line] += 1


def _bytes_of(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.sparse_coo:
        return tensor.nbytes
    parts: list[torch.Tensor] = [sparse_indices(tensor), sparse_values(tensor)]
    return sum(part.nbytes for part in parts)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """A block in which threads that are started are observed.

    Waits and steps of the whole process are counted.
    """
    module = torch.get_device_module(NAME)
    accelerator: Any = torch.accelerator
    places: list[tuple[Any, str, str]] = [
        (module, "synchronize", "synchronize()"),
        (accelerator, "synchronize", "synchronize()"),
        (module.Stream, "synchronize", "stream.synchronize()"),
        (module.Event, "synchronize", "event.synchronize()"),
    ]
    values = [
        (owner, name, _counted(getattr(owner, name), observer, why))
        for owner, name, why in places
    ]
    values.append(starting_in(observer))
    with following_steps(observer.stepped, of_each_thread=True), replacing(values):
        yield


def _counted(
    wait: Callable[..., Any], observer: Observer, why: str
) -> Callable[..., Any]:
    @functools.wraps(wait)
    def counted(*args: Any, **kwargs: Any) -> Any:
        observer.waited(why)
        return wait(*args, **kwargs)

    return counted
