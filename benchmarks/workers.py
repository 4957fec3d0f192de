"""`MultiWorkerMirroredStrategy` against DDP with gloo and FSDP2, on the same rows.

DDP is `DistributedDataParallel`.

python benchmarks/workers.py [--rounds N] [--json FILE]

For the times of a step, every process makes both, and all processes take turns with
them. They are joined by the loopback device, or by a slow link: two network namespaces
and a pair of virtual devices, which `tc` slows down until the gradients take as long to
send as the backward takes to compute. Making namespaces needs root. For memory and the
start, each contender has processes of its own. A step is measured twice: by the clock
on the wall, and by the CPU time of the thread that makes it, which has no waiting in
it. Backward runs on this thread, too, where all is on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from contest import (
    Amounts,
    Contender,
    Row,
    hold,
    in_fresh_processes,
    left_out,
    rows_of,
    timed,
    work,
)
from processes import peak_memory

DDP, OURS, PLAIN = "DDP", "MultiWorkerMirrored", "plain, nothing sent"
FSDP, OURS_SHARDED = "FSDP2", "MultiWorkerMirrored, FSDP2"
TIMEOUT = 600


class Task(NamedTuple):
    """A model of linear layers, each process's rows, and how many steps a turn has."""

    width: int
    layers: int
    rows: int
    steps: int


class Bars(NamedTuple):
    """How often what DDP takes a step may take."""

    wall: float
    cpu: float


TASKS = {
    "6 tensors": (Task(64, 3, 32, 30), Bars(wall=1.25, cpu=1.20)),
    "82 tensors": (Task(64, 41, 32, 8), Bars(wall=1.10, cpu=1.05)),
    "5,200,000 parameters": (Task(1320, 3, 16, 3), Bars(wall=1.10, cpu=1.05)),
}
# Blocks of a transformer: those of examples/sharded.py, and larger ones.
SHARDED_TASKS = {
    "2 blocks of 32": (Task(32, 2, 50, 8), Bars(wall=1.05, cpu=1.05)),
    "2 blocks of 256": (Task(256, 2, 32, 3), Bars(wall=1.05, cpu=1.05)),
}
SLOW_TASK, SLOW_BAR = Task(1320, 3, 128, 2), 1.05
MORE_BYTES = 1024  # so many more than DDP a step may send
ALONE = {
    "from start to the first step": "s",
    "memory (PSS), peak": "MB",
    "memory without files, peak": "MB",
}

Step = Callable[[], None]
# Makes a model, and the rows of all processes.
Make = Callable[[Task, int], tuple[nn.Module, torch.Tensor]]


def made(task: Task, size: int) -> tuple[nn.Module, torch.Tensor]:
    """The model and the rows of all processes."""
    torch.manual_seed(0)
    layers = [
        m
        for _ in range(task.layers)
        for m in (nn.Linear(task.width, task.width), nn.Tanh())
    ]
    return nn.Sequential(*layers), torch.randn(task.rows * size, task.width)


def stepping(net: nn.Module) -> Callable[[torch.Tensor], None]:
    """The step, which is the same for all."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        (net(rows) - 0.5).square().mean().backward()
        optimizer.step()

    return step


def maker(name: str) -> Callable[[Task, int, int], tuple[nn.Module, Step]]:
    """What makes a contender's model, and a function that trains it for one step."""
    makers = {
        DDP: in_ddp,
        OURS: under_strategy,
        PLAIN: plain,
        FSDP: partial(plain, make=sharded),
        OURS_SHARDED: partial(under_strategy, make=sharded),
    }
    return makers[name]


def plain(
    task: Task, rank: int, size: int, make: Make = made
) -> tuple[nn.Module, Step]:
    """A process that does nothing to send gradients, with its rows.

    A sharded model sends them itself.
    """
    net, rows = make(task, size)
    step, own = stepping(net), rows.chunk(size)[rank]
    return net, lambda: step(own)


def in_ddp(task: Task, rank: int, size: int) -> tuple[nn.Module, Step]:
    """The same, joined by DDP."""
    net, rows = made(task, size)
    step, own = (
        stepping(nn.parallel.DistributedDataParallel(net)),
        rows.chunk(size)[rank],
    )
    return net, lambda: step(own)


def under_strategy(
    task: Task, rank: int, size: int, make: Make = made
) -> tuple[nn.Module, Step]:
    """The same under a strategy, which splits the rows of all."""
    # Here: it would count in the start of DDP, too.
    torchstrategy = importlib.import_module("torchstrategy")
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    with strategy.scope():
        net, rows = make(task, size)
        step = stepping(net)
    (dealt,) = strategy.experimental_distribute_dataset([rows])
    return net, lambda: strategy.run(step, args=(dealt,))


