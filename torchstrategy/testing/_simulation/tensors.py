"""Functions of tensors for which torch's C++ has a wrong answer.

Examples are `tensor.to("sim")` and `tensor.data = ...`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function, has_torch_function_unary

from torchstrategy._base.torch_internals import swap_tensors
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    current,
    current_device,
    is_simulated,
)
from torchstrategy.testing._simulation.torch_internals import (
    ALLOWED_BEFORE_SIZES_ARE_KNOWN,
    MAY_SHARE_IMPLEMENTATION,
    list_device_constructors,
    register_hooks_again,
    register_scripted,
    scripted_as,
    tensor_data,
    tensor_to,
)


def install() -> None:
    """Replaces the functions."""
    cls: Any = torch.Tensor
    cls.to = _knowing_the_current_device(tensor_to, position=1)
    ALLOWED_BEFORE_SIZES_ARE_KNOWN.append(cls.to)
    cls.new_tensor = _new_tensor(_reading_items(cls.new_tensor, position=1))
    cls.new, cls.type = _following_the_tensor(cls.new), _following_the_tensor(cls.type)
    for name in ("tensor", "as_tensor", "asarray", "sparse_coo_tensor"):
        original = getattr(torch, name)
        setattr(
            torch,
            name,
            _shown_to_modes(_knowing_the_current_device(_reading_items(original))),
        )
        if (scripted := scripted_as(original)) is not None:
            register_scripted(getattr(torch, name), scripted)
    # A default device acts on the functions in this list, which has to be made again
    # with the new ones.
    list_device_constructors.cache_clear()
    cls.data = property(tensor_data.__get__, _set_data, doc=tensor_data.__doc__)
    MAY_SHARE_IMPLEMENTATION.replace(
        _may_share_implementation(MAY_SHARE_IMPLEMENTATION.now())
    )


def _knowing_the_current_device(
    call: Callable[..., Any], position: int | None = None
) -> Callable[..., Any]:
    """Makes a replacement for a function in which `"sim"` means the current device.

    C++ would take the first device.
    """

    @functools.wraps(call)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position:
            args = (*args[:position], with_index(args[position]), *args[position + 1 :])
        if "device" in kwargs:
            kwargs["device"] = with_index(kwargs["device"])
        return call(*args, **kwargs)

    return replaced


def _reading_items(call: Callable[..., Any], position: int = 0) -> Callable[..., Any]:
    """Makes a replacement for `torch.tensor([a, b])`, of tensors with one number each.

    C++ reads their numbers without the modes that watch operators, and then does not
    find a kernel in Python.
    """

    @functools.wraps(call)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            has_list = len(args) > position and isinstance(
                args[position], (list, tuple)
            )
            if not has_list or "func != nullptr" not in str(error):
                raise
        return call(
            *args[:position],
            _with_items_here(args[position]),
            *args[position + 1 :],
            **kwargs,
        )

    return replaced


def _with_items_here(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_with_items_here(inner) for inner in value]
    if isinstance(value, torch.Tensor) and is_simulated(value):
        if value.numel() != 1:
            raise ValueError(
                "only one element tensors can be converted to Python scalars"
            )
        return torch.full(value.shape, value.item(), dtype=value.dtype, device="cpu")
    return value


def _shown_to_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for a function that a `TorchFunctionMode` sees.

    The mode sees it under the function's public name.

    Without it, C++ would show the mode the function that is replaced.
    """

    @functools.wraps(call)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(None):  # whether a mode is on
            return handle_torch_function(replaced, (), *args, **kwargs)
        return call(*args, **kwargs)

    return replaced


