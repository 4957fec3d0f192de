"""The only imports of private torch names, each with its reason.

When torch moves one of them, this file changes and no other does.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import _guards, overrides

# The frame evaluator, which decides whether `torch.compile` compiles a function that is
# called.
from torch._C._dynamo import eval_frame
from torch.autograd import profiler as _profiler
from torch.nn.modules import module as _modules
from torch.nn.utils import parametrize
from torch.optim import optimizer as _optimizers
from torch.utils import _device, _python_dispatch, _pytree

T = TypeVar("T")

# The tables of hooks that torch calls for every module, in all threads: there is no
# public way to list them.
GLOBAL_MODULE_HOOKS: tuple[dict[int, Any], ...] = (
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
)


def global_step_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """The tables of hooks that torch calls around the steps of all optimizers.

    PyTorch has no public function that lists these hooks.

    They are asked for each time: in ranks on threads, other tables stand in these
    places.
    """
    return (
        _optimizers._global_optimizer_pre_hooks,
        _optimizers._global_optimizer_post_hooks,
    )


# A replica's thread has to be in the very mode objects that the caller's thread is in.
# `with mode:` would run the mode's own `__enter__`, which may reset it (FlopCounterMode
# starts counting at zero), and there is no public way to push a mode without entering
# it.
function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
pop_function_mode: Callable[[], Any] = overrides._pop_mode
push_function_mode: Callable[[Any], None] = overrides._push_mode
TorchDispatchMode = _python_dispatch.TorchDispatchMode
dispatch_modes: Callable[[], list[Any]] = (
    _python_dispatch._get_current_dispatch_mode_stack
)
pop_dispatch_mode: Callable[[], Any] = _python_dispatch._pop_mode
push_dispatch_mode: Callable[[Any], None] = _python_dispatch._push_mode

# The functions that walk nested containers. torch's own tracing and export use them,
# and libraries register their containers with them; `torch.utils.pytree` is not public
# yet.
TreeSpec = _pytree.TreeSpec
kinds_of_nodes = _pytree.SUPPORTED_NODES
kind_of_node = _pytree._get_node_type
tree_flatten = _pytree.tree_flatten
tree_is_leaf = _pytree.tree_is_leaf
tree_leaves_with_path = _pytree.tree_leaves_with_path

# The fused loops over many tensors that torch's optimizers use. `torch.optim` is their
# only public user.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub


def _make_counting(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def counting(*args: Any, **kwargs: Any) -> Any:
        tensors = args[0] if args else kwargs.get("self") or ()
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        before = counted[0]._version if counted else 0
        result = write(*args, **kwargs)
        if counted and counted[0]._version == before:
            torch.autograd.graph.increment_version(counted)
        return result

    return counting


# torch's kernels for CUDA of these two operators on lists do not count what they write
# in the versions of the tensors, as their kernels for the CPU do. `AveragedModel`
# writes by the one, and `zero_grad(set_to_none=False)` of an optimizer with
# `foreach=True` by the other; a run would see neither.
for _name in ("_foreach_lerp_", "_foreach_zero_"):
    setattr(torch, _name, _make_counting(getattr(torch, _name)))

# Whether this build of torch has NCCL; `torch.cuda.nccl.is_available` checks the same,
# and also warns.
HAS_NCCL = hasattr(torch._C, "_nccl_all_reduce")

# The default saved-tensor hooks of a thread. The public
# `torch.autograd.graph.saved_tensors_hooks` sets them, but cannot tell which ones are
# set.
push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


# A block in which no function mode sees the calls: the user's modes are for the user's
# calls, not for the library's.
unseen_by_function_modes: Callable[[], AbstractContextManager[None]] = (
    torch._C.DisableTorchFunction
)

# How many function modes this thread is in. It makes no list of the modes, since every
# run calls it.
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack

# The name of torch's device type for backends of others, `PrivateUse1`.
privateuse1_name: Callable[[], str] = torch._C._get_privateuse1_backend_name

# The `grad` that autograd itself reads and writes, whatever `grad` of a subclass does.
_of_tensor: Any = torch.Tensor
raw_grad: Callable[[torch.Tensor], torch.Tensor | None] = _of_tensor.grad.__get__
set_raw_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = (
    _of_tensor.grad.__set__
)

# How often a tensor was written in place, as autograd counts it.
version: Callable[[torch.Tensor], int] = _of_tensor._version.__get__

# How many operations autograd has recorded on this thread. If the number is the same at
# two moments, autograd has recorded nothing in between.
num_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr


def _of_each(
    read: Callable[[torch.Tensor], T], tensors: Iterable[torch.Tensor]
) -> list[T]:
    """What `read` returns for each of some tensors."""
    # Else torch looks up, for each tensor of a subclass, whether the subclass has a
    # function of its own for this. That takes longer than reading the attribute.
    with unseen_by_function_modes():
        return list(map(read, tensors))


# A run looks at all parameters several times. These make a list of what `map` reads,
# without a Python call for each tensor: the gradients that autograd has written, how
# many bytes the elements take, and so on.
_Tensors = Iterable[torch.Tensor]
raw_grads: Callable[[_Tensors], list[torch.Tensor | None]] = functools.partial(
    _of_each, raw_grad
)
sizes: Callable[[_Tensors], list[int]] = functools.partial(
    _of_each, _of_tensor.nbytes.__get__
)
shapes: Callable[[_Tensors], list[torch.Size]] = functools.partial(
    _of_each, _of_tensor.shape.__get__
)
dtypes: Callable[[_Tensors], list[torch.dtype]] = functools.partial(
    _of_each, _of_tensor.dtype.__get__
)
requires_grad_of: Callable[[_Tensors], list[bool]] = functools.partial(
    _of_each, _of_tensor.requires_grad.__get__
)
are_contiguous: Callable[[_Tensors], list[bool]] = functools.partial(
    _of_each, _of_tensor.is_contiguous
)


def kinds_of(tensors: Sequence[torch.Tensor]) -> set[tuple[torch.dtype, bool]]:
    """The dtypes of some tensors, each with whether the tensor is on the CPU.

    A dtype is there twice if tensors on the CPU and elsewhere have it.
    """
    with unseen_by_function_modes():
        return set(zip(map(_dtype, tensors), map(_is_cpu, tensors), strict=True))


def forms(tensors: Sequence[torch.Tensor]) -> list[object]:
    """A mark that differs if a tensor got another size or dtype through its `data`."""
    with unseen_by_function_modes():
        return [*map(_nbytes, tensors), *map(_dtype, tensors)]


_nbytes: Callable[[torch.Tensor], int] = _of_tensor.nbytes.__get__
_dtype: Callable[[torch.Tensor], torch.dtype] = _of_tensor.dtype.__get__
_is_cpu: Callable[[torch.Tensor], bool] = _of_tensor.is_cpu.__get__


def set_raw_grads(
    tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> None:
    """Writes the gradient of each of some tensors, as autograd does."""
    with unseen_by_function_modes():
        deque(map(set_raw_grad, tensors, gradients), maxlen=0)


def take_raw_grads(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Takes away the gradient that autograd has written for each of some tensors."""
    taken = raw_grads(tensors)
    set_raw_grads(tensors, repeat(None))
    return taken


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each of some tensors was written in place.

    It is 0 for inference tensors, which do not count their writes.
    """
    try:
        with unseen_by_function_modes():
            return list(map(version, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else version(tensor) for tensor in tensors]


def are_dense(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some tensors all have the layout `torch.strided`, and none is sparse."""
    return _STRIDED.issuperset(_of_each(_layout, tensors))


