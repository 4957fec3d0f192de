"""Kernels that a program registers for CUDA: those that simulated devices run.

torch keeps a kernel by the name of its dispatch key. A simulated device never asks for
the key "CUDA": the kernel of the CPU would run in its place, or none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.library import fallthrough_kernel

from torchstrategy.testing._simulation.ordinals import NAME
from torchstrategy.testing._simulation.torch_internals import (
    CPP,
    DispatchKey,
    DispatchKeySet,
    has_kernel,
    without_keys,
)

_CUDA, _OURS = "CUDA", "PrivateUse1"
_AUTOCAST = f"Autocast{_OURS}"
# The key for which the program has registered a kernel, by the operator and our key.
_said: dict[tuple[str, str], str] = {}


def registering_for_cuda() -> Iterator[tuple[Any, str, Any]]:
    """The attributes to replace: their owner, the name, and the value in the block."""
    library: Any = torch.library.Library
    init, impl, fallback, key_of = (
        library.__init__,
        library.impl,
        library.fallback,
        CPP._dispatch_key_for_device,
    )

    @functools.wraps(init)
    def begin(self: Any, ns: str, kind: str, dispatch_key: str = "") -> None:
        init(self, ns, kind, _translated(dispatch_key))

    @functools.wraps(impl)
    def register(
        self: Any,
        op_name: Any,
        fn: Callable[..., Any],
        dispatch_key: str = "",
        **options: Any,
    ) -> None:
        said = dispatch_key or self.dispatch_key
        key, name = _translated(said), _full_name(self.ns, op_name)
        if key.endswith(_OURS):
            if self.ns == "aten":
                # The program may override a kernel of ours where a GPU has one that is
                # written in C++.
                options["allow_override"] = True
            elif has_kernel(name, key) and _said.get((name, key)) != said:
                return  # torch's own FSDP registers one kernel for both keys
            _said[name, key] = said
        if key == _AUTOCAST and said != key and fn is not fallthrough_kernel:
            fn = _without_autocast(fn)
        impl(self, op_name, fn, key, **options)

    @functools.wraps(fallback)
    def register_fallback(
        self: Any, fn: Callable[..., Any], dispatch_key: str = "", **options: Any
    ) -> None:
        fallback(self, fn, _translated(dispatch_key or self.dispatch_key), **options)

    yield library, "__init__", begin
    yield library, "impl", register
    yield library, "fallback", register_fallback
    yield (
        CPP,
        "_dispatch_key_for_device",
        lambda device_type: key_of(NAME if device_type == "cuda" else device_type),
    )


def _translated(key: str) -> str:
    """`"AutogradPrivateUse1"` for `"AutogradCUDA"`."""
    return key.removesuffix(_CUDA) + _OURS if key.endswith(_CUDA) else key


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a kernel that calls another one without our dispatch key.

    That other kernel leaves away the key of CUDA, since it names that key.
    """
    key = DispatchKeySet(getattr(DispatchKey, _AUTOCAST))

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        with without_keys(key):
            return kernel(*args, **kwargs)

    return call


def _full_name(namespace: str, operator: Any) -> str:
    name = operator if isinstance(operator, str) else operator.name()
    return name if "::" in name else f"{namespace}::{name}"
