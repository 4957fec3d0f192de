"""Two replicas in one process, against two processes with DDP.

DDP is `DistributedDataParallel`. The global batch is the same.

python benchmarks/processes.py [--rounds N] [--json FILE]

Two replicas on one CPU run in turns: on one core, or with two threads for each
operation. Two processes use two cores. Every contender starts in fresh interpreters,
once a round. Times are wall time, but for the CPU time of all processes.
"""

from __future__ import annotations

import importlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.nn import functional as F

from contest import Contender, Row, hold, in_fresh_processes, left_out, rows_of, work

WARM_UP = 5


class Task(NamedTuple):
    """A model of linear layers, the global batch's rows, and the number of steps.

    So many steps are measured.
    """

    width: int
    layers: int
    rows: int
    steps: int


Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], None]
Figures = dict[str, float]

DDP = "DDP, 2 processes"
STRATEGIES = {
    "Central, 2 replicas": "CentralStorageStrategy",
    "Mirrored, 2 replicas": "MirroredStrategy",
}
PLAIN = "plain, 1 process"
TASKS = {
    "13 MB, 256 rows": (
        Task(1024, 3, 256, 15),
        (DDP, *STRATEGIES, "Central, 2 replicas, 2 threads", PLAIN),
    ),
    "70 kB, 64 rows": (Task(64, 4, 64, 150), (DDP, "Central, 2 replicas", PLAIN)),
}
UNITS = {
    "step": "ms",
    "CPU time of a step, all processes": "ms",
    "from start to the first step": "s",
    "memory (PSS), peak": "MB",
    "memory without files, peak": "MB",
}


def made(task: Task) -> tuple[nn.Module, Batch]:
    """The model and the global batch."""
    torch.manual_seed(0)
    layers = [
        m
        for _ in range(task.layers)
        for m in (nn.Linear(task.width, task.width), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.Linear(task.width, 10)), (
        torch.randn(task.rows, task.width),
        torch.randint(10, (task.rows,)),
    )


def stepping(net: nn.Module) -> Step:
    """The step, which is the same for all."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Batch) -> None:
        x, y = batch
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def plain(task: Task) -> tuple[nn.Module, Callable[[], None]]:
    """One process, the whole batch at once."""
    net, batch = made(task)
    step = stepping(net)
    return net, lambda: step(batch)


def under(name: str, task: Task) -> tuple[nn.Module, Callable[[], None]]:
    """Two replicas in one process."""
    # Here: it would count in the start of the others, too.
    torchstrategy = importlib.import_module("torchstrategy")
    strategy = getattr(torchstrategy, name)(["cpu"] * 2)
    with strategy.scope():
        net, batch = made(task)
        step = stepping(net)
    (dealt,) = strategy.experimental_distribute_dataset([batch])
    return net, lambda: strategy.run(step, args=(dealt,))


def in_ddp(task: Task, rank: int, store: str) -> tuple[nn.Module, Callable[[], None]]:
    """One of two processes."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    net, batch = made(task)
    step, piece = (
        stepping(nn.parallel.DistributedDataParallel(net)),
        [tensor.chunk(2)[rank] for tensor in batch],
    )
    return net, lambda: step((piece[0], piece[1]))


def memory() -> tuple[float, float]:
    """The bytes of this process with its part of what it shares: of all, of no file.

    The second counts what is no file.
    """
    sizes = dict(
        line.split(":")
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return tuple(1024.0 * int(sizes[name].split()[0]) for name in ("Pss", "Pss_Anon"))  # type: ignore[return-value]


def peak_memory(work: Callable[[], object]) -> tuple[float, float]:
    """The most that there is while `work` goes on."""
    seen, is_over = [memory()], threading.Event()

    def look() -> None:
        while not is_over.wait(0.002):
            seen.append(memory())

    thread = threading.Thread(target=look)
    thread.start()
    work()
    is_over.set()
    thread.join()
    return max(pss for pss, _ in seen), max(own for _, own in seen)


def worker(argument: Any) -> Figures:
    """One process of a contender."""
    name, task, rank, store, began = argument
    task = Task(*task)
    torch.set_num_threads(2 if name.endswith("2 threads") else 1)
    if name == DDP:
        net, step = in_ddp(task, rank, store)
    elif name.startswith("plain"):
        net, step = plain(task)
    else:
        net, step = under(STRATEGIES[name.removesuffix(", 2 threads")], task)
    step()
    started = time.time() - began

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    steps(WARM_UP)
    wall, cpu = time.perf_counter(), time.process_time()
    steps(task.steps)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    pss, own = peak_memory(lambda: steps(task.steps // 2))
    checksum = float(
        nn.utils.parameters_to_vector(net.parameters()).detach().double().norm()
    )
    if name == DDP:
        distributed.barrier()
        distributed.destroy_process_group()
    return dict(
        zip(
            UNITS, (wall / task.steps, cpu / task.steps, started, pss, own), strict=True
        ),
        checksum=checksum,
    )


def measured(name: str, task: Task) -> Figures:
    """Of all processes of a contender."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = range(2 if name == DDP else 1)
        told = in_fresh_processes(
            __file__,
            [[name, task, rank, f"{folder}/store", time.time()] for rank in ranks],
        )
    summed = [what for what in UNITS if what.startswith(("CPU", "memory"))]
    return {
        what: (sum if what in summed else max)(figures[what] for figures in told)
        for what in told[0]
    }


def against_processes(rounds: int) -> Iterator[Row]:
    """A step, its memory and its start."""
    if (
        not distributed.is_gloo_available()
        or not Path("/proc/self/smaps_rollup").exists()
    ):
        left_out("processes", "gloo and /proc are not both here")
        return
    for title, (task, names) in list(TASKS.items())[rounds == 1 :]:
        seen = [
            {name: measured(name, task) for name in names}
            for _ in range(max(1, rounds // 7))
        ]
        for figures in seen:
            same = [figure["checksum"] for figure in figures.values()]
            assert max(same) - min(same) < 1e-3 * max(same), same
        contenders = {
            name: Contender(lambda: 0.0, () if name == DDP else (DDP,))
            for name in names
        }
        for what, unit in UNITS.items():
            amounts = [
                {name: figure[what] for name, figure in figures.items()}
                for figures in seen
            ]
            yield from rows_of(f"{title}: {what}", contenders, amounts, unit)


CONTESTS = (against_processes,)

if __name__ == "__main__":
    work(worker)
    hold(CONTESTS, __doc__ or "")
