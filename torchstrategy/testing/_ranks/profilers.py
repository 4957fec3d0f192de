"""torch's profiler in ranks: one rank at a time may have it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, final

from torchstrategy._base.torch_internals import is_profiling
from torchstrategy.testing._ranks.lines import line_of_the_user
from torchstrategy.testing._ranks.torch_internals import PROFILER
from torchstrategy.testing._ranks.world import current_rank
from torchstrategy.testing._simulation.replacing import replacing

_BEGINNINGS = ("_prepare_trace", "_start_trace")


class _Open(NamedTuple):
    profiler: Any
    rank: int
    line: str


@final
class OneProfiler:
    """Says which rank has the profiler.

    PyTorch has one for a process. A second one, on another thread, crashes Python.
    """

    def __init__(self) -> None:
        self._open: _Open | None = None

    def guarded(self) -> AbstractContextManager[None]:
        """A block in which a second one is refused."""
        values = [
            (PROFILER, name, self._beginning(getattr(PROFILER, name)))
            for name in _BEGINNINGS
        ]
        return replacing(
            [*values, (PROFILER, "__exit__", self._ending(PROFILER.__exit__))]
        )

    def close(self, rank: int) -> None:
        """Ends a profiler that a rank has left open, on the thread of that rank."""
        if self._open is not None and self._open.rank == rank:
            # Torch's, if it was prepared, and has not begun.
            with suppress(RuntimeError):
                self._open.profiler.__exit__(None, None, None)
            self._open = None

    def _beginning(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(method)
        def begin(profiler: Any) -> Any:
            rank = current_rank()
            if self._open is None and is_profiling():
                raise RuntimeError(
                    _refusal(rank, "the caller of run_ranks has one open")
                )
            if self._open is not None and self._open.rank != rank:
                raise RuntimeError(
                    _refusal(
                        rank, f"rank {self._open.rank} has one open ({self._open.line})"
                    )
                )
            self._open = self._open or _Open(profiler, rank, line_of_the_user())
            return method(profiler)

        return begin

    def _ending(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def end(profiler: Any, *error: Any) -> Any:
            try:
                return method(profiler, *error)
            finally:
                if self._open is not None and self._open.profiler is profiler:
                    self._open = None

        return end


def _refusal(rank: int, why: str) -> str:
    return (
        f"rank {rank} begins a profiler of torch ({line_of_the_user()}), and {why}. "
        "torch has one profiler for a process, and these ranks are threads of one: two "
        "at a time would end Python. Let one rank profile: `with "
        "torch.profiler.profile(...) if rank == 0 else contextlib.nullcontext():`."
    )
