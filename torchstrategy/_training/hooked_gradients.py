"""Gradient hooks of the user's parameters, which see the sum of all replicas once.

A replica's parameters have none of the user's hooks. Hooks of ours count how often backward adds to them. So when
gradients are reduced, the user's hooks see a gradient that backward made, and none that a step assigned.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torchstrategy._core.torch_internals import has_gradient_hooks, on_computed, on_gradient
from torchstrategy._training.replica_gradients import CurrentRun, ReplicaGradients, ReplicaParameter


def count_additions(of_replicas: Sequence[ReplicaGradients], index: int) -> None:
    """From here on, counts how often backward adds to the gradient of one parameter, in each replica."""
    for of_replica in of_replicas:
        parameter = of_replica.parameters[index] if index < len(of_replica.parameters) else None
        # These hooks stay as long as the parameter. `counts` remembers them: a later run does not add them again.
        if parameter is not None and parameter.requires_grad and not parameter.counts:
            parameter.counts = True
            on_computed(parameter, functools.partial(_computed, parameter.run, index))
            on_gradient(parameter, _counted)


def seen_by_hooks(
    of_replicas: Sequence[ReplicaGradients], owners: Sequence[torch.Tensor], names: Sequence[str]
) -> set[int]:
    """The positions of the user's parameters whose hooks are to see what backward has added.

    No hook sees a gradient that a step assigned itself.

    Raises:
        RuntimeError: If a hook would see something else than in plain PyTorch; the parameter is named.
    """
    seen: set[int] = set()
    for of_replica in of_replicas:
        for index, times in of_replica.added.items():
            owner = owners[index]
            if times > 1 and has_gradient_hooks(owner):
                raise RuntimeError(
                    f"{names[index]} has a gradient hook, and the step ran backward {times} times before "
                    "the replicas' gradients came together: the hook would see only their sum. Remove the hook, "
                    "or run one backward in each strategy.run."
                )
            if has_gradient_hooks(owner):
                seen.add(index)
        for index, times in of_replica.computed.items():
            # `torch.autograd.grad` computes a gradient of a parameter and adds it to no slot.
            if times > of_replica.added.get(index, 0) and owners[index]._backward_hooks:
                raise RuntimeError(
                    f"{names[index]} has a gradient hook, and the step differentiated by torch.autograd.grad: "
                    "in plain PyTorch the hook sees, and may change, that gradient of the whole batch, and a "
                    "replica has that of its own rows. Remove the hook, or call backward() and use .grad."
                )
        of_replica.added.clear()
        of_replica.computed.clear()
    return seen


def _computed(run: CurrentRun, index: int, gradient: torch.Tensor) -> None:
    if run.gradients is not None:
        run.gradients.computed[index] = run.gradients.computed.get(index, 0) + 1


def _counted(parameter: torch.Tensor) -> None:
    assert isinstance(parameter, ReplicaParameter)
    if parameter.run.gradients is not None:
        added = parameter.run.gradients.added
        added[parameter.position] = added.get(parameter.position, 0) + 1
