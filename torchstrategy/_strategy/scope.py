"""The block in which a strategy is the current one."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, Generic, TypeVar, final

from torchstrategy._core.context import Frame, current_frame, is_default, mixing, require_cross_replica
from torchstrategy._core.types import StrategyLike

S = TypeVar("S", bound="StrategyLike")


class _Entries(threading.local):
    """How often, and from where, this thread has entered a scope object."""

    def __init__(self) -> None:
        self.entries: list[tuple[Frame | None, ExitStack]] = []


@final
class StrategyScope(Generic[S]):
    """What `Strategy.scope` returns. May be entered several times, also within itself."""

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._here = _Entries()

    def __enter__(self) -> S:
        strategy, current = self._strategy, current_frame()
        if current is not None and current.strategy is not strategy and not is_default(current.strategy):
            if is_default(strategy):
                raise RuntimeError(
                    f"Must not nest the default strategy's scope in the scope of {current.strategy!r}. Leave that "
                    "scope: outside of scopes the default strategy is the current one."
                )
            raise RuntimeError(mixing(strategy, current.strategy, "scope()"))
        with ExitStack() as stack:
            if not is_default(strategy):  # whose scope is what holds without it: entering it changes nothing
                require_cross_replica(strategy, "Strategy.scope")
                stack.enter_context(Frame(strategy))
                stack.enter_context(strategy.extended._creation_scope())
            self._here.entries.append((current_frame(), stack.pop_all()))
        return strategy

    def __exit__(self, *exception: Any) -> None:
        entries = self._here.entries
        if not entries or current_frame() is not entries[-1][0]:
            raise RuntimeError(
                f"Scope nesting error: the scope of {self._strategy!r} was left, and it is not the one that was "
                "entered last on this thread. Leave scopes in the reverse order of entering them; `with` does."
            )
        entries.pop()[1].__exit__(*exception)
