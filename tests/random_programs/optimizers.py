"""Optimizers: torch's own, and such as users and packages write.

They have every way of writing on weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class Handwritten(torch.optim.Optimizer):
    """Momentum, as written outside of torch; `way` says how it writes on a weight."""

    steps = 0  # since it was made or copied

    def __init__(
        self, parameters: Any, lr: float = 0.05, way: str = "data.add_"
    ) -> None:
        super().__init__(parameters, {"lr": lr, "way": way})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(p.data)
                state["step"] += 1
                gradient = p.grad.data.to_dense() if p.grad.is_sparse else p.grad.data
                state["average"].mul_(0.9).add_(gradient, alpha=0.1)
                UPDATES[group["way"]](p, state["average"] * -group["lr"], state)


def _numpy(p: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    if p.device.type == "cpu":
        p.detach().numpy().__iadd__(change.numpy())
    else:
        p.data.add_(change)


def _no_grad(p: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    with torch.no_grad():
        p.add_(change)


def _assigned(p: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    p.data = p.data + change


def _by_view(p: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    if "view" not in state:
        state["view"] = p.data.view(-1)
    state["view"].add_(change.reshape(-1))


def _state_by_data(
    p: torch.Tensor, change: torch.Tensor, state: dict[str, Any]
) -> None:
    state["average"].data.mul_(0.9)
    p.data.add_(change)


def _state_anew(p: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    state["average"] = state["average"] * 0.9
    state["history"] = (state["step"], float(len(state)))
    p.data.add_(change)


def _set(p: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    with torch.no_grad():
        p.set_((p + change).detach())  # type: ignore[call-overload]


UPDATES: dict[str, Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], None]] = {
    "data.add_": lambda p, change, state: p.data.add_(change),
    "data.copy_": lambda p, change, state: p.data.copy_(p.data + change),
    "foreach on data": lambda p, change, state: torch._foreach_add_([p.data], [change]),
    "numpy": _numpy,
    "no_grad": _no_grad,
    "detach": lambda p, change, state: p.detach().add_(change),
    "data =": _assigned,
    "view": _by_view,
    "state by data": _state_by_data,
    "state anew": _state_anew,
    "set_": _set,
}


class Around(torch.optim.Optimizer):
    """An optimizer around one, that does not call `super().__init__`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.param_groups, self.state, self.defaults = (
            inner.param_groups,
            inner.state,
            inner.defaults,
        )
        self.slow = [
            [p.detach().clone() for p in group["params"]]
            for group in inner.param_groups
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for group, slow in zip(self.inner.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.add_(p.detach() - s, alpha=0.5)
                    p.data.copy_(s)


_SMOOTH = {"eps": 1e-3}
_MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda ps, **kw: torch.optim.SGD(ps, lr=0.1, **kw),
    "SGD with momentum": lambda ps, **kw: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, **kw
    ),
    "SGD, nesterov": lambda ps, **kw: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **kw
    ),
    "SGD, dampened, maximize": lambda ps, **kw: torch.optim.SGD(
        ps, 0.01, 0.9, 0.1, maximize=True, **kw
    ),
    "Adam": lambda ps, **kw: torch.optim.Adam(ps, lr=0.05, **_SMOOTH, **kw),
    "Adam, amsgrad": lambda ps, **kw: torch.optim.Adam(
        ps, lr=0.05, amsgrad=True, **_SMOOTH, **kw
    ),
    "AdamW": lambda ps, **kw: torch.optim.AdamW(ps, lr=0.05, **_SMOOTH, **kw),
    "Adam, capturable rate": lambda ps, **kw: torch.optim.Adam(
        ps, lr=torch.tensor(0.05), **_SMOOTH
    ),
    "Adagrad": lambda ps, **kw: torch.optim.Adagrad(ps, lr=0.05, **_SMOOTH, **kw),
    "RMSprop": lambda ps, **kw: torch.optim.RMSprop(
        ps, lr=0.01, momentum=0.5, centered=True, **_SMOOTH, **kw
    ),
    "Adadelta": lambda ps, **kw: torch.optim.Adadelta(ps, **_SMOOTH, **kw),
    "Adamax": lambda ps, **kw: torch.optim.Adamax(ps, lr=0.01, **_SMOOTH, **kw),
    "NAdam": lambda ps, **kw: torch.optim.NAdam(ps, lr=0.01, **_SMOOTH, **kw),
    "RAdam": lambda ps, **kw: torch.optim.RAdam(ps, lr=0.01, **_SMOOTH, **kw),
    "ASGD": lambda ps, **kw: torch.optim.ASGD(ps, lr=0.05, t0=2, **kw),
    "Adafactor": lambda ps, **kw: torch.optim.Adafactor(
        ps, lr=0.01, eps=(1e-3, 1e-3), **kw
    ),
    **{way: lambda ps, way=way, **kw: Handwritten(ps, way=way) for way in UPDATES},
    "around SGD": lambda ps, **kw: Around(torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
    "around one's own": lambda ps, **kw: Around(Handwritten(ps)),
}
KINDS = list(_MADE)
OF_TORCH = [
    kind for kind in KINDS if kind not in UPDATES and not kind.startswith("around")
]

_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, lambda step: 1 / (1 + step)
    ),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=40, cycle_momentum=False
    ),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=3),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[2],
    ),
}
SCHEDULERS = list(_SCHEDULERS)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of a program: of which parameters, in how many groups.

    It has every `of`-th from `start`.
    """

    kind: str = "SGD"
    foreach: bool | None = None
    start: int = 0
    of: int = 1
    groups: int = 1
    scheduler: str | None = None

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """One for the parameters that the model has now."""
        parameters = self.chosen(model.parameters())
        given: Any = parameters
        if self.groups > 1 and len(parameters) > 1:
            given = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
        kind = self.kind
        options = {} if self.foreach is None else {"foreach": self.foreach}
        return _MADE[kind](given, **options)

    def chosen(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Its own of all parameters."""
        every = list(parameters)
        return every[self.start :: self.of] or every

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Its learning-rate scheduler."""
        return (
            None if self.scheduler is None else _SCHEDULERS[self.scheduler](optimizer)
        )
