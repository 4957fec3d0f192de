"""The stack of each thread: in which strategy and in which replica it is.

A thread is outside any scope, in the cross-replica context, or in a replica. It keeps a stack of frames, and the frame
on top says which of these holds. Entering `Strategy.scope` or a merge function pushes a cross-replica frame;
`Strategy.run` pushes a replica's frame on the thread on which the replica runs. A new thread starts outside any scope.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torchstrategy._core.types import ReplicaContextLike, StrategyLike

_NOTHING: Mapping[int, object] = {}


class Frame:
    """One entry of a thread's stack. It is a context manager: the frame is on top of the stack while its block runs.

    Args:
        strategy: The strategy that the thread has entered.
        replica_context: The context of the replica that runs. None: this is a cross-replica frame.
        local_objects: By the id of an object of the user's, the object that this replica uses in its place.
    """

    __slots__ = ("_replica_context", "local_objects", "strategy")

    def __init__(
        self,
        strategy: StrategyLike,
        replica_context: ReplicaContextLike | None = None,
        local_objects: Mapping[int, object] = _NOTHING,
    ) -> None:
        self.strategy = strategy
        self._replica_context = replica_context
        self.local_objects = local_objects

    @property
    def replica_context(self) -> ReplicaContextLike | None:
        """The context of the replica that runs; None in a cross-replica frame."""
        return self._replica_context

    def __enter__(self) -> None:
        _here.frames.append(self)

    def __exit__(self, *exception: object) -> None:
        _here.frames.pop()


class _Here(threading.local):
    """This thread's stack, and the strategy that `experimental_set_strategy` put below it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.set_frame: Frame | None = None
        self.set_scope = ExitStack()  # the block in which that strategy sees what this thread creates


_here = _Here()
_default: list[Any] = []  # the default strategy and its replica context; filled once, when the package is imported


def set_default(strategy: StrategyLike, replica_context: ReplicaContextLike) -> None:
    """Sets the strategy and the replica context of code that has entered no strategy."""
    _default[:] = [strategy, replica_context]


def frames_of_this_thread() -> list[Frame]:
    """This thread's stack of frames, for callers that push and pop a frame by hand."""
    return _here.frames


def current_frame() -> Frame | None:
    """The top of this thread's stack; None if the thread has entered no strategy."""
    frames = _here.frames
    return frames[-1] if frames else _here.set_frame


@contextmanager
def nowhere() -> Iterator[None]:
    """Runs a block as if this thread had entered no strategy."""
    frames, _here.frames = _here.frames, []
    try:
        yield
    finally:
        _here.frames = frames


def local_object(central: Any) -> Any:
    """The object that the replica of this thread uses in place of `central`: its own copy, or `central` itself."""
    frames = _here.frames
    return frames[-1].local_objects.get(id(central), central) if frames else central


def current_strategy() -> StrategyLike:
    """The strategy in whose scope or replica the caller is; outside of every scope, the default strategy."""
    frame = current_frame()
    strategy: StrategyLike = frame.strategy if frame else _default[0]
    return strategy


def has_strategy() -> bool:
    """Whether the current strategy is one that the program entered, and not the default strategy.

    Example:
        >>> torchstrategy.has_strategy()
        False

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/has_strategy
    """
    return current_strategy() is not _default[0]


def in_cross_replica_context() -> bool:
    """Whether the caller acts for all replicas: it is in a scope or a merge function, and not in a replica.

    Example:
        >>> with torchstrategy.OneDeviceStrategy("cpu").scope():
        ...     torchstrategy.in_cross_replica_context()
        True

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/in_cross_replica_context
    """
    frame = current_frame()
    return frame is not None and frame.replica_context is None


def is_in_replica() -> bool:
    """Whether this thread runs a step in a replica of a strategy that the program entered."""
    frame = current_frame()
    return frame is not None and frame.replica_context is not None and not is_default(frame.strategy)


def current_replica_context() -> ReplicaContextLike | None:
    """The context of the replica that the caller is in; None exactly when `in_cross_replica_context()` is true."""
    frame = current_frame()
    context: ReplicaContextLike | None = frame.replica_context if frame else _default[1]
    return context


def can_set_strategy(strategy: StrategyLike | None) -> bool:
    """Whether this thread is outside of every block, or is in the strategy that `set_strategy(None)` would remove."""
    return not _here.frames or (strategy is None and _here.set_frame is not None and in_cross_replica_context())


def set_strategy(strategy: StrategyLike | None) -> None:
    """Makes a strategy the current one of this thread outside of every block; None: the default strategy."""
    _here.set_scope.close()
    _here.set_frame = None
    if strategy is not None and strategy is not _default[0]:
        _here.set_scope.enter_context(strategy.extended._creation_scope())
        _here.set_frame = Frame(strategy)


def require_cross_replica(strategy: StrategyLike, what: str, instead: str = "merge_call(lambda strategy: ...)") -> None:
    """Raises an error unless the caller may act for all replicas of `strategy`.

    The caller may do so in the strategy's own cross-replica context, and where it has entered no strategy or only the
    default strategy.

    Args:
        strategy: The strategy whose method was called.
        what: The name of that method.
        instead: The method of a replica context that does the same inside a replica.

    Raises:
        RuntimeError: In a replica of `strategy`, or in the context of another strategy.
    """
    if not _here.frames and _here.set_frame is None:  # the usual case
        return
    frame = current_frame()
    assert frame is not None
    if frame.strategy is strategy:
        if frame.replica_context is not None:
            raise RuntimeError(
                f"Method requires being in cross-replica context: {what} speaks for all replicas, and was called "
                f"inside replica {frame.replica_context.replica_id_in_sync_group}. Call it outside of strategy.run, "
                f"or in the replica get_replica_context().{instead}."
            )
    elif frame.strategy is not _default[0]:
        raise RuntimeError(mixing(strategy, frame.strategy, what))


def mixing(strategy: StrategyLike, current: StrategyLike, what: str) -> str:
    """The error message for a call of `what`, a method of `strategy`, in the context of the strategy `current`."""
    return (
        f"Mixing different torchstrategy.Strategy objects: {what} of {strategy!r} was called in the context of "
        f"{current!r}. Leave that strategy's scope, or use the strategy that torchstrategy.get_strategy() returns."
    )


def is_default(strategy: StrategyLike) -> bool:
    """Whether `strategy` is the default strategy."""
    return bool(_default) and strategy is _default[0]
