"""How much each replica of a run counts, where the user gave a function that says so.

`RunOptions(examples=...)` and the constructors take such a function. It is called for
each replica that has rows, on the thread that called `run`, before anything of a step
runs, and before workers tell each other anything. What becomes of its answers is told
in Note [Where a gradient is weighed] in `_group/weighing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from torchstrategy._base.context import using_device
from torchstrategy._base.distributed_values import (
    check_component_counts,
    distributed_within,
    select,
)
from torchstrategy._base.errors import add_note, an
from torchstrategy._base.types import Device, StrategyLike, Tree
from torchstrategy._group.participants import replicas_with_rows
from torchstrategy.replica_context import counting_context


def count_examples(
    strategy: StrategyLike,
    count: Callable[..., Any],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    devices: Sequence[Device | None],
    first: int = 0,
) -> list[float]:
    """What the user's function says of each replica of this worker.

    The function is not asked about a replica without rows, which counts 0.

    Args:
        strategy: The strategy whose replicas they are.
        count: The function.
        args: The positional arguments of the run, with the values of all replicas.
        kwargs: Its keyword arguments.
        devices: The device of each replica of this worker. None: wherever the caller
            is.
        first: How many replicas other workers have before these.

    Raises:
        TypeError: If what it returns is not one number.
        ValueError: If the number is negative, infinite or NaN.
    """
    leaves = distributed_within((*args, *kwargs.values()))
    check_component_counts(leaves, len(devices))
    answers: dict[int, Any] = {}
    # To read a number waits for its device. So all are asked before the first is read,
    # and the devices work at once.
    for r in replicas_with_rows(leaves, len(devices)):
        given = select(args, r), select(kwargs, r)
        answers[r] = _ask(strategy, count, given, first + r, devices[r])
    return [
        _number(count, first + r, answers[r]) if r in answers else 0.0
        for r in range(len(devices))
    ]


def check_count(examples: object) -> Callable[..., Any] | None:
    """The function that a constructor was given as `examples`.

    Raises:
        TypeError: If it is no function.
    """
    if examples is None or callable(examples):
        return examples
    raise TypeError(
        f"examples={examples!r}: a strategy takes a function, which is called with the "
        "arguments of each step and returns how much a replica counts. Numbers are for "
        "one run: RunOptions(examples=[...])."
    )


def _ask(
    strategy: StrategyLike,
    count: Callable[..., Any],
    given: tuple[tuple[Tree, ...], dict[str, Tree]],
    replica: int,
    device: Device | None,
) -> Any:
    args, kwargs = given
    with counting_context(strategy, replica), using_device(device), torch.no_grad():
        try:
            return count(*args, **kwargs)
        except Exception as error:
            note = (
                f"raised by examples={_name(count)} of replica {replica}, which gets "
                "the arguments of the step"
            )
            add_note(error, note)
            raise


def _number(count: Callable[..., Any], replica: int, answer: Any) -> float:
    what = f"examples={_name(count)} of replica {replica} returned"
    if isinstance(answer, torch.Tensor) and (answer.numel() != 1 or answer.is_meta):
        shape, where = (
            tuple(answer.shape),
            " on the device meta" if answer.is_meta else "",
        )
        raise TypeError(f"{what} a tensor of shape {shape}{where}{_ONE_NUMBER}")
    number = answer.item() if isinstance(answer, (torch.Tensor, np.generic)) else answer
    if not isinstance(number, Real):
        raise TypeError(
            f"{what} {answer!r:.200}, {an(type(answer).__name__)}{_ONE_NUMBER}"
        )
    try:
        counted = float(number)
    except OverflowError:  # a very large integer
        counted = math.inf
    if not 0 <= counted < math.inf:
        raise ValueError(
            f"{what} {number}. A replica counts 0 or more, and less than infinity."
        )
    return counted


_ONE_NUMBER = (
    ": it returns how much the replica counts, one number or a tensor with one element."
)


def _name(count: Callable[..., Any]) -> str:
    """What to call a function in a message."""
    return getattr(count, "__qualname__", None) or f"{count!r:.80}"
