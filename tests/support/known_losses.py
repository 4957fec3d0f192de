"""Losses as programs write them, and what is read from the graph of each.

It is read in a batch of three rows.

They are means over tokens, classes, masks, rows, pairs and terms; some are wrong, as
those of programs are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

TOKENS, CLASSES, WIDTH = 24, 5, 6
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)


@dataclass
class Rows:
    """Some rows of tokens, in float64."""

    x: torch.Tensor  # what the model gets
    y: torch.Tensor  # the class of each token
    mask: torch.Tensor  # which tokens count: few in some rows, most in others
    labels: torch.Tensor  # the classes, with -100 where the mask is False
    soft: torch.Tensor  # how much each token counts
    shares: torch.Tensor  # the probability of each class
    goal: torch.Tensor  # numbers for each class
    gain: torch.Tensor
    before: torch.Tensor
    whole: Rows | None = field(default=None, repr=False)

    def part(self, rows: slice) -> Rows:
        """Some of the rows."""
        own = (
            getattr(self, one.name)[rows] for one in fields(self) if one.name != "whole"
        )
        return Rows(*own, whole=self)

    def __len__(self) -> int:
        return len(self.x)


def rows_of(count: int, seed: int = 1) -> Rows:
    """Rows of which no two are alike."""
    g = torch.Generator().manual_seed(seed)
    size = (count, TOKENS)
    f64 = functools.partial(torch.rand, generator=g, dtype=torch.float64)
    y = torch.randint(CLASSES, size, generator=g)
    mask = f64(size) < torch.linspace(0.2, 0.9, count, dtype=torch.float64)[:, None]
    mask[:, 0] = True
    numbers = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    x, goal = numbers(*size, WIDTH), numbers(*size, CLASSES)
    shares = f64((*size, CLASSES)).softmax(-1)
    return Rows(
        x,
        y,
        mask,
        y.masked_fill(~mask, -100),
        f64(size),
        shares,
        goal,
        numbers(size),
        numbers(size) * 0.1,
    )


class Net(nn.Module):
    """A small tagger with two heads, and a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other = (
            nn.Linear(WIDTH, 8),
            nn.Linear(8, CLASSES),
            nn.Linear(8, CLASSES),
        )
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.double()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x))


Loss = Callable[[Net, Rows], torch.Tensor]


class Known(NamedTuple):
    """A loss, and what is read of it."""

    loss: Loss
    sources: tuple[str, ...]  # of its terms, in a batch of three rows
    # Whether weights by counts, and by rows for terms without one, give the gradient of
    # the batch.
    is_exact: bool


KNOWN: dict[str, Known] = {}


def known(sources: str, is_exact: bool = False) -> Callable[[Loss], Loss]:
    """Adds a loss to the table. `sources` are separated by spaces."""

    def add(loss: Loss) -> Loss:
        KNOWN[loss.__name__] = Known(loss, tuple(sources.split()), is_exact)
        return loss

    return add


def by(name: str, sources: str, loss: Loss, is_exact: bool = False) -> None:
    KNOWN[name] = Known(loss, tuple(sources.split()), is_exact)


