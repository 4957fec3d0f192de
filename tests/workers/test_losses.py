"""Weights by what a loss was divided by, and its warning, in several workers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from conditions import for_changes, for_releases, some_of
from known_losses import KNOWN, Rows, ce, each, masked
from workers import losses, sharding
from workers.cluster import cluster
from workers.exact_steps import differ
from workers.losses import Gradients

pytestmark = pytest.mark.slow

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
NAMES = [name for name in KNOWN if name not in SLOW]
LONG = [pytest.param(3, 1, marks=for_releases), pytest.param(2, 2, marks=for_releases)]
layouts = pytest.mark.parametrize(("workers", "replicas"), [(2, 1), *LONG])


def agree(one: Gradients, other: Gradients) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-11, atol=1e-13)
        for a, b in zip(one, other, strict=True)
    )


@for_changes
@layouts
def test_known_losses_have_the_gradient_of_the_batch(
    workers: int, replicas: int
) -> None:
    names, wrong = some_of(NAMES), []
    found = cluster(workers).run(losses.of_known, replicas, names)
    for name in names:
        wrong += _wrong_of(name, [of_worker[name] for of_worker in found], replicas)
    assert not wrong


def _wrong_of(name: str, of_workers: Sequence[Any], replicas: int) -> list[Any]:
    known, wrong = KNOWN[name], []
    expected = losses.plainly(known.loss, losses.known_batches())
    (first, *_) = of_workers
    for other in of_workers[1:]:
        for mine, theirs in zip(first, other, strict=True):
            if any(differ(a, b) for a, b in zip(mine[0], theirs[0], strict=True)):
                wrong.append((name, "the workers have other gradients"))
    (by_loss, told), (by_rows, silent), (by_default, warned) = first
    if silent:
        wrong.append((name, "warned although mean was said"))
    are_right = [
        agree(one, plain) for one, plain in zip(by_rows, expected, strict=True)
    ]
    for k, (plain, loss, rows, default) in enumerate(
        zip(expected, by_loss, by_rows, by_default, strict=True)
    ):
        if not agree(default, rows):
            wrong.append((name, k, "the default is not as mean"))
        if are_right[k] and not agree(loss, rows):
            wrong.append((name, k, "was right by rows"))
        if known.is_exact and name not in UNDECIDED and not agree(loss, plain):
            wrong.append((name, k, "is not exact by loss"))
    if all(are_right) and (warned or told):
        wrong.append((name, "was right by rows, and was warned of", warned, told))
    # A checkpoint is not run to look.
    knows = replicas == 1 and name not in UNDECIDED and name != "checkpointed_loss"
    if known.is_exact and knows and not all(are_right[:4]) and not warned:
        wrong.append((name, "was not warned of"))
    return wrong


@for_changes
@layouts
@pytest.mark.parametrize("size", [1, math.inf], ids=["sent early", "sent in the end"])
def test_random_losses_with_counts_have_the_gradient_of_plain_torch(
    workers: int, replicas: int, size: float
) -> None:
    seeds = some_of(range(60))
    found = cluster(workers).run(losses.of_random, replicas, seeds, size)
    wrong = []
    for position, seed in enumerate(seeds):
        expected = losses.plainly(*losses.random_loss(seed))
        for of_worker in found:
            pairs = zip(of_worker[position], expected, strict=True)
            wrong += [
                (seed, k)
                for k, (one, plain) in enumerate(pairs)
                if not agree(one, plain)
            ]
    assert not wrong


@functools.cache
def of_plain_torch(program: losses.Program) -> list[torch.Tensor]:
    return losses.trained(losses.plain_strategy(), program, None)


LOOSE = {"line_search": 1e-9}


@for_changes
@layouts
@pytest.mark.parametrize("size", [1, math.inf], ids=["sent early", "sent in the end"])
def test_trainings_compute_the_numbers_of_plain_torch(
    workers: int, replicas: int, size: float
) -> None:
    found = cluster(workers).run(losses.of_programs, replicas, losses.PROGRAMS, size)
    wrong = {}
    for program in losses.PROGRAMS:
        name, expected = program.__name__, of_plain_torch(program)
        most = max(differ(of_worker[name], expected) for of_worker in found)
        if not most < LOOSE.get(name, 1e-12):
            wrong[name] = most
        if any(differ(of_worker[name], found[0][name]) for of_worker in found[1:]):
            wrong[f"{name} in some workers"] = math.inf
    assert wrong == {}


@for_changes
@pytest.mark.parametrize(
    "train", [sharding.ordinary, sharding.several_backwards, sharding.sending_later]
)
def test_sharded_models_compute_the_numbers_of_one_device(train: Any) -> None:
    torch.manual_seed(0)
    model = sharding.Net()
    strategy = losses.plain_strategy()
    expected = losses.sharded_training(
        strategy, model, sharding.sgd(model), train, None
    )
    for found in cluster(2).run(losses.sharded, train, "loss"):
        assert differ(found, expected) < 1e-12


# What is sent


def by_mask(net: Any, rows: Rows) -> torch.Tensor:
    return masked(each(net, rows), rows.mask) / rows.mask.sum()


def smoothed(net: Any, rows: Rows) -> torch.Tensor:
    return ce(net, rows, label_smoothing=0.1)


def mean(net: Any, rows: Rows) -> torch.Tensor:
    return each(net, rows).mean()


@pytest.mark.parametrize(
    ("loss", "in_steps"),
    [(ce, 0), (by_mask, 0), (mean, 0), (smoothed, 1)],
    ids=["ce", "mask", "mean", "two terms"],
)
def test_after_the_first_run_one_term_needs_no_message_and_two_need_one(
    loss: Any, in_steps: int
) -> None:
    for first, *others in cluster(2).run(losses.messages, 1, loss, [8, 8, 12, 8]):
        # That of the model, two of the loss, and that of the first backward.
        assert first <= 5
        assert others == [in_steps] * 3


def test_one_term_of_uneven_rows_needs_one_message() -> None:
    for _, *others in cluster(2).run(losses.messages, 1, ce, [7, 7, 7]):
        assert others[-1] == 1


# What is said


def test_a_worker_is_warned_once_with_the_numbers_of_two() -> None:
    # In the first two runs all have as many tokens.
    for found in cluster(2).run(
        losses.warned_of, 1, [(3, 3), (4, 2, 5, 1), (5, 2, 1), (5, 1), (4, 1)]
    ):
        assert list(map(len, found)) == [0, 0, 1, 0, 0]
        assert found[2][0] == (
            "The loss of `step` was divided by 7 in replica 0 and by 1 in replica 1 "
            "(it leaves out ignored targets, or weighs classes), but their gradients "
            "are weighted by rows, 2 and 1. The gradient of the whole batch needs "
            'RunOptions(gradient_reduction="loss"). If each row is meant to count the '
            'same, say gradient_reduction="mean", which hides this.'
        )


def test_a_worker_is_warned_of_its_own_replicas_and_not_of_others() -> None:
    first, second = cluster(2).run(losses.warned_of, 2, [(3, 3, 5, 2)])
    assert first == [[]]
    assert "divided by 5 in replica 2 and by 2 in replica 3" in second[0][0]


@pytest.mark.parametrize("said", ["mean", "sum", "loss"])
def test_who_has_said_how_replicas_count_is_not_warned(said: str) -> None:
    for found in cluster(2).run(said_so, said):
        assert found == [[]]


def said_so(said: str) -> list[list[str]]:
    return losses.warned_of(1, [(5, 1)], gradient_reduction=said)


@pytest.mark.parametrize("replicas", [1, 2])
def test_terms_of_a_closure_are_refused_in_all_workers(replicas: int) -> None:
    for told in cluster(2).run(losses.of_terms_in_closures, replicas):
        assert "the terms of the loss were divided by unlike numbers" in told
