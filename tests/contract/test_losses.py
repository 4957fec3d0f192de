"""torchstrategy.nn's losses: the gradient of the whole batch.

It is, whatever rows count and however gradients become one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchstrategy
from conditions import for_changes
from problems import (
    assert_close,
    built,
    close,
    context,
    deal,
    gradients,
    parameters,
    replica_id,
    where_it_is,
)
from topologies import TOPOLOGIES, central, compute_devices
from torchstrategy import ReduceOp, RunOptions
from torchstrategy.nn import compute_average_loss, scale_regularization_loss
from torchstrategy.testing import count_traffic

STRATEGIES = {replicas: central(replicas) for replicas in range(1, 5)}
REDUCTIONS = [ReduceOp.MEAN, ReduceOp.SUM]
quickly = settings(max_examples=40, deadline=None, derandomize=True, database=None)
Losses = Callable[[nn.Module, Any], torch.Tensor]


def batch_of(rows: int, *tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """Inputs and targets: of rows, or of rows of tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows, *tokens)
    return [
        torch.randn(*size, n, generator=generator, dtype=torch.float64) for n in (3, 2)
    ]


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of each row, or of each token."""
    return (model(batch[0]) - batch[1]).square().sum(-1)


def reduced(op: ReduceOp) -> RunOptions:
    return RunOptions(gradient_reduction=op)


@functools.cache
def models(strategy: torchstrategy.Strategy) -> tuple[nn.Module, nn.Module]:
    """A model of a strategy, and an equal one that no strategy knows."""
    (model, _), (twin, _) = built(
        strategy, lambda: nn.Linear(3, 2, dtype=torch.float64), None
    )
    return model, twin


def check(
    strategy: torchstrategy.Strategy,
    batch: Any,
    step: Losses,
    plain: Losses,
    options: RunOptions | None = None,
) -> None:
    """The gradient of `step` has to be that of `plain`.

    `step` is the loss of a replica's rows, `plain` that of the whole batch.
    """
    model, twin = models(strategy)
    for m in (model, twin):
        m.zero_grad()
    strategy.run(
        lambda b: step(model, b).backward(),
        args=(deal(strategy, batch),),
        options=options,
    )
    plain(twin, where_it_is(twin, batch)).backward()
    assert_close(gradients(model), gradients(twin), "gradient", 1e-12, 1e-14)


# The gradient of the whole batch


class Case(NamedTuple):
    tokens: tuple[int, ...]  # in a row
    weights: Callable[[int], Any]  # of so many rows
    # What is divided by, of so many rows and these weights.
    total: Callable[[int, Any], Any]


def some(*size: int) -> torch.Tensor:
    return (
        torch.rand(
            *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        + 0.1
    )


def rows_of(rows: int, weights: Any) -> int:
    return rows


def sum_of(rows: int, weights: Any) -> Any:
    return weights.sum()


CASES = {
    "rows": Case((), lambda rows: None, rows_of),
    "weights": Case((), lambda rows: some(rows), sum_of),
    "weights in a column": Case((), lambda rows: some(rows, 1), sum_of),
    "ignored rows": Case((), lambda rows: torch.arange(rows) % 3 != 1, sum_of),
    "counts": Case((), lambda rows: torch.arange(rows), sum_of),
    "half weights": Case((), lambda rows: (torch.arange(rows) / 4).half(), sum_of),
    "only the last row": Case((), lambda rows: torch.arange(rows) == rows - 1, sum_of),
    "a number": Case((), lambda rows: 0.3, rows_of),
    "tokens": Case((5,), lambda rows: None, rows_of),
    "token mask": Case((5,), lambda rows: some(rows, 5) > 0.5, sum_of),
    "token weights": Case((5,), lambda rows: some(rows, 5), sum_of),
    "row weights of tokens": Case((5,), lambda rows: some(rows), sum_of),
    "column weights of tokens": Case((5,), lambda rows: some(rows, 1), sum_of),
    "row weights of square tokens": Case((7,), lambda rows: some(rows), sum_of),
    "weights of positions": Case(
        (5,), lambda rows: some(1, 5), lambda rows, weights: rows * weights.sum()
    ),
    "token weights of pixels": Case((2, 3), lambda rows: some(rows, 2), sum_of),
}


def multiplied(losses: torch.Tensor, weights: Any) -> torch.Tensor:
    """As written by hand: a weight for each row is one for all that is in the row."""
    if not isinstance(weights, torch.Tensor):
        return losses * (1 if weights is None else weights)
    weights = weights.to(losses).reshape(weights.shape[: losses.dim()])
    return losses * weights.reshape(
        weights.shape + (1,) * (losses.dim() - weights.dim())
    )


def check_case(
    strategy: torchstrategy.Strategy,
    case: Case,
    rows: int,
    options: RunOptions | None = None,
) -> None:
    weights = case.weights(rows)
    dealt = isinstance(weights, torch.Tensor) and len(weights) == rows
    batch = [*batch_of(rows, *case.tokens), *([weights] if dealt else [])]

    def weights_of(b: Any) -> Any:
        return (
            b[2]
            if dealt
            else weights.to(b[0].device)
            if isinstance(weights, torch.Tensor)
            else weights
        )

    def step(model: nn.Module, b: Any) -> torch.Tensor:
        return compute_average_loss(squares(model, b), weights_of(b))

    def plain(model: nn.Module, b: Any) -> torch.Tensor:
        return multiplied(squares(model, b), weights_of(b)).sum() / case.total(
            rows, weights
        )

    check(strategy, batch, step, plain, options)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_whole_batch(
    make: Callable[[int], torchstrategy.Strategy], name: str, reduction: ReduceOp
) -> None:
    check_case(make(3), CASES[name], 7, reduced(reduction))


@pytest.mark.parametrize("name", ["rows", "weights", "token mask"])
def test_the_gradient_is_that_of_the_whole_batch_under_every_strategy(
    strategy: torchstrategy.Strategy, name: str
) -> None:
    check_case(strategy, CASES[name], 7)


@for_changes
@quickly
@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.integers(1, 9),
    st.sampled_from([*CASES.values()]),
    st.sampled_from(REDUCTIONS),
    st.booleans(),
    st.none() | st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_no_rows_shares_or_options_change_the_gradient(
    replicas: int,
    rows: int,
    case: Case,
    reduction: ReduceOp,
    empty: bool,
    examples: list[int] | None,
) -> None:
    if examples is not None:
        # A replica without rows counts for nothing in fact.
        dealt = -(-rows // replicas)
        examples = [
            count if r * dealt < rows else 0
            for r, count in enumerate(examples[:replicas])
        ]
    options = RunOptions(
        gradient_reduction=reduction, run_empty_replicas=empty, examples=examples
    )
    if case.tokens == (7,) and rows != 7:
        rows = 7  # what is square only then
        options = reduced(reduction)
    if case.weights(rows) is not None and not case.total(rows, case.weights(rows)):
        return  # nothing counts: tested below
    check_case(STRATEGIES[replicas], case, rows, options)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_replicas_may_ignore_different_numbers_of_targets(reduction: ReduceOp) -> None:
    targets = torch.tensor([0, 1, -100, -100, -100, 1, 0])
    batch = [batch_of(7)[0], targets]

    def step(model: nn.Module, b: Any) -> torch.Tensor:
        return compute_average_loss(
            F.cross_entropy(model(b[0]), b[1], reduction="none"), b[1] != -100
        )

    check(
        STRATEGIES[3],
        batch,
        step,
        lambda model, b: F.cross_entropy(model(b[0]), b[1]),
        reduced(reduction),
    )


def test_the_reduction_that_a_strategy_was_made_with_counts() -> None:
    device = compute_devices(1)[0]
    strategy = torchstrategy.CentralStorageStrategy(
        [device] * 3, device, gradient_reduction="sum"
    )
    check_case(strategy, CASES["weights"], 7)
    check_case(strategy, CASES["weights"], 7, reduced(ReduceOp.MEAN))


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_weights_that_are_learned_have_the_gradient_of_the_quotient(
    reduction: ReduceOp,
) -> None:
    def learned(model: nn.Module, b: Any) -> torch.Tensor:
        return model(b[0])[:, 0].sigmoid()

    def plain(model: nn.Module, b: Any) -> torch.Tensor:
        return (learned(model, b) * squares(model, b)).sum() / learned(model, b).sum()

    def step(model: nn.Module, b: Any) -> torch.Tensor:
        return compute_average_loss(squares(model, b), learned(model, b))

    check(STRATEGIES[3], batch_of(7), step, plain, reduced(reduction))


# The number to divide by


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("batches", [[7, 2], [4, 1, 6]], ids=str)
def test_accumulated_gradients_are_those_of_one_large_batch(
    batches: list[int], reduction: ReduceOp
) -> None:
    """They accumulate in steps, and over runs."""
    strategy = STRATEGIES[3]
    model, twin = models(strategy)
    parts = [[*batch_of(rows, 5), some(rows, 5) > 0.4] for rows in batches]
    tokens = sum(part[2].sum() for part in parts)

    def step(b: Any) -> None:
        for piece in zip(*(part.split(2) for part in b), strict=True):
            compute_average_loss(
                squares(model, piece), piece[2], global_batch_size=tokens
            ).backward()

    model.zero_grad()
    for part in parts:
        strategy.run(step, args=(deal(strategy, part),), options=reduced(reduction))
    whole = where_it_is(
        twin, [torch.cat(column) for column in zip(*parts, strict=True)]
    )
    twin.zero_grad()
    squares(twin, whole)[whole[2]].mean().backward()
    assert_close(gradients(model), gradients(twin), "gradient")


def test_the_batch_size_may_be_any_integer() -> None:
    losses = torch.tensor([1.0, 2.0, 4.0])
    for size in (
        14,
        torch.tensor(14),
        torch.tensor(14).to(compute_devices(1)[0]),
        torch.arange(15).numpy()[-1],
    ):
        assert compute_average_loss(losses, global_batch_size=size) == 0.5


@pytest.mark.parametrize(("size", "meetings"), [(None, 1), (7, 0)])
def test_replicas_meet_only_where_the_total_is_asked_for(
    size: int | None, meetings: int
) -> None:
    strategy = STRATEGIES[3]
    with count_traffic() as traffic:
        strategy.run(
            lambda: compute_average_loss(torch.ones(2), global_batch_size=size)
        )
    assert traffic.meetings.total() == meetings


def test_a_lone_replica_meets_nobody() -> None:
    for name in ("default", "one_device", "central_1", "copies_1"):
        with count_traffic() as traffic:
            TOPOLOGIES[name]().run(lambda: compute_average_loss(torch.ones(2)))
        assert not traffic.meetings


def test_replicas_that_do_not_all_ask_for_the_total_are_told_so() -> None:
    def step() -> None:
        compute_average_loss(
            torch.ones(2), global_batch_size=2 if replica_id() else None
        )

    with pytest.raises(
        RuntimeError, match="replica 0 is at compute_average_loss, replica 1 has ended"
    ):
        STRATEGIES[2].run(step)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize(
    "weights",
    [torch.zeros(7), torch.zeros(7, dtype=torch.bool)],
    ids=["numbers", "bools"],
)
def test_where_nothing_counts_loss_and_gradient_are_zero(
    weights: torch.Tensor, reduction: ReduceOp
) -> None:
    strategy = STRATEGIES[3]
    model, _ = models(strategy)
    model.zero_grad()

    def step(b: Any) -> Any:
        loss = compute_average_loss(squares(model, b), b[2])
        loss.backward()
        return loss.detach()

    losses = strategy.run(
        step,
        args=(deal(strategy, [*batch_of(7), weights]),),
        options=reduced(reduction),
    )
    assert [loss.item() for loss in strategy.experimental_local_results(losses)] == [
        0,
        0,
        0,
    ]
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_a_batch_size_of_zero_is_a_loss_of_nothing() -> None:
    losses = torch.ones(3, requires_grad=True)
    loss = compute_average_loss(losses, global_batch_size=0)
    loss.backward()
    assert loss.item() == 0
    assert losses.grad.tolist() == [0, 0, 0]
    assert compute_average_loss(torch.ones(0)).item() == 0


# Replicas whose gradient is dropped


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_a_replica_that_was_made_to_run_without_rows_has_a_finite_loss(
    reduction: ReduceOp,
) -> None:
    strategy = STRATEGIES[4]
    options = RunOptions(run_empty_replicas=True, gradient_reduction=reduction)
    batch = [*batch_of(2), some(2)]
    model, _ = models(strategy)
    losses = strategy.run(
        lambda b: compute_average_loss(squares(model, b), b[2]).detach(),
        args=(deal(strategy, batch),),
        options=options,
    )
    assert len(losses.values) == 4
    assert all(loss.isfinite() for loss in losses.values)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_the_rows_of_a_replica_whose_gradient_is_dropped_do_not_count(
    reduction: ReduceOp,
) -> None:
    batch = [*batch_of(6), some(6)]
    batch[2][2:4] = torch.nan  # not even as zero times themselves

    def step(model: nn.Module, b: Any) -> torch.Tensor:
        return compute_average_loss(squares(model, b), b[2])

    def plain(model: nn.Module, b: Any) -> torch.Tensor:
        x, y, w = (torch.cat([t[:2], t[4:]]) for t in b)
        return (w * squares(model, [x, y])).sum() / w.sum()

    check(
        STRATEGIES[3],
        batch,
        step,
        plain,
        RunOptions(examples=[5, 0, 1], gradient_reduction=reduction),
    )


# What it returns


def test_outside_of_replicas_it_is_the_weighted_mean() -> None:
    losses, weights = some(4, 3), some(4)
    assert compute_average_loss(losses).item() == pytest.approx(losses.sum().item() / 4)
    wanted = (losses * weights.unsqueeze(1)).sum() / weights.sum()
    assert compute_average_loss(losses, weights).item() == pytest.approx(wanted.item())
    assert compute_average_loss(losses, weights.tolist(), 5).item() == pytest.approx(
        (wanted * weights.sum() / 5).item()
    )
    assert compute_average_loss(losses, 2).item() == pytest.approx(
        2 * losses.sum().item() / 4
    )


def test_the_loss_to_report_is_the_reduction_of_losses_and_weights() -> None:
    for strategy in STRATEGIES.values():
        model, twin = models(strategy)
        batch = [*batch_of(7), some(7)]

        def step(b: Any, model: nn.Module = model) -> Any:
            losses = squares(model, b)
            return (
                (losses * b[2]).detach(),
                b[2],
                compute_average_loss(losses, b[2]).detach(),
            )

        dealt = deal(strategy, batch)
        losses, weights, shares = strategy.run(
            step, args=(dealt,), options=reduced(ReduceOp.SUM)
        )
        x, y, w = where_it_is(twin, batch)
        wanted = (squares(twin, [x, y]) * w).sum() / w.sum()
        close(
            strategy.reduce("sum", losses, axis=0)
            / strategy.reduce("sum", weights, axis=0),
            wanted,
        )
        close(strategy.reduce("sum", shares, axis=None), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_losses_of_half_precision_are_added_up_in_single_precision(
    dtype: torch.dtype,
) -> None:
    # Their sum has no number in float16.
    losses = torch.full((4096,), 60.0, dtype=dtype, requires_grad=True)
    loss = compute_average_loss(losses, torch.ones(4096, dtype=dtype))
    loss.backward()
    assert loss.dtype == losses.grad.dtype == dtype
    assert loss.item() == 60
    assert losses.grad.unique().item() == 2**-12


def test_losses_that_are_counts_have_a_mean() -> None:
    assert compute_average_loss(torch.tensor([1, 2])).item() == 1.5
    assert compute_average_loss(torch.tensor([True, False]), [3, 1]).item() == 0.75


def test_an_optimizer_with_a_closure_is_given_the_loss_of_the_whole_batch() -> None:
    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            model.parameters(), max_iter=4, line_search_fn="strong_wolfe"
        )

    (model, ours), (twin, plain) = built(
        STRATEGIES[3], lambda: nn.Linear(3, 2, dtype=torch.float64), lbfgs
    )
    batch = [*batch_of(7), some(7)]

    def step(m: nn.Module, o: Any, b: Any) -> None:
        def closure() -> torch.Tensor:
            o.zero_grad()
            loss = compute_average_loss(squares(m, b), b[2])
            loss.backward()
            return loss

        o.step(closure)

    STRATEGIES[3].run(
        lambda b: step(model, ours, b), args=(deal(STRATEGIES[3], batch),)
    )
    step(twin, plain, where_it_is(twin, batch))
    assert_close(parameters(model), parameters(twin), "parameters", 1e-9)


@for_changes
@pytest.mark.slow  # the first to import the compiler
# Which the compiler asks for.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_loss_is_the_same_and_is_compiled_for_all_runs() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @functools.partial(torch.compile, backend=backend, dynamic=True)
    def compiled(
        losses: torch.Tensor, weights: torch.Tensor, decay: torch.Tensor
    ) -> torch.Tensor:
        mean = compute_average_loss(losses * 2, weights) / 2
        return mean + scale_regularization_loss(decay.square() * 3)

    def step(model: nn.Module, b: Any) -> torch.Tensor:
        return compiled(squares(model, b), b[2], model.weight)

    def plain(model: nn.Module, b: Any) -> torch.Tensor:
        return (b[2] * squares(model, b)).sum() / b[
            2
        ].sum() + 3 * model.weight.square().sum()

    counts = []
    for k in range(4):
        check(STRATEGIES[3], [*batch_of(7 + k), some(7 + k)], step, plain)
        counts.append(len(graphs))
    assert counts[0] > 0
    compiled_from = [
        node.meta.get("stack_trace", "")
        for graph in graphs
        for node in graph.graph.nodes
    ]
    assert not any(torchstrategy.nn.__path__[0] in where for where in compiled_from)
    # A size of 1 and a size of more are two kinds to the compiler.
    assert counts[1] == counts[-1]


# Regularisation


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 7])
def test_a_regularization_loss_counts_once(
    strategy: torchstrategy.Strategy, rows: int, reduction: ReduceOp
) -> None:
    def decays(model: nn.Module) -> torch.Tensor:
        return torch.stack([p.square().sum() for p in model.parameters()])

    def step(model: nn.Module, b: Any) -> torch.Tensor:
        return compute_average_loss(
            squares(model, b)
        ) + 0.1 * scale_regularization_loss(decays(model))

    def plain(model: nn.Module, b: Any) -> torch.Tensor:
        return squares(model, b).mean() + 0.1 * decays(model).sum()

    check(strategy, batch_of(rows), step, plain, reduced(reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("examples", [[3, 1, 0], [1, 1, 1]], ids=str)
def test_a_regularization_loss_counts_once_whatever_replicas_count(
    examples: list[int], reduction: ReduceOp
) -> None:
    model, _ = models(STRATEGIES[3])
    model.zero_grad()
    options = RunOptions(examples=examples, gradient_reduction=reduction)
    STRATEGIES[3].run(
        lambda: scale_regularization_loss(model.weight.abs()).backward(),
        options=options,
    )
    close(model.weight.grad, model.weight.detach().sign(), rtol=1e-12, atol=0)


def test_a_regularization_loss_may_be_a_number() -> None:
    assert scale_regularization_loss(3).item() == 3
    assert scale_regularization_loss(torch.tensor([1.0, 2.0])).item() == 3
    in_replicas = STRATEGIES[2].run(
        lambda: scale_regularization_loss(3.0), options=reduced(ReduceOp.SUM)
    )
    assert [value.item() for value in in_replicas.values] == [1.5, 1.5]


# What is refused


def test_an_average_without_a_batch_size_is_refused_in_the_cross_replica_context() -> (
    None
):
    strategy = STRATEGIES[2]
    message = (
        r"^You are calling `{}` in cross-replica context, while it was expected to be "
        r"called in replica context"
    )
    losses = torch.ones(2)
    with strategy.scope():
        with pytest.raises(RuntimeError, match=message.format("compute_average_loss")):
            compute_average_loss(losses)
        with pytest.raises(
            RuntimeError, match=message.format("scale_regularization_loss")
        ):
            scale_regularization_loss(1.0)
        # Nobody has to be asked.
        assert compute_average_loss(losses, global_batch_size=4) == 0.5
    with pytest.raises(RuntimeError, match=message.format("compute_average_loss")):
        strategy.run(
            lambda: context().merge_call(lambda strategy: compute_average_loss(losses))
        )
    with torchstrategy.get_strategy().scope():
        assert compute_average_loss(losses) == scale_regularization_loss(1.0) == 1


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a scalar": (
        lambda: compute_average_loss(torch.tensor(1.0)),
        ValueError,
        r"is a scalar.*reduction=\"none\"",
    ),
    "no tensor": (
        lambda: compute_average_loss([1.0]),
        TypeError,
        r"^per_example_loss is a tensor of losses; got \[1\.0\], a list",
    ),
    "complex losses": (
        lambda: compute_average_loss(torch.ones(2) * 1j),
        TypeError,
        r"a loss is a real number",
    ),
    "complex weights": (
        lambda: compute_average_loss(torch.ones(2), 1j),
        TypeError,
        r"a weight is a real number",
    ),
    "weights that are text": (
        lambda: compute_average_loss(torch.ones(2), "ab"),
        TypeError,
        r"^sample_weight .*'ab'",
    ),
    "weights of other rows": (
        lambda: compute_average_loss(torch.ones(2), torch.ones(3)),
        ValueError,
        (
            r"^sample_weight of shape \(3,\) cannot be broadcast to per_example_loss "
            r"of shape \(2,\)\."
        ),
    ),
    "weights of tokens for rows": (
        lambda: compute_average_loss(torch.ones(2), torch.ones(2, 5)),
        ValueError,
        r"shape \(2, 5\) cannot be broadcast",
    ),
    "weights of positions without rows": (
        lambda: compute_average_loss(torch.ones(2, 5), torch.ones(5)),
        ValueError,
        r"shape \(5,\) cannot be broadcast",
    ),
    "losses that would be broadcast": (
        lambda: compute_average_loss(torch.ones(2, 1), torch.ones(2, 5)),
        ValueError,
        r"shape \(2, 5\) cannot be broadcast",
    ),
    **{
        f"a size of {size!r}": (
            lambda size=size: compute_average_loss(
                torch.ones(2), global_batch_size=size
            ),
            TypeError,
            (
                r"^global_batch_size is an integer, or a tensor that holds one; got "
                r".*divide the weights by it"
            ),
        )
        for size in (
            2.0,
            True,
            "2",
            [2],
            torch.tensor(2.0),
            torch.tensor([2]),
            torch.tensor(True),
        )
    },
    "a negative size": (
        lambda: compute_average_loss(torch.ones(2), global_batch_size=-1),
        ValueError,
        r"^global_batch_size=-1 counts rows",
    ),
    "no regularization": (
        lambda: scale_regularization_loss(None),
        TypeError,
        r"got None",
    ),
    "complex regularization": (
        lambda: scale_regularization_loss(torch.ones(1) * 1j),
        TypeError,
        r"real numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    for refused in (call, lambda: STRATEGIES[2].run(call)):
        with pytest.raises(error, match=message):
            refused()
