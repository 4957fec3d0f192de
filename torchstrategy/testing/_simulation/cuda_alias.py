"""Lets code that says `"cuda"` run on simulated devices.

Most of it is a `TorchFunctionMode`, which sees every call of a torch function that
names a device. torch takes a mode off while it handles a call, and a thread has modes
of its own. So two kinds of code would not be in the mode, though they are in the block:
what backward calls (hooks, checkpoints, functions of one's own), and threads that the
block starts. `_Engine` and `_starts` put them in.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

from torchstrategy._base.torch_internals import (
    dispatch_modes,
    function_modes,
    pop_function_mode,
    push_function_mode,
)
from torchstrategy.testing._simulation import tensors
from torchstrategy.testing._simulation.cuda_names import (
    dtype_of_legacy,
    names_of_cuda,
    of_cpp,
)
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    Spoken,
    current_device,
    device_count,
    is_simulated,
    ordinal,
)
from torchstrategy.testing._simulation.pinned import allow_pinned_creation
from torchstrategy.testing._simulation.registered import registering_for_cuda
from torchstrategy.testing._simulation.torch_internals import (
    CPP,
    ENGINE,
    KINETO,
    tensor_cuda,
    without_dispatch_modes,
)
from torchstrategy.testing._simulation.words import say_cuda

# Functions that take the name of a device type, and that no `TorchFunctionMode` sees.
_TOLD_A_NAME = (
    (torch.autocast, "__init__"),
    (torch, "is_autocast_enabled"),
    (torch, "get_autocast_dtype"),
)


class Compiling:
    """What `torch.compile` does in such blocks if the backend is inductor.

    Inductor writes kernels for a GPU.

    Attributes:
        backend: The backend that runs in its place; None: it is refused.
        count: How often that happened.
    """

    backend: str | None = None
    count = 0


# This name stays the real class where something stands in for it.
_DEVICE: Any = torch.device
_lock = threading.Lock()
# What was replaced while a block is open, to be put back.
_before: list[tuple[Any, str, Any]] = []
_open = 0  # how many blocks are open, on all threads


@final
class cuda_alias(TorchFunctionMode):
    """A block in which `"cuda"` means the simulated devices.

    Use it to test code that names CUDA on a machine without CUDA.

    `device="cuda:1"`, `.to("cuda")`, `.cuda(1)`, `torch.cuda.set_device(1)`,
    `torch.autocast("cuda")` and their like act on `sim:1`, and checkpoints name
    `cuda:1`. Tensors go on reporting `sim`, and `tensor.is_cuda` stays False: code that
    asks them that sees the difference. It holds for the thread that entered it, for
    threads that are started in the block, and for the replicas that it runs;
    `torch.cuda`'s functions and `torch.autocast` are exchanged for all.

    Memory queries say what the devices hold, and `torch.cuda.nvtx` marks nothing. CUDA
    graphs run their operators again, one by one. What has no meaning without a driver
    raises an error with its name, and so does `torch.compile` with inductor: backends
    `eager` and `aot_eager` work.

    Raises:
        RuntimeError: On entering, if no devices are simulated.

    Example:
        >>> with torchstrategy.testing.cuda_alias():
        ...     pass
        Traceback (most recent call last):
        RuntimeError: cuda_alias() gives "cuda" the meaning of simulated devices, and there are none: call torchstrategy.testing.simulate_devices(n) first.
    """  # noqa: E501

    def __init__(self) -> None:
        super().__init__()
        self._entered = 0  # how often, on all threads

    def is_open(self) -> bool:
        """Whether a thread is in the block.

        Threads that the block has started may live longer than it.
        """
        return self._entered > 0

    def __enter__(self) -> cuda_alias:
        if not device_count():
            raise RuntimeError(
                'cuda_alias() gives "cuda" the meaning of simulated devices, and there '
                "are none: call "
                "torchstrategy.testing.simulate_devices(n) first."
            )
        with _lock:
            _open_one()
            self._entered += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with _lock:
            _close_one()
            self._entered -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        __tracebackhide__ = True  # pytest
        if not self.is_open():
            return func(*args, **(kwargs or {}))
        _calls.modes.append(self)
        try:
            return self._call(func, args, kwargs or {})
        except Exception as error:
            say_cuda(error)
            raise
        finally:
            _calls.modes.pop()

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        if func in (tensor_cuda, torch.Tensor.cuda):
            return _cuda(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.sim.", "torch.cuda.")
        if (
            func is torch.Tensor.type
            and len(args) > 1
            and (dtype := dtype_of_legacy(args[1])) is not None
        ):
            return args[0].to(device=NAME, dtype=dtype)
        if kwargs.get("pin_memory"):
            device = kwargs.get("device")
            if device is not None and _DEVICE(_translated(device)).type == NAME:
                raise RuntimeError("Only dense CPU tensors can be pinned")
            allow_pinned_creation()
        # `torch.device("cuda")` has no index: it means the device that is current when
        # it is used.
        if func is _DEVICE:
            return _device(*args, **kwargs)
        args = _in_another_form(func, args, kwargs)
        return func(
            *map(_translated, args),
            **{name: _translated(value) for name, value in kwargs.items()},
        )


_COMPRESSED = ("csr", "csc", "bsr", "bsc")
# By function, where the tensor of its first argument matters. torch's compiler traces
# this file, and cannot look these functions up in a set.
_TO_COMPRESSED = tuple(
    getattr(torch.Tensor, f"to_sparse_{layout}") for layout in _COMPRESSED
)
_MADE_COMPRESSED = (
    torch.sparse_compressed_tensor,
    *(getattr(torch, f"sparse_{layout}_tensor") for layout in _COMPRESSED),
)


def _in_another_form(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """The arguments with which a function is called.

    Raises:
        NotImplementedError: If it makes a tensor that is not simulated.
    """
    is_ctc_loss = func in (torch.ctc_loss, torch.nn.functional.ctc_loss)
    if is_ctc_loss and len(args) > 3 and is_simulated(args[0]):
        # While something watches operators, torch takes lengths of the CPU for tensors
        # of the device.
        return *args[:2], *map(_as_numbers, args[2:4]), *args[4:]
    if func in _TO_COMPRESSED and args and is_simulated(args[0]):
        _refuse_compressed(func)
    if func in _MADE_COMPRESSED and _is_on_device(args, kwargs):
        _refuse_compressed(func)
    return args


def _as_numbers(lengths: Any) -> Any:
    return (
        lengths.tolist()
        if isinstance(lengths, torch.Tensor) and lengths.is_cpu
        else lengths
    )


def _is_on_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type not in ("cpu", "meta")
    return any(
        isinstance(value, torch.Tensor) and is_simulated(value)
        for value in (*args, *kwargs.values())
    )


def _refuse_compressed(func: Any) -> None:
    raise NotImplementedError(
        f"{func.__name__} makes a compressed sparse tensor (CSR and its like) of a "
        "GPU, and simulated devices have none. Write to_sparse() or sparse_coo_tensor, "
        "which they have, or keep this tensor on the CPU."
    )


def _open_one() -> None:
    global _open
    if not _before:
        for owner, name, value in names_of_cuda(_translated):
            _exchange(owner, name, value)
        for owner, name in _TOLD_A_NAME:
            _exchange(owner, name, _told(getattr(owner, name)))
        _exchange(ENGINE.owner, ENGINE.name, _Engine(ENGINE.now()))
        _exchange(threading.Thread, "start", _starts(threading.Thread.start))
        _exchange(torch, "compile", _compiles(torch.compile))
        for owner, name, value in (*_profilers_without_cuda(), *registering_for_cuda()):
            _exchange(owner, name, value)
        _exchange(
            torch,
            "set_default_tensor_type",
            _sets_default_type(torch.set_default_tensor_type),
        )
        _exchange(tensors, "with_index", _in_operators(tensors.with_index))
        _exchange(torch.jit, "trace", _without_modes(torch.jit.trace))
        _exchange(Spoken, "name", "cuda")
        # Python asks it for names that a module does not have.
        _exchange(CPP, "__getattr__", of_cpp)
    _open += 1


def _exchange(owner: Any, name: str, value: Any) -> None:
    _before.append((owner, name, getattr(owner, name, _MISSING)))
    setattr(owner, name, value)


def _close_one() -> None:
    global _open
    _open -= 1
    while _before and not _open:
        owner, name, value = _before.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


_MISSING = object()


@final
class _Engine:
    """Runs backward in the mode in which it was called.

    What backward calls is the program's code, too.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        mode = _mode_of_the_call()
        if mode is None:
            return self._engine.run_backward(*args, **kwargs)
        push_function_mode(mode)
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            pop_function_mode()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@final
class _Calls(threading.local):
    """The modes that handle a call of this thread now.

    PyTorch has taken these modes off the thread for the call.
    """

    def __init__(self) -> None:
        self.modes: list[cuda_alias] = []


