"""What a connection tells a worker of another, and calls that may never return."""

from __future__ import annotations

import socket

from torchstrategy._group.processes.lifelines import Lifelines

LONG_S = 60.0  # more than a machine needs that is busy with something else


def pair() -> tuple[Lifelines, Lifelines]:
    first, second = Lifelines(0, 2), Lifelines(1, 2)
    one, other = socket.socketpair()
    first.take(1, one)
    second.take(0, other)
    return first, second


def test_a_selector_that_is_closed_already_keeps_no_connection_open() -> None:
    """On macOS a forked process does not inherit the kqueue.

    Some Pythons raise where it closes its own.
    """

    class NotInherited:
        def close(self) -> None:
            raise OSError("Bad file descriptor")

    first, second = pair()
    connection = first._sockets[1]
    first._selector.close()
    first._selector = NotInherited()  # type: ignore[assignment]
    first.close()
    assert connection.fileno() == -1
    second.close()


def test_a_word_may_come_in_parts_and_a_long_one_is_cut() -> None:
    first, second = pair()
    first.say("failed", "x" * 10**6)
    while not second.words[0]:
        second.listen(LONG_S)
    assert 1000 < len(second.words[0][0]["text"]) < 10**5
    first.close()
    second.close()
