"""The step on several replicas is the step on one device: gradients, and everything that people do with them."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from problems import (
    ELSEWHERE,
    assert_close,
    built,
    close,
    compare,
    data,
    deal,
    gradients,
    mlp,
    mse,
    parameters,
    replica_id,
    sgd,
    where_it_is,
)
from topologies import central, central_with_copies
from torchstrategy import ReduceOp, RunOptions

REPLICAS = range(1, 6)
ROWS = range(1, 18)
# Of them, where the rows are dealt to replicas already: fewer rows than replicas, as many, and more, evenly or not.
SOME_ROWS = (1, 2, 4, 5, 7, 17)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
}


# ---- the gradient of the whole batch


def _backward(model: Any, batch: Any) -> None:
    mse(model, batch).backward()


def _scaled(model: Any, batch: Any) -> torch.Tensor:
    """A loss whose gradient, where there are no rows, is NaN and not zero."""
    return mse(model, batch) * model[0].weight.exp().mean()


def _has_empty(rows: int, n: int) -> bool:
    return -(-rows // n) * (n - 1) >= rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_gradient_is_that_of_the_whole_batch_for_every_size_and_number_of_replicas(make, dtype):
    for n in REPLICAS:
        strategy = make(n)
        (model, _), (twin, _) = built(strategy, lambda: mlp(dtype), None)
        for rows in ROWS if dtype == torch.float64 else SOME_ROWS:
            model.zero_grad()
            twin.zero_grad()
            for micro in range(2):
                batch = data(rows, dtype, seed=micro)
                strategy.run(_backward, args=(model, deal(strategy, batch)))
                _backward(twin, batch)
                assert_close(gradients(model), gradients(twin), f"{n} replicas, {rows} rows, micro-batch {micro}")


def test_a_replica_that_runs_without_rows_has_its_gradient_dropped_though_it_is_nan(make):
    options = RunOptions(run_empty_replicas=True)
    for n in REPLICAS:
        strategy = make(n)
        (model, _), (twin, _) = built(strategy, mlp, None)
        for rows in (rows for rows in ROWS if n > 1 and _has_empty(rows, n)):
            model.zero_grad()
            twin.zero_grad()
            batch = data(rows)
            for micro in range(2):
                strategy.run(
                    lambda m, b: _scaled(m, b).backward(), args=(model, deal(strategy, batch)), options=options
                )
                _scaled(twin, batch).backward()
                assert_close(gradients(model), gradients(twin), f"{n} replicas, {rows} rows, micro-batch {micro}")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_that_of_the_whole_batch_for_every_size_and_number_of_replicas(make, name, where):
    def accumulate(model: Any, micro_batches: Any) -> None:
        for batch in micro_batches:
            (mse(model, batch) / 2).backward()

    def whole_step(model: Any, optimizer: Any, micro_batches: Any) -> None:
        optimizer.zero_grad()
        accumulate(model, micro_batches)
        optimizer.step()

    for n in REPLICAS:
        strategy = make(n)
        (model, optimizer), (twin, plain) = built(strategy, mlp, OPTIMIZERS[name])
        for rows in SOME_ROWS:
            micro_batches = [data(rows, seed=k) for k in range(2)]
            case = f"{n} replicas, {rows} rows"
            whole_step(twin, plain, micro_batches)
            if where == "inside":
                strategy.run(whole_step, args=(model, optimizer, deal(strategy, micro_batches)))
            else:
                optimizer.zero_grad()
                for batch in micro_batches:
                    strategy.run(accumulate, args=(model, [deal(strategy, batch)]))
                optimizer.step()
            assert_close(gradients(model), gradients(twin), f"{case}, gradient", 1e-9)
            assert_close(parameters(model), parameters(twin), f"{case}, parameter", 1e-9)
            twin.load_state_dict(model.state_dict())  # so that no rounding of one case goes on into the next


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_replicas_that_run_without_rows_is_that_of_the_whole_batch(make, name):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        _scaled(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for n, rows in [(3, 1), (3, 2), (5, 2), (5, 4), (4, 5)]:
        options = RunOptions(run_empty_replicas=True)
        compare(make, n, step, optimizer=OPTIMIZERS[name], rows=rows, options=options, case=f"{rows} rows")


def test_a_sum_of_losses_that_were_divided_by_the_global_batch_is_the_gradient_of_the_whole_batch(make):
    for how in (RunOptions(gradient_reduction=ReduceOp.SUM), RunOptions(gradient_reduction="sum")):
        for n, rows in [(1, 4), (2, 7), (3, 7), (3, 2), (5, 17)]:

            def step(model: Any, optimizer: Any, batch: Any, rows: int = rows) -> None:
                optimizer.zero_grad()
                for _ in range(2):
                    (F.mse_loss(model(batch[0]), batch[1], reduction="sum") / rows).backward()
                optimizer.step()

            compare(make, n, step, rows=rows, options=how, case=f"{rows} rows")


def test_the_reduction_that_a_strategy_was_made_with_holds_where_a_run_does_not_say():
    batch = data(7)
    for default in (ReduceOp.SUM, "sum", ReduceOp.MEAN, "mean"):
        strategy = central(3, gradient_reduction=default)
        (model, _), (twin, _) = built(strategy, mlp, None)
        reduction = "sum" if ReduceOp.of(default) is ReduceOp.SUM else "mean"
        F.mse_loss(twin(batch[0]), batch[1], reduction=reduction).backward()

        def step(b: Any, model: Any = model, reduction: str = reduction) -> None:
            F.mse_loss(model(b[0]), b[1], reduction=reduction).backward()

        strategy.run(step, args=(deal(strategy, batch),))
        assert_close(gradients(model), gradients(twin), f"made with {default}")

        model.zero_grad()
        twin.zero_grad()
        other, word = (ReduceOp.MEAN, "mean") if reduction == "sum" else (ReduceOp.SUM, "sum")
        F.mse_loss(twin(batch[0]), batch[1], reduction=word).backward()
        options = RunOptions(gradient_reduction=other)
        strategy.run(functools.partial(step, reduction=word), args=(deal(strategy, batch),), options=options)
        assert_close(gradients(model), gradients(twin), f"made with {default}, run with {other}")


def test_examples_say_what_each_replica_weighs(make):
    x, y = data(6)
    pieces = [slice(0, 1), slice(1, 4), slice(4, 6)]
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    mse(twin, (x, y)).backward()

    def step() -> None:
        piece, device = pieces[replica_id()], model[0].weight.device
        mse(model, (x[piece].to(device), y[piece].to(device))).backward()

    strategy.run(step, options=RunOptions(examples=[1, 3, 2]))
    assert_close(gradients(model), gradients(twin), "examples=[1, 3, 2]")

    model.zero_grad()
    twin.zero_grad()
    (sum(mse(twin, (x[piece], y[piece])) for piece in pieces) / 3).backward()
    strategy.run(step)
    assert_close(gradients(model), gradients(twin), "nobody dealt: equal weights")

    model.zero_grad()
    twin.zero_grad()
    (0.75 * mse(twin, (x[pieces[0]], y[pieces[0]])) + 0.25 * mse(twin, (x[pieces[2]], y[pieces[2]]))).backward()
    strategy.run(step, options=RunOptions(examples=[1.5, 0, 0.5]))
    assert_close(gradients(model), gradients(twin), "an example count of zero drops a gradient")


def test_examples_win_over_the_record_of_the_distributor(make):
    strategy = make(2)
    x, y = data(5)  # dealt 3 and 2
    (model, _), (twin, _) = built(strategy, mlp, None)
    (0.1 * mse(twin, (x[:3], y[:3])) + 0.9 * mse(twin, (x[3:], y[3:]))).backward()
    dealt = deal(strategy, (x, y))
    strategy.run(lambda b: mse(model, b).backward(), args=(dealt,), options=RunOptions(examples=[1, 9]))
    assert_close(gradients(model), gradients(twin), "examples=[1, 9]")


def test_records_that_disagree_are_refused(make):
    strategy = make(2)
    (model, _), _ = built(strategy, mlp, None)
    five, four = deal(strategy, data(5)), deal(strategy, data(4))

    def step(a: Any, b: Any) -> None:
        (mse(model, a) + mse(model, b)).backward()

    with pytest.raises(ValueError, match=r"split with different numbers of rows, \(2, 2\) and \(3, 2\) by replica"):
        strategy.run(step, args=(five, four))
    assert all(p.grad is None for p in model.parameters())


def test_records_that_disagree_are_no_matter_where_examples_are_given(make):
    # It is what the message advises.
    strategy = make(2)
    (model, _), (twin, _) = built(strategy, mlp, None)
    five, four = data(5), data(4)  # dealt 3 and 2, and 2 and 2

    def step(a: Any, b: Any) -> None:
        (mse(model, a) + mse(model, b)).backward()

    strategy.run(step, args=(deal(strategy, five), deal(strategy, four)), options=RunOptions(examples=[5, 4]))
    for share, rows_of_five, rows_of_four in ((5 / 9, slice(0, 3), slice(0, 2)), (4 / 9, slice(3, 5), slice(2, 4))):
        of_five, of_four = [t[rows_of_five] for t in five], [t[rows_of_four] for t in four]
        (share * (mse(twin, of_five) + mse(twin, of_four))).backward()
    assert_close(gradients(model), gradients(twin), "examples=[5, 4]")


def test_a_gradient_adds_to_what_a_backward_outside_of_replicas_left(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    for m in (model, twin):
        mse(m, where_it_is(m, data(2))).backward()
    strategy.run(lambda b: mse(model, b).backward(), args=(deal(strategy, data(7)),))
    mse(twin, data(7)).backward()
    for m in (model, twin):
        mse(m, where_it_is(m, data(3))).backward()
    assert_close(gradients(model), gradients(twin), "outside, run, outside")


# ---- gradients outside of run


def _losses(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)


@pytest.mark.parametrize("how", ["mean along rows", "sum along rows", "sum of sums"])
def test_a_backward_through_the_results_of_a_run_reaches_the_parameters(make, how):
    def reduced(strategy: torchstrategy.Strategy, model: Any, batch: Any) -> torch.Tensor:
        if how == "sum of sums":
            return strategy.reduce("sum", strategy.run(lambda b: _losses(model, b).sum(), args=(batch,)), axis=None)
        return strategy.reduce(how.split()[0], strategy.run(_losses, args=(model, batch)), axis=0)

    for n, rows in [(1, 4), (3, 7), (3, 2), (5, 17)]:
        strategy = make(n)
        (model, optimizer), (twin, plain) = built(strategy, mlp, sgd)
        for k in range(3):
            batch = data(rows, seed=k)
            loss = reduced(strategy, model, deal(strategy, batch))
            losses = _losses(twin, batch)
            wanted = losses.mean() if how == "mean along rows" else losses.sum()
            close(loss, wanted)
            for optimize, total in ((optimizer, loss), (plain, wanted)):
                if k < 2:
                    optimize.zero_grad()  # so the last step accumulates
                total.backward(retain_graph=True)
                (0.5 * total).backward()
            assert_close(gradients(model), gradients(twin), f"{n} replicas, {rows} rows, step {k}", 1e-10)
            optimizer.step()
            plain.step()
        assert_close(parameters(model), parameters(twin), f"{n} replicas, {rows} rows", 1e-10)


def test_a_backward_through_gathered_results_reaches_the_parameters(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    batch = data(7)
    rows = strategy.gather(strategy.run(lambda b: model(b[0]), args=(deal(strategy, batch),)), axis=0)
    F.mse_loss(rows, batch[1].to(rows.device)).backward()
    mse(twin, batch).backward()
    assert_close(gradients(model), gradients(twin), "gathered")


def test_a_backward_outside_works_also_when_an_optimizer_came_between_two_runs(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    for k in range(3):
        batch = data(7, seed=k)
        results = strategy.run(lambda b: model(b[0]).square().sum(1), args=(deal(strategy, batch),))
        strategy.reduce("mean", results, axis=0).backward()
        twin(batch[0]).square().sum(1).mean().backward()
        assert_close(gradients(model), gradients(twin), f"run {k}", 1e-11)
        optimizer = strategy.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    del optimizer


def test_a_backward_outside_reaches_a_parameter_that_was_frozen_at_the_first_run(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    for k, frozen in enumerate([True, False, True, False]):
        for m in (model, twin):
            m.zero_grad()
            m[0].requires_grad_(not frozen)
        batch = data(7, seed=k)
        results = strategy.run(lambda b: model(b[0]).square().sum(1), args=(deal(strategy, batch),))
        strategy.reduce("mean", results, axis=0).backward()
        twin(batch[0]).square().sum(1).mean().backward()
        assert_close(gradients(model), gradients(twin), f"run {k}, frozen: {frozen}")


def test_what_a_step_freezes_stays_frozen(make):
    # It was thawed at optimizer.step(), which brought the originals' flags to the replicas, and trained on in silence.
    batch = data(7)
    strategy = make(3)
    (model, optimizer), (twin, plain) = built(strategy, mlp, sgd)

    def step(model: Any, optimizer: Any, k: int, b: Any) -> None:
        if k == 1:
            model[0].requires_grad_(False)
        if k == 3:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        mse(model, b).backward()
        optimizer.step()

    for k in range(5):
        strategy.run(functools.partial(step, model, optimizer, k), args=(deal(strategy, batch),))
        step(twin, plain, k, batch)
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in twin.parameters()]
        assert_close(parameters(model), parameters(twin), f"step {k}", 1e-10)


def test_replicas_that_disagree_on_what_is_trained_are_refused(make):
    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)
    with pytest.raises(
        RuntimeError, match=r"^The replicas disagree whether Sequential\.0\.weight is trained: replica 0 "
    ):
        strategy.run(lambda: model[0].requires_grad_(replica_id() != 1) and None)
    assert all(p.requires_grad for p in model.parameters())


def test_a_backward_outside_works_for_results_of_a_run_before_the_model_was_changed(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    batch = data(7)
    results = strategy.run(lambda b: model(b[0]).square().sum(1), args=(deal(strategy, batch),))
    with strategy.scope():
        other = nn.Linear(2, 2)
    strategy.run(lambda: other(torch.ones(1, 2)).detach())
    strategy.reduce("mean", results, axis=0).backward()
    twin(batch[0]).square().sum(1).mean().backward()
    assert_close(gradients(model), gradients(twin), "results of copies that are no longer used")


def test_a_backward_outside_runs_the_hooks_on_the_parameters_of_the_user(make):
    # The hooks see the gradient of the whole batch; a doubling is one that does not care how often it is called.
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    for m in (model, twin):
        m[0].weight.register_hook(lambda g: 2 * g)
    batch = data(7)
    results = strategy.run(lambda b: model(b[0]).square().sum(1), args=(deal(strategy, batch),))
    strategy.reduce("mean", results, axis=0).backward()
    twin(batch[0]).square().sum(1).mean().backward()
    assert_close(gradients(model), gradients(twin), "hooks")


# ---- clearing gradients


def _each(model: Any, what: Callable[[Any], None]) -> None:
    for p in model.parameters():
        what(p)


def _set_none(p: Any) -> None:
    p.grad = None


def _zero(p: Any) -> None:
    if p.grad is not None:
        p.grad.zero_()


def _zero_data(p: Any) -> None:
    if p.grad is not None:
        p.grad.data.zero_()


def _detach_and_zero(p: Any) -> None:
    if p.grad is not None:
        p.grad.detach_()
        p.grad.zero_()


def _delete(p: Any) -> None:
    del p.grad


def _put_zeros(p: Any) -> None:
    p.grad = torch.zeros_like(p)


CLEARING: dict[str, Callable[[Any, Any], None]] = {
    "optimizer.zero_grad()": lambda m, o: o.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda m, o: o.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda m, o: m.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda m, o: m.zero_grad(set_to_none=False),
    "p.grad = None": lambda m, o: _each(m, _set_none),
    "p.grad.zero_()": lambda m, o: _each(m, _zero),
    "p.grad.data.zero_()": lambda m, o: _each(m, _zero_data),
    "p.grad.detach_(); p.grad.zero_()": lambda m, o: _each(m, _detach_and_zero),
    "del p.grad": lambda m, o: _each(m, _delete),
    "p.grad = zeros": lambda m, o: _each(m, _put_zeros),
    "one layer only": lambda m, o: m[0].zero_grad(),
    "never": lambda m, o: None,
}


@pytest.mark.parametrize("way", CLEARING)
def test_every_way_of_clearing_gradients_means_what_it_means_in_plain_torch(make, way):
    clear = CLEARING[way]

    def micro(model: Any, batch: Any) -> None:
        mse(model, batch).backward()

    def first(model: Any, optimizer: Any, batch: Any) -> None:
        clear(model, optimizer)
        micro(model, batch)
        micro(model, batch)

    def between(model: Any, optimizer: Any, batch: Any) -> None:
        micro(model, batch)
        clear(model, optimizer)
        micro(model, batch)

    def last(model: Any, optimizer: Any, batch: Any) -> None:
        micro(model, batch)
        micro(model, batch)
        clear(model, optimizer)

    def twice(model: Any, optimizer: Any, batch: Any) -> None:
        clear(model, optimizer)
        clear(model, optimizer)
        micro(model, batch)
        micro(model, batch)

    def update_first(model: Any, optimizer: Any, batch: Any) -> None:
        first(model, optimizer, batch)
        optimizer.step()

    def update_last(model: Any, optimizer: Any, batch: Any) -> None:
        micro(model, batch)
        optimizer.step()
        clear(model, optimizer)
        micro(model, batch)

    def neither(model: Any, optimizer: Any, batch: Any) -> None:
        micro(model, batch)
        micro(model, batch)

    for n in (1, 3):
        for step in (first, between, last, twice, update_first, update_last):
            compare(make, n, step, steps=2, case=f"{step.__name__} inside")
        compare(make, n, neither, steps=2, before=clear, after=lambda m, o: o.step(), case="before, outside")
        compare(make, n, neither, steps=2, after=clear, case="after, outside")
        compare(make, n, first, steps=2, before=clear, after=lambda m, o: o.step(), case="inside and outside")


@pytest.mark.parametrize("way", [way for way in CLEARING if way not in ("never", "one layer only")])
def test_replicas_that_disagree_about_clearing_are_an_error(make, way):
    # In the first step nothing was accumulated before, and what is cleared is only what the step itself has collected.
    clear = CLEARING[way]
    for steps, when in [(2, "before backward"), (1, "after backward"), (2, "after backward")]:
        for who in (0, 1):
            strategy = make(3)
            (model, optimizer), _ = built(strategy, mlp, sgd)

            def step(
                batch: Any, is_last: bool, who: int = who, model: Any = model, o: Any = optimizer, when: str = when
            ):
                if is_last and replica_id() == who and when == "before backward":
                    clear(model, o)
                mse(model, batch).backward()
                if is_last and replica_id() == who and when == "after backward":
                    clear(model, o)

            case = f"only replica {who} cleared, {when}, at step {steps}"
            before = None
            try:
                for k in range(steps):
                    before = gradients(model)
                    strategy.run(step, args=(deal(strategy, data(7)), k == steps - 1))
            except RuntimeError as error:
                assert "disagree" in str(error) or "different number of times" in str(error), case
                assert_close(gradients(model), before, case)  # and it has left everything as it was
            else:
                pytest.fail(f"{case}: no error")


def test_clearing_nothing_in_one_replica_changes_nothing_or_is_an_error(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        if replica_id() == 1:
            optimizer.zero_grad()
        mse(model, batch).backward()

    try:
        compare(make, 3, step, steps=1)
    except RuntimeError as error:
        assert "disagree" in str(error)


# ---- reading and changing gradients


def _norm(model: Any, optimizer: Any) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _value(model: Any, optimizer: Any) -> Any:
    return nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _clamp_data(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.data.clamp_(-0.01, 0.01)


def _scale_data(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.data.mul_(3)


def _through_groups(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)


def _times_two(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad * 2


def _times_two_in_place(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad *= 2


def _decay(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.3)


def _decay_by_new(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad + 0.3 * p.detach()


def _assign_data(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5


def _drop_first(model: Any, optimizer: Any) -> None:
    model[0].weight.grad = None


def _last_layer_only(model: Any, optimizer: Any) -> None:
    model[2].weight.grad.mul_(0.5)


def _log_only(model: Any, optimizer: Any) -> None:
    assert sum(float(p.grad.norm()) for p in model.parameters()) > 0


CHANGES = [
    _norm,
    _value,
    _clamp_data,
    _scale_data,
    _through_groups,
    _times_two,
    _times_two_in_place,
    _decay,
    _decay_by_new,
    _assign_data,
    _drop_first,
    _last_layer_only,
    _log_only,
]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__.strip("_") for change in CHANGES])
def test_what_a_step_does_to_gradients_it_does_to_those_of_the_whole_batch(make, change):
    def each_micro_batch(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            mse(model, batch).backward()
            change(model, optimizer)
        optimizer.step()

    def at_the_end(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        mse(model, batch).backward()
        change(model, optimizer)

    def of_what_was_accumulated(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        change(model, optimizer)

    for n in (1, 3):
        compare(make, n, each_micro_batch, steps=2)
        compare(make, n, at_the_end, steps=2, after=lambda m, o: o.step())
        compare(make, n, of_what_was_accumulated, steps=2)
    compare(make, 3, each_micro_batch, rows=2, case="an empty replica sits out")
    compare(
        make, 3, each_micro_batch, rows=2, options=RunOptions(run_empty_replicas=True), case="an empty replica runs"
    )


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__.strip("_") for change in CHANGES])
def test_what_a_step_does_to_gradients_that_are_summed_it_does_to_those_of_the_whole_batch(make, change):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            (F.mse_loss(model(batch[0]), batch[1], reduction="sum") / 7).backward()
            change(model, optimizer)
        optimizer.step()

    compare(make, 3, step, steps=2, options=RunOptions(gradient_reduction="sum"))


def test_the_norm_that_clipping_returns_is_that_of_the_whole_batch_in_every_replica(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)

    def step(model: Any, batch: Any) -> float:
        mse(model, batch).backward()
        return float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    wanted = step(twin, data(7))
    got = strategy.run(lambda b: step(model, b), args=(deal(strategy, data(7)),))
    assert strategy.experimental_local_results(got) == pytest.approx([wanted] * 3, rel=1e-12)


def test_every_replica_reads_the_gradient_of_the_whole_batch_also_that_of_earlier_runs(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    for k in range(3):
        batch = data(7, seed=k)

        def step(b: Any) -> Any:
            before = gradients(model)
            mse(model, b).backward()
            return [before, gradients(model)]

        before = gradients(twin)
        mse(twin, batch).backward()
        results = strategy.run(step, args=(deal(strategy, batch),))
        for r in range(3):
            read = torch.utils._pytree.tree_map(
                lambda leaf, r=r: leaf.values[r] if isinstance(leaf, torchstrategy.DistributedValues) else leaf, results
            )
            assert_close(read[0], before, f"run {k}, replica {r}, before backward")
            assert_close(read[1], gradients(twin), f"run {k}, replica {r}, after backward")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_that_a_step_adds_up_itself_are_those_of_the_whole_batch(make, reduction):
    def loss(model: Any, batch: Any, rows: int) -> torch.Tensor:
        total = F.mse_loss(model(batch[0]), batch[1], reduction=reduction)
        # The factor makes the gradient of a replica without rows NaN under a mean.
        return total / rows if reduction == "sum" else total * model[0].weight.exp().mean()

    def new_tensor(p: Any, g: Any) -> None:
        p.grad = g if p.grad is None else p.grad + g

    def in_place(p: Any, g: Any) -> None:
        if p.grad is None:
            p.grad = g
        else:
            p.grad += g

    def in_place_method(p: Any, g: Any) -> None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.add_(g)

    batches = {
        "7 rows": data(7),
        "2 rows": data(2),
    }
    if reduction == "mean":
        # Every replica adds the very same. Under SUM that cannot be told from all of them having scaled, or clipped,
        # the gradient of the whole step, which every replica does alike.
        batches["equal rows"] = tuple(torch.cat([t[:2]] * 3) for t in data(7))
    for add in (new_tensor, in_place, in_place_method):
        for name, batch in batches.items():
            rows = batch[0].shape[0]

            def step(model: Any, optimizer: Any, batch: Any, add: Any = add, rows: int = rows) -> None:
                optimizer.zero_grad()
                for _ in range(2):
                    taken = torch.autograd.grad(loss(model, batch, rows), list(model.parameters()))
                    for p, g in zip(model.parameters(), taken, strict=True):
                        add(p, g)
                optimizer.step()

            case = f"{add.__name__}, {name}"
            for empty in (False, True):
                options = RunOptions(gradient_reduction=reduction, run_empty_replicas=empty)
                compare(make, 3, step, batches=[batch] * 2, options=options, case=f"{case}, run empty: {empty}")


def test_adding_to_what_earlier_runs_accumulated_is_adding_to_it_once(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        taken = torch.autograd.grad(mse(model, batch), list(model.parameters()))
        for p, g in zip(model.parameters(), taken, strict=True):
            p.grad = g if p.grad is None else p.grad + g

    compare(make, 3, step, steps=4)


# ---- parameters captured outside of the step


def _equals_plain_or_raises(make: Any, step: Any, **kwargs: Any) -> None:
    """A silent difference is the one thing that is never right."""
    try:
        compare(make, 3, step, **kwargs)
    except RuntimeError as error:
        assert "outside of" in str(error) or "scope" in str(error), error


def test_clipping_parameters_that_were_listed_outside_of_the_step_clips_or_raises(make):
    lists: dict[int, list[Any]] = {}

    def remember(model: Any, optimizer: Any) -> None:
        lists[id(model)] = list(model.parameters())

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        nn.utils.clip_grad_norm_(lists[id(model)], 0.01)

    _equals_plain_or_raises(make, step, before=remember)


def test_clearing_parameters_that_were_listed_outside_of_the_step_clears_or_raises(make):
    for name, clear in {"= None": _set_none, ".zero_()": _zero}.items():
        lists: dict[int, list[Any]] = {}

        def remember(model: Any, optimizer: Any, lists: Any = lists) -> None:
            lists[id(model)] = list(model.parameters())

        def step(model: Any, optimizer: Any, batch: Any, lists: Any = lists, clear: Any = clear) -> None:
            for p in lists[id(model)]:
                clear(p)
            mse(model, batch).backward()

        _equals_plain_or_raises(make, step, before=remember, case=name)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_an_optimizer_clears_the_gradient_of_a_parameter_that_no_module_has(make, n, set_to_none):
    """Such as one of a layer that was taken out of the model: its momentum was fed the old gradient for ever."""
    strategy = make(n)
    with strategy.scope():
        model = mlp()
        left = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), left], lr=1.0)

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none)
        mse(model, batch).backward()
        optimizer.step()

    left.grad = torch.ones_like(left)
    strategy.run(step, args=(deal(strategy, data(7)),))
    assert left.grad is None if set_to_none else torch.equal(left.grad, torch.zeros_like(left))
    assert torch.equal(left.detach(), torch.ones_like(left))


def test_clearing_by_an_optimizer_that_was_made_outside_of_the_scope_clears_or_raises(make):
    optimizers: dict[int, Any] = {}

    def remember(model: Any, optimizer: Any) -> None:
        optimizers.setdefault(id(model), torch.optim.SGD(model.parameters(), lr=0.1))

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizers[id(model)].zero_grad()
        mse(model, batch).backward()

    _equals_plain_or_raises(make, step, optimizer=None, before=remember, after=lambda m, o: optimizers[id(m)].step())


def test_a_trainable_tensor_of_no_module_is_named_when_an_optimizer_of_the_step_has_it(make):
    strategy = make(3)
    with strategy.scope():
        model = mlp()
        log_t = nn.Parameter(torch.zeros(7, dtype=torch.float64))
        optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [log_t]}], lr=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        (mse(model, batch) * log_t.exp().sum()).backward()
        optimizer.step()

    before = parameters(model)
    named = r"(log_t|param_groups\[1\]\['params'\]\[0\], a tensor of shape \(7,\))"
    with pytest.raises(RuntimeError, match=f"{named}|{ELSEWHERE}"):
        strategy.run(step, args=(deal(strategy, data(7)),))
    assert_close(parameters(model), before, "nothing was updated")
    assert log_t.grad is None and not log_t.any()


def test_a_parameter_that_was_taken_outside_of_the_step_is_named_when_backward_reaches_it(make):
    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)
    weight = model[0].weight
    with pytest.raises(RuntimeError, match=rf"Backward in a replica reached .*0\.weight|{ELSEWHERE}"):
        strategy.run(lambda b: F.linear(b[0], weight).sum().backward(), args=(deal(strategy, data(7)),))
    assert weight.grad is None


@pytest.mark.parametrize("where", ["inside", "outside", "inside, in the scope", "outside, in the scope"])
def test_a_model_that_no_scope_knows_does_not_silently_collect_a_gradient_from_each_replica(make, where):
    strategy = make(3)
    model = mlp()
    if "scope" in where:
        with strategy.scope():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = parameters(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        if where.startswith("inside"):
            optimizer.step()

    with pytest.raises(RuntimeError, match=f"scope|{ELSEWHERE}"):
        strategy.run(step, args=(deal(strategy, data(7)),))
    assert_close(parameters(model), before, "no replica has updated it")


# ---- hooks on the user's parameters


def test_tensor_hooks_on_the_users_parameters_see_the_gradient_of_the_whole_batch_once(make):
    seen: dict[int, list[torch.Tensor]] = {}

    def build() -> nn.Module:
        model = mlp()
        log = seen.setdefault(id(model), [])
        model[0].weight.register_hook(lambda g: (log.append(g.clone()), g.clamp(-0.01, 0.01))[1])
        model[2].bias.register_hook(lambda g: log.append(g.clone()))
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()

    model, twin = compare(make, 3, step, build=build)
    assert len(seen[id(model)]) == len(seen[id(twin)]) == 6
    # Autograd comes to the last layer first; ours are called in the order of the parameters.
    got, wanted = (sorted(seen[id(m)], key=lambda g: (g.dim(), float(g.sum()))) for m in (model, twin))
    for a, b in zip(got, wanted, strict=True):
        close(a, b)


def test_tensor_hooks_see_the_gradient_of_each_backward_or_the_step_is_refused(make):
    # A clamp of the sum is not the sum of the clamps.
    def build() -> nn.Module:
        model = mlp()
        model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(2):
            mse(model, batch).backward()

    try:
        compare(make, 3, step, build=build)
    except RuntimeError as error:
        assert "hook" in str(error)


def test_a_hook_that_frees_an_update_from_the_optimizer_step_updates_once(make):
    # The optimizer-in-backward of the PyTorch tutorial.
    def build() -> nn.Module:
        model = mlp()
        for p in model.parameters():
            optimizer = torch.optim.Adam([p], lr=0.01)

            def update(p: Any, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(update)
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()

    compare(make, 3, step, build=build, optimizer=None)


def test_post_accumulate_hooks_see_what_was_accumulated(make):
    norms: dict[int, list[float]] = {}

    def build() -> nn.Module:
        model = mlp()
        log = norms.setdefault(id(model), [])
        model[0].weight.register_post_accumulate_grad_hook(lambda p: log.append(float(p.grad.norm())))
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()

    model, twin = compare(make, 3, step, build=build)
    assert norms[id(model)] == pytest.approx(norms[id(twin)], rel=1e-12)


def test_hooks_that_a_step_removes_or_that_are_removed_between_steps_are_gone(make):
    strategy = make(2)
    (model, _), _ = built(strategy, mlp, None)
    calls: list[int] = []
    handle = model[0].weight.register_hook(lambda g: calls.append(1))
    step = functools.partial(strategy.run, lambda b: mse(model, b).backward(), args=(deal(strategy, data(4)),))
    step()
    handle.remove()
    step()
    assert calls == [1]


# ---- gradients that are sparse, or missing


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 2, sparse=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


WORDS = [(torch.tensor([0, 1, 2, 3, 3, 8, 1]), data(7)[1]), (torch.tensor([5, 5, 5, 0, 2, 2, 7]), data(7, seed=2)[1])]


@pytest.mark.parametrize("name", ["sgd", "sparse_adam"])
def test_sparse_gradients_of_embeddings_are_those_of_the_whole_batch(make, name):
    optimizers = {
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "sparse_adam": lambda m: torch.optim.SparseAdam(m.parameters(), lr=0.1),
    }

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    def backward(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(2):
            mse(model, batch).backward()

    for n in (1, 3):
        kwargs: dict[str, Any] = dict(build=Words, optimizer=optimizers[name], batches=WORDS)
        model, _ = compare(make, n, step, **kwargs)
        assert model.table.weight.grad.is_sparse
        compare(make, n, backward, after=lambda m, o: (o.step(), o.zero_grad()), **kwargs)


def test_sparse_gradients_can_be_read_and_accumulated_over_runs(make):
    def read(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        assert model.table.weight.grad.is_sparse

    def accumulate(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()

    for n in (1, 3):
        for step in (read, accumulate):
            compare(make, n, step, build=Words, optimizer=None, batches=WORDS)


def test_sparse_gradients_can_be_changed_in_the_step(make):
    def double(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        model.table.weight.grad = model.table.weight.grad * 2

    def double_in_place(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        model.table.weight.grad.mul_(2)

    for n in (1, 3):
        for step in (double, double_in_place):
            compare(make, n, step, build=Words, optimizer=None, batches=WORDS)


class Heads(nn.Module):
    """Which head a row takes is in the row: in most replicas some head is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(3, 2, dtype=torch.float64)
        self.common = nn.Linear(3, 2, dtype=torch.float64)
        self.unused = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor, is_rare: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(len(x), 2)
        if is_rare.any():
            out = out.index_put((is_rare,), self.rare(x[is_rare]))
        if not is_rare.all():
            out = out.index_put((~is_rare,), self.common(x[~is_rare]))
        return out


