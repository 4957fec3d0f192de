"""A program that uses most of the library.

`test_surroundings.py` runs it in surroundings that are not usual.

    python program.py [loaders]    trains under every strategy, in ranks, on simulated
                                   devices, and in two processes
    python program.py worker       is one of the two processes

It has no `assert`, which `python -O` leaves out.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy

STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "OneDevice": lambda: torchstrategy.OneDeviceStrategy("cpu"),
    "Central": lambda: torchstrategy.CentralStorageStrategy(["cpu"] * 3, "cpu"),
    "Mirrored": lambda: torchstrategy.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one worker": lambda: torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"]),
}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 4, generator=generator), torch.randn(
        24, 1, generator=generator
    )


def trained(
    batches: Iterable[Any], strategy: torchstrategy.Strategy | None = None
) -> torch.Tensor:
    """The parameters of a small model after an epoch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    if strategy is not None:
        strategy.distribute_module(net)
        strategy.distribute_optimizer(optimizer)
        batches = strategy.experimental_distribute_dataset(batches)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for batch in batches:
        if strategy is None:
            step(*batch)
        else:
            loss = strategy.run(step, args=batch)
            strategy.reduce("mean", loss, axis=None, weights=batch)
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def batches() -> list[Any]:
    x, y = rows()
    return list(zip(x.split(8), y.split(8), strict=True))


def check(name: str, found: torch.Tensor) -> None:
    torch.testing.assert_close(found, trained(batches()), rtol=1e-4, atol=1e-5)
    print(f"{name}: as plain PyTorch", flush=True)


def in_strategies() -> None:
    for name, make in STRATEGIES.items():
        check(name, trained(batches(), make()))
    x, _ = rows()
    net = nn.Linear(4, 1)
    torch.testing.assert_close(torchstrategy.DataParallel(net, ["cpu"] * 2)(x), net(x))
    print("DataParallel: as plain PyTorch", flush=True)


def with_loaders() -> None:
    """Loaders with processes of their own, started in each way that this system has."""
    for how in torch.multiprocessing.get_all_start_methods():
        loader = DataLoader(
            TensorDataset(*rows()),
            batch_size=8,
            num_workers=2,
            multiprocessing_context=how,
        )
        check(f"a loader by {how}", trained(loader, STRATEGIES["Central"]()))


def in_ranks() -> None:
    def main(rank: int) -> torch.Tensor:
        torch.distributed.init_process_group("gloo")
        return trained(
            batches(), torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
        )

    for found in torchstrategy.testing.run_ranks(main, 2)[0]:
        check("a rank", found)


def on_simulated_devices() -> None:
    devices = torchstrategy.testing.simulate_devices(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trained(batches(), torchstrategy.CentralStorageStrategy(devices, "cpu"))
    check("simulated devices", found)


def as_worker() -> None:
    torch.distributed.init_process_group("gloo")
    check(
        f"worker {torch.distributed.get_rank()}",
        trained(batches(), torchstrategy.MultiWorkerMirroredStrategy()),
    )
    torch.distributed.destroy_process_group()


def in_processes() -> None:
    """Two workers, with the options of this interpreter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # There is no public way to the options of the interpreter; `multiprocessing` uses
    # the same.
    command = [
        sys.executable,
        *subprocess._args_from_interpreter_flags(),
        __file__,
        "worker",
    ]  # type: ignore
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    if any([process.wait(120) for process in started]):
        raise SystemExit("a worker has failed")


if __name__ == "__main__":
    if "worker" in sys.argv:
        as_worker()
        sys.exit()
    in_strategies()
    if "loaders" in sys.argv:
        with_loaders()
    in_ranks()
    if "alone" not in sys.argv:
        in_processes()
    on_simulated_devices()
    print(f"all went well in {tempfile.gettempdir()}", flush=True)
