"""What people's training scripts do, each written once, to be trained by plain PyTorch and by a strategy.

A feature is a class: what it makes, and what it does with a batch. Plain PyTorch calls its `step`. A strategy runs its
`step`; or it runs its `backward`, and the update is made after the run. The state of a training is everything that can
be asked for its `state_dict` (models, optimizers, schedulers, scalers), all gradients, and what its step has noted.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchstrategy
from problems import context, data, mlp, mse, sgd

ROWS = (7, 4, 1)  # three replicas get 3, 3, 1; then 2, 2, 0; then 1, 0, 0
F64: dict[str, Any] = {"dtype": torch.float64}
STATEFUL = (nn.Module, torch.optim.Optimizer, lr_scheduler.LRScheduler, torch.amp.GradScaler)


class Training:
    """A training script. Features are subclasses, each with what is its own.

    Its step is a bound method, of an object that holds models and optimizers: what people call a trainer.
    """

    dtype = torch.float64
    tolerance = 1e-10
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # that of the strategy
    options: torchstrategy.RunOptions | None = None  # of the runs

    def __init__(self) -> None:
        self.noted: set[object] = set()
        self.model = self.build()
        self.optimizer = self.optimized(self.model)

    def build(self) -> Any:
        return mlp(self.dtype)

    def optimized(self, model: nn.Module) -> Any:
        return sgd(model)

    def batches(self) -> list[Any]:
        return [data(rows, self.dtype, seed=k) for k, rows in enumerate(ROWS)]

    def loss(self, batch: Any) -> torch.Tensor:
        return mse(self.model, batch)

    def backward(self, batch: Any, k: int) -> Any:
        self.optimizer.zero_grad()
        self.loss(batch).backward()

    def update(self, k: int) -> None:
        self.optimizer.step()

    def step(self, batch: Any, k: int) -> None:
        """What plain PyTorch does with a batch, and what a strategy runs."""
        self.backward(batch, k)
        self.update(k)

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        """The same with the update after the run."""
        strategy.run(self.backward, args=(batch, k), options=self.options)
        self.update(k)

    def between(self, k: int) -> None:
        """What is done before each step, outside of replicas."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """What the caller wears."""
        return contextlib.nullcontext()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    def state(self) -> dict[str, Any]:
        """All that is compared, by the path to it."""
        held = {name: value for name, value in vars(self).items() if isinstance(value, STATEFUL)}
        state = {"noted": sorted(map(str, self.noted))}
        for name, value in held.items():
            state.update(_leaves(name, value.state_dict()))
            if isinstance(value, nn.Module):
                state.update((f"{name}, {path}.grad", _kept(p.grad)) for path, p in value.named_parameters())
        return state


def tensors_of(model: nn.Module) -> dict[str, Any]:
    return dict(_leaves("model", model.state_dict()))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}, {key}", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(f"{path}[{i}]", item)
    elif not callable(value):
        yield path, _kept(value)


def _kept(value: Any) -> Any:
    """A tensor as it is now, where it can be compared."""
    return value.detach().to("cpu", copy=True).to_dense() if isinstance(value, torch.Tensor) else value


FEATURES: dict[str, Callable[[], Training]] = {}
SLOW: set[str] = set()
ALIKE: set[str] = set()  # what differs little from others


def feature(cls: type[Training]) -> type[Training]:
    """Adds a feature to the matrix, under the name of its class: `gradient_penalty`."""
    FEATURES[_name(cls)] = cls
    return cls


def alike(cls: type[Training]) -> type[Training]:
    """Adds a feature that differs little from others."""
    ALIKE.add(_name(cls))
    return feature(cls)


def _name(cls: type[Training]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def family(name: str, cls: Callable[[Any], Training], members: Mapping[str, Any]) -> None:
    """Adds a feature for each member of a family."""
    names = [f"{name}_{member}" for member in members]
    FEATURES.update(zip(names, (functools.partial(cls, value) for value in members.values()), strict=True))
    ALIKE.update(names[1:])


# ---- mixed precision


@feature
class AutocastAround(Training):
    """Each replica rounds to bfloat16 what plain PyTorch rounds for all rows at once: 2**-8 of the gradient."""

    dtype = torch.float32
    tolerance = 1e-2

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16)

    def loss(self, batch: Any) -> torch.Tensor:
        output = self.model(batch[0])
        self.noted.add(output.dtype)
        return F.mse_loss(output.float(), batch[1])


@feature
class AutocastInside(AutocastAround):
    def around(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            return super().loss(batch)


@feature
class Scaler(Training):
    """The second batch overflows, in one of its replicas only: the update is skipped and the scale halved, once."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def batches(self) -> list[Any]:
        batches = super().batches()
        batches[1][1][-1] = math.inf
        return batches

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(batch)).backward()

    def update(self, k: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.noted.add((k, self.scaler.get_scale()))


@feature
class ScalerUnscaledAndClipped(Scaler):
    def update(self, k: int) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().update(k)


@feature
class ScalerWithAutocastToFloat16(Scaler):
    """What scalers are for. Each replica rounds as under bfloat16, to 2**-11."""

    dtype = torch.float32
    tolerance = 2e-3

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, torch.float16):
            output = self.model(batch[0])
        self.noted.add(output.dtype)
        return F.mse_loss(output.float(), batch[1])


