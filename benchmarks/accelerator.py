"""One GPU: plain PyTorch, replicas that share it, and parameters on the CPU.

Each contest is against plain PyTorch; optimizers are on the CPU, too.

python benchmarks/accelerator.py [--rounds N] [--json FILE] [--simulated GPU
[--timelines FOLDER]]

Times are wall clock, with all that was queued on the device done. Where there is no
GPU, it says so and ends. Each contest can be held on another device, the CPU included,
and smaller: its logic is the same there.

With `--simulated H100` nothing is measured: the contests run in virtual time, and the
table has what a model predicts. `--timelines` keeps what happens in each contest, as a
picture and as a file for https://ui.perfetto.dev.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import parallel_apply

import torchstrategy
from contest import (
    PREDICTED,
    Contender,
    Contest,
    Row,
    Work,
    arguments,
    clock,
    compared,
    hold,
    timed,
)
from networks import GPT2
from torchstrategy.testing import simulate_devices, virtual_time

SMALL, LARGE = 64, 2048  # widths: the CPU is what a step waits for, or the device
LAYERS, WIDE = 24, 2048  # a model of 400 MB
LINK_BAR = 1 / 0.9
LINK, SLOW_LINK = "the link, up and down", "the link, memory that is not pinned"
FSDP = "FSDP2, CPUOffloadPolicy"
IN_CONTEXT = "plain, within torch.device"
Batch = tuple[torch.Tensor, torch.Tensor]


class Training(NamedTuple):
    """A step, and the parameters that it trains."""

    step: Work
    parameters: Sequence[torch.Tensor]


def model(width: int, layers: int = 5) -> nn.Sequential:
    """Linear layers and activations in turns."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    )


def check_alike(trainings: Mapping[str, Training]) -> None:
    """Says which trainings change parameters otherwise than the first, if any do."""
    if next(iter(trainings.values())).parameters[0].device.type == "sim":
        return  # only shapes are computed, and no parameters
    changes = {name: change(training) for name, training in trainings.items()}
    first, expected = next(iter(changes.items()))
    for name, found in changes.items():
        error = float((found - expected).norm() / expected.norm())
        if not error < 0.01:
            note(
                f"{name} is not the same training as {first}: what two steps change "
                f"differs by {error:.0%}."
            )


