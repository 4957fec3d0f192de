"""How many messages a worker sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchstrategy._group.processes.process_group import ProcessGroup


@contextmanager
def counting_messages() -> Iterator[list[int]]:
    """A block in which the only item of a list is the number of messages that this worker has sent so far."""
    sent, send = [0], ProcessGroup._send_to_all

    def counting(self: ProcessGroup, message: bytes, where: str) -> list[bytes]:
        sent[0] += 1
        return send(self, message, where)

    ProcessGroup._send_to_all = counting  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        ProcessGroup._send_to_all = send  # type: ignore[method-assign]
