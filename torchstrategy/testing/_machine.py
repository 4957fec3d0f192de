"""What this machine has, for `python -m torchstrategy` and for bug reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from torchstrategy._base.devices import local_accelerators
from torchstrategy._base.errors import described
from torchstrategy.multi_worker_mirrored import MultiWorkerMirroredStrategy
from torchstrategy.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
)
from torchstrategy.testing._simulation import simulate_devices, simulated_devices

_PACKAGES = ("torchstrategy", "torch", "numpy", "typing-extensions")
# What starts processes sets these. A strategy over several processes waits for the
# others, so none is made here then.
_OF_CLUSTERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "TF_CONFIG",
    "SLURM_PROCID",
    "SLURM_NTASKS",
)


def report() -> dict[str, Any]:
    """What is here: versions, devices and their links, strategies, and the cluster.

    The strategies are those that you would get on this machine.
    """
    accelerators = local_accelerators()
    devices = [torch.device("cpu", 0), *accelerators]
    cluster = {name: os.environ[name] for name in _OF_CLUSTERS if name in os.environ}
    makers: dict[str, Callable[[], Any]] = {
        f'OneDeviceStrategy("{devices[-1].type}:0")': lambda: OneDeviceStrategy(
            f"{devices[-1].type}:0"
        ),
        "MirroredStrategy()": MirroredStrategy,
        "CentralStorageStrategy()": CentralStorageStrategy,
        "MultiWorkerMirroredStrategy()": lambda: _joined(cluster),
        'CentralStorageStrategy(["cpu"] * 4)': lambda: CentralStorageStrategy(
            ["cpu"] * 4
        ),
    }
    return {
        "versions": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: _version(name) for name in _PACKAGES},
            # What torch was built for stands beside its version, since some packages do
            # not say it there.
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
        },
        "devices": [_device(device) for device in devices],
        "links": _links(accelerators),
        "cluster": cluster,
        "strategies": {name: _tried(make) for name, make in makers.items()},
    }


def text(found: dict[str, Any]) -> str:
    """The report for people to read."""
    lines = ["Versions"]
    lines += [
        f"  {name:<18}{value}"
        for name, value in found["versions"].items()
        if value is not None
    ]
    lines.append("Devices")
    for device in found["devices"]:
        memory = "" if device["memory_gib"] is None else f", {device['memory_gib']} GiB"
        simulated = ", simulated on the CPU" if device["simulated"] else ""
        lines.append(
            f"  {device['device']:<8}{device['name']}{memory}{simulated}; a small "
            f"step: {device['step']}"
        )
    if len(found["devices"]) == 1:
        lines.append(
            "  There is no accelerator. --simulate-devices=4 shows this machine with "
            "four simulated ones."
        )
    lines += ["Links"] * bool(found["links"]) + [
        f"  {pair:<16}{how}" for pair, how in found["links"].items()
    ]
    lines += ["Cluster"] * bool(found["cluster"]) + [
        f"  {k}={v}" for k, v in found["cluster"].items()
    ]
    lines.append("Strategies, as they would be made here")
    lines += [f"  {name}\n    {made}" for name, made in found["strategies"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 if the small step fails on a device, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m torchstrategy", description="What this machine has."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--simulate-devices",
        type=int,
        metavar="N",
        help="with N simulated devices on the CPU",
    )
    options = parser.parse_args(arguments)
    if options.simulate_devices:
        simulate_devices(options.simulate_devices)
    found = report()
    print(json.dumps(found, indent=2) if options.json else text(found))
    return int(any(device["step"] != "runs" for device in found["devices"]))


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _device(device: torch.device) -> dict[str, Any]:
    is_simulated = device in simulated_devices()
    name, total = platform.processor() or platform.machine(), None
    # Not every system tells all.
    with contextlib.suppress(AttributeError, RuntimeError, ValueError, OSError):
        if device.type == "cpu":
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        elif is_simulated:
            name = "memory of its own"
        else:
            properties = torch.get_device_module(device.type).get_device_properties(
                device.index
            )
            name, total = properties.name, properties.total_memory
    memory = None if total is None else round(total / 2**30, 1)
    step = _tried(lambda: _step(device))
    return {
        "device": str(device),
        "name": name,
        "memory_gib": memory,
        "simulated": is_simulated,
        "step": step,
    }


def _step(device: torch.device) -> str:
    """Trains one step on the device.

    The weights have to be those of the same step in plain PyTorch.
    """
    inputs = torch.arange(12.0).reshape(4, 3) / 12
    plain = torch.nn.Linear(3, 1)
    strategy = OneDeviceStrategy(device)
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
    model.load_state_dict(plain.state_dict())

    def step(net: torch.nn.Module, batch: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(batch).square().mean().backward()
        optimizer.step()

    strategy.run(step, args=(model, inputs.to(device)))
    step(plain, inputs)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    off = max(
        (one.detach().cpu() - other.detach()).abs().max().item() for one, other in pairs
    )
    return "runs" if off < 1e-3 else f"is off by {off:.2g}"


def _links(accelerators: Sequence[torch.device]) -> dict[str, str]:
    """Between which accelerators copies go directly. Only CUDA tells."""
    cuda = [device for device in accelerators if device.type == "cuda"]
    ways = {True: "direct", False: "through the CPU"}
    return {
        f"{a} to {b}": ways[torch.cuda.can_device_access_peer(a, b)]
        for a in cuda
        for b in cuda
        if a != b
    }


def _joined(cluster: dict[str, str]) -> Any:
    if cluster:
        raise RuntimeError(
            f"not made: it would wait for the other processes, of {', '.join(cluster)}"
        )
    return MultiWorkerMirroredStrategy()


def _tried(make: Callable[[], object]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is made is not used
            return str(make())
    except Exception as error:
        return described(error)
