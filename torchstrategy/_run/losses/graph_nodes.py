"""What the graph of a loss tells of its nodes.

Nothing else reads private attributes of nodes.

A node is an operation that autograd has recorded. Public are its `name()`, and
`next_functions`: for each operand, the node that made it and which output of this node
it is, or None for an operand that needs no gradient. Private are:

- `_input_metadata`: the shape and the dtype of each output. Else nobody could tell a
  number from a tensor of one row, without keeping all tensors of the program.
- `_saved_...`: what the operation keeps for its backward, such as the number that it
  divided by. Nothing else in the program knows that this number belongs to the loss.
  Which fields there are, and the names of the nodes, are no stable API of torch:
  tests/unit/run/test_loss_terms.py has a test for each, and where one is missing, a
  loss is not read.

To read what was saved calls the hooks that the program has for saved tensors. It raises
an error if the memory is freed, or was written since: `backward` raises the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from torchstrategy._base.context import without_autograd
from torchstrategy._base.torch_internals import unseen_by_function_modes

Node: TypeAlias = Any  # `torch.autograd.graph.Node` declares only what is public
# A node, and which of its outputs; None: it needs no gradient.
Edge: TypeAlias = "tuple[Node | None, int]"

# Names of operations.
VIEWS = (
    *(
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
    ),
    *(
        "SqueezeBackward2",
        "UnsqueezeBackward0",
        "ExpandBackward0",
        "CloneBackward0",
        "AliasBackward0",
    ),
    "ToCopyBackward0",
)
SUMS = ("SumBackward0", "SumBackward1", "NansumBackward0", "NansumBackward1")
MEANS = ("MeanBackward0", "MeanBackward1")
OF_TARGETS = ("NllLossBackward0", "NllLoss2DBackward0")

MAX_OF_PARAMETERS = 8  # nodes of a factor that parameters make
MAX_TO_SELECTION = 12  # nodes between a mean and the selection of its elements

_UNARY = {
    *(
        "ExpBackward0",
        "LogBackward0",
        "NegBackward0",
        "PowBackward0",
        "ReciprocalBackward0",
        "SigmoidBackward0",
    ),
    *(
        "SoftplusBackward0",
        "SqrtBackward0",
        "RsqrtBackward0",
        "TanhBackward0",
        "CloneBackward0",
        "ToCopyBackward0",
    ),
    *("SelectBackward0", "SqueezeBackward0", "ViewBackward0", "UnbindBackward0"),
}
_SELECTING = {"IndexBackward0", "MaskedSelectBackward0", "IndexSelectBackward0"}

# A number that stands beside a tensor becomes a tensor, too, but has no say in which
# dtype the result gets.
_FLOAT, _INTEGER = (
    torch.empty((), dtype=torch.float32, device="cpu"),
    torch.empty((), dtype=torch.int32, device="cpu"),
)


def shape_of(node: Node, index: int = 0) -> tuple[int, ...]:
    """The shape of an output of the operation."""
    return tuple(node._input_metadata[index].shape)


def dtype_of(node: Node, index: int = 0) -> torch.dtype:
    """The dtype of an output of the operation."""
    dtype: torch.dtype = node._input_metadata[index].dtype
    return dtype


class _ThisThread(threading.local):
    """Whether hooks for saved tensors may be called to read, on this thread."""

    may_unpack = True


_this_thread = _ThisThread()


@contextmanager
def without_unpacking() -> Iterator[None]:
    """A block in which nothing is read for which a hook would have to be called.

    The hook of a checkpoint runs the forward again: statistics would be updated once
    more, and counters would count.
    """
    before, _this_thread.may_unpack = _this_thread.may_unpack, False
    try:
        yield
    finally:
        _this_thread.may_unpack = before


def saved(node: Node, name: str) -> Any:
    """What the operation has kept of this name: a tensor, a number or None."""
    if not _this_thread.may_unpack:
        kept = getattr(node, f"_raw_saved_{name}", None)
        if getattr(kept, "unpack_hook", None) is not None:
            raise RuntimeError(f"{node.name()} has packed what it saved.")
    return getattr(node, f"_saved_{name}")


def reduction_of(node: Node) -> int | None:
    """How a loss function reduces its elements, in torch's code.

    0 means that it does not reduce them, 1 means their mean, and 2 means their sum.
    """
    return getattr(node, "_saved_reduction", None)


def python_number(value: Any) -> float | None:
    """The Python number that an operand is; None for a tensor.

    The program wrote this number or computed it in Python.
    """
    if not isinstance(value, torch.Tensor):
        return float(value)
    with unseen_by_function_modes():
        if value.dim() or not value.is_cpu:
            return None
        is_float = (
            value.dtype is torch.float64
            and torch.result_type(_FLOAT, value) is torch.float32
        )
        is_integer = (
            value.dtype is torch.int64
            and torch.result_type(_INTEGER, value) is torch.int32
        )
        return float(value.item()) if is_float or is_integer else None


def is_scalar(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no dimensions."""
    with unseen_by_function_modes():
        return not tensor.dim()


