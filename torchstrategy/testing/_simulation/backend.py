"""Registers the kernels of simulated devices with torch's dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.library import Library, fallthrough_kernel

from torchstrategy._base.torch_internals import hide_from_compiler
from torchstrategy.testing._simulation.kernels import run_each_on_cpu, run_on_cpu
from torchstrategy.testing._simulation.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    has_kernel,
    operator_names,
    schema,
)

_BACKEND = "PrivateUse1"
_SPARSE = "SparsePrivateUse1"

Kernel = Callable[..., Any]


@final
class Backend:
    """Registers kernels, which stay registered for as long as this object lives."""

    def __init__(self) -> None:
        self._any = Library("_", "IMPL")
        self._aten = Library("aten", "IMPL")
        self._own: dict[str, set[str]] = {_BACKEND: set(), _SPARSE: set()}

    def kernel(self, name: str, key: str = _BACKEND) -> Callable[[Kernel], Kernel]:
        """Registers the decorated function as an operator's kernel: `"add.Tensor"`."""

        def register(kernel: Kernel) -> Kernel:
            self._own.setdefault(key, set()).add(name)
            # Compiling ends at a kernel that is written in Python, as it does at one
            # that is written in C++.
            hide_from_compiler(getattr(kernel, "func", kernel))
            self._aten.impl(name, kernel, key)
            return kernel

        return register

    def redispatch(self, name: str, kernels: Any) -> None:
        """Uses another device's kernel, which touches no memory, for an operator."""
        op = operator(name)
        self.kernel(name)(
            lambda *args, **kwargs: op.redispatch(kernels, *args, **kwargs)
        )

    def fall_through(self, name: str, key: str) -> None:
        """Makes an operator pass over a dispatch key."""
        self._aten.impl(name, fallthrough_kernel, key)

    def fall_back(self) -> None:
        """Registers a kernel for all operators that have none."""
        hide_from_compiler(run_on_cpu)
        self._any.fallback(run_on_cpu, _BACKEND)
        self._any.fallback(run_on_cpu, _SPARSE)
        self._any.fallback(fallthrough_kernel, "AutocastPrivateUse1")

    def run_directly(self) -> None:
        """Makes operators run as one call on the CPU that torch would decompose.

        That costs less, and gives bitwise the numbers of the CPU.
        """
        for name in _taken_apart(self._own[_BACKEND]):
            op = operator(name)
            run = run_each_on_cpu if name.startswith("_foreach_") else run_on_cpu
            self.kernel(name)(functools.partial(run, op))
        for name in _taken_apart_if_sparse(self._own[_SPARSE]):
            self.kernel(name, _SPARSE)(functools.partial(run_on_cpu, operator(name)))


def operator(name: str) -> Any:
    """The operator of a name with or without an overload: `"add.Tensor"`, `"relu"`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def keys(name: str) -> Any:
    """The set with one dispatch key."""
    return DispatchKeySet(getattr(DispatchKey, name))


# Operators whose composite kernels look for a kernel of the device themselves.
_BOUND_TO_DEVICES = ("mode.values", "conj_physical_")


def _taken_apart(but: set[str]) -> Iterator[str]:
    for full, name in _of_aten(but):
        if _is_taken_apart(full, name) and _is_plain(name):
            yield name


def _of_aten(but: set[str]) -> Iterator[tuple[str, str]]:
    """The names of torch's own operators, with and without `aten::`."""
    for full in operator_names():
        namespace, _, name = full.partition("::")
        if namespace == "aten" and name not in but:
            yield full, name


def _is_taken_apart(full: str, name: str) -> bool:
    """Whether torch runs an operator by calling other operators.

    It may call `empty()` and a variant with `out=`, run a composite, or go tensor by
    tensor.
    """
    if name.startswith("_foreach_") or has_kernel(
        full, "CompositeExplicitAutogradNonFunctional"
    ):
        return True
    if name in _BOUND_TO_DEVICES:
        return True
    return has_kernel(full, "CPU") and _is_composite(full)


def _is_composite(full: str) -> bool:
    return has_kernel(full, "CompositeExplicitAutograd") or has_kernel(
        full, "CompositeImplicitAutograd"
    )


def _taken_apart_if_sparse(but: set[str]) -> Iterator[str]:
    """The operators that torch decomposes for sparse tensors of a new device.

    It does not decompose them for sparse tensors of the CPU.
    """
    for full, name in _of_aten(but):
        # `clone` and `copy_` may cross devices.
        is_sparse = has_kernel(full, "SparseCPU") and name not in ("clone", "copy_")
        if is_sparse and _is_composite(full) and _is_plain(name):
            yield name


def _is_plain(name: str) -> bool:
    """Whether an operator's tensors are on one device, and no result is a view."""
    packet, _, overload = name.partition(".")
    if packet.endswith(("_scatter", "_copy")) or packet in ("as_strided_", "copy"):
        return False
    if overload == "out" or overload.endswith("_out"):
        return False
    declared = schema(operator(name))
    makes_views = any(
        result.alias_info and not result.alias_info.is_write
        for result in declared.returns
    )
    return not makes_views and not any(
        argument.name == "device" for argument in declared.arguments
    )
