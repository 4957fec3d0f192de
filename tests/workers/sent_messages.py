"""How many messages a worker sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchstrategy._group.processes.process_group import ProcessGroup


@contextmanager
def counting_messages() -> Iterator[list[int]]:
    """A block in which a list's only item is the number of messages sent so far.

    This worker has sent them.
    """
    sent, send = [0], ProcessGroup._send_to_all

    def counting(self: ProcessGroup, message: bytes, where: str) -> list[bytes]:
        sent[0] += 1
        return send(self, message, where)

    ProcessGroup._send_to_all = counting  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        ProcessGroup._send_to_all = send  # type: ignore[method-assign]
