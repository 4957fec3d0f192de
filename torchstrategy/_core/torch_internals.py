"""The only imports of private torch names, each with its reason.

When torch moves one of them, this file changes and no other does.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

# Who decides what `torch.compile` makes of a function that is called.
from torch._C._dynamo import eval_frame
from torch._guards import CompileContext
from torch.autograd import profiler as _profiler
from torch.nn.modules import module as _modules
from torch.optim import optimizer as _optimizers

# `with mode:` would run the mode's own `__enter__`, which may reset it (FlopCounterMode starts counting at zero).
# A replica thread has to wear the very mode that the caller has on. No public way to push without entering.
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils import backend_registration

# What a default device acts on, by function. torch lists it once; it has to be listed again where names change hands.
from torch.utils._device import _device_constructors as list_device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

# The walker over nested containers. torch's own tracing, export and DataLoader code stand on it, and libraries
# register their containers with it; `torch.utils.pytree` is not public yet.
from torch.utils._pytree import SUPPORTED_NODES as kinds_of_nodes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf, tree_leaves_with_path, tree_map_only
from torch.utils._pytree import _get_node_type as kind_of_node

__all__ = [
    "ALLOWED_BEFORE_SIZES_ARE_KNOWN",
    "BROADCAST",
    "BROADCAST_COALESCED",
    "ENGINE",
    "GATHER",
    "HAS_NCCL",
    "MAY_SHARE_IMPLEMENTATION",
    "PRIVATEUSE1_ID",
    "SCATTER",
    "DispatchKey",
    "DispatchKeySet",
    "TorchDispatchMode",
    "TreeSpec",
    "are_dense",
    "compile_alike",
    "conjugate_view",
    "count_function_modes",
    "dispatch_modes",
    "foreach_add",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul",
    "foreach_mul_",
    "from_dlpack",
    "function_modes",
    "generator_id",
    "global_hooks",
    "has_gradient_hooks",
    "has_kernel",
    "has_one_tensor",
    "have_gradient_hooks",
    "hide_from_compiler",
    "is_alone_in_memory",
    "is_compiling",
    "is_profiling",
    "is_profiling_this_thread_only",
    "keep_what_stands_in_for_gpus",
    "keeping_version",
    "kind_of_node",
    "kinds_of_nodes",
    "layouts",
    "list_device_constructors",
    "make_device_guard",
    "make_parameter",
    "make_sparse",
    "negative_view",
    "num_nodes",
    "num_users",
    "on_computed",
    "on_gradient",
    "operator_names",
    "pointers",
    "pop_dispatch_mode",
    "pop_function_mode",
    "pop_saved_tensors_hooks",
    "privateuse1_name",
    "push_dispatch_mode",
    "push_function_mode",
    "push_saved_tensors_hooks",
    "raw_grad",
    "raw_grads",
    "register_hooks_again",
    "register_python_backend",
    "requires_grad_of",
    "saved_tensors_hooks",
    "schema",
    "set_raw_grad",
    "set_raw_grads",
    "sizes",
    "sparse_indices",
    "sparse_values",
    "swap_tensors",
    "tensor_cuda",
    "tensor_data",
    "tensor_to",
    "to_dlpack",
    "tree_flatten",
    "tree_is_leaf",
    "tree_leaves_with_path",
    "tree_map_only",
    "unseen_by_function_modes",
    "version",
    "versions",
    "will_be_reached",
    "without_keys",
]

# The fused loops that torch's optimizers run on. `torch.optim` is their only public user.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_

# Whether `torch.cuda.nccl` can do anything; its own `is_available` asks this, too, and warns.
HAS_NCCL = hasattr(torch._C, "_nccl_all_reduce")

# The default saved-tensor hooks of a thread: `torch.autograd.graph.saved_tensors_hooks` sets them and cannot tell
# which are set.
push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


# For the length of a block, no function mode sees what is called: those of the user are for what the user calls.
unseen_by_function_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction

# How many function modes there are, without a list of them: asked in every run.
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack

# What a device type of one's own is called.
privateuse1_name: Callable[[], str] = torch._C._get_privateuse1_backend_name

# The slot of a tensor that autograd itself writes, below whatever a subclass makes of `grad`.
_of_tensor: Any = torch.Tensor
raw_grad: Callable[[torch.Tensor], torch.Tensor | None] = _of_tensor.grad.__get__
set_raw_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _of_tensor.grad.__set__

# How often a tensor was written in place: the autograd engine's own count.
version: Callable[[torch.Tensor], int] = _of_tensor._version.__get__

# How many operations this thread has noted for a backward: what is read between two of the same number lies in between.
num_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr

# A run looks at all parameters several times. What follows does so without a call of ours for each of them.
_requires_grad: Callable[[torch.Tensor], bool] = _of_tensor.requires_grad.__get__
_hooks: Callable[[torch.Tensor], object] = _of_tensor._backward_hooks.__get__
_late_hooks: Callable[[torch.Tensor], object] = _of_tensor._post_accumulate_grad_hooks.__get__
_layout: Callable[[torch.Tensor], torch.layout] = _of_tensor.layout.__get__
_dtype: Callable[[torch.Tensor], torch.dtype] = _of_tensor.dtype.__get__
_nbytes: Callable[[torch.Tensor], int] = _of_tensor.nbytes.__get__
_shape: Callable[[torch.Tensor], torch.Size] = _of_tensor.shape.__get__


def raw_grads(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """What autograd has written for each of some tensors."""
    return list(map(raw_grad, tensors))


def set_raw_grads(tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Writes what autograd writes."""
    deque(map(set_raw_grad, tensors, gradients), maxlen=0)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each of some tensors was written in place; what was made in inference mode does not count it."""
    try:
        return list(map(version, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else version(tensor) for tensor in tensors]


def sizes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How many bytes the numbers of each of some tensors take."""
    return list(map(_nbytes, tensors))


