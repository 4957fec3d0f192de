"""`examples=` may be a function that counts what a replica's loss is a mean over."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from problems import (
    assert_close,
    built,
    context,
    deal,
    gradients,
    replica_id,
    sgd,
    shown,
    where_it_is,
)
from runs import per_replica
from topologies import SIMULATED, central, compute_devices
from torchstrategy import RunOptions, Strategy
from torchstrategy.nn import compute_average_loss, scale_regularization_loss
from torchstrategy.testing import assert_same_as_plain

TOKENS, CLASSES = 5, 4
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
# Inputs of [rows, tokens, 3] and labels of [rows, tokens], where -100 is no token.
Batch = Any


def of_rows(*valid: int, seed: int = 0) -> list[torch.Tensor]:
    """A batch whose rows have so many valid tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(valid), TOKENS, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (len(valid), TOKENS), generator=generator)
    labels[torch.arange(TOKENS) >= torch.tensor(valid)[:, None]] = -100
    return [x, labels]


UNEVEN = of_rows(5, 1, 2, 4, 1, 3, 2)
# The last of two replicas has rows without tokens; of three or four, the last has no
# others.
WITHOUT_TOKENS = of_rows(3, 5, 1, 2, 4, 0, 0)
FEW = of_rows(4, 1)
BATCHES = {
    "uneven": UNEVEN,
    "without tokens": WITHOUT_TOKENS,
    "few rows": FEW,
    "one row": of_rows(2),
}


def tagger() -> nn.Module:
    return nn.Linear(3, CLASSES, dtype=torch.float64)


def mean_over_tokens(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100
    )


