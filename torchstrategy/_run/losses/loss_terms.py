"""What a loss was divided by: read from its graph, when `backward` begins.

A loss is a sum of terms. Each is a sum over elements, times some factor, divided by how
many elements there are, or by how much they weigh. Of a mean over tokens, this *count*
is the number of tokens that the replica has. One device would divide the sum of the
replicas' sums by the sum of their counts. So where the counts are known, the gradient
of each replica's term has the weight `count / sum of the counts`, and not the replica's
fraction of the rows.

The rule, as far as one replica's graph goes:

1. Begin at the loss, and go back through operations on numbers, as long as a term stays
   what it is, or gets a factor: views, casts, a minus, times and divided by numbers,
   sums and differences, module hooks, and a factor that parameters alone make. A number
   here is a value without dimensions. A value of shape `[1]` may be one row of a batch,
   and is where a term ends; only the loss itself may have this shape.
2. Where this does not go on, a term has been found. It has a count if it is
   - a mean of `nll_loss` or `cross_entropy`: they leave out ignored targets, and weigh
     by classes (`TARGETS`);
   - a full sum that was divided by a tensor without dimensions that needs no gradient
     (`DIVISOR`);
   - a mean over elements that a mask or indices have selected (`SELECTION`);
   - a full sum that was divided, or multiplied, by Python numbers (`NUMBER`). It is a
     constant in most programs: only if it differs between replicas, and not as their
     rows do, does it count something.
3. Everything else has no count, and its rows count: plain means, which are means over
   rows as a rule (`MEAN`), plain sums (`SUM`), and whatever cannot be read
   (`UNREADABLE`), such as a compiled loss or a square of a loss.
4. A loss of more than 16 terms, or of more than 64 operations, is not read. Nor is one
   whose saved tensors are freed or were written: `backward` will say so.

Nothing here waits for a device: a count stays the tensor that it is. What compares
replicas also needs to know by what else a term is multiplied and divided, see `Term`: a
program that multiplies by its own tokens, or divides by its own rows, has corrected the
weights by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch

from torchstrategy._base.torch_internals import unseen_by_function_modes
from torchstrategy._run.losses.graph_nodes import (
    MEANS,
    OF_TARGETS,
    SUMS,
    VIEWS,
    Edge,
    Node,
    averaged,
    depends_only_on_parameters,
    dtype_of,
    is_scalar,
    is_selection,
    length_of,
    python_number,
    reduction_of,
    saved,
    shape_of,
    target_of,
    total_weight,
)

MAX_TERMS, MAX_NODES = 16, 64

TARGETS = "targets"
DIVISOR = "divisor"
SELECTION = "selection"
NUMBER = "number"
MEAN = "mean"
SUM = "sum"
UNREADABLE = "unreadable"


class Scale(NamedTuple):
    """A tensor by which a term was multiplied or divided."""

    tensor: torch.Tensor
    divides: bool


@final
@dataclass(slots=True, eq=False)
class Entry:
    """Where the gradient of a term enters the graph.

    It enters at an output of a node, multiplied by `factor` and `scales`.
    """

    node: Node
    index: int
    factor: float
    scales: tuple[Scale, ...]

    def gradient(
        self, like: torch.Tensor, weight: float | torch.Tensor = 1.0
    ) -> torch.Tensor:
        """The gradient with which backward begins at this entry, if `like` is the loss.

        The term counts with the given weight.
        """
        # A half weight would be off by a thousandth.
        dtype = torch.promote_types(like.dtype, torch.float32)
        gradient = (
            like.new_full(shape_of(self.node, self.index), self.factor, dtype=dtype)
            * weight
        )
        for tensor, divides in self.scales:
            gradient = gradient / tensor if divides else gradient * tensor
        return gradient.to(dtype_of(self.node, self.index))


@final
@dataclass(slots=True, eq=False)
class Term:
    """One term of a loss: `factor * sum / count`, times and divided by `scales`.

    Attributes:
        source: Where the count comes from, or why there is none: one of the words
            above.
        count: A tensor without dimensions on the device of the loss, or a number; None:
            it has no count of its own.
        factor: The Python numbers by which it is multiplied, and which are no count.
        entry: Where its gradient enters the graph.
        name: The name of the node at which it was found.
        divisors: The Python numbers by which it was divided, also those that are its
            count, and one over those by which it was multiplied: a program may have
            divided by its rows, or by the number of its terms.
        scales: The tensors by which it was multiplied and divided, beside its count: a
            program may have multiplied by its own count. A GradScaler multiplies by
            one, too.
        is_learned: Whether it is multiplied by something that parameters make.
        is_added: Whether something that needs no gradient was added to it, as in
            `sum([loss])`.
        node: The node at which it was found; its `targets` tell whether terms are of
            other rows.
        is_hooked: Whether it passes through the backward hooks of a module, which would
            not be called if backward began at the term.
    """

    source: str
    count: torch.Tensor | float | None
    factor: float
    entry: Entry
    name: str
    divisors: tuple[float, ...] = ()
    scales: tuple[Scale, ...] = ()
    is_learned: bool = False
    is_added: bool = False
    node: Node = None
    is_hooked: bool = False

    @property
    def targets(self) -> tuple[int, ...]:
        """Differs between the terms of a loop over rows.

        To read it may copy what was offloaded.
        """
        return target_of(self.node) if self.source == TARGETS else (id(self.node),)


class _Path(NamedTuple):
    """How a value comes into the loss."""

    factor: float = 1.0
    divisors: tuple[float, ...] = ()
    scales: tuple[Scale, ...] = ()
    # A tensor that the term was divided by, which may be its count.
    divisor: torch.Tensor | None = None
    # Where the term is multiplied by something that parameters make.
    entry: Entry | None = None
    is_added: bool = False
    is_hooked: bool = False

    def times(self, number: float) -> _Path:
        """Multiplied by a Python number."""
        return self._replace(
            factor=self.factor * number,
            divisors=(*self.divisors, 1 / number if number else 0.0),
        )

    def over(self, number: float) -> _Path:
        """Divided by a Python number.

        If that is zero, Python raises an error, and the loss is not read.
        """
        return self._replace(
            factor=self.factor / number, divisors=(*self.divisors, number)
        )

    def scaled(self, tensor: torch.Tensor, divides: bool) -> _Path:
        """Multiplied or divided by a tensor."""
        return self._replace(scales=(*self.scales, Scale(tensor, divides)))

    def counted(self, tensor: torch.Tensor) -> _Path:
        """Divided by what may be its count. What was divided by after it, is not."""
        earlier = (
            self if self.divisor is None else self.scaled(self.divisor, divides=True)
        )
        return earlier._replace(divisor=tensor)

    def enters(self, node: Node, index: int) -> Entry:
        """Where the gradient enters if the value was made by this node."""
        scales = (
            self.scales
            if self.divisor is None
            else (*self.scales, Scale(self.divisor, divides=True))
        )
        return self.entry or Entry(node, index, self.factor, scales)


_Steps = list[tuple[Node, int, _Path]]


def read_terms(loss: torch.Tensor) -> list[Term]:
    """The terms of a loss, in the order in which the program added them.

    Args:
        loss: A tensor with one element and a graph.
    """
    with unseen_by_function_modes():
        root, index, size = loss.grad_fn, loss.output_nr, loss.numel()
    terms = None
    if root is not None and size == 1:
        # Freed or written memory, a field that this torch does not have, a hook that
        # fails.
        with suppress(Exception):
            terms = _walk(root, index)
    if terms is None:
        terms = [
            Term(
                UNREADABLE,
                None,
                1.0,
                Entry(root, index, 1.0, ()),
                root.name() if root else "leaf",
                node=root,
            )
        ]
    return terms


def _walk(root: Node, index: int) -> list[Term] | None:
    """All terms; None if there are too many."""
    terms: list[Term] = []
    waiting: _Steps = [(root, index, _Path())]
    for _ in range(MAX_NODES):
        node, index, path = waiting.pop()
        step = (
            _STEPS.get(node.name())
            if node is root or not shape_of(node, index)
            else None
        )
        steps = step(node, index, path) if step else None
        if steps is None:
            terms.append(_term(node, index, path))
        else:
            waiting.extend(reversed(steps))
        if not waiting:
            if len(terms) == 1:
                return terms
            return _merged(terms) if len(terms) <= MAX_TERMS else None
    return None


def _merged(terms: Sequence[Term]) -> list[Term]:
    """With one term for what was added several times, such as `loss + 0.5 * loss`."""
    together: dict[object, Term] = {}
    for k, term in enumerate(terms):
        entry = term.entry
        scaled_by = tuple((id(scale.tensor), scale.divides) for scale in entry.scales)
        key = k if term.is_learned else (id(entry.node), entry.index, scaled_by)
        known = together.get(key)
        if known is not None:
            entry = replace(entry, factor=known.entry.factor + entry.factor)
            term = replace(
                known, factor=known.factor + term.factor, entry=entry, divisors=()
            )
        together[key] = term
    return list(together.values())


# Steps: from the output of a node to the operands of which it is made; None: a term
# ends here.


def _through(node: Node, index: int, path: _Path) -> _Steps | None:
    return _to(node.next_functions[0], path)


def _to(edge: Edge, path: _Path) -> _Steps | None:
    inner, index = edge
    return None if inner is None else [(inner, index, path)]


def _through_hook(node: Node, index: int, path: _Path) -> _Steps | None:
    """A module with backward hooks passes its outputs, or inputs, through one node."""
    return _to(node.next_functions[index], path._replace(is_hooked=True))


def _through_reduction(node: Node, index: int, path: _Path) -> _Steps | None:
    """The sum or mean of a number is the number."""
    inner, position = averaged(node)
    return None if shape_of(inner, position) else [(inner, position, path)]


def _through_minus(node: Node, index: int, path: _Path) -> _Steps | None:
    return _through(node, index, path._replace(factor=-path.factor))


def _times_alpha(path: _Path, alpha: float) -> _Path:
    """Multiplied by a factor of a sum, which divides nothing if it is 1 or -1."""
    if alpha == 1:
        return path
    if alpha == -1:
        return path._replace(factor=-path.factor)
    return path.times(alpha)


def _through_sum(node: Node, index: int, path: _Path) -> _Steps | None:
    """`a + alpha * b`, or `a - alpha * b`."""
    alpha = float(saved(node, "alpha")) * (
        1.0 if node.name().startswith("Add") else -1.0
    )
    first, second = node.next_functions
    paths = path, _times_alpha(path, alpha)
    steps = [
        (edge[0], edge[1], own)
        for edge, own in zip((first, second), paths, strict=True)
        if edge[0] is not None
    ]
    if len(steps) == 1:
        ((inner, position, own),) = steps
        return [(inner, position, own._replace(is_added=True))]
    # What parameters multiply enters the graph at the product, which is one place for
    # the whole sum.
    return steps if path.entry is None else None


def _through_sum_with_number(node: Node, index: int, path: _Path) -> _Steps | None:
    sign = -1.0 if node.name() == "RsubBackward1" else 1.0
    return _through(
        node, index, path._replace(factor=sign * path.factor, is_added=True)
    )


def _through_product(node: Node, index: int, path: _Path) -> _Steps | None:
    first, second = node.next_functions
    if first[0] is not None and second[0] is not None:
        return _through_learned_product(node, index, path)
    inner, other = (first, "other") if second[0] is None else (second, "self")
    by = saved(node, other)
    number = python_number(by)
    return _to(
        inner, path.scaled(by, divides=False) if number is None else path.times(number)
    )


def _through_learned_product(node: Node, index: int, path: _Path) -> _Steps | None:
    """The steps to the operand of a product whose other factor is learned.

    The gradient of that factor is multiplied by the weight of the term, too: both
    gradients enter at the product.
    """
    first, second = node.next_functions
    if depends_only_on_parameters(second[0]):
        inner = first
    elif depends_only_on_parameters(first[0]):
        inner = second
    else:
        return None
    return _to(inner, path._replace(entry=path.enters(node, index)))


def _through_quotient(node: Node, index: int, path: _Path) -> _Steps | None:
    first, second = node.next_functions
    if second[0] is not None:
        if first[0] is None or not depends_only_on_parameters(second[0]):
            return None
        return _to(first, path._replace(entry=path.enters(node, index)))
    by = saved(node, "other")
    number = python_number(by)
    if number is not None:
        return _to(first, path.over(number))
    return _to(
        first, path.counted(by) if is_scalar(by) else path.scaled(by, divides=True)
    )


def _through_product_with_number(node: Node, index: int, path: _Path) -> _Steps | None:
    return _through(node, index, path.times(float(saved(node, "other"))))


def _through_quotient_by_number(node: Node, index: int, path: _Path) -> _Steps | None:
    return _through(node, index, path.over(float(saved(node, "other"))))


_STEPS: dict[str, Callable[[Node, int, _Path], _Steps | None]] = {
    **dict.fromkeys(VIEWS, _through),
    **dict.fromkeys((*SUMS, *MEANS), _through_reduction),
    "BackwardHookFunctionBackward": _through_hook,
    "NegBackward0": _through_minus,
    "AddBackward0": _through_sum,
    "SubBackward0": _through_sum,
    "AddBackward1": _through_sum_with_number,
    "SubBackward1": _through_sum_with_number,
    "RsubBackward1": _through_sum_with_number,
    "MulBackward0": _through_product,
    "MulBackward1": _through_product_with_number,
    "DivBackward0": _through_quotient,
    "DivBackward1": _through_quotient_by_number,
}


# Terms

# Losses of torch that reduce their elements themselves.
_REDUCING = (
    *(
        "MseLossBackward0",
        "SmoothL1LossBackward0",
        "HuberLossBackward0",
        "BinaryCrossEntropyBackward0",
    ),
    *(
        "BinaryCrossEntropyWithLogitsBackward0",
        "KlDivBackward0",
        "SoftMarginLossBackward0",
    ),
    *("MultiMarginLossBackward0", "MultilabelMarginLossBackward0"),
)
_BY_MEAN, _BY_SUM = 1, 2


def _kind(node: Node, index: int) -> str:
    """What the node at which a term was found does.

    The kinds are `TARGETS`, `SELECTION`, `MEAN`, `SUM` and `UNREADABLE`.
    """
    name = node.name()
    if shape_of(node, index):
        return UNREADABLE
    if name in SUMS or name == "DotBackward0":
        return SUM
    if name in MEANS:
        return SELECTION if is_selection(node) else MEAN
    if name not in OF_TARGETS and name not in _REDUCING:
        return UNREADABLE
    reduction = reduction_of(node)
    if reduction == _BY_SUM:
        return SUM
    if reduction != _BY_MEAN:
        return UNREADABLE
    if name in OF_TARGETS:
        return TARGETS
    return SELECTION if is_selection(node) else MEAN


def _term(node: Node, index: int, path: _Path) -> Term:
    kind = _kind(node, index)
    factor, scales = path.factor, path.scales
    count: torch.Tensor | float | None = None
    if path.divisor is not None and kind != SUM:  # a mean that was divided once more
        scales = (*scales, Scale(path.divisor, divides=True))
    if kind == TARGETS:
        count = total_weight(node)
    elif kind == SELECTION:
        count = float(length_of(node))
    elif kind == SUM and path.divisor is not None:
        kind, count = DIVISOR, path.divisor
    elif kind == SUM and path.divisors and factor:
        kind, count, factor = NUMBER, 1 / abs(factor), 1.0 if factor > 0 else -1.0
    return Term(
        kind,
        count,
        factor,
        path.enters(node, index),
        node.name(),
        path.divisors,
        scales,
        path.entry is not None,
        path.is_added,
        node,
        path.is_hooked,
    )