def change(training: Training) -> torch.Tensor:
    """What two steps make of the parameters."""
    before = flat(training.parameters)
    training.step()
    training.step()
    return flat(training.parameters) - before


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All numbers, on the CPU."""
    return torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors])


def note(text: str) -> None:
    """Says something beside the table."""
    print(text, file=sys.stderr, flush=True)


# One device


def plain(device: torch.device, net: nn.Module, batch: Batch) -> Training:
    """The loop as anybody writes it."""
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x, y = batch

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()

    return Training(step, list(net.parameters()))


def in_device_context(device: torch.device, training: Training) -> Training:
    """The same training, whose step has the device as its default device.

    Torch asks a function mode at each call.
    """

    def step() -> None:
        with device:
            training.step()

    return Training(step, training.parameters)


def run_by(strategy: torchstrategy.Strategy, net: nn.Module, batch: Batch) -> Training:
    """The same step, run by a strategy."""
    strategy.distribute_module(net)
    optimizer = strategy.distribute_optimizer(torch.optim.SGD(net.parameters(), lr=0.5))

    def step(batch: Batch) -> None:
        x, y = batch
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()

    (dealt,) = strategy.experimental_distribute_dataset([batch])
    return Training(lambda: strategy.run(step, args=(dealt,)), list(net.parameters()))


def one_device(
    device: torch.device, rounds: int, sizes: Sequence[int] = (SMALL, LARGE)
) -> Iterator[Row]:
    """OneDeviceStrategy against the plain loop, batches already on the device."""
    for width in sizes:
        batch = (
            torch.randn(width, width, device=device),
            torch.randn(width, width, device=device),
        )
        trainings = {
            "plain": plain(device, model(width), batch),
            IN_CONTEXT: in_device_context(device, plain(device, model(width), batch)),
            "OneDevice": run_by(
                torchstrategy.OneDeviceStrategy(device), model(width), batch
            ),
        }
        check_alike(trainings)
        measures = {
            name: timed(training.step, 50, clock(device))
            for name, training in trainings.items()
        }
        contenders = {
            "plain": Contender(measures["plain"]),
            IN_CONTEXT: Contender(measures[IN_CONTEXT], ("plain",)),
            "OneDevice": Contender(measures["OneDevice"], (IN_CONTEXT,), 1.02),
        }
        yield from compared(f"one device, 5 layers of {width}", contenders, rounds)


# Replicas that share it


def piece_by_piece(
    device: torch.device, net: nn.Module, replicas: int, batch: Batch
) -> Training:
    """Each piece forward and backward, weighed, one after another."""
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    pieces = list(zip(*(tensor.chunk(replicas) for tensor in batch), strict=True))

    def step() -> None:
        optimizer.zero_grad()
        for x, y in pieces:
            (F.mse_loss(net(x), y) * (len(x) / len(batch[0]))).backward()
        optimizer.step()

    return Training(step, list(net.parameters()))


def data_parallel(
    device: torch.device, net: nn.Module, replicas: int, batch: Batch
) -> tuple[str, Training]:
    """`nn.DataParallel` with the device listed several times.

    If torch refuses that, the part of it that it allows.
    """
    net.to(device)
    x, y = batch
    whole = nn.DataParallel(net, device_ids=[device.index or 0] * replicas)
    name, forward = "DataParallel", whole.forward
    try:
        whole(x).sum().backward()
    except (RuntimeError, ValueError) as error:
        note(
            "DataParallel refuses one device several times, so its threads are "
            f"measured alone: {error}"
        )
        name, forward = (
            "parallel_apply",
            lambda x: torch.cat(parallel_apply([net] * replicas, x.chunk(replicas))),
        )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(forward(x), y).backward()
        optimizer.step()

    return name, Training(step, list(net.parameters()))


def sharing(
    device: torch.device, rounds: int, sizes: Sequence[int] = (SMALL, LARGE)
) -> Iterator[Row]:
    """CentralStorage with several replicas on one device, against `nn.DataParallel`."""
    for width in sizes:
        batch = (
            torch.randn(width, width, device=device),
            torch.randn(width, width, device=device),
        )
        for replicas in (2, 4):
            strategy = torchstrategy.CentralStorageStrategy([device] * replicas, device)
            peer, trained_by_peer = data_parallel(device, model(width), replicas, batch)
            trainings = {
                "by hand": piece_by_piece(device, model(width), replicas, batch),
                peer: trained_by_peer,
                "Central": run_by(strategy, model(width), batch),
            }
            check_alike(trainings)
            measures = {
                name: timed(training.step, 10, clock(device))
                for name, training in trainings.items()
            }
            contenders = {
                "by hand": Contender(measures["by hand"]),
                peer: Contender(measures[peer]),
                "Central": Contender(measures["Central"], (peer,), 1.0),
            }
            yield from compared(
                f"{replicas} replicas, 5 layers of {width}", contenders, rounds
            )


# Parameters in the CPU's memory


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in memory that the device copies from without waiting for the CPU."""
    return tensor if device.type == "cpu" else tensor.pin_memory()


