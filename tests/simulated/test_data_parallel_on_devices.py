"""torchstrategy.DataParallel on devices, next to torch.nn.DataParallel.

Both have the same devices, which are their own.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from problems import assert_close, close, data, gradients, mlp, parameters, sgd
from torchstrategy.testing import count_traffic, cuda_alias, record_streams

DEVICES = [torch.device("sim", index) for index in range(4)]
CPU = torch.device("cpu")
PARALLELS: list[Callable[..., Any]] = [nn.DataParallel, torchstrategy.DataParallel]


@pytest.mark.parametrize(
    "device_ids",
    [None, [0], [0, 1], [3, 1, 2], ["sim:2", "sim:0"], [torch.device("sim:1"), 0]],
)
def test_it_trains_as_torchs_does(device_ids: list[Any] | None) -> None:
    first = (
        torch.device("sim", 0)
        if device_ids is None
        else torchstrategy.DataParallel(mlp(), device_ids).device_ids[0]
    )
    torch.manual_seed(0)
    ours = mlp().to(first)
    theirs = copy.deepcopy(ours)
    names = (
        None
        if device_ids is None
        else [torch.device("sim", i) if isinstance(i, int) else i for i in device_ids]
    )
    trained = [
        (nn.DataParallel(theirs, names), theirs),
        (torchstrategy.DataParallel(ours, device_ids), ours),
    ]
    optimizers = [sgd(theirs), sgd(ours)]
    for step, rows in enumerate([9, 3, 1]):
        x, y = data(rows, seed=step)
        outputs = []
        for (model, _), optimizer in zip(trained, optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(model(x))
            F.mse_loss(outputs[-1], y.to(first)).backward()
            optimizer.step()
        assert outputs[0].device == outputs[1].device
        close(*outputs)
        assert_close(
            gradients(ours), gradients(theirs), f"gradient, step {step}", 1e-12
        )
        assert_close(
            parameters(ours), parameters(theirs), f"parameter, step {step}", 1e-12
        )


def test_attributes_are_what_torchs_are() -> None:
    for device_ids, output_device in (
        (None, None),
        ([2, 1], 3),
        ([torch.device("sim:1"), 0], torch.device("sim:0")),
    ):
        ours, theirs = (
            parallel(mlp(), device_ids, output_device, dim=1)
            for parallel in (torchstrategy.DataParallel, nn.DataParallel)
        )
        assert (ours.device_ids, ours.output_device, ours.dim) == (
            theirs.device_ids,
            theirs.output_device,
            theirs.dim,
        )


def test_each_replica_computes_its_rows_on_its_device() -> None:
    seen: list[tuple[int | None, list[float]]] = []

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.device == self.weight.device
            seen.append((x.device.index, x[:, 0].tolist()))
            return super().forward(x)

    model = torchstrategy.DataParallel(Noting(2, 2).to("sim:0"), [0, 1, 2, 3])
    model(torch.arange(18.0).view(9, 2))
    assert sorted(seen) == [(0, [0, 2, 4]), (1, [6, 8, 10]), (2, [12, 14, 16])]


@pytest.mark.parametrize("where", [CPU, DEVICES[1]])
def test_a_module_on_another_device_is_refused_by_both_and_named_by_ours(
    where: torch.device,
) -> None:
    for parallel in PARALLELS:
        model = parallel(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to("sim:0"), [0, 1]
        )
        model.module[1].to(where)
        with pytest.raises(
            RuntimeError, match=f"on device: {where}|Sequential.1.weight is on {where}"
        ):
            model(torch.ones(4, 2))
        model.to("sim:0")
        assert model(torch.ones(4, 2)).shape == (4, 2)


def test_with_one_device_the_module_is_moved_there_as_torch_does() -> None:
    for parallel in PARALLELS:
        model = parallel(nn.Linear(2, 2), [1])
        assert model.module.weight.device == DEVICES[1]
        assert model(torch.ones(2, 2)).device == DEVICES[1]


def test_a_script_for_cuda_changes_in_one_line() -> None:
    losses = []
    for parallel in PARALLELS:
        torch.manual_seed(0)
        with cuda_alias():
            model = parallel(mlp().cuda(), device_ids=[0, 1, 2])
            optimizer = sgd(model)
            for step in range(3):
                x, y = (tensor.cuda() for tensor in data(7, seed=step))
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            losses.append(loss)
    close(*losses)


def test_a_forward_copies_rows_and_outputs_and_parameters_only_when_they_changed() -> (
    None
):
    model = torchstrategy.DataParallel(mlp().to("sim:0"), [0, 1])
    optimizer, x = sgd(model), data(4)[0].to("sim:0")
    model(x).sum().backward()
    optimizer.step()
    size = sum(parameter.nbytes for parameter in model.parameters())
    there, back = (DEVICES[0], DEVICES[1]), (DEVICES[1], DEVICES[0])
    rows, outputs = x.nbytes // 2, 2 * 2 * 8
    for expected in ({there: size + rows, back: outputs}, {there: rows, back: outputs}):
        with torch.no_grad(), count_traffic() as traffic:
            model(x)
        assert traffic.bytes_by_route == expected
    with count_traffic() as traffic:
        model(x).sum().backward()
    # And gradients.
    assert traffic.bytes_by_route == {there: rows + outputs, back: outputs + size}


def test_its_copies_are_ordered_with_what_reads_them() -> None:
    model = torchstrategy.DataParallel(
        nn.Sequential(mlp(), nn.BatchNorm1d(2, dtype=torch.float64)).to("sim:0"),
        [0, 1, 2],
    )
    optimizer = sgd(model)
    with record_streams():
        for step in range(2):
            x, y = data(9, seed=step)
            optimizer.zero_grad()
            F.mse_loss(model(x.pin_memory()), y.to("sim:0")).backward()
            optimizer.step()


def peaks(step: Callable[[], object]) -> list[int]:
    """How many bytes each device holds at most in a step, beyond those before."""
    before = []
    for index in range(4):
        torch.sim.reset_peak_memory_stats(index)
        before.append(torch.sim.memory_allocated(index))
    step()
    return [
        torch.sim.max_memory_allocated(index) - held
        for index, held in enumerate(before)
    ]


def test_outputs_and_loss_are_on_one_device_and_a_step_keeps_them_apart() -> None:
    x, y = torch.ones(400, 2), torch.zeros(400, dtype=torch.int64, device="sim:0")
    for parallel in PARALLELS:
        model = parallel(nn.Linear(2, 500).to("sim:0"), [0, 1, 2, 3])
        model(x)
        first, *others = peaks(
            lambda model=model: F.cross_entropy(model(x), y).backward()
        )
        assert first > 3 * max(others)
    module = nn.Linear(2, 500)
    strategy = torchstrategy.CentralStorageStrategy(DEVICES, "sim:0")
    strategy.distribute_module(module)
    (batch,) = strategy.experimental_distribute_dataset([(x, y.cpu())])

    def step(batch: Any) -> None:
        F.cross_entropy(module(batch[0]), batch[1]).backward()

    strategy.run(step, args=(batch,))
    used = peaks(lambda: strategy.run(step, args=(batch,)))
    assert max(used) < 1.2 * min(used)


def test_the_memory_of_the_replicas_is_free_when_it_is_gone() -> None:
    module = nn.Linear(1000, 100).to("sim:0")
    gc.collect()  # what other tests have left
    others = set(threading.enumerate())
    before = [torch.sim.memory_allocated(index) for index in range(4)]
    model = torchstrategy.DataParallel(module, [0, 1, 2, 3])
    model(torch.ones(4, 1000))
    held = [torch.sim.memory_allocated(index) for index in range(4)]
    assert (
        min(now - then for now, then in zip(held[1:], before[1:], strict=True))
        >= module.weight.nbytes
    )
    threads = set(threading.enumerate()) - others
    del model
    for thread in threads:
        thread.join(timeout=10)  # one may still be leaving the step
    gc.collect()
    assert [torch.sim.memory_allocated(index) for index in range(4)] == before


def test_gradients_are_on_their_parameters_device_however_backward_runs() -> None:
    for output_device in (None, "cpu", 3):
        model = torchstrategy.DataParallel(mlp().to("sim:1"), [1, 2, 3], output_device)
        with torch.autograd.set_multithreading_enabled(False):
            model(data(7)[0]).sum().backward()
        assert {p.grad.device for p in model.parameters()} == {DEVICES[1]}