def are_there_and_dense(tensors: Iterable[torch.Tensor | None]) -> bool:
    """The same for values of which some may be None, for which it is not so."""
    try:
        with unseen_by_function_modes():
            return _STRIDED.issuperset(map(_layout, tensors))
    except TypeError:  # None has no layout
        return False


_STRIDED = frozenset({torch.strided})
_layout: Callable[[Any], torch.layout] = _of_tensor.layout.__get__


def readings(tensors: Sequence[torch.Tensor]) -> list[list[object]]:
    """How each of some tensors reads its memory.

    It says the strides, and whether the tensor is read as conjugate or negative.
    """
    read: list[Callable[[torch.Tensor], Any]] = [
        torch.Tensor.is_conj,
        torch.Tensor.is_neg,
    ]
    read.append(torch.Tensor.stride if are_dense(tensors) else _stride_or_layout)
    return [_of_each(one, tensors) for one in read]


def _stride_or_layout(tensor: torch.Tensor) -> object:
    return tensor.stride() if tensor.layout is torch.strided else tensor.layout


# Views of the parts of a flat tensor that lie one after the other, in the shapes of
# other tensors: the reverse of `memory.flatten`. In Python it would be two calls for
# each part, which for small tensors take longer than to add them up.
unflatten: Callable[[torch.Tensor, _Tensors], Sequence[torch.Tensor]] = (
    torch._utils._unflatten_dense_tensors
)


def pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The address at which each tensor begins in memory; for a sparse one, its id."""
    if are_dense(tensors):
        return _of_each(torch.Tensor.data_ptr, tensors)
    return [
        tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)
        for tensor in tensors
    ]


def have_gradient_hooks(leaves: Iterable[torch.Tensor]) -> bool:
    """Whether the user has registered hooks for the gradient of any of some leaves.

    No public function of torch tells that.
    """
    with unseen_by_function_modes():
        return any(map(_hooks_of_tensor, leaves)) or any(map(_late_hooks, leaves))


_hooks_of_tensor: Callable[[torch.Tensor], Any] = _of_tensor._backward_hooks.__get__
_late_hooks: Callable[[torch.Tensor], Any] = (
    _of_tensor._post_accumulate_grad_hooks.__get__
)


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The (pack, unpack) pair that is in force on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def end_modes() -> None:
    """Ends all modes and hooks of saved tensors that this thread is in.

    A thread must not keep one when it ends. C++ gives it back to Python after the
    thread has left Python, when a join may be over already: if the process is at its
    end by then, too, it aborts.
    """
    # The list keeps the modes alive: popping a mode that nobody else refers to crashes
    # torch 2.10.
    left = dispatch_modes()
    for _ in left:
        pop_dispatch_mode()
    while function_modes():
        pop_function_mode()
    while saved_tensors_hooks() is not None:
        pop_saved_tensors_hooks()


# A block in inference mode, or out of it. At its end, this thread has the grad mode,
# the inference mode and the threads for backward that it had before, whatever was set
# in the block. These take a fifth of the time of the public `torch.inference_mode`,
# `torch.set_grad_enabled` and `torch.autograd.set_multithreading_enabled`.
autograd_state: Callable[[bool], AbstractContextManager[object]] = (
    torch._C._InferenceMode
)
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
set_multithreading_enabled: Callable[[bool], None] = (
    torch._C._set_multithreading_enabled
)


# Its `device_context` is the function mode by which `torch.set_default_device` acts on
# this thread, and which the next `torch.set_default_device` ends; a thread that has set
# no default device has no such attribute.
default_device: Any = torch._GLOBAL_DEVICE_CONTEXT


class DefaultDevice(_device.DeviceContext):
    """A block in which tensors that name no device are created on this one.

    `with torch.device(...)` does the same.

    Random numbers of a generator are where the generator is: it can draw nowhere else,
    and torch would raise an error.
    """

    # As `with torch.device(...)`, it leaves alone what `torch.set_default_device`
    # writes, which is one for all threads.
    __enter__ = overrides.TorchFunctionMode.__enter__
    __exit__ = overrides.TorchFunctionMode.__exit__

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device._device_constructors() and kwargs.get("device") is None:
            generator = kwargs.get("generator")
            kwargs["device"] = self.device if generator is None else generator.device
        return func(*args, **kwargs)


# Makes a leaf of a class that shares the memory of some data.
# `torch.nn.Parameter.__new__` behaves differently for different classes of data; this
# is the constructor that it calls in the end.
make_parameter = torch.Tensor._make_subclass

# A block in which writes on a tensor, or on several, do not change its version, as some
# writes of torch's own kernels do not.
_autograd: Any = torch.autograd
_Kept = torch.Tensor | tuple[torch.Tensor, ...]
keeping_version: Callable[[_Kept], AbstractContextManager[None]] = (
    _autograd._unsafe_preserve_version_counter
)


def set_version(tensor: torch.Tensor, number: int) -> None:
    """Sets how often a tensor counts as written in place.

    Nothing public does so. What keeps a version for the length of a block remembers it,
    and is given another one to remember.
    """
    keeper: Any = keeping_version(tensor)
    assert hasattr(keeper, "prev_versions"), "it remembers the version under this name"
    keeper.prev_versions = (number,)
    keeper.__exit__(None, None, None)


@contextmanager
def counting_writes(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block that writes on each of some tensors once.

    The versions of the tensors count the write, whether torch counts it or not.

    NCCL writes memory that torch does not look at.
    """
    before = versions(tensors)
    yield
    uncounted = [
        one
        for one, old, new in zip(tensors, before, versions(tensors), strict=True)
        if old == new
    ]
    torch.autograd.graph.increment_version(uncounted)