HEADS = [
    (*data(7), torch.tensor([False, False, False, True, True, True, False])),
    (*data(7, seed=5), torch.tensor([False] * 6 + [True])),
    (*data(7, seed=6), torch.tensor([True, True] + [False] * 5)),
]


def heads_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0], batch[2]), batch[1])


def test_a_parameter_that_some_replicas_do_not_use_has_the_gradient_of_the_whole_batch(make):
    def plain(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        heads_loss(model, batch).backward()
        optimizer.step()

    def clipped(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        heads_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    def read_backwards(model: Any, optimizer: Any, batch: Any) -> None:
        heads_loss(model, batch).backward()
        for p in reversed(list(model.parameters())):
            if p.grad is not None:
                p.grad.mul_(0.5)

    def one_read(model: Any, optimizer: Any, batch: Any) -> None:
        heads_loss(model, batch).backward()
        if model.rare.weight.grad is not None:
            model.rare.weight.grad.mul_(0.5)

    for n in (2, 3, 5):
        for step in (plain, clipped, read_backwards, one_read):
            compare(make, n, step, build=Heads, batches=HEADS)


def test_a_read_of_a_gradient_that_other_replicas_still_add_to_is_right_or_an_error(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for p in (model.common.weight, model.rare.bias):  # a look at some of them before backward
            _ = p.grad
        heads_loss(model, batch).backward()
        if model.rare.weight.grad is not None:
            model.rare.weight.grad.mul_(0.5)
        if model.common.weight.grad is not None:
            model.common.weight.grad.mul_(0.5)

    try:
        compare(make, 3, step, build=Heads, batches=HEADS)
    except RuntimeError as error:
        assert "gradient" in str(error)


# ---- optimizers


def test_the_two_optimizers_of_a_gan_do_what_they_do_in_plain_torch(make):
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = nn.Linear(2, 3, dtype=torch.float64), mlp()

    def optimizers(model: Any) -> Any:
        return (
            torch.optim.Adam(model.generator.parameters(), lr=0.01),
            torch.optim.SGD(model.critic.parameters(), lr=0.1, momentum=0.5),
        )

    def step(model: Any, pair: Any, batch: Any) -> None:
        of_generator, of_critic = pair
        real, noise = batch
        fake = model.generator(noise)
        of_critic.zero_grad()
        (F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(fake.detach())).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-model.critic(fake)).mean().backward()  # leaves a gradient in the critic too
        of_generator.step()

    for n in (1, 3):
        compare(make, n, step, build=Gan, optimizer=optimizers, steps=4)


EVERY_OPTIMIZER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **{
        f"{name}, {kind}": lambda m, name=name, kind=kind: getattr(torch.optim, name)(
            m.parameters(), lr=0.01, **{kind: True}
        )
        for name in ("SGD", "Adam", "AdamW", "Adagrad")
        for kind in ("foreach", "fused")
    },
    **{
        name: lambda m, name=name: getattr(torch.optim, name)(m.parameters(), lr=0.01)
        for name in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor")
    },
}


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_every_optimizer_of_torch_updates_what_the_replicas_see(make, name):
    # The fused ones write parameters without counting it in their versions.
    def inside(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        mse(model, batch).backward()

    def outside(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()

    same: dict[str, Any] = dict(optimizer=EVERY_OPTIMIZER[name], steps=2, relative=1e-8)
    for n in (1, 3):
        compare(make, n, inside, case=f"{name}, inside", **same)
        compare(make, n, outside, after=lambda m, o: o.step(), case=f"{name}, outside", **same)


def test_an_update_in_the_step_keeps_its_state_where_plain_torch_keeps_it(make):
    # A lone replica made its update in the replica's own default device, where Adam then put its count of steps.
    for n in (1, 3):
        if n == 1 and make is not central_with_copies:
            continue  # one replica on the user's own objects is plain, in its own default device
        strategy = make(n)
        (model, optimizer), _ = built(strategy, mlp, lambda m: torch.optim.Adam(m.parameters()))

        def step(batch: Any, model: Any = model, optimizer: Any = optimizer) -> None:
            mse(model, batch).backward()
            optimizer.step()

        strategy.run(step, args=(deal(strategy, data(7)),))
        owner = model[0].weight.device
        for state in optimizer.state.values():
            places = {name: tensor.device for name, tensor in state.items()}
            assert places == {"step": torch.device("cpu"), "exp_avg": owner, "exp_avg_sq": owner}, n


def test_an_update_in_the_step_is_seen_by_the_forward_after_it(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()

    for n in (1, 3):
        compare(make, n, step)


def test_gradients_after_an_update_in_the_step_are_still_there(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        optimizer.step()
        mse(model, batch).backward()
        optimizer.step()

    compare(make, 3, step)


def test_a_learning_rate_that_the_step_writes_holds_from_the_next_update_on(make):
    def before(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.step()

    def after(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["momentum"] = 0.1

    def twice(model: Any, optimizer: Any, batch: Any) -> None:
        before(model, optimizer, batch)
        after(model, optimizer, batch)

    for n in (1, 3):
        for step in (before, after, twice):
            lrs: dict[int, float] = {}
            model, twin = compare(
                make, n, step, after=lambda m, o, lrs=lrs: lrs.update({id(m): o.param_groups[0]["lr"]})
            )
            assert lrs[id(model)] == lrs[id(twin)] < 0.1


def test_a_learning_rate_that_is_a_tensor_and_is_written_in_place_is_written_once_or_refused(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        for group in optimizer.param_groups:
            group["lr"].mul_(0.5)
        optimizer.step()

    def optimizer(model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64))

    try:
        compare(make, 3, step, optimizer=optimizer)
    except RuntimeError as error:
        assert "lr" in str(error)


def test_groups_of_an_optimizer_show_the_replicas_own_parameters_and_their_state(make):
    strategy = make(3)
    (model, optimizer), _ = built(strategy, mlp, OPTIMIZERS["adam"])

    def step(batch: Any) -> tuple[bool, int, int]:
        mse(model, batch).backward()
        optimizer.step()
        mine = {id(p) for p in model.parameters()}
        same = {id(p) for group in optimizer.param_groups for p in group["params"]} == mine
        return same, len(mine & {id(p) for p in optimizer.state}), int(optimizer.state[model[0].weight]["step"])

    found = strategy.experimental_local_results(strategy.run(step, args=(deal(strategy, data(7)),)))
    assert found == ((True, 4, 1),) * 3
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


SCHEDULERS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "step": (lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5), ()),
    "lambda": (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)), ()),
    "cycle": (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10), ()),
    "plateau": (lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0), (1.0,)),
    "sequential": (
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.StepLR(o, 1)], [2]
        ),
        (),
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("in_scope", [True, False], ids=["made_in_scope", "made_outside"])
def test_a_scheduler_counts_each_step_once_inside_of_the_step_and_outside(make, name, in_scope):
    new, args = SCHEDULERS[name]
    batch = data(7)
    for n, inside in ((1, True), (3, True), (3, False)):
        strategy = make(n)
        (model, optimizer), (twin, plain) = built(strategy, mlp, sgd)
        theirs = new(plain)
        if in_scope:
            with strategy.scope():
                ours = new(optimizer)
        else:
            ours = new(optimizer)

        def step(b: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
            optimizer.zero_grad()
            mse(model, b).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step(*args)

        for _ in range(4):
            strategy.run(step, args=(deal(strategy, batch), model, optimizer, ours if inside else None))
            step(batch, twin, plain, theirs)
            if not inside:
                ours.step(*args)
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            assert ours.last_epoch == theirs.last_epoch and ours.get_last_lr() == theirs.get_last_lr()
        assert_close(parameters(model), parameters(twin), f"{n} replicas", 1e-10)


def test_a_scheduler_whose_method_is_the_step_is_refused_and_has_not_counted(make):
    strategy = make(3)
    (model, optimizer), _ = built(strategy, mlp, sgd)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    strategy.run(lambda b: (mse(model, b).backward(), optimizer.step())[1], args=(deal(strategy, data(7)),))
    with pytest.raises(RuntimeError, match=r"The step holds StepLR\.step, a method that was taken from its object"):
        strategy.run(scheduler.step)
    assert optimizer.param_groups[0]["lr"] == 0.1 and scheduler.last_epoch == 0


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_grad_scaler_makes_one_decision_for_all_replicas_inside_of_the_step_and_outside(make, where):
    batch = data(7)
    for n in (1, 3):
        strategy = make(n)
        (model, optimizer), (twin, plain) = built(strategy, mlp, sgd)
        ours, theirs = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))

        def backward(b: Any, model: Any, optimizer: Any, scaler: Any) -> None:
            optimizer.zero_grad()
            scaler.scale(mse(model, b)).backward()

        def update(model: Any, optimizer: Any, scaler: Any) -> None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()

        def step(b: Any, *parts: Any, backward: Any = backward, update: Any = update) -> None:
            backward(b, *parts)
            update(*parts)

        for k in range(4):
            rows = (batch[0], batch[1].clone())
            if k == 2:
                rows[1][6, 0] = float("inf")  # in the last replica: an update that is skipped in all of them
            dealt = deal(strategy, rows)
            step(rows, twin, plain, theirs)
            if where == "inside":
                strategy.run(step, args=(dealt, model, optimizer, ours))
            else:
                strategy.run(backward, args=(dealt, model, optimizer, ours))
                update(model, optimizer, ours)
            assert ours.state_dict() == theirs.state_dict()
            assert_close(parameters(model), parameters(twin), f"{n} replicas, step {k}", 1e-10)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_closure_gives_an_optimizer_the_loss_and_the_gradient_of_the_whole_batch(make, where):
    batch = data(7)
    for new in (sgd, lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3)):
        strategy = make(3)
        (model, optimizer), (twin, plain) = built(strategy, mlp, new)
        dealt = deal(strategy, batch)

        def losses(b: Any, model: Any, optimizer: Any) -> Any:
            optimizer.zero_grad()
            losses = F.mse_loss(model(b[0]), b[1], reduction="none").mean(1)
            losses.mean().backward()
            return losses.detach()

        def step(b: Any, model: Any, optimizer: Any, losses: Any = losses) -> Any:
            return float(optimizer.step(lambda: losses(b, model, optimizer).mean()))

        def outside(s: Any = strategy, losses: Any = losses, args: Any = (dealt, model, optimizer)) -> Any:
            return s.reduce("mean", s.run(losses, args=args), axis=0)

        expected = step(batch, twin, plain)
        if where == "inside":
            found = strategy.experimental_local_results(strategy.run(step, args=(dealt, model, optimizer)))
        else:
            found = (float(optimizer.step(outside)),)
        assert found == pytest.approx([expected] * len(found))
        assert_close(parameters(model), parameters(twin), where, 1e-9)