def masked_mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same, written by hand: without tokens it is 0 / 0, with a gradient of NaN."""
    losses = F.cross_entropy(
        model(batch[0]).transpose(1, 2), batch[1], reduction="none"
    )
    mask = batch[1] != -100
    return (losses * mask).sum() / mask.sum()


def mean_over_weights(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits, labels = model(batch[0]).flatten(0, 1), batch[1].flatten()
    return F.cross_entropy(logits, labels, weight=WEIGHTS.to(logits.device))


def tokens(batch: Batch) -> torch.Tensor:
    return (batch[1] != -100).sum()


def class_weights(batch: Batch) -> torch.Tensor:
    labels = batch[1]
    return WEIGHTS.to(labels.device)[labels[labels != -100]].sum().view(1, 1)


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., Any]]] = {
    "cross_entropy": (mean_over_tokens, tokens),
    "by hand": (masked_mean, tokens),
    "read already": (masked_mean, lambda batch: int(tokens(batch))),
    "class weights": (mean_over_weights, class_weights),
}


def check(
    strategy: Strategy,
    loss: Any,
    batch: Batch,
    options: RunOptions | None,
    plain: Any = None,
) -> None:
    (model, _), (twin, _) = built(strategy, tagger, None)
    strategy.run(
        lambda b: loss(model, b).backward(),
        args=(deal(strategy, batch),),
        options=options,
    )
    (plain or loss)(twin, where_it_is(twin, batch)).backward()
    assert_close(gradients(model), gradients(twin), "gradient", 1e-12, 1e-15)


# The gradient of the batch


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_the_batch_under_every_strategy(
    strategy: Strategy, loss: str, name: str
) -> None:
    computed, counted = LOSSES[loss]
    check(strategy, computed, BATCHES[name], RunOptions(examples=counted))


def test_the_gradient_by_rows_is_not_that_of_the_batch() -> None:
    with pytest.raises(AssertionError, match="is off by"):
        check(
            central(2), mean_over_tokens, UNEVEN, RunOptions(gradient_reduction="mean")
        )


def one_place() -> Any:
    return SIMULATED[1] if SIMULATED else "cpu"


CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "OneDevice": functools.partial(torchstrategy.OneDeviceStrategy, one_place()),
    "Central": functools.partial(
        torchstrategy.CentralStorageStrategy, compute_devices(3)
    ),
    "Mirrored": functools.partial(torchstrategy.MirroredStrategy, compute_devices(3)),
    "MultiWorkerMirrored": functools.partial(
        torchstrategy.MultiWorkerMirroredStrategy, devices=compute_devices(2)
    ),
    "v1": functools.partial(
        torchstrategy.compat.v1.MirroredStrategy, compute_devices(2)
    ),
}


@pytest.mark.parametrize("name", ["uneven", "without tokens"])
@pytest.mark.parametrize("kind", CONSTRUCTORS)
def test_a_strategy_may_be_made_with_the_function(kind: str, name: str) -> None:
    strategy, batch = CONSTRUCTORS[kind](examples=tokens), BATCHES[name]
    (model, _), (twin, _) = built(strategy, tagger, None)

    def step(rows: Batch) -> None:
        masked_mean(model, rows).backward()

    if kind == "v1":
        strategy.experimental_run(step, strategy.make_dataset_iterator([batch]))
    else:
        strategy.run(step, args=(deal(strategy, batch),))
    masked_mean(twin, where_it_is(twin, batch)).backward()
    assert_close(gradients(model), gradients(twin), "gradient", 1e-12, 1e-15)


@pytest.mark.parametrize("kind", [kind for kind in CONSTRUCTORS if kind != "v1"])
@pytest.mark.parametrize("junk", [[3, 1], "tokens", 3], ids=shown)
def test_a_strategy_is_made_with_a_function_or_nothing(kind: str, junk: Any) -> None:
    with pytest.raises(
        TypeError,
        match=rf"^examples={re.escape(repr(junk))}: a strategy takes a function",
    ):
        CONSTRUCTORS[kind](examples=junk)


def test_what_a_run_says_counts_more_than_what_the_strategy_was_made_with() -> None:
    def refuse(batch: Batch) -> int:
        pytest.fail("it was asked")

    strategy = central(2, examples=refuse)
    check(strategy, mean_over_tokens, UNEVEN, RunOptions(examples=tokens))
    counts = [
        int(tokens(rows)) for rows in ([t[:4] for t in UNEVEN], [t[4:] for t in UNEVEN])
    ]
    check(strategy, mean_over_tokens, UNEVEN, RunOptions(examples=counts))
    other = central(2, examples=tokens)
    check(
        other,
        lambda model, b: model(b[0]).square().mean(),
        UNEVEN,
        RunOptions(examples=lambda b: len(b[0])),
    )


def test_accumulated_runs_are_accumulated_batches(several: Strategy) -> None:
    (model, _), (twin, _) = built(several, tagger, None)
    for k, batch in enumerate((UNEVEN, WITHOUT_TOKENS, FEW, UNEVEN)):
        options = RunOptions(examples=tokens)
        several.run(
            lambda b: (masked_mean(model, b) / 4).backward(),
            (deal(several, batch),),
            options=options,
        )
        (masked_mean(twin, where_it_is(twin, batch)) / 4).backward()
        assert_close(
            gradients(model), gradients(twin), f"after {k + 1} runs", 1e-12, 1e-15
        )


def test_a_training_is_that_of_plain_pytorch(several: Strategy) -> None:
    def step(model: Any, optimizer: Any, batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_over_tokens(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = [UNEVEN, WITHOUT_TOKENS, FEW]
    options = RunOptions(examples=tokens)
    assert_same_as_plain(step, tagger, sgd, batches, several, options=options)


def test_gradients_that_are_added_up_need_no_counts_but_a_0_drops_one() -> None:
    counted: list[int] = []

    def count(batch: Batch) -> torch.Tensor:
        counted.append(len(batch[0]))
        return tokens(batch)

    total = int(tokens(WITHOUT_TOKENS))

    def part(model: Any, batch: Batch) -> torch.Tensor:
        logits, labels = model(batch[0]).flatten(0, 1), batch[1].flatten()
        return F.cross_entropy(
            logits, labels, reduction="sum"
        ) / total + 0 * masked_mean(model, batch)

    check(
        central(4),
        part,
        WITHOUT_TOKENS,
        RunOptions(examples=count, gradient_reduction="sum"),
    )
    assert sorted(counted) == [1, 2, 2, 2]


# With other numbers of the package


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", BATCHES)
def test_compute_average_loss_is_exact_as_before(
    several: Strategy, name: str, reduction: str
) -> None:
    """It divides by what the gradient will be multiplied by.

    It does whoever says how much that is.
    """

    def average(model: Any, batch: Batch) -> torch.Tensor:
        losses = F.cross_entropy(
            model(batch[0]).transpose(1, 2), batch[1], reduction="none"
        )
        loss = compute_average_loss(losses, batch[1] != -100)
        return loss + scale_regularization_loss(0.1 * model.weight.square().sum())

    def plain(model: Any, batch: Batch) -> torch.Tensor:
        return masked_mean(model, batch) + 0.1 * model.weight.square().sum()

    check(
        several,
        average,
        BATCHES[name],
        RunOptions(examples=tokens, gradient_reduction=reduction),
        plain,
    )


def test_a_replica_that_counts_0_has_no_part_in_compute_average_loss() -> None:
    def average(model: Any, batch: Batch) -> torch.Tensor:
        losses = F.cross_entropy(
            model(batch[0]).transpose(1, 2), batch[1], reduction="none"
        )
        return compute_average_loss(losses, batch[1] != -100)

    first = [t[:4] for t in UNEVEN]
    options = RunOptions(examples=lambda batch: len(batch[0]) == 4)
    check(
        central(2),
        average,
        UNEVEN,
        options,
        lambda model, batch: masked_mean(model, where_it_is(model, first)),
    )


def test_running_statistics_are_means_over_rows_all_the_same(several: Strategy) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(
            nn.BatchNorm1d(3, dtype=torch.float64),
            nn.Linear(3, CLASSES, dtype=torch.float64),
        )

    (model, _), (twin, _) = built(several, normed, None)

    def step(model: Any, batch: Batch) -> None:
        model[0](batch[0][:, 0])
        mean_over_tokens(model[1], batch).backward()

    # Of each replica two at least, or a layer could not normalise them.
    rows = of_rows(5, 1, 1, 2, 1, 1, 1, 2)
    several.run(
        lambda b: step(model, b),
        args=(deal(several, rows),),
        options=RunOptions(examples=tokens),
    )
    step(twin, where_it_is(twin, rows))
    means = [one[0].running_mean.cpu() for one in (model, twin)]
    torch.testing.assert_close(*means, rtol=1e-12, atol=0)
    assert_close(gradients(model[1]), gradients(twin[1]), "gradient", 1e-12, 1e-15)


def test_if_all_replicas_count_0_a_mean_over_rows_is_right(several: Strategy) -> None:
    def both(model: Any, batch: Batch) -> torch.Tensor:
        logits, labels = model(batch[0]).flatten(0, 1), batch[1].flatten()
        # As cross_entropy of no tokens: its gradient is 0, and not NaN.
        summed = F.cross_entropy(logits, labels, reduction="sum") / tokens(batch).clamp(
            min=1
        )
        return summed + model(batch[0]).square().mean()

    check(several, both, of_rows(0, 0, 0, 0, 0, 0, 0), RunOptions(examples=tokens))


# Who is asked, and with what


def test_a_replica_is_asked_with_what_its_step_gets_before_any_step_begins(
    strategy: Strategy,
) -> None:
    log: list[tuple[str, int, int, Any]] = []

    def note(what: str) -> Callable[..., int]:
        def noted(batch: Batch, scale: float, *, more: dict[str, torch.Tensor]) -> int:
            log.append((what, replica_id(), len(more["x"]), batch[0].device))
            assert len(batch[0]) == len(more["x"]) and scale == 0.5
            assert context().num_replicas_in_sync == strategy.num_replicas_in_sync
            return len(batch[0])

        return noted

    batch = deal(strategy, UNEVEN)
    strategy.run(
        note("step"),
        (batch, 0.5),
        {"more": {"x": batch[0]}},
        RunOptions(examples=note("examples")),
    )
    asked, called = (
        [entry[1:] for entry in log if entry[0] == what]
        for what in ("examples", "step")
    )
    assert [entry[0] for entry in log] == ["examples"] * len(asked) + ["step"] * len(
        called
    )
    assert asked == sorted(called)


@pytest.mark.parametrize("runs_empty", [False, True])
def test_a_replica_without_rows_is_not_asked(runs_empty: bool) -> None:
    asked: list[int] = []

    def count(batch: Batch) -> int:
        asked.append(len(batch[0]))
        return len(batch[0])

    strategy = central(4)
    options = RunOptions(examples=count, run_empty_replicas=runs_empty)
    result = strategy.run(
        lambda b: len(b[0]), args=(deal(strategy, FEW),), options=options
    )
    assert asked == [1, 1]
    assert list(result.values) == [1, 1, 0, 0][: 4 if runs_empty else 2]


def test_without_a_distributed_dataset_all_replicas_are_asked() -> None:
    strategy = central(3)
    pieces = [
        [t[:1] for t in UNEVEN],
        [t[1:5] for t in UNEVEN],
        [t[5:] for t in UNEVEN],
    ]
    (model, _), (twin, _) = built(strategy, tagger, None)

    def step(batch: Batch) -> None:
        mean_over_tokens(model, where_it_is(model, batch)).backward()

    batch = per_replica(strategy, pieces)
    strategy.run(step, args=(batch,), options=RunOptions(examples=tokens))
    mean_over_tokens(twin, UNEVEN).backward()
    assert_close(gradients(model), gradients(twin), "gradient", 1e-12, 1e-15)


def test_a_step_without_arguments_is_asked_without_any(strategy: Strategy) -> None:
    asked: list[int] = []
    strategy.run(
        lambda: None,
        options=RunOptions(examples=lambda: asked.append(replica_id()) or 1),
    )
    assert asked == list(range(strategy.num_replicas_in_sync))


def test_autograd_does_not_record_the_function_that_counts(strategy: Strategy) -> None:
    recorded: list[bool] = []
    weight = torch.ones(3, requires_grad=True)

    def count() -> torch.Tensor:
        recorded.append(torch.is_grad_enabled())
        return weight.sum()

    strategy.run(lambda: None, options=RunOptions(examples=count))
    assert recorded == [False] * strategy.num_replicas_in_sync


@pytest.mark.parametrize(
    "number",
    [2, 2.5, True, torch.tensor(2), torch.tensor([[2.5]]), torch.tensor(True)],
    ids=shown,
)
def test_what_counts_is_a_number_or_a_tensor_with_one_element(
    kind: Strategy, number: Any
) -> None:
    kind.run(lambda: None, options=RunOptions(examples=lambda: number))
    numpy = (
        number.numpy()
        if isinstance(number, torch.Tensor) and not number.dim()
        else None
    )
    if numpy is not None:
        kind.run(lambda: None, options=RunOptions(examples=lambda: numpy[()]))


# What is refused

NO_NUMBER = [
    None, "3", [3], 1j, torch.ones(2), torch.empty(0), torch.tensor(1j),
    torch.ones((), device="meta"), object(),
]  # fmt: skip


@pytest.mark.parametrize("junk", NO_NUMBER, ids=shown)
def test_anything_but_one_number_is_refused_by_name(kind: Strategy, junk: Any) -> None:
    def count_words() -> Any:
        return junk if replica_id() == kind.num_replicas_in_sync - 1 else 1

    name = (
        r"^examples=.*count_words of replica {} returned .*: it returns how much the "
        r"replica counts, one number"
    )
    with pytest.raises(TypeError, match=name.format(kind.num_replicas_in_sync - 1)):
        kind.run(
            lambda: pytest.fail("it was run"), options=RunOptions(examples=count_words)
        )


BAD = [
    -1,
    -0.5,
    float("nan"),
    float("inf"),
    10**400,
    torch.tensor(float("nan")),
    torch.tensor([-2]),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: shown(bad)[:20])
def test_a_number_that_counts_nothing_is_refused_by_name(
    strategy: Strategy, bad: Any
) -> None:
    last = strategy.num_replicas_in_sync - 1
    (model, _), _ = built(strategy, tagger, None)

    def count(batch: Batch) -> Any:
        return bad if replica_id() == last else 1

    def step(batch: Batch) -> None:
        pytest.fail("it was run")

    number = re.escape(str(bad.item() if isinstance(bad, torch.Tensor) else bad))
    with pytest.raises(
        ValueError,
        match=rf"^examples=.*\.count of replica {last} returned {number}\. A replica",
    ):
        strategy.run(
            step, args=(deal(strategy, UNEVEN),), options=RunOptions(examples=count)
        )
    assert all(parameter.grad is None for parameter in model.parameters())
    assert strategy.run(lambda: None) is None


def test_an_error_of_the_function_says_whose_it_is(strategy: Strategy) -> None:
    def count(batch: Batch) -> Any:
        return batch["labels"]

    with pytest.raises(TypeError) as caught:
        strategy.run(
            lambda b: pytest.fail("it was run"),
            (deal(strategy, UNEVEN),),
            options=RunOptions(examples=count),
        )
    (note,) = caught.value.__notes__
    assert re.fullmatch(
        r"raised by examples=.*\.count of replica 0, which gets the arguments of the "
        r"step",
        note,
    )


def test_replicas_cannot_synchronize_while_they_are_asked(several: Strategy) -> None:
    def count() -> Any:
        return context().all_reduce("sum", torch.ones(()))

    with pytest.raises(
        RuntimeError,
        match=(
            r"all_reduce .* is asked how much it counts: "
            r"examples= tells its own number"
        ),
    ):
        several.run(lambda: None, options=RunOptions(examples=count))


def test_unlike_rows_of_a_replica_that_counts_0_are_refused_as_with_numbers() -> None:
    strategy = central(2)
    batches = deal(strategy, torch.arange(4)), deal(strategy, torch.arange(3))
    options = RunOptions(examples=lambda a, b: len(b) - 1)
    with pytest.raises(
        ValueError,
        match=r"RunOptions\(examples=\(1\.0, 0\.0\)\) drops the gradient of replica 1",
    ):
        strategy.run(lambda a, b: None, args=batches, options=options)
    strategy.run(
        lambda a, b: None,
        args=batches,
        options=RunOptions(examples=lambda a, b: len(b)),
    )
