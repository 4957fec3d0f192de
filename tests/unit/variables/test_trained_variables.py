"""Variables that are trained, and variables in a module."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from problems import close, data, deal, replica_id
from torchstrategy import Variable
from variables import (
    AUTO,
    FIRST,
    OPTIMIZERS,
    Scaled,
    components,
    made,
    numbers,
    silently_with,
)

# Training


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_that_of_plain_torch(
    strategy: torchstrategy.Strategy, optimizer: str
) -> None:
    torch.manual_seed(0)
    with strategy.scope():
        model = Scaled()
        ours = OPTIMIZERS[optimizer](model.trained())
    torch.manual_seed(0)
    twin = Scaled()
    plain = OPTIMIZERS[optimizer](twin.trained())

    def step(model: Scaled, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.trained(), 0.5)
        optimizer.step()
        model.steps.assign_add(torch.tensor(1))
        model.rows.assign_add(torch.tensor(float(len(batch[0]))))

    for k in range(3):
        batch = data(7, seed=k)
        strategy.run(lambda b: step(model, ours, b), args=(deal(strategy, batch),))
        step(twin, plain, batch)
    for got, wanted in zip(model.trained(), twin.trained(), strict=True):
        close(got.detach(), wanted.detach(), rtol=1e-10, atol=1e-12)
    assert (model.steps.item(), model.rows.item()) == (3, 21.0)


def test_gradients_of_a_variable_in_no_module_are_those_of_the_whole_batch(
    strategy: torchstrategy.Strategy,
) -> None:
    v, twin = (
        made(strategy, torch.ones(3, dtype=torch.float64)),
        torch.ones(3, dtype=torch.float64, requires_grad=True),
    )
    x, _ = data(7)
    strategy.run(
        silently_with(lambda b: (b * v).square().sum(1).mean().backward()),
        args=(deal(strategy, x),),
    )
    (x * twin).square().sum(1).mean().backward()
    close(v.grad, twin.grad)
    strategy.run(
        silently_with(lambda b: (b * v).square().sum(1).mean().backward()),
        args=(deal(strategy, x),),
    )
    close(v.grad, 2 * twin.grad)  # type: ignore[operator]


def test_gradients_of_results_reach_a_variable(
    strategy: torchstrategy.Strategy,
) -> None:
    v = made(strategy, 3.0)
    total = strategy.reduce("mean", strategy.run(lambda: v * v), axis=None)
    total.backward()
    close(v.grad, torch.tensor(6.0))
    v.grad = None
    (v * v).backward()
    close(v.grad, torch.tensor(6.0))
    (gradient,) = torch.autograd.grad(v * v * v, [v])
    close(gradient, torch.tensor(27.0))


def test_a_step_sees_and_clears_the_gradient_of_a_variable(
    two: torchstrategy.Strategy,
) -> None:
    v = made(two, 3.0)

    def step() -> float:
        (v * (replica_id() + 1)).backward()
        assert v.grad is not None
        seen = v.grad.item()
        v.grad = None
        return seen

    assert two.experimental_local_results(two.run(step)) == (1.5, 1.5)
    assert v.grad is None


def test_an_optimizer_in_the_replica_has_the_replicas_own_variable(
    two: torchstrategy.Strategy,
) -> None:
    with two.scope():
        v = Variable(3.0)
        optimizer = torch.optim.SGD([v], lr=1.0)

    def step() -> None:
        (own,) = optimizer.param_groups[0]["params"]
        (v * own).backward()
        optimizer.step()

    two.run(step)
    assert v.item() == -3.0


# In a module


def test_a_module_has_a_variable_in_its_state(strategy: torchstrategy.Strategy) -> None:
    with strategy.scope():
        model = Scaled()
    names = {"scale", "frozen", "steps", "rows", "linear.weight", "linear.bias"}
    assert (
        set(model.state_dict())
        == names
        == {name for name, _ in model.named_parameters()}
    )
    state = {name: value + 1 for name, value in model.state_dict().items()}
    assert not any(type(value) is not torch.Tensor for value in state.values())
    model.load_state_dict(state)
    assert (
        numbers(strategy, lambda: model.scale * 1)
        == [3.0] * strategy.num_replicas_in_sync
    )
    assert (model.rows.item(), model.steps.item()) == (1.0, 1)


def test_in_a_replica_the_variable_of_a_module_is_a_variable(
    several: torchstrategy.Strategy,
) -> None:
    with several.scope():
        model = Scaled()

    def step() -> tuple[Any, ...]:
        own: Any = model.steps
        own.assign(torch.tensor(5 + replica_id()))
        assert (
            own.name == "Variable" and model.scale.name == "scale" and not own.trainable
        )
        assert own.synchronization is AUTO and own.aggregation is FIRST
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = own.no_such_name
        assert own is model.steps
        return own.read_value() * 1, torch.tensor(own.numpy())

    for seen in several.experimental_local_results(several.run(step)):
        assert [value.item() for value in seen] == [5, 5]


def test_a_module_converts_its_variables(strategy: torchstrategy.Strategy) -> None:
    with strategy.scope():
        model = Scaled()
    model.rows.assign(12.0)
    assert repr(model.scale)
    model.half().double()
    assert (
        {parameter.dtype for parameter in model.trained()}
        == {model.rows.dtype}
        == {torch.float64}
    )
    model.scale.assign(torch.tensor(5.0))
    assert model.rows.item() == 12.0 and set(components(strategy, model.scale)) == {5.0}
    assert (
        numbers(strategy, lambda: model.scale * 1)
        == [5.0] * strategy.num_replicas_in_sync
    )
    averaged = torch.optim.swa_utils.AveragedModel(nn.ParameterList([model.scale]))
    model.scale.assign(7.0)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    assert averaged.module[0].item() == 7.0
    with torch.no_grad():
        nn.utils.vector_to_parameters(
            torch.zeros(8, dtype=torch.float64, device=model.scale.device),
            [model.scale],
        )
    assert (
        numbers(strategy, lambda: model.scale * 1)
        == [0.0] * strategy.num_replicas_in_sync
    )


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_copy_belongs_to_where_it_is_made(
    strategy: torchstrategy.Strategy, how: str
) -> None:
    with strategy.scope():
        model = Scaled()
    model.scale.assign(7.0)
    model.rows.assign(8.0)

    def copied() -> Scaled:
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]
        buffer = io.BytesIO()
        torch.save(model, buffer)
        return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)  # type: ignore[no-any-return]

    twin = copied()
    assert (twin.scale.item(), twin.rows.item(), twin.scale.name) == (7.0, 8.0, "scale")
    assert (
        twin.steps.aggregation is FIRST
        and twin.scale.trainable
        and not twin.frozen.trainable
    )
    with strategy.scope():
        inside = copied()
    assert strategy.extended.variable_created_in_scope(inside.scale)
    assert (
        inside.scale is not model.scale
        and inside.scale.assign(1.0).item() == 1.0 != model.scale.item()
    )
