"""Workers that are joined by a process group of `torch.distributed`. This is the only file that talks to it."""

from __future__ import annotations

import atexit
import ctypes
import enum
import marshal
import os
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from torchstrategy._communication.native_dtypes import as_addable, bits, from_addable
from torchstrategy._communication.wire import decode, encode
from torchstrategy._communication.workers import MENTIONED, PACK, WorkerError, Workers, digest, packs_of
from torchstrategy._core.errors import described
from torchstrategy._core.torch_internals import shared_store, unflattened

_PATIENCE = 3.0  # seconds in which all workers that are alive say that they have lost another one
_MESSAGE = 256  # bytes of the message with which every exchange begins
_DIGEST = 8  # bytes of a `digest`
_REFUSED = digest(b"refused")  # in the place of where a worker is that refuses an exchange
# The positions of the groups of a worker.
_DATA = 0  # sends tensors, from any device
_EARLY = 1  # sends gradients during backward, in an order that is not that of the other exchanges
_CONTROL = 2  # sends messages, from the memory of the CPU


def has_group() -> bool:
    """Whether `torch.distributed` has a group already."""
    return dist.is_available() and dist.is_initialized()


def join(rank: int, count: int, address: str, timeout: timedelta | None) -> None:
    """Makes the default group of `torch.distributed`, which ends with the process.

    Args:
        rank: The number of this process.
        count: How many processes there are.
        address: Where the first process keeps the store. Empty: the environment says it, as torchrun does.
        timeout: How long an exchange may take.
    """
    backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
    method = f"tcp://{address}" if address else "env://"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=count, timeout=timeout)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():  # the program may have done so itself
        dist.destroy_process_group()


def _end(groups: list[dist.ProcessGroup], under_way: Sequence[dist.Work | None]) -> None:
    """Ends groups and their threads, when a worker fails, a strategy is no longer used, or the process ends.

    The threads of gloo take Python's lock to let go of tensors. One that does so while Python ends aborts the process.
    """
    # A signal's handler may raise anywhere. Then the end of the process goes on with the groups that are left.
    while groups:
        if len(groups) == _EARLY + 1 and not all(work is None or work.is_completed() for work in under_way):
            # To destroy it means to wait for what it has under way, which may be as long as its timeout. So nobody ever
            # does. The group of the messages is closed before, by which the others learn of it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups[_EARLY]))
        else:
            with suppress(RuntimeError, ValueError):  # the program may have destroyed all groups itself
                dist.destroy_process_group(groups[-1])
        groups.pop()


