"""Which way values go from device to device, and how often.

That is what cross-device operations and options are for.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.cuda import nccl

import torchstrategy
from problems import close, context, replica_id
from torchstrategy import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    ReduceOp,
    ReductionToOneDevice,
)
from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._group import transfer as comm
from torchstrategy.experimental import CommunicationOptions
from torchstrategy.testing import count_traffic, simulated_devices

SIM = simulated_devices()
SIZES = [3, 1, 2]  # of three values


def values(replicas: int) -> list[PerReplica]:
    return [
        PerReplica(
            [torch.full((size,), r + 1.0, device=SIM[r]) for r in range(replicas)]
        )
        for size in SIZES
    ]


def routes(
    ops: CrossDeviceOps, replicas: int = 4, options: CommunicationOptions | None = None
) -> Counter[tuple[int, int]]:
    """How many copies an all-reduce of the three values makes, by (source, target)."""
    pairs = [(value, value) for value in values(replicas)]
    with count_traffic() as traffic:
        results = ops.batch_reduce(ReduceOp.SUM, pairs, options)
    for result, size in zip(results, SIZES, strict=True):
        for component in result.values:
            close(component.cpu(), torch.full((size,), replicas * (replicas + 1) / 2))
    return Counter(
        {(s.index, t.index): count for (s, t), count in traffic.copies_by_route.items()}
    )


def test_a_hierarchy_crosses_from_group_to_group_once_in_each_direction() -> None:
    assert routes(HierarchicalCopyAllReduce()) == Counter(
        [(1, 0), (3, 2), (2, 0), (0, 2), (0, 1), (2, 3)]
    )
    assert routes(HierarchicalCopyAllReduce(), 3) == Counter(
        [(1, 0), (2, 0), (0, 2), (0, 1)]
    )
    assert routes(HierarchicalCopyAllReduce(), 2) == Counter([(1, 0), (0, 1)])


def test_one_device_is_where_all_goes_and_comes_from() -> None:
    # Small values go there together.
    assert routes(ReductionToOneDevice(), 3) == Counter(
        {(1, 0): 1, (2, 0): 1, (0, 1): 3, (0, 2): 3}
    )
    assert routes(ReductionToOneDevice(SIM[4]), 2) == Counter(
        {(0, 4): 1, (1, 4): 1, (4, 0): 3, (4, 1): 3}
    )


@pytest.mark.parametrize(
    ("bytes_per_pack", "packs"), [(0, 3), (1, 3), (4 * 4, 2), (4 * 6, 1)]
)
def test_reductions_and_gathers_of_a_strategy_go_in_packs(
    bytes_per_pack: int, packs: int
) -> None:
    strategy = torchstrategy.CentralStorageStrategy(SIM[:3], SIM[4])
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)

    def mine() -> list[torch.Tensor]:
        return [torch.full((size,), replica_id() + 1.0) for size in SIZES]

    held = strategy.run(mine)
    with count_traffic() as traffic:
        strategy.run(lambda: context().all_reduce("sum", mine(), options=options))
    together = packs if bytes_per_pack else 1  # small ones go together
    assert set(traffic.copies_by_route.values()) == {together}
    with count_traffic() as traffic:
        strategy.run(lambda: context().all_gather(mine(), 0, options=options))
    assert set(traffic.copies_by_route.values()) == {packs}
    with count_traffic() as traffic:
        strategy.extended.reduce_to("sum", held, SIM[4], options=options)
    assert traffic.copies_by_route == {(device, SIM[4]): together for device in SIM[:3]}
    with count_traffic() as traffic:
        strategy.extended.batch_reduce_to(
            "mean", [(value, SIM[4]) for value in held], options=options
        )
    assert traffic.copies_by_route == {(device, SIM[4]): together for device in SIM[:3]}


def test_the_gradients_of_what_went_in_packs_come_back_in_packs() -> None:
    strategy = torchstrategy.CentralStorageStrategy(SIM[:2], SIM[0])

    def step(bytes_per_pack: int) -> list[torch.Tensor]:
        options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
        leaves = [
            torch.full((size,), replica_id() + 1.0, requires_grad=True)
            for size in SIZES
        ]
        sums = context().all_reduce(
            "sum", [leaf**2 for leaf in leaves], options=options
        )
        torch.cat(sums).sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for bytes_per_pack, copies in ((1, 2 * 3), (0, 1 + 1), (1000, 2 * 1)):
        with count_traffic() as traffic:
            result = strategy.run(step, args=(bytes_per_pack,))
        assert set(traffic.copies_by_route.values()) == {copies}
        assert [[c.tolist() for c in grad.values] for grad in result] == [
            [[4.0] * s, [8.0] * s] for s in SIZES
        ]


@pytest.mark.parametrize("target", [SIM[1], SIM[4], torch.device("cpu")])
def test_a_sum_may_be_wanted_where_none_of_the_values_is(
    monkeypatch: pytest.MonkeyPatch, target: torch.device
) -> None:
    # What several CUDA devices would do: torch's own sum, which is for where one of the
    # values is.
    monkeypatch.setattr(comm, "_KNOWN", frozenset({"sim"}))
    monkeypatch.setattr(nccl, "is_available", lambda tensors: False)
    total = comm.sum_on(
        [torch.full((2,), r + 1.0, device=SIM[r]) for r in range(4)], target
    )
    assert (total.tolist(), total.device) == ([10, 10], target)