def total_weight(node: Node) -> torch.Tensor:
    """What a mean of `nll_loss` was divided by.

    This is the number of targets that count, or the sum of their class weights.

    Eight bits of bfloat16 cannot hold 3,001. There it is counted again, without that
    the host waits for a device.
    """
    total: torch.Tensor = saved(node, "total_weight")
    with unseen_by_function_modes():
        is_half = total.dtype in (torch.bfloat16, torch.float16)
    if not is_half:
        return total
    target, weight = saved(node, "target"), saved(node, "weight")
    with without_autograd(), unseen_by_function_modes():
        counted = target != saved(node, "ignore_index")
        weights = (
            counted
            if weight is None
            else weight.float()[torch.where(counted, target, 0)] * counted
        )
        again: torch.Tensor = weights.sum()
    return again


def target_of(node: Node) -> tuple[int, ...]:
    """A mark that tells the targets of a loss of classes from other targets.

    Losses of other rows have their targets elsewhere in memory.
    """
    target = saved(node, "target")
    return (target.data_ptr(), *target.shape, *target.stride())


def averaged(node: Node) -> tuple[Node, int]:
    """The operand whose elements are averaged or added up.

    It is given as the node that made it, and which of the node's outputs it is.
    """
    inner, index = next(edge for edge in node.next_functions if edge[0] is not None)
    return inner, index


def length_of(node: Node) -> int:
    """How many elements were averaged or added up."""
    inner, index = averaged(node)
    return torch.Size(shape_of(inner, index)).numel()


def is_selection(node: Node) -> bool:
    """Whether a mask or indices had chosen the elements that were averaged.

    The answer is no if the chosen elements were mixed before the mean.

    All that lies between has an element, or a row, for each that was chosen.
    """
    waiting, left, rows = [averaged(node)], MAX_TO_SELECTION, None
    while waiting and left:
        inner, index = waiting.pop(0)
        left -= 1
        shape = shape_of(inner, index)
        rows = shape[:1] if rows is None else rows
        if not shape or shape[:1] != rows:
            continue
        if inner.name() in _SELECTING:
            return True
        waiting.extend(edge for edge in inner.next_functions if edge[0] is not None)
    return False


def depends_only_on_parameters(node: Node | None) -> bool:
    """Whether a factor is a parameter, or computed from nothing but parameters.

    Such a factor is the same in all replicas.
    """
    waiting, left = [node], MAX_OF_PARAMETERS
    while waiting:
        one = waiting.pop()
        left -= 1
        if one is None or left < 0:
            return False
        # Only a node that adds to the gradient of a leaf has this attribute.
        variable = getattr(one, "variable", None)
        if variable is not None:
            if not isinstance(variable, nn.Parameter):
                return False
            continue
        # What is added to it, or what it is multiplied by, may be a number of the
        # replica.
        is_of_two = one.name() in ("AddBackward0", "MulBackward0", "SubBackward0")
        if not (is_of_two or one.name() in _UNARY) or (
            is_of_two and None in _operands(one)
        ):
            return False
        waiting.extend(_operands(one))
    return True


def _operands(node: Node) -> Iterator[Node | None]:
    return (inner for inner, _ in node.next_functions)
