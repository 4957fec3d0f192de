"""The tensors that hold the user's gradients.

In plain PyTorch backward adds to the tensor that is in `.grad`, so whoever holds that
tensor, or the buffer of which it is a view, sees the new gradient there. So the
gradient of a run is written into the tensor that was there before, unless the step
cleared it to None or assigned another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch

from torchstrategy._base.context import without_autograd
from torchstrategy._base.torch_internals import (
    foreach_add_,
    foreach_copy_,
    unseen_by_function_modes,
)


@final
class UserGradients:
    """The tensors in which the user's parameters keep their gradients, in one run.

    Args:
        gradients: What is in `.grad` of each parameter when the run begins.
    """

    def __init__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        # What plain PyTorch would have in `.grad` now; None if that is no tensor which
        # the user can hold.
        self.tensors = list(gradients)
        self._sums: dict[int, torch.Tensor] = {}  # what has to be added to some of them
        self._values: dict[int, torch.Tensor] = {}  # what some others are to become
        # The tensors that were written and have to be as before if the run fails, each
        # with a copy, by their ids.
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def replace(self, indices: Iterable[int]) -> None:
        """The step has replaced some gradients: their tensors stay as they are."""
        for index in indices:
            self.tensors[index] = None

    def will_add(
        self, index: int, accumulated: torch.Tensor | None, gradient: torch.Tensor
    ) -> bool:
        """Whether `write` will add a gradient to the accumulated one.

        Then the sum needs no memory of its own.
        """
        if (
            accumulated is None
            or accumulated is not self.tensors[index]
            or not can_hold(accumulated, gradient)
        ):
            return False
        self._sums[index] = gradient
        return True

    def take(self, accumulated: list[torch.Tensor | None]) -> None:
        """Puts the user's tensors in the place of accumulated gradients.

        Then `write` then writes into them.
        """
        for index in [
            index
            for index in self._sums
            if accumulated[index] is not self.tensors[index]
        ]:
            known = accumulated[index]  # another thread has added to it since
            accumulated[index] = (
                self._sums[index] if known is None else known + self._sums[index]
            )
            del self._sums[index]
        for index, (tensor, gradient) in enumerate(
            zip(self.tensors, accumulated, strict=True)
        ):
            if (
                tensor is not None
                and gradient is not None
                and gradient is not tensor
                and can_hold(tensor, gradient)
            ):
                self._values[index], accumulated[index] = gradient, tensor

    def write(self, can_fail: bool = False) -> None:
        """Writes what `take` has found.

        If the run may still fail, it copies before what it overwrites.
        """
        if not (self._values or self._sums):
            return
        with without_autograd(), unseen_by_function_modes():
            for change, gradients in (
                (foreach_copy_, self._values),
                (foreach_add_, self._sums),
            ):
                of_users = [self.tensors[index] for index in gradients]
                tensors = [tensor for tensor in of_users if tensor is not None]
                for tensor in tensors if can_fail else ():
                    if id(tensor) not in self._before:
                        self._before[id(tensor)] = tensor, tensor.clone()
                if tensors:
                    # One call, in which no signal's handler can raise.
                    change(tensors, list(gradients.values()))
        self._values, self._sums = {}, {}

    def forget(self) -> None:
        """What was written stays, whether or not the run fails."""
        self._before.clear()

    def restore(self) -> None:
        """The run has failed: what was written since the last update is undone."""
        with without_autograd(), unseen_by_function_modes():
            for tensor, before in self._before.values():
                tensor.copy_(before)


def can_hold(tensor: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a gradient can be written into a tensor, or be added to it, in place."""
    # A run asks this for each parameter, so the attributes are compared one by one,
    # which is fast.
    with unseen_by_function_modes():
        if (
            type(tensor) is not type(gradient)
            or tensor.layout is not torch.strided
            or tensor.layout != gradient.layout
        ):
            return False
        if (
            tensor.shape != gradient.shape
            or tensor.dtype != gradient.dtype
            or tensor.device != gradient.device
        ):
            return False
        is_plain = not tensor.requires_grad and not tensor.is_inference()
        return is_plain and (tensor.is_contiguous() or not _overlaps(tensor))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may lie in one place, as in an expanded one."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
