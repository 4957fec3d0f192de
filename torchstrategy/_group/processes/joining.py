"""How a process joins groups of `torch.distributed`, and leaves them."""

from __future__ import annotations

import atexit
import ctypes
import os
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchstrategy._base.errors import described
from torchstrategy._base.marks import digest
from torchstrategy._base.torch_internals import make_named_group, shared_store
from torchstrategy._base.worker_threads import are_threads
from torchstrategy._group.processes.bounded import NoAnswer, ask
from torchstrategy._group.processes.inherited import give_back, noting_sockets
from torchstrategy._group.processes.lifelines import Lifelines
from torchstrategy._group.processes.meeting import (
    HAS_ENDED,
    USUAL_LIMIT,
    Meeting,
    MeetingOfThreads,
    name_of,
)
from torchstrategy._group.workers import WorkerError

_LOOK_S = 0.05
_dist: Any = dist  # where types do not say that it has stores


class _Joined:
    """What this process has of the default group, if the library has made it."""

    lines: Lifelines | None = None
    keeps_store = False
    timeout = USUAL_LIMIT
    is_orderly = True  # whether no strategy has lost a worker


def has_group() -> bool:
    """Whether `torch.distributed` has a group already."""
    return dist.is_available() and dist.is_initialized()


def devices_of(config: str) -> set[str]:
    """The kinds of devices of backends: `cpu` and `cuda` of `cpu:gloo,cuda:nccl`."""
    return {part.partition(":")[0] for part in config.split(",")}


_met: Counter[str] = Counter()  # how many strategies the same processes have had


def _next_name(store: Any, ranks: Sequence[int]) -> str:
    """A name for the next strategy of these processes.

    All of them use the same name, and no earlier strategy has it.

    A process can leave its default group and join another one, where ranks with these
    numbers are other processes, which have counted from the beginning. So it counts for
    each store: the first process there puts a mark into it.
    """
    mark = store.compare_set("counted", "", secrets.token_hex(8)).decode()
    processes = digest(f"{mark} {tuple(ranks)}".encode()).hex()
    _met[processes] += 1
    return f"{processes}/{_met[processes]}"


def groups_of(
    ranks: list[int],
    name: str,
    group: dist.ProcessGroup | None,
    timeout: timedelta | None,
) -> list[dist.ProcessGroup]:
    """New groups of the same processes.

    A worker that fails closes these groups, and the user's own group stays as it is.

    Args:
        ranks: The processes, by their numbers in the default group.
        name: A name that is the same in all of them, and that no other groups have.
        group: The user's own group of these processes. None: the default group.
        timeout: How long an operation may take. None: as torch does.
    """
    known = dist.get_backend_config(group)
    # None: as the default group.
    kind = None if known == dist.get_backend_config() else known
    if "cpu" not in devices_of(known):
        # As with init_process_group("nccl"), tables, scalars and generators are on the
        # CPU.
        kind = f"cpu:gloo,{known}"
    kinds = [kind, kind, "gloo"]
    if not are_threads():
        # Not by `new_group`, which counts: since torch 2.14 a group that one process
        # has made alone counts there, too.
        return [
            make_named_group(f"{name}/{index}", ranks, kind, timeout)
            for index, kind in enumerate(kinds)
        ]
    is_part = group is not None
    made = [
        dist.new_group(ranks, timeout, kind, use_local_synchronization=is_part)
        for kind in kinds
    ]
    # A process that is in none gets something else.
    return [one for one in made if isinstance(one, dist.ProcessGroup)]


def begin_meeting(
    ranks: Sequence[int], index: int, timeout: timedelta | None, told: str = ""
) -> tuple[Meeting | MeetingOfThreads, str]:
    """A meeting of workers of the default group, by the store that it has.

    Args:
        ranks: The workers, by their numbers in the default group.
        index: The number of this worker among them.
        timeout: How long to wait for all. None: as torch does.
        told: What this worker tells the others, in a few words.

    Returns:
        The meeting, and a name for what is made there: the same in all of these
        workers, and of no other meeting.
    """
    count = len(ranks)
    if are_threads():
        return MeetingOfThreads(count), "threads"
    limit = timeout or USUAL_LIMIT
    are_same = _Joined.lines is not None and len(_Joined.lines.others) + 1 == count
    earlier = _Joined.lines if are_same else None

    def look() -> None:
        """Raises an error if a worker has ended.

        It may have been the one that kept the store.
        """
        if earlier is not None:
            earlier.listen()
            for worker in earlier.ended:
                raise WorkerError(
                    f"{HAS_ENDED.format(worker, count)}. This is "
                    f"{name_of(index, count)}."
                )

    def find_store() -> tuple[Any, tuple[str, int] | None, str]:
        store, home = shared_store(_attempt())
        return store, home, _next_name(store, ranks)

    try:
        store, home, name = ask(find_store, limit.total_seconds(), look)
    except NoAnswer:
        raise WorkerError(
            "The store of torch.distributed does not answer. This is "
            f"{name_of(index, count)}."
        ) from None
    own = _dist.PrefixStore(name, store)
    meeting = Meeting(
        own,
        _name_with_place(home, "The store of torch.distributed"),
        home,
        index,
        count,
        limit,
        told,
    )
    meeting.earlier = earlier
    return meeting, name


