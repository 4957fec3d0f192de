"""`gradient_reduction="loss"` weighs by what a loss was divided by.

By default a run warns where rows are not that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchstrategy
from conditions import for_changes
from known_losses import KNOWN, Loss, Net, Rows, ce, each, masked, rows_of
from topologies import (
    SIMULATED,
    central,
    central_in_one_place,
    mirrored,
    mirrored_with_copies,
)
from torchstrategy import LossWeightWarning, RunOptions
from torchstrategy._run.run_losses import LOOKS
from torchstrategy.nn import compute_average_loss, scale_regularization_loss

Make = Callable[..., torchstrategy.Strategy]
KINDS: dict[str, Make] = {
    "central": central,
    "in one place": central_in_one_place,
    "mirrored": mirrored,
    "mirrored with copies": mirrored_with_copies,
}
# Two readings of these are possible from their graphs alone, and rows are kept.
UNDECIDED = {
    "ctc_sum_by_targets",
    "words_plus_sentences",
    "two_masks",
    "accumulation_as_rows",
    "two_heads_halved",
}
# tests/unit/run/test_loss_terms.py reads them.
SLOW = {"compiled_loss", "compiled_model"}
Gradients = dict[str, torch.Tensor]


def as_batch(rows: Rows) -> tuple[torch.Tensor, ...]:
    return (
        rows.x,
        rows.y,
        rows.mask,
        rows.labels,
        rows.soft,
        rows.shares,
        rows.goal,
        rows.gain,
        rows.before,
    )


def gradients_of(net: nn.Module) -> Gradients:
    return {
        name: p.grad.detach().cpu()
        for name, p in net.named_parameters()
        if p.grad is not None
    }


def plain(loss: Loss, rows: Rows) -> Gradients:
    net = Net()
    loss(net, rows).backward()
    return gradients_of(net)


def trained(
    strategy: torchstrategy.Strategy,
    loss: Loss,
    rows: Rows,
    options: RunOptions | None = None,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> tuple[Gradients, list[str]]:
    """The gradients of one step, and the warnings."""
    with strategy.scope():
        net = Net()

    def step(batch: Any) -> None:
        backward(loss(net, Rows(*batch)))

    (batch,) = strategy.experimental_distribute_dataset([as_batch(rows)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(step, args=(batch,), options=options)
    return gradients_of(net), [
        str(one.message) for one in caught if one.category is LossWeightWarning
    ]


def agree(one: Gradients, other: Gradients) -> bool:
    if one.keys() != other.keys():
        return False
    pairs = [(one[name], other[name]) for name in one]
    return all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in pairs)


BY_LOSS, BY_ROWS = (
    RunOptions(gradient_reduction="loss"),
    RunOptions(gradient_reduction="mean"),
)
on_cpu = pytest.mark.skipif(
    bool(SIMULATED), reason="these losses hold tensors of the CPU"
)


@for_changes
@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize("count", [5, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_known_losses_have_the_gradient_of_the_batch_or_are_warned_of(
    kind: str, count: int
) -> None:
    rows, wrong = rows_of(count), []
    for name, known in KNOWN.items():
        # Which needs the rows of others.
        if name in SLOW or name == "gathered_by_everybody":
            continue
        expected = plain(known.loss, rows)
        make = KINDS[kind]
        replicas = 2 if count == 5 else 3
        by_rows, silent = trained(make(replicas), known.loss, rows, BY_ROWS)
        by_loss, told = trained(make(replicas), known.loss, rows, BY_LOSS)
        by_default, warned = trained(make(replicas), known.loss, rows)
        is_right = agree(by_rows, expected)
        if silent or not agree(by_default, by_rows):
            wrong.append((name, "the default is not as mean", silent))
        if is_right and (warned or told or not agree(by_loss, by_rows)):
            wrong.append((name, "was right by rows", warned, told))
        if known.is_exact and name not in UNDECIDED:
            if not agree(by_loss, expected) or told:
                wrong.append((name, "is not exact by loss", told))
            # Those of that kind say that gradients are averaged. A checkpoint is not
            # run to look: see the test below.
            says_so = kind == "mirrored with copies"
            if not (is_right or warned or says_so or name == "checkpointed_loss"):
                wrong.append((name, "was not warned of"))
    assert not wrong


# Losses that run on any device


def on(like: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return one.to(like.device)


def smoothed(net: Net, rows: Rows) -> torch.Tensor:
    return ce(net, rows, label_smoothing=0.1)


def with_other_mean(net: Net, rows: Rows) -> torch.Tensor:
    return ce(net, rows) + 0.1 * F.mse_loss(net(rows.x), rows.goal)


def by_mask(net: Net, rows: Rows) -> torch.Tensor:
    return masked(each(net, rows), rows.mask) / rows.mask.sum()


def by_clamped_mask(net: Net, rows: Rows) -> torch.Tensor:
    return masked(each(net, rows), rows.mask) / rows.mask.sum().clamp(min=1)


def by_weights(net: Net, rows: Rows) -> torch.Tensor:
    return ce(
        net,
        rows,
        weight=torch.arange(1.0, 6, dtype=torch.float64, device=rows.x.device),
    )


LOSSES = [ce, smoothed, with_other_mean, by_mask, by_clamped_mask, by_weights]
both_kinds = pytest.mark.parametrize("kind", ["in one place", "mirrored"])


@both_kinds
@pytest.mark.parametrize("loss", LOSSES)
def test_a_replica_without_valid_tokens_counts_nothing(kind: str, loss: Loss) -> None:
    rows = rows_of(5)
    rows.labels[3:], rows.mask[3:] = -100, False
    actual, told = trained(KINDS[kind](2), loss, rows, BY_LOSS)
    assert not told
    torch.testing.assert_close(actual, plain(loss, rows), rtol=1e-11, atol=1e-13)


@both_kinds
@pytest.mark.parametrize("loss", LOSSES)
def test_by_loss_the_gradient_is_that_of_the_batch(kind: str, loss: Loss) -> None:
    rows = rows_of(7)
    actual, told = trained(KINDS[kind](3), loss, rows, BY_LOSS)
    assert not told
    torch.testing.assert_close(actual, plain(loss, rows), rtol=1e-11, atol=1e-13)


def test_a_strategy_that_is_made_with_loss_weighs_all_runs_by_it() -> None:
    for make in (central, mirrored):
        actual, _ = trained(_made(make, "loss"), smoothed, rows_of(5))
        torch.testing.assert_close(
            actual, plain(smoothed, rows_of(5)), rtol=1e-11, atol=1e-13
        )


def _made(make: Make, reduction: Any) -> torchstrategy.Strategy:
    if make is mirrored:
        return torchstrategy.MirroredStrategy(
            SIMULATED[:2] or ["cpu"] * 2, gradient_reduction=reduction
        )
    return make(2, gradient_reduction=reduction)


def test_what_a_run_says_of_gradients_counts_more_than_what_the_constructor_said() -> (
    None
):
    strategy = central(2, gradient_reduction="loss")
    by_rows, _ = trained(strategy, ce, rows_of(5), BY_ROWS)
    assert not agree(by_rows, plain(ce, rows_of(5)))


@both_kinds
@pytest.mark.parametrize("loss", [ce, smoothed])
def test_gradients_may_be_read_and_clipped_in_the_step(kind: str, loss: Loss) -> None:
    rows = rows_of(5)
    rows.labels[3:], rows.mask[3:] = -100, False
    strategy = KINDS[kind](2)
    with strategy.scope():
        net = Net()

    def step(batch: Any) -> None:
        loss(net, Rows(*batch)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)

    (batch,) = strategy.experimental_distribute_dataset([as_batch(rows)])
    strategy.run(step, args=(batch,), options=BY_LOSS)
    twin = Net()
    loss(twin, rows).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    torch.testing.assert_close(
        gradients_of(net), gradients_of(twin), rtol=1e-11, atol=1e-13
    )


@pytest.mark.parametrize("loss", [ce, smoothed, with_other_mean])
def test_hooks_of_the_loss_are_called(loss: Loss) -> None:
    called = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        called.append(1)
        return gradient * 2

    def hooked(net: Net, rows: Rows) -> torch.Tensor:
        found = loss(net, rows)
        found.register_hook(hook)
        return found

    actual, _ = trained(central(2), hooked, rows_of(5), BY_LOSS)
    assert len(called) == 2
    torch.testing.assert_close(
        actual, plain(hooked, rows_of(5)), rtol=1e-11, atol=1e-13
    )


@pytest.mark.parametrize("loss", [ce, smoothed, with_other_mean])
def test_a_graph_that_is_kept_is_used_twice(loss: Loss) -> None:
    def twice(found: torch.Tensor) -> None:
        found.backward(retain_graph=True)
        found.backward(torch.full_like(found, 3.0))

    actual, _ = trained(central(2), loss, rows_of(5), BY_LOSS, twice)
    expected = {name: 4 * one for name, one in plain(loss, rows_of(5)).items()}
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("loss", [ce, smoothed])
def test_accumulated_backwards_are_those_of_one_device_with_as_many(loss: Loss) -> None:
    def halves(rows: Rows) -> list[Rows]:
        return [
            Rows(*(one[:, part] for one in as_batch(rows)))
            for part in (slice(12), slice(12, 24))
        ]

    rows, strategy = rows_of(5), central(2)
    with strategy.scope():
        net = Net()

    def step(batch: Any) -> None:
        for half in halves(Rows(*batch)):
            loss(net, half).backward()

    (batch,) = strategy.experimental_distribute_dataset([as_batch(rows)])
    strategy.run(step, args=(batch,), options=BY_LOSS)
    twin = Net()
    for half in halves(rows):
        loss(twin, half).backward()
    torch.testing.assert_close(
        gradients_of(net), gradients_of(twin), rtol=1e-11, atol=1e-13
    )


@on_cpu
def test_a_training_with_a_scaler_and_autocast_is_that_of_plain_torch() -> None:
    strategy = central(2)
    with strategy.scope():
        net, scaler = Net().float(), torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train(net: nn.Module, scaler: Any, optimizer: Any, batch: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(batch[0])
        scaler.scale(
            F.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())
        ).backward()
        scaler.step(optimizer)
        scaler.update()

    rows = rows_of(5)
    given = (rows.x.float(), rows.labels)
    (batch,) = strategy.experimental_distribute_dataset([given])
    strategy.run(
        lambda batch: train(net, scaler, optimizer, batch),
        args=(batch,),
        options=BY_LOSS,
    )
    twin = Net().float()
    train(
        twin,
        torch.amp.GradScaler("cpu", init_scale=8.0),
        torch.optim.SGD(twin.parameters(), 0.1),
        given,
    )  # type: ignore[attr-defined]
    for own, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("options", [BY_LOSS, None], ids=["loss", "default"])
def test_compute_average_loss_is_neither_weighted_again_nor_warned_of(
    options: RunOptions | None,
) -> None:
    def averaged(net: Net, rows: Rows) -> torch.Tensor:
        loss = compute_average_loss(each(net, rows), rows.mask)
        return loss + scale_regularization_loss(net.head.weight.square().sum())

    def as_plain(net: Net, rows: Rows) -> torch.Tensor:
        return by_mask(net, rows) + net.head.weight.square().sum()

    actual, warned = trained(central(2), averaged, rows_of(5), options)
    assert not warned
    torch.testing.assert_close(
        actual, plain(as_plain, rows_of(5)), rtol=1e-9, atol=1e-11
    )


def test_a_replica_that_learns_nothing_runs_a_backward_of_zero() -> None:
    def loss(net: Net, rows: Rows) -> torch.Tensor:
        return ce(net, rows) if rows.mask[:, 1:].any() else net(rows.x).sum() * 0

    rows = rows_of(5)
    rows.mask[3:], rows.labels[3:] = False, -100
    actual, _ = trained(central(2), loss, rows, BY_LOSS)
    torch.testing.assert_close(actual, plain(ce, rows), rtol=1e-11, atol=1e-13)


# What is said


def test_the_warning_has_the_numbers_of_two_replicas() -> None:
    rows = rows_of(5)
    rows.labels[:], rows.mask[:] = rows.y, True
    rows.labels[:3, 1:] = -100
    _, (told,) = trained(central(2), ce, rows)
    assert told == (
        "The loss of `step` was divided by 3 in replica 0 and by 48 in replica 1 (it "
        "leaves out ignored targets, or weighs classes), but their gradients are "
        "weighted by rows, 3 and 2. The gradient of the whole batch needs "
        'RunOptions(gradient_reduction="loss"). If each row is meant to count the '
        'same, say gradient_reduction="mean", which hides this.'
    )


def test_a_step_is_warned_of_once_and_looked_at_a_few_times() -> None:
    strategy = central(2)
    with strategy.scope():
        net = Net()
    read = []

    def step(batch: Any) -> None:
        ce(net, Rows(*batch)).backward()

    even = rows_of(4)
    even.labels[:] = even.y
    batches = [as_batch(even)] * (LOOKS - 1) + [as_batch(rows_of(5))] * 3
    for batch in strategy.experimental_distribute_dataset(batches):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.run(step, args=(batch,))
        read.append(sum(one.category is LossWeightWarning for one in caught))
    assert read == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        BY_ROWS,
        RunOptions(gradient_reduction="sum"),
        RunOptions(examples=[1, 2]),
        RunOptions(examples=lambda batch: 1),
    ],
    ids=["mean", "sum", "numbers", "a function"],
)
def test_who_has_said_how_replicas_count_is_not_warned(options: RunOptions) -> None:
    assert not trained(central(2), ce, rows_of(5), options)[1]


def test_to_look_calls_no_hooks_for_saved_tensors() -> None:
    unpacked = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(1)
        return tensor

    def packed(net: Net, rows: Rows) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return ce(net, rows)

    counts = []
    for options in (BY_ROWS, None):
        unpacked.clear()
        assert not trained(central(2), packed, rows_of(5), options)[1]
        counts.append(len(unpacked))
    assert counts[0] == counts[1]


def test_an_explicit_mean_of_a_constructor_hides_the_warning() -> None:
    assert trained(central(2), ce, rows_of(5))[1]
    assert not trained(central(2, gradient_reduction="mean"), ce, rows_of(5))[1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_cannot_be_read_is_weighted_by_rows(replicas: int) -> None:
    def root(net: Net, rows: Rows) -> torch.Tensor:
        return ce(net, rows).sqrt()

    by_loss, told = trained(central(replicas), root, rows_of(5), BY_LOSS)
    by_rows, _ = trained(central(replicas), root, rows_of(5), BY_ROWS)
    torch.testing.assert_close(by_loss, by_rows, rtol=0, atol=0)
    assert len(told) == replicas - 1
    assert all(
        one.startswith("The loss of `step` cannot be read (`SqrtBackward0`), so")
        for one in told
    )


def test_unlike_numbers_of_backwards_are_refused() -> None:
    def loss(net: Net, rows: Rows) -> torch.Tensor:
        found = ce(net, rows)
        if len(rows) == 3:
            found.backward(retain_graph=True)
        return found

    with pytest.raises(
        RuntimeError, match=r"replica 0 is at backward, by gradient_reduction='loss'"
    ):
        trained(central(2), loss, rows_of(5), BY_LOSS)


def losses_of_closures(
    strategy: torchstrategy.Strategy, loss: Loss, rows: Rows
) -> tuple[list[float], Gradients]:
    """The losses of an optimizer that searches along a line, and where it ends."""
    with strategy.scope():
        net = Net()
        search = torch.optim.LBFGS(
            net.body.parameters(), max_iter=4, line_search_fn="strong_wolfe"
        )

    def step(batch: Any) -> None:
        def closure() -> torch.Tensor:
            search.zero_grad()
            value = loss(net, Rows(*batch))
            value.backward()
            return value

        search.step(closure)

    (batch,) = strategy.experimental_distribute_dataset([as_batch(rows)])
    strategy.run(step, args=(batch,), options=BY_LOSS)
    (state,) = search.state_dict()["state"].values()
    return [float(state["prev_loss"])], {
        name: p.detach().cpu() for name, p in net.body.named_parameters()
    }


@both_kinds
@pytest.mark.parametrize("loss", [ce, by_mask, by_weights])
def test_a_closure_has_the_loss_of_the_batch(kind: str, loss: Loss) -> None:
    rows = rows_of(7)
    values, expected = losses_of_closures(torchstrategy.get_strategy(), loss, rows)
    found, parameters = losses_of_closures(KINDS[kind](3), loss, rows)
    assert found == pytest.approx(values, rel=1e-9)
    torch.testing.assert_close(parameters, expected, rtol=1e-8, atol=1e-10)


@both_kinds
def test_a_closure_of_unlike_terms_is_refused(kind: str) -> None:
    with pytest.raises(
        RuntimeError, match="the terms of the loss were divided by unlike numbers"
    ):
        losses_of_closures(KINDS[kind](3), with_other_mean, rows_of(7))


def test_values_are_not_reduced_by_loss() -> None:
    with pytest.raises(
        ValueError, match=r"^'loss' is a reduction of gradients only: RunOptions"
    ):
        central(2).reduce("loss", torch.ones(()), axis=None)


@pytest.mark.parametrize(
    "make", [lambda: torchstrategy.OneDeviceStrategy("cpu"), torchstrategy.get_strategy]
)
def test_one_replica_has_the_gradient_of_plain_torch_bit_by_bit(
    make: Callable[[], torchstrategy.Strategy],
) -> None:
    actual, told = trained(make(), ce, rows_of(5), BY_LOSS)
    assert not told
    torch.testing.assert_close(actual, plain(ce, rows_of(5)), rtol=0, atol=0)


@pytest.mark.parametrize("options", [BY_LOSS, None], ids=["loss", "default"])
def test_numbers_that_are_no_whole_numbers_count_nothing(
    options: RunOptions | None,
) -> None:
    def loss(net: Net, rows: Rows) -> torch.Tensor:
        return each(net, rows).sum() * (0.3 * len(rows) + 0.1)

    actual, told = trained(central(2), loss, rows_of(5), options)
    by_rows, _ = trained(central(2), loss, rows_of(5), BY_ROWS)
    torch.testing.assert_close(actual, by_rows, rtol=0, atol=0)
    assert len(told) == (options is not None)
    assert all(
        "and are no whole numbers, so its gradients are weighted by rows" in one
        for one in told
    )


def test_terms_behind_hooks_of_a_module_keep_their_rows() -> None:
    class Losing(nn.Module):
        def forward(self, net: Net, rows: Rows, scale: torch.Tensor) -> torch.Tensor:
            return smoothed(net, rows) * scale

    def loss(net: Net, rows: Rows) -> torch.Tensor:
        module = Losing()
        module.register_full_backward_hook(lambda *given: called.append(1))
        return module(net, rows, net.scale.detach().clone().requires_grad_())

    called: list[int] = []
    actual, told = trained(central(2), loss, rows_of(5), BY_LOSS)
    assert len(called) == 2
    by_rows, _ = trained(central(2), loss, rows_of(5), BY_ROWS)
    if told:  # else both terms have one weight, and no hook is passed by
        torch.testing.assert_close(actual, by_rows, rtol=0, atol=0)


# Random programs that are right by rows


def in_each_row(net: Net, rows: Rows) -> torch.Tensor:
    losses = [
        F.cross_entropy(net(x), y) for x, y in zip(rows.x, rows.labels, strict=True)
    ]
    return torch.stack(losses).sum() / len(rows)


MEANS: list[Loss] = [
    lambda net, rows: F.mse_loss(net(rows.x), rows.goal),
    lambda net, rows: F.huber_loss(net(rows.x), rows.goal),
    lambda net, rows: F.cross_entropy(net(rows.x).flatten(0, 1), rows.y.flatten()),
    lambda net, rows: F.cross_entropy(
        net(rows.x).flatten(0, 1), rows.y.flatten(), label_smoothing=0.1
    ),
    lambda net, rows: F.cross_entropy(
        net(rows.x).flatten(0, 1), rows.shares.flatten(0, 1)
    ),
    lambda net, rows: F.kl_div(
        net(rows.x).log_softmax(-1), rows.shares, reduction="batchmean"
    ),
    lambda net, rows: each(net, rows).mean(),
    lambda net, rows: each(net, rows).mean(1).mean(),
    lambda net, rows: each(net, rows).sum() / each(net, rows).numel(),
    lambda net, rows: each(net, rows).sum() * (1 / rows.y.numel()),
    lambda net, rows: (
        each(net, rows).sum() / torch.tensor(float(len(rows)), device=rows.x.device)
    ),
    lambda net, rows: ((each(net, rows) * rows.mask).sum(1) / rows.mask.sum(1)).mean(),
    lambda net, rows: net.head.weight.square().mean(),
    in_each_row,
]
AROUND: list[Callable[[torch.Tensor, Net], torch.Tensor]] = [
    lambda loss, net: loss * 0.5,
    lambda loss, net: loss / 4,
    lambda loss, net: loss / 2,
    lambda loss, net: 3 - (-loss),
    lambda loss, net: loss * torch.tensor(8.0, device=loss.device),
    lambda loss, net: loss.view(1).squeeze(0).clone(),
    lambda loss, net: loss * net.scale.exp(),
    lambda loss, net: sum([loss]),  # type: ignore[arg-type,return-value]
    lambda loss, net: loss + 0.1 * net.body.weight.square().sum(),
    lambda loss, net: torch.stack([loss, loss.detach()]).sum(),
]
part = st.tuples(st.sampled_from(MEANS), st.lists(st.sampled_from(AROUND), max_size=3))


@for_changes
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(part, min_size=1, max_size=3),
    st.lists(st.sampled_from(AROUND), max_size=2),
    st.integers(2, 7),
)
def test_programs_that_are_right_by_rows_stay_as_they_are(
    parts: Any, around: Any, count: int
) -> None:
    def wrap(loss: torch.Tensor, net: Net, wrappings: Any) -> torch.Tensor:
        for wrapping in wrappings:
            loss = wrapping(loss, net)
        return loss

    def loss(net: Net, rows: Rows) -> torch.Tensor:
        terms = [wrap(mean(net, rows), net, wrappings) for mean, wrappings in parts]
        return wrap(
            torch.stack(terms).sum() if len(terms) > 2 else sum(terms), net, around
        )  # type: ignore[arg-type]

    rows = rows_of(count)
    by_rows, _ = trained(central(2), loss, rows, BY_ROWS)
    by_loss, told = trained(central(2), loss, rows, BY_LOSS)
    torch.testing.assert_close(by_loss, by_rows, rtol=1e-12, atol=1e-14)
    _, warned = trained(central(2), loss, rows)
    assert not warned
    assert not [one for one in told if "cannot be read" not in one]
