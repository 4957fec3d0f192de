"""Tells listeners what the program itself does with memory of the CPU.

They also hear on which line of the program it does so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch.autograd.graph import increment_version
from typing_extensions import override

from torchstrategy._base.torch_internals import TorchDispatchMode
from torchstrategy.testing._simulation.listeners import listeners
from torchstrategy.testing._simulation.torch_internals import Operator, schema
from torchstrategy.testing._simulation.words import name_of_file

_PACKAGE = str(Path(__file__).parents[2])
_CONTEXTS = contextlib.__file__  # in whose frames blocks begin and end

# Methods that read memory of the CPU and are no operators. `__reduce_ex__` is how a
# tensor is saved and pickled.
_READING = ("numpy", "tolist", "__dlpack__", "__reduce_ex__")

# Operators between the CPU and devices, of which listeners are told as copies.
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::_copy_from")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_blocks = 0  # how many blocks are open, on all threads


@contextmanager
def watching_the_cpu() -> Iterator[None]:
    """A block whose operators of the CPU are told to listeners."""
    global _blocks
    _blocks += 1
    if _blocks == 1:
        _watch_methods()
    try:
        with nullcontext() if _here.is_watched else _watched_here():
            yield
    finally:
        _blocks -= 1
        if not _blocks:
            _forget_methods()


def watched_thread() -> AbstractContextManager[None]:
    """A block for a thread that stands for a process.

    The block watches the thread if the process is watched.
    """
    return _watched_here() if _blocks and not _here.is_watched else nullcontext()


@contextmanager
def unwatched() -> Iterator[None]:
    """A block whose operators are not the program's: nobody is told of them."""
    before, _here.is_silent = _here.is_silent, True
    try:
        yield
    finally:
        _here.is_silent = before


def is_unwatched() -> bool:
    """Whether this thread is in a block of `unwatched`."""
    return _here.is_silent


@final
class _Here(threading.local):
    is_watched = False  # by an outer block, which tells all listeners
    is_silent = False


_here = _Here()


@contextmanager
def _watched_here() -> Iterator[None]:
    _here.is_watched = True
    try:
        with _Watch():
            yield
    finally:
        _here.is_watched = False


_before: list[tuple[str, Any]] = []


def _watch_methods() -> None:
    for name in _READING:
        original = getattr(torch.Tensor, name)
        _before.append((name, vars(torch.Tensor).get(name)))
        setattr(torch.Tensor, name, _reading(original, f"tensor.{name}()"))


def _forget_methods() -> None:
    while _before:
        name, original = _before.pop()
        if original is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, original)


