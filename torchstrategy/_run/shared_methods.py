"""Methods that run once for all replicas, and what replicas bring to them.

Such are `step` of optimizers and schedulers, and `step`, `update` and `unscale_` of
scalers. Each replica calls the method with arguments of its own, and one call is made
of these.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from torchstrategy._base.devices import memory_device
from torchstrategy._base.plain import PLAIN
from torchstrategy._base.tree import tree_flatten
from torchstrategy._base.types import Device

# The arguments of a method: positional and by keyword.
Given = tuple[tuple[Any, ...], dict[str, Any]]

COMPARED = (*PLAIN, tuple)  # the settings that the replicas of one process compare


class WorkersOfRun(Protocol):
    """A run, as far as other processes have to do with a method's arguments."""

    def compare(self, name: str, given: Given) -> None:
        """Refuses a method that acts once for all replicas if arguments differ.

        Those of other processes give it other arguments.
        """


def is_closure(value: Any) -> bool:
    """Whether an argument of an optimizer's method is a function that it calls."""
    return callable(value) and not isinstance(value, (nn.Module, torch.Tensor, type))


def replace_argument(given: Given, old: object, new: object) -> Given:
    """The arguments of a method with another object in the place of one of them."""
    args, kwargs = given
    own = [new if value is old else value for value in args]
    by_name = {key: new if value is old else value for key, value in kwargs.items()}
    return tuple(own), by_name


def refuse_graphs(name: str, brought: Sequence[Given]) -> None:
    """Refuses arguments that require grad, for a method that runs once for all.

    Args:
        name: What the replicas call.
        brought: The arguments of each replica.

    Raises:
        RuntimeError: Naming what they call.
    """
    for given in brought if any(brought[0]) else ():  # mostly there are no arguments
        if any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad
            for leaf in tree_flatten(given)[0]
        ):
            raise RuntimeError(
                f"{name} acts once for all replicas, and was given a tensor that "
                "requires grad, which is one replica's own. In the step, run backward "
                "and give the method nothing of the graph; or call it after "
                "strategy.run, with tensors computed from your own parameters."
            )


def refuse_different(name: str, brought: Sequence[Given], run: WorkersOfRun) -> None:
    """Refuses different arguments for a method that runs once for all replicas.

    Args:
        name: What the replicas call.
        brought: The arguments of each replica.
        run: The run, which compares them with those of other processes.

    Raises:
        ValueError: Naming what they call.
    """
    args, kwargs = brought[0]
    for other, by_name in brought[1:]:
        are_alike = len(args) == len(other) and kwargs.keys() == by_name.keys()
        if are_alike:
            pairs = [
                *zip(args, other, strict=True),
                *((value, by_name[key]) for key, value in kwargs.items()),
            ]
            are_alike = all(have_same_value(own, theirs) for own, theirs in pairs)
        if not are_alike:
            raise ValueError(
                f"{name} acts once for all replicas, and they gave it different "
                "arguments. Give it the same in each: "
                "get_replica_context().all_reduce(...) makes one value of all."
            )
    if args or kwargs:
        run.compare(name, brought[0])


def have_same_value(value: Any, other: Any) -> bool:
    """Whether two arguments or settings are one object, or equal."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and torch.equal(value, other.to(value.device))
    return value is other or (isinstance(value, PLAIN) and bool(value == other))


_ready: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()


def make_ready(steppers: Iterable[object], device: Device) -> None:
    """Lets scalers make the tensor of their scale before the replicas run."""
    # A scaler makes it when it sees its first loss, which would be that of one replica.
    for stepper in steppers:
        if isinstance(stepper, torch.amp.GradScaler) and stepper not in _ready:
            stepper.scale(torch.zeros((), device=memory_device(device)))
            _ready.add(stepper)
