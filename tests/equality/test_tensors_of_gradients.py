"""A user holds the tensors of gradients, or the buffer of which they are views.

A run writes where backward would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from problems import (
    assert_close,
    built,
    close,
    context,
    data,
    deal,
    gradients,
    mlp,
    mse,
    parameters,
    sgd,
)
from topologies import compute_devices


def _views(model: nn.Module) -> torch.Tensor:
    """Puts views of one buffer into `.grad`."""
    pieces = list(model.parameters())
    buffer = torch.zeros(
        sum(p.numel() for p in pieces), dtype=pieces[0].dtype, device=pieces[0].device
    )
    for p, piece in zip(pieces, buffer.split([p.numel() for p in pieces]), strict=True):
        p.grad = piece.view_as(p)
    return buffer


def _columns(model: nn.Module) -> torch.Tensor:
    """The same with views that are not contiguous: their numbers are interleaved."""
    pieces = list(model.parameters())
    most = max(p.numel() for p in pieces)
    buffer = torch.zeros(
        most, len(pieces), dtype=pieces[0].dtype, device=pieces[0].device
    )
    for i, p in enumerate(pieces):
        p.grad = buffer[: p.numel(), i].unflatten(0, p.shape)
    return buffer


def _accumulates(model: Any, optimizer: Any, batch: Any) -> None:
    mse(model, batch).backward()


def _zeroes(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    mse(model, batch).backward()


def _zeroes_each(model: Any, optimizer: Any, batch: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    mse(model, batch).backward()


def _clips(model: Any, optimizer: Any, batch: Any) -> None:
    mse(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def _clips_twice(model: Any, optimizer: Any, batch: Any) -> None:
    _clips(model, optimizer, batch)
    _clips(model, optimizer, batch)


def _updates(model: Any, optimizer: Any, batch: Any) -> None:
    mse(model, batch).backward()
    optimizer.step()
    mse(model, batch).backward()


def _updates_from_zero(model: Any, optimizer: Any, batch: Any) -> None:
    _zeroes(model, optimizer, batch)
    optimizer.step()


def _clears(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    mse(model, batch).backward()


def _clears_and_zeroes(model: Any, optimizer: Any, batch: Any) -> None:
    _clears(model, optimizer, batch)
    _zeroes(model, optimizer, batch)


def _assigns(model: Any, optimizer: Any, batch: Any) -> None:
    mse(model, batch).backward()
    for p in model.parameters():
        p.grad = p.grad * 2


def _assigns_and_zeroes(model: Any, optimizer: Any, batch: Any) -> None:
    _assigns(model, optimizer, batch)
    _zeroes(model, optimizer, batch)


def _keeps_graph(model: Any, optimizer: Any, batch: Any) -> None:
    mse(model, batch).backward(create_graph=True)


STEPS: list[Callable[..., None]] = [
    _accumulates,
    _zeroes,
    _zeroes_each,
    _clips,
    _clips_twice,
    _updates,
    _updates_from_zero,
    _clears,
    _clears_and_zeroes,
    _assigns,
    _assigns_and_zeroes,
    _keeps_graph,
]


def _stays(model: Any, optimizer: Any) -> None:
    """Nothing is done between two runs."""


def _update(model: Any, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _train_from_held(
    strategy: torchstrategy.Strategy,
    step: Callable[..., None],
    put: Callable[[nn.Module], torch.Tensor] = _views,
    after: Callable[[Any, Any], None] = _stays,
    has_hooks: bool = False,
) -> None:
    (model, ours), (twin, plain) = built(strategy, mlp, sgd)
    held = {m: (put(m), [p.grad for p in m.parameters()]) for m in (model, twin)}
    for p in [*model.parameters(), *twin.parameters()] if has_hooks else ():
        p.register_post_accumulate_grad_hook(lambda p: None)
    for k in range(3):
        batch = data(7, seed=k)
        strategy.run(lambda b: step(model, ours, b), args=(deal(strategy, batch),))
        step(twin, plain, batch)
        of_model, of_twin = (
            [p.grad is g for p, g in zip(m.parameters(), held[m][1], strict=True)]
            for m in (model, twin)
        )
        assert of_model == of_twin, f"step {k}: these are in the tensor that was held"
        after(model, ours)
        after(twin, plain)
        # Else nobody asks for what was in the tensor before another took its place.
        if all(of_twin) or step is _clears:
            close(held[model][0], held[twin][0])
        assert_close(gradients(model), gradients(twin), f"step {k}, gradient", 1e-10)
        assert_close(parameters(model), parameters(twin), f"step {k}, parameter", 1e-10)


@pytest.mark.filterwarnings(
    "ignore:Using backward.. with create_graph=True:UserWarning"
)
@pytest.mark.filterwarnings(
    "ignore:grad and param do not obey the gradient layout contract:UserWarning"
)
@pytest.mark.parametrize("step", STEPS)
def test_the_tensor_in_grad_is_the_one_that_plain_torch_has_there(make, step):
    """A buffer of all gradients stayed as it was.

    So an update that read it trained on nothing, in silence.
    """
    for after in (_stays, _update):
        _train_from_held(make(3), step, after=after)
    _train_from_held(make(1), step)
    _train_from_held(make(3), step, _columns)


def test_so_it_is_under_every_strategy(strategy):
    for step in (_accumulates, _zeroes, _updates):
        _train_from_held(strategy, step, after=_update)


def test_so_it_is_where_parameters_have_hooks(make):
    _train_from_held(make(3), _accumulates, has_hooks=True)


@pytest.mark.parametrize(
    "ops",
    [
        torchstrategy.ReductionToOneDevice,
        torchstrategy.HierarchicalCopyAllReduce,
        lambda: torchstrategy.HierarchicalCopyAllReduce(num_packs=0),
    ],
    ids=["one_device", "hierarchical", "hierarchical_unpacked"],
)
def test_so_it_is_with_every_way_of_adding_up(ops):
    for step in (_accumulates, _zeroes, _clips, _updates):
        _train_from_held(
            torchstrategy.MirroredStrategy(compute_devices(3), ops()),
            step,
            after=_update,
        )


def test_a_merge_function_finds_the_gradient_in_the_buffer(make):
    strategy, batch = make(3), data(7)
    (model, _), (twin, _) = built(strategy, mlp, None)
    ours, plain = _views(model), _views(twin)
    seen = []

    def merged(strategy: torchstrategy.Strategy) -> None:
        seen.append(ours.clone())
        ours.mul_(2)

    def step(b: Any) -> None:
        mse(model, b).backward()
        context().merge_call(merged)
        mse(model, b).backward()

    strategy.run(step, args=(deal(strategy, batch),))
    mse(twin, batch).backward()
    close(seen[0], plain)
    plain.mul_(2)
    mse(twin, batch).backward()
    close(ours, plain)


def test_a_loss_that_is_differentiated_between_runs_adds_to_the_buffer(make):
    strategy, batch = make(3), data(6)
    (model, _), (twin, _) = built(strategy, mlp, None)
    ours, plain = _views(model), _views(twin)
    for _ in range(2):
        losses = strategy.run(lambda b: mse(model, b), args=(deal(strategy, batch),))
        strategy.reduce("mean", losses, axis=None).backward()
        mse(twin, batch).backward()
        close(ours, plain)


@pytest.mark.parametrize("way", ["read", "merge", "update", "update_and_merge"])
def test_a_run_that_fails_leaves_the_buffer_as_before_it_or_as_its_last_update_left_it(
    make, way
):
    strategy, batch = make(3), data(7)
    (model, optimizer), (twin, plain_optimizer) = built(strategy, mlp, sgd)
    buffer, plain = _views(model), _views(twin)
    strategy.run(lambda b: mse(model, b).backward(), args=(deal(strategy, batch),))
    mse(twin, batch).backward()
    own = [p.grad for p in model.parameters()]

    def step(b: Any) -> None:
        mse(model, b).backward()
        if way.startswith("update"):
            optimizer.step()
            mse(model, b).backward()
        if way == "read":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if way.endswith("merge"):
            context().merge_call(lambda _: None)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        strategy.run(step, args=(deal(strategy, batch),))
    if way.startswith("update"):
        mse(twin, batch).backward()
        plain_optimizer.step()
    if way != "update_and_merge":
        close(buffer, plain)
    assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))


def test_gradients_that_cannot_be_written_in_place_are_new_tensors(make):
    """An expanded tensor, one that requires grad, and sparse ones.

    Torch may add these up in no fixed memory.
    """
    strategy = make(3)
    rows = torch.tensor([0, 2, 1, 1, 3, 0, 2])
    build = lambda: nn.Embedding(5, 3, sparse=True, dtype=torch.float64)  # noqa: E731
    (model, _), (twin, _) = built(strategy, build, None)
    for _ in range(3):
        strategy.run(
            lambda r: model(r).square().mean().backward(), args=(deal(strategy, rows),)
        )
        twin(rows).square().mean().backward()
        assert_close(gradients(model), gradients(twin), "sparse")

    strategy, batch = make(3), data(7)
    (model, _), (twin, _) = built(
        strategy, lambda: nn.Linear(3, 2, dtype=torch.float64), None
    )
    zero = torch.zeros(1, 1, dtype=torch.float64, device=model.weight.device)
    model.weight.grad = zero.expand(2, 3)
    model.bias.grad = ones = torch.ones_like(model.bias).requires_grad_()
    twin.bias.grad = torch.ones_like(twin.bias)
    strategy.run(lambda b: mse(model, b).backward(), args=(deal(strategy, batch),))
    mse(twin, batch).backward()
    assert_close(gradients(model), gradients(twin), "expanded, and of a graph")
    assert zero.item() == 0 and ones.detach().eq(1).all()
