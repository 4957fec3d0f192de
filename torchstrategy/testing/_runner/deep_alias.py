"""A block in which simulated devices also say that they are CUDA's.

`device.type`, `str(device)` and `tensor.is_cuda` say so.

`cuda_alias` changes what a program says to torch; this changes what torch says to the
program. `torch.device` is a type of C that cannot be subclassed, so this writes into
the type itself: its dict, and the slots of `repr` and `str`. CPython allows neither,
and so only the runner does it, for a whole process. The modules of this library see the
truth: they are told apart by the name of the module that asks.

Note [Who asks]: C calls the functions below, so the frame that calls them is that of
the Python code that asked.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchstrategy.testing._simulation import cuda_alias
from torchstrategy.testing._simulation.ordinals import NAME

_Device: Any = torch.device
_true_type: Callable[[torch.device], str] = _Device.__dict__["type"].__get__
_Tensor: Any = torch.Tensor
_Base: Any = torch.Tensor.__mro__[1]  # the class of C below torch.Tensor
_is_on_cuda: Callable[[torch.Tensor], bool] = _Base.is_cuda.__get__

# Where the C struct of a type has its functions for `repr` and `str`: the same in
# CPython 3.10 to 3.14.
_REPR, _STR = 88, 136
_Text = ctypes.CFUNCTYPE(ctypes.py_object, ctypes.py_object)


@contextmanager
def deep_alias() -> Iterator[None]:
    """The block. It begins with `cuda_alias`, and holds for all threads.

    Raises:
        RuntimeError: If no devices are simulated, or if this is not CPython.
    """
    if sys.implementation.name != "cpython":
        raise RuntimeError(
            "--as-cuda writes into types of CPython, and this is "
            f"{sys.implementation.name}: leave it away."
        )
    kept = [_Text(_repr), _Text(_str)]  # C calls them for as long as the block is open
    attributes = _dict_of(_Device)
    true_type, slots = attributes["type"], [_slot(_REPR).value, _slot(_STR).value]
    with cuda_alias():
        before = _exchange()
        attributes["type"] = _Type()
        for place, function in zip((_REPR, _STR), kept, strict=True):
            _slot(place).value = ctypes.cast(function, ctypes.c_void_p).value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(_Device))
        try:
            yield
        finally:
            attributes["type"] = true_type
            for place, value in zip((_REPR, _STR), slots, strict=True):
                _slot(place).value = value
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(_Device))
            for owner, name, had_it, attribute in reversed(before):
                setattr(owner, name, attribute) if had_it else delattr(owner, name)


def _slot(offset: int) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(id(_Device) + offset)


def _dict_of(cls: type) -> dict[str, Any]:
    """The dict behind a class of C, of which Python shows a read-only view."""
    (attributes,) = (
        thing for thing in gc.get_referents(cls.__dict__) if isinstance(thing, dict)
    )
    return attributes


def _is_asked_by_us() -> bool:
    """Whether the code that asked is of this library; see Note [Who asks]."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torchstrategy.")


def _said(device: torch.device, is_ours: bool) -> str:
    kind = _true_type(device)
    return "cuda" if kind == NAME and not is_ours else kind


class _Type:
    """Stands in for the attribute `type` of devices."""

    def __get__(self, device: torch.device | None, owner: Any = None) -> Any:
        return self if device is None else _said(device, _is_asked_by_us())


def _repr(device: torch.device) -> str:
    kind = _said(device, _is_asked_by_us())
    return (
        f"device(type='{kind}')"
        if device.index is None
        else f"device(type='{kind}', index={device.index})"
    )


def _str(device: torch.device) -> str:
    kind = _said(device, _is_asked_by_us())
    return kind if device.index is None else f"{kind}:{device.index}"


def _is_cuda(thing: Any) -> bool:
    return _true_type(thing.device) == NAME and not _is_asked_by_us()


def _tensor_is_cuda(tensor: torch.Tensor) -> bool:
    return _is_on_cuda(tensor) or (
        _true_type(tensor.device) == NAME and not _is_asked_by_us()
    )


class _Kind(type):
    """The type of the stand-in for `torch.device`, whose instances are real devices."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _Device)

    def __subclasscheck__(cls, other: type) -> bool:
        return other is _Device or other is cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (_translated(args[0]), *args[1:])
        if "type" in kwargs:
            kwargs["type"] = _translated(kwargs["type"])
        if "device" in kwargs and isinstance(kwargs["device"], str):
            kwargs["device"] = _translated(kwargs["device"])
        return _Device(*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return other is _Device or other is cls

    def __hash__(cls) -> int:
        return hash(_Device)


def _repr_of_stream(stream: Any) -> str:
    return (
        f"<torch.cuda.Stream device=cuda:{stream.device_index} "
        f"cuda_stream={stream.cuda_stream:#x}>"
    )


def _translated(text: str) -> str:
    kind, colon, index = text.partition(":")
    return f"{NAME}{colon}{index}" if kind == "cuda" else text


def _exchange() -> list[tuple[Any, str, bool, Any]]:
    """Replaces what programs and torch ask about CUDA; returns what was there."""
    module = torch.get_device_module(NAME)
    get_module: Any = torch.get_device_module

    # Torch's compiler looks for what is wrapped here.
    @functools.wraps(get_module.__wrapped__)
    def get_device_module(device: Any = None) -> Any:
        if device is None or (
            isinstance(device, str) and device.partition(":")[0] in ("cuda", NAME)
        ):
            return module if _is_asked_by_us() else torch.cuda
        if isinstance(device, _Device) and _true_type(device) == NAME:
            return module if _is_asked_by_us() else torch.cuda
        return get_module(device)

    replaced: list[tuple[Any, str, Any]] = [
        (
            torch,
            "device",
            _Kind("device", (), {"__module__": "torch", "__doc__": _Device.__doc__}),
        ),
        (_Tensor, "is_cuda", property(_tensor_is_cuda)),
        (torch.UntypedStorage, "is_cuda", property(_is_cuda)),
        (torch, "get_device_module", get_device_module),
        (torch.backends.cuda, "is_built", lambda: True),
        # Torchvision compares it with what it was built for.
        (torch.version, "cuda", torch.version.cuda or "12.8"),
        (torch.backends.cudnn, "is_available", lambda: True),
        (torch.backends.cudnn, "version", lambda: 91002),
        # torch itself asks: no kernel of cuDNN runs.
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
        (module.Stream, "__repr__", _repr_of_stream),
        # What torch itself asks, with names of its own.
        (torch.cuda, "_initialized", True),
        (torch.cuda, "_is_in_bad_fork", lambda: False),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "get_device_capability", lambda device=None: (8, 0)),
        (torch.cuda, "get_arch_list", lambda: ["sm_80"]),
    ]
    before = [
        (owner, name, name in vars(owner), vars(owner).get(name))
        for owner, name, _ in replaced
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    return before