# These are public, but torch has no type annotations for them.
on_computed: Callable[[torch.Tensor, Callable[[torch.Tensor], None]], Any] = (
    torch.Tensor.register_hook
)
on_gradient: Callable[[torch.Tensor, Callable[[torch.Tensor], None]], Any]
on_gradient = torch.Tensor.register_post_accumulate_grad_hook


# The function by which `Tensor.backward`, `autograd.backward` and `autograd.grad` run
# the engine. A worker with one replica has to act before a backward adds to the first
# gradient and after it has added to the last one, and torch has hooks for neither: the
# hooks of tensors are called in between.
_run_engine = _autograd._engine_run_backward

# Runs a backward: it is called with a function that does so, and with whether the
# gradients get a graph.
AroundBackward = Callable[[Callable[[], Any], bool], Any]
# Runs the forward of a `DistributedDataParallel`: it is called with the module, and
# with a function that does so.
AroundForward = Callable[[Any, Callable[[], Any]], Any]


# Runs a backward: it is called with where the backward begins, which are tensors or
# edges of the graph; with the gradients there; and with a function that runs it from
# these or from others.
AroundLosses = Callable[
    [Sequence[Any], Sequence[Any], Callable[[Sequence[Any], Sequence[Any]], Any]], Any
]


class _Around(threading.local):
    """What runs the backwards of this thread, and the forwards of its DDP modules.

    DDP means `DistributedDataParallel`. None means that torch runs them alone.
    """

    backward: AroundBackward | None = None
    losses: AroundLosses | None = None
    forward: AroundForward | None = None


_around = _Around()


class _Inputs:
    """What `backward(inputs=...)` and `autograd.grad` take for a step's tensors."""

    of_replica: Callable[[Any], Any] | None = None


def take_inputs_by(of_replica: Callable[[Any], Any]) -> None:
    """Makes a gradient that is asked for by a tensor that of another tensor.

    From here on, this is what `of_replica` returns for the tensor.
    """
    _Inputs.of_replica = of_replica
    _autograd._engine_run_backward = _run_backward


