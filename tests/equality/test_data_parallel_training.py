"""torchstrategy.DataParallel trains in a script as plain PyTorch does.

The script computes the loss outside of it.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from data_parallel import (
    F64,
    FIRST,
    Calls,
    alike,
    here,
    parallel,
    returning,
    same_gradients,
)
from problems import (
    assert_close,
    close,
    data,
    gradients,
    mlp,
    parameters,
    replica_id,
    sgd,
)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer_is_made", ["before", "after"])
def test_a_script_trains_as_it_does_on_one_device(
    replicas: int, optimizer_is_made: str
) -> None:
    torch.manual_seed(0)
    module = mlp().to(FIRST)
    plain = copy.deepcopy(module)
    optimizer = sgd(module)
    model = parallel(module, replicas)
    if optimizer_is_made == "after":
        optimizer = sgd(model)
    plain_optimizer = sgd(plain)
    for step, rows in enumerate([7, 4, 1, 5]):
        x, y = here(*data(rows, seed=step))
        for forward, stepper in ((model, optimizer), (plain, plain_optimizer)):
            stepper.zero_grad()
            F.mse_loss(forward(x), y).backward()
            stepper.step()
        same_gradients(model, plain, f"step {step}")
        assert_close(
            parameters(module), parameters(plain), f"parameter, step {step}", 1e-12
        )


@settings(max_examples=30)
@given(
    rows=st.integers(0, 9),
    replicas=st.integers(1, 4),
    dim=st.sampled_from([0, 1, -1, -2]),
)
def test_any_rows_in_any_dimension_are_as_in_plain_pytorch(
    rows: int, replicas: int, dim: int
) -> None:
    model, plain = alike(
        lambda: Calls(lambda module, x, bias: (x * module.weight + bias).sin()),
        replicas,
        dim=dim,
    )
    shape = [2, 3, 4]
    shape[dim] = rows
    x = torch.randn(shape, device=FIRST, requires_grad=True)
    bias = torch.tensor(0.5, device=FIRST, requires_grad=True)
    ours, expected = model(x, bias=bias), plain(x, bias=bias)
    close(ours, expected, rtol=0, atol=0)
    inputs = (x, bias)
    close(
        torch.autograd.grad(ours.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
    )


@settings(max_examples=30)
@given(rows=st.integers(1, 20), replicas=st.integers(2, 5))
def test_rows_are_cut_as_torch_chunk_cuts_them(rows: int, replicas: int) -> None:
    sizes = returning(lambda x: torch.full((1,), len(x), device=x.device), replicas)(
        torch.ones(rows, 1)
    )
    assert sizes.tolist() == [
        len(chunk) for chunk in torch.ones(rows, 1).chunk(replicas)
    ]


def test_a_batch_without_rows_is_one_call_as_in_plain_pytorch() -> None:
    model, plain = alike(lambda: nn.Linear(3, 2, **F64))
    x = torch.empty(0, 3, device=FIRST, **F64)
    output = model(x)
    assert output.shape == plain(x).shape == (0, 2)
    output.sum().backward()
    plain(x).sum().backward()
    same_gradients(model, plain)


def test_what_has_no_rows_is_one_call_on_the_first_device() -> None:
    seen: list[int] = []
    model = returning(lambda *inputs, **options: seen.append(replica_id()), 3)
    for call in (
        lambda: model(),
        lambda: model(1, "x"),
        lambda: model(torch.tensor(2.0)),
        lambda: model(flag=True),
    ):
        assert call() is None
    assert seen == [0] * 4


def test_several_forwards_may_go_before_one_backward() -> None:
    model, plain = alike(
        lambda: nn.Sequential(mlp(), nn.BatchNorm1d(2, **F64), nn.Linear(2, 1, **F64)),
        replicas=1,
    )
    several = parallel(copy.deepcopy(plain), 2)
    for forward in (model, several, plain):
        real, fake = (forward(here(data(6, seed=seed)[0])) for seed in (1, 2))
        (real.sin() - fake.cos()).sum().backward()
    same_gradients(model, plain)
    # Batch statistics are those of a replica's rows: what they are with two is not what
    # they are with one.
    for index in (0, 1):
        halves = [data(6, seed=seed)[0].chunk(2)[index] for seed in (1, 2)]
        (plain(here(halves[0])).sin() - plain(here(halves[1])).cos()).sum().backward()
    assert_close(
        gradients(several.module),
        _minus(gradients(plain), gradients(model.module)),
        "halves",
        1e-10,
        1e-12,
    )


def _minus(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor - second[name] for name, tensor in first.items()}


def test_a_backward_after_the_optimizer_has_stepped_is_the_error_of_plain_pytorch() -> (
    None
):
    for forward in alike():
        optimizer, (x, y) = sgd(forward), here(*data(5))
        output = forward(x)
        F.mse_loss(output, y).backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            F.mse_loss(output, y).backward()


def test_a_second_backward_needs_a_retained_graph_as_in_plain_pytorch() -> None:
    model, plain = alike()
    x, y = here(*data(5))
    for forward in (model, plain):
        loss = F.mse_loss(forward(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(
            RuntimeError, match="backward through the graph a second time"
        ):
            loss.backward()
    same_gradients(model, plain)


def test_a_gradient_penalty_is_that_of_plain_pytorch() -> None:
    model, plain = alike()
    for forward in (model, plain):
        x = here(data(5)[0]).requires_grad_()
        (gradient,) = torch.autograd.grad(
            forward(x).square().sum(), x, create_graph=True
        )
        (gradient.norm(dim=1) - 1).square().mean().backward()
    same_gradients(model, plain)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_gradients_can_be_had_by_backward() -> None:
    model, plain = alike()
    for forward in (model, plain):
        forward(here(data(5)[0])).square().sum().backward(create_graph=True)
        grads = [p.grad for p in forward.parameters()]
        forward.zero_grad()
        sum(grad.square().sum() for grad in grads).backward()
    same_gradients(model, plain)
    for module in (model, plain):
        module.zero_grad()  # each gradient holds the graph that it is part of


def test_gradients_of_parameters_can_be_asked_for_in_every_way() -> None:
    model, plain = alike()
    found: dict[nn.Module, list[Any]] = {}
    for forward in (model, plain):
        x, (weight, *others) = here(data(5)[0]), list(forward.parameters())
        grads = torch.autograd.grad(
            forward(x).square().sum(), [weight, *others], create_graph=True
        )
        squares = sum(grad.square().sum() for grad in grads)
        second = torch.autograd.grad(squares, [weight, *others], retain_graph=True)
        product = torch.autograd.grad(
            grads, weight, [torch.ones_like(grad) for grad in grads]
        )
        assert all(parameter.grad is None for parameter in forward.parameters())
        forward(x).square().sum().backward(inputs=[weight])
        assert all(parameter.grad is None for parameter in others)
        found[forward] = [*grads, *second, *product, weight.grad]
    close(found[model], found[plain], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "register", ["register_hook", "register_post_accumulate_grad_hook"]
)
def test_hooks_on_parameters_see_the_gradient_of_the_whole_batch_once(
    register: str,
) -> None:
    model, plain = alike()
    seen: dict[nn.Module, list[torch.Tensor]] = {model: [], plain: []}
    for forward in (model, plain):
        # Hooks may come after the first backward.
        forward(here(data(5)[0])).sum().backward()
        forward.zero_grad()
        weight = next(forward.parameters())

        def hook(
            tensor: torch.Tensor, noted: Any = seen[forward], weight: Any = weight
        ) -> None:
            noted.append((weight.grad if tensor is weight else tensor).clone())

        getattr(weight, register)(hook)
        for _ in range(2):
            forward(here(data(5)[0])).sum().backward()
    assert len(seen[model]) == len(seen[plain]) == 2
    close(seen[model], seen[plain])
    same_gradients(model, plain)


def test_a_hook_that_clips_clips_the_gradient_of_the_whole_batch() -> None:
    model, plain = alike()
    for forward in (model, plain):
        for parameter in forward.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
        forward(here(data(7)[0])).sum().backward()
    same_gradients(model, plain)


def test_an_optimizer_that_steps_in_backward_steps_once() -> None:
    model, plain = alike()
    for forward in (model, plain):
        for parameter in forward.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(
                lambda p, optimizer=optimizer: (
                    optimizer.step(),
                    optimizer.zero_grad(),
                    None,
                )[-1]
            )
        for step in range(3):
            forward(here(data(7, seed=step)[0])).square().sum().backward()
    assert_close(parameters(model.module), parameters(plain), "parameters", 1e-12)


def test_frozen_parameters_get_no_gradient_and_are_trained_when_they_are_thawed() -> (
    None
):
    model, plain = alike()
    for forward in (model, plain):
        layer = next(forward.parameters())
        for is_trained in (False, True, False, True, False):
            layer.requires_grad_(is_trained)
            forward(here(data(5)[0])).sum().backward()
            assert (layer.grad is None) is (not is_trained)
            layer.grad = None
    same_gradients(model, plain)


def test_gradients_accumulate_and_unused_parameters_have_none() -> None:
    model, plain = alike(lambda: _Uses(nn.Linear(3, 2, **F64), nn.Linear(3, 2, **F64)))
    for forward in (model, plain):
        for seed in range(3):
            forward(here(data(5, seed=seed)[0])).square().sum().backward()
    same_gradients(model, plain)
    assert model.module.unused.weight.grad is None


class _Uses(nn.Module):
    def __init__(self, used: nn.Module, unused: nn.Module) -> None:
        super().__init__()
        self.used, self.unused = used, unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_the_gradient_arrives_also_when_the_data_parallel_is_gone() -> None:
    module = mlp().to(FIRST)
    loss = parallel(module)(here(data(5)[0])).sum()
    gc.collect()
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_gradients_of_inputs_flow_back_to_where_they_came_from() -> None:
    model, plain = alike()
    x = data(5)[0].requires_grad_()  # on the CPU
    model(x).square().sum().backward()
    ours, x.grad = x.grad, None
    plain(x.to(FIRST)).square().sum().backward()
    assert ours is not None and ours.device == x.device
    close(ours, x.grad)


def test_activation_checkpoints_work_in_both_variants() -> None:
    for use_reentrant in (False, True):
        model, plain = alike(lambda: _Checkpointed(use_reentrant))  # noqa: B023
        for forward in (model, plain):
            forward(here(data(5)[0]).requires_grad_()).sum().backward()
        same_gradients(model, plain, f"reentrant: {use_reentrant}")


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = mlp(), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def test_a_forward_that_takes_gradients_itself_is_as_in_plain_pytorch() -> None:
    def attacked(module: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        # Which adds to the gradient of the weight, too.
        (module.weight * x).sin().sum().backward()
        return module.weight * (x + 0.1 * x.grad.sign()).detach()

    model, plain = alike(lambda: Calls(attacked))
    for forward in (model, plain):
        forward(here(data(5, torch.float32)[0])).sum().backward()
    assert_close(gradients(model.module), gradients(plain), "gradient", 1e-6)