def sharded(task: Task, size: int) -> tuple[nn.Module, torch.Tensor]:
    """Blocks of a transformer that are sharded, and the rows of all processes.

    Each row has eight words.
    """
    # Here: it counts in nobody's start.
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    torch.manual_seed(0)
    width = task.width
    blocks = [
        nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        for _ in range(task.layers)
    ]
    net = nn.Sequential(*blocks)
    for part in (*blocks, net):
        fully_shard(part)
    return net, torch.randn(task.rows * size, 8, width)


def whole(net: nn.Module) -> torch.Tensor:
    """All parameters, put together where each process has a part of them."""
    return nn.utils.parameters_to_vector(
        [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    )


# The processes


def worker(argument: Any) -> Any:
    """One of the processes."""
    kind, rank, size, store, *rest = argument
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    told = {"turns": in_turns, "alone": alone}[kind](rank, size, *rest)
    distributed.barrier()
    distributed.destroy_process_group()
    return told


WALL, CPU, SENT = range(3)
"""What is measured of a step: seconds, seconds, and bytes if they are known."""


def in_turns(
    rank: int,
    size: int,
    tasks: Sequence[Sequence[int]],
    rounds: int,
    names: Sequence[str] = (DDP, OURS, PLAIN),
) -> list[list[list[Amounts]]]:
    """For each task what is measured of each contender, in each round."""
    return [turns(Task(*task), rank, size, rounds, names) for task in tasks]


def turns(
    task: Task, rank: int, size: int, rounds: int, names: Sequence[str]
) -> list[list[Amounts]]:
    """What is measured of one task: `WALL`, `CPU` and `SENT`.

    One round alone shows that everything runs.
    """
    made_of = {name: maker(name)(task, rank, size) for name in names}
    # All processes have the same order.
    shuffled, repeats = random.Random(0), task.steps if rounds > 1 else 1
    measured: list[list[Amounts]] = [[], [], []]
    for number in range(rounds + (rounds > 1)):
        amounts: list[Amounts] = [{}, {}, {}]
        for name in shuffled.sample(list(made_of), len(made_of)):
            distributed.barrier()
            sent_before, cpu_before = bytes_sent(), time.thread_time()
            amounts[WALL][name] = timed(made_of[name][1], repeats, time.perf_counter)()
            amounts[CPU][name] = (time.thread_time() - cpu_before) / repeats
            amounts[SENT][name] = (bytes_sent() - sent_before) / repeats
        if number or rounds == 1:  # the first round warms up
            for column, of_round in zip(measured, amounts, strict=True):
                column.append(of_round)
    theirs, ours = (whole(made_of[name][0]) for name in names[:2])
    torch.testing.assert_close(ours, theirs)
    return measured


def bytes_sent() -> float:
    """The bytes that left the device that joins the processes; 0 for loopback."""
    device = os.environ.get("GLOO_SOCKET_IFNAME")
    return (
        float(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())
        if device
        else 0.0
    )


def alone(
    rank: int, size: int, name: str, task: Sequence[int], began: float
) -> list[float]:
    """What the only contender of a process takes to start, and its memory."""
    _, step = maker(name)(Task(*task), rank, size)
    step()
    return [time.time() - began, *peak_memory(lambda: [step() for _ in range(5)])]


# The contests


def told_by(
    kind: str, size: int, *rest: Any, before: Sequence[Sequence[str]] | None = None
) -> list[Any]:
    """What processes tell that are joined."""
    with tempfile.TemporaryDirectory() as folder:
        told = [[kind, rank, size, f"{folder}/store", *rest] for rank in range(size)]
        return in_fresh_processes(__file__, told, TIMEOUT, before)


def slowest(of_processes: Sequence[Sequence[Amounts]]) -> list[Amounts]:
    """In each round, what the slowest of the processes took."""
    return [
        {name: max(one[name] for one in amounts) for name in amounts[0]}
        for amounts in zip(*of_processes, strict=True)
    ]


def contenders(bar: float | None) -> dict[str, Contender]:
    """DDP, and those that are compared with it. No turn is taken in this process."""
    return {
        DDP: Contender(float),
        OURS: Contender(float, (DDP,), bar),
        PLAIN: Contender(float, (DDP,)),
    }


def can_be_joined() -> bool:
    """Whether gloo is here; says so if it is not."""
    if distributed.is_available() and distributed.is_gloo_available():
        return True
    left_out("workers", "torch has no gloo here")
    return False


def on_loopback(rounds: int) -> Iterator[Row]:
    """Steps of 2 and of 4 processes, joined by the loopback device."""
    if not can_be_joined():
        return
    for size in (2, 4) if rounds > 1 else (2,):
        told = told_by("turns", size, [task for task, _ in TASKS.values()], rounds)
        for number, (title, (_, bars)) in enumerate(TASKS.items()):
            for what, kind, bar in (
                ("step", WALL, bars.wall),
                ("step, CPU time", CPU, bars.cpu),
            ):
                amounts = slowest([of_process[number][kind] for of_process in told])
                # Four processes on two cores wait for one another to be given a core:
                # there the figures have no bar.
                yield from rows_of(
                    f"{size} processes, {title}: {what}",
                    contenders(bar if size == 2 else None),
                    amounts,
                    "ms",
                )


def in_shards_of_a_model(rounds: int) -> Iterator[Row]:
    """Steps of 2 processes that share out a model by FSDP2, as a plain script does."""
    if not can_be_joined():
        return
    told = told_by(
        "turns",
        2,
        [task for task, _ in SHARDED_TASKS.values()],
        rounds,
        (FSDP, OURS_SHARDED),
    )
    for number, (title, (_, bars)) in enumerate(SHARDED_TASKS.items()):
        for what, kind, bar in (
            ("step", WALL, bars.wall),
            ("step, CPU time", CPU, bars.cpu),
        ):
            amounts = slowest([of_process[number][kind] for of_process in told])
            both = {
                FSDP: Contender(float),
                OURS_SHARDED: Contender(float, (FSDP,), bar),
            }
            yield from rows_of(f"2 processes, {title}: {what}", both, amounts, "ms")


def on_a_slow_link(rounds: int) -> Iterator[Row]:
    """Steps of 2 processes in which gradients travel as long as the backward takes."""
    if not can_be_joined():
        return
    rate = bytes_of_gradients(SLOW_TASK) / backward_seconds(SLOW_TASK)
    try:
        with slow_link(rate) as before:
            told = told_by("turns", 2, [SLOW_TASK], rounds, before=before)
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", None) or error).strip()
        left_out("the slow link", f"namespaces cannot be made: {why}")
        return
    title = f"slow link, {rate / 1e6:.0f} MB/s"
    steps = slowest([of_process[0][WALL] for of_process in told])
    yield from rows_of(f"{title}: step", contenders(SLOW_BAR), steps, "ms")
    sent = slowest([of_process[0][SENT] for of_process in told])
    bar = 1 + MORE_BYTES / bytes_of_gradients(SLOW_TASK)
    both = {
        name: contender for name, contender in contenders(bar).items() if name != PLAIN
    }
    yield from rows_of(f"{title}: bytes sent in a step", both, sent, "B")


def bytes_of_gradients(task: Task) -> float:
    net, _ = made(task, 1)
    return float(sum(parameter.nbytes for parameter in net.parameters()))


def backward_seconds(task: Task) -> float:
    """How long the backward takes if this process has the machine for itself."""
    net, rows = made(task, 1)
    took = []
    for _ in range(7):
        loss = net(rows).square().mean()
        took.append(timed(loss.backward, 1)())
    return statistics.median(took)


@contextlib.contextmanager
def slow_link(rate: float) -> Iterator[list[list[str]]]:
    """Two namespaces, each with an end of a link of so many bytes a second.

    Yields what starts a command in each.
    """
    names, ends = (
        [f"{word}{os.getpid()}{side}" for side in "ab"]
        for word in ("torchstrategy-", "ts")
    )

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            ends[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            names[1],
        )
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            ip("-n", name, "address", "add", f"10.213.0.{number}/24", "dev", end)
            for device in ("lo", end):
                ip("-n", name, "link", "set", device, "up")
            limit = ["rate", f"{rate * 8:.0f}bit", "burst", "1mb", "latency", "100ms"]
            command = [
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                end,
                "root",
                "tbf",
                *limit,
            ]
            subprocess.run(command, check=True, capture_output=True, text=True)
        enter = zip(names, ends, strict=True)
        yield [
            ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}"]
            for name, end in enter
        ]
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "delete", name], check=False, capture_output=True
            )


def in_processes_of_their_own(rounds: int) -> Iterator[Row]:
    """The start and the memory, of all processes."""
    if not can_be_joined() or not Path("/proc/self/smaps_rollup").exists():
        return
    # An import of torch takes longer than all else here.
    title, size = "5,200,000 parameters", 2 if rounds > 1 else 1
    task, _ = TASKS[title]
    seen = [
        {name: told_by("alone", size, name, task, time.time()) for name in (DDP, OURS)}
        for _ in range(max(1, rounds // 7))
    ]
    for number, (what, unit) in enumerate(ALONE.items()):
        of_all = max if unit == "s" else sum
        amounts = [
            {name: of_all(one[number] for one in told[name]) for name in told}
            for told in seen
        ]
        bar = 1.1 if unit == "s" else 1.0
        both = {
            name: contender
            for name, contender in contenders(bar).items()
            if name != PLAIN
        }
        yield from rows_of(
            f"{title}, {size} process{'es' * (size > 1)}: {what}", both, amounts, unit
        )


CONTESTS = (
    on_loopback,
    in_shards_of_a_model,
    on_a_slow_link,
    in_processes_of_their_own,
)

if __name__ == "__main__":
    work(worker)
    hold(CONTESTS, __doc__ or "")
