"""What a step of an optimizer would cost, if it were fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchstrategy.testing._simulation.ordinals import is_simulated
from torchstrategy.testing._virtual_time.clock import Clock
from torchstrategy.testing._virtual_time.costs import CostModel

_aten: Any = torch.ops.aten
_Lists = Callable[[dict[str, Any], list[Any]], tuple[Any, ...]]


@contextmanager
def watching_optimizers(clock: Clock) -> Iterator[None]:
    """A block in which a clock is told when optimizers begin and end their steps."""

    def begins(*_: Any) -> None:
        clock.optimizer_begins()

    def ends(optimizer: Optimizer, *_: Any) -> None:
        clock.optimizer_ends(fused_step(optimizer, clock.costs))

    hooks = [
        register_optimizer_step_pre_hook(begins),
        register_optimizer_step_post_hook(ends),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def fused_step(optimizer: Optimizer, costs: CostModel) -> tuple[float, int] | None:
    """The seconds and the launches of a fused step.

    It is None if the step is fused already, or torch has no fused step for it.
    """
    known = _FUSED.get(type(optimizer))
    if known is None:
        return None
    operator, lists = known
    seconds, launches = 0.0, 0
    for group in optimizer.param_groups:
        parameters = [one for one in group["params"] if one.grad is not None]
        if group.get("fused") or not all(map(_may_be_fused, parameters)):
            return None
        if not parameters:
            continue
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters]
        try:
            cost = costs.of(
                operator, (parameters, gradients, *lists(group, states)), {}, ()
            )
        except KeyError:  # a state that somebody has changed
            return None
        assert cost is not None
        seconds, launches = seconds + cost.seconds, launches + cost.launches
    return (seconds, launches) if launches else None


def _may_be_fused(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    is_dense = gradient is not None and gradient.layout is torch.strided
    return is_simulated(parameter) and parameter.is_floating_point() and is_dense


def _of_adam(group: dict[str, Any], states: list[Any]) -> tuple[Any, ...]:
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    return tuple([state[name] for state in states] for name in names)


def _of_sgd(group: dict[str, Any], states: list[Any]) -> tuple[Any, ...]:
    return (
        [state["momentum_buffer"] for state in states] if group["momentum"] else [],
    )


_FUSED: dict[type, tuple[Any, _Lists]] = {
    torch.optim.Adam: (_aten._fused_adam_.default, _of_adam),
    torch.optim.AdamW: (_aten._fused_adamw_.default, _of_adam),
    torch.optim.SGD: (_aten._fused_sgd_.default, _of_sgd),
}
