"""Threads that stand for processes: whether this thread is a worker.

`torchstrategy.testing.run_ranks` runs such threads.

Who runs the threads says so, and who joins workers asks. Neither knows the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class _Here(threading.local):
    is_worker = False


_here = _Here()


@contextmanager
def worker_here() -> Iterator[None]:
    """A block in which this thread is a worker, which others of this process join."""
    _here.is_worker = True
    try:
        yield
    finally:
        _here.is_worker = False


def are_threads() -> bool:
    """Whether the workers that this thread joins are threads of this process."""
    return _here.is_worker
