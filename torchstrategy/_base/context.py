"""Where a thread is: in which strategy, replica and state of torch.

A thread is outside any scope, in the cross-replica context, or in a replica. It keeps a
stack of frames, and the frame on top says which of these holds. Entering
`Strategy.scope` or a merge function pushes a cross-replica frame; `Strategy.run` pushes
a replica's frame on the thread on which the replica runs. A new thread starts outside
any scope.

It also has none of the caller's thread-local state of torch: neither its grad mode nor
its autocast, modes, default device or context variables. A replica's thread takes them
over from the caller of `run`. The default dtype and the deterministic flag belong to
the whole process, so nobody has to copy them. `using_device` sets the default device of
a block.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base import torch_internals
from torchstrategy._base.devices import memory_device
from torchstrategy._base.streams import (
    Streams,
    begin_using,
    current_streams,
    make_current,
)
from torchstrategy._base.trace import warn_of_unseen_threads
from torchstrategy._base.types import Device, ReplicaContextLike, StrategyLike, Tree


@dataclass(eq=False, slots=True)
class Frame:
    """One entry of a thread's stack.

    It is a context manager: the frame is on top of the stack while its block runs.

    Args:
        strategy: The strategy that the thread has entered.
        _replica_context: The context of the replica that runs. None: this is a
            cross-replica frame.
        local_objects: By the id of an object of the user's, the object that this
            replica uses in its place.
    """

    strategy: StrategyLike
    _replica_context: ReplicaContextLike | None = None
    local_objects: Mapping[int, object] = field(default_factory=dict)
    # Whether the replica takes turns on the program's own objects.
    takes_turns: bool = field(default=False, kw_only=True)

    @property
    def replica_context(self) -> ReplicaContextLike | None:
        """The context of the replica that runs; None in a cross-replica frame."""
        return self._replica_context

    def __enter__(self) -> None:
        this_thread.frames.append(self)

    def __exit__(self, *exception: object) -> None:
        this_thread.frames.pop()


class _ThreadFrames(threading.local):
    """This thread's stack, and the strategy below it.

    `experimental_set_strategy` puts that strategy there.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.set_frame: Frame | None = None
        # The block in which that strategy sees what this thread creates.
        self.set_scope = ExitStack()


this_thread = _ThreadFrames()
# The default strategy and its replica context; filled once, when the package is
# imported.
_default: list[Any] = []


def set_default(strategy: StrategyLike, replica_context: ReplicaContextLike) -> None:
    """Sets the strategy and replica context of code that has entered no strategy."""
    _default[:] = [strategy, replica_context]


def remember_frames() -> Callable[[], None]:
    """Returns a function that puts this thread's stack back to what it is now.

    The function works even if a block was not left.
    """
    frames, depth = this_thread.frames, len(this_thread.frames)

    def put_back() -> None:
        del frames[depth:]
        this_thread.frames = frames

    return put_back


def current_frame() -> Frame | None:
    """The top of this thread's stack; None if the thread has entered no strategy."""
    frames = this_thread.frames
    return frames[-1] if frames else this_thread.set_frame


@contextmanager
def outside_of_strategies(device: Device | None) -> Iterator[None]:
    """Runs a block as if this thread had entered no strategy.

    The block uses the given default device; see `using_device`.
    """
    frames, this_thread.frames = this_thread.frames, []
    try:
        with using_device(device):
            yield
    finally:
        this_thread.frames = frames


def local_object(users: Any) -> Any:
    """What the replica of this thread uses in the place of an object of the user's.

    It is the replica's own copy, or the user's object.
    """
    frames = this_thread.frames
    return frames[-1].local_objects.get(id(users), users) if frames else users


def current_strategy() -> StrategyLike:
    """The strategy in whose scope or replica the caller is.

    Outside of every scope, it is the default strategy.
    """
    frame = current_frame()
    return frame.strategy if frame else _default[0]


def has_strategy() -> bool:
    """Whether the current strategy is one that the program entered, not the default.

    Example:
        >>> torchstrategy.has_strategy()
        False

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/has_strategy
    """
    return current_strategy() is not _default[0]


def in_cross_replica_context() -> bool:
    """Whether the caller acts for all replicas.

    If so, it is in a scope or a merge function, and not in a replica.

    Example:
        >>> with torchstrategy.OneDeviceStrategy("cpu").scope():
        ...     torchstrategy.in_cross_replica_context()
        True

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/in_cross_replica_context
    """
    frame = current_frame()
    return frame is not None and frame.replica_context is None


def is_in_replica() -> bool:
    """Whether this thread runs a step in a replica of a strategy that was entered."""
    frame = current_frame()
    return (
        frame is not None
        and frame.replica_context is not None
        and not is_default(frame.strategy)
    )


def current_replica_context() -> ReplicaContextLike | None:
    """The context of the replica that the caller is in.

    It is None exactly when `in_cross_replica_context()` is true.
    """
    frame = current_frame()
    return frame.replica_context if frame else _default[1]


