"""CUDA graphs: the operators of a block are kept, and run again on a replay.

A replay runs them one by one.

Note [What a capture leaves]: CUDA does not run what it captures. Here it has to run,
since operators need results to go on with. So what the block writes on tensors from
before it is undone at its end, random numbers count as not drawn, and the tensors that
the block has made hold NaN, or the lowest integer, until the first replay. No listener
is told of the block. Python's part of it runs once, as on a GPU.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base.torch_internals import TorchDispatchMode, keeping_version
from torchstrategy.testing._simulation.generators import default_generators
from torchstrategy.testing._simulation.listeners import nobody_listening
from torchstrategy.testing._simulation.ordinals import DeviceError, is_simulated
from torchstrategy.testing._simulation.streams import (
    Stream,
    current_stream,
    default_stream,
    refuse_in_capture,
    set_capturing,
    stream,
    why_capture_is_lost,
)
from torchstrategy.testing._simulation.torch_internals import schema, tree_map_only

_aten = torch.ops.aten
_READS = frozenset(
    (
        _aten._local_scalar_dense.default,
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten._unique2.default,
    )
)
_pools = itertools.count(1)


class _Call(NamedTuple):
    """An operator that was captured.

    Attributes:
        operator: The operator.
        args: Its arguments.
        kwargs: Its arguments by name.
        made: The tensors that it made, and not those that it wrote or that are views.
    """

    operator: Any
    args: Any
    kwargs: Any
    made: list[torch.Tensor | None]


class CUDAGraph:
    """Stands in for `torch.cuda.CUDAGraph`; see Note [What a capture leaves].

    Args:
        keep_graph: Has no effect: there is no graph of a driver.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self._calls: list[_Call] = []
        self._recording: _Recording | None = None
        self._is_ready = False
        self._block = ExitStack()
        self._pool = (0, next(_pools))

    def capture_begin(self, pool: Any = None, *_: Any, **options: Any) -> None:
        """Begins to keep the operators of this thread.

        Raises:
            RuntimeError: On the default stream, and if this graph was captured already.
        """
        if self._is_ready:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a "
                "new graph, create a new instance."
            )
        if current_stream() == default_stream():
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after "
                "capture, it's ok to replay them on the default stream.)"
            )
        if pool is not None:
            self._pool = pool
        self._calls.clear()
        self._recording = _Recording(self._calls)
        set_capturing(True)
        self._block.enter_context(nobody_listening())
        self._recording.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """Ends that, and undoes what was written.

        Raises:
            RuntimeError: If it had not begun, or if something was called that CUDA does
                not allow in it.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            raise DeviceError(
                "CUDA error: the operation cannot be performed in the present state: "
                "CUDAGraph.capture_end() was called, and capture_begin() was not."
            )
        reason = why_capture_is_lost()
        try:
            recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            recording.undo()
        finally:
            set_capturing(False)
            self._block.close()
        if reason is not None:
            raise DeviceError(
                "CUDA error: operation failed due to a previous error during capture: "
                f"{reason}"
            )
        if not self._calls:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was "
                "attempted to be captured on wrong device or stream.",
                stacklevel=2,
            )
        self._is_ready = True

    def replay(self) -> None:
        """Runs the operators again, on the tensors that they had.

        Raises:
            RuntimeError: If no capture has succeeded.
        """
        if not self._is_ready:
            raise RuntimeError(
                "Called CUDAGraph::replay without a preceding successful capture."
            )
        with torch.no_grad():
            for call in self._calls:
                _run_again(call)

    def reset(self) -> None:
        """Forgets the operators."""
        self._calls.clear()
        self._is_ready = False

    def pool(self) -> Any:
        """A token for the memory of this graph, which others may share."""
        return self._pool

    def instantiate(self) -> None:
        """Does nothing: there is no graph of a driver."""

    def enable_debug_mode(self) -> None:
        """Does nothing: there is no graph of a driver."""

    def register_generator_state(self, generator: Any) -> None:
        """Does nothing: each replay draws new numbers."""

    def debug_dump(self, debug_path: str) -> None:
        """Writes the names of the operators, in place of a graph of a driver."""
        with open(debug_path, "w") as file:
            file.writelines(f"{call.operator}\n" for call in self._calls)


@final
class graph:
    """Stands in for `torch.cuda.graph`: a block whose operators a graph keeps.

    Args:
        cuda_graph: The graph.
        pool: A token for memory, which other graphs may share.
        stream: The stream of the block; None: one of its own.
    """

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Any = None,
        stream: Stream | None = None,
        **options: Any,
    ) -> None:
        self._graph, self._pool, self._stream = cuda_graph, pool, stream
        self._block = ExitStack()

    def __enter__(self) -> None:
        torch.cuda.synchronize()  # as torch does
        with ExitStack() as block:
            block.enter_context(stream(self._stream or Stream()))
            self._graph.capture_begin(self._pool)
            block.callback(self._graph.capture_end)
            self._block = block.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)


def graph_pool_handle() -> tuple[int, int]:
    """A token for memory that graphs share."""
    return 0, next(_pools)


def is_current_stream_capturing() -> bool:
    """Whether this thread is in a block whose operators a graph keeps."""
    return current_stream().is_capturing()


@final
class _Recording(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._own: set[int] = set()  # addresses of memory that was made here
        # The tensors that were written, and their values before.
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._random = [generator.get_state() for generator in default_generators()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors(args, kwargs))
        on_devices = [tensor for tensor in tensors if is_simulated(tensor)]
        if func in _READS and on_devices:
            refuse_in_capture(f"{func} reads what the device has computed")
        self._keep(_written(func, args, kwargs))
        result = func(*args, **kwargs)
        results = list(_tensors(result))
        # torch shows no mode the copy to a device in `torch.tensor([1],
        # device="cuda")`, only what comes after it.
        is_lifted = func is _aten.lift_fresh.default and on_devices
        is_copy = func in (_aten.copy_.default, _aten._to_copy.default)
        if is_lifted or (is_copy and _crosses(tensors, results)):
            raise RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture "
                "unless the CPU tensor is pinned. Please use tensor.pin_memory() or "
                "allocate the tensor with pin_memory=True."
            )
        if on_devices or any(map(is_simulated, results)):
            made = _made(func, result)
            self._own.update(
                tensor.untyped_storage().data_ptr()
                for tensor in made
                if tensor is not None
            )
            self._calls.append(_Call(func, args, kwargs, made))
        return result

    def undo(self) -> None:
        """Makes everything what it was, but for the tensors that were made."""
        for generator, state in zip(default_generators(), self._random, strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for tensor, before in reversed(self._before):
                with keeping_version((tensor,)):
                    tensor.copy_(before)
            for call in self._calls:
                for made in call.made:
                    if made is not None:
                        with keeping_version((made,)):
                            _spoil(made)
        self._before.clear()

    def _keep(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() not in self._own:
                self._before.append((tensor, tensor.detach().clone()))


def _run_again(call: _Call) -> None:
    with _versions_kept(_written(call.operator, call.args, call.kwargs)):
        result = call.operator(*call.args, **call.kwargs)
    for tensor, new in zip(call.made, _tensors(result), strict=True):
        if tensor is not None:
            with _versions_kept([tensor]):
                tensor.copy_(new)


@contextmanager
def _versions_kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block whose writes autograd does not count: a replay is none to it."""
    if not tensors:
        yield
        return
    with keeping_version(tuple(tensors)):
        yield


def _crosses(tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether some are on the CPU, and not pinned, and others on a device."""
    every = [*tensors, *results]
    on_cpu = [tensor for tensor in every if not is_simulated(tensor)]
    return len(on_cpu) < len(every) and any(not tensor.is_pinned() for tensor in on_cpu)


def _tensors(*things: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, things)
    return iter(found)


def _written(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors on devices that an operator writes in place."""
    written: list[torch.Tensor] = []
    for place, argument in enumerate(schema(operator).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            written.extend(tensor for tensor in _tensors(given) if is_simulated(tensor))
    return written


def _made(operator: Any, result: Any) -> list[torch.Tensor | None]:
    """A result's tensors, with None for each that is an argument or a view of one."""
    returns = schema(operator).returns
    if not returns:
        return []
    results = result if isinstance(result, tuple) and len(returns) > 1 else (result,)
    made: list[torch.Tensor | None] = []
    for said, value in zip(returns, results, strict=True):
        tensors = list(_tensors(value))
        made.extend(tensors if said.alias_info is None else [None] * len(tensors))
    return made


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