def join(rank: int, count: int, address: str, timeout: timedelta | None) -> None:
    """Makes the default group of `torch.distributed`, which ends with the process.

    Args:
        rank: The number of this process.
        count: How many processes there are.
        address: Where the first process keeps the store. Empty: the environment says
            it, as torchrun does.
        timeout: How long an exchange may take.

    Raises:
        WorkerError: Naming the processes that have not come in time, or have ended.
    """
    limit = timeout or USUAL_LIMIT
    backend = (
        "cpu:gloo,cuda:nccl"
        if dist.is_nccl_available() and torch.cuda.is_available()
        else "gloo"
    )
    if are_threads():
        dist.init_process_group(backend, rank=rank, world_size=count, timeout=timeout)
        return
    of_torchrun = (
        not address and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    host, port = _home(address)
    keeper = "torchrun" if of_torchrun else "worker 0"
    is_keeper = rank == 0 and not of_torchrun
    with noting_sockets():
        store = _store(host, port, rank, count, is_keeper, keeper, limit)
        named = _name_with_place((host, port), f"The store, which {keeper} keeps")
        meeting = Meeting(
            _dist.PrefixStore(f"{_attempt()}/join", store),
            named,
            (host, port),
            rank,
            count,
            limit,
        )
        try:
            meeting.meet()
        except WorkerError:
            if is_keeper:
                meeting.wait_for_others()
            raise
        # A process that torchrun has started again must not find what those that are
        # gone have put into the store.
        own = _dist.PrefixStore(f"{_attempt()}/group", store)
        meeting.call_watched(
            lambda: dist.init_process_group(
                backend, store=own, rank=rank, world_size=count, timeout=timeout
            )
        )
    _Joined.lines, _Joined.keeps_store, _Joined.timeout = (
        meeting.lines,
        is_keeper,
        limit,
    )
    atexit.register(_leave)
    give_back(_forget)


def _attempt() -> str:
    """A prefix that no earlier attempt of torchrun has used.

    torchrun may have ended processes and started them again.
    """
    return f"torchstrategy/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _home(address: str) -> tuple[str, int]:
    if address:
        host, _, port = address.rpartition(":")
        return host.strip("[]"), int(port)
    missing = [
        name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)
    ]
    if missing:
        raise ValueError(
            f"RANK and WORLD_SIZE are set, and {' and '.join(missing)} not: set "
            "MASTER_ADDR to the host of the first process, and MASTER_PORT to a free "
            "port there, or start the script with torchrun, which sets all four."
        )
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _name_with_place(home: tuple[str, int] | None, what: str) -> str:
    return what if home is None else f"{what} at {home[0]}, port {home[1]},"


def _store(
    host: str,
    port: int,
    rank: int,
    count: int,
    is_keeper: bool,
    keeper: str,
    limit: timedelta,
) -> Any:
    """The store at this address, which the keeper makes."""
    uses_libuv = os.environ.get("USE_LIBUV", "1") == "1"

    def make_store() -> Any:
        return _dist.TCPStore(
            host,
            port,
            count,
            is_master=is_keeper,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=uses_libuv,
        )

    try:
        return ask(make_store, limit.total_seconds())
    except (RuntimeError, NoAnswer) as error:
        if is_keeper:
            raise
        raise WorkerError(
            f"{keeper[0].upper()}{keeper[1:]}, which keeps the store at {host}, port "
            f"{port}, has not come within {limit.total_seconds():g} s. Start all "
            "workers at about the same time, and give all the same address: "
            f"{described(error)}. This is {name_of(rank, count)}."
        ) from error


# What is ended before this process leaves the group.
_ending: list[weakref.finalize[Any, Any]] = []


def end_before_leaving(finalizer: weakref.finalize[Any, Any]) -> None:
    """Lets a finalizer act before the process leaves the default group."""
    _ending[:] = [one for one in _ending if one.alive] + [finalizer]


def has_lost_worker() -> None:
    """The workers do not leave together any more."""
    _Joined.is_orderly = False


def _leave() -> None:
    for finalizer in _ending:
        finalizer()
    lines = _Joined.lines
    if lines is not None:
        lines.say("left", "")
        # The others may still need the store: whoever keeps it leaves last.
        deadline = time.monotonic() + _Joined.timeout.total_seconds()
        while _others_need_store(lines) and time.monotonic() < deadline:
            lines.listen(_LOOK_S)
        lines.close()
    if dist.is_initialized():  # the program may have ended it itself
        dist.destroy_process_group()


def _others_need_store(lines: Lifelines) -> bool:
    return _Joined.keeps_store and _Joined.is_orderly and bool(lines.silent)


def _forget() -> None:
    """Makes a forked process forget what its parent has joined.

    The process has joined nothing, and must not destroy what its parent has.
    """
    atexit.unregister(_leave)
    _ending.clear()
    if dist.is_initialized():
        leak(dist.group.WORLD)


def leak(thing: object) -> None:
    """Keeps an object for as long as the process lives.

    So nobody waits for what the object would do at its end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
