"""Ranks in virtual time: collectives as computed by hand.

What hides under compute, and the memory of each rank.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from test_virtual_timelines import COUNT, PROFILE, US
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from conditions import for_changes
from torchstrategy.testing import (
    RankRecord,
    VirtualTrace,
    record_streams,
    run_ranks,
    virtual_time,
)

RANKS = 2


@pytest.fixture(autouse=True)
def without_garbage() -> Iterator[None]:
    """torch's wrappers of modules are in cycles with their hooks.

    They hold memory that peaks count.
    """
    gc.collect()
    yield
    gc.collect()


Bars = list[tuple[int, str, int, int]]  # device, lane, start and end in microseconds


def all_reduced(rank: int, x: torch.Tensor) -> None:
    for _ in range(rank + 1):
        x.zero_()
    dist.all_reduce(x)
    x.zero_()


def hidden(rank: int, x: torch.Tensor) -> None:
    work = dist.all_reduce(x, async_op=True)
    other.get(rank, x).zero_()
    assert work is not None
    work.wait()
    x.zero_()


def on_the_cpu(rank: int, x: torch.Tensor) -> None:
    dist.broadcast(torch.empty(COUNT), 0)


def behind_a_barrier(rank: int, x: torch.Tensor) -> None:
    if rank:
        x.zero_()
    dist.barrier()


def gathered(rank: int, x: torch.Tensor) -> None:
    dist.all_gather(list(other[rank].chunk(RANKS)), x[: COUNT // RANKS])


def sent(rank: int, x: torch.Tensor) -> None:
    if rank:
        dist.recv(x, 0)
    else:
        dist.send(x, 1)


def after_each_other(rank: int, x: torch.Tensor) -> None:
    works = [
        dist.all_reduce(x, async_op=True),
        dist.all_reduce(other[rank], async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()


other: dict[int, torch.Tensor] = {}  # a second tensor of each rank


class Case(NamedTuple):
    program: Callable[[int, torch.Tensor], None]
    bars: Bars
    ends: tuple[int, int]  # when each rank is at the end of its code


# To call a collective takes 10 us, and to let a stream wait for it 1 us. 100,000 bytes
# take 50 us over a link of 2 GB a second, and every collective 20 us besides. In a ring
# of two ranks, an all_reduce sends all bytes, and an all_gather half of them. An
# operator takes 103 us.
CASES = [
    Case(
        all_reduced,
        [
            (0, "stream 0", 10, 113),
            (1, "stream 0", 10, 113),
            (1, "stream 0", 113, 216),
            (0, "collectives", 216, 286),
            (1, "collectives", 216, 286),
            (0, "stream 0", 286, 389),
            (1, "stream 0", 286, 389),
        ],
        (31, 41),
    ),
    Case(
        hidden,
        [
            *[(rank, "collectives", 10, 80) for rank in range(2)],
            *[(rank, "stream 0", 20, 123) for rank in range(2)],
            *[(rank, "stream 0", 123, 226) for rank in range(2)],
        ],
        (31, 31),
    ),
    # The bytes of the CPU go over 1 GB a second.
    Case(on_the_cpu, [], (130, 130)),
    # Rank 1 calls it at 20, and the work of its device ends at 113.
    Case(
        behind_a_barrier,
        [
            (1, "stream 0", 10, 113),
            *[(rank, "collectives", 113, 133) for rank in range(2)],
        ],
        (133, 133),
    ),
    Case(gathered, [(rank, "collectives", 10, 55) for rank in range(2)], (11, 11)),
    Case(sent, [(0, "messages out", 10, 80), (1, "messages in", 10, 80)], (11, 11)),
    Case(
        after_each_other,
        [
            (rank, "collectives", start, start + 70)
            for rank in range(2)
            for start in (10, 80)
        ],
        (22, 22),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.program.__name__)
@pytest.mark.parametrize(
    "order", [[0, 1], [1, 0]], ids=["first rank first", "last rank first"]
)
def test_a_timeline_of_ranks_is_as_computed_by_hand(
    case: Case, order: list[int]
) -> None:
    tensors = {rank: torch.ones(COUNT, device=f"sim:{rank}") for rank in range(RANKS)}
    other.update(
        {rank: torch.ones(COUNT, device=f"sim:{rank}") for rank in range(RANKS)}
    )
    ends: dict[int, int] = {}

    def main(rank: int) -> None:
        # One of the programs exchanges tensors of the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl")
        case.program(rank, tensors[rank])
        ends[rank] = round(trace._clock.hosts.here().now / US)

    with virtual_time(PROFILE) as trace:
        run_ranks(main, RANKS, order=order)
    found = [
        (span.device, span.lane, round(span.start / US), round(span.end / US))
        for span in trace._clock.spans
        if span.name != "copy_"
    ]
    assert sorted(found) == sorted(case.bars)
    assert (ends[0], ends[1]) == case.ends
    # The program goes on when all ranks have ended.
    assert trace.seconds >= max(ends.values()) * US - 1e-9


def test_ranks_begin_at_once_and_the_program_waits_for_the_last() -> None:
    def main(rank: int) -> None:
        for _ in range(rank + 1):
            torch.zeros(COUNT, device=f"sim:{rank}")

    with virtual_time(PROFILE) as trace:
        run_ranks(main, 3)
        torch.zeros(COUNT, device="sim:3")
    starts = {span.device: span.start for span in reversed(trace._clock.spans)}
    assert starts[0] == starts[1] == starts[2] and starts[3] > 3 * PROFILE.launch


# Programs

WIDTH, LAYERS, STEPS = 2048, 6, 3


def make_model(rank: int) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(f"sim:{rank}"):
        return nn.Sequential(
            *[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        )


def steps_of(model: nn.Module, rank: int, trace: VirtualTrace) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(4096, WIDTH, device=f"sim:{rank}")
    for _ in range(STEPS):
        torch.accelerator.synchronize()
        trace.mark()
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()


def ddp(rank: int, trace: VirtualTrace) -> None:
    dist.init_process_group("nccl")
    steps_of(DistributedDataParallel(make_model(rank), device_ids=[rank]), rank, trace)


def fsdp(rank: int, trace: VirtualTrace) -> None:
    mesh = init_device_mesh("sim", (int(os.environ["WORLD_SIZE"]),))
    model: Any = make_model(rank)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    steps_of(fully_shard(model, mesh=mesh), rank, trace)


def timed(
    program: Callable[[int, VirtualTrace], None], peer: float = 250.0, n: int = RANKS
) -> Any:
    gc.collect()
    profile = replace(virtual_profile(), peer=peer)
    with virtual_time(profile, shapes_only=True) as trace, record_streams():
        _, record = run_ranks(program, n, args=(trace,))
    return trace, record


def virtual_profile() -> Any:
    from torchstrategy.testing import DeviceProfile

    return DeviceProfile.named("A100")


PARAMETERS = LAYERS * WIDTH * WIDTH * 4  # bytes


@for_changes
@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
def test_what_ddp_sends_hides_under_its_backward_unless_the_link_is_slow() -> None:
    fast, record = timed(ddp)
    assert record.bytes["all_reduce"] == STEPS * PARAMETERS
    alone, _ = timed(ddp, n=1)
    slow, _ = timed(ddp, peer=5.0)
    # Who receives the model does not keep it twice. Other tests may have left small
    # tensors on a device.
    assert fast.device(0).peak_bytes == pytest.approx(
        fast.device(1).peak_bytes, abs=PARAMETERS / 100
    )
    last = fast.step(-1)
    assert last.overlap("collective", "compute") > 0.7
    assert last.seconds < 1.1 * alone.step(-1).seconds
    # A ring of two ranks sends all bytes over each link. Backward hides a part of it.
    sends = PARAMETERS / 5e9
    assert slow.step(-1).device(0).communicating == pytest.approx(sends, rel=0.05)
    assert sends < slow.step(-1).seconds < sends + alone.step(-1).seconds


@for_changes
@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
def test_fsdp_gathers_twice_scatters_once_and_holds_less() -> None:
    whole, _ = timed(ddp, n=4)
    sharded, record = timed(fsdp, n=4)
    kinds = record.bytes
    assert kinds["reduce_scatter"] == STEPS * PARAMETERS
    assert STEPS * PARAMETERS < kinds["all_gather"] <= 2 * STEPS * PARAMETERS
    assert (
        sharded.step(-1).device(0).peak_bytes
        < 0.8 * whole.step(-1).device(0).peak_bytes
    )
    assert (
        sharded.step(-1).device(1).peak_bytes
        < 0.8 * whole.step(-1).device(1).peak_bytes
    )
    assert 0 < sharded.step(-1).overlap("collective", "compute") <= 1
    assert "of collectives" in sharded.report()


@for_changes
@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
@pytest.mark.parametrize("program", [ddp, pytest.param(fsdp, marks=for_changes)])
def test_two_runs_of_ranks_take_the_same_time(
    program: Callable[[int, VirtualTrace], None],
) -> None:
    one, other = (timed(program)[0]._clock for _ in range(2))
    # Streams are numbered through all runs of a process; the lane is the stream's
    # number in this run.
    for ours, theirs in itertools.zip_longest(one.spans, other.spans):
        assert ours._replace(stream=None) == theirs._replace(stream=None)
    assert one.synchronizations == other.synchronizations


def test_numbers_of_ranks_are_true_in_virtual_time_and_small_for_shapes_only() -> None:
    def main(rank: int) -> tuple[list[float], int]:
        dist.init_process_group("nccl")
        x = torch.full((3,), float(rank), device=f"sim:{rank}")
        dist.all_reduce(x)
        large = torch.ones(100_000, device=f"sim:{rank}")
        dist.all_reduce(large)
        return x.tolist(), len(large)

    for shapes_only in (False, True):
        with virtual_time("H100", shapes_only), record_streams() as record:
            results, told = run_ranks(main, 3)
        assert results == [([3.0] * 3, 100_000)] * 3
        assert isinstance(told, RankRecord) and told.bytes["all_reduce"] == 400_012
        assert not record.races