def set_strategy(strategy: StrategyLike | None) -> None:
    """Makes a strategy the current one of this thread outside of every block.

    None stands for the default strategy.

    Raises:
        RuntimeError: In a block or in a replica, unless the block is of the strategy
            that None would remove.
    """
    is_removed_inside = (
        strategy is None
        and this_thread.set_frame is not None
        and in_cross_replica_context()
    )
    if this_thread.frames and not is_removed_inside:
        raise RuntimeError(
            "Must not be called inside a `with strategy.scope():` block or in a "
            "replica: experimental_set_strategy sets what holds outside of them. Leave "
            "the block first."
        )
    this_thread.set_scope.close()
    this_thread.set_frame = None
    if strategy is not None and strategy is not _default[0]:
        this_thread.set_scope.enter_context(strategy.extended._creation_scope())
        this_thread.set_frame = Frame(strategy)


def require_cross_replica(
    strategy: StrategyLike, what: str, instead: str = "merge_call(lambda strategy: ...)"
) -> None:
    """Raises an error unless the caller may act for all replicas of `strategy`.

    The caller may do so in the strategy's own cross-replica context, and where it has
    entered no strategy or only the default strategy.

    Args:
        strategy: The strategy whose method was called.
        what: The name of that method.
        instead: The method of a replica context that does the same inside a replica.

    Raises:
        RuntimeError: In a replica of `strategy`, or in the context of another strategy.
    """
    frames = this_thread.frames
    # The same as `current_frame()`, without a call.
    frame = frames[-1] if frames else this_thread.set_frame
    if frame is None:  # the usual case
        return
    if frame.strategy is strategy:
        if frame.replica_context is not None:
            raise RuntimeError(
                f"Method requires being in cross-replica context: {what} speaks for "
                "all replicas, and was called inside replica "
                f"{frame.replica_context.replica_id_in_sync_group}. Call it outside of "
                f"strategy.run, or in the replica get_replica_context().{instead}."
            )
    elif frame.strategy is not _default[0]:
        raise RuntimeError(mixed_strategies_message(strategy, frame.strategy, what))


def mixed_strategies_message(
    strategy: StrategyLike, current: StrategyLike, what: str
) -> str:
    """What an error says of a call of `what` in the context of the strategy `current`.

    `what` is a method of `strategy`.
    """
    return (
        f"Mixing different torchstrategy.Strategy objects: {what} of {strategy!r} was "
        f"called in the context of {current!r}. Leave that strategy's scope, or use "
        "the strategy that torchstrategy.get_strategy() returns."
    )


def is_default(strategy: StrategyLike) -> bool:
    """Whether `strategy` is the default strategy."""
    return bool(_default) and strategy is _default[0]


def is_accelerator(device: Device) -> bool:
    """Whether work on `device` is queued on streams."""
    return device.type != "cpu"


def needs_device_context(device: Device) -> bool:
    """Whether tensors that name no device would be created elsewhere than on `device`.

    A `torch.device` context costs about 2 us on every torch call, so the library enters
    one only when it is needed. A caller whose default device is `meta` keeps creating
    tensors on `meta`.
    """
    # A default device is a function mode. To ask for it takes ten times as long.
    if not torch_internals.count_function_modes():
        return device.type != "cpu"
    default = torch.get_default_device()
    return default.type != "meta" and memory_device(default) != memory_device(device)


def using_device(device: Device | None) -> AbstractContextManager[object]:
    """A block in which tensors that are created without a device are on `device`.

    You get a null context if such tensors are there anyway.

    Numbers that a random generator draws are on the device of this generator.
    """
    if device is None or not needs_device_context(device):
        return nullcontext()
    stack = ExitStack()
    if is_accelerator(device):
        stack.enter_context(torch.accelerator.device_index(device.index))
    stack.enter_context(torch_internals.DefaultDevice(device))
    return stack


@final
class _TorchState(NamedTuple):
    """The part of torch's state of a thread that the library sets again.

    It does so when a replica has run.

    The grad mode and the inference mode are not here: `CallerState._call_on` sets both
    for one block.
    """

    # For each device type: whether autocast is on, and to which dtype it casts.
    autocast: list[tuple[str, bool, torch.dtype]]
    autocast_cache: bool
    # How many autocasts the thread is in, as far as its cache of casted weights counts
    # them.
    autocast_nesting: int
    # The pair of hooks that is in force is the last.
    saved_tensors: list[tuple[Callable[..., Any], Callable[..., Any]]]
    function_modes: list[Any]  # the default device is one of them
    dispatch_modes: list[Any]
    num_threads: int  # the libraries below torch keep it for each thread