_calls = _Calls()


def _mode_of_the_call() -> cuda_alias | None:
    return _calls.modes[-1] if _calls.modes and not _is_on() else None


def _starts(
    start: Callable[[threading.Thread], None],
) -> Callable[[threading.Thread], None]:
    """Makes a replacement for `Thread.start`: a block's new thread is in the block."""

    @functools.wraps(start)
    def started(thread: threading.Thread) -> None:
        if _is_on() or _calls.modes:
            run, alias = thread.run, _calls.modes[-1] if _calls.modes else _innermost()

            def aliased() -> None:
                # The mode is pushed and not entered: the thread may go on when the
                # block has ended.
                push_function_mode(alias)
                run()

            thread.run = aliased  # type: ignore[method-assign]
        start(thread)

    return started


def _compiles(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for `torch.compile`, which refuses kernels for a GPU."""

    @functools.wraps(compile)
    def compiles(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend", "inductor") != "inductor":
            return _compiled(compile, model, *args, **kwargs)
        if Compiling.backend is None:
            raise NotImplementedError(
                "torch.compile with the backend 'inductor' writes kernels for a GPU, "
                'and there is none: "cuda" means simulated devices here. Give it '
                "backend='eager' or 'aot_eager', which trace the same and run each "
                "operator."
            )
        Compiling.count += 1
        # The mode and the options are those of inductor.
        kept = {
            name: value
            for name, value in kwargs.items()
            if name not in ("mode", "options")
        }
        return _compiled(
            compile, model, *args, **{**kept, "backend": Compiling.backend}
        )

    return compiles


def _compiled(
    compile: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compiles a function or module.

    It runs as it is, also with `fullgraph`, while a mode watches operators.

    torch's compiler leaves code alone that runs in such a mode, and then `fullgraph` is
    an error.
    """
    whole = compile(model, *args, **kwargs)
    if model is None or not kwargs.get("fullgraph"):
        return whole
    watched = compile(model, *args, **{**kwargs, "fullgraph": False})
    if isinstance(model, torch.nn.Module):
        whole.forward = _while_watched(watched.forward, whole.forward)
        return whole
    return _while_watched(watched, whole)


def _while_watched(
    watched: Callable[..., Any], other: Callable[..., Any]
) -> Callable[..., Any]:
    """Makes a function that calls one of two functions.

    It calls the first while a mode watches operators, and the second otherwise.
    """

    @functools.wraps(other)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (watched if dispatch_modes() else other)(*args, **kwargs)

    return call


def _in_operators(with_index: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a replacement for what finds a device while a call is handled.

    The call is one of the program, and this thread handles it.

    An operator of distributed tensors is Python, and makes tensors on the "cuda" of its
    mesh.
    """
    return lambda device: with_index(_translated(device) if _calls.modes else device)


def _without_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for a function that cannot run with watched operators."""

    @functools.wraps(call)
    def unwatched(*args: Any, **kwargs: Any) -> Any:
        with without_dispatch_modes():
            return call(*args, **kwargs)

    return unwatched


def _sets_default_type(call: Callable[[Any], None]) -> Callable[[Any], None]:
    """Makes a replacement for `torch.set_default_tensor_type`.

    The replacement knows `torch.cuda.FloatTensor` and its like.
    """

    @functools.wraps(call)
    def sets(t: Any) -> None:
        dtype = dtype_of_legacy(t)
        if dtype is None:
            torch.set_default_device(None)
            call(t)
        else:
            torch.set_default_dtype(dtype)
            torch.set_default_device(NAME)

    return sets


def _profilers_without_cuda() -> Iterator[tuple[Any, str, Any]]:
    """The constructors of torch's profilers, without CUDA.

    Its part of them prints a stack trace for each operator.
    """
    cuda, cpu = (
        torch.profiler.ProfilerActivity.CUDA,
        torch.profiler.ProfilerActivity.CPU,
    )
    kineto: Any = KINETO
    legacy: Any = torch.autograd.profiler.profile
    init_kineto, init_legacy = kineto.__init__, legacy.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        if options.get("activities") is not None:
            kept = [activity for activity in options["activities"] if activity != cuda]
            options["activities"] = kept or [cpu]
        init_kineto(self, *args, **options)

    def init_old(self: Any, *args: Any, **options: Any) -> None:
        if options.get("use_device") == "cuda":
            options["use_device"] = None
        options.pop("use_cuda", None)
        init_legacy(self, *args, **options)

    yield kineto, "__init__", init
    yield legacy, "__init__", init_old


def _told(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for a function, in which `"cuda"` means simulated devices.

    A call without an argument means them, too.
    """

    @functools.wraps(call)
    def told(*args: Any, **kwargs: Any) -> Any:
        if not _is_on():
            return call(*args, **kwargs)
        if not args and not kwargs:
            return call(NAME)
        named = {
            name: NAME if value == "cuda" else value for name, value in kwargs.items()
        }
        return call(*(NAME if value == "cuda" else value for value in args), **named)

    return told


def _is_on() -> bool:
    return _innermost() is not None


def _innermost() -> cuda_alias | None:
    """The block that this thread is in, and that has not ended."""
    modes = (
        mode
        for mode in reversed(function_modes())
        if isinstance(mode, cuda_alias) and mode.is_open()
    )
    return next(modes, None)


def install() -> None:
    """Lets `torch.save` and `torch.load` say "cuda" for simulated devices there."""
    torch.serialization.register_package(_BEFORE_CUDA, _tag, _restore)


_BEFORE_CUDA = 5  # torch's own package for CUDA is asked at 20


def _tag(storage: Any) -> str | None:
    return (
        f"cuda:{storage.device.index}"
        if storage.device.type == NAME and _is_on()
        else None
    )


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("cuda") or not _is_on():
        return None
    return storage.to(device=torch.device(NAME, ordinal(_translated(location))))


def _device(*args: Any, **kwargs: Any) -> torch.device:
    named = {name: _as_name(value) for name, value in kwargs.items()}
    made: torch.device = _DEVICE(*map(_as_name, args), **named)
    return made


def _as_name(value: Any) -> Any:
    kind, colon, index = value.partition(":") if type(value) is str else ("", "", "")
    return f"{NAME}{colon}{index}" if kind == "cuda" else value


def _cuda(
    tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **options: Any
) -> torch.Tensor:
    return tensor.to(
        torch.device(NAME, ordinal(_translated(device))),
        non_blocking=non_blocking,
        **options,
    )


def _translated(value: Any) -> Any:
    if type(value) is str and value.partition(":")[0] == "cuda":
        value = torch.device(value)
    if type(value) is torch.device and value.type == "cuda":
        return torch.device(
            NAME, current_device() if value.index is None else value.index
        )
    return value