def _reading(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def replaced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        read = [
            part
            for part in _pieces_of(tensor)
            if part.is_cpu and part.layout is torch.strided
        ]
        for listener in listeners() if read else ():
            listener.used_on_cpu(name, read, [])
        return method(tensor, *args, **kwargs)

    return replaced


@final
class _Watch(TorchDispatchMode):
    """Sees every operator of the thread that opens the block, and of replicas.

    It sees those of replicas because their threads run under the caller's modes.
    """

    supports_higher_order_operators = True  # such as `flex_attention`

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the method below, which costs each operator and each
        # view two microseconds.
        return False

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        uses = _uses_of(func)
        if uses is None or not (used := uses(args, kwargs)):
            return func(*args, **kwargs)
        read, written = used
        if not _here.is_silent:
            for listener in listeners():
                listener.used_on_cpu(func.name().replace("::", "."), read, written)
        result = func(*args, **kwargs)
        if written and func.name().startswith("aten::_foreach_"):
            # Of a list, the operators within count the versions, and do not if they are
            # called from a mode.
            increment_version(
                [tensor for tensor in written if not tensor.is_inference()]
            )
        return result


Uses = Callable[
    [Sequence[Any], dict[str, Any]],
    tuple[list[torch.Tensor], list[torch.Tensor]] | None,
]


@functools.cache
def _uses_of(op: Any) -> Uses | None:
    """A function that finds the tensors of the CPU that a call reads and writes.

    It is None if the call looks into no memory.

    The function returns None if there are none, as of all operators of devices: it is
    called at each operator.
    """
    if not isinstance(op, Operator):
        return None  # one of a higher order, which calls others
    declared = schema(op)
    name = op.name().partition(".")[0]
    views = any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in declared.returns
    )
    makes = (
        name.endswith("_like")
        or name.startswith(("aten::new_", "aten::empty"))
        or name == "aten::is_pinned"
    )
    if views or makes or name in ("aten::is_same_size", "aten::set_", "aten::resize_"):
        return None
    arguments = [
        (
            i,
            argument.name,
            argument.alias_info is not None and argument.alias_info.is_write,
        )
        for i, argument in enumerate(declared.arguments)
        if "Tensor" in str(argument.type)
    ]
    is_copy = name in _COPIES

    def find(
        args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        crosses = (
            is_copy
            and kwargs.get("device") is not None
            and torch.device(kwargs["device"]).type != "cpu"
        )
        for i, argument, is_write in arguments:
            value = args[i] if i < len(args) else kwargs.get(argument)
            for given in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(given, torch.Tensor):
                    continue
                for tensor in (given,) if type(given) in _PLAIN else _pieces_of(given):
                    if not tensor.is_cpu:
                        crosses = crosses or is_copy
                    elif tensor.layout is torch.strided:
                        (written if is_write else read).append(tensor)
        return None if crosses or not (read or written) else (read, written)

    return find


def _pieces_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose memory a tensor has.

    A tensor such as a `DTensor` only stands for others, so these are the ones within
    it.
    """
    if type(tensor) in _PLAIN:
        return [tensor]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        within = [getattr(tensor, name) for name in flatten()[0]]
        return [
            piece
            for one in within
            if isinstance(one, torch.Tensor)
            for piece in _pieces_of(one)
        ]
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # it has a size, and no memory
        return []
    return [tensor]


def users_line() -> str:
    """The innermost line of the program in the stack: ` (train.py:12)`.

    Lines of torch and of this package do not count.
    """
    found = users_place()
    return f" ({found})" if found else ""


def users_place() -> str:
    """The innermost line of the program in the stack: `train.py:12`, or nothing.

    Lines of torch and of this package do not count.
    """
    return users_call().line


class Call(NamedTuple):
    """Who calls an operator."""

    # The innermost line that is neither torch's nor this package's: `train.py:12`, or
    # nothing.
    line: str
    # The function that this line is in, as Python names it: `<module>` at the top of a
    # file.
    function: str
    # The first part of torch that is called on the way from there, of those in
    # `_PARTS`, or nothing.
    way: str


# The parts of torch that are told apart, by their files.
_PARTS = (
    ("/torch/optim/", "optimizer"),
    ("/torch/nn/utils/clip_grad.py", "optimizer"),
    ("/torch/amp/grad_scaler.py", "optimizer"),
    # This file calls C++, which sends buckets of gradients.
    ("/torch/autograd/graph.py", "engine"),
    ("/torch/nn/", "module"),
    ("/torch/distributed/", "distributed"),
)
_name_of: Callable[[Any], str] = attrgetter(
    "co_qualname" if sys.version_info >= (3, 11) else "co_name"
)


def users_call() -> Call:
    """Who calls the operator that runs now."""
    frame, way = inspect.currentframe(), ""
    # This runs at each operator: a line number is computed only when somebody asks for
    # it.
    while frame is not None:
        code = frame.f_code
        name, part = _files[code.co_filename]
        if name:
            return Call(f"{name}:{frame.f_lineno}", _name_of(code), way)
        if part:
            way = part  # the last one that is seen is the first that is called
        frame = frame.f_back
    return Call("", "", way)


@final
class _Files(dict[str, tuple[str, str]]):
    """The name of each file of the user's, and nothing for other files.

    For a file of torch, it also has the part of torch, if that matters.
    """

    def __missing__(self, file: str) -> tuple[str, str]:
        if not file.startswith((_PACKAGE, _CONTEXTS, "<")) and "/torch/" not in file:
            known = name_of_file(file), ""
        else:
            known = "", next((part for place, part in _PARTS if place in file), "")
        self[file] = known
        return known


_files = _Files()
