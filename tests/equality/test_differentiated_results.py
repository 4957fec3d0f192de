"""Results of a step that its caller differentiates, with a strategy's module."""

from __future__ import annotations

import copy

import pytest
from torch import nn

import torchstrategy
from data_parallel import F64, FIRST, ROWS, Calls, Output, here, outputs_of
from problems import assert_close, data, deal, gradients, mlp
from topologies import central


@pytest.mark.parametrize(
    "register", ["register_hook", "register_post_accumulate_grad_hook"]
)
def test_hooks_see_the_gradient_of_all_replicas_once_in_a_backward_outside(
    register: str,
) -> None:
    strategy, module, seen = central(3), mlp(), []
    strategy.distribute_module(module)
    getattr(module[0].weight, register)(lambda tensor: seen.append(tensor.shape))
    for times in (1, 2):
        loss = sum(
            output.square().sum().to(FIRST)
            for output in outputs_of(strategy, module, data(7)[0])
        )
        loss.backward()
        assert len(seen) == times
    plain = copy.deepcopy(module)
    plain.zero_grad()
    (2 * plain(here(data(7)[0])).square().sum()).backward()
    assert_close(gradients(module), gradients(plain), "gradient", 1e-12)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_outside_may_create_a_graph() -> None:
    strategy, module = central(3), mlp()
    plain = copy.deepcopy(module).to(FIRST)
    strategy.distribute_module(module)
    x = data(7)[0]
    sum(
        output.square().sum().to(FIRST) for output in outputs_of(strategy, module, x)
    ).backward(create_graph=True)
    plain(here(x)).square().sum().backward(create_graph=True)
    for forward in (module, plain):
        grads = [p.grad for p in forward.parameters()]
        forward.zero_grad()
        sum(grad.square().sum() for grad in grads).backward()
    assert_close(gradients(module), gradients(plain), "second derivative", 1e-10)
    for forward in (module, plain):
        forward.zero_grad()


def test_what_a_step_returns_in_an_object_can_be_differentiated_outside() -> None:
    strategy, module = central(2), Calls(lambda module, x: Output(module.weight * x))
    strategy.distribute_module(module)
    sum(
        output.logits.sum().to(FIRST) for output in outputs_of(strategy, module, ROWS)
    ).backward()
    assert module.weight.grad.item() == ROWS.sum().item()


def test_running_statistics_that_come_back_do_not_spoil_a_graph() -> None:
    strategy, module = central(2), nn.BatchNorm1d(3, **F64)
    strategy.distribute_module(module)
    x = here(data(6)[0])
    losses = [module(x).sin().sum()]  # outside, too
    losses += [
        output.sin().sum().to(FIRST)
        for _ in range(2)
        for output in outputs_of(strategy, module, x)
    ]
    sum(losses).backward()
    assert module.weight.grad is not None


def test_a_module_is_free_for_another_strategy_as_soon_as_its_own_is_gone(
    no_collector: None,
) -> None:
    module = mlp()
    for _ in range(2):
        strategy = central(2)
        strategy.distribute_module(module)
        outputs_of(strategy, module, data(4)[0])
        del strategy


def test_a_module_can_be_distributed_in_a_run_of_the_default_strategy() -> None:
    strategy, module = central(2), mlp()
    torchstrategy.get_strategy().run(lambda: strategy.distribute_module(module))
    strategy.run(
        lambda x: module(x).square().sum().backward(),
        args=(deal(strategy, data(4)[0]),),
    )
    assert all(parameter.grad is not None for parameter in module.parameters())
