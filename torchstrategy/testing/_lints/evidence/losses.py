"""Of what a loss is made, as autograd's graph says.

It is made of means, over how many numbers, and what they were multiplied by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchstrategy.testing._lints.evidence.fingerprints import number_of
from torchstrategy.testing._lints.evidence.nodes import leaf_of, name_of

_MOST_NODES, _MOST_NODES_OF_LEAVES = 200, 20_000
_MOST_NODES_BEFORE = 8
_MEAN, _SUM = 1, 2  # torch's numbers for reductions
# What changes no number.
_PASSED = (
    "ToCopyBackward",
    "ViewBackward",
    "ReshapeAliasBackward",
    "UnsqueezeBackward",
    "SqueezeBackward",
    "CloneBackward",
    "AliasBackward",
    "ExpandBackward",
    "ToDeviceBackward",
)


Numbers = tuple[float, ...]


class Term(NamedTuple):
    """One of the terms whose sum is a loss.

    Attributes:
        factor: What it is multiplied by.
        over: Over how many numbers it is a mean; None if it is none, or nobody knows.
        is_mean: Whether it is a mean.
        divisors: The numbers by which it was divided.
        multipliers: Those by which it was multiplied.
        summed: Over how many numbers it is a sum; None if it is none.
    """

    factor: float
    over: float | None
    is_mean: bool
    divisors: Numbers = ()
    multipliers: Numbers = ()
    summed: float | None = None


def is_passed(node: Any) -> bool:
    """Whether a node of the graph changes no number."""
    return name_of(node).startswith(_PASSED)


def terms_of(loss: torch.Tensor, scale: float | None = None) -> list[Term]:
    """The terms of a loss.

    Args:
        loss: The loss.
        scale: The scale of mixed precision, which does not count.
    """
    found: list[Term] = []
    waiting: list[tuple[Any, Numbers, Numbers]] = [(loss.grad_fn, (), ())]
    for _ in range(_MOST_NODES):
        if not waiting:
            break
        node, divisors, multipliers = waiting.pop()
        name = name_of(node)
        followers = (
            [] if node is None else [following for following, _ in node.next_functions]
        )
        if name.startswith(_PASSED):
            waiting.append((followers[0], divisors, multipliers))
        elif name.startswith("NegBackward"):
            waiting.append((followers[0], divisors, (*multipliers, -1.0)))
        elif name.startswith(("AddBackward", "SubBackward")):
            # `alpha` multiplies the second one.
            waiting += [
                (following, divisors, multipliers)
                for following in followers
                if following is not None
            ]
        elif (
            name.startswith(("DivBackward", "MulBackward"))
            and (number := _number_at(node)) is not None
        ):
            following = next(
                following for following in followers if following is not None
            )
            is_division = name.startswith("Div")
            if is_division and followers[0] is None:
                # A number divided by the loss.
                found.append(_end(None, "", divisors, multipliers))
            elif not is_division and scale is not None and number == scale:
                waiting.append((following, divisors, multipliers))
            elif is_division:
                waiting.append((following, (*divisors, number), multipliers))
            else:
                waiting.append((following, divisors, (*multipliers, number)))
        else:
            found.append(_end(node, name, divisors, multipliers))
    return found


def is_scaled(loss: torch.Tensor, scale: float | None) -> bool:
    """Whether a loss was last multiplied by the scale of mixed precision.

    Nothing else was done to it afterwards.
    """
    node = loss.grad_fn
    if (
        scale is None
        or scale == 1
        or node is None
        or not name_of(node).startswith("MulBackward")
    ):
        return False
    return _number_at(node) == scale


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The parameters that a loss depends on; of a large graph, some."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    found: list[torch.Tensor] = []
    while waiting and len(seen) < _MOST_NODES_OF_LEAVES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = leaf_of(node)
        if leaf is not None:
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found


def _number_at(node: Any) -> float | None:
    """The number that a node multiplies or divides by.

    It is None if both of its operands have gradients.
    """
    with_gradient = [
        following for following, _ in node.next_functions if following is not None
    ]
    if len(with_gradient) != 1:
        return None
    which = "_saved_other" if node.next_functions[0][0] is not None else "_saved_self"
    try:
        value = getattr(node, which, None)
    except RuntimeError:  # it is freed
        return None
    return number_of(value)


def _end(node: Any, name: str, divisors: Numbers, multipliers: Numbers) -> Term:
    """The term that ends at a node: a mean, a sum, or what is not looked into."""
    divisor = math.prod(divisors)
    factor = math.prod(multipliers) / divisor if divisor else 0.0
    term = Term(factor, None, False, divisors, multipliers)
    if name.startswith("MeanBackward"):
        return term._replace(
            over=_numbers_in(getattr(node, "_saved_self_sym_sizes", None)), is_mean=True
        )
    if name.startswith("SumBackward"):
        summed = _numbers_in(getattr(node, "_saved_self_sym_sizes", None))
        return term._replace(
            summed=summed, multipliers=(*multipliers, *_multipliers_before(node))
        )
    reduction = getattr(node, "_saved_reduction", None) if name else None
    if reduction == _SUM:
        return term._replace(summed=_size_of_target(node))
    if reduction != _MEAN:
        return term
    mean = term._replace(is_mean=True)
    try:
        weight, total = (
            getattr(node, "_saved_weight", None),
            getattr(node, "_saved_total_weight", None),
        )
        target = getattr(node, "_saved_self", None)
    except RuntimeError:  # it is freed
        return mean
    if name.startswith("NllLoss"):
        return mean._replace(
            over=number_of(total) if weight is None and total is not None else None
        )
    return mean._replace(over=None if target is None else float(target.numel()))


def _multipliers_before(node: Any) -> Iterator[float]:
    """The numbers by which all that is added up was multiplied, right before that.

    A mask may be between them.
    """
    for _ in range(_MOST_NODES_BEFORE):
        followers = [
            following for following, _ in node.next_functions if following is not None
        ]
        if len(followers) != 1:
            return
        (node,) = followers
        is_product = name_of(node).startswith("MulBackward")
        number = _number_at(node) if is_product else None
        if number is not None:
            yield number
        elif not is_product and not is_passed(node):
            return


def _size_of_target(node: Any) -> float | None:
    try:
        target = getattr(node, "_saved_target", None)
    except RuntimeError:  # it is freed
        return None
    return float(target.numel()) if isinstance(target, torch.Tensor) else None


def _numbers_in(sizes: Any) -> float | None:
    if sizes is None:
        return None
    count = 1
    for size in sizes:
        count *= int(size)
    return float(count)
