"""What is read from the graph of a loss.

Each kind of node alone, what is in the way, and losses of programs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conditions import for_changes
from known_losses import KNOWN, Net, rows_of
from torchstrategy._run.losses import graph_nodes
from torchstrategy._run.losses.loss_terms import (
    DIVISOR,
    MEAN,
    NUMBER,
    SELECTION,
    SUM,
    TARGETS,
    UNREADABLE,
    Term,
    read_terms,
)

# The compiler asks every tensor for its gradient.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)

Make = Callable[[torch.Tensor], torch.Tensor]
LABELS = torch.tensor([0, 1, -100, 3, 2, -100])  # four of them count
OPS: Any = torch.ops.aten


@pytest.fixture
def layer() -> nn.Module:
    return nn.Linear(3, 4, dtype=torch.float64)


@pytest.fixture
def logits(layer: nn.Module) -> torch.Tensor:
    out: torch.Tensor = layer(torch.arange(18, dtype=torch.float64).view(6, 3) / 7)
    return out


@pytest.fixture
def ce(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, LABELS)


def only(loss: torch.Tensor) -> Term:
    (term,) = read_terms(loss)
    return term


def count_of(term: Term) -> float:
    assert term.count is not None
    return float(term.count)


def gradients(
    loss: torch.Tensor, weights: list[float] | None = None, keep: bool = False
) -> None:
    """Backward from where the terms enter the graph, and not from the loss."""
    terms = read_terms(loss)
    entries = [term.entry for term in terms]
    edges = [
        torch.autograd.graph.GradientEdge(entry.node, entry.index) for entry in entries
    ]
    given = [
        entry.gradient(loss.detach(), w)
        for entry, w in zip(entries, weights or [1.0] * len(terms), strict=True)
    ]
    torch.autograd.backward(edges, given, retain_graph=keep)  # type: ignore[arg-type]


# Nodes that a term passes

PASSED: dict[str, tuple[Make, float]] = {
    "ViewBackward0": (lambda one: one.view(()), 1),
    "UnsafeViewBackward0": (lambda one: OPS._unsafe_view(one, ()), 1),
    "ReshapeAliasBackward0": (lambda one: OPS._reshape_alias(one, (), ()), 1),
    "SqueezeBackward0": (lambda one: one.squeeze(), 1),
    "SqueezeBackward1": (lambda one: one.squeeze(0), 1),
    "SqueezeBackward2": (lambda one: one.squeeze(()), 1),
    "UnsqueezeBackward0": (lambda one: one.unsqueeze(0), 1),
    "ExpandBackward0": (lambda one: one.expand(1), 1),
    "CloneBackward0": (lambda one: one.clone(), 1),
    "AliasBackward0": (lambda one: OPS.alias(one), 1),
    "ToCopyBackward0": (lambda one: one.float(), 1),
    "SumBackward0": (lambda one: one.sum(), 1),
    "SumBackward1": (lambda one: one.sum(0), 1),
    "MeanBackward0": (lambda one: one.mean(), 1),
    "NegBackward0": (lambda one: -one, -1),
    "MulBackward0": (lambda one: 3 * one, 3),
    "MulBackward1": (lambda one: OPS.mul.Scalar(one, 3.0), 3),
    "DivBackward0": (lambda one: one / 4, 0.25),
    "DivBackward1": (lambda one: OPS.div.Scalar(one, 4), 0.25),
    "AddBackward0": (lambda one: one + 1, 1),
    "AddBackward1": (lambda one: OPS.add.Scalar(one, 1), 1),
    "SubBackward0": (lambda one: one - torch.ones(()), 1),
    "SubBackward1": (lambda one: OPS.sub.Scalar(one, 1), 1),
    "RsubBackward1": (lambda one: 1 - one, -1),
}


@pytest.mark.parametrize("name", PASSED)
def test_a_term_passes_this_node(ce: torch.Tensor, name: str) -> None:
    make, factor = PASSED[name]
    loss = make(ce)
    assert loss.grad_fn is not None and loss.grad_fn.name() == name
    term = only(loss)
    assert (term.source, term.name, count_of(term), term.factor) == (
        TARGETS,
        "NllLossBackward0",
        4,
        factor,
    )
    assert term.entry.node is ce.grad_fn and not term.scales and not term.is_learned
    assert term.is_added == (name[:3] in ("Add", "Sub", "Rsu"))


@pytest.mark.parametrize("name", PASSED)
def test_it_stops_at_a_value_with_a_dimension(layer: nn.Module, name: str) -> None:
    """A value of shape [1] may be one row of the batch.

    Below it nothing says of how many rows a mean is.
    """
    row = F.cross_entropy(
        layer(torch.ones(1, 3, dtype=torch.float64)), LABELS[:1], reduction="none"
    )
    inner = row * 2
    loss = PASSED[name][0](inner) if name not in ("ViewBackward0",) else inner.view(())
    if loss.dim():
        loss = loss + 0
    term = only(loss)
    assert term.count is None and term.source in (UNREADABLE, MEAN, SUM)


def test_sums_have_terms_in_their_order(logits: torch.Tensor, ce: torch.Tensor) -> None:
    square, absolute = logits.square().mean(), logits.abs().sum()
    terms = read_terms(2 * (ce - 0.5 * square) + absolute / 3)
    assert [(term.source, term.factor) for term in terms] == [
        (TARGETS, 2),
        (MEAN, -1),
        (NUMBER, 1),
    ]
    assert [term.divisors for term in terms] == [(0.5,), (0.5, 2.0), (3.0,)]
    assert count_of(terms[2]) == 3
    alpha = read_terms(torch.add(ce, square, alpha=0.25))
    assert [(term.source, term.factor) for term in alpha] == [
        (TARGETS, 1),
        (MEAN, 0.25),
    ]
    alpha = read_terms(torch.sub(square, ce, alpha=4))
    assert [(term.source, term.factor) for term in alpha] == [(MEAN, 1), (TARGETS, -4)]


def test_a_module_with_backward_hooks_passes_its_loss_on(layer: nn.Module) -> None:
    class Losses(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = layer(x)
            return out.square().mean(), F.cross_entropy(out, LABELS)

    model = Losses()
    model.register_full_backward_hook(lambda *_: None)
    first, second = model(torch.ones(6, 3, dtype=torch.float64, requires_grad=True))
    assert second.grad_fn.name() == "BackwardHookFunctionBackward"
    assert [only(first).source, only(second).source] == [MEAN, TARGETS]


# Nodes at which a term ends


def losses_of(logits: torch.Tensor, reduction: str) -> dict[str, torch.Tensor]:
    goal = logits.detach().sigmoid()
    return {
        "NllLossBackward0": F.nll_loss(logits, LABELS, reduction=reduction),
        "NllLoss2DBackward0": F.nll_loss(
            logits.T[None], LABELS[None], reduction=reduction
        ),
        "MseLossBackward0": F.mse_loss(logits, goal, reduction=reduction),
        "SmoothL1LossBackward0": F.smooth_l1_loss(logits, goal, reduction=reduction),
        "HuberLossBackward0": F.huber_loss(logits, goal, reduction=reduction),
        "BinaryCrossEntropyBackward0": F.binary_cross_entropy(
            logits.sigmoid(), goal, reduction=reduction
        ),
        "BinaryCrossEntropyWithLogitsBackward0": F.binary_cross_entropy_with_logits(
            logits, goal, reduction=reduction
        ),
        "KlDivBackward0": OPS.kl_div(logits, goal, {"mean": 1, "sum": 2}[reduction]),
        "SoftMarginLossBackward0": F.soft_margin_loss(
            logits, goal, reduction=reduction
        ),
        "MultiMarginLossBackward0": F.multi_margin_loss(
            logits, LABELS.clamp(min=0), reduction=reduction
        ),
        "MultilabelMarginLossBackward0": F.multilabel_margin_loss(
            logits, LABELS.clamp(min=0)[:, None].repeat(1, 4), reduction=reduction
        ),
    }


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_torch_that_reduce_their_elements(
    logits: torch.Tensor, reduction: str
) -> None:
    for name, loss in losses_of(logits, reduction).items():
        term = only(loss / torch.tensor(5.0))
        if reduction == "sum":
            assert (term.source, count_of(term)) == (DIVISOR, 5), name
            assert only(loss).source == SUM
        elif name in ("KlDivBackward0",) and term.source == UNREADABLE:
            assert term.name != name
        else:
            assert term.source == (TARGETS if "Nll" in name else MEAN), name
            assert [(float(tensor), divides) for tensor, divides in term.scales] == [
                (5, True)
            ]
        assert term.name == name or name not in {loss.grad_fn.name()}, (term.name, name)  # type: ignore[union-attr]


SUMS: dict[str, Make] = {
    "SumBackward0": lambda t: t.sum(),
    "SumBackward1": lambda t: t.sum((0, 1)),
    "NansumBackward0": lambda t: t.nansum(),
    "DotBackward0": lambda t: t.flatten().dot(t.detach().flatten()),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_full_sum_counts_by_what_it_was_divided_by(
    logits: torch.Tensor, name: str
) -> None:
    total = SUMS[name](logits)
    assert total.grad_fn is not None and total.grad_fn.name() == name
    assert only(total).source == SUM
    tokens = torch.tensor(7)
    term = only(-2 * total / tokens)
    assert (term.source, term.factor, term.scales) == (DIVISOR, -2, ())
    assert term.count is not None and torch.equal(torch.as_tensor(term.count), tokens)
    term = only(-2 * total / 7)
    assert (term.source, count_of(term), term.factor, term.divisors) == (
        NUMBER,
        3.5,
        -1,
        (7, -0.5),
    )
    # Of shape [1]: it may be of one row.
    assert only(total / torch.tensor([7.0])).source != DIVISOR
    assert only(total / logits.detach().sum().requires_grad_()).source == UNREADABLE


def test_the_innermost_divisor_is_the_count(logits: torch.Tensor) -> None:
    tokens, workers = torch.tensor(7), torch.tensor(2.0)
    term = only(logits.sum() / tokens / workers)
    assert count_of(term) == 7 and [
        (float(t), divides) for t, divides in term.scales
    ] == [(2, True)]
    terms = read_terms((logits.sum() + logits.square().sum()) / tokens)
    assert [(term.source, count_of(term)) for term in terms] == [
        (DIVISOR, 7),
        (DIVISOR, 7),
    ]
    terms = read_terms((logits.sum() + logits.square().mean()) / tokens)
    assert [(term.source, len(term.scales)) for term in terms] == [
        (DIVISOR, 0),
        (MEAN, 1),
    ]


def test_clamped_and_padded_counts_are_the_numbers_that_were_divided_by(
    logits: torch.Tensor,
) -> None:
    mask = torch.zeros(6, 4)
    assert count_of(only((logits * mask).sum() / mask.sum().clamp(min=1))) == 1
    assert count_of(only((logits * mask).sum() / mask.sum())) == 0
    assert math.isclose(
        count_of(only((logits * mask).sum() / (mask.sum() + 1e-3))), 1e-3, rel_tol=1e-6
    )


def test_means_over_selected_elements(logits: torch.Tensor) -> None:
    mask = LABELS >= 0
    selected: list[tuple[torch.Tensor, float]] = [
        (logits.sum(1)[mask].mean(), 4),
        (logits[mask].mean(), 16),
        (logits.masked_select(mask[:, None]).square().mean(), 16),
        (F.mse_loss(logits[mask], logits.detach()[mask]), 16),
        (F.smooth_l1_loss(logits[mask].exp().neg(), logits.detach()[mask]), 16),
        (logits[mask].square().sum(1).sqrt().mean(), 4),
        (logits.index_select(0, torch.tensor([0, 3])).mean(), 8),
        (
            (logits[mask] @ torch.ones(4, 2, dtype=torch.float64)).mean(0).mean() * 0
            + logits[mask].mean(),
            16,
        ),
    ]
    for loss, count in selected:
        term = read_terms(loss)[-1]
        assert (term.source, count_of(term)) == (SELECTION, count)


def test_means_over_what_selected_elements_became_are_plain_means(
    logits: torch.Tensor,
) -> None:
    """Means of two buckets, of classes, and of all pairs: no selected elements."""
    chosen = logits[LABELS >= 0]
    buckets = torch.zeros(2, 4, dtype=torch.float64).index_add(
        0, torch.tensor([0, 1, 1, 0]), chosen
    )
    for loss in (
        buckets.mean(),
        chosen.mean(0)[:3].mean(),
        (chosen.T @ chosen)[:2].mean(),
        logits.mean(),
    ):
        assert only(loss).source == MEAN


def test_what_cannot_be_read_says_which_node_it_is(
    logits: torch.Tensor, ce: torch.Tensor
) -> None:
    for loss in (
        ce.exp(),
        ce**2,
        logits.norm(),
        logits.max(),
        logits[0, 0],
        torch.stack([ce, ce]).max(),
    ):
        term = only(loss)
        assert (term.source, term.count) == (UNREADABLE, None)
        assert loss.grad_fn is not None and term.name == loss.grad_fn.name()


def test_what_has_no_graph_has_no_terms_to_read() -> None:
    for loss in (nn.Parameter(torch.ones(())), torch.ones(())):
        assert [(term.source, term.name) for term in read_terms(loss)] == [
            (UNREADABLE, "leaf")
        ]


def test_more_than_one_element_is_no_loss(logits: torch.Tensor) -> None:
    assert only(logits * 2).source == UNREADABLE


# Numbers and tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_a_python_number_is_told_from_a_tensor(
    dtype: torch.dtype, default: torch.dtype
) -> None:
    total = torch.ones(3, dtype=dtype, requires_grad=True).sum()
    torch.set_default_dtype(default)
    try:
        numbers: list[Any] = [
            2,
            2.0,
            np.float64(2),
            np.int64(2),
            torch.tensor(2).item(),
            torch.tensor(2.0).item(),
        ]
        for number in numbers:
            for loss in (
                total * number,
                number * total,
                total / number,
                total.clone().mul_(number),
            ):
                assert only(loss).source == NUMBER, (type(number), loss.grad_fn)
        tensors = [
            torch.tensor(2),
            torch.tensor(2.0),
            torch.tensor(2.0, dtype=torch.float64),
        ]
        tensors += [
            torch.tensor(2, dtype=torch.int32),
            torch.tensor(True),
            torch.tensor(2.0, dtype=torch.float32),
        ]
        for tensor in tensors:
            assert only(total / tensor).source == DIVISOR
            for loss in (total * tensor, tensor * total):
                term = only(loss)
                assert (term.source, term.divisors, len(term.scales)) == (SUM, (), 1)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_division_by_zero_is_left_to_backward(logits: torch.Tensor) -> None:
    assert only(logits.sum() / 0).source == UNREADABLE
    assert (only(logits.sum() * 0).source, only(logits.sum() * 0).count) == (SUM, None)
    assert math.isnan(count_of(only(logits.sum() * float("nan"))))


# Factors that parameters make


def test_a_parameter_may_be_a_factor(ce: torch.Tensor) -> None:
    scale, several = (
        nn.Parameter(torch.tensor(2.0)),
        nn.Parameter(torch.tensor([1.0, 2.0])),
    )
    for loss in (
        ce * scale,
        scale * ce,
        ce / scale,
        ce * (-scale).exp(),
        3 * ce * F.softplus(several[1]),
        ce * (scale * several[0]),
    ):
        term = only(loss)
        assert (term.source, count_of(term), term.is_learned) == (TARGETS, 4, True)
        assert term.entry.node is not ce.grad_fn
    # Another one is where the sum of both enters.
    assert only((ce + ce.square()) * scale).source == UNREADABLE


def test_a_factor_that_the_replica_makes_is_no_parameter(
    ce: torch.Tensor, logits: torch.Tensor
) -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
    reward = logits.detach().mean()
    for loss in (
        ce * logits.mean(),
        ce * leaf,
        ce * (scale * reward),
        ce * (scale + reward),
        ce / logits.sum(),
    ):
        assert only(loss).source == UNREADABLE


def test_terms_with_factors_enter_where_the_factor_is_multiplied() -> None:
    x, scale = torch.ones(6, 4, requires_grad=True), nn.Parameter(torch.tensor(2.0))
    for make in (
        lambda one: 5 * one * (-scale).exp() + scale,
        lambda one: (one / torch.tensor(3.0)) * scale,
        lambda one: one / scale,
        lambda one: (product := one * scale) + product,
    ):
        given = []
        for from_terms in (False, True):
            x.grad = scale.grad = None
            loss = make(F.cross_entropy(x, LABELS))
            gradients(loss) if from_terms else loss.backward()
            assert x.grad is not None and scale.grad is not None
            given.append((x.grad, scale.grad))
        torch.testing.assert_close(given[1], given[0])


# What is in the way


def test_a_loss_and_its_square_share_a_node_and_not_a_weight(
    logits: torch.Tensor, layer: nn.Module
) -> None:
    ce = F.cross_entropy(logits, LABELS)
    loss = ce + ce**2
    terms = read_terms(loss)
    assert [(term.source, term.name) for term in terms] == [
        (TARGETS, "NllLossBackward0"),
        (UNREADABLE, "PowBackward0"),
    ]
    gradients(loss, [3.0, 1.0], keep=True)
    actual, layer.weight.grad = layer.weight.grad, None
    (3 * ce + ce**2).backward()
    torch.testing.assert_close(actual, layer.weight.grad)


def test_what_is_added_twice_is_one_term(ce: torch.Tensor) -> None:
    term = only(ce + ce / 2 - 3 * ce)
    assert (count_of(term), term.factor, term.entry.factor, term.divisors) == (
        4,
        -1.5,
        -1.5,
        (),
    )
    scaled = read_terms(ce + ce * torch.tensor(2.0))
    assert [len(term.scales) for term in scaled] == [0, 1]


@pytest.mark.parametrize("keep", [True, False])
def test_a_graph_may_be_read_as_often_as_it_is_there(
    ce: torch.Tensor, keep: bool
) -> None:
    for _ in range(2):
        assert count_of(only(ce)) == 4
        ce.backward(retain_graph=True)
    ce.backward(retain_graph=keep)
    if keep:
        assert count_of(only(ce)) == 4
        return
    # The memory is freed: backward says so.
    assert (only(ce).source, only(ce).name) == (UNREADABLE, "NllLossBackward0")
    with pytest.raises(RuntimeError, match="second time"):
        ce.backward()


def test_memory_that_was_written_since_is_not_read(logits: torch.Tensor) -> None:
    tokens, factor = torch.tensor(7.0), torch.tensor(2.0)
    loss = logits.sum() / tokens * factor
    tokens.add_(1)
    assert only(loss).source == UNREADABLE
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_the_loss_are_not_called_by_reading(ce: torch.Tensor) -> None:
    called = []
    ce.register_hook(lambda gradient: called.append("tensor"))
    assert ce.grad_fn is not None
    ce.grad_fn.register_prehook(lambda *_: called.append("prehook"))  # type: ignore[func-returns-value,arg-type]
    ce.grad_fn.register_hook(lambda *_: called.append("node"))  # type: ignore[func-returns-value,arg-type]
    assert count_of(only(ce)) == 4 and not called


def test_saved_tensors_hooks_give_what_they_have_packed(layer: nn.Module) -> None:
    x, packed = torch.ones(6, 3, dtype=torch.float64), []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i].clone()):
        loss = F.cross_entropy(layer(x), LABELS) * torch.tensor(2.0)
    term = only(loss)
    assert count_of(term) == 4 and float(term.scales[0].tensor) == 2
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        loss = F.cross_entropy(layer(x), LABELS)
    assert count_of(only(loss)) == 4
    loss.backward()


def test_a_hook_that_fails_is_left_to_backward(layer: nn.Module) -> None:
    def fail(packed: Any) -> Any:
        raise KeyError("it is gone")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fail):
        loss = F.cross_entropy(layer(torch.ones(6, 3, dtype=torch.float64)), LABELS)
    assert only(loss).source == UNREADABLE
    with pytest.raises(KeyError, match="it is gone"):
        loss.backward()


def test_a_checkpoint_around_the_loss_computes_it_again_and_backward_is_as_before(
    layer: nn.Module,
) -> None:
    calls = []

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return F.cross_entropy(layer(x), LABELS)

    x = torch.arange(18, dtype=torch.float64).view(6, 3)
    loss_of(x).backward()
    expected, layer.weight.grad = layer.weight.grad, None
    loss = checkpoint(loss_of, x, use_reentrant=False)
    assert count_of(only(loss)) == 4
    assert len(calls) == 3  # one more than without a look
    loss.backward()
    assert len(calls) == 4
    torch.testing.assert_close(layer.weight.grad, expected)
    reentrant = checkpoint(loss_of, x.requires_grad_(), use_reentrant=True)
    assert (only(reentrant).source, only(reentrant).name) == (
        UNREADABLE,
        "CheckpointFunctionBackward",
    )


def test_autocast_counts_in_float32(layer: nn.Module) -> None:
    model = copy.deepcopy(layer).float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.ones(3001, 3))
        loss = F.cross_entropy(logits, torch.zeros(3001, dtype=torch.long))
        term = only(loss)
    assert logits.dtype is torch.bfloat16
    assert (term.source, count_of(term)) == (TARGETS, 3001)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_targets_of_half_logits_are_counted_again(dtype: torch.dtype) -> None:
    logits = torch.zeros(4001, 4, dtype=dtype, requires_grad=True)
    targets = torch.arange(4001) % 4
    targets[:1000] = -100
    loss = F.nll_loss(logits, targets)
    assert loss.grad_fn is not None
    assert float(graph_nodes.saved(loss.grad_fn, "total_weight")) != 3001
    assert count_of(only(loss)) == 3001
    weight = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=dtype)
    weighed = F.nll_loss(logits, targets, weight=weight, ignore_index=-100)
    assert count_of(only(weighed)) == float(weight.double()[targets[1000:]].sum())


def test_targets_tell_a_loop_over_rows_from_several_heads(layer: nn.Module) -> None:
    x = torch.ones(6, 3, dtype=torch.float64)
    rows = read_terms(
        sum(
            F.cross_entropy(layer(one), label)
            for one, label in zip(x, LABELS.clamp(min=0), strict=True)
        )
    )  # type: ignore[arg-type]
    assert len({term.targets for term in rows}) == 6
    heads = read_terms(
        F.cross_entropy(layer(x), LABELS) + F.cross_entropy(layer(x) * 2, LABELS)
    )
    assert len({term.targets for term in heads}) == 1


def test_reading_dispatches_nothing(logits: torch.Tensor, ce: torch.Tensor) -> None:
    """So it can make the host wait for no device."""
    called = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    mask = (LABELS >= 0).double()[:, None]
    loss = (
        -ce
        + (logits * mask).sum() / mask.sum()
        + logits[LABELS >= 0].mean() * torch.tensor(2.0)
        + logits.mean()
    )
    with Listening():
        terms = read_terms(loss)
    assert [term.source for term in terms] == [TARGETS, DIVISOR, SELECTION, MEAN]
    assert not called


# Random losses

WRAPPINGS: list[Callable[[torch.Tensor, float, nn.Parameter], torch.Tensor]] = [
    lambda loss, number, scale: loss * number,
    lambda loss, number, scale: loss / number,
    lambda loss, number, scale: -loss,
    lambda loss, number, scale: number - loss,
    lambda loss, number, scale: loss + number,
    lambda loss, number, scale: loss * torch.tensor(number),
    lambda loss, number, scale: loss / torch.tensor(number),
    lambda loss, number, scale: loss * scale,
    lambda loss, number, scale: loss / scale.exp(),
    lambda loss, number, scale: loss.view(1).sum(),
    lambda loss, number, scale: loss.clone().squeeze(),
    lambda loss, number, scale: loss.square(),
    lambda loss, number, scale: loss + loss * number,
    lambda loss, number, scale: loss.float().double(),
]
INNERMOST: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda out: F.cross_entropy(out, LABELS),
    lambda out: F.cross_entropy(out, LABELS, label_smoothing=0.1),
    lambda out: out[LABELS >= 0].square().mean(),
    lambda out: out.square().sum() / torch.tensor(3.0),
    lambda out: out.square().sum() / 3,
    lambda out: out.square().mean(),
    lambda out: out.exp().sum(),
]
numbers = st.sampled_from([0.5, 2.0, -3.0, 1.0, 7.0])
wrapped = st.tuples(
    st.sampled_from(INNERMOST),
    st.lists(st.tuples(st.sampled_from(WRAPPINGS), numbers), max_size=5),
)


@for_changes
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    st.lists(wrapped, min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(WRAPPINGS), numbers), max_size=4),
)
def test_the_terms_of_a_random_loss_have_its_gradient(terms: Any, around: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_()
    scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def wrap(loss: torch.Tensor, wrappings: Any) -> torch.Tensor:
        for wrapping, number in wrappings:
            loss = wrapping(loss, number, scale)
        return loss

    found = []
    for from_terms in (False, True):
        x.grad = scale.grad = None
        total: Any = sum(
            wrap(innermost(x), wrappings) for innermost, wrappings in terms
        )
        loss = wrap(total, around)
        gradients(loss) if from_terms else loss.backward()
        found.append(
            (x.grad, torch.zeros(()) if scale.grad is None else scale.grad.float())
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


# Losses of programs


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_read_of_a_loss(name: str) -> None:
    known = KNOWN[name]
    rows = rows_of(3)
    # torch 2.10 leaves the last operation of a compiled loss in the graph.
    is_read = name == "compiled_loss" and torch.__version__ < "2.11"
    sources = ("targets",) if is_read else known.sources
    assert tuple(term.source for term in read_terms(known.loss(Net(), rows))) == sources


@pytest.mark.parametrize("name", KNOWN)
def test_a_backward_from_the_terms_is_that_of_the_loss(name: str) -> None:
    known = KNOWN[name]
    found = []
    for from_terms in (False, True):
        net = Net()
        loss = known.loss(net, rows_of(3))
        gradients(loss) if from_terms else loss.backward()
        found.append({name: p.grad for name, p in net.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