def requires_grad_of(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Whether each of some tensors requires grad."""
    return list(map(_requires_grad, tensors))


def are_dense(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether each of some tensors is in one piece of memory, and not sparse."""
    return {torch.strided}.issuperset(map(_layout, tensors))


def pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each of some tensors begins in memory; of what is sparse, its id."""
    if are_dense(tensors):
        return list(map(torch.Tensor.data_ptr, tensors))
    return [tensor.data_ptr() if tensor.layout is torch.strided else id(tensor) for tensor in tensors]


def layouts(tensors: Sequence[torch.Tensor]) -> list[object]:
    """What each of some tensors makes of its memory."""
    if are_dense(tensors):
        strides, are_conjugate = map(torch.Tensor.stride, tensors), map(torch.Tensor.is_conj, tensors)
        return list(zip(map(_dtype, tensors), map(_shape, tensors), strides, are_conjugate, strict=True))
    return [(t.dtype, t.shape, t.stride() if t.layout is torch.strided else t.layout) for t in tensors]


def have_gradient_hooks(leaves: Iterable[torch.Tensor]) -> bool:
    """Whether hooks of the user wait for the gradient of any of some leaves."""
    return any(map(_hooks, leaves)) or any(map(_late_hooks, leaves))


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The (pack, unpack) pair that is in force on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def make_parameter(cls: type[torch.nn.Parameter], data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """A leaf of the class `cls` over the memory of `data`.

    `torch.nn.Parameter.__new__` asks for a type's `__torch_function__` in ways that differ between classes of data;
    this is the constructor that it ends in.
    """
    return torch.Tensor._make_subclass(cls, data, requires_grad)


# For the length of a block, writing on a tensor is not counted, as torch's own kernels do not count some of it.
_autograd: Any = torch.autograd
keeping_version: Callable[[torch.Tensor], AbstractContextManager[None]] = _autograd._unsafe_preserve_version_counter


# Public, but without annotations.
on_computed: Callable[[torch.Tensor, Callable[[torch.Tensor], None]], Any] = torch.Tensor.register_hook
on_gradient: Callable[[torch.Tensor, Callable[[torch.Tensor], None]], Any]
on_gradient = torch.Tensor.register_post_accumulate_grad_hook


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks of the user wait for this leaf's gradient. Registered publicly, readable only here."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def will_be_reached(leaf: torch.Tensor) -> bool:
    """Whether the backward that is under way on this thread comes to a leaf, or has come to it already.

    `register_multi_grad_hook` asks the same, and keeps all its leaves alive, in a cycle that no collector sees.
    """
    return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)


def register_hooks_again(tensor: Any) -> None:
    """Tells autograd of a tensor's hooks, which it knows by the implementation that the tensor had before."""
    if tensor._backward_hooks is not None:
        tensor._backward_hooks = tensor._backward_hooks
    if tensor._post_accumulate_grad_hooks is not None:
        tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


# What a simulated device needs, which torch offers to backends of C++ only. Nothing here acts when it is imported.
# DLPack capsules, the one way from a tensor to another over the same memory on another device.
to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack
conjugate_view: Callable[[torch.Tensor], torch.Tensor] = torch._conj
negative_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
# Dispatch: what kernels there are, and how to go on below a key.
DispatchKey: Any = torch._C.DispatchKey
DispatchKeySet: Any = torch._C.DispatchKeySet
without_keys: Any = torch._C._ExcludeDispatchKeyGuard
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
# The two parts of a sparse tensor as they are, also of one that is not coalesced; and one made of its parts.
sparse_indices: Any = torch.ops.aten._indices
sparse_values: Any = torch.ops.aten._values
make_sparse: Any = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors
# A tensor takes the place of another one, under every reference to it.
swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
tensor_data: Any = torch._C.TensorBase.data
tensor_to: Any = torch._C.TensorBase.to
tensor_cuda: Any = torch._C.TensorBase.cuda
_privateuse1: Any = torch._C._autograd.DeviceType.PrivateUse1
PRIVATEUSE1_ID = int(_privateuse1)
_AS_IT_IS = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
# Lets Python stand in for a backend; since torch 2.10, "might change without notice".
register_python_backend: Any = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
# What may be asked of a parameter of a lazy module.
_uninitialized: Any = torch.nn.UninitializedParameter
ALLOWED_BEFORE_SIZES_ARE_KNOWN: list[Any] = _uninitialized._allowed_methods
# What a simulated device puts in the place of, as (owner, name), where torch asks its C++ and no Python.
ENGINE = (torch.autograd.Variable, "_execution_engine")
MAY_SHARE_IMPLEMENTATION = (torch, "_has_compatible_shallow_copy_type")
SCATTER, GATHER = (torch._C, "_scatter"), (torch._C, "_gather")
BROADCAST, BROADCAST_COALESCED = (torch._C, "_broadcast"), (torch._C, "_broadcast_coalesced")


def hide_from_compiler(function: Any) -> None:
    """Says that `torch.compile` is to run a function, and all that it calls, as it is.

    `torch.compiler.disable` would do so by a wrapper, and import the compiler, which takes seconds.
    """
    function._torchdynamo_disable = True
    eval_frame.set_code_exec_strategy(function.__code__, _AS_IT_IS)


def compile_alike(module: torch.nn.Module, copy: torch.nn.Module) -> None:
    """Compiles a copy of a module in place, with the same settings, if `module.compile()` has compiled the module.

    Copying loses that, and only what `torch.compile` returned knows the settings.
    """
    compiled: Any = module._compiled_call_impl
    if compiled is not None:
        settings = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True)).get("self")
        copy._compiled_call_impl = None if settings is None else settings.cell_contents(copy._call_impl)


