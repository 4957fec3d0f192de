"""Optimizers of all kinds, and several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from features.training import F64, Training, alike, family, feature
from problems import mlp


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
        state["mean"] = (
            p.grad.clone() if "mean" not in state else state["mean"] * beta + p.grad
        )
        state["steps"] = state.get("steps", 0) + 1
        return state["mean"]


class _ClippingAdam(torch.optim.Adam):
    """A subclass that does something before and after the step of its base."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(
            [p for group in self.param_groups for p in group["params"]], 0.05
        )
        result = super().step(closure)
        self.zero_grad()
        return result


class _Lookahead(torch.optim.Optimizer):
    """An optimizer around another: slow weights follow the fast ones.

    They share their groups.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.steps = 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [
            p.detach().clone() for group in self.param_groups for p in group["params"]
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(
                self.slow,
                (p for group in self.param_groups for p in group["params"]),
                strict=True,
            ):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam_one_by_one": lambda p: torch.optim.Adam(
        p, lr=0.01, foreach=False, maximize=True
    ),
    "adam_of_a_tensor_rate": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.01), foreach=False
    ),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd_nesterov_maximize": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, maximize=True
    ),
    "adamw_decay": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
    "users_own": lambda p: _SignDescent(p, lr=0.01),
    "users_subclass": lambda p: _ClippingAdam(p, lr=0.01),
    "around_another": lambda p: _Lookahead(torch.optim.SGD(p, lr=0.1)),
}
family("optimizer", WithOptimizer, OPTIMIZERS)


class WithClosure(Training):
    """The optimizer asks for the loss itself.

    LBFGS divides by differences of gradients, which loses digits.
    """

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
        # Of the whole batch, in every replica.
        self.noted.add(f"{k}: {float(loss):.4f}")

    def outside(self, strategy: torchstrategy.Strategy, batch: Any, k: int) -> None:
        def closure() -> Any:
            return strategy.reduce(
                "mean", strategy.run(self.backward, args=(batch, k)), axis=0
            )

        self.noted.add(f"{k}: {float(self.optimizer.step(closure)):.4f}")


family(
    "closure",
    WithClosure,
    {
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
        "lbfgs_strong_wolfe": lambda p: torch.optim.LBFGS(
            p, max_iter=3, line_search_fn="strong_wolfe"
        ),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    },
)


class _Sharpness(torch.optim.SGD):
    """Sharpness-aware minimisation: climbs first, and then descends.

    It descends by the gradient that it finds there.
    """

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


family(
    "closure",
    WithClosure,
    {"sharpness_aware": lambda p: _Sharpness(p, lr=0.1, momentum=0.9)},
)


@feature
class Gan(Training):
    """Two models, two optimizers and a scaler.

    There are two updates in a step, one through a detached output.
    """

    def __init__(self) -> None:
        self.noted = set()
        self.model, self.critic = nn.Linear(2, 3, **F64), mlp()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def critic_backward(self, batch: Any) -> None:
        self.of_critic.zero_grad()
        fake = self.model(batch[1]).detach()
        loss = (
            F.softplus(-self.critic(batch[0])).mean()
            + F.softplus(self.critic(fake)).mean()
        )
        self.scaler.scale(loss).backward()

    def backward(self, batch: Any, k: int) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(
            F.softplus(-self.critic(self.model(batch[1]))).mean()
        ).backward()

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
    """A model and a loss with weights, both of one optimizer, and a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.measure, self.teacher = (
            nn.Bilinear(2, 2, 1, **F64),
            mlp().eval().requires_grad_(False),
        )
        self.optimizer = torch.optim.Adam(
            [*self.model.parameters(), *self.measure.parameters()], lr=0.01
        )

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.inference_mode():
            wanted = self.teacher(batch[0])
        output = self.model(batch[0])
        return self.measure(output, batch[1]).square().mean() + F.mse_loss(
            output, wanted.clone()
        )
