"""What one step of a training leaves behind, as numbers on the CPU.

No later step writes on these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.context import local_object
from torchstrategy._base.objects.module_traversal import TORCHS_OWN
from torchstrategy._base.tree import leaves_with_names
from torchstrategy._base.types import Tree
from torchstrategy._group.participants import Participants
from torchstrategy.testing._same_as_plain.loss_counts import NOTHING_READ, LossCounts

Numbers: TypeAlias = dict[str, "torch.Tensor | None"]
"""Tensors by name. None stands for a gradient that is None."""


@final
@dataclass(frozen=True)
class Sighting:
    """The numbers of one replica after a step.

    Args:
        returned: The numbers that the step returned.
        attributes: The numbers that are plain attributes of its modules.
    """

    # The class is no container that torch's pytree knows, so a run returns one sighting
    # for each replica and does not regroup what is inside.
    returned: Numbers
    attributes: Numbers

    @classmethod
    def of(cls, returned: Tree, models: Tree) -> Sighting:
        """Takes the numbers where the step just ended.

        That may be in a replica or in plain PyTorch.
        """
        return cls(_only_numbers(leaves_with_names(returned)), _attributes_of(models))


@final
@dataclass(frozen=True)
class Record:
    """The state of one training after one step.

    Args:
        seen: One sighting for each replica that took part; for plain PyTorch one.
        shares: How much each replica counted.
        updates: The gradients at each `optimizer.step()`.
        gradients: The gradients after the step.
        parameters: The parameters by name.
        buffers: The buffers by name.
        optimizer: The state and the settings of the optimizer.
        tensors: The tensors outside of models that the step holds.
        losses: What the losses of the replicas were divided by.
        loss_parts: How much the loss of each replica is of that of the batch, where
            gradients are weighted by that. None: its part of the rows, or what its user
            has said.
    """

    seen: tuple[Sighting, ...]
    shares: Participants
    updates: tuple[Numbers, ...]
    gradients: Numbers
    parameters: Numbers
    buffers: Numbers
    optimizer: Numbers
    tensors: Numbers
    losses: LossCounts = NOTHING_READ
    loss_parts: tuple[float, ...] | None = None


def frozen(value: object) -> torch.Tensor | None:
    """A tensor or a number as a new tensor on the CPU; None for anything else."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return None
        value = value.detach().to("cpu", copy=True)
        return value.to_dense() if value.layout is not torch.strided else value
    # A Python float counts as of torch's default dtype, and so does numpy's float64,
    # which is a Python float, too.
    if isinstance(value, (float, complex)):
        return torch.tensor(value, dtype=_default_dtype(value), device="cpu")
    if isinstance(value, int):
        return torch.tensor(value, device="cpu") if abs(value) < 2**63 else None
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.array(value))
    return None


def named_parameters(models: Tree) -> dict[str, nn.Parameter]:
    """The parameters of all models."""
    pairs = leaves_with_names(models)
    return {
        joined(prefix, name): p
        for prefix, model in pairs
        for name, p in model.named_parameters()
    }


def named_buffers(models: Tree) -> dict[str, torch.Tensor]:
    """The buffers of all models."""
    pairs = leaves_with_names(models)
    return {
        joined(prefix, name): b
        for prefix, model in pairs
        for name, b in model.named_buffers()
    }


def gradients_of(parameters: Mapping[str, torch.Tensor]) -> Numbers:
    """The gradients that parameters have now."""
    return {name: frozen(p.grad) for name, p in parameters.items()}


def optimizer_numbers(optimizers: Tree, names: Mapping[int, str]) -> Numbers:
    """The state and the settings of optimizers.

    Args:
        optimizers: An optimizer, or containers of them; None if there is none.
        names: The names of parameters, by their ids.
    """
    found: Numbers = {}
    for prefix, optimizer in leaves_with_names(optimizers or ()):
        for parameter, state in optimizer.state.items():
            owner = names.get(id(parameter), "a tensor that is in no module")
            found.update(
                _only_numbers(
                    (f"{prefix}`{key}` of `{owner}`", value)
                    for key, value in state.items()
                )
            )
        for index, group in enumerate(optimizer.param_groups):
            settings = (
                (f"{prefix}param_groups[{index}][{key!r}]", v)
                for key, v in group.items()
                if key != "params"
            )
            found.update(_only_numbers(settings))
    return found


def parameters_of(
    optimizer: Optimizer, names: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    """The parameters that an optimizer updates, by name."""
    pairs = [
        (i, j, p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    ]
    return {
        names.get(id(p), f"param_groups[{i}]['params'][{j}]"): p for i, j, p in pairs
    }


def joined(prefix: str, name: str) -> str:
    """`layers.0.weight`, or `['critic'].weight`."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _default_dtype(value: float | complex) -> torch.dtype:
    dtype = torch.get_default_dtype()
    return dtype if isinstance(value, float) else dtype.to_complex()


def _attributes_of(models: Tree) -> Numbers:
    """The numbers among the plain attributes of modules, also in lists and dicts.

    In a replica: of its own modules.
    """
    found: Numbers = {}
    for prefix, model in leaves_with_names(models):
        for path, module in local_object(model).named_modules():
            owner = joined(prefix, path)
            held = {
                name: value
                for name, value in vars(module).items()
                if name not in TORCHS_OWN
            }
            for name, value in held.items():
                leaves = (
                    (joined(owner, name) + rest, leaf)
                    for rest, leaf in leaves_with_names(value)
                )
                found.update(
                    _only_numbers(
                        (n, leaf)
                        for n, leaf in leaves
                        if not isinstance(leaf, nn.Parameter)
                    )
                )
    return found


def _only_numbers(pairs: Iterable[tuple[str, Any]]) -> Numbers:
    return {
        name: number for name, value in pairs if (number := frozen(value)) is not None
    }