@feature
class Everything(ScalerUnscaledAndClipped):
    """A scaler and a scheduler count steps: a run has to find them, to let them count once."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def update(self, k: int) -> None:
        super().update(k)
        self.scheduler.step()

    def parts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, STATEFUL)}


@alike
class ScalerOfAFusedOptimizer(Scaler):
    """It is told of infinities, and leaves the update out itself."""

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


@alike
class ScalerThatIsDisabled(Scaler):
    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def batches(self) -> list[Any]:
        return Training.batches(self)


@feature
class ScalerWithAutocastAccumulationAndScheduler(Scaler):
    """All of it, as in scripts that grew."""

    dtype = torch.float32
    tolerance = 1e-2

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def batches(self) -> list[Any]:
        return Training.batches(self)

    def backward(self, batch: Any, k: int) -> None:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            loss = F.mse_loss(self.model(batch[0]).float(), batch[1]) / 2
        self.scaler.scale(loss).backward()

    def update(self, k: int) -> None:
        if k % 2:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)


# ---- torch.compile


class _Net(nn.Module):
    """A class of one's own: dynamo leaves the forward of torch's own containers as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, **F64), nn.Linear(4, 2, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Uncompiled(Training):
    def build(self) -> nn.Module:
        return _Net()

    def update(self, k: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        super().update(k)


class Compiled(Uncompiled):
    """The model, the loss or what a replica does is compiled; `eager` runs the graphs that dynamo finds as they are."""

    def __init__(self, how: str, backend: Any = "eager") -> None:
        super().__init__()
        self.run_model = self.model
        if how == "model":
            self.run_model = torch.compile(self.model, backend=backend)
        elif how == "in_place":
            self.model.compile(backend=backend)
        else:
            setattr(self, how, torch.compile(getattr(self, how), backend=backend))

    def loss(self, batch: Any) -> torch.Tensor:
        return mse(self.run_model, batch)


class CompiledAndAccumulated(Compiled):
    """Another size in the middle of a step is another graph: the compiler looks at gradients that are there already."""

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        for x, y in zip(batch[0].split(2), batch[1].split(2), strict=True):
            (self.loss((x, y)) * len(x) / len(batch[0])).backward()


COMPILED = ("model", "in_place", "loss", "backward", "step")
family("compiled", Compiled, {how: how for how in COMPILED if how != "step"})  # torch itself warns of it
family("compiled_with_backward", functools.partial(Compiled, backend="aot_eager"), {"model": "model"})
family("compiled_and_accumulated", CompiledAndAccumulated, {how: how for how in ("model", "loss")})
SLOW.update(name for name in FEATURES if name.startswith("compiled"))
ALIKE |= SLOW


# ---- autograd


@feature
class Checkpointed(Training):
    """Both kinds: the recomputation runs in the backward, where it has to find the replica's weights."""

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = checkpoint(self.model[:2], batch[0], use_reentrant=False)
        return F.mse_loss(checkpoint(self.model[2], hidden, use_reentrant=True), batch[1])


@feature
class CheckpointedInForward(Training):
    """The model says which of its parts to recompute."""

    def build(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second, self.head = (nn.Linear(3, 3, **F64), nn.Linear(3, 3, **F64), mlp())

            def block(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(self.first(x).tanh()).tanh()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(checkpoint(self.block, x, use_reentrant=False))

        return Net()


@alike
class CheckpointedSelectively(Training):
    """Products of matrices are kept, and only the rest is recomputed."""

    def loss(self, batch: Any) -> torch.Tensor:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_product = op is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return F.mse_loss(checkpoint(self.model, batch[0], use_reentrant=False, context_fn=contexts), batch[1])


@feature
class FunctionalGradient(Training):
    """torch.func.grad of functional_call, put where the optimizer looks for it."""

    def backward(self, batch: Any, k: int) -> None:
        parameters = dict(self.model.named_parameters())

        def loss(values: Any) -> torch.Tensor:
            return F.mse_loss(torch.func.functional_call(self.model, values, (batch[0],)), batch[1])

        for name, gradient in torch.func.grad(loss)({n: p.detach() for n, p in parameters.items()}).items():
            parameters[name].grad = gradient


@feature
class GradientsOfEachRow(Training):
    """vmap over the rows; each row's gradient is clipped by itself, and they are averaged."""

    def backward(self, batch: Any, k: int) -> None:
        parameters = dict(self.model.named_parameters())

        def loss(values: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(torch.func.functional_call(self.model, values, (x,)), y)

        values = {n: p.detach() for n, p in parameters.items()}
        rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(values, *batch)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
        factors = (0.5 / norms).clamp(max=1)
        for name, of_rows in rows.items():
            parameters[name].grad = torch.einsum("n,n...->...", factors, of_rows) / len(norms)


@alike
class FunctionalCallWithBackward(Training):
    def loss(self, batch: Any) -> torch.Tensor:
        doubled = {name: 2 * p for name, p in self.model.named_parameters()}
        return F.mse_loss(torch.func.functional_call(self.model, doubled, (batch[0],)), batch[1])


@alike
class JacobianOfEachRow(Training):
    def loss(self, batch: Any) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.jacrev(self.model))(batch[0])
        return super().loss(batch) + slopes.square().mean()


@feature
class ForwardMode(Training):
    """torch has one level of it for the whole process: replicas on several devices have to take turns."""

    taking_turns = threading.Lock()

    def loss(self, batch: Any) -> torch.Tensor:
        with self.taking_turns:
            output, slope = torch.func.jvp(self.model, (batch[0],), (torch.ones_like(batch[0]),))
            curvature = torch.func.vmap(torch.func.hessian(lambda x: self.model(x).sum()))(batch[0])
        return F.mse_loss(output, batch[1]) + slope.square().mean() + curvature.square().mean()


@feature
class ParametrizationCached(Training):
    """torch has one cache for the whole process, too, and takes the copies of a layer for one."""

    taking_turns = threading.Lock()

    def build(self) -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3, **F64)), nn.Linear(3, 2, **F64))

    def loss(self, batch: Any) -> torch.Tensor:
        with self.taking_turns, parametrize.cached():
            twice = self.model[0](self.model[0](batch[0]).tanh())
        return F.mse_loss(self.model[1](twice), batch[1])


@feature
class AutogradGrad(Training):
    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        parameters = list(self.model.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
            p.grad = gradient


@feature
class GradientPenalty(Training):
    """A gradient of a gradient."""

    def loss(self, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        losses = F.mse_loss(self.model(x), batch[1], reduction="none").mean(1)
        (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses.mean() + slope.square().sum(1).mean()


@feature
class PenaltyOnTheGradientOfTheBatch(Training):
    """Its norm is not the mean of the norms in replicas: they meet, and go back through the meeting."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss, rows = super().loss(batch), len(batch[0])
        own = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
        sums, total = context().all_reduce("sum", ([gradient * rows for gradient in own], rows))
        return loss + 0.1 * torch.stack([(gradient / total).norm() for gradient in sums]).sum()


@feature
class BackwardThatKeepsItsGraph(Training):
    """Twice through one graph."""

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward(retain_graph=True)
        loss.backward()


@alike
class BackwardForSomeParameters(Training):
    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward(inputs=[self.model[2].weight, self.model[0].bias])


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


@feature
class AutogradFunction(Training):
    def loss(self, batch: Any) -> torch.Tensor:
        return _Cube.apply(self.model(batch[0]) - batch[1]).square().mean()


@feature
class HooksOnModules(Training):
    def build(self) -> nn.Module:
        model = mlp()
        model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[0].register_forward_hook(lambda module, args, output: output * 2)
        model[1].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 3,))
        model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / 2,))
        return model


@alike
class HooksInTheStep(Training):
    """Registered and removed there, to see the output of a layer."""

    def loss(self, batch: Any) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        handle = self.model[0].register_forward_hook(lambda module, args, output: seen.append(output))
        loss = super().loss(batch)
        handle.remove()
        return loss + seen.pop().square().mean()


@feature
class HooksOnTensors(Training):
    def loss(self, batch: Any) -> torch.Tensor:
        hidden = self.model[:2](batch[0])
        hidden.register_hook(lambda gradient: gradient * 2)
        hidden.retain_grad()
        loss = F.mse_loss(self.model[2](hidden), batch[1])
        loss.register_hook(lambda gradient: gradient / 2)
        return loss


@feature
class HooksOnParameters(Training):
    """They see the gradient of the whole batch, once: the first one is not linear."""

    def build(self) -> nn.Module:
        model = mlp()
        model[0].weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        model[2].weight.register_post_accumulate_grad_hook(_signed)
        return model


@feature
class SavedTensorsHooks(Training):
    """What autograd saves is packed by the caller's hooks in every replica."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: ("kept", t.detach().clone()), lambda kept: kept[1])


@feature
class WholeStepWithoutGradOfAPart(Training):
    def loss(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            scale = self.model(batch[0]).abs().amax(1, keepdim=True)
        return ((self.model(batch[0]) - batch[1]) / (1 + scale)).square().mean()


# ---- layers


def _deprecated(make: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def _pruned() -> nn.Module:
    layer = nn.Linear(3, 4, **F64)
    prune.l1_unstructured(layer, "weight", amount=3)
    prune.random_unstructured(layer, "bias", amount=1)
    return layer


def linear() -> nn.Linear:
    return nn.Linear(3, 4, **F64)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


class _Counting(nn.Module):
    """State that is written in forward: counters that count each step once, and a mean over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running_mean", torch.zeros(3, **F64))
        self.register_buffer("last", None)
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.5)
        return self.layer(x) * self.calls

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class _Remembering(nn.Module):
    """Keeps tensors in plain attributes: where it stood in a sequence of each row, and a loss for the step to read."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 2, **F64)
        self.hidden: torch.Tensor | None = None
        self.auxiliary_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = None if self.hidden is None else self.hidden.detach()
        self.hidden = self.cell(x, before)
        self.auxiliary_loss = self.hidden.square().mean()
        return self.hidden


@feature
class TensorsKeptInForward(Training):
    """From step to step each replica has the same rows."""

    def build(self) -> nn.Module:
        return _Remembering()

    def batches(self) -> list[Any]:
        return [data(7, seed=k) for k in range(3)]

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.model.auxiliary_loss


class WithLayer(Training):
    """The layer is the first of the model."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        self._layer = layer
        super().__init__()

    def build(self) -> nn.Module:
        return nn.Sequential(self._layer(), nn.Tanh(), nn.Linear(4, 2, **F64))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "orthogonal_by_cayley": lambda: parametrizations.orthogonal(nn.Linear(3, 4, **F64), orthogonal_map="cayley"),
    "old_weight_norm": lambda: _deprecated(lambda: nn.utils.weight_norm(linear())),
    "old_spectral_norm": lambda: _deprecated(lambda: nn.utils.spectral_norm(linear())),
    "pruned": _pruned,
    "complex": _Complex,
    "counting": _Counting,
    "layer_norm": lambda: nn.Sequential(linear(), nn.LayerNorm(4, **F64)),
    "group_norm": lambda: nn.Sequential(linear(), nn.GroupNorm(2, 4, **F64)),
    "batch_norm_in_evaluation": lambda: nn.Sequential(linear(), nn.BatchNorm1d(4, **F64).eval()),
    "dropout_in_evaluation": lambda: nn.Sequential(linear(), nn.Dropout(0.5).eval()),
}
family("layer", WithLayer, LAYERS)


@feature
class Lazy(Training):
    """It has seen a batch before the first step, as torch asks of those who make an optimizer for one."""

    def build(self) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(nn.LazyLinear(4, **F64), nn.Tanh(), nn.LazyLinear(2, **F64))
        model(torch.ones(1, 3, **F64))
        return model


@feature
class SyncBatchNorm(Training):
    """Statistics of the whole batch, of all replicas."""

    def build(self) -> nn.Module:
        layers = [linear(), torchstrategy.nn.SyncBatchNorm(4, **F64), nn.Tanh(), nn.Linear(4, 2, **F64)]
        return nn.Sequential(*layers)

    def batches(self) -> list[Any]:
        return [data(rows) for rows in (7, 4, 2)]  # of one row there is no variance


@feature
class TiedWeights(Training):
    def build(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, **F64), nn.Tanh(), nn.Linear(3, 3, **F64), nn.Linear(3, 2, **F64))
        model[2].weight = model[0].weight
        return model


class SparseEmbedding(Training):
    """Sparse gradients, of rows that differ between replicas."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        self._optimizer = optimizer
        super().__init__()

    def build(self) -> nn.Module:
        return nn.Embedding(5, 2, sparse=True, **F64)

    def optimized(self, model: nn.Module) -> Any:
        return self._optimizer(model.parameters())

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.model((batch[0][:, 0].abs() * 2).long() % 5), batch[1])


family(
    "sparse_embedding",
    SparseEmbedding,
    {
        "adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    },
)


class _Heads(nn.Module):
    """One head for some of the rows, one for the others, and one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.unused = (nn.Linear(3, 2, **F64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, is_high = x.new_zeros(len(x), 2), x[:, 1] > 0.3
        for head, rows in ((self.high, is_high), (self.low, ~is_high)):
            if rows.any():
                output[rows] = head(x[rows])
        return output


@feature
class ParametersWithoutGradient(Training):
    """In some replicas only, and in all: the optimizer leaves those alone, and their weights do not decay."""

    def build(self) -> nn.Module:
        return _Heads()

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


# ---- what is done between steps


@feature
class FrozenAndThawed(Training):
    def between(self, k: int) -> None:
        self.model[0].requires_grad_(k != 1)


@feature
class FrozenInTheStep(Training):
    """As GANs do with the other network while one learns."""

    def backward(self, batch: Any, k: int) -> None:
        self.model[0].requires_grad_(False)
        super().backward(batch, k)
        self.model[0].requires_grad_(True)


@feature
class LayerSwapped(Training):
    def between(self, k: int) -> None:
        if k == 1:
            torch.manual_seed(5)
            self.model[2] = nn.Linear(4, 2, **F64).to(self.device)
            gc.collect()  # of the old one only the optimizer knows
            self.optimizer.add_param_group({"params": list(self.model[2].parameters()), "lr": 0.2})


@alike
class LayerAdded(Training):
    def between(self, k: int) -> None:
        if k == 1:
            torch.manual_seed(5)
            self.model.append(nn.Linear(2, 2, **F64).to(self.device))
            with self.scope():
                self.optimizer = sgd(self.model)


@alike
class ParametrizedAndNotAnyMore(Training):
    def between(self, k: int) -> None:
        if k == 1:
            parametrizations.weight_norm(self.model[0])
        if k == 2:
            parametrize.remove_parametrizations(self.model[0], "weight")
        with self.scope():
            self.optimizer = sgd(self.model)


@feature
class StatesLoaded(Training):
    """The model and the optimizer go back to where they were a step before."""

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.05)

    def between(self, k: int) -> None:
        if k == 1:
            self._saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        if k == 2:
            self.model.load_state_dict(self._saved[0])
            self.optimizer.load_state_dict(self._saved[1])


@alike
class StatesLoadedByAssignment(StatesLoaded):
    """`assign=True` puts other parameters in the place of those that the optimizer has."""

    def between(self, k: int) -> None:
        if k == 1:
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()), assign=True)
            with self.scope():
                self.optimizer = sgd(self.model)


@feature
class DtypeChanged(Training):
    """To float32 and back: 1e-7 of each weight is lost on the way, the same in both trainings."""

    tolerance = 1e-5

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def between(self, k: int) -> None:
        self.model.to(torch.float32 if k == 1 else torch.float64)
        self.optimizer.zero_grad()

    def loss(self, batch: Any) -> torch.Tensor:
        dtype = self.model[0].weight.dtype
        return F.mse_loss(self.model(batch[0].to(dtype)), batch[1].to(dtype))


@alike
class ModesChanged(Training):
    """Evaluation and training in turn, and a rate of dropout that comes to be zero."""

    def build(self) -> nn.Module:
        return nn.Sequential(linear(), nn.Dropout(0.5), nn.Linear(4, 2, **F64))

    def between(self, k: int) -> None:
        self.model.train(k > 0)
        self.model[1].p = 0.5 if k == 0 else 0.0


@alike
class WeightsWrittenByHand(Training):
    def between(self, k: int) -> None:
        with torch.no_grad():
            self.model[0].weight.clamp_(-0.2, 0.2)
            nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(self.model[2].parameters()) * 0.9, [*self.model[2].parameters()]
            )


@feature
class GroupAdded(Training):
    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def between(self, k: int) -> None:
        if k == 1:
            self.optimizer.add_param_group({"params": self.model[0].parameters(), "lr": 0.01})


@feature
class RateWritten(Training):
    """By hand, between the steps and in them, on groups of their own rates."""

    def optimized(self, model: nn.Module) -> Any:
        groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters(), "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def between(self, k: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.3 / (k + 1)

    def update(self, k: int) -> None:
        self.optimizer.param_groups[1]["lr"] *= 0.5
        super().update(k)


# ---- gradients that the step reads and writes


@feature
class ClippedByNorm(Training):
    def update(self, k: int) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.noted.add(f"{k}: {float(norm):.9f}")
        super().update(k)


@alike
class ClippedByValue(Training):
    def update(self, k: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
        super().update(k)


@alike
class ClippedByGroup(Training):
    """Through the optimizer's groups, with a norm of its own for each layer."""

    def optimized(self, model: nn.Module) -> Any:
        return torch.optim.SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.1)

    def update(self, k: int) -> None:
        for group in self.optimizer.param_groups:
            norm = nn.utils.get_total_norm([p.grad for p in group["params"]])
            nn.utils.clip_grads_with_norm_(group["params"], 0.05, norm)
        super().update(k)


def _halved(p: Any) -> None:
    p.grad.mul_(0.5)


def _decayed(p: Any) -> None:
    p.grad = p.grad + 0.1 * p.detach()


def _added_in_place(p: Any) -> None:
    p.grad += 0.1


def _signed(p: Any) -> None:
    p.grad = p.grad.sign()


def _of_data(p: Any) -> None:
    p.grad.data.copy_(p.grad.data / (1 + p.grad.data.norm()))


def _with_the_same_noise(p: Any) -> None:
    p.grad.add_(
        torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), device="cpu", **F64).to(p.device)
    )


def _taken_away(p: Any) -> None:
    if p.dim() == 1:
        p.grad = None


class GradientsEdited(Training):
    def __init__(self, edit: Callable[[Any], None]) -> None:
        self._edit = edit
        super().__init__()

    def update(self, k: int) -> None:
        for p in self.model.parameters():
            self._edit(p)
        super().update(k)


EDITS = (_halved, _decayed, _added_in_place, _signed, _of_data, _with_the_same_noise, _taken_away)
family("gradients", GradientsEdited, {edit.__name__.strip("_"): edit for edit in EDITS})


class Cleared(Training):
    """Gradients are cleared by other ways than the optimizer's, before backward or after the update."""

    def __init__(self, clear: Callable[[Any], None], first: bool) -> None:
        self._clear, self._first = clear, first
        super().__init__()

    def backward(self, batch: Any, k: int) -> None:
        if self._first:
            self._clear(self)
        self.loss(batch).backward()

    def update(self, k: int) -> None:
        super().update(k)
        if not self._first:
            self._clear(self)


def _none_each(training: Training) -> None:
    for p in training.model.parameters():
        p.grad = None


def _zero_each(training: Training) -> None:
    for p in training.model.parameters():
        p.grad.zero_()


CLEARED_FIRST: dict[str, Callable[[Any], None]] = {
    "each_to_none": _none_each,
    "optimizer_to_zeros": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "model": lambda training: training.model.zero_grad(),
}
CLEARED_LAST: dict[str, Callable[[Any], None]] = {
    "each_to_zeros": _zero_each,
    "optimizer": lambda training: training.optimizer.zero_grad(),
    "model_to_zeros": lambda training: training.model.zero_grad(set_to_none=False),
}
family("cleared_first", functools.partial(Cleared, first=True), CLEARED_FIRST)
family("cleared_last", functools.partial(Cleared, first=False), CLEARED_LAST)


@feature
class AccumulatedOverRuns(Training):
    def backward(self, batch: Any, k: int) -> None:
        (self.loss(batch) / 2).backward()

    def update(self, k: int) -> None:
        if k % 2:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()


@feature
class AccumulatedInTheStep(Training):
    """Micro-batches of one row, each weighing one row of those that the replica was dealt."""

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        rows = len(batch[0])
        for x, y in zip(batch[0].split(1), batch[1].split(1), strict=True):
            (self.loss((x, y)) / rows).backward()


@alike
class SeveralLosses(Training):
    """Two backward calls of two losses, of which one has a regulariser."""

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        sum(p.square().sum() for p in self.model.parameters()).mul(0.01).backward()


@feature
class SeveralUpdates(Training):
    """In one step, each seen by the forward after it."""

    def step(self, batch: Any, k: int) -> None:
        super().step(batch, k)
        super().step(batch, k)

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        super().outside(strategy, batch, k)
        super().outside(strategy, batch, k)


# ---- optimizers


class WithOptimizer(Training):
    def __init__(self, new: Callable[[Any], Any]) -> None:
        self._new = new
        super().__init__()

    def optimized(self, model: nn.Module) -> Any:
        return self._new(model.parameters())


class _SignDescent(torch.optim.Optimizer):
    """A user's own optimizer, with a state and a helper method."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self._momentum(p, group["beta"]).sign(), alpha=-group["lr"])

    def _momentum(self, p: torch.Tensor, beta: float) -> torch.Tensor:
        state = self.state[p]
        state["mean"] = p.grad.clone() if "mean" not in state else state["mean"] * beta + p.grad
        state["steps"] = state.get("steps", 0) + 1
        return state["mean"]


class _ClippingAdam(torch.optim.Adam):
    """A subclass that does something before and after the step of its base."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        result = super().step(closure)
        self.zero_grad()
        return result


class _Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, whose groups it shares: slow weights follow the fast ones."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.steps = 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam_one_by_one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, maximize=True),
    "adam_of_a_tensor_rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd_nesterov_maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adamw_decay": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
    "users_own": lambda p: _SignDescent(p, lr=0.01),
    "users_subclass": lambda p: _ClippingAdam(p, lr=0.01),
    "around_another": lambda p: _Lookahead(torch.optim.SGD(p, lr=0.1)),
}
family("optimizer", WithOptimizer, OPTIMIZERS)


class WithClosure(Training):
    """The optimizer asks for the loss itself. LBFGS divides by differences of gradients, which loses digits."""

    tolerance = 1e-6

    def __init__(self, new: Callable[[Any], Any]) -> None:
        self._new = new
        super().__init__()

    def optimized(self, model: nn.Module) -> Any:
        return self._new(model.parameters())

    def backward(self, batch: Any, k: int) -> torch.Tensor:
        """Returns the loss of each row."""
        self.optimizer.zero_grad()
        losses = F.mse_loss(self.model(batch[0]), batch[1], reduction="none").mean(1)
        losses.mean().backward()
        return losses.detach()

    def step(self, batch: Any, k: int) -> None:
        loss = self.optimizer.step(lambda: self.backward(batch, k).mean())
        self.noted.add(f"{k}: {float(loss):.4f}")  # of the whole batch, in every replica

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        def closure() -> Any:
            return strategy.reduce("mean", strategy.run(self.backward, args=(batch, k)), axis=0)

        self.noted.add(f"{k}: {float(self.optimizer.step(closure)):.4f}")


family(
    "closure",
    WithClosure,
    {
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
        "lbfgs_strong_wolfe": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    },
)


class _Sharpness(torch.optim.SGD):
    """Sharpness-aware minimisation: climbs first, and descends by the gradient that it finds there."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        loss = closure()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            climbed = [p.grad * (0.05 / norm) for p in parameters]
            for p, by in zip(parameters, climbed, strict=True):
                p.add_(by)
        closure()
        with torch.no_grad():
            for p, by in zip(parameters, climbed, strict=True):
                p.sub_(by)
        super().step()
        return loss


family("closure", WithClosure, {"sharpness_aware": lambda p: _Sharpness(p, lr=0.1, momentum=0.9)})


@feature
class Gan(Training):
    """Two models, two optimizers and a scaler; two updates in a step, one through a detached output."""

    def __init__(self) -> None:
        self.noted = set()
        self.model, self.critic = nn.Linear(2, 3, **F64), mlp()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def critic_backward(self, batch: Any) -> None:
        self.of_critic.zero_grad()
        fake = self.model(batch[1]).detach()
        loss = F.softplus(-self.critic(batch[0])).mean() + F.softplus(self.critic(fake)).mean()
        self.scaler.scale(loss).backward()

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(F.softplus(-self.critic(self.model(batch[1]))).mean()).backward()

    def update(self, k: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self, batch: Any, k: int) -> None:
        self.critic_backward(batch)
        self.scaler.step(self.of_critic)
        super().step(batch, k)

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        strategy.run(self.critic_backward, args=(batch,))
        self.scaler.step(self.of_critic)
        super().outside(strategy, batch, k)


@alike
class SeveralModels(Training):
    """A model, a loss with weights of its own, both of one optimizer, and a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.measure, self.teacher = nn.Bilinear(2, 2, 1, **F64), mlp().eval().requires_grad_(False)
        self.optimizer = torch.optim.Adam([*self.model.parameters(), *self.measure.parameters()], lr=0.01)

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.inference_mode():
            wanted = self.teacher(batch[0])
        output = self.model(batch[0])
        return self.measure(output, batch[1]).square().mean() + F.mse_loss(output, wanted.clone())


# ---- schedulers and averages


class Scheduled(Training):
    def __init__(self, new: Callable[[Any], Any]) -> None:
        super().__init__()
        self.scheduler = new(self.optimizer)

    def update(self, k: int) -> None:
        super().update(k)
        self.scheduler.step()
        self.noted.add((k, self.scheduler.get_last_lr()[0], self.optimizer.param_groups[0]["lr"]))


def _sequential(optimizer: Any) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.5),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6),  # cycles the momentum too
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "sequential": _sequential,
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "swa": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}
family("scheduler", Scheduled, SCHEDULERS)


