"""What reading ahead gains, and what dealing out costs: distributed loops against the same in plain PyTorch.

    python benchmarks/prefetch.py [--json FILE]

The contenders of a table take turns, and each is compared with its measure in the same round: the medians of these
ratios are shown, with the quarter of the rounds below and above. It prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchstrategy

REPLICAS = 4
AHEAD = torchstrategy.InputOptions(load_ahead=True)
ON_DEMAND = torchstrategy.InputOptions(load_ahead=False)

Measure = Callable[[], float]
"""Seconds, of one step or batch."""


class Row(NamedTuple):
    """One line of a table: what it is, seconds, and how often that is the seconds that it is compared with."""

    name: str
    seconds: float
    ratio: float
    low: float
    high: float


def compared(contenders: dict[str, tuple[Measure, Sequence[str]]], rounds: int) -> list[Row]:
    """Measures all contenders in every round, each against the largest of those that it names."""
    for measure, _ in contenders.values():
        measure()
    times = [{name: measure() for name, (measure, _) in contenders.items()} for _ in range(rounds)]
    rows = []
    for name, (_, against) in contenders.items():
        ratios = [seconds[name] / max(seconds[other] for other in against or [name]) for seconds in times]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(Row(name, statistics.median(seconds[name] for seconds in times), middle, low, high))
    return rows


def central(dataset: Any, options: torchstrategy.InputOptions | None = None, replicas: int = REPLICAS) -> Any:
    """A dataset, dealt out to replicas on the CPU."""
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * replicas)
    return strategy.experimental_distribute_dataset(dataset, options)


# A loader that takes its time, and a step that does

WAIT, STEPS = 0.02, 25


class Waits(Dataset[torch.Tensor]):
    """Batches that take a while to load, without the GIL."""

    def __len__(self) -> int:
        return STEPS + 1

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(WAIT)
        return torch.full((8, 4), float(index))


def loop(batches: Iterable[Any], step: Callable[[Any], Any]) -> float:
    """Seconds of a step of a loop, the start of the loader left out."""
    iterator = iter(batches)
    batch = next(iterator)
    began = time.perf_counter()
    for following in iterator:
        step(batch)
        batch = following
    return (time.perf_counter() - began) / STEPS


def overlap() -> list[Row]:
    """Reading ahead hides the smaller of loader and step; reading on demand takes their sum."""
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * REPLICAS)

    def step(batch: Any) -> None:
        strategy.run(lambda rows: time.sleep(WAIT / REPLICAS), args=(batch,))

    def distributed(loader: Any, options: torchstrategy.InputOptions | None = None) -> Measure:
        return lambda: loop(strategy.experimental_distribute_dataset(loader, options), step)

    alone, (some,) = DataLoader(Waits(), batch_size=None), central([torch.ones(8, 4)])
    with_worker = DataLoader(Waits(), batch_size=None, num_workers=1)
    here, there = ("the loader alone", "the step alone"), ("the loader alone, num_workers=1", "the step alone")
    contenders: dict[str, tuple[Measure, Sequence[str]]] = {
        "the loader alone": (lambda: loop(alone, lambda batch: None), ()),
        "the loader alone, num_workers=1": (lambda: loop(with_worker, lambda batch: None), ()),
        "the step alone": (lambda: loop([some] * (STEPS + 1), step), ()),
        "both, `num_workers=1`": (distributed(with_worker), there),
        "both, `load_ahead=True`": (distributed(alone, AHEAD), here),
        "both, on demand": (distributed(alone), here),
    }
    return compared(contenders, rounds=15)


# Neither waits

BATCHES = 16


def reading(batches: Iterable[Any], clock: Callable[[], float], count: int = BATCHES) -> Measure:
    """CPU seconds of a batch that nothing is done with."""

    def measure() -> float:
        iterator = iter(batches)
        began = clock()
        for _ in itertools.islice(iterator, count):
            pass
        return (clock() - began) / count

    return measure


def throughput() -> list[Row]:
    """Batches of 1 MB through 4 replicas, over iterating the plain loader; also the threads' CPU time counts."""
    rows = TensorDataset(torch.rand(BATCHES * 1024, 256))
    collates = DataLoader(rows, batch_size=1024)
    ready = DataLoader([torch.rand(1024, 256) for _ in range(BATCHES)], batch_size=None)
    contenders: dict[str, tuple[Measure, Sequence[str]]] = {}
    for name, loader in {"a loader that collates": collates, "a loader of ready batches": ready}.items():
        contenders[name] = (reading(loader, time.process_time), ())
        contenders[f"{name}, on demand"] = (reading(central(loader), time.process_time), (name,))
        contenders[f"{name}, `load_ahead=True`"] = (reading(central(loader, AHEAD), time.process_time), (name,))
    return compared(contenders, rounds=41)


def next_batch() -> list[Row]:
    """What `next` costs where the loader costs nothing: a list of one batch."""
    count = 1000
    contenders: dict[str, tuple[Measure, Sequence[str]]] = {}
    for name, batch in {
        "a tensor": torch.rand(1024, 256),
        "a dict of 4": {key: torch.rand(256, 256) for key in "abcd"},
    }.items():
        for replicas, options in itertools.product((1, REPLICAS), (ON_DEMAND, AHEAD)):
            how = "`load_ahead=True`" if options is AHEAD else "on demand"
            dataset = central([batch] * count, options, replicas)
            contenders[f"{name}, {replicas} replica{'s' * (replicas > 1)}, {how}"] = (
                reading(dataset, time.process_time, count),
                (),
            )
    return compared(contenders, rounds=9)


# Copies to an accelerator

