"""What models are made of.

Each layer takes rows of the model's width, and gives such.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import torchstrategy

from . import marked, modules
from .keeping import KEEPERS
from .modules import filled


@dataclass(frozen=True)
class Layer:
    """A part of a model."""

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        """The module, given the layers before it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Linear(Layer):
    bias: bool = True

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return filled(nn.Linear(width, width, self.bias), len(so_far))


@dataclass(frozen=True)
class Activation(Layer):
    kind: str = "Tanh"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return getattr(nn, self.kind)()


@dataclass(frozen=True)
class Norm(Layer):
    kind: str = "layer"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        if self.kind == "layer":
            return nn.LayerNorm(width, eps=0.1)
        if self.kind == "group":
            return nn.GroupNorm(1, width, eps=0.1)
        if self.kind == "batch, evaluating":
            return modules.Evaluating(width, eps=0.1)
        return torchstrategy.nn.SyncBatchNorm(
            width, eps=0.1, momentum=None if "mean" in self.kind else 0.1
        )


@dataclass(frozen=True)
class Again(Layer):
    """The same module for a second time."""

    index: int = 0

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return so_far[self.index % len(so_far)] if so_far else nn.Identity()


@dataclass(frozen=True)
class Tied(Layer):
    """A layer with the weight of an earlier one."""

    index: int = 0

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        layer = filled(nn.Linear(width, width), len(so_far))
        linear = [
            module
            for module in so_far
            if type(module) is nn.Linear and "weight" in module._parameters
        ]
        if linear:
            layer.weight = linear[self.index % len(linear)].weight
        return layer


@dataclass(frozen=True)
class Setting(Layer):
    kind: str = "number"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return modules.Settings(self.kind)


@dataclass(frozen=True)
class Count(Layer):
    kind: str = "number"
    in_training: bool = False

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return modules.Counts(self.kind, self.in_training)


@dataclass(frozen=True)
class Buffer(Layer):
    kind: str = "constant"
    persistent: bool = True

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return modules.Buffered(self.kind, width, self.persistent)


@dataclass(frozen=True)
class Keep(Layer):
    detached: bool = True

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return modules.Keeps(width, self.detached)


@dataclass(frozen=True)
class Held(Layer):
    kind: str = "dict"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return modules.Held(self.kind, width)


@dataclass(frozen=True)
class Odd(Layer):
    kind: str = "abstract"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return modules.ODD[self.kind](width)


@dataclass(frozen=True)
class Marked(Layer):
    place: str = "weight"
    setting: str = "number"
    counts: str | None = None

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return marked.Marked(self.place, self.setting, self.counts, width)


@dataclass(frozen=True)
class Varied(Layer):
    each_replica: bool = False

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return marked.Varied(self.each_replica, width)


_SIMPLE = {
    "shared buffer": modules.SharedBuffer,
    "lists": modules.Lists,
    "scalar": modules.Scalar,
    "attention": modules.Attention,
    "convolution": modules.Convolved,
    "of some rows": modules.OfSomeRows,
    "function": lambda width: modules.WithFunction(),
    "lstm": lambda width: modules.Recurrent("lstm", width),
    "gru": lambda width: modules.Recurrent("gru", width),
    "embedding": lambda width: modules.Embedded(width, False),
    "sparse embedding": lambda width: modules.Embedded(width, True),
}
SIMPLE = list(_SIMPLE)


@dataclass(frozen=True)
class Simple(Layer):
    """One of the modules without options."""

    kind: str = "scalar"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return _SIMPLE[self.kind](width)


def _with_vectors(module: nn.Module) -> nn.Module:
    """Buffers of spectral normalisation that no generator draws."""
    for name, buffer in module.named_buffers():
        if name.endswith(("_u", "_v")):
            buffer.data.copy_(
                nn.functional.normalize(modules.numbers(buffer.shape, 2), dim=0)
            )
    return module


_PARAMETRIZED: dict[str, Any] = {
    "weight norm": parametrizations.weight_norm,
    "orthogonal": lambda m: parametrizations.orthogonal(
        m, orthogonal_map="cayley", use_trivialization=False
    ),
    "spectral norm": lambda m: _with_vectors(parametrizations.spectral_norm(m)),
    "of one's own": lambda m: parametrize.register_parametrization(
        m, "weight", modules.Half()
    ),
    "two": lambda m: parametrize.register_parametrization(
        parametrizations.weight_norm(m), "bias", modules.Half()
    ),
    "old weight norm": nn.utils.weight_norm,
    "old spectral norm": lambda m: _with_vectors(nn.utils.spectral_norm(m)),
}
PARAMETRIZED = list(_PARAMETRIZED)


@dataclass(frozen=True)
class Parametrized(Layer):
    kind: str = "weight norm"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return _PARAMETRIZED[self.kind](filled(nn.Linear(width, width), len(so_far)))


@dataclass(frozen=True)
class Pruned(Layer):
    kind: str = "l1"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        layer = filled(nn.Linear(width, width), len(so_far))
        if self.kind == "l1":
            return prune.l1_unstructured(layer, "weight", 0.3)
        if self.kind == "structured":
            return prune.ln_structured(layer, "weight", 1, n=2, dim=0)
        return prune.custom_from_mask(
            layer, "bias", (torch.arange(width) % 2 == 0).to(layer.bias)
        )


@dataclass(frozen=True)
class Wrapped(Layer):
    layer: Layer = Linear()
    way: str = "residual"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return modules.Wrapped(self.layer.build(width, so_far), self.way)


@dataclass(frozen=True)
class Nested(Layer):
    """Layers in a container."""

    layers: tuple[Layer, ...] = (Linear(),)
    kind: str = "sequential"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        inside: list[nn.Module] = []
        for layer in self.layers:
            inside.append(layer.build(width, [*so_far, *inside]))
        return (
            nn.Sequential(*inside)
            if self.kind == "sequential"
            else modules.InContainer(self.kind, inside)
        )


@dataclass(frozen=True)
class Frozen(Layer):
    layer: Layer = Linear()

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        return self.layer.build(width, so_far).requires_grad_(False)


def _pre_hook(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.9,)


def _hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 1.1


def _backward_hook(module: nn.Module, grads: Any, outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 0.5 for grad in grads)


def _gradient_hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: grad * 0.5)


def _half(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def _clamped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01)


def _halved_after(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


_HOOKS: dict[str, Any] = {
    "before forward": lambda m: m.register_forward_pre_hook(_pre_hook),
    "after forward": lambda m: m.register_forward_hook(_hook),
    "backward": lambda m: m.register_full_backward_hook(_backward_hook),
    "on the output": lambda m: m.register_forward_hook(_gradient_hook),
    "halving parameters": lambda m: [p.register_hook(_half) for p in m.parameters()],
    "clamping parameters": lambda m: [
        p.register_hook(_clamped) for p in m.parameters()
    ],
    "after accumulation": lambda m: [
        p.register_post_accumulate_grad_hook(_halved_after) for p in m.parameters()
    ],
}
HOOKS = list(_HOOKS)


@dataclass(frozen=True)
class Hooked(Layer):
    layer: Layer = Linear()
    kind: str = "after forward"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        module = self.layer.build(width, so_far)
        _HOOKS[self.kind](module)
        return module


@dataclass(frozen=True)
class Keeping(Layer):
    """A layer with a hook that keeps its output outside of the model, for a step."""

    layer: Layer = Linear()
    kind: str = "dict"

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        module = self.layer.build(width, so_far)
        vars(module)["kept_read"] = KEEPERS[self.kind](module)
        return module
