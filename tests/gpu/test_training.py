"""Each strategy with all replicas on one device, against plain PyTorch there.

The device is a GPU if there is one.

Where no GPU is, the tests run on simulated devices; with ON=cpu they run on the CPU.
Some need CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchstrategy
from gpu.trainings import (
    HAS_CUDA,
    IN_ONE_PRECISION,
    ON,
    ON_SEVERAL_DEVICES,
    STRATEGIES,
    TWO,
    Training,
    compiled,
    flat,
    mlp,
    normalised,
    normalised_in_sync,
)
from torchstrategy.testing import DeviceProfile, virtual_time

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        ON is None, reason="needs a GPU, or ON=cpu, or --simulate-devices=5"
    ),
]
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs CUDA")
needs_an_accelerator = pytest.mark.skipif(
    ON is None or ON.type == "cpu", reason="needs CUDA, or simulated devices"
)
needs_two_devices = pytest.mark.skipif(
    not TWO, reason="needs two CUDA devices, or simulated ones"
)

ALONE = ("one device", "central, parameters on the CPU")
TRAININGS = IN_ONE_PRECISION | {
    "compiled": Training(make=compiled),
    "half precision": Training(autocast=torch.bfloat16),
    "scaled": Training(autocast=torch.bfloat16, scales=True, clips=True, runs=8),
    "scaled, float16": Training(autocast=torch.float16, scales=True, runs=8),
}


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_training_has_the_numbers_of_plain_torch(kind: str, name: str) -> None:
    """No warning is allowed.

    Torch warns at each forward of recurrent layers whose weights are in several pieces.
    """
    compare(TRAININGS[name], STRATEGIES[kind])


@needs_two_devices
@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("kind", ON_SEVERAL_DEVICES)
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_training_on_several_devices_has_the_numbers_of_plain_torch(
    kind: str, name: str
) -> None:
    compare(TRAININGS[name], ON_SEVERAL_DEVICES[kind])


@pytest.mark.parametrize("kind", STRATEGIES | ON_SEVERAL_DEVICES)
def test_synchronized_batch_norm_has_the_numbers_of_plain_torch(kind: str) -> None:
    if kind in ON_SEVERAL_DEVICES and not TWO:
        pytest.skip("needs two CUDA devices, or simulated ones")
    found = Training(make=normalised_in_sync).trained(
        (STRATEGIES | ON_SEVERAL_DEVICES)[kind]()
    )
    torch.testing.assert_close(
        found, Training(make=normalised).trained(None), rtol=1e-4, atol=1e-5
    )


def compare(training: Training, make: Callable[[], torchstrategy.Strategy]) -> None:
    # Half of the rows are added up in another order, of which half precision shows
    # more.
    close = 1e-6 if training.autocast is None else 0.02
    found, expected = training.trained(make()), training.trained(None)
    torch.testing.assert_close(found, expected, rtol=close, atol=close)


@pytest.mark.parametrize("kind", ALONE)
def test_batch_norm_in_one_replica_has_the_numbers_of_plain_torch(kind: str) -> None:
    training = Training(make=normalised)
    torch.testing.assert_close(
        training.trained(STRATEGIES[kind]()),
        training.trained(None),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("kind", ["central, two replicas", "mirrored, two replicas"])
def test_an_average_that_a_step_writes_is_refused(kind: str) -> None:
    """CUDA's kernel does not count what it writes, and nobody saw it."""
    strategy = STRATEGIES[kind]()
    model = mlp().to(ON)
    strategy.distribute_module(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    with pytest.raises(RuntimeError, match="was written in place in a replica"):
        strategy.run(lambda: average.update_parameters(model))


@contextlib.contextmanager
def counting(found: list[int]) -> Iterator[None]:
    """A block in which torch warns whenever the host waits for the GPU.

    Simulated devices count that themselves.
    """
    if not HAS_CUDA:
        with virtual_time("H100") as trace:
            yield
        found.append(len(trace.synchronizations))
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.append(
        sum(str(one.message).startswith("called a synchronizing") for one in seen)
    )


WAITING = {
    "usual": TRAININGS["usual"],
    "clipped": TRAININGS["clipped"],
    "scaled": replace(TRAININGS["scaled"], runs=4),
    "recurrent": TRAININGS["recurrent"],
    "batch norm": Training(make=normalised),
    "synchronized batch norm": Training(make=normalised_in_sync),
}


@needs_an_accelerator
@pytest.mark.parametrize("name", WAITING)
@pytest.mark.parametrize(
    "kind", ["one device", "central, two replicas", "mirrored, two replicas"]
)
def test_a_warm_step_waits_no_more_than_plain_torch_does(kind: str, name: str) -> None:
    found: list[int] = []
    training = replace(WAITING[name], around_last_step=lambda: counting(found))
    training.trained(STRATEGIES[kind]())
    training.trained(None)
    ours, plain = found
    assert ours <= plain


@contextlib.contextmanager
def limited() -> Iterator[int]:
    """A block in which the device has very little memory.

    A tensor of the number of elements has no place there.
    """
    if HAS_CUDA:
        yield 2**45
        return
    with virtual_time(replace(DeviceProfile.named("H100"), memory=2**26)):
        yield 2**26


@needs_an_accelerator
@pytest.mark.parametrize("kind", STRATEGIES)
def test_where_a_replica_has_no_memory_left_the_error_comes_and_the_next_run_trains(
    kind: str,
) -> None:
    strategy = STRATEGIES[kind]()
    model = mlp().to(strategy.extended.parameter_devices[0])
    strategy.distribute_module(model)
    optimizer = strategy.distribute_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1)
    )

    def step(is_too_large: bool) -> None:
        optimizer.zero_grad()
        F.mse_loss(
            model(torch.ones(2, 32, device=ON)), torch.zeros(2, 1, device=ON)
        ).backward()
        context = torchstrategy.get_replica_context()
        if (
            is_too_large
            and context is not None
            and context.replica_id_in_sync_group == 0
        ):
            torch.empty(too_many, device=ON)
        optimizer.step()

    strategy.run(step, args=(False,))
    gc.collect()
    before, in_use = flat(model), torch.accelerator.memory_allocated()
    with limited() as too_many, pytest.raises(torch.OutOfMemoryError):
        strategy.run(step, args=(True,))
    strategy.run(step, args=(False,))
    gc.collect()
    assert not torch.equal(flat(model), before)
    assert torch.accelerator.memory_allocated() <= in_use + 2**20


