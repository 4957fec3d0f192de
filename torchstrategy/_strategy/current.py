"""What a user asks of where the caller is: which strategy, and which replica."""

from __future__ import annotations

from typing import Any

from torchstrategy._core.context import can_set_strategy, current_replica_context, current_strategy, set_strategy
from torchstrategy._strategy.replica_context import ReplicaContext
from torchstrategy._strategy.strategy import Strategy
from torchstrategy._strategy.strategy_base import StrategyBase


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
    strategy: Any = current_strategy()  # one of compat.v1 only in its own scope and replicas
    return strategy  # type: ignore[no-any-return]


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
    context: Any = current_replica_context()
    return context  # type: ignore[no-any-return]


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
    if not can_set_strategy(strategy):
        raise RuntimeError(
            "Must not be called inside a `with strategy.scope():` block or in a replica: experimental_set_strategy "
            "sets what holds outside of them. Leave the block first."
        )
    if strategy is not None and not isinstance(strategy, StrategyBase):
        raise TypeError(f"experimental_set_strategy takes a torchstrategy.Strategy or None; got {strategy!r}.")
    set_strategy(strategy)
