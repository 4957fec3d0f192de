"""A test that hangs ends, so that it does not hang the suite."""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Iterator


class Hang(BaseException):
    """A call that would never have returned."""


@contextlib.contextmanager
def ended_if_it_hangs(folder: str, seconds: float) -> Iterator[None]:
    """Raises `Hang` in a folder's code that runs for so long, again and again."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: types.FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(folder):
                raise Hang
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
