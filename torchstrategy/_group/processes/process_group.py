"""Workers that are joined by a process group of `torch.distributed`."""

from __future__ import annotations

import json
import os
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist

from torchstrategy._base.errors import described
from torchstrategy._base.marks import digest
from torchstrategy._base.memory import bits, flatten, write_values
from torchstrategy._base.torch_internals import unflatten
from torchstrategy._group.native_dtypes import as_addable, from_addable
from torchstrategy._group.processes import comparisons, joining
from torchstrategy._group.processes.blame import guess_lost, told_of_lost
from torchstrategy._group.processes.inherited import give_back, noting_sockets
from torchstrategy._group.processes.meeting import name_of
from torchstrategy._group.processes.operations import (
    Begin,
    Operation,
    begin_sum,
    end_groups,
    leave_groups,
    split_sum,
)
from torchstrategy._group.processes.wire import decode, encode
from torchstrategy._group.workers import MENTIONED, WorkerError, Workers, packs_of

# The seconds in which all workers that wait for others say that they have lost one.
_PATIENCE_S = 3.0
# How long a worker waits before it looks whether another one is lost.
_LOOK = timedelta(seconds=0.25)
_LISTEN_S = 0.02
# How long after a failed operation of others this worker may hear that another worker
# is lost.
_LOST_S = 0.5
_LONG_S = 2.0  # a worker that has waited for so long tells the others where
_MESSAGE = 256  # bytes of the message with which every exchange begins
_DIGEST = 8  # bytes of a `digest`
# What a worker sends in place of where it is, if it refuses an exchange.
_REFUSED = digest(b"refused")
# The header of a message: a digest of where the worker is and of what it compares, how
# many bytes it tells, in which run it is, and a digest of each thing that is mentioned.
# What it tells follows, if there is room.
_PLACE, _SIZE, _RUN = (slice(i * _DIGEST, (i + 1) * _DIGEST) for i in range(3))
_OF_MENTIONED = [
    slice(i * _DIGEST, (i + 1) * _DIGEST) for i in range(3, 3 + len(MENTIONED))
]
_HEADER = (3 + len(MENTIONED)) * _DIGEST
# The positions of the groups of a worker.
_DATA = 0  # sends tensors, from any device
# This group sends gradients during backward, in another order than that of the other
# exchanges.
_EARLY = 1
_CONTROL = 2  # sends messages, from the memory of the CPU


_used: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _forget_inherited() -> None:
    """Makes a process that was forked from a worker forget the groups of its parent.

    It must not destroy what its parent uses.
    """
    for workers in list(_used):
        workers._forget()


give_back(_forget_inherited)


