"""Functions of tensors for which torch's C++ has a wrong answer: `tensor.to("sim")`, `tensor.data = ...` and others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function, has_torch_function_unary

from torchstrategy._base.torch_internals import swap_tensors
from torchstrategy.testing._simulation.ordinals import NAME, current, current_device, is_simulated
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
    cls.new_tensor = _new_tensor(cls.new_tensor)
    cls.new, cls.type = _following_the_tensor(cls.new), _following_the_tensor(cls.type)
    for name in ("tensor", "as_tensor", "asarray", "sparse_coo_tensor"):
        original = getattr(torch, name)
        setattr(torch, name, _shown_to_modes(_knowing_the_current_device(_reading_scalars(original))))
        if (scripted := scripted_as(original)) is not None:
            register_scripted(getattr(torch, name), scripted)
    # A default device acts on the functions in this list, which has to be made again with the new ones.
    list_device_constructors.cache_clear()
    cls.data = property(tensor_data.__get__, _set_data, doc=tensor_data.__doc__)
    MAY_SHARE_IMPLEMENTATION.replace(_may_share_implementation(MAY_SHARE_IMPLEMENTATION.now()))


def _knowing_the_current_device(call: Callable[..., Any], position: int | None = None) -> Callable[..., Any]:
    """Makes a replacement for a function in which `"sim"` means the current device. C++ would take the first device."""

    @functools.wraps(call)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position:
            args = (*args[:position], with_index(args[position]), *args[position + 1 :])
        if "device" in kwargs:
            kwargs["device"] = with_index(kwargs["device"])
        return call(*args, **kwargs)

    return replaced


def _reading_scalars(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for `torch.tensor`, which reads scalars of devices in a list: `torch.tensor([loss, loss])`.

    While a mode watches operators, C++ finds no kernel to read them with, and asserts that there is one.
    """

    @functools.wraps(call)
    def replaced(data: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(data, *args, **kwargs)
        except RuntimeError as error:
            if not isinstance(data, (list, tuple)) or "INTERNAL ASSERT" not in str(error):
                raise
        return call(_with_scalars_read(data), *args, **kwargs)

    return replaced


def _with_scalars_read(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_with_scalars_read(inner) for inner in data]
    if isinstance(data, torch.Tensor) and is_simulated(data):
        if data.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return torch.full(data.shape, data.item(), dtype=data.dtype, device="cpu")
    return data


def _shown_to_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for a function that a `TorchFunctionMode` sees under the function's public name.

    Without it, C++ would show the mode the function that is replaced.
    """

    @functools.wraps(call)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(None):  # whether a mode is on
            return handle_torch_function(replaced, (), *args, **kwargs)
        return call(*args, **kwargs)

    return replaced


def _new_tensor(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for `tensor.new_tensor(data)`: on the device of `tensor`. C++ would take the first device."""

    @functools.wraps(call)
    def replaced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = with_index(kwargs.pop("device", None))
        if device is None and is_simulated(tensor):
            device = tensor.device
        return call(tensor, *args, device=device, **kwargs)

    return replaced


def _following_the_tensor(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for `tensor.new(2)` or `tensor.type("torch.sim.FloatTensor")`.

    The result is on the device of `tensor`, or on the current device if `tensor` is on the CPU. C++ would take the
    first device.
    """

    @functools.wraps(call)
    def replaced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = tensor.device if is_simulated(tensor) else torch.device(NAME, current_device())
        with current(kwargs.get("device", device)):
            made = call(tensor, *args, **kwargs)
        is_elsewhere = isinstance(made, torch.Tensor) and is_simulated(made) and "device" not in kwargs
        return made.to(device) if is_elsewhere else made

    return replaced


def with_index(device: Any) -> Any:
    """The device that is meant by a device, its name or its index."""
    if device == NAME:
        return torch.device(NAME, current_device())
    if isinstance(device, torch.device) and device.type == NAME and device.index is None:
        return torch.device(NAME, current_device())
    return device


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Does `tensor.data = new`, also if the two are on devices of different types.

    C++ refuses that for all but a few device types. Then `Module.to` would make new parameters, which an optimizer that
    was made before does not have.
    """
    if not isinstance(new, torch.Tensor) or is_simulated(tensor) == is_simulated(new):
        tensor_data.__set__(tensor, new)
        return
    if not tensor.is_leaf:
        raise RuntimeError(
            f"`tensor.data = ...` cannot move a tensor that autograd computed from {tensor.device} to {new.device}: it "
            f"would no longer be the result of {tensor.grad_fn}. Use `tensor.to(...)`."
        )
    gradient, requires_grad = tensor.grad, tensor.requires_grad
    tensor.grad = None
    if requires_grad and not is_lazy(tensor) and not tensor.is_inference():
        with torch.inference_mode(False):
            torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_refuse_to_lose)
    swap_tensors(tensor, tensor_data.__get__(new))
    tensor.requires_grad = requires_grad
    register_hooks_again(tensor)
    if gradient is not None:
        _set_data(gradient, gradient.detach().to(new.device))
        tensor.grad = gradient


def _refuse_to_lose(gradients: Any) -> None:
    """A hook on the leaf of graphs from before a move: it refuses their gradients, which would reach no parameter."""
    raise RuntimeError(
        "A parameter was moved to a device of another type, by `Module.to` or `parameter.data = ...`, between the "
        "forward and the backward. Move it before the forward, or after the backward."
    )


def _may_share_implementation(ask: Callable[..., bool]) -> Callable[..., bool]:
    """Makes a replacement for the function that `Module.to` asks before it does `parameter.data = ...`."""

    # The signature is that of the original, since torch's compiler looks at it.
    def may(*args: Any, **kwargs: Any) -> bool:
        one, other = args
        if ask(one, other):
            return True
        layouts = {one.layout, other.layout}
        return (is_simulated(one) or is_simulated(other)) and layouts == {torch.strided}

    return may
