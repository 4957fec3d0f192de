"""What reading ahead gains, and what dealing out costs.

Distributed loops run against the same in plain PyTorch.

python benchmarks/prefetch.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchstrategy
from contest import Contender, Measure, Row, compared, hold, left_out, timed

REPLICAS = 4
AHEAD = torchstrategy.InputOptions(load_ahead=True)
ON_DEMAND = torchstrategy.InputOptions(load_ahead=False)


def central(
    dataset: Any,
    options: torchstrategy.InputOptions | None = None,
    replicas: int = REPLICAS,
) -> Any:
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


def overlap(rounds: int) -> Iterator[Row]:
    """Reading ahead hides the smaller of loader and step; on demand, they add up."""
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * REPLICAS)

    def step(batch: Any) -> None:
        strategy.run(lambda rows: time.sleep(WAIT / REPLICAS), args=(batch,))

    def distributed(
        loader: Any, options: torchstrategy.InputOptions | None = None
    ) -> Measure:
        return lambda: loop(
            strategy.experimental_distribute_dataset(loader, options), step
        )

    alone, (some,) = DataLoader(Waits(), batch_size=None), central([torch.ones(8, 4)])
    with_worker = DataLoader(Waits(), batch_size=None, num_workers=1)
    here, there = (
        ("the loader", "the step"),
        ("the loader, `num_workers=1`", "the step"),
    )
    contenders = {
        "the loader": Contender(lambda: loop(alone, lambda batch: None)),
        "the loader, `num_workers=1`": Contender(
            lambda: loop(with_worker, lambda batch: None)
        ),
        "the step": Contender(lambda: loop([some] * (STEPS + 1), step)),
        "both, `num_workers=1`": Contender(distributed(with_worker), there, 1.1),
        "both, `load_ahead=True`": Contender(distributed(alone, AHEAD), here, 1.1),
        "both, on demand": Contender(distributed(alone), here),
    }
    yield from compared("20 ms of waiting each, wall time", contenders, rounds)


# Neither waits

BATCHES = 16


def reading(batches: Iterable[Any], count: int = BATCHES) -> Measure:
    """CPU seconds, of all threads, of a batch that nothing is done with.

    The start of the loader is left out.
    """

    def measure() -> float:
        iterator = iter(batches)
        return timed(lambda: next(iterator), count, time.process_time)()

    return measure


def throughput(rounds: int) -> Iterator[Row]:
    """Batches of 1 MB through 4 replicas, over iterating the plain loader.

    The threads' CPU time counts, too.
    """
    rows = TensorDataset(torch.rand(BATCHES * 1024, 256))
    loaders: dict[str, DataLoader[Any]] = {
        "a loader that collates": DataLoader(rows, batch_size=1024),
        "a loader of ready batches": DataLoader(
            [torch.rand(1024, 256) for _ in range(BATCHES)], batch_size=None
        ),  # type: ignore[arg-type]
    }
    for name, loader in loaders.items():
        bar = 1.1 if "collates" in name else None
        contenders = {
            name: Contender(reading(loader)),
            "on demand": Contender(reading(central(loader)), (name,), bar),
            "`load_ahead=True`": Contender(reading(central(loader, AHEAD)), (name,)),
        }
        yield from compared("batches of 1 MB, 4 replicas", contenders, 3 * rounds)


def next_batch(rounds: int) -> Iterator[Row]:
    """What `next` costs where the loader costs nothing: a list of one batch."""
    count = 1000
    batches: dict[str, Any] = {
        "a tensor": torch.rand(1024, 256),
        "a dict of 4": {key: torch.rand(256, 256) for key in "abcd"},
    }
    contenders = {}
    for (name, batch), replicas, options in itertools.product(
        batches.items(), (1, REPLICAS), (ON_DEMAND, AHEAD)
    ):
        how = "`load_ahead=True`" if options is AHEAD else "on demand"
        dataset = central([batch] * count, options, replicas)
        contenders[f"{name}, replicas: {replicas}, {how}"] = Contender(
            reading(dataset, count)
        )
    yield from compared("`next`", contenders, rounds, "µs")


# Copies to an accelerator

BATCH_BYTES, STEP_SECONDS, DEVICE_STEPS, WARM_UP = 64 << 20, 0.02, 40, 5
BARRED = ("on demand, pinned", "`load_ahead=True`, pinned")


def double_buffered(
    batches: Iterable[torch.Tensor], device: torch.device
) -> Iterator[torch.Tensor]:
    """As it is written by hand: the next batch is copied while the step computes.

    It is on a stream of its own.
    """
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


def of_another_library(module: str, loader: DataLoader[Any]) -> Any:
    """The loader as Accelerate or Fabric makes it, if they are there."""
    try:
        library = importlib.import_module(module)
    except ModuleNotFoundError as error:
        left_out(module, error)
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


def device_loop(
    batches: Iterable[torch.Tensor],
    step: Callable[[torch.Tensor], None],
    device: torch.device,
) -> float:
    """Seconds of a step of a loop, after some to warm up."""
    began = 0.0
    for k, batch in enumerate(batches):
        if k == WARM_UP:
            torch.accelerator.synchronize(device)
            began = time.perf_counter()
        step(batch)
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - began) / DEVICE_STEPS


def copies(rounds: int) -> Iterator[Row]:
    """Batches of 64 MB that are copied to an accelerator, over computing alone."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        left_out("copies to an accelerator", "there is none here")
        return
    device = torch.device(accelerator.type, 0)
    step = device_step(device)
    strategy = torchstrategy.OneDeviceStrategy(device)
    host = [torch.rand(BATCH_BYTES // 4) for _ in range(4)]
    pinned = [batch.pin_memory() for batch in host]
    count = DEVICE_STEPS + WARM_UP

    def loader(batches: Sequence[torch.Tensor]) -> DataLoader[Any]:
        turns: Any = [batches[k % len(batches)] for k in range(count)]
        return DataLoader(turns, batch_size=None)

    def distributed(
        batches: Sequence[torch.Tensor], options: torchstrategy.InputOptions
    ) -> Any:
        return strategy.experimental_distribute_dataset(loader(batches), options)

    ways: dict[
        str, Iterable[torch.Tensor] | Callable[[], Iterable[torch.Tensor]] | None
    ] = {
        "compute alone": [pinned[0].to(device)] * count,
        "on demand, pinned": distributed(pinned, ON_DEMAND),
        "on demand, not pinned": distributed(host, ON_DEMAND),
        "`load_ahead=True`, pinned": distributed(pinned, AHEAD),
        "`load_ahead=True`, not pinned": distributed(host, AHEAD),
        "a double buffer by hand, pinned": lambda: double_buffered(
            loader(pinned), device
        ),
        "`batch.to(device)`, pinned": lambda: (
            batch.to(device, non_blocking=True) for batch in loader(pinned)
        ),
        "`batch.to(device)`, not pinned": lambda: (
            batch.to(device) for batch in loader(host)
        ),
        "Accelerate, pinned": of_another_library("accelerate", loader(pinned)),
        "Fabric, pinned": of_another_library("lightning.fabric", loader(pinned)),
    }

    def measured(batches: Any) -> float:
        return device_loop(batches() if callable(batches) else batches, step, device)

    contenders = {
        name: Contender(
            partial(measured, batches),
            ("compute alone",),
            1.03 if name.endswith("ead=True`, pinned") else None,
        )
        for name, batches in ways.items()
        if batches is not None
    }
    yield from compared(
        "copies of 64 MB, steps of 20 ms", contenders, max(1, rounds // 3)
    )


CONTESTS = (overlap, throughput, next_batch, copies)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "")
