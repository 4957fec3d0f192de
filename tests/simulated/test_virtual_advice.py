"""Advice is what a second prediction finds faster.

It is compared with that of a program which follows the advice.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conditions import for_changes
from torchstrategy.testing import (
    DeviceProfile,
    VirtualTrace,
    run_ranks,
    simulated_devices,
    step,
    virtual_time,
)
from torchstrategy.testing._virtual_time.replay import played

SIM = simulated_devices()
H100 = DeviceProfile.named("H100-SXM")


def step_of(trace: VirtualTrace) -> float:
    return statistics.median(end - start for start, end in pairwise(trace._clock.ends))


def advised(trace: VirtualTrace) -> dict[str, float]:
    """The seconds of a step with each piece of advice, by its first words."""
    return {
        one.write.partition(" (")[0].partition("(")[0]: one.after
        for one in trace._advice()
    }


def train(
    *,
    pinned: bool = False,
    reads: bool = True,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    non_blocking: bool | None = None,
    rows: int = 2000,
    **options: Any,
) -> VirtualTrace:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 4),
    ).to(SIM[0])
    made = optimizer(model.parameters(), **options)
    batch = torch.ones(rows, 512)
    batch = batch.pin_memory() if pinned else batch
    with virtual_time(H100, shapes_only=True) as trace:
        for _ in range(5):
            inputs = batch.to(
                SIM[0], non_blocking=pinned if non_blocking is None else non_blocking
            )
            made.zero_grad()
            loss = model(inputs).mean()
            loss.backward()
            made.step()
            if reads:
                loss.item()
    return trace


def test_streams_events_devices_and_ranks_are_played_again() -> None:
    def main(rank: int) -> None:
        dist.init_process_group("nccl")
        x, side = torch.ones(1000, device=SIM[rank]), torch.Stream(device=SIM[rank])
        for _ in range(3):
            with side:
                dist.all_reduce(x)
                event = side.record_event()
            torch.accelerator.current_stream(SIM[rank]).wait_event(event)
            work = dist.all_reduce(x.mul_(0.5), async_op=True)
            work.wait()
            if rank:
                dist.send(x, 0)
            else:
                dist.recv(x, 1)
            event.synchronize()
            dist.barrier()
            torch.accelerator.synchronize(SIM[rank])
            (x.cpu() + 1).to(SIM[2]).to(SIM[3])
            while not event.query():
                pass
            step()

    with virtual_time(H100) as trace:
        run_ranks(main, 2)
        torch.ones(3, device=SIM[0]).sum().item()
        step()
    assert len(trace._clock.ends) > 2
    assert played(trace._clock.acts, H100) == pytest.approx(
        trace._clock.ends, rel=1e-12
    )


def test_pinned_memory_is_predicted_to_the_digit() -> None:
    trace = train(reads=False, fused=True)
    assert advised(trace)["pinned memory and non_blocking=True"] == pytest.approx(
        step_of(train(reads=False, fused=True, pinned=True)), rel=0.001
    )


def test_a_copy_that_need_not_block_is_told_from_one_that_is_not_pinned() -> None:
    after = advised(train(pinned=True, non_blocking=False, reads=False))[
        "non_blocking=True for copies from pinned memory"
    ]
    assert after == pytest.approx(step_of(train(pinned=True, reads=False)), rel=0.001)


def test_a_number_that_is_not_read_is_predicted() -> None:
    trace = train(pinned=True, fused=True)
    assert advised(trace)["no .item"] == pytest.approx(
        step_of(train(pinned=True, fused=True, reads=False)), rel=0.001
    )


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"foreach": False}),
    ],
)
def test_a_fused_optimizer_is_predicted(
    optimizer: Any, options: dict[str, Any]
) -> None:
    trace = train(pinned=True, reads=False, optimizer=optimizer, **options)
    fused = train(
        pinned=True,
        reads=False,
        optimizer=optimizer,
        **{**options, "foreach": None, "fused": True},
    )
    assert advised(trace)["a fused optimizer"] == pytest.approx(
        step_of(fused), rel=0.03
    )
    assert "a fused optimizer" not in advised(fused)


def test_an_optimizer_that_torch_cannot_fuse_is_left_alone() -> None:
    assert "a fused optimizer" not in advised(train(optimizer=torch.optim.RMSprop))


def convolve(memory_format: torch.memory_format) -> VirtualTrace:
    model: Any = nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
    )
    model = model.to(SIM[0], torch.bfloat16).to(memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    images = torch.ones(512, 16, 64, 64, dtype=torch.bfloat16, device=SIM[0]).to(
        memory_format=memory_format
    )
    with virtual_time(H100, shapes_only=True) as trace:
        for _ in range(4):
            optimizer.zero_grad()
            model(images).mean().backward()
            optimizer.step()
    return trace


def test_channels_last_is_predicted_with_the_images_brought_into_that_order() -> None:
    trace, changed = convolve(torch.contiguous_format), convolve(torch.channels_last)
    after = advised(trace)["channels_last"]
    assert step_of(changed) <= after * 1.001 and after == pytest.approx(
        step_of(changed), rel=0.15
    )
    assert "channels_last" not in advised(changed)


SLOW_TO_BEGIN = dataclasses.replace(
    H100, name="H100s that take long to begin", collective=2e-3
)


def in_buckets(**options: Any) -> VirtualTrace:
    def main(rank: int) -> None:
        dist.init_process_group("nccl")
        torch.accelerator.set_device_index(rank)
        layers = [
            nn.Linear(1024, 1024, bias=False, device=SIM[rank]) for _ in range(24)
        ]
        model = DistributedDataParallel(
            nn.Sequential(*layers), device_ids=[rank], **options
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        inputs = torch.ones(64, 1024, device=SIM[rank])
        for _ in range(4):
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()

    with virtual_time(SLOW_TO_BEGIN, shapes_only=True) as trace:
        run_ranks(main, 2)
    return trace


@for_changes
def test_larger_buckets_are_predicted() -> None:
    trace = in_buckets()
    (found,) = [
        one
        for one in trace._advice()
        if one.write.startswith("DistributedDataParallel(bucket_cap_mb=")
    ]
    size = int(found.write.partition("=")[2].rstrip(")"))
    assert size > 25
    assert found.after == pytest.approx(
        step_of(in_buckets(bucket_cap_mb=size)), rel=0.15
    )


def launched(width: int, reads_within: bool = False) -> VirtualTrace:
    """A program that has to launch twenty layers in each step."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, device=SIM[0]) for _ in range(20)]
    optimizer = torch.optim.SGD(nn.Sequential(*layers).parameters(), lr=0.1, fused=True)
    with virtual_time(H100, shapes_only=True) as trace:
        for _ in range(4):
            rows = torch.ones(512, width, device=SIM[0])
            for layer in layers:
                rows = layer(rows).relu()
                if reads_within and rows.sum().item() > 1e9:
                    break
            optimizer.zero_grad()
            rows.mean().backward()
            optimizer.step()
    return trace


