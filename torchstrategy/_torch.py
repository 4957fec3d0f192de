"""The only imports of private torch names, each with its reason.

When torch moves one of them, this file changes and no other does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# `with mode:` would run the mode's own `__enter__`, which may reset it (FlopCounterMode starts counting at zero).
# A replica thread has to wear the very mode that the caller has on. No public way to push without entering.
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

# The walker over nested containers. torch's own tracing, export and DataLoader code stand on it, and libraries
# register their containers with it; `torch.utils.pytree` is not public yet.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "TreeSpec",
    "dispatch_modes",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul",
    "function_modes",
    "has_gradient_hooks",
    "make_parameter",
    "on_gradient",
    "pop_dispatch_mode",
    "pop_function_mode",
    "pop_saved_tensors_hooks",
    "privateuse1_name",
    "push_dispatch_mode",
    "push_function_mode",
    "push_saved_tensors_hooks",
    "saved_tensors_hooks",
    "set_slot",
    "slot",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version",
]

# The fused loops that torch's optimizers run on. `torch.optim` is their only public user.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul

# The default saved-tensor hooks of a thread: `torch.autograd.graph.saved_tensors_hooks` sets them and cannot tell
# which are set.
push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


# What a device type of one's own is called.
privateuse1_name: Callable[[], str] = torch._C._get_privateuse1_backend_name

# The slot of a tensor that autograd itself writes, below whatever a subclass makes of `grad`.
_grad: Any = torch.Tensor.grad
slot: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
set_slot: Callable[[torch.Tensor, torch.Tensor | None], None] = _grad.__set__


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The (pack, unpack) pair that is in force on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def make_parameter(cls: type[torch.nn.Parameter], data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """A leaf of the class `cls` over the memory of `data`.

    `torch.nn.Parameter.__new__` asks for a type's `__torch_function__` in ways that differ between classes of data;
    this is the constructor that it ends in.
    """
    return torch.Tensor._make_subclass(cls, data, requires_grad)


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place. The autograd engine's own count; no public name."""
    return tensor._version


on_gradient: Callable[[torch.Tensor, Callable[[torch.Tensor], None]], Any]
on_gradient = torch.Tensor.register_post_accumulate_grad_hook  # public, but without annotations


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks of the user wait for this leaf's gradient. Registered publicly, readable only here."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)
