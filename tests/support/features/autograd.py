"""What autograd offers beyond backward, and hooks."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from features.training import F64, Training, alike, feature
from problems import context, mlp


@feature
class Checkpointed(Training):
    """Both kinds: the recomputation runs in the backward.

    There it has to find the replica's weights.
    """

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = checkpoint(self.model[:2], batch[0], use_reentrant=False)
        return F.mse_loss(
            checkpoint(self.model[2], hidden, use_reentrant=True), batch[1]
        )


@feature
class CheckpointedInForward(Training):
    """The model says which of its parts to recompute."""

    def build(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second, self.head = (
                    nn.Linear(3, 3, **F64),
                    nn.Linear(3, 3, **F64),
                    mlp(),
                )

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
            return (
                CheckpointPolicy.MUST_SAVE
                if is_product
                else CheckpointPolicy.PREFER_RECOMPUTE
            )

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return F.mse_loss(
            checkpoint(self.model, batch[0], use_reentrant=False, context_fn=contexts),
            batch[1],
        )


@feature
class FunctionalGradient(Training):
    """torch.func.grad of functional_call, put where the optimizer looks for it."""

    def backward(self, batch: Any, k: int) -> None:
        parameters = dict(self.model.named_parameters())

        def loss(values: Any) -> torch.Tensor:
            return F.mse_loss(
                torch.func.functional_call(self.model, values, (batch[0],)), batch[1]
            )

        for name, gradient in torch.func.grad(loss)(
            {n: p.detach() for n, p in parameters.items()}
        ).items():
            parameters[name].grad = gradient


@feature
class GradientsOfEachRow(Training):
    """vmap over rows; each row's gradient is clipped alone, and they are averaged."""

    def backward(self, batch: Any, k: int) -> None:
        parameters = dict(self.model.named_parameters())

        def loss(values: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(torch.func.functional_call(self.model, values, (x,)), y)

        values = {n: p.detach() for n, p in parameters.items()}
        rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(
            values, *batch
        )
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(
            dim=0
        )
        factors = (0.5 / norms).clamp(max=1)
        for name, of_rows in rows.items():
            parameters[name].grad = torch.einsum("n,n...->...", factors, of_rows) / len(
                norms
            )


@alike
class FunctionalCallWithBackward(Training):
    def loss(self, batch: Any) -> torch.Tensor:
        doubled = {name: 2 * p for name, p in self.model.named_parameters()}
        return F.mse_loss(
            torch.func.functional_call(self.model, doubled, (batch[0],)), batch[1]
        )


@alike
class JacobianOfEachRow(Training):
    def loss(self, batch: Any) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.jacrev(self.model))(batch[0])
        return super().loss(batch) + slopes.square().mean()


@feature
class ForwardMode(Training):
    """torch has one level of it for the whole process.

    Replicas on several devices have to take turns.
    """

    taking_turns = threading.Lock()

    def loss(self, batch: Any) -> torch.Tensor:
        with self.taking_turns:
            output, slope = torch.func.jvp(
                self.model, (batch[0],), (torch.ones_like(batch[0]),)
            )
            curvature = torch.func.vmap(
                torch.func.hessian(lambda x: self.model(x).sum())
            )(batch[0])
        return (
            F.mse_loss(output, batch[1])
            + slope.square().mean()
            + curvature.square().mean()
        )


@feature
class ParametrizationCached(Training):
    """torch has one cache for the process, too, and takes a layer's copies for one."""

    taking_turns = threading.Lock()

    def build(self) -> nn.Module:
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(3, 3, **F64)), nn.Linear(3, 2, **F64)
        )

    def loss(self, batch: Any) -> torch.Tensor:
        with self.taking_turns, parametrize.cached():
            twice = self.model[0](self.model[0](batch[0]).tanh())
        return F.mse_loss(self.model[1](twice), batch[1])


@feature
class AutogradGrad(Training):
    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        parameters = list(self.model.parameters())
        for p, gradient in zip(
            parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True
        ):
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
    """Its norm is not the mean of the norms in replicas.

    They meet, and go back through the meeting.
    """

    def loss(self, batch: Any) -> torch.Tensor:
        loss, rows = super().loss(batch), len(batch[0])
        own = torch.autograd.grad(
            loss, list(self.model.parameters()), create_graph=True
        )
        sums, total = context().all_reduce(
            "sum", ([gradient * rows for gradient in own], rows)
        )
        return (
            loss
            + 0.1 * torch.stack([(gradient / total).norm() for gradient in sums]).sum()
        )


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
        model[1].register_full_backward_pre_hook(
            lambda module, gradients: (gradients[0] * 3,)
        )
        model[2].register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] / 2,)
        )
        return model


@alike
class HooksInTheStep(Training):
    """Registered and removed there, to see the output of a layer."""

    def loss(self, batch: Any) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        handle = self.model[0].register_forward_hook(
            lambda module, args, output: seen.append(output)
        )
        loss = super().loss(batch)
        handle.remove()
        return loss + seen.pop().square().mean()


class Extractor:
    """Keeps what a layer returned, and how often."""

    def __init__(self, layer: nn.Module) -> None:
        self.calls = 0
        layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls += 1
        self.output = output


@feature
class HooksThatKeepOnAnObject(Training):
    """The step reads it for a penalty."""

    def build(self) -> nn.Module:
        model = mlp()
        self.extractor = Extractor(model[0])
        return model

    def loss(self, batch: Any) -> torch.Tensor:
        return (
            super().loss(batch)
            + self.extractor.output.square().mean() / self.extractor.calls
        )


@alike
class HooksThatKeepInADict(Training):
    def build(self) -> nn.Module:
        model = mlp()
        self.seen: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(model):
            layer.register_forward_hook(functools.partial(self.keep, self.seen, i))
        return model

    @staticmethod
    def keep(
        seen: dict[int, torch.Tensor],
        i: int,
        module: nn.Module,
        args: Any,
        output: torch.Tensor,
    ) -> None:
        seen[i] = output

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + sum(
            output.square().mean() for output in self.seen.values()
        )


@feature
class HooksOnTensors(Training):
    def loss(self, batch: Any) -> torch.Tensor:
        hidden = self.model[:2](batch[0])
        hidden.register_hook(lambda gradient: gradient * 2)
        hidden.retain_grad()
        loss = F.mse_loss(self.model[2](hidden), batch[1])
        loss.register_hook(lambda gradient: gradient / 2)
        return loss


def signed(p: Any) -> None:
    p.grad = p.grad.sign()


@feature
class HooksOnParameters(Training):
    """They see the gradient of the whole batch, once: the first one is not linear."""

    def build(self) -> nn.Module:
        model = mlp()
        model[0].weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        model[2].weight.register_post_accumulate_grad_hook(signed)
        return model


@feature
class SavedTensorsHooks(Training):
    """What autograd saves is packed by the caller's hooks in every replica."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: ("kept", t.detach().clone()), lambda kept: kept[1]
        )


@feature
class WholeStepWithoutGradOfAPart(Training):
    def loss(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            scale = self.model(batch[0]).abs().amax(1, keepdim=True)
        return ((self.model(batch[0]) - batch[1]) / (1 + scale)).square().mean()
