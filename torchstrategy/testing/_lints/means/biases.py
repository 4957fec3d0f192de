"""Biases that each rank adds to its part of a sum, before the sum is made.

They count once for each rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import Fingerprint, fingerprint
from torchstrategy.testing._lints.evidence.losses import is_passed
from torchstrategy.testing._lints.evidence.nodes import leaf_of, name_of
from torchstrategy.testing._lints.evidence.places import (
    FUNCTIONS,
    Place,
    in_words,
    way_here,
)
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._ranks.witnesses import Told

_MOST_CALLS, _MOST_WAITING, _MOST_PASSED = 100, 64, 10
# Where the weights of a layer are among the inputs of its node. The bias is the first
# input of `addmm`.
_PRODUCTS = (
    "MmBackward",
    "BmmBackward",
    "AddmmBackward",
    "ConvolutionBackward",
    "LinearBackward",
    "MkldnnLinear",
)
_TURNED = ("TBackward", "TransposeBackward", "PermuteBackward")


class _Layer(NamedTuple):
    """What a rank gives to a sum: the product of a weight, and a bias."""

    weight: Fingerprint
    bias: Fingerprint
    place: Place


@final
class Biases(Lint):
    """Looks at the layer whose output an `all_reduce` of a forward pass adds up.

    It looks only at collectives, by the graph.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[int, _Layer | None]] = {}
        self._calls: Counter[tuple[int, Place]] = Counter()
        self._found: dict[tuple[Place, ...], tuple[int, Fingerprint]] = {}

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        is_sum = told.kind in ("all_reduce", "reduce_scatter") and told.detail == "sum"
        if not is_sum or len(told.ranks) < 2 or not told.gives:
            return
        node = told.gives[0].grad_fn or _input_of_the_function()
        if node is None:
            return
        # All ranks have to look at the same calls: so all count, whatever they find.
        place = way_here()[0]
        self._calls[facts.rank, place] += 1
        if self._calls[facts.rank, place] > _MOST_CALLS:
            return
        if told.key not in self._waiting and len(self._waiting) >= _MOST_WAITING:
            # The others will never look at it.
            del self._waiting[next(iter(self._waiting))]
        layer = _layer_under(node)
        sizes = told.gives[0].shape
        is_flat = told.kind == "reduce_scatter"  # its pieces have no other sizes
        has_its_bias = layer is not None and (
            is_flat or layer.bias.shape[0] in sizes[1:2] + sizes[-1:]
        )
        there = self._waiting.setdefault(told.key, {})
        there[facts.rank] = layer if has_its_bias else None
        if len(there) == len(told.ranks):
            self._judge(list(self._waiting.pop(told.key).values()))

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "bias-of-each-rank",
                f"{count} ranks add up the outputs of a layer ({in_words(places)}). "
                "Each has a part of the weight, and has added the same bias, of "
                f"{bias.shape[0]} numbers: the bias counts {count} times.",
                "Add the bias after the sum: `all_reduce` the result of `F.linear(x, "
                "weight)`, and then `+ bias`.",
                list(places),
            )
            for places, (count, bias) in self._found.items()
        ]

    def _judge(self, layers: list[_Layer | None]) -> None:
        there = [layer for layer in layers if layer is not None]
        biases, weights = (
            {layer.bias for layer in there},
            {layer.weight for layer in there},
        )
        if len(there) == len(layers) == len(weights) and len(biases) == 1:
            bias = there[0].bias
            # All zeros are alike without a reason, and count nothing.
            if len(set(bias.sample)) > 1:
                places = tuple(dict.fromkeys(layer.place for layer in there))
                self._found.setdefault(places, (len(layers), bias))


def _input_of_the_function() -> Any:
    """The node of what a function with a backward of its own gets; None if none.

    Its forward calls the collective.

    The collective itself gets a copy there, without a graph. But `ctx` is the node of
    the function.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_back
        if (
            caller is not None
            and caller.f_globals.get("__name__") in FUNCTIONS
            and frame.f_code.co_name == "forward"
        ):
            first = frame.f_code.co_varnames[:1]
            node = frame.f_locals.get(*first) if first else None
            inputs = [
                each
                for each, _ in getattr(node, "next_functions", ())
                if each is not None
            ]
            return inputs[0] if len(inputs) == 1 else None
        frame = caller
    return None


def _layer_under(node: Any) -> _Layer | None:
    """The layer whose output a node has, with its weight and bias.

    It is None if it is something else.
    """
    node = _passed(node)
    if node is None:
        return None
    inputs = [_passed(following) for following, _ in node.next_functions]
    if name_of(node).startswith("AddBackward"):
        parameters = [_parameter(each) for each in inputs]
        products = [each for each in inputs if each is not None and _is_product(each)]
        bias = next((one for one in parameters if one is not None and one.dim()), None)
        product = products[0] if len(products) == 1 else None
    else:
        product = node if _is_product(node) else None
        bias = next(
            (
                one
                for one in map(_parameter, inputs)
                if one is not None and one.dim() == 1
            ),
            None,
        )
    weight = None if product is None else next(_weights(product), None)
    if bias is None or weight is None or bias is weight:
        return None
    of_weight, of_bias = fingerprint(weight), fingerprint(bias)
    return (
        None
        if of_weight is None or of_bias is None
        else _Layer(of_weight, of_bias, way_here()[0])
    )


def _weights(product: Any) -> Iterator[torch.Tensor]:
    for following, _ in product.next_functions:
        node = _passed(following)
        if node is not None and name_of(node).startswith(_TURNED):
            node = _passed(node.next_functions[0][0])
        parameter = _parameter(node)
        if parameter is not None and parameter.dim() > 1:
            yield parameter


def _passed(node: Any) -> Any:
    """The first node, from the output to the inputs, that changes a number."""
    for _ in range(_MOST_PASSED):
        if node is None or not is_passed(node):
            return node
        node = node.next_functions[0][0]
    return None


def _is_product(node: Any) -> bool:
    return name_of(node).startswith(_PRODUCTS)


def _parameter(node: Any) -> torch.Tensor | None:
    leaf = leaf_of(node)
    return leaf if isinstance(leaf, torch.nn.Parameter) else None