def test_graphs_are_advised_where_the_device_waits_for_the_program() -> None:
    """A step of small layers takes as long as the program takes to launch them.

    With graphs, it launches two.
    """
    trace = launched(64)
    kernels = trace.device(0).busy / 4
    after = advised(trace)["CUDA graphs, if shapes stay"]
    assert step_of(trace) > 3 * after
    # The rows, two graphs, the optimizer, and no other launch.
    assert kernels < after < kernels + 6 * H100.launch


@for_changes
def test_no_graphs_are_advised_where_they_would_gain_nothing_or_cannot_be() -> None:
    assert "CUDA graphs, if shapes stay" not in advised(launched(8192))
    assert "CUDA graphs, if shapes stay" not in advised(launched(64, reads_within=True))


def test_a_tuned_program_is_given_no_advice() -> None:
    trace = train(pinned=True, reads=False, fused=True, rows=200_000)
    assert trace._advice() == [] and "Predicted to be faster" not in trace.report()


def test_a_report_ends_with_what_is_faster_and_both_figures() -> None:
    trace = train()
    found = trace._advice()
    lines = trace.report().splitlines()
    assert [one.after for one in found] == sorted(
        one.after for one in found
    ) and 1 < len(found) <= 5
    assert all(
        one.before == pytest.approx(step_of(trace)) and one.after < 0.99 * one.before
        for one in found
    )
    assert lines[-len(found) - 1] == "Predicted to be faster"
    assert any(
        one.write.startswith(
            "pinned memory and non_blocking=True (test_virtual_advice.py:"
        )
        for one in found
    )
    assert all(
        line.endswith("s a step") and " -> " in line for line in lines[-len(found) :]
    )


def test_a_part_of_a_trace_is_given_none() -> None:
    with virtual_time(H100) as trace:
        trace.mark()
    assert trace.step(0)._advice() == []
