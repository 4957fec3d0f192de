"""Gradients through all_reduce and all_gather, and outside, reduce and gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import torchstrategy
from components import SINGLE, TWO, dealt
from problems import close, context, replica_id
from topologies import TOPOLOGIES, central, central_with_copies
from torchstrategy import RunOptions, Strategy

DEFAULT = torchstrategy.get_strategy()


# Gradients through collectives, of each replica's own input


def leaf(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def gradients(
    loss_of: Callable[[Any, Any], torch.Tensor],
    inputs: Sequence[Any],
    options: RunOptions | None = None,
    strategy: Strategy = TWO,
) -> list[Any]:
    """In each replica, the gradient of `loss_of(x, coefficient)` by its own x."""

    def step() -> torch.Tensor:
        x = leaf(inputs[replica_id()])
        (gradient,) = torch.autograd.grad(loss_of(x, replica_id()), x)
        return gradient

    return [
        g.tolist()
        for g in strategy.experimental_local_results(
            strategy.run(step, options=options)
        )
    ]


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", [4.0, 4.0]), ("mean", [2.0, 2.0])]
)
def test_the_gradient_of_an_all_reduce_is_an_all_reduce_of_gradients(
    op: str, expected: list[float]
) -> None:
    coefficients = [1.0, 3.0]
    assert (
        gradients(
            lambda x, r: coefficients[r] * context().all_reduce(op, x), [1.0, 2.0]
        )
        == expected
    )


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", [4.0, 8.0]), ("mean", [2.0, 4.0])]
)
def test_gradients_go_on_below_an_all_reduce(op: str, expected: list[float]) -> None:
    assert (
        gradients(lambda x, r: context().all_reduce(op, x * x), [1.0, 2.0]) == expected
    )


def test_the_gradient_of_an_all_gather_is_the_replicas_own_slice() -> None:
    def loss_of(x: torch.Tensor, r: int) -> torch.Tensor:
        return context().all_gather(x, axis=0).square().sum()

    assert gradients(loss_of, [[1.0], [2.0, 3.0]]) == [[4.0], [8.0, 12.0]]


def test_the_gradient_of_an_all_gather_along_the_last_axis_is_the_own_slice() -> None:
    def loss_of(x: torch.Tensor, r: int) -> torch.Tensor:
        gathered = context().all_gather(x, axis=-1)
        return (gathered * torch.arange(3.0)).sum() * (r + 1)

    assert gradients(loss_of, [[[1.0], [1.0]], [[2.0, 3.0], [2.0, 3.0]]]) == [
        [[0.0]] * 2,
        [[3.0, 6.0]] * 2,
    ]


def test_with_one_replica_gradients_are_ordinary() -> None:
    for topology in (*SINGLE, "central_1", "copies_1"):
        strategy = TOPOLOGIES[topology]()
        for op in ("sum", "mean"):
            assert gradients(
                lambda x, r, op=op: context().all_reduce(op, x * x),
                [3.0],
                strategy=strategy,
            ) == [6.0]
        assert gradients(
            lambda x, r: context().all_gather(x, 0).square().sum(),
            [[3.0]],
            strategy=strategy,
        ) == [[6.0]]


def test_gradients_of_integers_among_the_values_are_not_asked_for() -> None:
    def loss_of(x: torch.Tensor, r: int) -> torch.Tensor:
        total = context().all_reduce("sum", {"n": torch.tensor([1, 2]), "x": x})
        assert total["n"].dtype is torch.int64
        assert not total["n"].requires_grad
        return total["x"]

    assert gradients(loss_of, [1.0, 2.0]) == [2.0, 2.0]


def test_a_value_that_the_loss_does_not_use_has_a_gradient_of_zero() -> None:
    def loss_of(x: torch.Tensor, r: int) -> torch.Tensor:
        used, _ = context().all_reduce("sum", (x, x * 100))
        return used

    assert gradients(loss_of, [1.0, 2.0]) == [2.0, 2.0]


def test_the_gradient_reaches_the_one_replica_whose_input_requires_it(
    several: Strategy,
) -> None:
    last = several.num_replicas_in_sync - 1

    def step() -> Any:
        x = leaf([1.0, 2.0])
        total = context().all_reduce("sum", x if replica_id() == last else x.detach())
        assert total.requires_grad
        (total.sum() * (replica_id() + 1)).backward()
        return x.grad if x.grad is not None else "none"

    *others, own = several.experimental_local_results(several.run(step))
    n = several.num_replicas_in_sync
    assert own.tolist() == [n * (n + 1) / 2] * 2
    assert others == ["none"] * last


def test_where_no_input_requires_grad_no_output_does(several: Strategy) -> None:
    assert (
        several.run(lambda: context().all_reduce("sum", torch.ones(1)).requires_grad)
        is False
    )
    assert (
        several.run(lambda: context().all_gather(torch.ones(1), axis=0).requires_grad)
        is False
    )


def test_without_grad_mode_no_output_requires_grad(several: Strategy) -> None:
    def step() -> bool:
        with torch.no_grad():
            return context().all_reduce("sum", leaf(1.0)).requires_grad

    assert several.run(step) is False
    with torch.no_grad():
        assert (
            several.run(lambda: context().all_reduce("sum", leaf(1.0)).requires_grad)
            is False
        )


def test_a_backward_that_not_every_replica_runs_is_an_error() -> None:
    def step() -> None:
        total = context().all_reduce("sum", leaf(1.0))
        if replica_id() == 0:
            total.backward()

    with pytest.raises(
        RuntimeError,
        match=(
            r"^The replicas synchronized a different number of times,? or in a "
            r"different order: "
        ),
    ):
        TWO.run(step)


# The gradient of the whole step: the sum over replicas of share times loss, in one
# graph


SHARES: dict[str, tuple[RunOptions, list[float]]] = {
    "equal": (RunOptions(), [0.5, 0.5]),
    "3:1": (RunOptions(examples=[3, 1]), [0.75, 0.25]),
    "1:4": (RunOptions(examples=[1, 4]), [0.2, 0.8]),
    "SUM": (RunOptions(gradient_reduction="sum"), [1.0, 1.0]),
    "SUM of 3:1": (RunOptions(gradient_reduction="sum", examples=[3, 1]), [1.0, 1.0]),
}
COLLECTIVES: dict[
    str,
    tuple[
        Callable[[torch.Tensor], torch.Tensor],
        Callable[[list[torch.Tensor]], torch.Tensor],
    ],
] = {
    "sum": (lambda h: context().all_reduce("sum", h), lambda hs: hs[0] + hs[1]),
    "mean": (lambda h: context().all_reduce("mean", h), lambda hs: (hs[0] + hs[1]) / 2),
    "gather": (lambda h: context().all_gather(h, axis=0), torch.cat),
}
INPUTS = [
    torch.tensor([[1.0, 2.0]], dtype=torch.float64),
    torch.tensor([[3.0, -1.0]], dtype=torch.float64),
]
COEFFICIENTS = [1.5, -0.7]


def inputs_of(model: torch.nn.Module, r: int) -> torch.Tensor:
    """The rows of replica r, where the model is."""
    return INPUTS[r].to(model.weight.device)


def local_loss(model: torch.nn.Module, r: int, hidden: torch.Tensor) -> torch.Tensor:
    """The loss of replica r: its own rows, and what all replicas know."""
    return (
        COEFFICIENTS[r] * (hidden**2).sum()
        + (model(inputs_of(model, r)) * COEFFICIENTS[r]).sum()
    )


def new_model(strategy: Strategy) -> torch.nn.Linear:
    torch.manual_seed(1)
    with strategy.scope():
        return torch.nn.Linear(2, 1, dtype=torch.float64)


def in_one_graph(
    weights: Sequence[float],
    combine: Callable[[list[torch.Tensor]], torch.Tensor],
    learns: Any,
) -> list[Any]:
    """The gradients by the parameters of sum_i w_i L_i, by plain autograd."""
    model = new_model(DEFAULT)
    hiddens = [torch.tanh(model(x)) for x in INPUTS]
    hidden = combine([h if r in learns else h.detach() for r, h in enumerate(hiddens)])
    loss = sum(w * local_loss(model, r, hidden) for r, w in enumerate(weights))
    return list(torch.autograd.grad(loss, list(model.parameters())))


def check_against_one_graph(
    strategy: Strategy, shares: str, collective: str, learns: Sequence[int] = (0, 1)
) -> None:
    options, weights = SHARES[shares]
    meet, combine = COLLECTIVES[collective]
    model = new_model(strategy)

    def step() -> None:
        r = replica_id()
        hidden = torch.tanh(model(inputs_of(model, r)))
        local_loss(
            model, r, meet(hidden if r in learns else hidden.detach())
        ).backward()

    strategy.run(step, options=options)
    expected = in_one_graph(weights, combine, learns)
    close([p.grad for p in model.parameters()], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "learns", [(0, 1), (0,), (1,)], ids=["both", "replica 0", "replica 1"]
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shares", SHARES)
def test_the_gradient_of_a_step_with_a_collective_is_that_of_one_graph(
    shares: str, collective: str, learns: Sequence[int]
) -> None:
    check_against_one_graph(central(2), shares, collective, learns)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_gradient_is_that_of_one_graph_also_where_parameters_are_copied(
    collective: str,
) -> None:
    check_against_one_graph(central_with_copies(2), "3:1", collective)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_gradient_is_that_of_one_graph_also_where_gradients_are_added_up(
    collective: str,
) -> None:
    strategy = central(2, gradient_reduction="sum")
    model = new_model(strategy)
    meet, combine = COLLECTIVES[collective]
    hidden = lambda: meet(torch.tanh(model(inputs_of(model, replica_id()))))  # noqa: E731
    strategy.run(lambda: local_loss(model, replica_id(), hidden()).backward())
    expected = in_one_graph([1.0, 1.0], combine, (0, 1))
    close([p.grad for p in model.parameters()], expected, rtol=1e-12, atol=1e-12)


def test_the_rows_that_were_dealt_are_the_shares() -> None:
    # Two of them for replica 0, one for replica 1.
    rows = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    coefficients = torch.tensor([[1.0], [1.0], [5.0]], dtype=torch.float64)

    def loss_of(
        model: torch.nn.Module, x: torch.Tensor, c: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        return (c * (model(x) - total / 3) ** 2).mean()

    with TWO.scope():
        model = torch.nn.Linear(1, 1, dtype=torch.float64)

    def step(x: torch.Tensor, c: torch.Tensor) -> None:
        loss_of(model, x, c, context().all_reduce("sum", model(x).sum())).backward()

    TWO.run(step, args=(dealt(TWO, rows), dealt(TWO, coefficients)))
    rows, coefficients = (
        rows.to(model.weight.device),
        coefficients.to(model.weight.device),
    )
    total = model(rows).sum()
    expected = torch.autograd.grad(
        loss_of(model, rows, coefficients, total), list(model.parameters())
    )
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], list(expected), rtol=1e-12, atol=1e-12
    )


def test_replicas_that_sit_out_have_no_part_in_the_gradient() -> None:
    strategy = central(3)
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    rows = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    strategy.run(
        lambda x: (context().all_reduce("mean", model(x).mean()) ** 2).backward(),
        args=(dealt(strategy, rows),),
    )
    expected = torch.autograd.grad(
        model(rows.to(model.weight.device)).mean() ** 2, model.weight
    )
    torch.testing.assert_close(
        [model.weight.grad], list(expected), rtol=1e-12, atol=1e-12
    )


def test_a_replica_of_no_examples_has_no_gradient_even_if_it_is_nan() -> None:
    with TWO.scope():
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)

    def step() -> None:
        y = model(torch.ones(1, 1, dtype=torch.float64))
        total = context().all_reduce(
            "sum", y.sum().detach() if replica_id() else y.sum()
        )
        (total * (float("nan") if replica_id() else 1.0)).backward()

    TWO.run(step, options=RunOptions(examples=[2, 0]))
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 1


@pytest.mark.parametrize("shares", ["equal", "3:1", "SUM"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_gradients_of_gradients_are_those_of_one_graph(
    shares: str, collective: str
) -> None:
    # In replica i, a gradient is that of the whole step over the share w_i: also one
    # that a loss is made of.
    options, weights = SHARES[shares]
    meet, combine = COLLECTIVES[collective]
    values = [[1.0, -0.5], [2.0, 0.3]]

    def step() -> Any:
        x, c = leaf(values[replica_id()]), COEFFICIENTS[replica_id()]
        (first,) = torch.autograd.grad(
            (c * meet(x**2) ** 2).sum(), x, create_graph=True
        )
        (second,) = torch.autograd.grad((first**2).sum() + first.sum(), x)
        return first.detach(), second

    xs = [leaf(value) for value in values]
    hidden = combine([x**2 for x in xs])
    loss = sum(
        w * (c * hidden**2).sum() for w, c in zip(weights, COEFFICIENTS, strict=True)
    )
    first = [
        g / w
        for g, w in zip(
            torch.autograd.grad(loss, xs, create_graph=True), weights, strict=True
        )
    ]
    penalty = sum(
        w * ((g**2).sum() + g.sum()) for w, g in zip(weights, first, strict=True)
    )
    second = [
        g / w for g, w in zip(torch.autograd.grad(penalty, xs), weights, strict=True)
    ]
    results = TWO.experimental_local_results(TWO.run(step, options=options))
    for r, (mine_first, mine_second) in enumerate(results):
        close(mine_first, first[r].detach(), rtol=1e-12, atol=1e-12)
        close(mine_second, second[r], rtol=1e-12, atol=1e-12)


def test_a_gradient_penalty_trains_the_parameters_as_in_one_graph() -> None:
    model = new_model(TWO)

    def loss_of(
        model: torch.nn.Module,
        x: torch.Tensor,
        meet: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        return meet((slope**2).sum()) ** 2

    def step() -> None:
        loss_of(
            model,
            inputs_of(model, replica_id()),
            lambda penalty: context().all_reduce("sum", penalty),
        ).backward()

    TWO.run(step, options=RunOptions(examples=[3, 1]))
    plain = new_model(DEFAULT)
    penalties = [loss_of(plain, x, lambda penalty: penalty).sqrt() for x in INPUTS]
    expected = torch.autograd.grad(sum(penalties) ** 2, list(plain.parameters()))
    close([p.grad for p in model.parameters()], list(expected), rtol=1e-9, atol=1e-12)


# Gradients through reduce and gather, outside of the replicas


def test_gradients_flow_through_what_run_returned() -> None:
    xs = [leaf([1.0, 2.0]), leaf([3.0])]
    value = TWO.run(lambda: xs[replica_id()] ** 2)
    TWO.reduce("mean", value, axis=0).backward()
    assert [x.grad.tolist() for x in xs] == [[2 / 3, 4 / 3], [2.0]]
    gathered = TWO.gather(TWO.run(lambda: xs[replica_id()] ** 2), axis=0)
    grads = torch.autograd.grad(
        (gathered.cpu() * torch.tensor([1.0, 10.0, 100.0])).sum(), xs
    )
    assert [g.tolist() for g in grads] == [[2, 40], [600]]


def test_a_backward_after_the_run_reaches_the_users_parameters(
    strategy: Strategy,
) -> None:
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
    losses = strategy.run(
        lambda: model(torch.full((2, 1), replica_id() + 1.0)).squeeze(1)
    )
    strategy.reduce("mean", losses, axis=0).backward()
    n = strategy.num_replicas_in_sync
    close(model.weight.grad, torch.tensor([[(n + 1) / 2]]))


def test_what_a_replica_gets_is_on_the_device_of_the_replica(strategy):
    """A lone replica on an accelerator got it on the CPU.

    A loss, say, and then a gradient on another device.
    """

    def step(x: torch.Tensor) -> list[torch.device]:
        here = torchstrategy.get_replica_context()
        x = x.clone().requires_grad_()
        parts = [
            here.all_reduce("sum", x.sum()),
            here.all_reduce("mean", x.sum()),
            here.all_gather(x, axis=0),
        ]
        parts += [torchstrategy.nn.compute_average_loss(x)]
        sum(part.sum() for part in parts).backward()
        return [part.device == x.device for part in (*parts, x.grad)]

    for batch in strategy.experimental_distribute_dataset([torch.ones(8)]):
        assert all(
            all(strategy.experimental_local_results(same))
            for same in strategy.run(step, args=(batch,))
        )
