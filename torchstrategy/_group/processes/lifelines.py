"""Connections between all workers, by which each hears that another one is lost.

Each hears why, or that the other process has ended.
"""

from __future__ import annotations

import json
import selectors
import socket
import weakref
from contextlib import suppress
from typing import Any, final

from torchstrategy._group.processes.inherited import give_back

# How many letters a word may have: it fits into the memory of a connection, so nobody
# waits to say it.
_LONGEST_TEXT = 4000

Word = dict[str, Any]


# Note [Lifelines]
# Each worker has a connection to each other one. Nothing is sent on it while all goes
# well. A worker that gives up says why on all of them, before it closes anything else.
# When a process ends, whatever ends it, the system closes its connections. So whoever
# waits for another worker knows of it one of these things:
# - it has said a word: it failed, it lost another worker, or it has left;
# - its connection is closed, and it has said nothing: it was killed, and it is the one
#   to be named;
# - it has waited for others for long, and says where, until it says that it goes on;
# - neither: it is alive, and busy, or it was stopped, or the network is down. This is
#   told as it is, "has not answered for 6 s", and only if no worker is known to be
#   dead.
# The store of torch.distributed knows nothing of this, and has no limit for a call if
# the process that keeps it was stopped. It is asked only while workers join, and on a
# thread: see Note [Calls that may never return] in `bounded`. Words are JSON.
@final
class Lifelines:
    """The connections of one worker to all others.

    Args:
        index: The number of this worker.
        count: How many workers there are.

    Attributes:
        words: What each other worker has said, by its number.
        waiting: Where other workers have waited for long, and still do, by their
            numbers.
        ended: The workers whose connection is closed, in the order in which this was
            noticed.
    """

    def __init__(self, index: int, count: int) -> None:
        self.index = index
        self.others = [w for w in range(count) if w != index]
        self.words: dict[int, list[Word]] = {w: [] for w in self.others}
        self.waiting: dict[int, Word] = {}
        self.ended: list[int] = []
        self._sockets: dict[int, socket.socket] = {}
        self._received: dict[int, bytes] = dict.fromkeys(self.others, b"")
        self._selector = selectors.DefaultSelector()
        _alive.add(self)

    def take(self, worker: int, connection: socket.socket) -> None:
        """From now on, this is the connection to a worker."""
        connection.setblocking(False)
        self._sockets[worker] = connection
        self._selector.register(connection, selectors.EVENT_READ, worker)

    def say(self, kind: str, text: str, **more: Any) -> None:
        """Tells all other workers something, which they hear when they listen."""
        word = {"kind": kind, "text": text[:_LONGEST_TEXT], **more}
        line = json.dumps(word).encode() + b"\n"
        for connection in self._sockets.values():
            with suppress(OSError):  # its other end may be gone
                connection.send(line)

    def listen(self, seconds: float = 0.0) -> None:
        """Takes what others have said, and notes who has ended.

        Waits for the first news as long as is said.
        """
        ready = self._selector.select(seconds) if self._sockets else []
        for key, _ in ready:
            self._read(key.data)

    def _read(self, worker: int) -> None:
        connection = self._sockets[worker]
        while True:
            try:
                data = connection.recv(2**16)
            except BlockingIOError:
                return
            # An example is "connection reset", if the other end had not read all.
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(connection)
                self.ended.append(worker)
                return
            *lines, self._received[worker] = (self._received[worker] + data).split(
                b"\n"
            )
            for line in lines:
                self._take_word(worker, json.loads(line))

    def _take_word(self, worker: int, word: Word) -> None:
        if word["kind"] == "waits":
            self.waiting[worker] = word
        elif word["kind"] == "goes on":
            self.waiting.pop(worker, None)
        else:
            self.words[worker].append(word)

    @property
    def has_news(self) -> bool:
        """Whether another worker has said anything, or has ended."""
        return bool(self.ended) or any(self.words.values())

    @property
    def dead(self) -> list[int]:
        """The workers that have ended without a word."""
        return [w for w in self.ended if not self.words[w]]

    @property
    def silent(self) -> list[int]:
        """The workers that have said nothing, and are alive."""
        return [w for w in self.others if not self.words[w] and w not in self.ended]

    def first(self, kind: str) -> tuple[int, Word] | None:
        """A worker that has said such a word, and the word."""
        for w, words in self.words.items():
            for word in words:
                if word["kind"] == kind:
                    return w, word
        return None

    def close(self) -> None:
        """Closes the connections of this process.

        Those that a forked process inherited stay open in the other one.
        """
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()
        # On macOS a forked process does not inherit it, and some Pythons close it all
        # the same.
        with suppress(OSError):
            self._selector.close()


_alive: weakref.WeakSet[Lifelines] = weakref.WeakSet()


def _close_inherited() -> None:
    for lines in list(_alive):
        lines.close()


give_back(_close_inherited)
