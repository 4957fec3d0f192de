"""What a step does.

What comes right before and after it may be any of these that needs no batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import torchstrategy

from .keeping import kept_rows
from .marked import Varied
from .training import Batch, Hands


@dataclass(frozen=True)
class Action:
    """A line or two of a step."""

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        """Does it, in step k."""
        raise NotImplementedError


def _none(parameters: list[Any]) -> None:
    for p in parameters:
        p.grad = None


def _deleted(parameters: list[Any]) -> None:
    for p in parameters:
        del p.grad


def _zero(parameters: list[Any]) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.zero_()


def _detach_and_zero(parameters: list[Any]) -> None:
    for p in parameters:
        if p.grad is not None:
            if not p.grad._is_view():
                p.grad.detach_()
            p.grad.zero_()


_CLEARINGS: dict[str, Any] = {
    "optimizers": lambda h: [o.zero_grad() for o in h.optimizers],
    "optimizers, kept": lambda h: [
        o.zero_grad(set_to_none=False) for o in h.optimizers
    ],
    "model": lambda h: h.model.zero_grad(),
    "model, kept": lambda h: h.model.zero_grad(set_to_none=False),
    "None": lambda h: _none(h.parameters()),
    "del": lambda h: _deleted(h.parameters()),
    "zero_": lambda h: _zero(h.parameters()),
    "detach_, zero_": lambda h: _detach_and_zero(h.parameters()),
}
CLEARINGS = list(_CLEARINGS)


@dataclass(frozen=True)
class Clear(Action):
    how: str = "optimizers"
    every: int = 1

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        if k % self.every == 0:
            _CLEARINGS[self.how](hands)


def _losses(
    kind: str, hands: Hands, batch: Batch, outputs: torch.Tensor
) -> torch.Tensor:
    inputs, targets = batch
    targets = targets.to(outputs.device)
    if kind == "squares":
        return (outputs - targets).square().mean(1)
    if kind == "cross entropy":
        return nn.functional.cross_entropy(outputs, targets.argmax(1), reduction="none")
    if kind == "smooth":
        return nn.functional.smooth_l1_loss(outputs, targets, reduction="none").mean(1)
    assert kind == "distilled"
    with torch.no_grad():
        wanted = (hands.model if hands.teacher is None else hands.teacher)(
            inputs.to(outputs.device)
        )
    return (outputs - wanted * 0.5).square().mean(1)


LOSSES = ["squares", "cross entropy", "smooth", "distilled"]
WAYS_BACK = [
    "backward",
    "backward twice",
    "of some",
    "assign",
    "add",
    "two losses",
    "torch",
    "with a graph",
]


@dataclass(frozen=True)
class Backward(Action):
    """A forward, and the gradients of the mean over rows.

    `micro`: in so many parts of the batch.
    """

    loss: str = "squares"
    way: str = "backward"
    micro: int = 1

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        assert batch is not None
        found = []
        for part in zip(*(tensor.chunk(self.micro) for tensor in batch), strict=True):
            losses = _losses(self.loss, hands, part, hands.forward(part[0]))
            loss = losses.sum() / len(batch[0])
            if loss.requires_grad:
                self._back(
                    hands, loss if hands.scaler is None else hands.scaler.scale(loss)
                )
            found.append(losses.detach())
        return torch.cat(found)

    def _back(self, hands: Hands, loss: torch.Tensor) -> None:
        if self.way in ("assign", "add"):
            parameters = [p for p in hands.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is None:
                    continue
                if self.way == "assign" or p.grad is None:
                    p.grad = gradient
                else:
                    p.grad.add_(gradient)
        elif self.way == "backward twice":
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
        elif self.way == "of some":
            parameters = [
                p for p in hands.parameters() if p.requires_grad and p.is_leaf
            ][::2]
            loss.backward(inputs=parameters)
        elif self.way == "two losses":
            torch.autograd.backward([loss, loss * 0.25])
        elif self.way == "torch":
            torch.autograd.backward(loss, torch.ones_like(loss))
        else:
            loss.backward()


_CLIPS: dict[str, Any] = {
    "norm": lambda ps: clip_grad_norm_(ps, 0.05),
    "norm, for loop": lambda ps: clip_grad_norm_(ps, 0.05, foreach=False),
    "infinity norm": lambda ps: clip_grad_norm_(ps, 0.02, norm_type=float("inf")),
    "norm of each": lambda ps: [clip_grad_norm_([p], 0.02) for p in ps] and None,
    "norm of some": lambda ps: clip_grad_norm_(ps[::2], 0.02),
    "value": lambda ps: clip_grad_value_(ps, 0.02),
    "total norm": lambda ps: get_total_norm([p.grad for p in ps if p.grad is not None]),
    "by hand": lambda ps: (
        [p.grad.clamp_(-0.01, 0.01) for p in ps if p.grad is not None] and None
    ),
    "by hand, data": lambda ps: (
        [p.grad.data.clamp_(-0.01, 0.01) for p in ps if p.grad is not None] and None
    ),
    "scale": lambda ps: [p.grad.mul_(0.5) for p in ps if p.grad is not None] and None,
    "scale anew": lambda ps: (
        [setattr(p, "grad", p.grad * 0.5) for p in ps if p.grad is not None] and None
    ),
    "scale data": lambda ps: (
        [p.grad.data.mul_(0.5) for p in ps if p.grad is not None] and None
    ),
    "sign": lambda ps: (
        [p.grad.add_(p.grad.tanh(), alpha=0.1) for p in ps if p.grad is not None]
        and None
    ),
    "decay": lambda ps: (
        [p.grad.add_(p.detach(), alpha=0.1) for p in ps if p.grad is not None] and None
    ),
    "drop one": lambda ps: setattr(ps[0], "grad", None),
    "numbers": lambda ps: (
        [float(p.grad.abs().sum()) for p in ps if p.grad is not None] and None
    ),
    "foreach": lambda ps: (
        torch._foreach_mul_([p.grad for p in ps if p.grad is not None], 0.5) and None
    ),
    "of the marked": lambda ps: (
        [p.grad.mul_(0.5) for p in ps if getattr(p, "tag", 0) and p.grad is not None]
        and None
    ),
    "by their marks": lambda ps: (
        [p.grad.mul_(0.9 ** getattr(p, "tag", 0)) for p in ps if p.grad is not None]
        and None
    ),
    "kept data": lambda ps: (
        [p.grad.detach().mul_(0.5) for p in ps if p.grad is not None] and None
    ),
}
CLIPS = list(_CLIPS)


@dataclass(frozen=True)
class Clip(Action):
    """Reads gradients, or writes on them."""

    how: str = "norm"

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        parameters = hands.parameters()
        if not parameters or (self.how == "total norm" and not hands.with_gradients()):
            return None
        norm = _CLIPS[self.how](parameters)
        return norm if isinstance(norm, torch.Tensor) else None


@dataclass(frozen=True)
class Unscale(Action):
    index: int = 0

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        if hands.scaler is not None and hands.with_gradients():
            hands.scaler.unscale_(hands.optimizers[self.index % len(hands.optimizers)])


@dataclass(frozen=True)
class Update(Action):
    index: int = 0
    every: int = 1

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        if (k + 1) % self.every:
            return
        optimizer = hands.optimizers[self.index % len(hands.optimizers)]
        if hands.scaler is None:
            optimizer.step()
        else:
            hands.scaler.step(optimizer)
            hands.scaler.update()


@dataclass(frozen=True)
class Schedule(Action):
    index: int = 0

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        if hands.schedulers:
            hands.schedulers[self.index % len(hands.schedulers)].step()


def _set_rate(hands: Hands) -> None:
    hands.optimizers[0].param_groups[0]["lr"] = 0.03


def _freeze(hands: Hands) -> None:
    hands.parameters()[0].requires_grad_(False)


def _thaw(hands: Hands) -> None:
    hands.parameters()[0].requires_grad_(True)


def _evaluate(hands: Hands) -> None:
    hands.model.eval()


def _train(hands: Hands) -> None:
    hands.model.train()


def _mark(hands: Hands) -> None:
    for index, parameter in enumerate(hands.parameters()):
        parameter.tag = getattr(parameter, "tag", index) + 1
        parameter.note = [float(parameter.requires_grad)]


def _unmark(hands: Hands) -> None:
    for parameter in hands.parameters()[::2]:
        vars(parameter).pop("tag", None)


def _grow(hands: Hands) -> None:
    for module in hands.model.modules():
        if isinstance(module, Varied):
            module.grow()


_DEEDS: dict[str, Any] = {
    "set rate": _set_rate,
    "freeze": _freeze,
    "thaw": _thaw,
    "eval": _evaluate,
    "train": _train,
    "mark parameters": _mark,
    "unmark some": _unmark,
    "grow variables": _grow,
}
DEEDS = list(_DEEDS)


@dataclass(frozen=True)
class Deed(Action):
    """Something that needs no batch."""

    how: str = "set rate"

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        _DEEDS[self.how](hands)


@dataclass(frozen=True)
class Look(Action):
    """A forward for its outputs alone."""

    mode: str = "no_grad"

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        assert batch is not None
        if self.mode == "grad":
            return hands.forward(batch[0]).detach()
        with torch.no_grad() if self.mode == "no_grad" else torch.inference_mode():
            return hands.forward(batch[0]).clone()


def _norm_of_states(hands: Hands) -> float:
    total = 0.0
    for optimizer in hands.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for value in optimizer.state.get(parameter, {}).values():
                    total += (
                        float(value.abs().sum())
                        if isinstance(value, torch.Tensor)
                        else float(value or 0)
                    )
    return total


def _attributes(hands: Hands) -> float:
    found = 0.0
    for module in hands.model.modules():
        found += module.training + len(module._forward_hooks)
        found += sum(
            value for value in vars(module).values() if isinstance(value, (int, float))
        )
    return found


_PEEKS: dict[str, Any] = {
    "states": _norm_of_states,
    "rates": lambda h: sum(
        float(group["lr"]) for o in h.optimizers for group in o.param_groups
    ),
    "gradients": lambda h: sum(
        float(p.grad.to_dense().sum()) for p in h.parameters() if p.grad is not None
    ),
    "weights": lambda h: sum(float(p.sum()) for p in h.model.state_dict().values()),
    "buffers": lambda h: sum(float(b.sum()) for b in h.model.buffers()),
    "flags": lambda h: sum(p.requires_grad for p in h.parameters()),
    "attributes": _attributes,
    "teacher": lambda h: (
        sum(float(p.sum()) for p in h.teacher.parameters())
        if h.teacher is not None
        else 0.0
    ),
    "steps": lambda h: sum(getattr(s, "last_epoch", 0) for s in h.schedulers),
    "marks": lambda h: float(sum(getattr(p, "tag", 0) for p in h.parameters())),
    "names": lambda h: float(sum(len(name) for name, _ in h.model.named_parameters())),
    "scale": lambda h: 0.0 if h.scaler is None else h.scaler.get_scale(),
}
PEEKS = list(_PEEKS)


@dataclass(frozen=True)
class Peek(Action):
    """Looks at something in the step; each row of the result is its replica's view."""

    what: str = "states"

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        assert batch is not None
        return torch.full((len(batch[0]),), float(_PEEKS[self.what](hands)))


