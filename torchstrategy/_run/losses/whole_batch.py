"""Losses that no weight of a replica makes right.

Their gradient needs numbers of the whole batch.

A replica computes with its own rows. Where a loss is a sum over rows, times something,
the gradients of the replicas are weighted and added up, and the sum is that of the
whole batch. Three kinds of losses are no such sums, and are seen in the graph, on the
way from the loss to where it is reduced over rows:

- something is done to a mean over rows that is no factor: `torch.sqrt(mse)`, `(1 - p) *
  loss`, a variance;
- a mean over rows is multiplied by another number of the batch, as the balance of a
  mixture of experts is. A tensor that needs no gradient may as well be a constant, so
  it is one of the batch only where it changes: `WholeBatchLook` compares those of the
  replicas, and of the first runs;
- rows are multiplied by rows, as contrastive losses do: a product of two matrices that
  the model has made.

Most losses are not of these kinds, and what is not known is not told: a person is
warned of what is certainly off. So operations that are not in the tables below end the
way, and a reduction counts only if its first dimension can be that of the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, final

import torch

from torchstrategy._base.context import without_autograd
from torchstrategy._base.torch_internals import unseen_by_function_modes
from torchstrategy._run.losses.graph_nodes import (
    MEANS,
    OF_TARGETS,
    SUMS,
    VIEWS,
    Node,
    averaged,
    reduction_of,
    saved,
    shape_of,
)

_MAX_STEPS = 128  # operations between the loss and its rows
_MAX_NODES = 4096  # of a graph in which rows are looked for

_LINEAR = {
    *(
        *VIEWS,
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "DiagonalBackward0",
        "StackBackward0",
    ),
    *(
        "NegBackward0",
        "AddBackward0",
        "SubBackward0",
        "AddBackward1",
        "SubBackward1",
        "RsubBackward1",
    ),
    *("MulBackward1", "DivBackward1", "BackwardHookFunctionBackward"),
}
_OF_TWO = {"MulBackward0": "multiplies", "DivBackward0": "divides"}
_CURVED = {
    "PowBackward0": "takes a power of",
    "SqrtBackward0": "takes the square root of",
    "RsqrtBackward0": "takes the square root of",
    "ExpBackward0": "takes the exponential of",
    "Expm1Backward0": "takes the exponential of",
    "LogBackward0": "takes the logarithm of",
    "Log1PBackward0": "takes the logarithm of",
    "Log2Backward0": "takes the logarithm of",
    "Log10Backward0": "takes the logarithm of",
    "ReciprocalBackward0": "divides by",
    "AbsBackward0": "takes the absolute value of",
    "ReluBackward0": "clips",
    "ClampBackward0": "clips",
    "ClampBackward1": "clips",
    "ClampMinBackward0": "clips",
    "ClampMaxBackward0": "clips",
    "SoftmaxBackward0": "takes the softmax of",
    "LogSoftmaxBackward0": "takes the softmax of",
    "LogsumexpBackward0": "takes the logarithm of",
}
_REDUCING = {
    *(
        *SUMS,
        *MEANS,
        *OF_TARGETS,
        "MseLossBackward0",
        "SmoothL1LossBackward0",
        "HuberLossBackward0",
    ),
    *(
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
        "KlDivBackward0",
    ),
}
# What they return is no mean over rows in itself.
_MIXING = {
    "VarBackward0": "takes the variance of",
    "StdBackward0": "takes the variance of",
    "NormBackward0": "takes the norm of",
    "NormBackward1": "takes the norm of",
    "LinalgVectorNormBackward0": "takes the norm of",
}
_PRODUCTS = {"MmBackward0", "BmmBackward0"}
# The operations of layers, by which rows come into the graph: an operand that needs no
# gradient is data.
_LAYERS = (
    *("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm"),
    *("Convolution", "Embedding", "NativeBatchNorm", "Bilinear"),
)
# What `ReplicaContext.all_reduce` and `all_gather` have put together.
_COLLECTED = "_BackwardBackward"


class Finding(NamedTuple):
    """What a loss does that needs the whole batch."""

    what: str
    node: str


class _Place(NamedTuple):
    node: Node
    # What was done to what the node makes, on the way to the loss.
    curve: Finding | None
    # Tensors without gradients by which it was multiplied.
    factors: tuple[torch.Tensor, ...]
    is_reduced: bool


@final
class WholeBatchLook:
    """Looks at the losses of the first runs of one step.

    Replicas may call it at once, each on its thread.

    Attributes:
        found: What the loss does that needs the whole batch. None: nothing is known.
    """

    def __init__(self) -> None:
        self.found: Finding | None = None
        self._factors: list[torch.Tensor] = []  # of the first replica that has any
        self._lock = threading.Lock()

    def look(self, loss: torch.Tensor, num_terms: int, rows: float | None) -> None:
        """Looks at the loss of a replica.

        Args:
            loss: With its graph.
            num_terms: Of how many terms it is made.
            rows: How many rows the replica has. None: nobody knows.
        """
        if self.found is not None or rows is None:
            return
        # A loop over rows has a term for each, of one row.
        is_loop = num_terms >= rows
        if rows < 2 or rows != int(rows) or is_loop:
            return
        # A loss that cannot be read gives no warning.
        with suppress(Exception), without_autograd(), unseen_by_function_modes():
            found, factors = _search(loss.grad_fn, int(rows))
            with self._lock:
                self.found = self.found or found or self._compare(factors)

    def _compare(self, factors: list[torch.Tensor]) -> Finding | None:
        if not self._factors:
            self._factors = [factor.detach().cpu() for factor in factors]
            return None
        for first, other in zip(self._factors, factors, strict=False):
            if first.shape == other.shape and not torch.equal(
                first, other.detach().cpu()
            ):
                return Finding("multiplies two means over the rows", "MulBackward0")
        return None


def _search(root: Node, rows: int) -> tuple[Finding | None, list[torch.Tensor]]:
    """What the loss does, and the tensors by which it multiplies means over rows.

    The search finds those tensors that have no gradients.
    """
    factors: list[torch.Tensor] = []
    # This keeps the nodes alive, so that no new node gets the id of an old one.
    seen: dict[tuple[int, bool], Node] = {}
    waiting = [_Place(root, None, (), False)]
    for _ in range(_MAX_STEPS):
        if not waiting:
            break
        place = waiting.pop()
        node = place.node
        if (id(node), place.is_reduced) in seen:
            continue
        seen[id(node), place.is_reduced] = node
        name = node.name()
        if name in _PRODUCTS:
            if _multiplies_rows(node, rows):
                return Finding("compares rows with one another", name), []
            continue
        is_over_rows = (
            (name in _REDUCING or name in _MIXING)
            and not place.is_reduced
            and _reduces_rows(node, rows)
        )
        if is_over_rows:
            what = (
                Finding(f"{_MIXING[name]} numbers of several rows", name)
                if name in _MIXING
                else place.curve
            )
            if what is not None and _has_rows(node):
                return what, []
            if shape_of(node):
                factors += place.factors
        step = _step(place, name, place.is_reduced or is_over_rows)
        waiting.extend(step)
    return None, factors


def _step(place: _Place, name: str, is_reduced: bool) -> list[_Place]:
    """Where the way goes on from a node."""
    node, curve, factors = place.node, place.curve, place.factors
    if name in _CURVED:
        curve = Finding(f"{_CURVED[name]} a mean over the rows", name)
    elif name in _OF_TWO:
        operands = [inner for inner, _ in node.next_functions]
        # What lies below does not matter any more, and to look for rows takes long.
        if is_reduced:
            pass
        elif None not in operands and all(map(_has_rows, operands)):
            curve = Finding(f"{_OF_TWO[name]} means over the rows", name)
        elif name == "MulBackward0":
            factors = (*factors, *_other_factor(node))
    elif name not in _LINEAR and name not in _REDUCING and name not in _MIXING:
        return []
    return [
        _Place(inner, curve, factors, is_reduced)
        for inner, _ in node.next_functions
        if inner is not None
    ]


def _other_factor(node: Node) -> Iterator[torch.Tensor]:
    """The tensor by which something is multiplied, if it needs no gradient.

    The tensor has several numbers.
    """
    first, second = node.next_functions
    if first[0] is None or second[0] is None:
        by = saved(node, "other" if second[0] is None else "self")
        if isinstance(by, torch.Tensor) and by.numel() > 1:
            yield by


def _reduces_rows(node: Node, rows: int) -> bool:
    """Whether an operation adds up values of several rows.

    It does if it reduces the first dimension, and this can be that of the rows.
    """
    if reduction_of(node) == 0:
        return False
    inner, index = averaged(node)
    before, after = shape_of(inner, index), shape_of(node)
    if not before or before[0] % rows:
        return False
    return not after or 0 in _reduced_dimensions(node, len(before))


def _reduced_dimensions(node: Node, count: int) -> list[int]:
    """The dimensions that an operation adds up, of so many."""
    dimensions = saved(node, "dim")
    listed = dimensions if isinstance(dimensions, (tuple, list)) else [dimensions]
    # Torch keeps negative numbers as large ones, of 64 bits.
    return [(one if one < 2**63 else one - 2**64) % count for one in listed]


def _multiplies_rows(node: Node, rows: int) -> bool:
    """Whether a product of matrices has a number for each pair of rows of the batch.

    Both factors have to be computed from the batch.
    """
    shape = shape_of(node)
    # Attention is an example: each row has a product of its own.
    if len(shape) == 3 and shape[0] != 1:
        return False
    first, second = (inner for inner, _ in node.next_functions)
    if first is None or second is None or shape[-1] % rows or shape[-2] % rows:
        return False
    return _has_rows(first) and _has_rows(second)


def _has_rows(node: Node) -> bool:
    """Whether a layer has brought the replica's own data into what the node makes.

    Data that was collected from all replicas does not count.
    """
    has_rows, waiting = False, [node]
    seen = {id(node): node}
    while waiting:
        one = waiting.pop()
        name = one.name()
        if name == _COLLECTED or len(seen) > _MAX_NODES:
            return False
        operands = [inner for inner, _ in one.next_functions]
        is_layer = name.startswith(_LAYERS)
        has_rows = has_rows or (
            is_layer and (None in operands or name.startswith("Embedding"))
        )
        for inner in operands:
            if inner is not None and id(inner) not in seen:
                seen[id(inner)] = inner
                waiting.append(inner)
    return has_rows