def test_an_optimizer_that_was_made_outside_of_the_scope_is_refused_at_its_step_in_a_replica(make):
    for n in (1, 3):
        strategy = make(n)
        (model, _), _ = built(strategy, mlp, None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if n == 1 and make is not central_with_copies:
            continue  # one replica on the user's own objects is plain
        before = parameters(model)

        def step(batch: Any, model: Any = model, optimizer: Any = optimizer) -> None:
            mse(model, batch).backward()
            optimizer.step()

        with pytest.raises(
            RuntimeError, match=r"SGD\.step\(\) was called in a replica.*distribute_optimizer\(optimizer\)"
        ):
            strategy.run(step, args=(deal(strategy, data(7)),))
        assert_close(parameters(model), before, "refused")
        strategy.distribute_optimizer(optimizer)
        strategy.run(step, args=(deal(strategy, data(7)),))
        assert not torch.equal(parameters(model)["0.weight"], before["0.weight"])


def test_an_optimizer_that_steps_in_a_replica_sees_parameters_of_the_very_class(make):
    """Of another class, torch's optimizers update one after the other, and not in few kernels."""
    seen: set[type] = set()

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.update(type(p) for group in self.param_groups for p in group["params"])
            super().step(closure)

    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)
    with strategy.scope():
        optimizer = Looking(model.parameters(), lr=0.1)
    outside = [*model.parameters()]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        assert outside[0].grad is not None  # a list from outside shows the replica's gradients again

    strategy.run(step, args=(deal(strategy, data(7)),))
    assert seen == {nn.Parameter}


