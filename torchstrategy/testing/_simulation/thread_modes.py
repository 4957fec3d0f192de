"""Threads that are in a mode of torch's dispatcher from their start.

The mode holds for the thread that entered it.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torchstrategy._base.torch_internals import (
    TorchDispatchMode,
    end_modes,
    push_dispatch_mode,
)


def starting_in(mode: TorchDispatchMode) -> tuple[type[threading.Thread], str, Any]:
    """What `replacing` takes so that each new thread is in a mode.

    A thread that starts in the block is in the mode for as long as it lives.
    """
    start = threading.Thread.start

    @functools.wraps(start)
    def started(thread: threading.Thread) -> None:
        run = thread.run

        def run_in_mode() -> None:
            push_dispatch_mode(mode)
            try:
                run()
            finally:
                end_modes()

        thread.run = run_in_mode  # type: ignore[method-assign]
        start(thread)

    return threading.Thread, "start", started
