"""How workers find each other by a store, and who has not come."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, final

from torchstrategy._base.errors import described
from torchstrategy._group.processes.bounded import NoAnswer, ask
from torchstrategy._group.processes.lifelines import Lifelines
from torchstrategy._group.processes.network_interfaces import chosen_addresses
from torchstrategy._group.workers import WorkerError

USUAL_LIMIT = timedelta(minutes=30)  # torch's own for a group
_LOOK_S = 0.02  # how often a worker looks whether another one has come
# How long a worker that has come may refuse connections: another process may have left
# its address there.
_REFUSED_S = 3.0
# Keys: why the meeting is over, and, with its number, that a worker knows it.
_OVER, _HEARD = "over", "heard/"
HAS_ENDED = "Worker {} of {} has ended before all workers had joined"
_LONGEST_CALL = 200  # bytes with which a worker says that it is one

_T = TypeVar("_T")


class Entry(NamedTuple):
    """What a worker puts into the store.

    This is who it is, what it tells the others, and where it takes connections.
    """

    who: str
    told: str
    host: str
    addresses: list[str]
    port: int
    secret: str


def name_of(index: int, count: int) -> str:
    return f"worker {index} of {count} ({socket.gethostname()}, process {os.getpid()})"


# Note [Workers that join]
# Each worker takes connections at a port of its own, and puts its addresses and a
# secret into the store. It calls the workers of lower numbers, and waits for calls of
# those of higher ones. Whoever brings the secret is a worker. It waits for all answers
# at once: for a worker that was stopped the system still takes a call, and nobody
# answers. Whoever waited for this answer alone would answer nobody either, and would be
# named, too.
# So a worker that dies after it has come is noticed by those that it is connected to.
# They tell the others: by their connections, and those that they have none to by the
# store. While torch makes its groups, which it does in C++ without looking at anybody,
# `call_watched` looks.
@final
class Meeting:
    """One worker on its way to the others.

    Args:
        store: A store that all workers have, with keys for this meeting alone.
        where: What to call it in a message.
        home: The host and port at which it is kept, if it is at any.
        index: The number of this worker.
        count: How many workers there are.
        timeout: How long to wait for all.
        told: What this worker tells the others, in a few words.
    """

    def __init__(
        self,
        store: Any,
        where: str,
        home: tuple[str, int] | None,
        index: int,
        count: int,
        timeout: timedelta,
        told: str = "",
    ) -> None:
        self._store = store
        self._told = told
        self._where = where
        self._home = home
        self._count = count
        self._index = index
        self._seconds = timeout.total_seconds()
        self._deadline = time.monotonic() + self._seconds
        self.lines = Lifelines(index, count)
        # Connections of an earlier meeting of the same workers.
        self.earlier: Lifelines | None = None
        self._connected: set[int] = set()
        # The calls that were not answered yet, by the number of the worker that was
        # called.
        self._calls: dict[int, _Call] = {}
        # For the secret of a worker that refuses connections, since when it does so.
        self._refused: dict[str, float] = {}

    def meet(self) -> list[Entry]:
        """Connects `lines` to all workers; returns what each has put into the store.

        Raises:
            WorkerError: Naming who has not come in time, or has ended.
        """
        try:
            with _server() as server, _connections() as waiting:
                server.setblocking(False)
                waiting.register(server, selectors.EVENT_READ)
                self._secret = secrets.token_hex(16)
                self._come(server.getsockname()[1])
                while len(self._connected) < self._count - 1:
                    self._look_into_store()
                    self._call_next(waiting)
                    self._answer(server, waiting)
                    self.look()
                    if time.monotonic() > self._deadline:
                        raise self._over_error(self._describe_missing())
                return [self._entry(w) for w in range(self._count)]
        except BaseException as error:
            self._tell_failure(error)
            raise

    def call_watched(self, call: Callable[[], _T]) -> _T:
        """The result of a call in which all workers take part, if none of them ends."""
        try:
            return self._call_watched(call)
        except BaseException as error:
            self._tell_failure(error)
            raise

    def _tell_failure(self, error: BaseException) -> None:
        if not isinstance(error, WorkerError):
            text = f"{name_of(self._index, self._count)} failed: {described(error)}"
            self.lines.say("failed", text)
            self._try(lambda: self._store.set(_OVER, text))
        self._try(lambda: self._store.set(f"{_HEARD}{self._index}", ""))

    def wait_for_others(self) -> None:
        """Waits until the others have heard why the meeting is over.

        Without this, the process that keeps the store might end before they hear it.
        """
        end = time.monotonic() + _REFUSED_S
        while not self._have_others_heard() and time.monotonic() < end:
            time.sleep(_LOOK_S)
            self.lines.listen()

    def _have_others_heard(self) -> bool:
        """Whether each of the others knows that the meeting is over, or has ended.

        Some may still be on their way.
        """
        alive = [
            w
            for w in range(self._count)
            if w != self._index and w not in self.lines.ended
        ]
        return not alive or bool(
            self._try(lambda: self._store.check([f"{_HEARD}{w}" for w in alive]))
        )

    def _call_watched(self, call: Callable[[], _T]) -> _T:
        try:
            return ask(call, self._seconds, self._look_while_grouping)
        except NoAnswer as error:
            raise self._lost_error("it takes too long") from error
        except RuntimeError as error:
            if isinstance(error, WorkerError):
                raise
            raise self._lost_error(described(error)) from error

    def _look_while_grouping(self) -> None:
        self.look()
        # The time is over: a worker that says nothing now does not answer.
        if self.lines.first("lost") is not None:
            raise NoAnswer

    def _lost_error(self, problem: str) -> WorkerError:
        """The error where torch could not make its groups.

        It names a worker that says nothing now.
        """
        self.lines.say("lost", problem)
        end = time.monotonic() + _REFUSED_S
        while self.lines.silent and time.monotonic() < end:
            self.lines.listen(_LOOK_S)
            self.look()
        if self.lines.silent:
            return self._over_error(
                self._describe_absent(self.lines.silent, "answered")
            )
        return self._over_error(
            f"torch.distributed could not make a group of all workers: {problem}"
        )

    def look(self) -> None:
        """Raises an error if another worker has given up, or is dead."""
        self.lines.listen()
        for kind in ("failed", "verdict"):
            said = self.lines.first(kind)
            if said is not None:
                raise WorkerError(said[1]["text"])
        dead = self.lines.dead
        if self.earlier is not None and not dead:
            self.earlier.listen()
            dead = self.earlier.dead
        if dead:
            raise self._over_error(HAS_ENDED.format(dead[0], self._count))

    # What it asks the store.

    def _come(self, port: int) -> None:
        entry = Entry(
            who=name_of(self._index, self._count),
            told=self._told,
            host=socket.gethostname(),
            addresses=_addresses(self._home),
            port=port,
            secret=self._secret,
        )
        self._ask(
            lambda: self._store.set(str(self._index), json.dumps(entry._asdict()))
        )

    def _look_into_store(self) -> None:
        """Raises an error if a worker without a connection to this one has given up."""
        if self._ask(lambda: bool(self._store.check([_OVER]))):
            raise WorkerError(self._ask(lambda: self._store.get(_OVER)).decode())

    def _try(self, call: Callable[[], _T]) -> _T | None:
        with suppress(NoAnswer, RuntimeError):
            return ask(call, 1.0)
        return None

    def _has_come(self, worker: int) -> bool:
        return self._ask(lambda: bool(self._store.check([str(worker)])))

    def _entry(self, worker: int) -> Entry:
        told = self._ask(lambda: self._store.get(str(worker)))
        return Entry(**json.loads(told))

    def _ask(self, call: Callable[[], _T]) -> _T:
        left = max(self._deadline - time.monotonic(), _REFUSED_S)
        try:
            return ask(call, left, self.look)
        except NoAnswer:
            raise self._over_error(f"{self._where} does not answer") from None
        except RuntimeError as error:
            if isinstance(error, WorkerError):
                raise
            # Where a worker that has ended kept the store, that is the reason, and the
            # news of it may come later.
            end = time.monotonic() + _REFUSED_S
            while time.monotonic() < end:
                self.look()
                time.sleep(_LOOK_S)
            raise self._over_error(
                f"{self._where} is gone: {described(error)}"
            ) from error

    def _describe_missing(self) -> str:
        absent = [
            w
            for w in range(self._count)
            if w != self._index and w not in self._connected
        ]
        unseen = [w for w in absent if not self._has_come(w)]
        return (
            self._describe_absent(unseen, "come")
            if unseen
            else self._describe_absent(absent, "answered")
        )

    def _describe_absent(self, missing: list[int], came: str) -> str:
        named = " and ".join(f"worker {w}" for w in missing)
        has = "has" if len(missing) == 1 else "have"
        return (
            f"{named[0].upper()}{named[1:]} of {self._count} {has} not {came} within "
            f"{self._seconds:g} s, and the others wait for it: start all workers at "
            "about the same time, and look at the output of the missing one"
        )

    def _over_error(self, text: str) -> WorkerError:
        self.lines.say("verdict", text, blamed=[])
        self._try(lambda: self._store.set(_OVER, text))
        return WorkerError(f"{text}. This is {name_of(self._index, self._count)}.")

    # Connections.

    def _call_next(self, waiting: selectors.BaseSelector) -> None:
        """Calls the next worker of a lower number, if it has come."""
        for worker in range(self._index):
            if worker not in self._connected and worker not in self._calls:
                if self._has_come(worker):
                    self._calls[worker] = _Call(worker, self._entry(worker))
                    self._dial(self._calls[worker], waiting)
                return

    def _dial(self, call: _Call, waiting: selectors.BaseSelector) -> None:
        """Connects to the next of the addresses at which a connection can be made."""
        entry = call.entry
        for address in call.addresses:
            call.address = f"{address}, port {entry.port}"
            try:
                connection = socket.create_connection(
                    (address, entry.port), timeout=_REFUSED_S
                )
            except OSError as error:
                call.problem = f"{call.address}: {described(error)}"
                continue
            connection.setblocking(False)
            waiting.register(connection, selectors.EVENT_READ, call)
            # The end of the connection arrives like an answer.
            with suppress(OSError):
                connection.sendall(f"{entry.secret} {self._index}\n".encode())
            return
        del self._calls[call.worker]  # it is called again
        since = self._refused.setdefault(entry.secret, time.monotonic())
        if time.monotonic() - since > _REFUSED_S:
            raise self._over_error(
                f"{entry.who} had come, and has ended or cannot be reached at "
                f"{call.problem}"
            )

    def _answer(self, server: socket.socket, waiting: selectors.BaseSelector) -> None:
        """Takes the connections of workers of higher numbers.

        It also takes the answers of workers of lower numbers.
        """
        for key, _ in waiting.select(_LOOK_S):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is server:
                with suppress(OSError):  # whoever called may have gone
                    caller, _ = server.accept()
                    caller.setblocking(False)
                    waiting.register(caller, selectors.EVENT_READ, bytearray())
            elif isinstance(key.data, _Call):
                self._hear_answer(connection, key.data, waiting)
            else:
                self._hear_caller(connection, key.data, waiting)

    def _hear_answer(
        self, connection: socket.socket, call: _Call, waiting: selectors.BaseSelector
    ) -> None:
        waiting.unregister(connection)
        try:
            answer = connection.recv(1)
            call.problem = f"{call.address}: another program answers there"
        except OSError as error:
            answer = b""
            call.problem = f"{call.address}: {described(error)}"
        if answer == b"\n":
            del self._calls[call.worker]
            self._take(call.worker, connection)
        else:
            connection.close()
            self._dial(call, waiting)

    def _hear_caller(
        self, caller: socket.socket, heard: bytearray, waiting: selectors.BaseSelector
    ) -> None:
        data = b""
        with suppress(OSError):
            data = caller.recv(_LONGEST_CALL)
        heard += data
        if data and b"\n" not in heard and len(heard) < _LONGEST_CALL:
            return
        waiting.unregister(caller)
        secret, _, number = bytes(heard).partition(b"\n")[0].partition(b" ")
        if secrets.compare_digest(secret, self._secret.encode()) and number.isdigit():
            with suppress(OSError):
                caller.sendall(b"\n")
                self._take(int(number), caller)
                return
        caller.close()

    def _take(self, worker: int, connection: socket.socket) -> None:
        self.lines.take(worker, connection)
        self._connected.add(worker)


class _Call:
    """A call to another worker.

    Args:
        worker: Its number.
        entry: What it has put into the store.
    """

    def __init__(self, worker: int, entry: Entry) -> None:
        self.worker = worker
        self.entry = entry
        is_here = entry.host == socket.gethostname()
        # The addresses that were not tried yet.
        self.addresses = iter([*(["127.0.0.1"] if is_here else []), *entry.addresses])
        self.address = ""  # the one that was tried last
        self.problem = ""  # why that was nothing


@contextmanager
def _connections() -> Iterator[selectors.BaseSelector]:
    """A selector whose connections are closed in the end."""
    with selectors.DefaultSelector() as waiting:
        try:
            yield waiting
        finally:
            for key in list(waiting.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", 0), backlog=1024)


def _addresses(home: tuple[str, int] | None) -> list[str]:
    """The addresses at which other workers may reach this machine.

    They come from the chosen interfaces, the way to the store, or the machine's name.
    """
    found = chosen_addresses()
    if home is not None:
        host, port = home
        with suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                found.append(probe.getsockname()[0])
    with suppress(OSError):
        known = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(address[0]) for _, _, _, _, address in known]
    return list(dict.fromkeys(found))


@final
class MeetingOfThreads:
    """What `Meeting` is, for workers that are threads of one process.

    Whether they are, `_base/worker_threads` says. Whoever runs them sees when one of
    them ends, so they have no lifelines.

    Args:
        count: How many workers there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.lines = Lifelines(0, 1)

    def meet(self) -> list[Entry]:
        """Who all workers are. They tell one another nothing here."""
        names = [name_of(worker, self._count) for worker in range(self._count)]
        return [
            Entry(who=name, told="", host="", addresses=[], port=0, secret="")
            for name in names
        ]

    def call_watched(self, call: Callable[[], _T]) -> _T:
        """What a call returns in which all workers take part.

        It has to be made on the thread of the worker.
        """
        return call()
