"""The private names of torch that only lints need, each with its reason."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.modules import batchnorm, dropout
from torch.utils import _python_dispatch
from torch.utils.data import dataloader

# The class of what `iter(loader)` returns. Its `_next_index` draws the rows of a batch,
# in the program's own thread.
LoaderIterator: Any = dataloader._BaseDataLoaderIter

# The classes under all norms that have statistics of several rows, and under those of a
# batch.
NormBase: Any = batchnorm._NormBase
BatchNorm: Any = batchnorm._BatchNorm

# The class under all layers of dropout, with their rate in `p`.
Dropout: Any = dropout._DropoutNd

# What `GradScaler.unscale_` does to gradients, whatever their number.
UNSCALE: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

# What all of `Module.to`, `cuda`, `half` and their kin call, for the module and for
# each in it.
APPLY = "_apply"

# Nobody else says whether a tensor is one of `vmap` and its kin, whose class is
# `torch.Tensor`.
_functorch: Any = torch._C._functorch

# A block without dispatch modes. A number that autograd has saved is a tensor which, in
# a mode, turns into a number.
without_modes: Callable[[], AbstractContextManager[Any]] = (
    _python_dispatch._disable_current_modes
)


def has_hook_of_gradients(model: Any) -> bool:
    """Whether the program has given a `DistributedDataParallel` a hook.

    The hook reduces the gradients in its place.
    """
    return bool(getattr(model, "_comm_hooks", ()))


def ignored_names(model: Any) -> set[str]:
    """The parameters and buffers that a `DistributedDataParallel` leaves alone."""
    return set(getattr(model, "parameters_to_ignore", ()))


def scale_of(scaler: Any) -> torch.Tensor | None:
    """The tensor by which a `GradScaler` multiplies losses.

    `get_scale` would wait for the device.
    """
    found: torch.Tensor | None = getattr(scaler, "_scale", None)
    return found


def part_of(gradient: Any) -> torch.Tensor | None:
    """The part of a sharded gradient that this rank has, without an operator.

    It is None of one that is not sharded.
    """
    # Who has not imported it has none.
    tensors = sys.modules.get("torch.distributed.tensor")
    if gradient is None or tensors is None or not isinstance(gradient, tensors.DTensor):
        return None
    return (
        gradient._local_tensor
        if any(placement.is_shard() for placement in gradient.placements)
        else None
    )


def held_here(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What this rank has of a gradient: its part if it is sharded, else all of it."""
    part = part_of(gradient)
    return gradient if part is None else part


def sharded_parameter_class() -> Any:
    """The class of what `fully_shard` makes of each parameter, or None.

    It is None while the program has not imported it.

    Its first argument is the whole parameter, and its `sharded_param` the part of this
    rank.
    """
    module: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    return None if module is None else module.FSDPParam


def ranks_of_mesh(parameter: Any) -> tuple[int, ...]:
    """The ranks among which a `DTensor` is shared out, in order."""
    return tuple(sorted(parameter.device_mesh.mesh.flatten().tolist()))


def has_hooks_of_gradients(parameter: torch.Tensor) -> bool:
    """Whether the program gave a parameter hooks, which may change its gradient."""
    return bool(parameter._backward_hooks) or bool(
        getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def is_subset(dataset: Any) -> bool:
    """Whether a dataset is some rows of another one."""
    return isinstance(dataset, torch.utils.data.Subset)


def held_by(module: torch.nn.Module, kind: str) -> list[tuple[str, Any]]:
    """The `parameters`, `buffers` or `modules` of a module itself, by name.

    It is nothing if its `__init__` was not called.

    It asks no method, which the program may have overridden. A scripted module has
    other mappings there.
    """
    held = vars(module).get(f"_{kind}")
    return [] if held is None else list(held.items())


def stands_for_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor of torch's own class has no memory, and stands for others.

    It may stand for zeros, as in `vmap` and `jvp`.
    """
    if tensor._is_zerotensor() or torch._is_functional_tensor(tensor):
        return True
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer of a module is in its `state_dict`."""
    return name not in module._non_persistent_buffers_set


def replaced_functions() -> list[tuple[Any, str, Any]]:
    """The attributes to replace so that a function with its own backward has a frame.

    It has the frame where it is applied.

    Since torch 2.15 `Function.apply` is written in C++, and no frame would say that an
    operator comes from one.
    """
    function: Any = torch.autograd.Function
    apply_in_cpp = vars(function)["apply"]
    if isinstance(apply_in_cpp, classmethod):  # of Python
        return []

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply_in_cpp.__get__(None, cls)(*args, **kwargs)

    return [(function, "apply", classmethod(apply))]


def known_to_script(stand_in: Any, original: Any) -> Any:
    """Returns what stands for a function of torch.

    `torch.jit.script` takes it for that function from now on.

    The compiler of TorchScript knows its own functions by their addresses, and compiles
    the source of all others.
    """
    operator = torch.jit._builtins._find_builtin(original)
    if operator is not None:
        torch.jit._builtins._register_builtin(stand_in, operator)
        weakref.finalize(
            stand_in, torch.jit._builtins._get_builtin_table().pop, id(stand_in), None
        )
    return stand_in
