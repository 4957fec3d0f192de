"""Hooks on the user's parameters see what backward adds, as in plain PyTorch.

They do whatever else the step does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import clip_grad_norm_

from conditions import only_in_turns, only_with_copies
from problems import built, compare, data, deal, mlp, mse, replica_id, sgd, where_it_is

CLEARS: dict[str, Callable[[Any, Any], None]] = {
    "optimizer.zero_grad()": lambda m, o: o.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda m, o: o.zero_grad(
        set_to_none=False
    ),
    "model.zero_grad()": lambda m, o: m.zero_grad(),
    "p.grad = None": lambda m, o: (
        [setattr(p, "grad", None) for p in m.parameters()] and None
    ),
    "p.grad = zeros": lambda m, o: (
        [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()] and None
    ),
}


def _hooked(log: dict[int, list[float]], kinds: str) -> Callable[[], nn.Module]:
    """A model whose hooks write down what they see."""

    def build() -> nn.Module:
        model = mlp()
        seen = log.setdefault(len(log), [])
        for p in (model[0].weight, model[2].bias):
            if "tensor" in kinds:
                p.register_hook(lambda g: seen.append(float(g.norm())))
            if "accumulate" in kinds:
                p.register_post_accumulate_grad_hook(
                    lambda p: seen.append(float(p.grad.norm()))
                )
        if kinds == "several":
            register_multi_grad_hook(
                tuple(model.parameters()),
                lambda gs: seen.extend(float(g.norm()) for g in gs),
            )
            register_multi_grad_hook(
                [model[0].bias], lambda gs: seen.append(float(gs[0].norm()))
            )
        return model

    return build


def _check(make: Any, step: Any, kinds: str, **options: Any) -> None:
    log: dict[int, list[float]] = {}
    compare(make, 3, step, build=_hooked(log, kinds), **options)
    ours, plain = log.values()
    assert sorted(ours) == pytest.approx(sorted(plain), rel=1e-9)


@only_with_copies
def test_a_hook_for_several_parameters_sees_their_gradients(make):
    """It was never called: gradients came to the parameters one by one.

    They came in a backward each.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    _check(make, step, "several")


@only_in_turns
def test_a_hook_for_several_parameters_is_refused(make):
    """As in a worker with one replica: see `_run/own/user_hooks`."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()

    with pytest.raises(RuntimeError, match="register_multi_grad_hook was given a par"):
        _check(make, step, "several")


def test_hooks_are_called_in_the_order_of_a_backward(make):
    """Hooks that share something saw the first parameters first.

    They share a budget for all gradients, for example.
    """
    log: dict[int, list[int]] = {}

    def build() -> nn.Module:
        model = mlp()
        seen = log.setdefault(len(log), [])
        for position, p in enumerate(model.parameters()):
            p.register_hook(lambda g, position=position: seen.append(position))
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    compare(make, 3, step, build=build)
    ours, plain = log.values()
    assert ours == plain


@pytest.mark.parametrize("kinds", ["tensor", "accumulate"])
@pytest.mark.parametrize("clear", CLEARS)
def test_a_hook_sees_what_the_step_clears_after_backward(make, kinds, clear):
    """It was never called: the gradient was gone before the replicas' came together."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        CLEARS[clear](model, optimizer)
        mse(model, batch).backward()
        optimizer.step()
        CLEARS[clear](model, optimizer)

    _check(make, step, kinds)


@pytest.mark.parametrize("kinds", ["tensor", "accumulate", "tensor and accumulate"])
def test_a_hook_does_not_see_what_the_step_puts_there_itself(make, kinds):
    """It was called for `p.grad = g`."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for k in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1) if k else p.detach() * batch[0].mean()
            if k:
                clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        mse(model, batch).backward()

    _check(make, step, kinds)


def test_a_gradient_of_its_own_that_a_replica_takes_is_one_that_no_hook_may_change(
    make,
):
    """In plain PyTorch a tensor's hook changes what `torch.autograd.grad` returns.

    Here it did not.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        gradients = torch.autograd.grad(mse(model, batch), list(model.parameters()))
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g

    _check(make, step, "accumulate")
    with pytest.raises(
        RuntimeError, match=r"2\.bias has a gradient hook, and .* torch\.autograd\.grad"
    ):
        _check(make, step, "tensor")


@pytest.mark.parametrize("kinds", ["tensor", "accumulate"])
def test_a_hook_sees_what_backward_adds_to_what_the_step_has_put_there(make, kinds):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        mse(model, batch).backward()
        for p in model.parameters():
            p.grad = p.grad * 2
        mse(model, batch).backward()

    _check(make, step, kinds)


@pytest.mark.parametrize("unfreezes", [False, True])
def test_a_frozen_parameter_with_a_hook_may_be_given_a_gradient(make, unfreezes):
    """Its hook was to see zeros of no backward, and torch refused to run one."""
    log: dict[int, list[float]] = {}

    def build() -> nn.Module:
        model = _hooked(log, "tensor and accumulate")()
        model[0].weight.requires_grad_(False)
        return model

    def change(model: Any, optimizer: Any) -> None:
        model[0].weight.requires_grad_(unfreezes)

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        loss = mse(model, batch)
        optimizer.zero_grad()
        loss.backward()

    compare(make, 3, step, build=build, after=change)
    ours, plain = log.values()
    assert sorted(ours) == pytest.approx(sorted(plain), rel=1e-9)


@pytest.mark.parametrize("clear", ["in the hook", *CLEARS])
@pytest.mark.parametrize("reads", [False, True])
def test_an_optimizer_in_backward_updates_whenever_the_step_clears(make, clear, reads):
    """What a hook updated was taken for the replicas' write.

    Or the hook was not called at all.
    """

    def build() -> nn.Module:
        model = mlp()
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)

            def update(p: Any, optimizer: Any = optimizer) -> None:
                optimizer.step()
                if clear == "in the hook":
                    optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(update)
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(2):
            mse(model, batch).backward()
            if reads:
                assert (model[0].weight.grad is None) == (clear == "in the hook")
            if clear in CLEARS:
                CLEARS[clear](model, optimizer)
            elif not reads:
                break

    compare(
        make,
        3,
        step,
        build=build,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0),
    )


@pytest.mark.parametrize("what", ["step", "backward", "write"])
def test_a_thread_that_a_step_starts_and_that_trains_is_named(make, what):
    """The message told of a replica that wrote in place, which none did."""
    strategy = make(2)
    (model, optimizer), _ = built(strategy, mlp, sgd)
    # The thread has the user's own, wherever the replica is.
    batch = where_it_is(model, data(4))

    def train() -> None:
        if what == "write":
            with torch.no_grad():
                model[0].weight.add_(1)
            return
        mse(model, batch).backward()
        if what == "step":
            optimizer.step()
            optimizer.zero_grad()

    def step(b: Any) -> None:
        if replica_id() == 0:  # those of two would be in each other's way
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
        mse(model, b)

    with pytest.raises(RuntimeError, match="thread"):
        strategy.run(step, args=(deal(strategy, data(4)),))