@final
class CallerState:
    """The state of the caller's thread, which makes this object.

    The thread of a replica takes it over.

    Args:
        streams: The caller's current streams of the devices that replicas use.
    """

    def __init__(self, streams: Streams) -> None:
        # A profiler is the one part of the state that another thread cannot take over.
        warn_of_unseen_threads()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.torch_state = _read_torch_state()
        self.default_device = getattr(
            torch_internals.default_device, "device_context", None
        )
        self.streams = streams
        self.variables = contextvars.copy_context()

    def run_on_other_thread(self, device: Device, fn: Callable[[], Tree]) -> Tree:
        """Calls `fn` in the caller's state, for a replica on `device`.

        Called on a thread that is not the caller's.

        Each call gets its own copy of the context variables, so that no replica sees
        what another one sets.
        """
        return self.variables.copy().run(self._adopt_and_call, device, fn)

    def run_on_callers_thread(self, device: Device, fn: Callable[[], Tree]) -> Tree:
        """The same on the caller's own thread, which is in this state already.

        It is in this state again afterwards.
        """
        try:
            return self.variables.copy().run(self._call_on, device, fn)
        finally:
            if self.streams and current_streams(self.streams) != self.streams:
                make_current(self.streams.values())
            if _read_torch_state() != self.torch_state:
                _reset_thread(self.torch_state.autocast_nesting)
                torch_internals.default_device.device_context = self.default_device
                self._apply_torch_state()

    def _adopt_and_call(self, device: Device, fn: Callable[[], Tree]) -> Tree:
        try:
            if device in self.streams:
                begin_using(device)
            if self.streams:
                make_current(self.streams.values())
            torch.autocast_increment_nesting()
            self._apply_torch_state()
            return self._call_on(device, fn)
        finally:
            _reset_thread(autocast_nesting=0)

    def _apply_torch_state(self) -> None:
        torch.set_num_threads(self.torch_state.num_threads)
        torch.set_autocast_cache_enabled(self.torch_state.autocast_cache)
        for device_type, enabled, dtype in self.torch_state.autocast:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        for pack, unpack in self.torch_state.saved_tensors:
            torch_internals.push_saved_tensors_hooks(pack, unpack)
        for mode in self.torch_state.function_modes:
            torch_internals.push_function_mode(mode)
        for mode in self.torch_state.dispatch_modes:
            torch_internals.push_dispatch_mode(mode)

    def _call_on(self, device: Device, fn: Callable[[], Tree]) -> Tree:
        # Autograd would run the backward of an accelerator on a thread of its own,
        # where no replica is entered. Without multithreading, it runs on this thread,
        # which has the replica's context.
        with torch_internals.autograd_state(self.inference), using_device(device):
            torch_internals.set_grad_enabled(self.grad)
            torch_internals.set_multithreading_enabled(False)
            return fn()


def _read_torch_state() -> _TorchState:
    """The state of this thread now."""
    types = _types_with_autocast()
    # A replica that runs on the caller's thread comes here, too, so that there is no
    # Python call for each type.
    are_enabled, dtypes = (
        map(torch.is_autocast_enabled, types),
        map(torch.get_autocast_dtype, types),
    )
    autocast = list(zip(types, are_enabled, dtypes, strict=True))
    hooks: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    # torch tells only the one that is in force.
    while (pair := torch_internals.saved_tensors_hooks()) is not None:
        hooks.insert(0, pair)
        torch_internals.pop_saved_tensors_hooks()
    for pack, unpack in hooks:
        torch_internals.push_saved_tensors_hooks(pack, unpack)
    return _TorchState(
        autocast=autocast,
        autocast_cache=torch.is_autocast_cache_enabled(),
        autocast_nesting=_autocast_nesting(),
        saved_tensors=hooks,
        function_modes=torch_internals.function_modes(),
        dispatch_modes=torch_internals.dispatch_modes(),
        num_threads=torch.get_num_threads(),
    )


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _types_with_autocast() -> tuple[str, ...]:
    return (
        "cpu",
        "cuda",
        "xpu",
        "mps",
        "mtia",
        "hpu",
        torch_internals.privateuse1_name(),
    )


def _reset_thread(autocast_nesting: int) -> None:
    """Ends all modes, hooks and autocasts of this thread.

    It also ends those that the step has left behind.

    Args:
        autocast_nesting: Of the blocks of autocast that the thread is in, so many stay.
    """
    torch.set_default_device(None)
    torch_internals.end_modes()
    while _autocast_nesting() > autocast_nesting:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
    for device_type in _types_with_autocast():
        torch.set_autocast_enabled(device_type, False)


@final
class without_autograd(AbstractContextManager[None]):
    """A block that autograd does not record, and that makes no inference tensors.

    `torch.no_grad` does half of this: in a caller's inference mode, it would make
    inference tensors. A run enters several of these blocks, and a class with two
    methods costs less than a generator.
    """

    __slots__ = ("_state",)

    def __enter__(self) -> None:
        self._state = torch_internals.autograd_state(False)
        self._state.__enter__()
        torch_internals.set_grad_enabled(False)

    def __exit__(self, *exception: Any) -> None:
        self._state.__exit__(*exception)
