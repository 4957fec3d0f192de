"""The user's hooks on a parameter, which get the gradient of the whole batch.

torch would call them during backward, with the gradient of this worker's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch


@final
class UserHooks:
    """The hooks of one parameter, which are taken off for the length of a backward.

    Args:
        parameter: The parameter.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        # torch keeps these tables, so they are emptied and filled again, and not
        # replaced.
        self._tables: list[dict[int, Any] | None] = [
            parameter._backward_hooks,
            parameter._post_accumulate_grad_hooks,
        ]
        self._taken = [dict(table or {}) for table in self._tables]
        for table in self._tables:
            if table:
                table.clear()

    def give_back(self) -> None:
        """Registers the hooks again."""
        for table, taken in zip(self._tables, self._taken, strict=True):
            if table is not None:
                table.update(taken)

    def call_on_gradient(self) -> None:
        """Calls what `register_hook` registered, which may return another gradient."""
        for hook in self._registered(0):
            if self._parameter.grad is not None:
                if _is_of_several(hook):
                    raise RuntimeError(_MULTIPLE)
                changed = hook(self._parameter.grad)
                self._parameter.grad = (
                    self._parameter.grad if changed is None else changed
                )

    def call_on_accumulated(self) -> None:
        """Calls what `register_post_accumulate_grad_hook` has registered."""
        for hook in self._registered(1):
            if self._parameter.grad is not None:
                hook(self._parameter)

    def _registered(self, kind: int) -> Iterator[Any]:
        """The hooks that were there when backward began.

        Hooks that another hook has removed meanwhile are left out.
        """
        table = self._tables[kind]
        for key, hook in self._taken[kind].items():
            if table is not None and key in table:
                yield hook


def _is_of_several(hook: Any) -> bool:
    """Whether a hook is one that `register_multi_grad_hook` has put on the tensor.

    Such a hook is torch's own, and looks at several tensors.
    """
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == torch.autograd.graph.__file__


_MULTIPLE = (
    "register_multi_grad_hook was given a parameter: torch calls its function during "
    "backward, when there are only gradients of this worker's rows. Register a hook on "
    "each parameter, which sees the gradient of the whole batch: "
    "parameter.register_post_accumulate_grad_hook(function)."
)
