"""Runs the ranks of a distributed program as threads of this process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from torchstrategy._base.errors import add_note, described
from torchstrategy._base.torch_internals import (
    end_modes,
    keep_what_stands_in_for_gpus,
    unseen_by_function_modes,
)
from torchstrategy._base.worker_threads import worker_here
from torchstrategy.testing._ranks.belongings import Belongings
from torchstrategy.testing._ranks.faults import Visits
from torchstrategy.testing._ranks.groups import RankGroup
from torchstrategy.testing._ranks.imports import Imports
from torchstrategy.testing._ranks.moments import as_a_process, ranks_end
from torchstrategy.testing._ranks.orders import Order, order_of_ranks
from torchstrategy.testing._ranks.profilers import OneProfiler
from torchstrategy.testing._ranks.record import RankRecord
from torchstrategy.testing._ranks.signals import OwnSignals
from torchstrategy.testing._ranks.store import STORES, RankStore
from torchstrategy.testing._ranks.torch_internals import (
    forget_meshes,
    groups_made_by,
    hooks_that_change,
    isolate_threads,
    meshes_marked_by,
    outside_of_transforms,
)
from torchstrategy.testing._ranks.turns import RanksStopped, Turns
from torchstrategy.testing._ranks.world import (
    World,
    current_rank,
    current_world,
    settle_here,
)
from torchstrategy.testing._simulation.ordinals import device_count, set_device
from torchstrategy.testing._simulation.program import unwatched
from torchstrategy.testing._simulation.torch_internals import without_dispatch_modes

T = TypeVar("T")


def run_ranks(
    main: Callable[..., T],
    n: int,
    *,
    args: Sequence[Any] = (),
    order: Sequence[int] | str | None = None,
) -> tuple[list[T], RankRecord]:
    """Runs a distributed program in this process, on a thread for each of `n` ranks.

    On each thread, it calls `main(rank, *args)`.

    `main` is written as for `torchrun` or `torch.multiprocessing.spawn`: it calls
    `init_process_group`, with any backend, and uses `torch.distributed`,
    `DistributedDataParallel`, FSDP2, DTensor, pipelines, distributed checkpoints. These
    are torch's own; only the process group below them is another one.

    One rank runs at a time, until it has to wait for another. So a run is the same each
    time, nothing waits for a timeout, and what would hang on a cluster raises an error
    at once. The error says which rank waits in which collective, at which line, for
    whom: if sizes, dtypes, roots, operations or the order of collectives differ, or if
    a rank ends early or fails.

    Each rank has what a process has: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`,
    `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in `os.environ`, random numbers
    (seeded as this process is now), a default dtype, process groups; built-in names (a
    rank may replace `print`), `sys.argv`, `sys.stdout`, hooks of Python and those for
    every `nn.Module`, warnings, loggers, a working folder. If devices are simulated,
    rank r begins with device r as its current one, and starts again at the first where
    there are fewer. Ranks do share modules and their global variables, and one at a
    time may have torch's profiler.

    What a collective writes holds NaN, or the lowest integer, until it is waited for.
    Messages are received before `send` returns, as large ones are on GPUs.

    Args:
        main: The program. It is called with the rank, an int from 0.
        n: How many ranks there are.
        args: What else it is called with.
        order: Which rank goes on, of those that can. A list of all ranks: the first in
            it; None: the lowest; `"reversed"`: the highest. `"random:7"`: one that is
            drawn from the seed 7, and then ranks hand over at each collective, also
            where they need not wait; so missing barriers and races through files show.
            `"random"`: the same with a new seed, which is in the record and in a note
            of what is raised.

    Returns:
        What `main` returned in each rank, in order, and the record of the collectives.

    Raises:
        RanksStopped: A `RuntimeError`, if no rank can go on, or if ranks call
            collectives that do not fit together.
        RuntimeError: If a rank does not wait for what a collective writes, or writes
            there before it has waited; if two ranks profile at a time; or if this is
            called in a rank.
        BaseException: What a rank raised first, as the same object. A note says which
            rank it was.
        TypeError: If an argument is of the wrong kind.
        ValueError: If `n` is below 1, or `order` does not list each rank once.

    Example:
        >>> import torch.distributed as dist
        >>> def main(rank):
        ...     dist.init_process_group("nccl")
        ...     total = torch.tensor([rank])
        ...     dist.all_reduce(total)
        ...     return total.item()
        >>> results, record = torchstrategy.testing.run_ranks(main, 4)
        >>> results, record.counts["all_reduce"]
        ([6, 6, 6, 6], 1)
    """
    record = RankRecord()
    return run_recorded(main, n, record, args, order), record


def run_recorded(
    main: Callable[..., T],
    n: int,
    record: RankRecord,
    args: Sequence[Any] = (),
    order: Sequence[int] | str | None = None,
) -> list[T]:
    """`run_ranks`, with a record that the caller has.

    So the caller also has the record if the run ends with an error.
    """
    _check_number(n)
    chosen = order_of_ranks(order, n)
    record.order = "" if order is None else str(chosen)
    if current_world() is not None:
        raise RuntimeError(
            f"run_ranks was called in rank {current_rank()} of another run_ranks. Call "
            "it around the program, once."
        )
    run = _Run(main, n, args, chosen, record)
    run.go()
    return run.results


def _check_number(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(
            f"run_ranks takes a number of ranks; got {n!r}, a {type(n).__name__}."
        )
    if n < 1:
        raise ValueError(f"run_ranks({n}): a run has 1 rank or more.")


@final
class _Run:
    def __init__(
        self,
        main: Callable[..., Any],
        n: int,
        args: Sequence[Any],
        order: Order,
        record: RankRecord,
    ) -> None:
        self._main, self._n, self._args = main, n, args
        self._visits = Visits(n)
        self._turns, self._record = Turns(n, order, self._enter, self._leave), record
        self.world = World(n, self._turns, self._visits.came_to, record)
        # torch's C++ does not keep a store of Python alive.
        self._stores = [RankStore(self.world, rank) for rank in range(n)]
        self._imports, self._profiler = Imports(self._turns), OneProfiler()
        self._mine = Belongings(self._imports)
        self._belongings = [
            self._mine.begin_process(_environment(rank, n)) for rank in range(n)
        ]
        # What the process still has, between the turns of two ranks.
        self._taken_off: Belongings | None = None
        # The marks of the device meshes of each rank.
        self._marks = [next(_marks) for _ in range(n)]
        self._gone: set[int] = set()
        self._one_gone = threading.Semaphore(0)
        # The errors in the order in which ranks failed.
        self._errors: dict[int, BaseException] = {}
        self.results: list[Any] = [None] * n

    def go(self) -> None:
        """Runs all ranks to their ends, and raises what one of them raised."""
        threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}")
            for rank in range(self._n)
        ]
        isolate_threads(True)
        # A rank's thread may be the first one that traces; at its end it would free
        # what torch needs for others.
        keep_what_stands_in_for_gpus()
        try:
            with (
                groups_made_by(
                    self._make_group, self._make_store, STORES, self._rank_and_size
                ),
                meshes_marked_by(lambda: self._marks[self._turns.running]),
                hooks_that_change(),
                self._imports.noted(),
                self._profiler.guarded(),
                OwnSignals().kept(),
            ):
                for thread in threads:
                    thread.start()
                self._turns.start()
                try:
                    self._wait()
                except BaseException as error:
                    self._turns.stop(f"The run was ended by {described(error)}")
                    self._end(threads)
                    raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            isolate_threads(False)
            ranks_end()
            self._mine.put_on()
            forget_meshes()
        self._raise()

    def _run(self, rank: int) -> None:
        try:
            self._run_here(rank)
        except BaseException as error:  # while it put on or took off what it has
            self._errors.setdefault(rank, error)
        finally:
            end_modes()  # those that the program has left behind
            self._gone.add(rank)
            self._one_gone.release()

    def _run_here(self, rank: int) -> None:
        settle_here(self.world, rank)
        # Backward, with its collectives, belongs to this thread.
        torch.autograd.set_multithreading_enabled(False)
        how = "has ended"
        try:
            self._turns.begin(rank)
            self._turns.check(rank)
            if device_count():
                set_device(rank % device_count())
            with self._visits.of(rank), as_a_process(rank), worker_here():
                self.results[rank] = self._main(rank, *self._args)
            self._check_waits(rank)
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                self._errors[rank] = error
                how = f"has failed: {described(error)}"
        finally:
            self._profiler.close(rank)
            self._turns.end(rank, how)

    def _wait(self) -> None:
        """Waits for all ranks.

        After a Ctrl-C, `Thread.join` of Python 3.11 takes threads that run for ended
        ones.
        """
        while len(self._gone) < self._n:
            self._one_gone.acquire()

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        """Raises an error in the rank whose turn it is, until all have ended.

        This rank may never come to a collective.
        """
        while len(self._gone) < self._n:
            rank = self._turns.running
            if rank in self._gone:
                self._turns.give_up(rank)
            elif (ident := threads[rank].ident) is not None:
                # C++ may lose the error: then another one follows.
                _raise_in_thread(ctypes.c_ulong(ident), ctypes.py_object(RanksStopped))
            self._one_gone.acquire(timeout=0.1)

    def _check_waits(self, rank: int) -> None:
        # The program may have caught the error by which it was told.
        self._turns.check(rank)
        if forgotten := self.world.never_waited_for(rank):
            raise RuntimeError(
                f"rank {rank} has ended, and never waited for {forgotten[0]}: its "
                "tensors hold nothing of use. Call `wait()` on what the asynchronous "
                "collective returned."
            )

    def _raise(self) -> None:
        own = {
            rank: error
            for rank, error in self._errors.items()
            if not isinstance(error, RanksStopped)
        }
        self._record.failed.update(
            (rank, described(error)) for rank, error in own.items()
        )
        self._record.waiting.update(self._turns.stuck)
        for rank, error in (own or self._errors).items():
            if own:
                add_note(error, f"raised in rank {rank} of {self._n}")
                self._note_who_waited(error, rank)
            if self._record.order:
                add_note(
                    error, f"the ranks went on in this order: {self._record.order}"
                )
            raise error

    def _note_who_waited(self, error: BaseException, failed: int) -> None:
        rows = [
            f"  rank {rank} {where}"
            for rank, where in self._turns.stuck.items()
            if rank != failed
        ]
        if rows:
            add_note(
                error, "\n".join(["Others waited then, and could not go on:", *rows])
            )

    def _enter(self, rank: int) -> None:
        over, self._taken_off = self._taken_off, None
        with _outside_of_the_program():
            self._belongings[rank].put_on(over)

    def _leave(self, rank: int) -> None:
        with _outside_of_the_program():
            self._belongings[rank].take_off()
        self._taken_off = self._belongings[rank]

    def _make_group(self, name: str, ranks: list[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = RankGroup(
            self.world,
            current_rank(),
            ranks or range(self._n),
            name,
            is_whole=not ranks,
        )
        return group

    def _make_store(self) -> RankStore:
        return self._stores[current_rank()]

    def _rank_and_size(self, rank: int, size: int) -> tuple[int, int]:
        mine = current_rank()
        if rank not in (-1, mine) or size not in (-1, self._n):
            raise ValueError(
                f"init_process_group(rank={rank}, world_size={size}) was called in "
                f"rank {mine} of {self._n}. Leave both away, or give it the rank with "
                "which run_ranks calls the program, and the number of ranks."
            )
        return mine, self._n


@contextmanager
def _outside_of_the_program() -> Iterator[None]:
    """A block whose operators the program's modes and transforms do not see.

    The rank of this thread has entered these modes and transforms.
    """
    with (
        unwatched(),
        unseen_by_function_modes(),
        without_dispatch_modes(),
        outside_of_transforms(),
    ):
        yield


_marks = count(1)
_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


def _environment(rank: int, n: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "run_ranks",
    }
