"""How the workers of a strategy find each other after they have joined."""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest

from torchstrategy import WorkerError
from torchstrategy._group.processes import joining
from torchstrategy._group.processes.lifelines import Lifelines


def test_a_worker_that_ends_with_its_store_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call for a second connection to the store looked at nobody.

    It named the store after the whole timeout.
    """
    others, ours = socket.socketpair()
    lines = Lifelines(1, 2)
    lines.take(0, ours)
    monkeypatch.setattr(joining._Joined, "lines", lines)
    done = threading.Event()

    def never_answers(prefix: str) -> Any:
        others.close()
        done.wait(60)
        return None, None

    monkeypatch.setattr(joining, "shared_store", never_answers)
    told = (
        r"^Worker 0 of 2 has ended before all workers had joined\. This is worker 1 of "
        r"2"
    )
    try:
        with contextlib.closing(lines), pytest.raises(WorkerError, match=told):
            joining.begin_meeting([0, 1], 1, timedelta(seconds=60))
    finally:
        done.set()
