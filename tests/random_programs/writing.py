"""The ways in which users write on a tensor outside of a step.

Each of them halves it and adds a little.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def _new(t: torch.Tensor) -> torch.Tensor:
    return t.detach() * 0.5 + 0.125


def _numpy(t: torch.Tensor) -> None:
    if t.device.type == "cpu":
        array = t.detach().numpy()
        array *= 0.5
        array += 0.125
    else:
        t.data.copy_(_new(t))


def _dlpack(t: torch.Tensor) -> None:
    (torch.from_dlpack(t.detach()) if t.device.type == "cpu" else t.data).copy_(_new(t))


def _storage(t: torch.Tensor) -> None:
    if t.is_contiguous() and t.device.type == "cpu":  # elsewhere nothing can see it
        t.untyped_storage().copy_(_new(t).contiguous().untyped_storage())
    else:
        t.data.copy_(_new(t))


def _no_grad(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.mul_(0.5).add_(0.125)


def _inference_mode(t: torch.Tensor) -> None:
    with torch.inference_mode():
        t.mul_(0.5).add_(0.125)


def _set_item(t: torch.Tensor) -> None:
    t.data[...] = _new(t)


def _set_part(t: torch.Tensor) -> None:
    t.data.view(-1)[0] = 0.25


def _assign(t: torch.Tensor) -> None:
    t.data = _new(t)


def _out(t: torch.Tensor) -> None:
    torch.add(t.detach() * 0.5, 0.125, out=t.data)


def _foreach(t: torch.Tensor) -> None:
    torch._foreach_mul_([t.data], 0.5)
    torch._foreach_add_([t.data], 0.125)


def _set(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.set_(_new(t))  # type: ignore[call-overload]


def _init(t: torch.Tensor) -> None:
    nn.init.constant_(t, 0.125)


def _swap(t: torch.Tensor) -> None:
    if isinstance(t, nn.Parameter):
        other = nn.Parameter(_new(t), t.requires_grad)
        if t.grad is not None:
            other.grad = t.grad.clone()
        torch.utils.swap_tensors(t, other)
    else:
        t.data.copy_(_new(t))


def _flat(t: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(_new(t).reshape(-1), [t])


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "data.mul_": lambda t: t.data.mul_(0.5).add_(0.125),
    "data.copy_": lambda t: t.data.copy_(_new(t)),
    "data.clamp_": lambda t: t.data.clamp_(-0.1, 0.1),
    "data[...] =": _set_item,
    "a part of data": _set_part,
    "detach().mul_": lambda t: t.detach().mul_(0.5).add_(0.125),
    "numpy": _numpy,
    "dlpack": _dlpack,
    "storage": _storage,
    "no_grad": _no_grad,
    "inference_mode": _inference_mode,
    "foreach on data": _foreach,
    "out=": _out,
    "data =": _assign,
    "set_": _set,
    "init": _init,
    "swap_tensors": _swap,
    "vector_to_parameters": _flat,
}
