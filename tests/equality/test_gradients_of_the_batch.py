"""The gradient of a step on several replicas is that of the whole batch.

It is inside of a run and outside.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from conditions import for_changes, for_releases
from problems import (
    adam,
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
from topologies import SIMULATED, central, central_with_copies
from torchstrategy import ReduceOp, RunOptions

# Fewer rows than replicas, as many, and more, evenly or not.
SOME_ROWS = (1, 2, 4, 5, 7, 17)
# Every size and number on the CPU, where all replicas compute what they compute on
# devices of their own.
REPLICAS = (2, 5) if SIMULATED else range(1, 6)
ROWS = SOME_ROWS if SIMULATED else range(1, 18)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": lambda model: torch.optim.AdamW(
        model.parameters(), lr=0.01, weight_decay=0.1
    ),
}


# ---- the gradient of the whole batch


def _backward(model: Any, batch: Any) -> None:
    mse(model, batch).backward()


def _scaled(model: Any, batch: Any) -> torch.Tensor:
    """A loss whose gradient, where there are no rows, is NaN and not zero."""
    return mse(model, batch) * model[0].weight.exp().mean()


def _has_empty(rows: int, n: int) -> bool:
    return -(-rows // n) * (n - 1) >= rows


@for_releases
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)
def test_the_gradient_is_that_of_the_whole_batch_for_every_size_and_number_of_replicas(
    make, dtype
):
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
                assert_close(
                    gradients(model),
                    gradients(twin),
                    f"{n} replicas, {rows} rows, micro-batch {micro}",
                )


def test_a_replica_that_runs_without_rows_has_its_gradient_dropped_though_it_is_nan(
    make,
):
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
                    lambda m, b: _scaled(m, b).backward(),
                    args=(model, deal(strategy, batch)),
                    options=options,
                )
                _scaled(twin, batch).backward()
                assert_close(
                    gradients(model),
                    gradients(twin),
                    f"{n} replicas, {rows} rows, micro-batch {micro}",
                )


@for_releases
@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_that_of_the_whole_batch_for_every_size_and_number_of_replicas(
    make, name, where
):
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
                strategy.run(
                    whole_step, args=(model, optimizer, deal(strategy, micro_batches))
                )
            else:
                optimizer.zero_grad()
                for batch in micro_batches:
                    strategy.run(accumulate, args=(model, [deal(strategy, batch)]))
                optimizer.step()
            assert_close(gradients(model), gradients(twin), f"{case}, gradient", 1e-9)
            assert_close(
                parameters(model), parameters(twin), f"{case}, parameter", 1e-9
            )
            # So that no rounding of one case goes on into the next.
            twin.load_state_dict(model.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_replicas_that_run_without_rows_is_that_of_the_whole_batch(
    make, name
):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        _scaled(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for n, rows in (
        [(3, 1), (5, 4)] if SIMULATED else [(3, 1), (3, 2), (5, 2), (5, 4), (4, 5)]
    ):
        options = RunOptions(run_empty_replicas=True)
        compare(
            make,
            n,
            step,
            optimizer=OPTIMIZERS[name],
            rows=rows,
            options=options,
            case=f"{rows} rows",
        )


def test_a_sum_of_losses_divided_by_the_global_batch_has_the_whole_batchs_gradient(
    make,
):
    named = (
        RunOptions(gradient_reduction=ReduceOp.SUM),
        RunOptions(gradient_reduction="sum"),
    )
    for (n, rows), options in zip(
        [(1, 4), (2, 7), (3, 7), (3, 2), (5, 17)], itertools.cycle(named), strict=False
    ):

        def step(model: Any, optimizer: Any, batch: Any, rows: int = rows) -> None:
            optimizer.zero_grad()
            for _ in range(2):
                (
                    F.mse_loss(model(batch[0]), batch[1], reduction="sum") / rows
                ).backward()
            optimizer.step()

        compare(make, n, step, rows=rows, options=options, case=f"{rows} rows")


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
        other, word = (
            (ReduceOp.MEAN, "mean") if reduction == "sum" else (ReduceOp.SUM, "sum")
        )
        F.mse_loss(twin(batch[0]), batch[1], reduction=word).backward()
        options = RunOptions(gradient_reduction=other)
        strategy.run(
            functools.partial(step, reduction=word),
            args=(deal(strategy, batch),),
            options=options,
        )
        assert_close(
            gradients(model), gradients(twin), f"made with {default}, run with {other}"
        )


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
    (
        0.75 * mse(twin, (x[pieces[0]], y[pieces[0]]))
        + 0.25 * mse(twin, (x[pieces[2]], y[pieces[2]]))
    ).backward()
    strategy.run(step, options=RunOptions(examples=[1.5, 0, 0.5]))
    assert_close(
        gradients(model), gradients(twin), "an example count of zero drops a gradient"
    )


def test_examples_win_over_the_record_of_the_distributor(make):
    strategy = make(2)
    x, y = data(5)  # dealt 3 and 2
    (model, _), (twin, _) = built(strategy, mlp, None)
    (0.1 * mse(twin, (x[:3], y[:3])) + 0.9 * mse(twin, (x[3:], y[3:]))).backward()
    dealt = deal(strategy, (x, y))
    strategy.run(
        lambda b: mse(model, b).backward(),
        args=(dealt,),
        options=RunOptions(examples=[1, 9]),
    )
    assert_close(gradients(model), gradients(twin), "examples=[1, 9]")


def test_records_that_disagree_are_refused(make):
    strategy = make(2)
    (model, _), _ = built(strategy, mlp, None)
    five, four = deal(strategy, data(5)), deal(strategy, data(4))

    def step(a: Any, b: Any) -> None:
        (mse(model, a) + mse(model, b)).backward()

    with pytest.raises(
        ValueError,
        match=r"split with different numbers of rows, \(3, 2\) and \(2, 2\) by replica",
    ):
        strategy.run(step, args=(five, four))
    assert all(p.grad is None for p in model.parameters())


def test_records_that_disagree_are_no_matter_where_examples_are_given(make):
    # It is what the message advises.
    strategy = make(2)
    (model, _), (twin, _) = built(strategy, mlp, None)
    five, four = data(5), data(4)  # dealt 3 and 2, and 2 and 2

    def step(a: Any, b: Any) -> None:
        (mse(model, a) + mse(model, b)).backward()

    strategy.run(
        step,
        args=(deal(strategy, five), deal(strategy, four)),
        options=RunOptions(examples=[5, 4]),
    )
    for share, rows_of_five, rows_of_four in (
        (5 / 9, slice(0, 3), slice(0, 2)),
        (4 / 9, slice(3, 5), slice(2, 4)),
    ):
        of_five, of_four = (
            [t[rows_of_five] for t in five],
            [t[rows_of_four] for t in four],
        )
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
    def reduced(
        strategy: torchstrategy.Strategy, model: Any, batch: Any
    ) -> torch.Tensor:
        if how == "sum of sums":
            return strategy.reduce(
                "sum",
                strategy.run(lambda b: _losses(model, b).sum(), args=(batch,)),
                axis=None,
            )
        return strategy.reduce(
            how.split()[0], strategy.run(_losses, args=(model, batch)), axis=0
        )

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
            assert_close(
                gradients(model),
                gradients(twin),
                f"{n} replicas, {rows} rows, step {k}",
                1e-10,
            )
            optimizer.step()
            plain.step()
        assert_close(
            parameters(model), parameters(twin), f"{n} replicas, {rows} rows", 1e-10
        )


def test_a_backward_through_gathered_results_reaches_the_parameters(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    batch = data(7)
    rows = strategy.gather(
        strategy.run(lambda b: model(b[0]), args=(deal(strategy, batch),)), axis=0
    )
    F.mse_loss(rows, batch[1].to(rows.device)).backward()
    mse(twin, batch).backward()
    assert_close(gradients(model), gradients(twin), "gathered")


def test_a_backward_outside_works_also_when_an_optimizer_came_between_two_runs(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    for k in range(3):
        batch = data(7, seed=k)
        results = strategy.run(
            lambda b: model(b[0]).square().sum(1), args=(deal(strategy, batch),)
        )
        strategy.reduce("mean", results, axis=0).backward()
        twin(batch[0]).square().sum(1).mean().backward()
        assert_close(gradients(model), gradients(twin), f"run {k}", 1e-11)
        optimizer = strategy.distribute_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1)
        )
    del optimizer


def test_a_backward_outside_reaches_a_parameter_that_was_frozen_at_the_first_run(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    for k, frozen in enumerate([True, False, True, False]):
        for m in (model, twin):
            m.zero_grad()
            m[0].requires_grad_(not frozen)
        batch = data(7, seed=k)
        results = strategy.run(
            lambda b: model(b[0]).square().sum(1), args=(deal(strategy, batch),)
        )
        strategy.reduce("mean", results, axis=0).backward()
        twin(batch[0]).square().sum(1).mean().backward()
        assert_close(gradients(model), gradients(twin), f"run {k}, frozen: {frozen}")


def test_what_a_step_freezes_stays_frozen(make):
    # It was thawed at optimizer.step(), which brought the originals' flags to the
    # replicas, and trained on in silence.
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
        strategy.run(
            functools.partial(step, model, optimizer, k), args=(deal(strategy, batch),)
        )
        step(twin, plain, k, batch)
        assert [p.requires_grad for p in model.parameters()] == [
            p.requires_grad for p in twin.parameters()
        ]
        assert_close(parameters(model), parameters(twin), f"step {k}", 1e-10)


def test_replicas_that_disagree_on_what_is_trained_are_refused(make):
    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)
    with pytest.raises(
        RuntimeError,
        match=(
            r"^The replicas disagree whether Sequential\.0\.weight is trained: replica "
            r"0 "
        ),
    ):
        strategy.run(lambda: model[0].requires_grad_(replica_id() != 1) and None)
    assert all(p.requires_grad for p in model.parameters())


def test_a_backward_outside_works_for_results_of_a_run_before_the_model_was_changed(
    make,
):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    batch = data(7)
    results = strategy.run(
        lambda b: model(b[0]).square().sum(1), args=(deal(strategy, batch),)
    )
    with strategy.scope():
        other = nn.Linear(2, 2)
    strategy.run(lambda: other(torch.ones(1, 2)).detach())
    strategy.reduce("mean", results, axis=0).backward()
    twin(batch[0]).square().sum(1).mean().backward()
    assert_close(
        gradients(model), gradients(twin), "results of copies that are no longer used"
    )


def test_a_backward_outside_runs_the_hooks_on_the_parameters_of_the_user(make):
    # The hooks see the gradient of the whole batch; a doubling is one that does not
    # care how often it is called.
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    for m in (model, twin):
        m[0].weight.register_hook(lambda g: 2 * g)
    batch = data(7)
    results = strategy.run(
        lambda b: model(b[0]).square().sum(1), args=(deal(strategy, batch),)
    )
    strategy.reduce("mean", results, axis=0).backward()
    twin(batch[0]).square().sum(1).mean().backward()
    assert_close(gradients(model), gradients(twin), "hooks")


# ---- gradients that are sparse, or missing


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 2, sparse=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


WORDS = [
    (torch.tensor([0, 1, 2, 3, 3, 8, 1]), data(7)[1]),
    (torch.tensor([5, 5, 5, 0, 2, 2, 7]), data(7, seed=2)[1]),
]


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
        kwargs: dict[str, Any] = dict(
            build=Words, optimizer=optimizers[name], batches=WORDS
        )
        model, _ = compare(make, n, step, **kwargs)
        assert model.table.weight.grad.is_sparse
        compare(
            make, n, backward, after=lambda m, o: (o.step(), o.zero_grad()), **kwargs
        )


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
    """Which head a row takes is in the row: most replicas do not use some head."""

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


@for_changes
def test_a_parameter_that_some_replicas_do_not_use_has_the_gradient_of_the_whole_batch(
    make,
):
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

    for n in (3,) if SIMULATED else (2, 3, 5):
        for step in (plain, clipped, read_backwards, one_read):
            compare(make, n, step, build=Heads, batches=HEADS)


def test_a_read_of_a_gradient_that_other_replicas_still_add_to_is_right_or_an_error(
    make,
):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        # A look at some of them before backward.
        for p in (model.common.weight, model.rare.bias):
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


def test_runs_of_several_threads_lose_no_gradient():
    """Each took the owners' gradients, and gave back what it had.

    It did so between another one's two steps of the same.
    """
    strategy, batch = torchstrategy.CentralStorageStrategy(["cpu"] * 2), data(4)
    (model, _), (twin, _) = built(strategy, mlp, None)

    def train() -> None:
        for _ in range(5):
            strategy.run(
                lambda batch: mse(model, batch).backward(),
                args=(deal(strategy, batch),),
            )

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(20):
        mse(twin, batch).backward()
    assert_close(gradients(model), gradients(twin), "four threads")


@for_changes
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
            (model, optimizer), _ = built(strategy, mlp, adam)
            for k in range(5):
                strategy.run(
                    functools.partial(step, model, optimizer),
                    args=(deal(strategy, data(7, seed=k)),),
                )
            models.append(parameters(model))
        assert all(
            torch.equal(models[0][name], models[1][name]) for name in models[0]
        ), f"{n} replicas"