@needs_cuda
def test_a_run_can_be_captured_in_a_graph() -> None:
    strategy = STRATEGIES["one device"]()
    model = mlp().to(ON)
    strategy.distribute_module(model)
    rows = torch.ones(4, 32, device=ON)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        strategy.run(model, args=(rows,))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured: Any = strategy.run(model, args=(rows,))
    rows.fill_(2.0)
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(captured, model(rows))


@needs_cuda
@pytest.mark.parametrize("kind", STRATEGIES)
def test_graphs_of_the_compiler_are_right_or_refused_by_name(kind: str) -> None:
    """They have their memory again in each step.

    Torch refuses to read what a later step has overwritten.
    """

    def make() -> nn.Module:
        model = mlp()
        model.compile(mode="reduce-overhead")
        return model

    expected = Training(runs=6).trained(None)
    try:
        found = Training(make=make, runs=6).trained(STRATEGIES[kind]())
    except RuntimeError as error:
        assert "CUDAGraphs" in str(error)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(
    not (HAS_CUDA or (ON is not None and ON.type == "cpu")),
    reason="needs CUDA, or ON=cpu",
)
def test_a_group_of_one_process_is_enough() -> None:
    dist.init_process_group(
        "nccl" if HAS_CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        strategy = torchstrategy.MultiWorkerMirroredStrategy(
            process_group=dist.group.WORLD, devices=[ON]
        )
        torch.testing.assert_close(
            Training().trained(strategy), Training().trained(None)
        )
    finally:
        dist.destroy_process_group()


@needs_cuda
@pytest.mark.parametrize(
    "make", [lambda: torchstrategy.MirroredStrategy([ON, ON])], ids=["mirrored"]
)
def test_new_threads_have_a_context(make: Callable[[], torchstrategy.Strategy]) -> None:
    """torch warned of it, once in a process.

    It did at the first product of matrices on a replica's thread.
    """
    strategy, weight = make(), nn.Parameter(torch.ones(8, 8, device=ON))
    for product in strategy.experimental_local_results(
        strategy.run(lambda: (weight @ weight).detach())
    ):
        assert product.sum().item() == 512
