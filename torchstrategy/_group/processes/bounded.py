"""Calls that may never return, and so have a time limit.

Whoever waits for such a call looks after other things meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_LOOK_S = 0.05

_T = TypeVar("_T")


class NoAnswer(Exception):
    """A call has not returned within its limit."""


# Note [Calls that may never return]
# A call to the store of torch.distributed waits for ever if the process that keeps the
# store was stopped, or if its machine is off: torch has no limit for it. A group of
# gloo waits in C++ for a worker that will not come, where neither a signal nor the news
# that this worker is dead can break it off. So such calls are made on a thread of their
# own, while this one waits for the result. If it stops waiting, the thread stays in its
# call: until the connection ends, until torch's own limit, or until the process ends,
# which does not wait for it. There is one such thread at most for each strategy that is
# made, since nobody goes on asking a store that has not answered.
def ask(
    call: Callable[[], _T], seconds: float, look: Callable[[], None] = lambda: None
) -> _T:
    """What a call returns, or raises.

    Args:
        call: The call, which is made on another thread.
        seconds: How long it may take.
        look: Is called again and again meanwhile, and may raise an error, which ends
            the waiting.

    Raises:
        NoAnswer: If it takes longer.
    """
    answered = threading.Event()
    results: list[_T] = []
    errors: list[BaseException] = []

    def answer() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        answered.set()

    threading.Thread(target=answer, name="torchstrategy asks", daemon=True).start()
    deadline = time.monotonic() + seconds
    while not answered.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
        look()
        if time.monotonic() > deadline and not answered.is_set():
            raise NoAnswer
    if errors:
        raise errors[0]
    return results[0]
