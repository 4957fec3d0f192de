"""What a connection tells a worker of another, and calls that may never return."""

from __future__ import annotations

import socket
import threading

import pytest

from torchstrategy._group.processes import bounded
from torchstrategy._group.processes.lifelines import Lifelines

LONG_S = 60.0  # more than a machine needs that is busy with something else


def pair() -> tuple[Lifelines, Lifelines]:
    first, second = Lifelines(0, 2), Lifelines(1, 2)
    one, other = socket.socketpair()
    first.take(1, one)
    second.take(0, other)
    return first, second


def test_a_word_is_heard_after_its_speaker_has_ended() -> None:
    first, second = pair()
    assert second.silent == [0] and not second.has_news
    first.say("failed", "no such luck")
    first.say("left", "")
    first.close()
    while not second.ended:
        second.listen(LONG_S)
    assert [word["kind"] for word in second.words[0]] == ["failed", "left"]
    assert second.first("failed") == (0, {"kind": "failed", "text": "no such luck"})
    assert second.dead == [] and second.silent == []
    second.say("lost", "nobody hears it")
    second.close()


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


def test_who_ends_without_a_word_is_dead() -> None:
    first, second = pair()
    first.close()
    second.listen(LONG_S)
    assert (second.dead, second.silent, second.has_news) == ([0], [], True)
    second.close()
    second.listen()


def test_a_word_may_come_in_parts_and_a_long_one_is_cut() -> None:
    first, second = pair()
    first.say("failed", "x" * 10**6)
    while not second.words[0]:
        second.listen(LONG_S)
    assert 1000 < len(second.words[0][0]["text"]) < 10**5
    first.close()
    second.close()


def test_a_call_that_does_not_return_has_a_limit() -> None:
    comes = threading.Event()
    with pytest.raises(bounded.NoAnswer):
        bounded.ask(comes.wait, 0.0)
    comes.set()
    assert bounded.ask(lambda: "answer", LONG_S) == "answer"


def test_a_call_raises_what_it_raises_and_whoever_waits_may_stop_waiting() -> None:
    def raise_it() -> None:
        raise ValueError("no such luck")

    with pytest.raises(ValueError, match="no such luck"):
        bounded.ask(raise_it, LONG_S)
    comes = threading.Event()
    with pytest.raises(ValueError, match="no such luck"):
        bounded.ask(comes.wait, LONG_S, look=raise_it)
    comes.set()
