"""The private names of torch that only simulated devices need, each with its reason.

torch offers them only to backends that are written in C++. Importing this file has no
effect. The names that the library itself needs are in `_base/torch_internals`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils._python_dispatch

# The mode in which tensors have sizes and no memory; compilers and checks of shapes use
# it.
from torch._subclasses.fake_tensor import FakeTensorMode, _BypassDispatchCache
from torch.utils import backend_registration

# The functions that a default device acts on. torch makes the list once, and a
# simulation that replaces some of these functions has to make it again.
from torch.utils._device import _device_constructors as list_device_constructors

# The arguments of an operator are cast as torch's own autocast does it: whatever
# containers they are in.
from torch.utils._pytree import tree_map_only

# A type checker takes no other imports for parts of this file.
__all__ = ["list_device_constructors", "tree_map_only"]

# DLPack capsules are the only way to a second tensor that has the same memory and
# reports another device.
to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack
conjugate_view: Callable[[torch.Tensor], torch.Tensor] = torch._conj
negative_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
# Dispatch: which kernels there are, and how to call an operator without some dispatch
# keys.
DispatchKey: Any = torch._C.DispatchKey
DispatchKeySet: Any = torch._C.DispatchKeySet
without_keys: Any = torch._C._ExcludeDispatchKeyGuard
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
# Makes memory of the CPU without the dispatcher: what a kernel calls that stands in for
# `empty_strided` there.
_guards: Any = torch._C._dynamo.guards
make_on_cpu: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = (
    _guards._empty_strided_cpu
)
# A sparse tensor made of its indices and values.
make_sparse: Any = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors
# Methods of tensors, without what a subclass makes of them.
tensor_data: Any = torch._C.TensorBase.data
tensor_to: Any = torch._C.TensorBase.to
tensor_cuda: Any = torch._C.TensorBase.cuda
_privateuse1: Any = torch._C._autograd.DeviceType.PrivateUse1
PRIVATEUSE1_ID = int(_privateuse1)
# Lets Python code be a backend. torch has it since 2.10, and says that it "might change
# without notice".
register_python_backend: Any = getattr(
    backend_registration, "_setup_privateuseone_for_python_backend", None
)
# The methods that a parameter of a lazy module allows before its shape is known.
_uninitialized: Any = torch.nn.UninitializedParameter
ALLOWED_BEFORE_SIZES_ARE_KNOWN: list[Any] = _uninitialized._allowed_methods


# The module of torch's C++: programs ask it for names of CUDA that it does not have.
CPP: Any = torch._C
# The class under `torch.profiler.profile`, whose constructor takes the activities.
KINETO: Any = torch.profiler.profiler._KinetoProfile
# The class of operators that have a schema; those of a higher order have none.
Operator: Any = torch._ops.OpOverload


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """A block without modes of dispatch.

    Otherwise, torch's tracer and its compiler lose sight of what such a mode has
    handled.
    """
    there = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    with torch.utils._python_dispatch._disable_current_modes():
        yield
    # The list has kept the modes alive: taking away a mode that nobody else refers to
    # crashes torch 2.10.
    del there


class Replaced(NamedTuple):
    """A function or object of torch that a simulated device replaces.

    It has the owner of the attribute, and the attribute's name.
    """

    owner: Any
    name: str

    def now(self) -> Any:
        """What it is now; None if this torch does not have it."""
        return getattr(self.owner, self.name, None)

    def replace(self, value: Any) -> None:
        """Puts something in its place."""
        setattr(self.owner, self.name, value)


# C++ functions of torch, and the object that runs backward.
ENGINE = Replaced(torch.autograd.Variable, "_execution_engine")
MAY_SHARE_IMPLEMENTATION = Replaced(torch, "_has_compatible_shallow_copy_type")
SCATTER, SCATTER_OUT = (
    Replaced(torch._C, "_scatter"),
    Replaced(torch._C, "_scatter_out"),
)
GATHER, GATHER_OUT = Replaced(torch._C, "_gather"), Replaced(torch._C, "_gather_out")
BROADCAST, BROADCAST_OUT = (
    Replaced(torch._C, "_broadcast"),
    Replaced(torch._C, "_broadcast_out"),
)
BROADCAST_COALESCED = Replaced(torch._C, "_broadcast_coalesced")
# TorchScript knows the functions that it can compile by their ids, and what they are to
# it.
scripted_as: Callable[[Any], str | None] = torch.jit._builtins._find_builtin
register_scripted: Callable[[Any, str], None] = torch.jit._builtins._register_builtin
# Fake tensors keep what an operator returned for arguments that they have seen, unless
# this raises for them.
FAKE_CACHE_CHECK = Replaced(FakeTensorMode, "_validate_cache_key")
NotForTheCache: Any = _BypassDispatchCache


def register_hooks_again(tensor: Any) -> None:
    """Registers a tensor's hooks with autograd again.

    Before, the tensor was given another C++ implementation.
    """
    if tensor._backward_hooks is not None:
        tensor._backward_hooks = tensor._backward_hooks
    if tensor._post_accumulate_grad_hooks is not None:
        tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def make_device_guard(answering: Callable[[Any], Callable[[], Any]]) -> Any:
    """The object that tells torch's C++ code the device type of a Python backend.

    An exception in its method would end the process: `answering` makes, of the answer,
    a function that cannot raise.
    """
    return type(
        "DeviceGuard", (torch._C._acc.DeviceGuard,), {"type_": answering(_privateuse1)}
    )()


def schema(operator: Any) -> Any:
    """The declared arguments and results of an operator.

    They say what the operator writes, and which results are views.
    """
    return operator._schema


def generator_id(generator: Any) -> int:
    """A number that identifies a generator.

    PyTorch makes a new Python object for the same generator at each kernel.
    """
    identity: int = generator._cdata
    return identity


# Where the C++ struct of a generator has its device, in two bytes, and its dispatch
# keys: in torch 2.10 to 2.15.
_DEVICE_OF_GENERATOR, _KEYS_OF_GENERATOR = 56, 64


def _bits(key: str) -> int:
    bits: int = DispatchKeySet(getattr(DispatchKey, key)).raw_repr()
    return bits


def say_it_is_simulated(generator: Any, device: torch.device) -> None:
    """Makes torch's C++ take a new generator of the CPU for one of a simulated device.

    torch has no way to make such a generator but in C++. Where a later torch has
    another struct, nothing is written, and operators of the CPU take the generator as
    one of theirs.
    """
    kind = (ctypes.c_int8 * 2).from_address(
        generator_id(generator) + _DEVICE_OF_GENERATOR
    )
    keys = ctypes.c_uint64.from_address(generator_id(generator) + _KEYS_OF_GENERATOR)
    if list(kind) == [0, -1] and keys.value == _bits("CPU"):
        kind[0], kind[1] = PRIVATEUSE1_ID, -1 if device.index is None else device.index
        keys.value = _bits("PrivateUse1")