@feature
class SchedulerOnAPlateau(Training):
    """It is told the loss of the whole batch: in the step that takes an all_reduce, or it would be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)

    def backward(self, batch: Any, k: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        losses = F.mse_loss(self.model(batch[0]), batch[1], reduction="none").mean(1)
        losses.mean().backward()
        return losses.detach()

    def step(self, batch: Any, k: int) -> None:
        losses = self.backward(batch, k)
        self.optimizer.step()
        total, rows = context().all_reduce("sum", (losses.sum(), len(losses)))
        self.scheduler.step(float(total / rows))

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        losses = strategy.run(self.backward, args=(batch, k))
        self.optimizer.step()
        self.scheduler.step(float(strategy.reduce("mean", losses, axis=0)))


@feature
class SchedulersOfTwoKinds(Training):
    """A warm-up for each step and a decay for every second one, both on one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.schedulers = [
            lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=3),
            lr_scheduler.StepLR(self.optimizer, 1, 0.5),
        ]
        self.first, self.second = self.schedulers

    def update(self, k: int) -> None:
        super().update(k)
        self.schedulers[0].step()
        if k % 2:
            self.schedulers[1].step()


class Averaged(Training):
    """A moving average of the weights: in a replica, it is for a merge function to write it."""

    def __init__(self, average: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.average = average(self.model)

    def step(self, batch: Any, k: int) -> None:
        self.backward(batch, k)
        self.optimizer.step()
        context().merge_call(lambda strategy: self.average.update_parameters(self.model))

    def update(self, k: int) -> None:
        super().update(k)
        self.average.update_parameters(self.model)


family(
    "averaged",
    Averaged,
    {
        "swa": lambda m: swa_utils.AveragedModel(m, avg_fn=swa_utils.get_swa_avg_fn()),
        "ema": lambda m: swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        "ema_with_buffers": lambda m: swa_utils.AveragedModel(
            m, avg_fn=swa_utils.get_ema_avg_fn(0.9), use_buffers=True
        ),
    },
)


# ---- losses outside


@feature
class LossOutside(Training):
    """As with `nn.DataParallel`: replicas return outputs that require grad, and the loss of all is outside."""

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        outputs = strategy.run(self.model, args=(batch[0],))
        self.optimizer.zero_grad()
        F.mse_loss(strategy.gather(outputs, axis=0), strategy.gather(batch[1], axis=0)).backward()
        self.update(k)


@feature
class LossOfTheWholeBatch(Training):
    """Divided by what all replicas have together: the sum of the weights of the rows, of which many are zero."""

    def loss(self, batch: Any) -> torch.Tensor:
        losses = F.mse_loss(self.model(batch[0]), batch[1], reduction="none").mean(1)
        return torchstrategy.nn.compute_average_loss(losses, batch[0][:, 0].relu().detach())


@alike
class LossOfTheWholeBatchSummed(LossOfTheWholeBatch):
    """The same where gradients are added up."""

    options = torchstrategy.RunOptions(gradient_reduction="sum")

    def update(self, k: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        super().update(k)


@feature
class LossOverPairsOfRows(Training):
    """As in contrastive learning: each row against those of all replicas, which know their own by its targets."""

    def loss(self, batch: Any) -> torch.Tensor:
        output, numbers = self.model(batch[0]), batch[1][:, 0]
        everybodys, all_numbers = context().all_gather((output, numbers), axis=0)
        own = (numbers.unsqueeze(1) == all_numbers).long().argmax(1)
        return F.cross_entropy(output @ everybodys.T, own)