def linears(layers: int, width: int) -> nn.Sequential:
    """Layers that are large for what they compute, and that keep numbers' size."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    return net


def the_link(device: torch.device, net: nn.Module) -> Work:
    """All parameters to the device and as many bytes back, and no more."""
    here = [parameter.detach() for parameter in net.parameters()]
    there = [torch.empty_like(tensor, device=device) for tensor in here]

    def copy() -> None:
        for target, source in (
            *zip(there, here, strict=True),
            *zip(here, there, strict=True),
        ):
            target.copy_(source, non_blocking=True)

    return copy


def layer_by_layer(device: torch.device, net: nn.Sequential, x: torch.Tensor) -> Work:
    """By hand: a layer waits for its parameters, and each gradient leaves at once.

    It computes when they are there.
    """
    lanes: Any = torch.get_device_module(device)
    here = [
        pinned(parameter.detach().clone(), device) for parameter in net.parameters()
    ]
    gradients = [pinned(torch.empty_like(tensor), device) for tensor in here]
    net.to(device)
    up, down = lanes.Stream(), lanes.Stream()

    def leave(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        assert parameter.grad is not None
        down.wait_stream(lanes.current_stream())
        with lanes.stream(down):
            gradient.copy_(parameter.grad, non_blocking=True)
        if device.type != "cpu":
            parameter.grad.record_stream(down)
        parameter.grad = None

    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.register_post_accumulate_grad_hook(
            lambda p, gradient=gradient: leave(p, gradient)
        )

    def step() -> None:
        current, arrived = lanes.current_stream(), []
        up.wait_stream(current)
        with lanes.stream(up):
            for parameter, source in zip(net.parameters(), here, strict=True):
                parameter.data.copy_(source, non_blocking=True)
                arrived.append(lanes.Event())
                arrived[-1].record(up)
        result = x
        for layer, is_there in zip(net, arrived, strict=True):
            is_there.wait(current)
            result = layer(result)
        result.square().mean().backward()

    return step


def central(
    device: torch.device, net: nn.Module, loss: Callable[[nn.Module], torch.Tensor]
) -> Work:
    """CentralStorage: changed parameters go to the device, and gradients come back."""
    strategy = torchstrategy.CentralStorageStrategy([device], "cpu")
    strategy.distribute_module(net)
    parameters = list(net.parameters())

    def backward() -> None:
        loss(net).backward()

    def step() -> None:
        net.zero_grad()
        increment_version(parameters)  # as an optimizer does
        strategy.run(backward)

    return step


def in_pinned_memory(net: nn.Module, device: torch.device) -> nn.Module:
    """The same module, with parameters in memory from which a device copies by itself.

    It copies without waiting for the CPU.
    """
    for parameter in net.parameters():
        parameter.data = pinned(parameter.data, device)
    return net


def central_memory(
    device: torch.device,
    rounds: int,
    layers: int = LAYERS,
    width: int = WIDE,
    rows: int = 256,
) -> Iterator[Row]:
    """Parameters in the CPU's memory and compute on the device.

    The link between them is what limits a step.
    """
    x = torch.randn(rows, width, device=device)
    by_hand = layer_by_layer(device, linears(layers, width), x)
    size = layers * width * width * 4 / 1e6

    def loss(net: nn.Module) -> torch.Tensor:
        return net(x).square().mean()

    contest = f"parameters of {size:,.0f} MB in the CPU's memory"
    yield from beside_the_link(
        contest, device, rounds, lambda: linears(layers, width), loss, by_hand
    )


def transformer(width: int, layers: int) -> nn.Module:
    """GPT-2 in the CPU's memory.

    Nobody looks at its numbers, so they take no time to make.
    """
    with torch.device("meta"):
        net = GPT2(is_fused=True, width=width, layers=layers)
    zeros = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in net.state_dict().items()
    }
    net.load_state_dict(zeros, assign=True)
    return net


def central_transformer(
    device: torch.device,
    rounds: int,
    layers: int = 24,
    width: int = 1024,
    tokens: int = 512,
) -> Iterator[Row]:
    """The same with GPT-2 355M.

    It has many small parameters, computes in bfloat16 and uses one parameter twice.
    """
    words = torch.zeros(1, tokens, dtype=torch.int64, device=device)

    def loss(net: nn.Module) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(net(words).flatten(0, -2), words.flatten())

    def net() -> nn.Module:
        return transformer(width, layers)

    size = sum(parameter.nbytes for parameter in net().parameters()) / 1e6
    contest = f"GPT-2 of {size:,.0f} MB in the CPU's memory, {tokens} tokens"
    yield from beside_the_link(contest, device, rounds, net, loss)


def beside_the_link(
    contest: str,
    device: torch.device,
    rounds: int,
    net: Callable[[], nn.Module],
    loss: Callable[[nn.Module], torch.Tensor],
    by_hand: Work | None = None,
) -> list[Row]:
    """CentralStorage beside what the link takes for as many bytes.

    The bytes lie in pinned memory, and in other memory.
    """
    works = {
        LINK: (the_link(device, in_pinned_memory(net(), device)), ""),
        "Central, in pinned memory": (
            central(device, in_pinned_memory(net(), device), loss),
            LINK,
        ),
        SLOW_LINK: (the_link(device, net()), ""),
        "Central, parameters on the CPU": (central(device, net(), loss), SLOW_LINK),
    }
    if by_hand is not None:
        works["by hand, layer by layer"] = by_hand, LINK
    contenders = {
        name: Contender(
            timed(work, 3, clock(device)), (link,) if link else (), LINK_BAR
        )
        for name, (work, link) in works.items()
    }
    return compared(contest, contenders, rounds)


# Where the optimizer runs


@contextmanager
def all_cores() -> Iterator[None]:
    """A block in which an operation on the CPU uses all cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def adam_in(
    strategy: torchstrategy.Strategy, net: nn.Module, x: torch.Tensor
) -> Training:
    """A whole step with Adam, which runs where the strategy has the parameters."""
    strategy.distribute_module(net)
    optimizer = strategy.distribute_optimizer(
        torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    )

    def train_step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return Training(lambda: strategy.run(train_step), list(net.parameters()))


def adam_alone(net: nn.Module) -> Work:
    """Adam where the parameters are, on gradients that are there."""
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.Adam(net.parameters(), lr=1e-3, fused=True).step