@dataclass(frozen=True)
class UpdateWithClosure(Action):
    """An update that asks for the loss itself."""

    index: int = 0

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        optimizer = hands.optimizers[self.index % len(hands.optimizers)]

        def closure() -> Any:
            assert batch is not None
            optimizer.zero_grad()
            loss = _losses("squares", hands, batch, hands.forward(batch[0])).mean()
            loss.backward()
            return loss

        if hands.scaler is None and any(p.requires_grad for p in hands.parameters()):
            optimizer.step(closure)


@dataclass(frozen=True)
class Penalty(Action):
    """A backward of the losses, and of each row's gradient with respect to inputs."""

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        assert batch is not None
        inputs = batch[0].detach().clone().requires_grad_()
        outputs = hands.forward(inputs)
        if not outputs.requires_grad:
            return
        (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = slopes.square().sum(1).mean() + outputs.square().mean()
        if loss.requires_grad:
            loss.backward()


@dataclass(frozen=True)
class OnSideStream(Action):
    """Some lines on a stream of their own, where there are streams.

    `each`: one for each replica, not each device.
    """

    actions: tuple[Action, ...] = ()
    each: bool = False

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        assert batch is not None
        device = batch[0].device
        if device.type == "cpu":
            return [action.do(hands, batch, k) for action in self.actions]
        context = torchstrategy.get_replica_context()
        side = _side_stream(
            device,
            context.replica_id_in_sync_group
            if self.each and context is not None
            else 0,
        )
        main = torch.accelerator.current_stream(device)
        side.wait_stream(main)
        with torch.get_device_module(device.type).stream(side):
            found = [action.do(hands, batch, k) for action in self.actions]
        main.wait_stream(side)
        return found


@functools.cache
def _side_stream(device: torch.device, replica: int) -> torch.Stream:
    return torch.Stream(device=device)


@dataclass(frozen=True)
class Kept(Action):
    """A backward of the losses, and of what hooks keep outside of the model.

    `again`: it is what the step returns.
    """

    again: bool = False

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        assert batch is not None
        outputs = hands.forward(batch[0])
        kept = kept_rows(hands.reads, outputs)
        rows = _losses("squares", hands, batch, outputs) + kept
        loss = rows.sum() / len(batch[0])
        if loss.requires_grad:
            loss.backward()
        return kept_rows(hands.reads, outputs).detach() if self.again else rows.detach()


@dataclass(frozen=True)
class LookAtKept(Action):
    """Reads what hooks keep, after an update perhaps, where replicas have waited.

    They have waited for each other.
    """

    def do(self, hands: Hands, batch: Batch | None, k: int) -> Any:
        assert batch is not None
        return kept_rows(hands.reads, batch[0]).detach()
