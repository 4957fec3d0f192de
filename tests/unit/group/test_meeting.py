"""How a worker on its way to the others learns that one of them is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from torchstrategy import WorkerError
from torchstrategy._group.processes.lifelines import Lifelines
from torchstrategy._group.processes.meeting import Meeting


class StoreOfTheDead:
    """A store whose keeper ends when it is asked.

    First its store is gone, and then its connections to others.
    """

    def __init__(self, keeper: socket.socket) -> None:
        self._keeper = keeper

    def set(self, *args: Any) -> None:
        threading.Timer(0.2, self._keeper.close).start()
        raise RuntimeError("Connection reset by peer")

    check = get = add = set


def test_where_the_store_is_gone_its_worker_is_named() -> None:
    """Where worker 0 was interrupted while it joined again, the others named no worker.

    They named an address. It joined a second time.
    """
    keeper, ours = socket.socketpair()
    earlier = Lifelines(1, 2)
    earlier.take(0, ours)
    meeting = Meeting(
        StoreOfTheDead(keeper), "The store", None, 1, 2, timedelta(seconds=60)
    )
    meeting.earlier = earlier
    told = r"^Worker 0 of 2 has ended before all workers had joined\."
    with keeper, contextlib.closing(earlier), pytest.raises(WorkerError, match=told):
        meeting.meet()


def test_who_keeps_the_store_waits_for_a_worker_that_has_not_connected_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counted itself among those that had heard, and ended.

    The last one then named it, and not the culprit.
    """
    store = dist.HashStore()
    keeper, culprit, late = (
        Meeting(store, "The store", None, w, 3, timedelta(seconds=60)) for w in range(3)
    )
    monkeypatch.setattr(culprit, "look", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        culprit.meet()
    told = r"^worker 1 of 3 .* failed: KeyboardInterrupt"
    with pytest.raises(WorkerError, match=told):
        keeper.meet()
    assert not keeper._have_others_heard()
    with pytest.raises(WorkerError, match=told):
        late.meet()
    assert keeper._have_others_heard()
    keeper.wait_for_others()
    for meeting in (keeper, culprit, late):
        meeting.lines.close()


def raise_interrupt() -> None:
    raise KeyboardInterrupt
