"""A `DataParallel` of modules with a parameter or layer in more than one place."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from problems import assert_close, gradients
from topologies import compute_devices
from torchstrategy import DataParallel

FIRST = compute_devices(1)[0]
F64: dict[str, Any] = {"dtype": torch.float64}


class _Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


_apply_scaled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _Scaled.apply


class Elsewhere(nn.Module):
    """Its weight is also held by something that is no module, which forward uses."""

    def __init__(
        self, hold: Callable[[torch.Tensor], Any], take: Callable[[Any], torch.Tensor]
    ) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, **F64)
        self.held, self.take = hold(self.inner.weight), take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = self.take(self.held)
        assert taken is self.inner.weight
        return torch.tanh(self.inner(x)) + x @ taken + _apply_scaled(x, taken)


class Twice(nn.Module):
    """A layer under two names, one of which is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3, **F64)
        self.layers = nn.ModuleList([self.encoder, nn.Tanh(), self.encoder])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.encoder(x)


class Tied(nn.Module):
    """An autoencoder with one weight, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, **F64), nn.Linear(3, 3, **F64)
        self.second.weight = self.first.weight
        self.bias = self.second.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(self.first(x)) + self.bias) @ self.first.weight.T


class Hooked(nn.Module):
    """Its hook closes over a parameter of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, **F64), nn.Linear(3, 3, **F64)
        weight = self.first.weight
        self.second.register_forward_hook(
            lambda module, inputs, output: output @ weight
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Recurrent(nn.Module):
    """It lists the parameters of its layer for torch, as all recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(3, 3, batch_first=True, num_layers=2, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x.unsqueeze(1))[0]
        return output.squeeze(1)


def _replaced_forward() -> nn.Module:
    layer = nn.Linear(3, 3, **F64)
    weight = layer.weight
    layer.forward = lambda x: (x @ weight).sin() @ layer.weight  # type: ignore[method-assign]
    return layer


def _partial() -> nn.Module:
    layer = nn.Linear(3, 3, **F64)
    layer.forward = functools.partial(
        lambda weight, x: (x @ weight).sin(), layer.weight
    )  # type: ignore[assignment]
    return layer


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dict": lambda: Elsewhere(lambda w: {"w": w}, lambda held: held["w"]),
    "dict of lists": lambda: Elsewhere(lambda w: {"w": [w]}, lambda held: held["w"][0]),
    "tuple": lambda: Elsewhere(lambda w: (1, w), lambda held: held[1]),
    "object": lambda: Elsewhere(_Held, lambda held: held.tensor),
    "object with slots": lambda: Elsewhere(_Slotted, lambda held: held.tensor),
    "objects in a list": lambda: Elsewhere(
        lambda w: [_Held(w)], lambda held: held[0].tensor
    ),
    "closure": lambda: Elsewhere(lambda w: lambda: w, lambda held: held()),
    "forward": _replaced_forward,
    "partial": _partial,
    "hook": Hooked,
    "layer twice": Twice,
    "tied": Tied,
    "parametrized": lambda: parametrizations.weight_norm(Tied().second),
    "recurrent": Recurrent,
}


def _grad(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    return torch.autograd.grad(
        model(x).square().sum(), list(model.parameters()), allow_unused=True, **options
    )


def _penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = _grad(model, x, create_graph=True)
    return sum((g.square().sum() for g in found if g is not None), start=model(x).sum())


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "backward": lambda model, x: model(x).square().sum().backward(),
    "twice": lambda model, x: (model(x).sum() + model(x * 2).sum()).backward(),
    "grad": _grad,
    "backward to inputs": lambda model, x: (
        model(x).square().sum().backward(inputs=[next(iter(model.parameters()))])
    ),
    "retained": lambda model, x: (
        lambda y: [y.sum().backward(retain_graph=True), y.sum().backward()]
    )(model(x)),
    "double backward": lambda model, x: _penalty(model, x).backward(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("module", MODULES)
def test_gradients_are_those_of_plain_pytorch(module: str, way: str) -> None:
    """A parameter in a dict lost a part of its gradient.

    A layer that stands twice was an error.
    """
    torch.manual_seed(0)
    plain = MODULES[module]().to(FIRST)
    torch.manual_seed(0)
    model = DataParallel(MODULES[module]().to(FIRST), compute_devices(2))
    x = torch.randn(5, 3, **F64).to(FIRST)
    for _ in range(2):
        ours, theirs = WAYS[way](model, x), WAYS[way](plain, x)
        for mine, wanted in zip(ours or (), theirs or (), strict=True):
            if mine is not None:
                torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)
        assert_close(
            gradients(model.module), gradients(plain), f"{module}, {way}", 1e-10, 1e-12
        )


def test_hooks_of_a_shared_parameter_see_the_gradient_of_all_places_once() -> None:
    torch.manual_seed(0)
    module = MODULES["dict"]().to(FIRST)
    plain = copy.deepcopy(module)
    seen: dict[str, list[torch.Tensor]] = {"ours": [], "plain": []}
    for name, one in (("ours", module), ("plain", plain)):
        one.inner.weight.register_hook(seen[name].append)
        one.inner.weight.register_post_accumulate_grad_hook(
            lambda p, n=name: seen[n].append(p.grad.clone())
        )  # type: ignore[misc]
    x = torch.randn(5, 3, **F64, device=FIRST)
    for forward in (DataParallel(module, compute_devices(2)), plain):
        forward(x).square().sum().backward()
    assert len(seen["ours"]) == len(seen["plain"]) == 2
    for mine, wanted in zip(*seen.values(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)


def test_parameters_that_are_or_become_frozen_are_as_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    module = Tied().to(FIRST)
    plain, x = copy.deepcopy(module), torch.randn(5, 3, **F64, device=FIRST)
    model = DataParallel(module, compute_devices(2))
    totals: list[Any] = []
    for one in (model, plain):
        weight = next(iter(one.parameters()))
        early = one(x).sum()
        weight.requires_grad_(False)
        late = one(x).square().sum()
        weight.requires_grad_(True)
        totals.append(early + late + one(x).sin().sum())
        totals[-1].backward()
    torch.testing.assert_close(totals[0], totals[1])
    assert_close(gradients(module), gradients(plain), "frozen between", 1e-10, 1e-12)


def test_a_forward_that_raises_leaves_parameters_as_they_were() -> None:
    torch.manual_seed(0)
    module = Tied().to(FIRST)
    plain, x = copy.deepcopy(module), torch.randn(5, 3, **F64, device=FIRST)
    model = DataParallel(module, compute_devices(2))
    failing = module.second.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    failing.remove()
    for one in (model, plain):
        one(x).sum().backward()
    assert_close(gradients(module), gradients(plain), "after an error", 1e-10, 1e-12)