# Note [Exchanges between workers]
# Every exchange begins with a message of one size: each worker tells all others at
# which exchange of which run it is, with tensors of which shapes, and a few bytes that
# the exchange is about. What fits into these bytes needs no more than that. Tensors are
# sent when all have told the same, since tensors of different exchanges would be mixed
# up, or wait for ever. An exchange that follows another one at once, of tensors that
# the workers have compared there, needs no message. So a group mostly has nothing under
# way where a worker goes another way or fails, and can be closed at once.
#
# A worker that refuses its arguments comes to the exchange all the same, and says so.
# Then all workers raise an error and stand at one place, as before. Whoever has no
# argument to refuse, and fails, does not come.
#
# A worker that waits learns in four ways that another one is lost. An operation of
# torch fails, since that one, or another one that gave up, has closed its connections.
# Torch's timeout passes. Or it has waited for a quarter of a second, and looks at its
# lifelines, as it does again and again. There it also hears where others wait: workers
# that wait in different groups, one for a message and one for gradients, would do so
# for ever, if all of them wait. Then it says what it knows, and closes its groups, so
# that all hear of it within milliseconds. Which worker it was, and why, follows from
# what the lifelines tell: see Note [Lifelines]. These count in this order:
# 1. A worker that has said why it failed, or that was refused.
# 2. A worker that has ended without a word.
# 3. What another one has found before, so that all name the same.
# 4. A worker that has left: its program has ended, or no longer has the strategy.
# 5. The workers that have not said within some seconds that they have lost one, too:
#    they do not answer.
# Nothing that is alive may hold a group or its operations while a worker waits for
# these words, or it is not closed.
@final
class ProcessGroup(Workers):
    """The processes of a group of `torch.distributed`.

    All methods are called on one thread, in the same order in all workers. See Note
    [Exchanges between workers].

    Args:
        group: The processes. None: all that `init_process_group` has joined.
        timeout: How long an exchange may take. None: as torch's default for the group.
        told: What this worker tells the others when it joins them, in a few words.

    Attributes:
        told_by_all: What each worker has told.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        told: str = "",
    ) -> None:
        ranks = dist.get_process_group_ranks(
            dist.group.WORLD if group is None else group
        )
        super().__init__(len(ranks), ranks.index(dist.get_rank()))
        meeting, name = joining.begin_meeting(ranks, self.index, timeout, told)
        entries = meeting.meet()
        self._names = [entry.who for entry in entries]
        self._lines = meeting.lines
        with noting_sockets():
            self._groups = meeting.call_watched(
                partial(joining.groups_of, ranks, name, group, timeout)
            )
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch lets each operation wait until all
        # workers have begun it.
        self.can_overlap = (
            os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() != "DETAIL"
        )
        self._under_way: list[Operation] = []
        self._finalizer = weakref.finalize(
            self, leave_groups, self._groups, self._under_way, self._lines
        )
        joining.end_before_leaving(self._finalizer)
        _used.add(self)
        self._process = os.getpid()
        self._devices = joining.devices_of(dist.get_backend_config(self._groups[_DATA]))
        self._who = name_of(self.index, self.count)
        self._num_runs = 0
        self._point = "the first run"
        self._compared: list[tuple[str, object]] = []  # what the next exchange compares
        self._bytes = comparisons.ComparedBytes()
        self._mentioned: dict[str, bytes] = {}  # the digests of what may differ
        self._has_said_where = False  # whether the others know where this worker waits
        self._why_over: str | None = None  # why no exchange can be made any more
        self.told_by_all = [entry.told for entry in entries]
        if any(one != told for one in self.told_by_all):
            # Threads of one process tell nothing where they meet. And if workers
            # differ, whoever asked will refuse, and lets go of the group: it must not
            # do so while gloo still connects another worker.
            self.told_by_all = self.all_gather_object(told, "the first exchange")

    def begin_run(self) -> None:
        self._num_runs += 1
        self._point, self._compared = "the beginning of strategy.run", []
        if self._why_over is not None:
            self._refuse_use("the beginning of a run")

    def arrive(self, point: str) -> None:
        self._point = point

    def compare_all(self, pairs: Sequence[tuple[str, object]]) -> None:
        self._compared += pairs

    def mention(self, what: str, value: object) -> None:
        self._mentioned[what] = digest(comparisons.comparable(value))

    def place(self, name: str) -> int:
        return zlib.crc32(self._bytes.join(self._describe_place(name), self._compared))

    @property
    def num_compared(self) -> int:
        return len(self._compared)

    def take_compared(self) -> list[tuple[str, object]]:
        taken, self._compared = self._compared, []
        return taken

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], name: str, agreed: bool = False
    ) -> list[torch.Tensor]:
        where = self._describe_place(name)
        if not agreed:
            self._meet(where, [(t.dtype, tuple(t.shape)) for t in tensors])
        packs = packs_of(tensors)
        flat = [self._flatten([tensors[i] for i in pack]) for pack in packs]
        self._exchange(
            where,
            _DATA,
            flat,
            lambda group: chain.from_iterable(begin_sum(one, group) for one in flat),
        )
        sums: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        for one, pack in zip(flat, packs, strict=True):
            for i, part in zip(
                pack, split_sum(one, [tensors[i] for i in pack]), strict=True
            ):
                sums[i] = part
        return sums

    def begin_all_reduce(self, flat: torch.Tensor, name: str) -> Callable[[], None]:
        where = self._describe_place(name)
        sent = self._sendable(as_addable(flat))
        begun: list[Operation] = []
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch waits for the other workers here.
        self._wait(
            where, partial(self._begin, _EARLY, [sent], partial(begin_sum, sent), begun)
        )

        def arrived() -> None:
            self._wait(where, partial(self._finish, begun))
            if sent is not flat:
                flat.copy_(from_addable(sent, flat.dtype))

        return arrived

    def all_gather(
        self, tensor: torch.Tensor, axis: int, name: str
    ) -> list[torch.Tensor]:
        front = tensor.detach().movedim(axis, 0).contiguous()
        rest = f"rows of shape {tuple(front.shape[1:])} and {front.dtype}"
        told = self.all_gather_bytes(f"{front.shape[0]} {rest}".encode(), name)
        sizes = [int(one.partition(b" ")[0]) for one in told]
        if len({one.partition(b" ")[2] for one in told}) > 1:
            listed = ", ".join(
                f"worker {w} {one.decode()}" for w, one in enumerate(told)
            )
            error = ValueError(
                f"The workers brought tensors to {name} that cannot be put together: "
                f"{listed}."
            )
            self.note_of_all(error)
            raise error
        # Bytes, since the backends do not take every dtype.
        padded = front.new_zeros(max(sizes), *front.shape[1:])
        padded[: front.shape[0]] = front
        mine = self._sendable(bits(padded))
        all_bytes = [torch.empty_like(mine) for _ in sizes]
        if mine.numel():
            self._exchange(
                self._describe_place(name),
                _DATA,
                [*all_bytes, mine],
                lambda group: [
                    dist.all_gather(all_bytes, mine, group=group, async_op=True)
                ],
            )
        whole = [
            one.to(front.device).view(front.dtype).view(padded.shape)
            for one in all_bytes
        ]
        return [
            one[:size].movedim(0, axis) for one, size in zip(whole, sizes, strict=True)
        ]

    def all_gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        return self._meet(self._describe_place(name), (), data)

    def all_gather_alike(self, data: bytes, name: str) -> list[bytes]:
        of_all = self.all_gather_bytes(digest(data), name)
        return (
            [data] * self.count
            if len(set(of_all)) == 1
            else self.all_gather_bytes(data, name)
        )

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        try:
            data = encode(value)
        except (TypeError, ValueError) as error:
            self.refuse(error, name)
            raise
        return list(map(decode, self.all_gather_bytes(data, name)))

    def broadcast(
        self,
        tensors: Sequence[torch.Tensor],
        source: int,
        name: str,
        are_alike: bool = False,
    ) -> None:
        if not tensors:
            return
        where = self._describe_place(name)
        if not are_alike:
            self._meet(where, [(t.dtype, tuple(t.shape)) for t in tensors])
        packs = [[tensors[i] for i in pack] for pack in packs_of(tensors)]
        # The tensors of a pack have one dtype.
        flat = [self._sendable(torch.cat(list(map(bits, pack)))) for pack in packs]
        self._exchange(
            where,
            _DATA,
            flat,
            lambda group: (
                dist.broadcast(one, group=group, group_src=source, async_op=True)
                for one in flat
            ),
        )
        if self.index == source:
            return
        for one, pack in zip(flat, packs, strict=True):
            with torch.no_grad():
                for tensor, part in zip(
                    pack, unflatten(one.view(pack[0].dtype), pack), strict=True
                ):
                    write_values(tensor, part)

    def refuse(self, error: Exception, name: str) -> None:
        if self._why_over is None and not self.is_of_all(error):
            with suppress(WorkerError):  # this worker raises its own error
                # The others may wait elsewhere.
                why = described(error)
                place = self._describe_place(name)
                self._meet(
                    f"{place}{comparisons.WHICH_IT_REFUSED}{why}",
                    (),
                    why.encode("utf-8", "backslashreplace"),
                    refuses=True,
                )
                self.note_of_all(error)

    def tell_failure(self, error: BaseException) -> None:
        if (
            self._why_over is None
            and not isinstance(error, WorkerError)
            and not self.is_of_all(error)
        ):
            self._lines.say("failed", f"{self._who} failed: {described(error)}")
            self._close(f"this worker has failed: {described(error)}")

    def explain_lost_worker(self, error: RuntimeError) -> RuntimeError:
        if (
            self._why_over is None
            and not isinstance(error, WorkerError)
            and not self.is_of_all(error)
        ):
            self._lines.listen(_LOST_S)
            if self._lines.has_news:
                self._waits_since = time.monotonic()
                return self._lost_error("an operation of the model's own", error)
        return error

    # The parts of an exchange.

    def _describe_place(self, name: str) -> str:
        """Where this worker is, in words."""
        if self._why_over is not None:
            self._refuse_use(name)
        return f"{self._point} of run {self._num_runs} ({name})"

    def _refuse_use(self, name: str) -> None:
        """Refuses an exchange, of which there can be none any more."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "strategy.run, or another call that asks all workers, was made in "
                f"process {os.getpid()}, which was forked from {self._who}. Only that "
                "one has connections to the other workers: make the call there. A "
                "forked process, such as a worker of a DataLoader, may use the model "
                "itself."
            )
        raise WorkerError(
            f"The workers were at {name}, but the strategy cannot be used any more: "
            f"{self._why_over}. Start the training again from its last checkpoint, as "
            "torchrun --max-restarts does."
        )

    def _meet(
        self, where: str, signature: object, told: bytes = b"", refuses: bool = False
    ) -> list[bytes]:
        """What the workers tell each other, if all of them are at this exchange.

        If this worker refuses the exchange, `told` says why, and it learns only that
        the others have heard so.
        """
        self.num_exchanges += 1
        compared, self._compared = self._compared, []
        place = digest(self._bytes.join(f"{where} {signature}", compared))
        place = _REFUSED if refuses else place
        mentioned, self._mentioned = self._mentioned, {}
        marks = [mentioned.get(what, bytes(_DIGEST)) for what in MENTIONED]
        counts = [
            count.to_bytes(_DIGEST, "big") for count in (len(told), self._num_runs)
        ]
        header = b"".join([place, *counts, *marks])
        of_headers = self._send_to_all(
            (header + told)[:_MESSAGE].ljust(_MESSAGE, b"\0"), where
        )
        refusing = [w for w, one in enumerate(of_headers) if one[_PLACE] == _REFUSED]
        if not refusing and any(one[_PLACE] != place for one in of_headers):
            raise self._diverged_error(where, signature, compared)
        for what, mark, there in zip(MENTIONED, marks, _OF_MENTIONED, strict=True):
            if any(one[there] != mark for one in of_headers):
                self.differing.add(what)
        sizes = [int.from_bytes(one[_SIZE], "big") for one in of_headers]
        if _HEADER + max(sizes) <= _MESSAGE:
            told_by_all = [
                one[_HEADER : _HEADER + size]
                for one, size in zip(of_headers, sizes, strict=True)
            ]
        else:
            of_all = self._send_to_all(told.ljust(max(sizes), b"\0"), where)
            told_by_all = [one[:size] for one, size in zip(of_all, sizes, strict=True)]
        # A worker that refused its batch has not begun the run to which the others have
        # come with theirs.
        if refusing:
            self._num_runs = max(int.from_bytes(one[_RUN], "big") for one in of_headers)
        if refusing and not refuses:
            raise self._refused_error(
                refusing[0], told_by_all[refusing[0]].decode(), where
            )
        return told_by_all

    def _refused_error(self, worker: int, why: str, where: str) -> Exception:
        """The error for an exchange that another worker has refused.

        Nothing was sent, and all can go on.
        """
        kind = {"TypeError": TypeError, "ValueError": ValueError}.get(
            why.partition(":")[0], RuntimeError
        )
        error = kind(
            f"{self._names[worker]} refused what it was given, so no worker got a "
            f"result: {why} This is {self._who}, which waited at {where}. Give all "
            "workers what fits; the strategy can be used as before."
        )
        self.note_of_all(error)
        return error

    def _send_to_all(self, message: bytes, where: str) -> list[bytes]:
        """The messages of all workers, which have the same length."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        of_all = list(mine.new_empty(self.count, len(message)))
        self._exchange(
            where,
            _CONTROL,
            [*of_all, mine],
            lambda group: [dist.all_gather(of_all, mine, group=group, async_op=True)],
        )
        return [one.numpy().tobytes() for one in of_all]

    def _exchange(
        self, where: str, group: int, tensors: Sequence[torch.Tensor], begin: Begin
    ) -> None:
        """Begins operations on tensors, and waits for their end."""
        begun: list[Operation] = []

        def exchange() -> None:
            self._begin(group, tensors, begin, begun)
            self._finish(begun)

        self._wait(where, exchange)

    def _begin(
        self,
        group: int,
        tensors: Sequence[torch.Tensor],
        begin: Begin,
        begun: list[Operation],
    ) -> None:
        """Begins operations on tensors, and adds each to `begun`."""
        for work in begin(self._groups[group]):
            operation = Operation(group, work, tensors)
            begun.append(operation)
            self._under_way.append(operation)

    def _finish(self, begun: Iterable[Operation]) -> None:
        """Waits for the end of operations."""
        for sent in begun:
            self._finish_one(sent)
            sent.work = None
            self._under_way.remove(sent)

    def _wait(self, where: str, act: Callable[[], None]) -> None:
        """Calls a function in which this worker may wait for others."""
        self._waits_since, self._waits_at = time.monotonic(), where
        error: RuntimeError | None = None
        try:
            act()
        except RuntimeError as raised:
            error = raised
        if self._has_said_where:
            self._has_said_where = False
            self._lines.say("goes on", where)
        if error is None:
            return
        if isinstance(error, WorkerError):
            traceback.clear_frames(error.__traceback__)
            raise error
        # Its frames have the group, which would stay open, and tell a reader nothing.
        cause = error.with_traceback(None)
        raise self._lost_error(where, error) from cause

    def _finish_one(self, sent: Operation) -> None:
        """Waits until an operation ends, or another worker is known to be lost."""
        assert sent.work is not None
        for tensor in sent.tensors:
            if not tensor.is_cpu:
                sent.work.wait()  # with a limit, it would wait for the device
                return
        had_news, has_met = False, False
        while True:
            try:
                # Between two waits, Python handles signals: see Note [What happens on
                # Ctrl-C].
                sent.work.wait(_LOOK)
                return
            except RuntimeError:
                if sent.work.is_completed():
                    # This raises the error again if the operation failed, and not if it
                    # has just ended.
                    sent.work.wait()
                    return
                if had_news:
                    raise
            # A worker that has ended may have done its part before: the operation gets
            # one more chance.
            self._lines.listen()
            had_news = self._lines.has_news
            if self._waits_elsewhere(sent.group) and not had_news:
                if has_met:  # twice: what it has said may be out of date the first time
                    raise self._standstill_error()
                has_met = True

    def _waits_elsewhere(self, group: int) -> bool:
        """Whether all workers have waited for long, and not all in the same group."""
        if not self._has_said_where and time.monotonic() - self._waits_since > _LONG_S:
            self._has_said_where = True
            self._lines.say("waits", self._waits_at, group=group)
        # An operation may end in some workers while others wait for one that has
        # stopped. They are apart only if that one waits as well, and has said where.
        waiting = self._lines.waiting.values()
        return len(waiting) == self.count - 1 and any(
            word["group"] != group for word in waiting
        )

    def _standstill_error(self) -> WorkerError:
        """The error of workers that wait in different groups."""
        places = {w: str(word["text"]) for w, word in self._lines.waiting.items()}
        text, blamed = comparisons.describe_standstill(
            {**places, self.index: self._waits_at}, self._names
        )
        return self._give_up(text, blamed)

    def _diverged_error(
        self, where: str, signature: object, compared: Sequence[tuple[str, object]]
    ) -> WorkerError:
        """The error of workers that are at different exchanges.

        All of them have found so, and say where they are.
        """
        place = f"{where} with {signature}" if signature else where
        told = json.dumps(
            [place, [[what, comparisons.by_name(value)] for what, value in compared]]
        ).encode()
        sizes = [
            int.from_bytes(size, "big")
            for size in self._send_to_all(len(told).to_bytes(_DIGEST, "big"), where)
        ]
        of_all = self._send_to_all(told.ljust(max(sizes)), where)
        return self._give_up(
            comparisons.describe_difference(list(map(json.loads, of_all))), []
        )

    def _give_up(self, text: str, blamed: Sequence[int]) -> WorkerError:
        """Closes the groups, and tells the others why."""
        self._lines.say("verdict", text, blamed=list(blamed))
        self._close("the workers were at different places")
        return WorkerError(text)

    def _lost_error(self, where: str, error: RuntimeError) -> WorkerError:
        """The error that says which worker is lost and why.

        It says what can be found out within seconds.
        """
        self._lines.say("lost", where)
        self._close("another worker was lost")
        deadline = time.monotonic() + _PATIENCE_S
        told = told_of_lost(self._lines, self._names, self.index)
        while told is None and self._lines.silent and time.monotonic() < deadline:
            self._lines.listen(_LISTEN_S)
            told = told_of_lost(self._lines, self._names, self.index)
        if told is None:
            told, blamed = guess_lost(
                self._lines,
                self._names,
                where,
                time.monotonic() - self._waits_since,
                error,
            )
            self._lines.say("verdict", told, blamed=blamed)
        return WorkerError(
            f"{told.rstrip('.')}. This is {self._who}, which waited at {where}."
        )

    def _close(self, why: str) -> None:
        """Makes all exchanges of this and of the other workers fail."""
        self._why_over = why
        joining.has_lost_worker()
        end_groups(self._groups, self._under_way)

    def _forget(self) -> None:
        """In a forked process: nothing of this is its own.

        It closes nothing, since it has not the threads to do so.
        """
        self._finalizer.detach()
        for thing in (*self._groups, *self._under_way):
            joining.leak(thing)
        self._groups.clear()
        self._under_way.clear()
        self._why_over = "this process was forked from a worker"

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where a backend of the group takes it."""
        return tensor if tensor.device.type in self._devices else tensor.cpu()

    def _flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The elements of tensors of one dtype and device in one new tensor.

        The new tensor has a dtype that backends add up.
        """
        flat = flatten(map(torch.Tensor.detach, tensors))
        return self._sendable(as_addable(flat))