def offloaded_by_fsdp(
    device: torch.device, net: nn.Sequential, x: torch.Tensor
) -> Training:
    """A whole step with FSDP2 on one rank, with Adam on the CPU.

    FSDP2 keeps parameters and gradients there, too.
    """
    mesh = init_device_mesh(device.type, (1,))
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for part in (*net, net):
        fully_shard(part, mesh=mesh, offload_policy=offload)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return Training(step, [parameter.to_local() for parameter in net.parameters()])  # type: ignore[attr-defined]


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def place_of_optimizer(
    device: torch.device,
    rounds: int,
    layers: int = LAYERS,
    width: int = WIDE,
    rows: int = 256,
) -> Iterator[Row]:
    """Adam on all cores of the CPU, against Adam on the device and against FSDP2."""

    def net() -> nn.Sequential:
        return linears(layers, width)

    def against(contest: str, name: str, works: Mapping[str, Work]) -> list[Row]:
        measures = {name: timed(work, 3, clock(device)) for name, work in works.items()}
        contenders = {
            key: Contender(measure, () if key == name else (name,))
            for key, measure in measures.items()
        }
        size = (
            f"{layers * width * width * 4 / 1e6:,.0f} MB, {torch.get_num_threads()} "
            "threads"
        )
        return compared(f"{contest}, {size}", contenders, rounds)

    with all_cores():
        x = torch.randn(rows, width, device=device)
        here, there = "Adam on the CPU", "Adam on the device"
        alone = {
            there: adam_alone(net().to(device)),
            here: adam_alone(in_pinned_memory(net(), device)),
        }
        yield from against("Adam alone", there, alone)
        on_cpu = adam_in(
            torchstrategy.CentralStorageStrategy([device], "cpu"),
            in_pinned_memory(net(), device),
            x,
        )
        on_device = adam_in(torchstrategy.OneDeviceStrategy(device), net(), x)
        check_alike({there: on_device, here: on_cpu})
        yield from against(
            "a whole step", there, {there: on_device.step, here: on_cpu.step}
        )
        try:
            with one_rank(device):
                peer = offloaded_by_fsdp(device, net(), x)
                check_alike(
                    {
                        here: adam_in(
                            torchstrategy.OneDeviceStrategy(device), net(), x
                        ),
                        FSDP: peer,
                    }
                )
                yield from against(
                    "a whole step", FSDP, {FSDP: peer.step, here: on_cpu.step}
                )
        except Exception as error:
            note(
                f"{FSDP} is left out, since it fails here: {type(error).__name__}: "
                f"{error}"
            )


OF_ONE_GPU = (
    one_device,
    sharing,
    central_memory,
    central_transformer,
    place_of_optimizer,
)


def on_gpu(contest: Callable[[torch.device, int], Iterator[Row]]) -> Contest:
    """A contest that is held on the GPU; where there is none, it has no rows."""

    def held(rounds: int) -> Iterator[Row]:
        if torch.cuda.is_available():
            yield from contest(torch.device("cuda", 0), rounds)

    return held


class InTurns(threading.Thread):
    """A thread that has ended when it has started."""

    def start(self) -> None:
        super().start()
        self.join()


@contextmanager
def threads_of_torch_in_turns() -> Iterator[None]:
    """A block in which the threads of `nn.DataParallel` run one after the other.

    So two runs are the same.

    They share Python's lock, and so they share a clock in virtual time: together they
    take as long as in turns.
    """
    module: Any = sys.modules["torch.nn.parallel.parallel_apply"]
    before = module.threading
    module.threading = SimpleNamespace(Thread=InTurns, Lock=threading.Lock)
    try:
        yield
    finally:
        module.threading = before


def in_virtual_time(
    contest: Callable[[torch.device, int], Iterator[Row]],
    gpu: str,
    timelines: Path | None = None,
) -> Contest:
    """A contest whose clock is virtual.

    One round says what all would; `compared` warms up for two.
    """

    def held(rounds: int) -> Iterator[Row]:
        with (
            threads_of_torch_in_turns(),
            virtual_time(gpu, shapes_only=True, program_clock=True) as trace,
        ):
            yield from contest(torch.device("sim", 0), 2)
        if timelines is not None:
            timelines.mkdir(parents=True, exist_ok=True)
            for kind in ("svg", "json"):
                trace.save(timelines / f"{contest.__name__}.{kind}")

    return held


CONTESTS = tuple(map(on_gpu, OF_ONE_GPU))

if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--simulated",
        metavar="GPU",
        help="predict the times on such a GPU: H100, A100, ...",
    )
    parser.add_argument(
        "--timelines",
        type=Path,
        metavar="FOLDER",
        help="where to write what happens in each contest",
    )
    told = parser.parse_args()
    if told.simulated:
        simulate_devices(1)
        contests = [
            in_virtual_time(contest, told.simulated, told.timelines)
            for contest in OF_ONE_GPU
        ]
        hold(contests, "", told, PREDICTED)
    elif torch.cuda.is_available():
        hold(CONTESTS, "", told)
    else:
        print("There is no GPU here, so nothing is measured on one.")
