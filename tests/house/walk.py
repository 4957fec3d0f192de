"""How a training step walks through the rooms: `python tests/house/walk.py`.

The program runs a small training step on the CPU, three times: in two replicas of one
process, which have copies; in one replica alone; and in one replica of each of two
workers. When everything is warm, it counts for one `strategy.run`, on all threads
together, or on the thread of the first worker:

    call        a function of torchstrategy is entered, or a generator of it goes on
    passage     a call whose nearest caller in torchstrategy, on the stack of the same
                thread, is in another file
    of rooms    a passage whose caller is in another room

The user's step and torch stand between two calls and are not counted. Where the step
calls the optimizer, the passage is from the file that called the step to the file of
the optimizer. A call without a caller in torchstrategy, such as `strategy.run` itself,
is no passage. Nor is a return.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

import torchstrategy

PACKAGE = Path(inspect.getfile(torchstrategy)).parent
KIT = PACKAGE / "testing"  # what makes workers of threads, which is no part of the step
# The first run makes copies of the model, and the second the state of the optimizer.
WARM_UP = 5


class Passage(NamedTuple):
    """From one place to another: names of files, or of rooms."""

    start: str
    end: str

    def __str__(self) -> str:
        return f"{self.start} -> {self.end}"


class Walk:
    """What one run passes through.

    Files are named by their paths in the package, without `.py`.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.between_files: Counter[Passage] = Counter()
        self.is_counting = False
        self._thread: int | None = None

    @contextmanager
    def counting(self, this_thread_only: bool = False) -> Iterator[None]:
        """Counts for the length of a block: on all threads, or on this one."""
        self._thread = threading.get_ident() if this_thread_only else None
        self.is_counting = True
        try:
            yield
        finally:
            self.is_counting = False

    def enter(self, frame: FrameType) -> None:
        """Counts one call, of whatever file."""
        file = file_of(frame.f_code.co_filename)
        is_elsewhere = self._thread not in (None, threading.get_ident())
        if file is None or is_elsewhere:
            return
        self.calls[file] += 1
        caller, start = frame.f_back, None
        while caller is not None and start is None:
            start, caller = file_of(caller.f_code.co_filename), caller.f_back
        if start is not None and start != file:
            self.between_files[Passage(start, file)] += 1

    @property
    def rooms(self) -> set[str]:
        """The rooms that the run passes."""
        return set(map(room_of, self.calls))

    @property
    def between_rooms(self) -> Counter[Passage]:
        """The passages from one room to another."""
        passages: Counter[Passage] = Counter()
        for (start, end), count in self.between_files.items():
            if room_of(start) != room_of(end):
                passages[Passage(room_of(start), room_of(end))] += count
        return passages

    def table(self, top: int) -> str:
        """The figures, and the passages that are taken most."""
        figures = {
            "calls": self.calls.total(),
            "files": len(self.calls),
            "passages between files": self.between_files.total(),
            "passages between rooms": self.between_rooms.total(),
        }
        lines = [f"{count:6}  {what}" for what, count in figures.items()]
        for title, passages in {
            "rooms": self.between_rooms,
            "files": self.between_files,
        }.items():
            ranked = sorted(passages.items(), key=lambda item: (-item[1], item[0]))[
                :top
            ]
            lines += [
                "",
                f"between {title}:",
                *(f"{count:6}  {passage}" for passage, count in ranked),
            ]
        return "\n".join(lines)


def room_of(file: str) -> str:
    """`_data` for `_data/dataset`. The files of the top level are one room."""
    return file.partition("/")[0] if "/" in file else "top level"


def walk() -> Walk:
    """The walk of one warm run of a training step in two replicas of one process."""
    walked = Walk()
    with _hearing(
        walked
    ):  # from here on, since the threads of the replicas begin in the first run
        _train(torchstrategy.CentralStorageStrategy(["cpu", "cpu"]), walked)
    return walked


def walk_alone() -> Walk:
    """The same in one replica, which is alone."""
    walked = Walk()
    with _hearing(walked):
        _train(torchstrategy.OneDeviceStrategy("cpu"), walked)
    return walked


def walk_of_a_worker() -> Walk:
    """The same in one replica of each of two workers, as the first of them walks."""
    walked = Walk()

    def work(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        _train(
            torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"]),
            walked if rank == 0 else None,
        )

    with _hearing(walked):
        torchstrategy.testing.run_ranks(work, 2)
    return walked


def _train(strategy: torchstrategy.Strategy, walked: Walk | None) -> None:
    """Runs a step until it is warm, and once more, which is counted."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    *warm_up, last = strategy.experimental_distribute_dataset(
        [torch.ones(6, 4)] * (WARM_UP + 1)
    )
    for batch in warm_up:
        strategy.run(step, args=(batch,))
    is_worker = strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)
    with (
        nullcontext() if walked is None else walked.counting(this_thread_only=is_worker)
    ):
        strategy.run(step, args=(last,))


@contextmanager
def _hearing(walked: Walk) -> Iterator[None]:
    """Tells a walk of all calls on this thread and on those that begin in the block."""

    def hear(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and walked.is_counting:
            walked.enter(frame)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.collect()
    gc.disable()  # else something that is finalized in the run might be counted
    threading.setprofile(hear)
    sys.setprofile(hear)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        if collects:
            gc.enable()


@functools.cache
def file_of(path: str) -> str | None:
    """`_data/dataset` for the path of that file.

    None for a file of somebody else, and for one of `torchstrategy.testing`.
    """
    found = Path(path)
    if found.is_relative_to(KIT) or not found.is_relative_to(PACKAGE):
        return None
    return found.relative_to(PACKAGE).with_suffix("").as_posix()


def main() -> None:
    """Prints the figures of the walks."""
    parser = argparse.ArgumentParser(
        description="Counts the passages of one warm training step between files."
    )
    parser.add_argument(
        "--top", type=int, default=25, help="how many passages are listed of each kind"
    )
    top = parser.parse_args().top
    print(f"In two replicas of one process:\n{walk().table(top)}")
    walks_of_one = {
        "In one replica, alone": walk_alone(),
        "In one replica of each worker": walk_of_a_worker(),
    }
    for who, one in walks_of_one.items():
        rooms = ", ".join(sorted(one.rooms))
        print(f"\n{who}, in these rooms: {rooms}\n{one.table(min(top, 5))}")


if __name__ == "__main__":
    main()
