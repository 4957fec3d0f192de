"""RunOptions: what they may say, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

import torchstrategy
from problems import shown
from runs import dealt, one_of
from topologies import central
from torchstrategy import ReduceOp, RunOptions, Strategy

# Options


@pytest.mark.parametrize(
    "junk", [{}, "options", 3, torchstrategy.RunOptions], ids=shown
)
def test_options_must_be_run_options(kind: Strategy, junk: Any) -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"^options is a torchstrategy\.RunOptions or None; got "
            rf"{re.escape(repr(junk))}\."
        ),
    ):
        kind.run(lambda: None, options=junk)


@pytest.mark.parametrize(
    "option",
    [
        {"experimental_enable_dynamic_batch_size": False},
        {"experimental_bucketizing_dynamic_shape": True},
        {"experimental_xla_options": object()},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_tpus_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(
        ValueError,
        match=(
            rf"^RunOptions\({name}=.*\) is an option of TPUs "
            r"and has no meaning here\."
        ),
    ):
        RunOptions(**option)


def test_options_that_say_what_holds_anyway_are_accepted(kind: Strategy) -> None:
    options = RunOptions(
        experimental_enable_dynamic_batch_size=True,
        experimental_bucketizing_dynamic_shape=False,
        experimental_xla_options=None,
        run_empty_replicas=False,
        gradient_reduction=None,
        examples=None,
    )
    assert options == RunOptions()
    assert one_of(kind, kind.run(lambda: 1, options=options)) == 1


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RunOptions().run_empty_replicas = True


@pytest.mark.parametrize("reduction", [ReduceOp.SUM, "sum", "Sum", "SUM"])
def test_the_gradient_reduction_may_be_named(kind: Strategy, reduction: Any) -> None:
    options = RunOptions(gradient_reduction=reduction)
    assert options.gradient_reduction is ReduceOp.SUM
    assert one_of(kind, kind.run(lambda: 1, options=options)) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda r: RunOptions(gradient_reduction=r),
        lambda r: central(2, gradient_reduction=r),
    ],
)
def test_an_unknown_gradient_reduction_is_refused(
    make: Callable[[Any], object],
) -> None:
    with pytest.raises(
        ValueError, match=r"^'max' is not one of the reductions 'SUM', 'MEAN'\."
    ):
        make("max")
    with pytest.raises(
        TypeError,
        match=r"^Expected reduce_op to be a torchstrategy\.ReduceOp or its name",
    ):
        make(3)


@pytest.mark.parametrize(
    "examples", [[3, 1], (3.0, 1.0), torch.tensor([3, 1]), [0, 2]], ids=shown
)
def test_examples_are_one_number_for_each_replica(examples: Any) -> None:
    two = central(2)
    assert one_of(two, two.run(lambda: 1, options=RunOptions(examples=examples))) == 1


def test_too_few_or_too_many_examples_are_refused(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync
    for count in (n - 1, n + 1):
        examples = tuple(range(1, count + 1))
        given = re.escape(f"RunOptions(examples={examples})")
        with pytest.raises(
            ValueError,
            match=rf"^{given} has {count} numbers?; the strategy has {n} replicas?\.",
        ):
            strategy.run(
                lambda: pytest.fail("it was run"), options=RunOptions(examples=examples)
            )


@pytest.mark.parametrize("bad", [-1, -0.5, float("nan"), float("inf")])
def test_an_example_count_is_a_number_of_examples(bad: float) -> None:
    with pytest.raises(
        ValueError, match=r"^RunOptions\(examples=.*\) counts examples: "
    ):
        RunOptions(examples=[2, bad])


@pytest.mark.parametrize(
    "junk", [3, "ab", "31", ["3", "1"], {3: 1}, [None, 1]], ids=shown
)
def test_examples_of_another_type_are_refused_by_name(junk: Any) -> None:
    with pytest.raises(
        TypeError,
        match=(
            rf"^RunOptions\(examples={re.escape(repr(junk))}\): "
            r"it is a list of numbers"
        ),
    ):
        RunOptions(examples=junk)


def test_examples_may_have_been_counted_by_torch() -> None:
    assert RunOptions(examples=torch.tensor([3.0, 1.0])).examples == (3.0, 1.0)


def test_arguments_dealt_with_different_rows_need_examples() -> None:
    strategy = central(2)
    batches = dealt(strategy, 4), dealt(strategy, 3)
    with pytest.raises(
        ValueError,
        match=r"^The arguments of this run were split with different numbers of rows, ",
    ):
        strategy.run(lambda a, b: None, args=batches)
    result = strategy.run(
        lambda a, b: (len(a), len(b)), args=batches, options=RunOptions(examples=[2, 1])
    )
    assert strategy.experimental_local_results(result) == ((2, 2), (2, 1))


def test_a_replica_with_rows_of_one_argument_only_is_not_left_out() -> None:
    # It was: who followed the message and said how many examples there are lost the
    # rows of that replica.
    strategy = central(2)
    batches = dealt(strategy, 2), dealt(strategy, 1)
    for said in (RunOptions(examples=[2, 1]), RunOptions(gradient_reduction="sum")):
        with pytest.raises(
            ValueError,
            match=(
                r"Replica 1 has rows of one and none of "
                r"another.*run_empty_replicas=True"
            ),
        ):
            strategy.run(lambda a, b: None, args=batches, options=said)
    options = RunOptions(examples=[2, 1], run_empty_replicas=True)
    result = strategy.run(lambda a, b: (len(a), len(b)), args=batches, options=options)
    assert strategy.experimental_local_results(result) == ((1, 1), (1, 0))


def test_a_sum_of_gradients_needs_no_shares() -> None:
    strategy = central(2)
    options = RunOptions(gradient_reduction="sum")
    result = strategy.run(
        lambda a, b: len(a) + len(b),
        args=(dealt(strategy, 4), dealt(strategy, 3)),
        options=options,
    )
    assert strategy.experimental_local_results(result) == (4, 3)


def test_arguments_dealt_with_the_same_rows_need_nothing() -> None:
    strategy = central(2)
    assert strategy.run(
        lambda a, b: int((a + b).sum()), args=(dealt(strategy, 3), dealt(strategy, 3))
    ).values == (2, 4)