def keep_what_stands_in_for_gpus() -> None:
    """Makes this thread the owner of what a torch for GPUs asks in their place, on a machine without any.

    In torch 2.10 and 2.11 it belongs to the thread that is the first to trace for `torch.compile`; when that thread
    ends it is freed, and the next to trace crashes.
    """
    if torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def is_compiling() -> bool:
    """Whether this thread is compiling for `torch.compile`; what is being traced it does not tell, and need not."""
    return CompileContext.try_get() is not None


# Whether a profiler is on, on whichever thread: `record_function` does not ask, and costs as much where there is none.
# This costs 50 ns, since no frame of Python is made.
is_profiling: Callable[[], bool] = functools.partial(getattr, _profiler, "_is_profiler_enabled")
# Whether one is on that was started on this thread and sees no other.
is_profiling_this_thread_only: Callable[[], bool] = _autograd._profiler_enabled


def make_device_guard(answering: Callable[[Any], Callable[[], Any]]) -> Any:
    """What torch's C++ asks of which kind a device of a backend written in Python is.

    It asks where an exception ends the process: `answering` makes of the answer a function that cannot raise.
    """
    return type("DeviceGuard", (torch._C._acc.DeviceGuard,), {"type_": answering(_privateuse1)})()


def schema(operator: Any) -> Any:
    """The declared arguments and results of an operator, with what it writes and what aliases what."""
    return operator._schema


def is_alone_in_memory(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, and nobody else such as numpy, has a part of the memory of this one, as it is."""
    storage = tensor.untyped_storage()
    return storage.resizable() and not tensor.is_conj() and not tensor.is_neg() and has_one_tensor(storage)


def has_one_tensor(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is that of one tensor only."""
    return num_users(storage) <= 2  # the tensor, and the Python object by which it is asked


def num_users(storage: torch.UntypedStorage) -> int:
    """How many tensors a storage is that of, and Python objects."""
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users


def generator_id(generator: Any) -> int:
    """The same for every Python object that stands for one generator: a kernel is handed a new one each time."""
    identity: int = generator._cdata
    return identity


def global_hooks() -> dict[str, tuple[Callable[..., Any], ...]]:
    """The hooks that all modules and all optimizers have, by kind. Registered publicly, readable only here."""
    kinds = {**vars(_modules), **vars(_optimizers)}
    found = {name: hooks for name, hooks in kinds.items() if name.startswith("_global_") and name.endswith("_hooks")}
    return {name.strip("_").replace("_", " "): tuple(hooks.values()) for name, hooks in found.items()}
