"""Nodes of autograd's graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

# Note [Nodes of the program's own functions]
# The node of a `torch.autograd.Function` is its context, on which the program writes
# what it likes: `ctx.name = "a"` hides the method, and `ctx.variable` looks like that
# of a leaf. Such a function may also be called `Mm` as one of torch's. So lints ask for
# names and leaves by these functions.


def name_of(node: Any) -> str:
    """The name of a node of torch's own, such as `MmBackward0`.

    It is nothing of a function of the program's.
    """
    return (
        "" if node is None or isinstance(node, BackwardCFunction) else str(node.name())
    )


def name_of_any(node: Any) -> str:
    """The name of a node, such as `MmBackward0`.

    It is `GatherBackward` of the program's function `Gather`.
    """
    return type(node).__name__ if isinstance(node, BackwardCFunction) else name_of(node)


def node_behind(node: Any, passed: tuple[str, ...]) -> Any:
    """The first node from this one on that has none of some names.

    The nodes with these names have one input each.
    """
    while name_of(node).startswith(passed):
        node = node.next_functions[0][0]
    return node


def leaf_of(node: Any) -> torch.Tensor | None:
    """The tensor whose gradient a node writes; None of any other node."""
    variable = (
        None if isinstance(node, BackwardCFunction) else getattr(node, "variable", None)
    )
    return variable if isinstance(variable, torch.Tensor) else None