# Note [Exchanges between workers]
# Every exchange begins with a message of one size: each worker tells all others at which exchange of which run it is,
# with tensors of which shapes, and a few bytes that the exchange is about. What fits into these bytes needs no more
# than that. Tensors are sent when all have told the same, since tensors of different exchanges would be mixed up, or
# wait for ever. So a group has nothing under way where a worker goes another way or fails, and it can be closed at
# once.
#
# A worker that refuses its arguments comes to the exchange all the same, and says so. Then all workers raise an error
# and stand at one place, as before. Whoever has no argument to refuse, and fails, does not come.
#
# When an operation of torch fails, one of three things has happened to another worker. It left a run by an exception:
# then it has put the reason into the store, and has closed its groups so that the others fail. It was killed: then its
# connections are closed. Or it hangs, and torch's timeout has passed. Whoever fails says so in the store, and waits a
# little for the others to say the same. Who says nothing is the one that is gone or hangs.
@final
class ProcessGroup(Workers):
    """The processes of a group of `torch.distributed`.

    All methods are called on one thread, in the same order in all workers. See Note [Exchanges between workers].

    Args:
        group: The processes. None: all that `init_process_group` has joined.
        timeout: How long an exchange may take. None: as torch's default for the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        super().__init__(len(ranks), ranks.index(dist.get_rank()))
        # Groups of its own: a worker that fails closes them, and the user's own group stays as it is.
        is_part = group is not None
        kinds = None, None, "gloo"
        made = [dist.new_group(ranks, timeout, kind, use_local_synchronization=is_part) for kind in kinds]
        self._groups: list[dist.ProcessGroup] = [one for one in made if one is not None]
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch lets each operation wait until all workers have begun it.
        self.can_overlap = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() != "DETAIL"
        self._under_way: list[dist.Work | None] = []  # what no message has preceded
        weakref.finalize(self, _end, self._groups, self._under_way)
        self._store = shared_store(f"torchstrategy/{self._groups[_CONTROL].group_name}")
        self._devices = {part.partition(":")[0] for part in dist.get_backend_config(self._groups[_DATA]).split(",")}
        self._who = f"worker {self.index} of {self.count} ({socket.gethostname()}, process {os.getpid()})"
        self._store.set(f"who/{self.index}", self._who)
        # Read now, since the process that keeps the store may be the one that goes.
        self._names = [self._store.get(f"who/{w}").decode() for w in range(self.count)]
        self._num_runs = 0
        self._point = "the first run"
        self._compared: list[tuple[str, object]] = []  # what the next exchange compares
        self._mentioned: dict[str, bytes] = {}  # the digests of what may differ
        self._why_over: str | None = None  # why no exchange can be made any more

    def begin_run(self) -> None:
        self._num_runs += 1
        self._point, self._compared = "the beginning of strategy.run", []

    def arrive(self, point: str) -> None:
        self._point = point

    def compare(self, what: str, value: object) -> None:
        self._compared.append((what, value))

    def mention(self, what: str, value: object) -> None:
        self._mentioned[what] = digest(_comparable(value))

    def all_reduce(self, tensors: Sequence[torch.Tensor], name: str, agreed: bool = False) -> list[torch.Tensor]:
        where = self._at(name)
        if not agreed:
            self._meet(where, [(t.dtype, tuple(t.shape)) for t in tensors])
        packs = packs_of(tensors)
        flat: list[torch.Tensor] = []

        def start() -> Iterator[dist.Work | None]:
            for pack in packs:
                flat.append(self._flat([tensors[i] for i in pack]))
                yield from _adding_up(flat[-1], self._groups[_DATA])

        self._wait(where, start)
        sums: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        for one, pack in zip(flat, packs, strict=True):
            for i, part in zip(pack, self._parts(one, [tensors[i] for i in pack]), strict=True):
                sums[i] = part
        return sums

    def begin_all_reduce(self, flat: torch.Tensor) -> Callable[[], None]:
        where = self._at("gradients that were sent during backward")
        sent = self._sendable(flat)
        works = _adding_up(sent, self._groups[_EARLY])
        self._under_way += works

        def arrived() -> None:
            self._wait(where, lambda: works)
            for work in works:
                self._under_way.remove(work)
            if sent is not flat:
                flat.copy_(sent)

        return arrived

    def add_up(self, table: torch.Tensor, name: str) -> torch.Tensor:
        of_all = self._meet(self._at(name), tuple(table.shape), digest(table.numpy().tobytes()))
        # The tables are seldom different.
        return table * self.count if len(set(of_all)) == 1 else self.all_reduce([table], name)[0]

    def all_gather(self, tensor: torch.Tensor, axis: int, name: str) -> list[torch.Tensor]:
        front = tensor.detach().movedim(axis, 0).contiguous()
        rest = f"rows of shape {tuple(front.shape[1:])} and {front.dtype}"
        told = self.all_gather_bytes(f"{front.shape[0]} {rest}".encode(), name)
        sizes = [int(one.partition(b" ")[0]) for one in told]
        if len({one.partition(b" ")[2] for one in told}) > 1:
            listed = ", ".join(f"worker {w} {one.decode()}" for w, one in enumerate(told))
            error = ValueError(f"The workers brought tensors to {name} that cannot be put together: {listed}.")
            self.note_of_all(error)
            raise error
        # Bytes, since the backends do not take every dtype.
        padded = front.new_zeros(max(sizes), *front.shape[1:])
        padded[: front.shape[0]] = front
        mine = self._sendable(bits(padded))
        all_bytes = [torch.empty_like(mine) for _ in sizes]
        if mine.numel():
            data = self._groups[_DATA]
            self._wait(self._at(name), lambda: [dist.all_gather(all_bytes, mine, group=data, async_op=True)])
        whole = [one.to(front.device).view(front.dtype).view(padded.shape) for one in all_bytes]
        return [one[:size].movedim(0, axis) for one, size in zip(whole, sizes, strict=True)]

    def all_gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        return self._meet(self._at(name), (), data)

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        try:
            data = encode(value)
        except (TypeError, ValueError) as error:
            self.refuse(error, name)
            raise
        return list(map(decode, self.all_gather_bytes(data, name)))

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int, name: str) -> None:
        if not tensors:
            return
        where = self._at(name)
        self._meet(where, [(t.dtype, tuple(t.shape)) for t in tensors])
        packs = [[tensors[i] for i in pack] for pack in packs_of(tensors)]
        # The tensors of a pack have one dtype.
        flat = [self._sendable(torch.cat(list(map(bits, pack)))) for pack in packs]
        data = self._groups[_DATA]
        self._wait(where, lambda: [dist.broadcast(one, group=data, group_src=source, async_op=True) for one in flat])
        if self.index == source:
            return
        for one, pack in zip(flat, packs, strict=True):
            with torch.no_grad():
                for tensor, part in zip(pack, unflattened(one.view(pack[0].dtype), pack), strict=True):
                    _write(tensor, part)

    def refuse(self, error: Exception, name: str) -> None:
        if self._why_over is None and not self.is_of_all(error):
            with suppress(WorkerError):  # this worker raises its own error
                self._meet(self._at(name), (), described(error).encode("utf-8", "backslashreplace"), refuses=True)
                self.note_of_all(error)

    def failed(self, error: BaseException) -> None:
        if self._why_over is None and not isinstance(error, WorkerError) and not self.is_of_all(error):
            self._say("failed", f"{self._who} failed: {described(error)}")
            self._close(f"this worker has failed: {described(error)}")

    # The parts of an exchange.

    def _at(self, name: str) -> str:
        """Where this worker is, in words."""
        if self._why_over is not None:
            raise WorkerError(
                f"The workers were at {name}, but the strategy cannot be used any more: {self._why_over}. Start the "
                "training again from its last checkpoint, as torchrun --max-restarts does."
            )
        return f"{self._point} of run {self._num_runs} ({name})"

    def _meet(self, where: str, signature: object, told: bytes = b"", refuses: bool = False) -> list[bytes]:
        """What the workers tell each other, if all of them are at this exchange.

        If this worker refuses the exchange, `told` says why, and it learns only that the others have heard so.
        """
        self.num_exchanges += 1
        compared, self._compared = self._compared, []
        place = digest(b"".join([f"{where} {signature}".encode(), *map(_comparable, compared)]))
        place = _REFUSED if refuses else place
        mentioned, self._mentioned = self._mentioned, {}
        marks = [mentioned.get(what, bytes(_DIGEST)) for what in MENTIONED]
        counts = [count.to_bytes(_DIGEST, "big") for count in (len(told), self._num_runs)]
        header = b"".join([place, *counts, *marks])
        of_all = self._sent((header + told)[:_MESSAGE].ljust(_MESSAGE, b"\0"), where)
        refusing = [w for w, one in enumerate(of_all) if one[:_DIGEST] == _REFUSED]
        if not refusing and any(one[:_DIGEST] != place for one in of_all):
            told_too = [f"{what} {_printed(value)}" for what, value in compared]
            raise self._apart(", ".join([where, *told_too]), signature)
        begin, size, run = len(header), slice(_DIGEST, 2 * _DIGEST), slice(2 * _DIGEST, 3 * _DIGEST)
        for start, what, mark in zip(range(run.stop, begin, _DIGEST), MENTIONED, marks, strict=True):
            if any(one[start : start + _DIGEST] != mark for one in of_all):
                self.differing.add(what)
        of_headers, sizes = of_all, [int.from_bytes(one[size], "big") for one in of_all]
        if begin + max(sizes) > _MESSAGE:
            of_all, begin = self._sent(told.ljust(max(sizes), b"\0"), where), 0
        told_by_all = [one[begin : begin + size] for one, size in zip(of_all, sizes, strict=True)]
        if refusing:  # a worker that refused its batch has not begun the run to which the others have come with theirs
            self._num_runs = max(int.from_bytes(one[run], "big") for one in of_headers)
        if refusing and not refuses:
            raise self._refused(refusing[0], told_by_all[refusing[0]].decode(), where)
        return told_by_all

    def _refused(self, worker: int, why: str, where: str) -> Exception:
        """The error for an exchange that another worker has refused. Nothing was sent, and all can go on."""
        kind = {"TypeError": TypeError, "ValueError": ValueError}.get(why.partition(":")[0], RuntimeError)
        error = kind(
            f"{self._names[worker]} refused what it was given, so no worker got a result: {why} This is {self._who}, "
            f"which waited at {where}. Give all workers what fits; the strategy can be used as before."
        )
        self.note_of_all(error)
        return error

    def _sent(self, message: bytes, where: str) -> list[bytes]:
        """The messages of all workers, which have the same length."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        of_all = list(mine.new_empty(self.count, len(message)))
        control = self._groups[_CONTROL]
        self._wait(where, lambda: [dist.all_gather(of_all, mine, group=control, async_op=True)])
        return [one.numpy().tobytes() for one in of_all]

    def _wait(self, where: str, start: Callable[[], Iterable[dist.Work | None]]) -> None:
        try:
            for work in list(start()):
                assert work is not None
                work.wait()
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)  # torch's have the group, which would stay open
            raise self._explained(where, error) from error

    def _apart(self, where: str, signature: object) -> WorkerError:
        """The error of workers that are at different exchanges. All of them have found so, and say where they are."""
        keys = [f"at/{self.num_exchanges}/{w}" for w in range(self.count)]
        self._say(keys[self.index], f"{where} with {signature}" if signature else where)
        listed = []
        for w, key in enumerate(keys):
            with suppress(RuntimeError):
                self._store.wait([key], timedelta(seconds=_PATIENCE))
                listed.append(f"worker {w} is at {self._store.get(key).decode()}")
        self._close("the workers were at different places")
        return WorkerError(
            f"The workers came to different synchronization points: {', '.join(listed)}. Every worker must come to the "
            "same ones in the same order, with tensors of the same shapes: let no such call depend on the worker or on "
            "its rows."
        )

    def _explained(self, where: str, error: RuntimeError) -> WorkerError:
        """The error that says which worker is gone and why, as far as that can be known within seconds."""
        here = f"This is {self._who}, which waited at {where}"
        self._say(f"lost/{self.index}", where)
        self._close("another worker was lost")
        silent = [w for w in range(self.count) if w != self.index]
        deadline = time.monotonic() + _PATIENCE
        try:
            while silent and time.monotonic() < deadline:
                if self._store.check(["failed"]):
                    return WorkerError(f"{self._store.get('failed').decode()}. {here}.")
                silent = [w for w in silent if not self._store.check([f"lost/{w}"])]
                time.sleep(0.02)
        except RuntimeError as gone:
            return WorkerError(f"{self._names[0]}, which keeps the store, is gone: {described(gone)}. {here}.")
        told = ", ".join(self._names[w] for w in silent) or "A connection between workers"
        return WorkerError(f"{told} is gone, or does not answer: {described(error)}. {here}.")

    def _say(self, key: str, value: str) -> None:
        with suppress(RuntimeError):  # the process that keeps the store may be gone
            self._store.set(key, value)

    def _close(self, why: str) -> None:
        """Makes all exchanges of this and of the other workers fail."""
        self._why_over = why
        _end(self._groups, self._under_way)

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where a backend of the group takes it."""
        return tensor if tensor.device.type in self._devices else tensor.cpu()

    def _flat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The elements of tensors of one dtype and device in one new tensor, of a dtype that backends add up."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return self._sendable(as_addable(flat))

    def _parts(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The reverse of `_flat`."""
        return unflattened(from_addable(flat.to(like[0].device), like[0].dtype), like)


def _adding_up(flat: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work | None]:
    """Begins to make a tensor the sum of those of all workers.

    Several pieces are under way at once: gloo has two threads, which add up and send by turns.
    """
    return [dist.all_reduce(piece, group=group, async_op=True) for piece in flat.split(PACK // flat.element_size())]


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes on a tensor, which may be an expanded one: torch refuses to write on each number several times."""
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.numel():
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def _comparable(named: Any) -> bytes:
    """Bytes that differ where two values do."""
    try:
        return marshal.dumps(named, 0)  # for numbers and texts, in a tenth of the time
    except ValueError:
        return _printed(named).encode()


def _printed(value: object) -> str:
    """A text that differs where two values do."""
    if isinstance(value, torch.Tensor):
        if value.numel() < _FEW:
            return _printed(value.tolist())
        return f"{tuple(value.shape)} {digest(bits(value).cpu().numpy().tobytes()).hex()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_printed, value))}]"
    if isinstance(value, dict):
        return _printed(sorted((str(key), _printed(item)) for key, item in value.items()))
    return repr(value) if isinstance(value, (bool, int, float, str, type(None), enum.Enum)) else type(value).__name__


_FEW = 9