def test_an_optimizer_that_is_made_in_the_step_for_the_replicas_parameters_is_refused(make):
    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)

    def step(batch: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mse(model, batch).backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"SGD\.step\(\) was called in a replica"):
        strategy.run(step, args=(deal(strategy, data(7)),))


def test_an_optimizer_given_to_the_strategy_does_what_it_does_in_plain_torch(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    for n in (1, 3):
        strategy = make(n)
        _, (twin, plain) = built(strategy, mlp, sgd)
        model = strategy.distribute_module(copy.deepcopy(twin))
        optimizer = strategy.distribute_optimizer(sgd(model))
        for k in range(3):
            batch = data(7, seed=k)
            strategy.run(functools.partial(step, model, optimizer), args=(deal(strategy, batch),))
            step(twin, plain, batch)
        assert_close(parameters(model), parameters(twin), f"{n} replicas", 1e-10)


def test_a_group_that_is_added_between_runs_is_trained(make):
    def new(model: Any) -> Any:
        return torch.optim.SGD(model[0].parameters(), lr=0.1)

    def grow(model: Any, optimizer: Any) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    compare(make, 3, step, optimizer=new, after=grow)


def test_an_optimizer_over_tensors_of_the_steps_own_is_the_steps_own(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)

    def fit(model: Any, x: torch.Tensor) -> torch.Tensor:
        w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        inner = torch.optim.SGD([w], lr=0.1)
        for _ in range(3):
            inner.zero_grad()
            (x.sum(0) - w).square().sum().backward()
            inner.step()
        head = copy.deepcopy(model)  # fast weights, as in meta-learning
        fast = torch.optim.Adam(head.parameters(), lr=0.01)
        for _ in range(2):
            fast.zero_grad()
            head(x).square().mean().backward()
            fast.step()
        return torch.cat([w.detach(), head(x).detach().sum(0)])

    x = data(7)[0]
    results = strategy.run(lambda x: fit(model, x), args=(deal(strategy, x),))
    for got, piece in zip(results.values, (x[:3], x[3:6], x[6:]), strict=True):
        close(got, fit(twin, piece))
    assert all(p.grad is None for p in model.parameters())
    assert_close(parameters(model), parameters(twin), "the model itself is as it was")


def test_hooks_of_an_optimizer_are_called_once_a_step_and_see_the_whole_gradient(make):
    calls: dict[int, list[float]] = {}

    def new(model: Any) -> Any:
        optimizer = sgd(model)
        log = calls.setdefault(id(model), [])
        optimizer.register_step_pre_hook(lambda o, a, k: log.append(float(model[0].weight.grad.norm())))
        optimizer.register_step_post_hook(lambda o, a, k: log.append(-1.0))
        return optimizer

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    model, twin = compare(make, 3, step, optimizer=new)
    assert calls[id(model)] == pytest.approx(calls[id(twin)], rel=1e-12)
    assert len(calls[id(model)]) == 6


# ---- merge functions


def test_an_update_in_a_merge_function_is_that_of_the_whole_batch(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            mse(model, batch).backward()
            torchstrategy.get_replica_context().merge_call(lambda strategy: optimizer.step())

    for n in (1, 3):
        compare(make, n, step)


def test_a_merge_function_reads_changes_and_clears_the_gradients_of_the_whole_batch(make):
    def clip(strategy: Any, model: Any, *_: Any) -> float:
        return float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    def halve(strategy: Any, model: Any, *_: Any) -> None:
        for p in model.parameters():
            p.grad = p.grad * 0.5

    def clear(strategy: Any, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()

    for change in (clip, halve, clear):

        def step(model: Any, optimizer: Any, batch: Any, change: Any = change) -> None:
            for _ in range(2):
                mse(model, batch).backward()
                torchstrategy.get_replica_context().merge_call(
                    lambda strategy: change(strategy, model, optimizer) and None
                )
            mse(model, batch).backward()

        for n in (1, 3):
            compare(make, n, step, after=lambda m, o: o.step(), case=change.__name__)


class _Ones(torch.autograd.Function):
    """The sum of a parameter, with a gradient whose memory can be watched."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, memory: list[Any]) -> torch.Tensor:
        ctx.memory, ctx.shape = memory, parameter.shape
        return parameter.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ones = np.ones(ctx.shape, dtype=np.float32)
        ctx.memory.append(weakref.ref(ones))
        return torch.from_numpy(ones), None


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_replicas_that_take_turns_do_not_each_hold_gradients(where):
    """Four replicas of a model kept four gradients of it until they met: memory that grew with their number."""
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 4)
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = sgd(model)
    memory: list[Any] = []
    held = []

    def step() -> None:
        held.append(sum(array() is not None for array in memory))
        _Ones.apply(model.weight, memory).backward()
        if where == "inside":
            optimizer.step()

    strategy.run(step)
    assert len(memory) == 4 and held == [0] * 4  # the total is held


class _Added(nn.Module):
    """Parameters that are added up: backward leaves their gradients in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.rand(2, 3)), nn.Parameter(torch.rand(6))
        self.rows = nn.ParameterList([torch.rand(1, 3), torch.rand(1, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.first + self.second.view(2, 3) + torch.cat([*self.rows])).t()


def test_gradients_that_lie_in_one_piece_of_memory_are_weighed_once(make):
    strategy, batch = make(3), data(7)
    (model, _), (twin, _) = built(strategy, lambda: _Added().double(), None)
    strategy.run(lambda batch: mse(model, batch).backward(), args=(deal(strategy, batch),))
    mse(twin, batch).backward()
    assert_close(gradients(model), gradients(twin), "once")


class _Constant(torch.autograd.Function):
    """A gradient that is always the same array."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, constant: Any) -> torch.Tensor:
        ctx.constant = constant
        return parameter.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.from_numpy(ctx.constant), None


def test_an_array_that_backward_returns_as_a_gradient_is_not_written():
    strategy, constant = torchstrategy.CentralStorageStrategy(["cpu"] * 4), np.full((2, 3), 8.0, np.float32)
    with strategy.scope():
        model = nn.Linear(3, 2)
    for _ in range(2):
        model.zero_grad()
        strategy.run(lambda: _Constant.apply(model.weight, constant).backward())
        assert bool((model.weight.grad == 8).all()) and bool((constant == 8).all())


class _Conjugated(nn.Module):
    """Backward leaves conjugated views as gradients, which fused loops do not write."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.second = nn.Parameter(torch.tensor([2 - 1j, 1 + 1j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.first.conj() * self.second)


def test_gradients_that_are_conjugated_views_are_those_of_the_whole_batch():
    strategy, x = torchstrategy.CentralStorageStrategy(["cpu"] * 3), torch.randn(6, 2, dtype=torch.complex64)
    with strategy.scope():
        model = _Conjugated()
    twin = _Conjugated()
    strategy.run(lambda x: model(x).abs().mean().backward(), args=(deal(strategy, x),))
    twin(x).abs().mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_what_was_cleared_to_none_is_not_made_of_zeros_by_clearing_it_again(make):
    strategy = make(2)
    (model, optimizer), _ = built(strategy, mlp, sgd)
    strategy.run(lambda batch: mse(model, batch).backward(), args=(deal(strategy, data(4)),))

    def step() -> None:
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)

    strategy.run(step)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_runs_of_several_threads_lose_no_gradient():
    """Each took the owners' gradients, and gave back what it had, between another one's two steps of the same."""
    strategy, batch = torchstrategy.CentralStorageStrategy(["cpu"] * 2), data(4)
    (model, _), (twin, _) = built(strategy, mlp, None)

    def train() -> None:
        for _ in range(5):
            strategy.run(lambda batch: mse(model, batch).backward(), args=(deal(strategy, batch),))

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(20):
        mse(twin, batch).backward()
    assert_close(gradients(model), gradients(twin), "four threads")


def test_a_tensor_that_a_step_puts_there_as_a_gradient_is_not_written(make):
    """The total of several replicas is made in the memory of the first gradient, where that is autograd's own."""
    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)
    ones = [torch.ones_like(p) for p in model.parameters()]

    def step() -> None:
        for parameter, one in zip(model.parameters(), ones, strict=True):
            parameter.grad = one.to(parameter.device)

    strategy.run(step)
    assert all(bool((one == 1).all()) for one in ones)
    assert all(bool((p.grad == 1).all()) for p in model.parameters())


def test_two_topologies_give_the_same_numbers_bit_for_bit():
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    for n in (1, 2, 3, 5):
        models = []
        for make in (central, central_with_copies):
            strategy = make(n)
            (model, optimizer), _ = built(strategy, mlp, OPTIMIZERS["adam"])
            for k in range(5):
                strategy.run(functools.partial(step, model, optimizer), args=(deal(strategy, data(7, seed=k)),))
            models.append(parameters(model))
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0]), f"{n} replicas"