BATCH_BYTES, STEP_SECONDS, DEVICE_STEPS, WARM_UP = 64 << 20, 0.02, 40, 5


def double_buffered(batches: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """As it is written by hand: the next batch is copied on a stream of its own while the step computes."""
    side = torch.Stream(device)

    def depart(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
        with side:
            return batch.to(device, non_blocking=True), side.record_event()

    def arrive(batch: torch.Tensor, is_there: torch.Event) -> torch.Tensor:
        stream = torch.accelerator.current_stream(device)
        stream.wait_event(is_there)
        batch.record_stream(stream)
        return batch

    departed = map(depart, batches)
    following = next(departed)
    for later in departed:
        batch, following = following, later
        yield arrive(*batch)
    yield arrive(*following)


def of_another_library(module: str, loader: DataLoader[Any]) -> Iterable[torch.Tensor] | None:
    """The loader as Accelerate or Fabric makes it, if they are there."""
    try:
        library = importlib.import_module(module)
    except ImportError:
        return None
    if module == "accelerate":
        return library.Accelerator().prepare(loader)
    fabric = library.Fabric(accelerator="auto", devices=1)
    return fabric.setup_dataloaders(loader)


def device_step(device: torch.device) -> Callable[[torch.Tensor], None]:
    """A step that computes for `STEP_SECONDS` on the device."""
    square = torch.rand(4096, 4096, device=device) / 4096

    def compute(times: int) -> None:
        result = square
        for _ in range(times):
            result = result @ square

    def seconds(times: int) -> float:
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        compute(times)
        torch.accelerator.synchronize(device)
        return time.perf_counter() - began

    seconds(3)
    times = max(1, round(STEP_SECONDS / (seconds(10) / 10)))

    def step(batch: torch.Tensor) -> None:
        batch.sum()
        compute(times)

    return step


def device_loop(batches: Iterable[torch.Tensor], step: Callable[[torch.Tensor], None], device: torch.device) -> float:
    """Seconds of a step of a loop, after some to warm up."""
    began = 0.0
    for k, batch in enumerate(batches):
        if k == WARM_UP:
            torch.accelerator.synchronize(device)
            began = time.perf_counter()
        step(batch)
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - began) / DEVICE_STEPS


def copies(device: torch.device) -> list[Row]:
    """Batches of 64 MB that are copied to an accelerator, over computing alone."""
    step = device_step(device)
    strategy = torchstrategy.OneDeviceStrategy(device)
    host = [torch.rand(BATCH_BYTES // 4) for _ in range(4)]
    pinned = [batch.pin_memory() for batch in host]
    count = DEVICE_STEPS + WARM_UP

    def loader(batches: Sequence[torch.Tensor], **kwargs: Any) -> DataLoader[Any]:
        rounds: Any = [batches[k % len(batches)] for k in range(count)]
        return DataLoader(rounds, batch_size=None, **kwargs)

    def distributed(batches: Sequence[torch.Tensor], options: torchstrategy.InputOptions) -> Any:
        return strategy.experimental_distribute_dataset(loader(batches), options)

    ways: dict[str, Iterable[torch.Tensor] | Callable[[], Iterable[torch.Tensor]] | None] = {
        "compute alone": [pinned[0].to(device)] * count,
        "on demand, pinned": distributed(pinned, ON_DEMAND),
        "on demand, not pinned": distributed(host, ON_DEMAND),
        "`load_ahead=True`, pinned": distributed(pinned, AHEAD),
        "`load_ahead=True`, not pinned": distributed(host, AHEAD),
        "a double buffer by hand, pinned": lambda: double_buffered(loader(pinned), device),
        "`batch.to(device)`, pinned": lambda: (batch.to(device, non_blocking=True) for batch in loader(pinned)),
        "`batch.to(device)`, not pinned": lambda: (batch.to(device) for batch in loader(host)),
        "Accelerate, pinned": of_another_library("accelerate", loader(pinned)),
        "Fabric, pinned": of_another_library("lightning.fabric", loader(pinned)),
    }

    def measured(batches: Any) -> float:
        return device_loop(batches() if callable(batches) else batches, step, device)

    contenders: dict[str, tuple[Measure, Sequence[str]]] = {
        name: (partial(measured, batches), ("compute alone",)) for name, batches in ways.items() if batches is not None
    }
    return compared(contenders, rounds=5)


def printed(title: str, rows: Sequence[Row], unit: str = "ms") -> None:
    """Prints a table."""
    factor = {"ms": 1e3, "µs": 1e6}[unit]
    print(f"\n| {title} | {unit} | times | spread |\n|---|---:|---:|---:|")
    for name, seconds, ratio, low, high in rows:
        times = f"{ratio:.3f} | {low:.3f} to {high:.3f}" if low < high else "|"
        print(f"| {name} | {factor * seconds:,.2f} | {times} |", flush=True)


def main() -> None:
    """Prints the tables, and writes them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # a collection of all that torch has made falls on one contender, and takes as long as 40 batches
    tables = {"overlap": overlap(), "throughput": throughput(), "next": next_batch()}
    printed("a loader of 20 ms and a step of 20 ms", tables["overlap"])
    printed("batches of 1 MB", tables["throughput"])
    printed("`next`", tables["next"], "µs")
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        print("\nThere is no accelerator here, so nothing is copied to one.")
    else:
        tables["copies"] = copies(torch.device(device.type, 0))
        printed("batches of 64 MB to a device, steps of 20 ms", tables["copies"])
    if arguments.json:
        arguments.json.write_text(
            json.dumps({name: [row._asdict() for row in rows] for name, rows in tables.items()}, indent=1)
        )


if __name__ == "__main__":
    main()
