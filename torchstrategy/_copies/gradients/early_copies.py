"""Gradients that leave an accelerator while backward still makes others.

They are for parameters in the CPU's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from torchstrategy._base.devices import copies_by_itself
from torchstrategy._base.marks import version_of
from torchstrategy._base.streams import on_stream
from torchstrategy._base.torch_internals import raw_grad, unseen_by_function_modes
from torchstrategy._copies.gradients.replica_gradients import (
    CurrentRun,
    ReplicaParameter,
    call_in_backward,
    offer_gradient,
)
from torchstrategy._group.copy_streams import Cargo, begin_copy_to_host, copy_stream
from torchstrategy._group.transfer import is_sent_alone


# Note [Gradients that leave early]
# Backward of a layer and the copy of another layer's gradient need different parts of
# an accelerator. So a large gradient is copied into pinned memory of the CPU as soon as
# backward has made it, on the copy stream.
# - The memory is pinned wherever the parameter is. Other memory is new in each step:
#   the system makes its pages one by one while they are written, and on an H100 a step
#   then takes three times what the link takes for as many bytes. Torch keeps pinned
#   memory, and gives the same again in the next step.
# - A copy is an offer. At the reduction it is taken if the replica still has the very
#   gradient that was copied, at the same version; else the gradient is copied again.
# - Autograd adds to a gradient in place. Before a second backward adds to one, its
#   stream waits for the copy.
# - A gradient is kept until its copy is done: the step may clear it, and its memory is
#   the compute stream's.
@final
class EarlyCopies:
    """What one replica on an accelerator copies during backward, in run after run.

    Args:
        parameters: The parameters of the replica.
    """

    def __init__(self, parameters: Sequence[ReplicaParameter]) -> None:
        self._parameters = parameters
        # The positions of parameters whose gradients are copied early in this run.
        self._wanted: set[int] = set()
        # By position: a gradient, its version when it was copied, and its copy.
        self._offered: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def begin(self, owners: Sequence[torch.Tensor]) -> None:
        """A run begins. `owners` are the user's parameters."""
        local = enumerate(zip(self._parameters, owners, strict=False))
        self._wanted = {
            i
            for i, (p, owner) in local
            if p.requires_grad and _is_large(p) and _leaves(p, owner)
        }
        for index in self._wanted:
            call_in_backward(self._parameters[index], offer_gradient, _wait_for_copy)

    def offer(self, index: int) -> None:
        """Backward has added to a gradient.

        Called in backward, on whichever thread it runs.
        """
        gradient = raw_grad(self._parameters[index])
        if (
            index in self._wanted
            and gradient is not None
            and not gradient.requires_grad
            and _is_large(gradient)
        ):
            with unseen_by_function_modes(), torch.no_grad():
                self._offered[index] = (
                    gradient,
                    version_of(gradient),
                    _begin_copy(gradient),
                )

    def take(self, local: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The copies of gradients that the replica has when gradients are reduced.

        They have arrived.
        """
        offered, self._offered = self._offered, {}
        if offered:
            copy_stream(
                self._parameters[next(iter(offered))].device, Cargo.GRADIENTS
            ).synchronize()
        return {
            i: copy
            for i, (own, known, copy) in offered.items()
            if local.get(i) is own and version_of(own) == known
        }


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and is_sent_alone(tensor)


def _leaves(parameter: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether a gradient can go to the user's parameter while the program goes on."""
    return owner.is_cpu and copies_by_itself(parameter.device)


def _begin_copy(gradient: torch.Tensor) -> torch.Tensor:
    """A copy that is there once the copy stream is done.

    The caller keeps the gradient until then.
    """
    stream = copy_stream(gradient.device, Cargo.GRADIENTS)
    stream.wait_stream(torch.accelerator.current_stream(gradient.device))
    with on_stream(stream):
        return begin_copy_to_host(gradient)


def _wait_for_copy(run: CurrentRun, index: int, gradient: torch.Tensor) -> None:
    """Backward is about to add to a gradient: its stream waits for the copy. A hook.

    This holds on whichever thread backward runs.
    """
    sender = None if run.gradients is None else run.gradients.sender
    if isinstance(sender, EarlyCopies) and index in sender._offered:
        copies = copy_stream(gradient.device, Cargo.GRADIENTS)
        torch.accelerator.current_stream(gradient.device).wait_stream(copies)