def _new_tensor(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for `tensor.new_tensor(data)`: on the device of `tensor`.

    C++ would take the first device.
    """

    @functools.wraps(call)
    def replaced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = with_index(kwargs.pop("device", None))
        if device is None and is_simulated(tensor):
            device = tensor.device
        return call(tensor, *args, device=device, **kwargs)

    return replaced


def _following_the_tensor(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for `tensor.new(2)` or `tensor.type("...")`.

    For example, a program calls `tensor.type("torch.sim.FloatTensor")`.

    The result is on the device of `tensor`, or on the current device if `tensor` is on
    the CPU. C++ would take the first device.
    """

    @functools.wraps(call)
    def replaced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = (
            tensor.device
            if is_simulated(tensor)
            else torch.device(NAME, current_device())
        )
        with current(kwargs.get("device", device)):
            made = call(tensor, *args, **kwargs)
        is_elsewhere = (
            isinstance(made, torch.Tensor)
            and is_simulated(made)
            and "device" not in kwargs
        )
        return made.to(device) if is_elsewhere else made

    return replaced


def with_index(device: Any) -> Any:
    """The device that is meant by a device, its name or its index."""
    if device == NAME:
        return torch.device(NAME, current_device())
    if (
        isinstance(device, torch.device)
        and device.type == NAME
        and device.index is None
    ):
        return torch.device(NAME, current_device())
    return device


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Does `tensor.data = new`, also if the two are on devices of different types.

    C++ refuses that for all but a few device types. Then `Module.to` would make new
    parameters, which an optimizer that was made before does not have.
    """
    vars(tensor).pop(_LEFT_ON, None)
    if not isinstance(new, torch.Tensor) or is_simulated(tensor) == is_simulated(new):
        tensor_data.__set__(tensor, new)
        return
    if not tensor.is_leaf:
        raise RuntimeError(
            "`tensor.data = ...` cannot move a tensor that autograd computed from "
            f"{tensor.device} to {new.device}: it would no longer be the result of "
            f"{tensor.grad_fn}. Use `tensor.to(...)`."
        )
    gradient, requires_grad = tensor.grad, tensor.requires_grad
    tensor.grad = None
    if requires_grad and not is_lazy(tensor) and not tensor.is_inference():
        with torch.inference_mode(False):
            torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(
                _refuse_to_lose
            )
    swap_tensors(tensor, tensor_data.__get__(new))
    tensor.requires_grad = requires_grad
    register_hooks_again(tensor)
    if gradient is not None:
        left_on = vars(gradient).get(_LEFT_ON, gradient.device)
        _set_data(gradient, gradient.detach().to(new.device))
        tensor.grad = gradient
        if left_on != gradient.device:
            vars(gradient)[_LEFT_ON] = left_on
            _refuse_to_add_to(tensor)


# Where a gradient would be, as an attribute of it. On a GPU `parameter.data = ...`
# leaves the gradient where it is, and a backward then fails. Here no parameter can have
# a gradient on a device of another type, so it goes along. The mark goes away with
# `gradient.data = ...`, with which `Module.to` moves gradients, and where the parameter
# comes back.
_LEFT_ON = "_torchstrategy_left_on"


def _refuse_to_add_to(parameter: torch.Tensor) -> None:
    hooks = parameter._post_accumulate_grad_hooks or {}
    if parameter.requires_grad and _refuse_left_gradient not in hooks.values():
        parameter.register_post_accumulate_grad_hook(_refuse_left_gradient)


def _refuse_left_gradient(parameter: torch.Tensor) -> None:
    left_on = None if parameter.grad is None else vars(parameter.grad).get(_LEFT_ON)
    if left_on is not None:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two "
            f"devices, {left_on} and {parameter.device}! `parameter.data = ...` has "
            "moved a parameter, and not its gradient, to which a backward adds: set "
            "`parameter.grad = None`, or do `parameter.grad.data = ...`, too."
        )


def _refuse_to_lose(gradients: Any) -> None:
    """A hook on the leaf of graphs from before a move.

    It refuses the gradients of these graphs, which would reach no parameter.
    """
    raise RuntimeError(
        "A parameter was moved to a device of another type, by `Module.to` or "
        "`parameter.data = ...`, between the forward and the backward. Move it before "
        "the forward, or after the backward."
    )


def _may_share_implementation(ask: Callable[..., bool]) -> Callable[..., bool]:
    """Makes a replacement for the function that `Module.to` asks.

    `Module.to` asks it before it does `parameter.data = ...`.
    """

    # The signature is that of the original, since torch's compiler looks at it.
    def may(*args: Any, **kwargs: Any) -> bool:
        one, other = args
        if ask(one, other):
            return True
        layouts = {one.layout, other.layout}
        return (is_simulated(one) or is_simulated(other)) and layouts == {torch.strided}

    return may
