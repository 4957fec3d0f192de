"""Where am I? Each thread is outside any scope, in the cross-replica context, or in a replica.

A thread keeps a stack of frames; its top answers. Entering `Strategy.scope` or a merge function pushes a cross-replica
frame, `Strategy.run` pushes a replica's frame on whichever thread the replica runs. A new thread starts outside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torchstrategy._core.protocols import ReplicaContextLike, StrategyLike

_NOTHING: Mapping[int, object] = {}


class Frame:
    """One entry of a thread's stack. It is a block, for whose length it is on top.

    Args:
        strategy: Whose.
        replica_context: None: cross-replica.
        local_objects: What a distributed object, by id, is in this replica.
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
        """The replica that runs; None: cross-replica."""
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
        self.set_scope = ExitStack()  # what that strategy watches is created


_here = _Here()
_default: list[Any] = []  # the default strategy and its replica context; filled once, when the package is imported


def set_default(strategy: StrategyLike, replica_context: ReplicaContextLike) -> None:
    """Says what holds where nothing was entered."""
    _default[:] = [strategy, replica_context]


def frames_of_this_thread() -> list[Frame]:
    """This thread's stack, for those who put a frame on it in another way than as a block."""
    return _here.frames


def current_frame() -> Frame | None:
    """The top of this thread's stack; None outside everything."""
    frames = _here.frames
    return frames[-1] if frames else _here.set_frame


@contextmanager
def nowhere() -> Iterator[None]:
    """Runs a block as on a thread that has entered nothing."""
    frames, _here.frames = _here.frames, []
    try:
        yield
    finally:
        _here.frames = frames


def local_object(central: Any) -> Any:
    """What `central` is in the replica that this thread is in: its local counterpart, or itself."""
    frames = _here.frames
    return frames[-1].local_objects.get(id(central), central) if frames else central


def current_strategy() -> StrategyLike:
    """The strategy in whose scope, or in whose replica, the caller is; outside, the default strategy."""
    frame = current_frame()
    strategy: StrategyLike = frame.strategy if frame else _default[0]
    return strategy


def has_strategy() -> bool:
    """Whether the current strategy is one that somebody chose, and not the default one.

    Example:
        >>> torchstrategy.has_strategy()
        False

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/has_strategy
    """
    return current_strategy() is not _default[0]


def in_cross_replica_context() -> bool:
    """Whether the caller speaks for all replicas: in a scope or a merge function, and not in a replica.

    Example:
        >>> with torchstrategy.OneDeviceStrategy("cpu").scope():
        ...     torchstrategy.in_cross_replica_context()
        True

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/in_cross_replica_context
    """
    frame = current_frame()
    return frame is not None and frame.replica_context is None


def current_replica_context() -> ReplicaContextLike | None:
    """The replica that the caller is in; None exactly when `in_cross_replica_context()`."""
    frame = current_frame()
    context: ReplicaContextLike | None = frame.replica_context if frame else _default[1]
    return context


def can_set_strategy(strategy: StrategyLike | None) -> bool:
    """Whether this thread is outside of every block, or in the strategy that is now to be taken away."""
    return not _here.frames or (strategy is None and _here.set_frame is not None and in_cross_replica_context())


def set_strategy(strategy: StrategyLike | None) -> None:
    """Makes a strategy the current one of this thread where no block was entered; None: the default strategy."""
    _here.set_scope.close()
    _here.set_frame = None
    if strategy is not None and strategy is not _default[0]:
        _here.set_scope.enter_context(strategy.extended._creation_scope())
        _here.set_frame = Frame(strategy)


def require_cross_replica(strategy: StrategyLike, what: str, instead: str = "merge_call(lambda strategy: ...)") -> None:
    """Refuses to go on unless the caller may speak for all replicas of `strategy`.

    `what` was called; `instead` is what a replica context has for it.

    That is so in the strategy's own cross-replica context, and where nothing, or only the default strategy, was
    entered.

    Raises:
        RuntimeError: In a replica of `strategy`, or in the context of another strategy.
    """
    if not _here.frames and _here.set_frame is None:  # as a rule
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
    """The message for `what`, of `strategy`, in the context of `current`."""
    return (
        f"Mixing different torchstrategy.Strategy objects: {what} of {strategy!r} was called in the context of "
        f"{current!r}. Leave that strategy's scope, or use the strategy that torchstrategy.get_strategy() returns."
    )


def is_default(strategy: StrategyLike) -> bool:
    """Whether `strategy` is the default one."""
    return bool(_default) and strategy is _default[0]
