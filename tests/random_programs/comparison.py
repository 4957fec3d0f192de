"""Everything that a program leaves behind, and what differs."""

from __future__ import annotations

import math
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from .modules import Point
from .training import Training

Snapshot = dict[str, Any]

RELATIVE, ABSOLUTE = 1e-9, 1e-11
_OF_TORCH = {
    "training",
    "_non_persistent_buffers_set",
    "call_super_init",
    "_flat_weights",
    "_flat_weight_refs",
}


def snapshot(training: Training) -> Snapshot:
    """Path to value; tensors are copies on the CPU."""
    found = dict(_of_module("model", training.model))
    for index, other in enumerate(training.others):
        found.update(_of_module(f"other {index}", other))
    for index, optimizer in enumerate(training.optimizers):
        found.update(_of_optimizer(f"optimizer {index}", optimizer))
    for index, scheduler in enumerate(training.schedulers):
        state = {
            name: value
            for name, value in scheduler.state_dict().items()
            if not name.startswith("_sched")
        }
        found.update(_of(f"scheduler {index}", state))
    if training.scaler is not None:
        found.update(_of("scaler", training.scaler.state_dict()))
    if training.trainer is not None:
        found["trainer.steps"] = training.trainer.steps
    for index, result in enumerate(training.results):
        found[f"result {index}"] = result
    return found


def _of_module(path: str, root: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in root.named_parameters(path, remove_duplicate=False):
        yield name, _copied(parameter)
        yield from _marks_of(name, parameter)
        yield f"{name}.requires_grad", parameter.requires_grad
        yield (
            f"{name}.grad",
            None if parameter.grad is None else _copied(parameter.grad),
        )
    for name, buffer in root.named_buffers(path, remove_duplicate=False):
        yield f"{name} (buffer)", _copied(buffer)
        yield from _marks_of(name, buffer)
    for name, module in root.named_modules(prefix=path):
        yield f"{name}.training", module.training
        for attribute, value in vars(module).items():
            hidden = attribute in _OF_TORCH or attribute.startswith(
                ("_forward", "_backward", "_state", "_load", "kept")
            )
            if not hidden and attribute not in ("_parameters", "_buffers", "_modules"):
                yield from _of(f"{name}.{attribute} (attribute)", value)


def _marks_of(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """The attributes that a program has set on a tensor."""
    for name, value in vars(tensor).items():
        yield from _of(f"{path}.{name} (attribute)", value)


def _of_optimizer(path: str, optimizer: Any) -> Iterator[tuple[str, Any]]:
    for i, group in enumerate(optimizer.param_groups):
        yield from _of(
            f"{path}.param_groups[{i}]",
            {k: v for k, v in group.items() if k != "params"},
        )
        for j, parameter in enumerate(group["params"]):
            entry = optimizer.state.get(parameter, {})
            yield from _of(f"{path}.state[{i}][{j}]", dict(entry))
    for name in ("steps", "count", "slow"):
        if name in vars(optimizer):
            yield from _of(f"{path}.{name}", vars(optimizer)[name])


def _of(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain values below one; what has no number in it is left out."""
    if isinstance(value, torch.Tensor):
        yield path, _copied(value)
        yield from _marks_of(path, value)
    elif isinstance(value, (bool, int, float, str, type(None), complex)):
        yield path, value
    elif isinstance(value, numpy.ndarray):
        yield path, torch.tensor(value)
    elif isinstance(value, (set, frozenset)):
        yield path, sorted(value)
    elif isinstance(value, Mapping):
        yield f"{path}: keys", sorted(map(str, value))
        for key, below in value.items():
            yield from _of(f"{path}[{key!r}]", below)
    elif isinstance(value, (list, tuple, deque)):
        yield f"{path}: type and length", (type(value).__name__, len(value))
        for index, below in enumerate(value):
            yield from _of(f"{path}[{index}]", below)
    elif isinstance(value, (Point, types.SimpleNamespace)):
        yield from _of(path, vars(value))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().to_dense().clone()


def differences(ours: Snapshot, plain: Snapshot) -> dict[str, str]:
    """Path to what differs there."""
    found = {}
    for path in plain.keys() | ours.keys():
        if path not in ours or path not in plain:
            found[path] = (
                "is only there in replicas"
                if path in ours
                else "is only there in plain PyTorch"
            )
        elif how := _difference(ours[path], plain[path]):
            found[path] = how
    return dict(sorted(found.items()))


def _difference(ours: Any, plain: Any) -> str:
    if isinstance(ours, torch.Tensor) and isinstance(plain, torch.Tensor):
        if (ours.dtype, ours.shape) != (plain.dtype, plain.shape):
            return (
                f"is {ours.dtype} {list(ours.shape)}; plain {plain.dtype} "
                f"{list(plain.shape)}"
            )
        if ours.is_floating_point():
            close = torch.isclose(ours, plain, RELATIVE, ABSOLUTE, equal_nan=True)
            return (
                ""
                if close.all()
                else (
                    f"is {ours.flatten().tolist()[:6]}; plain "
                    f"{plain.flatten().tolist()[:6]}"
                )
            )
        return (
            ""
            if torch.equal(ours, plain)
            else f"is {ours.tolist()}; plain {plain.tolist()}"
        )
    if isinstance(ours, float) and isinstance(plain, float):
        equal = math.isclose(ours, plain, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (
            ours != ours and plain != plain
        )
        return "" if equal else f"is {ours!r}; plain {plain!r}"
    return (
        ""
        if type(ours) is type(plain) and ours == plain
        else f"is {ours!r:.200}; plain {plain!r:.200}"
    )


def size_of(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """The largest difference of two numbers in the same place.

    It is infinite where something else differs.
    """
    largest = 0.0
    for path in plain.keys() | ours.keys():
        first, second = ours.get(path), plain.get(path)
        if all(
            isinstance(v, torch.Tensor) and v.is_floating_point()
            for v in (first, second)
        ):
            if first.shape != second.shape:
                return math.inf
            gap = (
                (first - second).abs().masked_fill(first.isnan() & second.isnan(), 0.0)
            )
            largest = max([largest, *gap.nan_to_num(math.inf).flatten().tolist()])
        elif _difference(first, second):
            return math.inf
    return largest