def _run_backward(
    outputs: Any,
    grads: Any,
    keeps_graph: bool,
    makes_graph: bool,
    inputs: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if inputs and _Inputs.of_replica is not None:
        inputs = tuple(map(_Inputs.of_replica, inputs))
    around, of_losses = _around.backward, _around.losses
    if (around is None and of_losses is None) or not kwargs.get("accumulate_grad"):
        return _run_engine(
            outputs, grads, keeps_graph, makes_graph, inputs, *args, **kwargs
        )

    def run(roots: Any, gradients: Any) -> Any:
        return _run_engine(
            tuple(roots),
            tuple(gradients),
            keeps_graph,
            makes_graph,
            inputs,
            *args,
            **kwargs,
        )

    # A backward within this one, as of a reentrant checkpoint, is a part of it.
    _around.backward = _around.losses = None
    try:
        if of_losses is None:
            assert around is not None
            return around(functools.partial(run, outputs, grads), makes_graph)
        if around is None:
            return of_losses(outputs, grads, run)
        return of_losses(
            outputs,
            grads,
            lambda roots, given: around(
                functools.partial(run, roots, given), makes_graph
            ),
        )
    finally:
        _around.backward, _around.losses = around, of_losses


# Nothing public tells which `DistributedDataParallel`s hold a module, and torch would
# call a forward hook for all modules at the forward of each.
_DistributedDataParallel: Any = torch.nn.parallel.DistributedDataParallel
_run_forward = _DistributedDataParallel.forward


@functools.wraps(_run_forward)
def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    if _around.forward is None:
        return _run_forward(module, *args, **kwargs)
    return _around.forward(
        module, functools.partial(_run_forward, module, *args, **kwargs)
    )


def run_by(
    backward: AroundBackward, forward: AroundForward, call: Callable[[], T]
) -> T:
    """Returns `call()`, and meanwhile lets `backward` run the thread's backwards.

    It runs each backward that adds to `.grad` of leaves.

    And `forward` runs each forward of a `DistributedDataParallel`.
    """
    _autograd._engine_run_backward, _DistributedDataParallel.forward = (
        _run_backward,
        _forward,
    )
    before = _around.backward, _around.forward
    _around.backward, _around.forward = backward, forward
    try:
        return call()
    finally:
        _around.backward, _around.forward = before


class losses_run_by(AbstractContextManager[None]):
    """A block in which a function runs each backward that adds to `.grad` of leaves.

    The backwards are those of this thread.

    It is told where the backward begins, and may let it begin elsewhere.
    """

    __slots__ = ("_before", "_run")

    def __init__(self, run: AroundLosses) -> None:
        self._run = run

    def __enter__(self) -> None:
        _autograd._engine_run_backward = _run_backward
        self._before, _around.losses = _around.losses, self._run

    def __exit__(self, *exception: Any) -> None:
        _around.losses = self._before


def losses_noted_by(note: Callable[[Sequence[Any]], object]) -> losses_run_by:
    """A block in which a function is told where each backward begins.

    It hears of backwards of this thread that add to `.grad` of leaves.

    Whatever ran these backwards before goes on to run them.
    """
    before = _around.losses

    def run(
        outputs: Sequence[Any],
        grads: Sequence[Any],
        run_from: Callable[[Any, Any], Any],
    ) -> Any:
        note(outputs)
        return (
            run_from(outputs, grads)
            if before is None
            else before(outputs, grads, run_from)
        )

    return losses_run_by(run)


def is_distributed_tensor(tensor: object) -> bool:
    """Whether a tensor is a `DTensor`, which has a part in each of several processes.

    To import its class takes a second, and who has not imported it has none.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def is_flat_sharded(module: torch.nn.Module) -> bool:
    """Whether a module is a `FullyShardedDataParallel`, older than `fully_shard`."""
    kind = getattr(
        sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None
    )
    return kind is not None and isinstance(module, kind)


def sharding_groups(module: torch.nn.Module) -> Sequence[Any]:
    """The groups of parameters that `fully_shard` has made of a module.

    The list is empty if `fully_shard` has not sharded the module.

    `FSDPModule` sets how it communicates, but does not tell it. Nor does it tell which
    parameters are its own: between forward and backward, its modules may have whole
    ones in their place.
    """
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return ()
    groups: Sequence[Any] | None = getattr(state(), "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    one = state()._fsdp_param_group  # torch before 2.12
    return () if one is None else (one,)


def places_of_sharded(parameter: Any) -> list[tuple[torch.nn.Module, str]]:
    """The modules that have a parameter of one of `sharding_groups`.

    Each comes with the name under which it has the parameter.
    """
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def whole_of_sharded(parameter: Any) -> torch.Tensor | None:
    """The whole parameter, for which backward computes a gradient.

    It is None if forward has not put it together yet.
    """
    whole: torch.Tensor | None = getattr(parameter, "_unsharded_param", None)
    return whole


def communication_hooks(module: Any) -> bool:
    """Whether a `DistributedDataParallel` has communication hooks of its own.

    PyTorch has no public function that tells so.
    """
    return bool(module._comm_hooks)


def will_be_reached(leaf: torch.Tensor) -> bool:
    """Whether the backward under way on this thread reaches a leaf, or has reached it.

    `register_multi_grad_hook` uses the same function, but keeps all its leaves alive in
    a reference cycle that the garbage collector cannot find.
    """
    return torch._C._will_engine_execute_node(
        torch.autograd.graph.get_gradient_edge(leaf).node
    )


# The indices and values of a sparse tensor, also of one that is not coalesced.
sparse_indices: Any = torch.ops.aten._indices
sparse_values: Any = torch.ops.aten._values
# Swaps the contents of two tensors, so that every reference to one of them now shows
# the other.
swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
# Tells the frame evaluator to leave a function, and all that it calls, as they are.
_AS_IT_IS = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
)


def hide_from_compiler(function: Any) -> None:
    """Makes `torch.compile` run a function, and all it calls, without compiling them.

    `torch.compiler.disable` would wrap the function, and would import the compiler,
    which takes seconds.
    """
    function._torchdynamo_disable = True
    eval_frame.set_code_exec_strategy(function.__code__, _AS_IT_IS)


# The compiler is to trace this mode within functions that it compiles, as it does
# torch's own, and not to compile it where torch calls it from elsewhere.
eval_frame.set_code_exec_strategy(
    DefaultDevice.__torch_function__.__code__,
    eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    ),
)


def compile_alike(module: torch.nn.Module, copy: torch.nn.Module) -> None:
    """Compiles a copy of a module in place, if `module.compile()` was called.

    The copy gets the same settings as the module.

    The copy is not compiled by itself, and only the function that `torch.compile`
    returned has the settings.
    """
    compiled: Any = module._compiled_call_impl
    if compiled is not None:
        settings = dict(
            zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True)
        ).get("self")
        copy._compiled_call_impl = (
            None if settings is None else settings.cell_contents(copy._call_impl)
        )


def flat_weights(layer: torch.nn.RNNBase) -> list[Any]:
    """All weights of a recurrent layer, in the order in which cuDNN takes them.

    Some may be missing.
    """
    return list(getattr(layer, "_flat_weights", ()))


def keep_graphs_here() -> None:
    """Gives this thread the tables in which torch's compiler keeps CUDA graphs.

    With `torch.compile(mode="reduce-overhead")` it looks for them on the thread that
    runs a compiled function. Torch gave them to the main thread and to those of
    backward, and ended with an assertion on any other one; now it makes them where they
    are missing.
    """
    if torch.__version__ < "2.13":  # which compares the numbers, and no text
        tables: dict[str, object] = {
            "tree_manager_containers": {},
            "tree_manager_locks": defaultdict(threading.Lock),
        }
        for name, table in tables.items():
            # When the thread ends, torch lets go of a reference to the table that it
            # has never taken. Without one that is its own, Python would free the table
            # at once, and torch would free other memory later.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))
            torch._C._stash_obj_in_tls(name, table)


def keep_what_stands_in_for_gpus() -> None:
    """Creates, on this thread, the substitute for a CUDA device guard.

    PyTorch uses the substitute on a machine without GPUs.

    A build of torch for CUDA needs it when it traces for `torch.compile`. In torch 2.10
    and 2.11 it belongs to the first thread that traces; when that thread ends, torch
    frees it, and the next thread that traces crashes.
    """
    if torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def is_compiling() -> bool:
    """Whether `torch.compile` is compiling on this thread.

    It does not say which function; no caller needs that.
    """
    # Each read of a gradient asks this. `CompileContext.try_get` takes three times as
    # long where nobody compiles.
    return _guards._TLS.__dict__.get("compile_context") is not None


hide_from_compiler(_run_backward)
# Otherwise the answer while a step is compiled would become a part of the compiled
# step.
hide_from_compiler(is_compiling)


@contextmanager
def parametrizations_computed_anew() -> Iterator[None]:
    """A block in which `torch.nn.utils.parametrize.cached()` around it caches nothing.

    Its one cache knows a module and all copies of it by one key, so a replica would get
    the tensor of another.
    """
    depth = parametrize._cache_enabled
    parametrize._cache_enabled -= depth
    try:
        yield
    finally:
        parametrize._cache_enabled += depth


def are_parametrizations_cached() -> bool:
    """Whether any thread is in a block of `torch.nn.utils.parametrize.cached()`."""
    return bool(parametrize._cache_enabled)


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is under way on this thread.

    Transforms are `grad`, `vmap`, `jvp` and so on.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


# Whether a profiler is on, on any thread. `record_function` does not check this, and
# costs as much without a profiler as with one. This check costs 50 ns, since it creates
# no Python frame.
is_profiling: Callable[[], bool] = functools.partial(
    getattr, _profiler, "_is_profiler_enabled"
)
# Whether a profiler is on that was started on this thread and sees no other thread.
is_profiling_this_thread_only: Callable[[], bool] = _autograd._profiler_enabled


def are_alone_in_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each of some tensors has its memory for itself.

    It shares the memory with no other tensor and no other library, such as NumPy.

    A tensor that reads its memory as conjugate or negative counts as one that shares.
    """
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    if (
        not all(map(torch.UntypedStorage.resizable, storages))
        or max(map(num_users, storages), default=0) > _ONE_TENSOR
    ):
        return False
    return not (
        any(map(torch.Tensor.is_conj, tensors))
        or any(map(torch.Tensor.is_neg, tensors))
    )


# The users of a storage that one tensor has: the tensor, and the Python object for the
# storage.
_ONE_TENSOR = 2


def has_one_tensor(storage: torch.UntypedStorage) -> bool:
    """Whether a storage belongs to one tensor only."""
    return num_users(storage) <= _ONE_TENSOR


def num_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and Python objects use a storage."""
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users


def shared_store(prefix: str) -> tuple[Any, tuple[str, int] | None]:
    """A connection of its own to the store of `torch.distributed`.

    The processes of `torch.distributed` have found each other by this store.

    Its keys begin with the prefix. The host and the port are those at which it is kept,
    if it is at any.
    """
    distributed: Any = torch.distributed
    store = distributed.distributed_c10d._get_default_store()
    with suppress(RuntimeError):  # some stores have no second connection
        store = store.clone()
    innermost = store
    while isinstance(innermost, distributed.PrefixStore):
        innermost = innermost.underlying_store
    home = (
        (innermost.host, innermost.port)
        if isinstance(innermost, distributed.TCPStore)
        else None
    )
    return distributed.PrefixStore(prefix, store), home


def make_named_group(
    name: str, ranks: list[int], backend: str | None, timeout: timedelta | None
) -> torch.distributed.ProcessGroup:
    """A group of some of the processes, which these make without the others.

    torch names such a group (`new_group(use_local_synchronization=True)`) by how many
    groups its process has. Two processes of which one has one more, or has not yet
    collected one that is gone, then wait for each other under two names.

    Args:
        name: The same in all processes of the group, and of no other group.
        ranks: The processes, of which this is one, by their numbers in the default
            group.
        backend: Its backends. None: as the default group has.
        timeout: How long an operation may take. None: as torch's default for the
            backend.
    """
    c10d: Any = torch.distributed.distributed_c10d
    world = c10d._world
    default = c10d._get_default_group()
    backend_of_default, store = world.pg_map[default]
    kind = c10d.Backend(backend or backend_of_default)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(default.rank()),
        ranks,
        kind,
        store,
        name,
        timeout=c10d._get_default_timeout(kind) if timeout is None else timeout,
        device_id=default.bound_device_id,
    )
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    made: torch.distributed.ProcessGroup = group
    return made
