"""Strategies that are in each other's way, and the errors that say so."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from torchstrategy import (
    Strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)

NOT_CROSS = "^Method requires being in cross-replica context: "


class State(NamedTuple):
    """The answers to the four questions."""

    strategy: Strategy
    has_strategy: bool
    in_cross_replica_context: bool
    has_replica_context: bool


def state() -> State:
    return State(
        get_strategy(),
        has_strategy(),
        in_cross_replica_context(),
        get_replica_context() is not None,
    )


def outside() -> State:
    """The state where nothing was entered."""
    return State(DEFAULT, False, False, True)


def in_replica_of(strategy: Strategy) -> State:
    return State(strategy, True, False, True)


class Opaque:
    """Holds a value that is not to be looked into."""

    def __init__(self, value: Any) -> None:
        self.value = value


def in_each_replica(strategy: Strategy, fn: Callable[[], Any]) -> list[Any]:
    """What `fn` returns in each replica, as it is."""
    return [
        held.value
        for held in strategy.experimental_local_results(
            strategy.run(lambda: Opaque(fn()))
        )
    ]


def mixing(strategy: Strategy, current: Strategy, what: str = ".+") -> str:
    """The first sentence of the error for calls to `strategy` in this context.

    The context is that of `current`.
    """
    called = re.escape(f" of {strategy!r} was called in the context of {current!r}.")
    return rf"^Mixing different torchstrategy\.Strategy objects: {what}{called}"


def in_new_thread(fn: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result(timeout=30)


def enter_scope_of(strategy: Strategy) -> State:
    with strategy.scope():
        return state()


DEFAULT = get_strategy()
