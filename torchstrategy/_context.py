"""Where am I? Each thread is outside any scope, in the cross-replica context, or in a replica.

A thread keeps a stack of frames; its top answers. Entering `Strategy.scope` or a merge function pushes a cross-replica
frame, `Strategy.run` pushes a replica's frame on whichever thread the replica runs. A new thread starts outside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchstrategy._replica_context import ReplicaContext
    from torchstrategy._strategy import Strategy
    from torchstrategy._strategy_base import StrategyBase

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
        strategy: StrategyBase,
        replica_context: ReplicaContext | None = None,
        local_objects: Mapping[int, object] = _NOTHING,
    ) -> None:
        self.strategy = strategy
        self._replica_context = replica_context
        self.local_objects = local_objects

    @property
    def replica_context(self) -> ReplicaContext | None:
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


def set_default(strategy: StrategyBase, replica_context: ReplicaContext) -> None:
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


def get_strategy() -> Strategy:
    """The strategy in whose scope, or in whose replica, the caller is; outside, the default strategy.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     torchstrategy.get_strategy() is strategy
        True
        >>> torchstrategy.get_strategy() is strategy
        False

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/get_strategy
    """
    frame = current_frame()
    strategy: Any = frame.strategy if frame else _default[0]  # one of compat.v1 only in its own scope and replicas
    return strategy  # type: ignore[no-any-return]


def has_strategy() -> bool:
    """Whether the current strategy is one that somebody chose, and not the default one.

    Example:
        >>> torchstrategy.has_strategy()
        False

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/has_strategy
    """
    return get_strategy() is not _default[0]


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


def get_replica_context() -> ReplicaContext | None:
    """The replica that the caller is in; None exactly when `in_cross_replica_context()`.

    Outside everything it is replica 0 of the one replica of the default strategy.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> ids = strategy.run(lambda: torchstrategy.get_replica_context().replica_id_in_sync_group)
        >>> strategy.experimental_local_results(ids)
        (0, 1)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/get_replica_context
    """
    frame = current_frame()
    context: ReplicaContext | None = frame.replica_context if frame else _default[1]
    return context


def experimental_set_strategy(strategy: StrategyBase | None) -> None:
    """Makes `strategy` the current one for the rest of this thread, as if all that follows stood in its scope.

    Calling it again replaces the strategy; `None` takes it away.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> torchstrategy.experimental_set_strategy(strategy)
        >>> torchstrategy.get_strategy() is strategy
        True
        >>> torchstrategy.experimental_set_strategy(None)

    Raises:
        RuntimeError: If called in a `scope()` block or in a replica.
        TypeError: If `strategy` is not a strategy.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/experimental_set_strategy
    """
    frames = _here.frames
    taking_away = strategy is None and _here.set_frame is not None and in_cross_replica_context()
    if frames and not taking_away:
        raise RuntimeError(
            "Must not be called inside a `with strategy.scope():` block or in a replica: experimental_set_strategy "
            "sets what holds outside of them. Leave the block first."
        )
    if strategy is not None and not hasattr(strategy, "extended"):
        raise TypeError(f"experimental_set_strategy takes a torchstrategy.Strategy or None; got {strategy!r}.")
    _here.set_scope.close()
    _here.set_frame = None
    if strategy is not None and strategy is not _default[0]:
        _here.set_scope.enter_context(strategy.extended._creation_scope())
        _here.set_frame = Frame(strategy)


def require_cross_replica(strategy: StrategyBase, what: str, instead: str = "merge_call(lambda strategy: ...)") -> None:
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


def mixing(strategy: StrategyBase, current: StrategyBase, what: str) -> str:
    """The message for `what`, of `strategy`, in the context of `current`."""
    return (
        f"Mixing different torchstrategy.Strategy objects: {what} of {strategy!r} was called in the context of "
        f"{current!r}. Leave that strategy's scope, or use the strategy that torchstrategy.get_strategy() returns."
    )


def is_default(strategy: StrategyBase) -> bool:
    """Whether `strategy` is the default one."""
    return bool(_default) and strategy is _default[0]