def flat(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net(x).flatten(0, 1)


def ce(net: Net, rows: Rows, **options: Any) -> torch.Tensor:
    return F.cross_entropy(flat(net, rows.x), rows.labels.flatten(), **options)


def all_tokens(net: Net, rows: Rows, **options: Any) -> torch.Tensor:
    return F.cross_entropy(flat(net, rows.x), rows.y.flatten(), **options)


def each(net: Net, rows: Rows) -> torch.Tensor:
    return all_tokens(net, rows, reduction="none").view(len(rows), -1)


def row_losses(net: Net, rows: Rows) -> list[torch.Tensor]:
    """A loop over rows."""
    return [
        F.cross_entropy(net(x), labels)
        for x, labels in zip(rows.x, rows.labels, strict=True)
    ]


def masked(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (losses * mask).sum()


# Cross entropy
by("ce_ignore_index", "targets", ce, is_exact=True)
by("ce_no_ignored", "targets", all_tokens, is_exact=True)
by(
    "ce_2d",
    "targets",
    lambda n, r: F.cross_entropy(n(r.x).transpose(1, 2), r.labels),
    is_exact=True,
)
by("ce_class_weights", "targets", lambda n, r: ce(n, r, weight=WEIGHTS), is_exact=True)
by(
    "ce_smoothing",
    "targets divisor",
    lambda n, r: all_tokens(n, r, label_smoothing=0.1),
    is_exact=True,
)
by(
    "ce_smoothing_ignore",
    "targets divisor",
    lambda n, r: ce(n, r, label_smoothing=0.1),
    is_exact=True,
)
by(
    "ce_smoothing_ignore_weights",
    "targets divisor",
    lambda n, r: ce(n, r, label_smoothing=0.1, weight=WEIGHTS),
    is_exact=True,
)
by(
    "ce_probabilities",
    "number",
    lambda n, r: F.cross_entropy(flat(n, r.x), r.shares.flatten(0, 1)),
    is_exact=True,
)
by(
    "ce_probabilities_weights",
    "number",
    lambda n, r: F.cross_entropy(flat(n, r.x), r.shares.flatten(0, 1), weight=WEIGHTS),
    is_exact=True,
)
by(
    "ce_sum_by_tokens_tensor",
    "divisor",
    lambda n, r: ce(n, r, reduction="sum") / (r.labels != -100).sum(),
    is_exact=True,
)
by(
    "ce_sum_by_tokens_item",
    "number",
    lambda n, r: ce(n, r, reduction="sum") / (r.labels != -100).sum().item(),
    is_exact=True,
)

# Masks
by(
    "masked_mean",
    "divisor",
    lambda n, r: masked(each(n, r), r.mask) / r.mask.sum(),
    is_exact=True,
)
by(
    "masked_mean_clamp",
    "divisor",
    lambda n, r: masked(each(n, r), r.mask) / r.mask.sum().clamp(min=1),
    is_exact=True,
)
by(
    "masked_mean_eps",
    "divisor",
    lambda n, r: masked(each(n, r), r.mask) / (r.mask.sum() + 1e-8),
)  # but for the 1e-8
by(
    "soft_mask",
    "divisor",
    lambda n, r: masked(each(n, r), r.soft) / r.soft.sum(),
    is_exact=True,
)
by(
    "bool_index_mean",
    "selection",
    lambda n, r: each(n, r)[r.mask].mean(),
    is_exact=True,
)
by(
    "masked_select_mean",
    "selection",
    lambda n, r: each(n, r).masked_select(r.mask).mean(),
    is_exact=True,
)
by(
    "mse_bool_index",
    "selection",
    lambda n, r: F.mse_loss(n(r.x)[r.mask], r.goal[r.mask]),
    is_exact=True,
)
by(
    "seq_mean_token_mean",
    "mean",
    lambda n, r: ((each(n, r) * r.mask).sum(1) / r.mask.sum(1)).mean(),
    is_exact=True,
)
by(
    "seq_mean_token_sum_norm",
    "number",
    lambda n, r: masked(each(n, r), r.mask) / (len(r) * TOKENS),
    is_exact=True,
)


@known("divisor", is_exact=True)
def policy_clipped(n: Net, r: Rows) -> torch.Tensor:
    """A mean over the tokens of clipped ratios of probabilities."""
    ratio = (-each(n, r) - r.before).exp()
    losses = torch.max(-r.gain * ratio, -r.gain * ratio.clamp(0.8, 1.2))
    return masked(losses, r.mask) / r.mask.sum().clamp(min=1.0)


# Binary cross entropy, squares, divergences
def bce(n: Net, r: Rows, **options: Any) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(n(r.x), r.shares, **options)


by("bce_pos_weight", "mean", lambda n, r: bce(n, r, pos_weight=WEIGHTS), is_exact=True)
by("bce_weight", "mean", lambda n, r: bce(n, r, weight=WEIGHTS), is_exact=True)
by(
    "bce_sum_by_positives",
    "divisor",
    lambda n, r: bce(n, r, reduction="sum") / (r.shares > 0.2).sum().clamp(min=1),
    is_exact=True,
)
by("mse", "mean", lambda n, r: F.mse_loss(n(r.x), r.goal), is_exact=True)
by(
    "mse_padded_zeros",
    "mean",
    lambda n, r: F.mse_loss(n(r.x) * r.mask[..., None], r.goal * r.mask[..., None]),
    is_exact=True,
)


def kl(n: Net, r: Rows, reduction: str) -> torch.Tensor:
    return F.kl_div(n(r.x).log_softmax(-1), r.shares, reduction=reduction)


by("kl_batchmean_rows", "number", lambda n, r: kl(n, r, "batchmean"), is_exact=True)
by(
    "kl_batchmean_tokens",
    "number",
    lambda n, r: F.kl_div(
        n(r.x)[r.mask].log_softmax(-1), r.shares[r.mask], reduction="batchmean"
    ),
    is_exact=True,
)
by("kl_mean", "mean", lambda n, r: kl(n, r, "none").mean(), is_exact=True)


def ctc(n: Net, r: Rows, lengths: torch.Tensor, reduction: str) -> torch.Tensor:
    words, sizes = r.y[:, :3].clamp(min=1), torch.full((len(r),), TOKENS)
    logs = n(r.x).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(
        logs, words, sizes, lengths, zero_infinity=True, reduction=reduction
    )


by(
    "ctc_mean",
    "mean",
    lambda n, r: ctc(n, r, 1 + r.mask[:, :2].sum(1).clamp(max=1), "mean"),
    is_exact=True,
)
by(
    "ctc_sum_by_targets",
    "divisor",
    lambda n, r: (
        ctc(n, r, 1 + r.mask[:, 1].long(), "sum") / (1 + r.mask[:, 1].long()).sum()
    ),
    is_exact=True,
)
by(
    "gaussian_nll",
    "mean",
    lambda n, r: F.gaussian_nll_loss(n(r.x), r.goal, r.shares + 0.1),
    is_exact=True,
)


# Distances and pairs
def three(n: Net, r: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = n(r.x)
    return out[:, 0], out[:, 1], out[:, 2]


by("triplet", "mean", lambda n, r: F.triplet_margin_loss(*three(n, r)), is_exact=True)


@known("selection", is_exact=True)
def triplet_mined(n: Net, r: Rows) -> torch.Tensor:
    anchor, near, far = three(n, r)
    losses = (anchor - near).norm(dim=1) - (anchor - far).norm(dim=1) + 5
    return losses[losses > losses.detach().min() / 2].mean()


by(
    "cosine",
    "mean",
    lambda n, r: F.cosine_embedding_loss(
        n(r.x)[:, 0], r.goal[:, 0], torch.ones(len(r))
    ),
    is_exact=True,
)
by(
    "pairs_of_own_rows",
    "targets",
    lambda n, r: F.cross_entropy(n(r.x)[:, 0] @ n(r.x)[:, 1].T, torch.arange(len(r))),
)
by(
    "mean_over_pairs",
    "mean",
    lambda n, r: (n(r.x)[:, 0] @ n(r.x)[:, 1].T).square().mean(),
)
by(
    "relative_error",
    "divisor",
    lambda n, r: (n(r.x) - r.goal).square().sum() / r.goal.square().sum(),
    is_exact=True,
)
by(
    "relative_error_of_rows",
    "mean",
    lambda n, r: (
        (n(r.x) - r.goal).flatten(1).norm(dim=1) / r.goal.flatten(1).norm(dim=1)
    ).mean(),
    is_exact=True,
)
by("error_by_variance", "mean", lambda n, r: F.mse_loss(n(r.x), r.goal) / r.goal.var())
by(
    "dice",
    "unreadable",
    lambda n, r: (
        1 - 2 * masked(n(r.x).sigmoid(), r.shares) / (n(r.x).sigmoid() + r.shares).sum()
    ),
)

# Sums, and means over what is no row
by("sum_of_tokens", "sum", lambda n, r: each(n, r).sum())
by("sum_by_constant", "number", lambda n, r: each(n, r).sum() / 32)
by("sum_by_rows", "number", lambda n, r: each(n, r).sum() / len(r), is_exact=True)
by(
    "sum_by_rows_tensor",
    "divisor",
    lambda n, r: each(n, r).sum() / torch.tensor(float(len(r))),
    is_exact=True,
)
by("classes_after_rows", "mean", lambda n, r: n(r.x).mean(0).mean(), is_exact=True)
by("classes_after_sum", "mean", lambda n, r: n(r.x).sum(0).square().mean())
by(
    "regulariser_alone",
    "mean",
    lambda n, r: n.body.weight.square().mean(),
    is_exact=True,
)

# Several terms
by(
    "ce_plus_regulariser",
    "targets mean",
    lambda n, r: ce(n, r) + 0.01 * n.body.weight.square().mean(),
    is_exact=True,
)
by(
    "ce_plus_l2_sum",
    "targets unreadable number number number number number number",
    lambda n, r: (
        ce(n, r)
        + 0.01
        * sum(p.square().sum() if p.dim() else p.square() for p in n.parameters())
    ),
)
by(
    "ce_plus_mse",
    "targets mean",
    lambda n, r: ce(n, r) + 0.1 * F.mse_loss(n(r.x), r.goal),
    is_exact=True,
)
by(
    "ce_plus_other_head",
    "targets targets",
    lambda n, r: (
        ce(n, r)
        + 0.4
        * F.cross_entropy(n.other(n.hidden(r.x)).flatten(0, 1), r.labels.flatten())
    ),
    is_exact=True,
)
by(
    "ce_plus_z_loss",
    "targets divisor",
    lambda n, r: (
        ce(n, r) + 1e-2 * masked(n(r.x).logsumexp(-1).square(), r.mask) / r.mask.sum()
    ),
    is_exact=True,
)


@known("targets number")
def ce_plus_balance(n: Net, r: Rows) -> torch.Tensor:
    """A product of two means of the batch."""
    chosen = F.one_hot(n(r.x).argmax(-1), CLASSES).double().mean((0, 1))
    return ce(n, r) + 0.01 * CLASSES * (chosen * n(r.x).softmax(-1).mean((0, 1))).sum()


by(
    "words_plus_sentences",
    "targets targets",
    lambda n, r: ce(n, r) + F.cross_entropy(n(r.x)[:, 0, :2], r.y[:, 0] % 2),
    is_exact=True,
)
by(
    "two_masks",
    "targets targets",
    lambda n, r: (
        ce(n, r)
        + F.cross_entropy(flat(n, r.x), r.y.masked_fill(r.soft < 0.5, -100).flatten())
    ),
    is_exact=True,
)
by(
    "learned_weight",
    "targets unreadable",
    lambda n, r: ce(n, r) * (-n.scale).exp() + n.scale,
    is_exact=True,
)
by(
    "learned_weights_two",
    "targets mean",
    lambda n, r: (
        ce(n, r) * (-n.scale).exp() + F.mse_loss(n(r.x), r.goal) * n.scale.exp()
    ),
    is_exact=True,
)


@known("unreadable")
def focal_of_the_mean(n: Net, r: Rows) -> torch.Tensor:
    loss = ce(n, r)
    return (1 - (-loss).exp()) ** 2 * loss


@known("targets unreadable")
def ce_plus_its_square(n: Net, r: Rows) -> torch.Tensor:
    loss = ce(n, r)
    return loss + 0.5 * loss**2


@known("targets", is_exact=True)
def ce_twice(n: Net, r: Rows) -> torch.Tensor:
    loss = ce(n, r)
    return loss + 0.5 * loss


by("root_of_mse", "unreadable", lambda n, r: F.mse_loss(n(r.x), r.goal).sqrt())
by("exp_of_ce", "unreadable", lambda n, r: ce(n, r).exp())
by("accumulation", "targets", lambda n, r: ce(n, r) / 8, is_exact=True)
by("accumulation_as_rows", "targets", lambda n, r: ce(n, r) / 2, is_exact=True)
by(
    "grad_scaler",
    "targets",
    lambda n, r: ce(n, r) * torch.tensor(65536.0),
    is_exact=True,
)
by("times_mean_gain", "targets", lambda n, r: ce(n, r) * r.gain.mean())
by(
    "mask_over_its_mean",
    "mean",
    lambda n, r: (each(n, r) * r.mask).mean() / r.mask.double().mean(),
)

# Loops
by(
    "rows_loop_mean",
    "targets targets targets",
    lambda n, r: sum(row_losses(n, r)) / len(r),
)


def row_sums(n: Net, r: Rows) -> list[tuple[torch.Tensor, torch.Tensor]]:
    losses = [
        F.cross_entropy(n(x), y, reduction="none")
        for x, y in zip(r.x, r.y, strict=True)
    ]
    return [
        (masked(one, mask), mask.sum())
        for one, mask in zip(losses, r.mask, strict=True)
    ]


by(
    "rows_loop_sums",
    "number number number",
    lambda n, r: sum(s / c.item() for s, c in row_sums(n, r)) / len(r),
)
by(
    "rows_loop_sums_each_by_rows",
    "number number number",
    lambda n, r: sum(s / c.item() / len(r) for s, c in row_sums(n, r)),
)
by("rows_loop_bare_sum", "targets targets targets", lambda n, r: sum(row_losses(n, r)))  # type: ignore[arg-type,return-value]
by(
    "rows_loop_cat",
    "mean",
    lambda n, r: torch.cat([one.view(1) for one in row_losses(n, r)]).mean(),
    is_exact=True,
)
by(
    "rows_loop_stack_sum",
    "number",
    lambda n, r: (
        torch.stack(
            [
                F.cross_entropy(n(x)[m], y[m])
                for x, y, m in zip(r.x, r.y, r.mask, strict=True)
            ]
        ).sum()
        / len(r)
    ),
    is_exact=True,
)


@known("targets targets targets")
def chunks_loop_mean(n: Net, r: Rows) -> torch.Tensor:
    """A mean of the means of pieces: three rows make three."""
    size = max(1, len(r) // 2)
    parts = list(zip(r.x.split(size), r.labels.split(size), strict=True))
    return sum(F.cross_entropy(flat(n, x), y.flatten()) for x, y in parts) / len(parts)  # type: ignore[return-value]


by(
    "class_means_by_weights",
    "divisor",
    lambda n, r: (
        ((n(r.x) - r.goal).square().mean((0, 1)) * WEIGHTS).sum() / WEIGHTS.sum()
    ),
)
by(
    "targets_of_mean_probabilities",
    "targets",
    lambda n, r: F.nll_loss(
        n(r.x).log_softmax(-1).mean(0), torch.arange(TOKENS) % CLASSES
    ),
)


@known("targets", is_exact=True)
def padded_by_worker_ce(n: Net, r: Rows) -> torch.Tensor:
    longest = int(r.mask.sum(0).nonzero().max()) + 1
    return F.cross_entropy(flat(n, r.x[:, :longest]), r.labels[:, :longest].flatten())


@known("mean")
def padded_by_worker_mse(n: Net, r: Rows) -> torch.Tensor:
    longest = int(r.mask.sum(0).nonzero().max()) // len(r) + 1
    return F.mse_loss(
        (n(r.x) * r.mask[..., None])[:, :longest],
        (r.goal * r.mask[..., None])[:, :longest],
    )


by(
    "nodes_of_graphs",
    "mean",
    lambda n, r: F.mse_loss(n.body(r.x[r.mask]).sum(-1), r.soft[r.mask]),
)


@known("mean")
def nodes_put_together(n: Net, r: Rows) -> torch.Tensor:
    nodes = torch.cat([x[m] for x, m in zip(r.x, r.mask, strict=True)])
    return F.mse_loss(
        n(nodes), torch.cat([t[m] for t, m in zip(r.goal, r.mask, strict=True)])
    )


@known("targets number mean", is_exact=True)
def detection(n: Net, r: Rows) -> torch.Tensor:
    boxes = (
        F.smooth_l1_loss(n(r.x)[r.mask], r.goal[r.mask], reduction="sum")
        / r.mask.sum().item()
    )
    there = F.binary_cross_entropy_with_logits(n(r.x)[..., 0], r.soft)
    return sum({"classes": ce(n, r), "boxes": boxes, "there": there}.values())  # type: ignore[return-value]


by(
    "over_the_largest",
    "divisor",
    lambda n, r: (n(r.x) - r.goal).square().sum() / r.goal.abs().max(),
)
by(
    "corrected_by_own_tokens",
    "targets",
    lambda n, r: ce(n, r) * (r.labels != -100).sum(),
)
by(
    "corrected_by_own_tokens_number",
    "targets",
    lambda n, r: ce(n, r) * (r.labels != -100).sum().item() / 100,
)
by(
    "two_heads_halved",
    "targets targets",
    lambda n, r: (ce(n, r) + F.cross_entropy(n(r.x)[:, 0], r.labels[:, 0])) / 2,
    is_exact=True,
)
by(
    "mean_without_nan",
    "divisor",
    lambda n, r: each(n, r).mean(1).nanmean(),
    is_exact=True,
)


@known("sum")
def vector_of_terms(n: Net, r: Rows) -> torch.Tensor:
    terms = torch.zeros(2, dtype=torch.float64)
    terms[0], terms[1] = ce(n, r), F.mse_loss(n(r.x), r.goal)
    return terms.sum()


@known("mean mean", is_exact=True)
def gradient_penalty(n: Net, r: Rows) -> torch.Tensor:
    x = r.x.clone().requires_grad_()
    out = n(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, r.goal) + (slope.flatten(1).norm(dim=1) - 1).square().mean()


by("gathered_by_everybody", "targets", lambda n, r: ce(n, r.whole or r))
by(
    "rows_loop_stack",
    "mean",
    lambda n, r: torch.stack(row_losses(n, r)).mean(),
    is_exact=True,
)
by(
    "rows_loop_mean_of_masks",
    "divisor divisor divisor",
    lambda n, r: sum(s / c for s, c in row_sums(n, r)) / len(r),
)


@known("targets targets targets")
def rows_loop_running_mean(n: Net, r: Rows) -> torch.Tensor:
    total: Any = 0.0
    for one in row_losses(n, r):
        total += one * (1.0 / len(r))
    return total  # type: ignore[no-any-return]


by(
    "mean_of_one_step",
    "targets",
    lambda n, r: sum([F.cross_entropy(n(r.x)[:, 0], r.labels[:, 0])]) / 1,
    is_exact=True,
)  # type: ignore[arg-type,return-value]
by(
    "mean_of_steps_mse",
    "mean mean mean mean",
    lambda n, r: sum(F.mse_loss(n(r.x)[:, k], r.goal[:, k]) for k in range(4)) / 4,
    is_exact=True,
)
by(
    "mean_of_steps_ce",
    "targets targets targets targets",
    lambda n, r: sum(F.cross_entropy(n(r.x)[:, k], r.y[:, k]) for k in range(4)) / 4,
    is_exact=True,
)


# Around the loss
@known("targets", is_exact=True)
def under_autocast(n: Net, r: Rows) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        logits = n(r.x)
        return F.cross_entropy(logits.flatten(0, 1), r.labels.flatten())


@known("targets", is_exact=True)
def checkpointed(n: Net, r: Rows) -> torch.Tensor:
    hidden = checkpoint(n.hidden, r.x, use_reentrant=False)
    return F.cross_entropy(n.head(hidden).flatten(0, 1), r.labels.flatten())


by(
    "checkpointed_loss",
    "targets",
    lambda n, r: checkpoint(lambda x: ce(n, r), r.x, use_reentrant=False),
    is_exact=True,
)
by(
    "checkpointed_loss_reentrant",
    "unreadable",
    lambda n, r: checkpoint(
        lambda x: ce(n, r), r.x.clone().requires_grad_(), use_reentrant=True
    ),
)


class Fused(torch.autograd.Function):
    """A cross entropy that computes its gradient in forward, as fused ones do."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            loss = F.cross_entropy(logits, labels)
            (ctx.slope,) = torch.autograd.grad(loss, logits)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.slope * gradient, None


by("fused", "unreadable", lambda n, r: Fused.apply(flat(n, r.x), r.labels.flatten()))


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", dynamic=True)


by(
    "compiled_loss",
    "unreadable",
    lambda n, r: compiled(F.cross_entropy)(flat(n, r.x), r.labels.flatten()),
)
by(
    "compiled_model",
    "targets",
    lambda n, r: F.cross_entropy(
        compiled(_logits)(n, r.x).flatten(0, 1), r.labels.flatten()
    ),
    is_exact=True,
)


def _logits(n: Net, x: torch.Tensor) -> torch.Tensor:
    return n(x)
