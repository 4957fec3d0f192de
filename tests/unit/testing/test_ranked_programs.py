"""Programs of several ranks, on the CPU: the numbers are those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from conditions import for_changes, for_releases
from ranked_programs import EVERYWHERE, RANKS, Place
from torchstrategy.testing import RankRecord, run_ranks


@for_changes
@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
@pytest.mark.parametrize("program", EVERYWHERE, ids=lambda program: program.__name__)
def test_a_program_of_four_ranks_is_right(
    program: Callable[[Place], RankRecord],
) -> None:
    program(lambda rank: torch.device("cpu"))


def test_ranks_with_more_batches_divide_by_how_many_still_train() -> None:
    """C++ waits for a collective whose Python object is gone: it waited for ever."""

    def main(rank: int) -> list[float]:
        dist.init_process_group("gloo")
        model, grads = DistributedDataParallel(nn.Linear(1, 1, bias=False)), []
        with model.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                model(torch.full((1, 1), 3.0)).sum().backward()
                grads.append(model.module.weight.grad.item())
                model.zero_grad()
        return grads

    assert run_ranks(main, 2)[0] == [[3.0], [3.0, 3.0]]
    assert isinstance(vars(Join)["notify_join_context"], staticmethod)


@for_releases
def test_a_hundred_runs_have_one_record() -> None:
    def main(rank: int) -> None:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(3, 2))
        model(torch.ones(2, 3)).sum().backward()
        odd = dist.new_group([1, 3])
        if rank % 2:
            dist.all_gather_object([None, None], model, group=odd)
        if rank:
            dist.recv(torch.empty(1))
        works = (
            [dist.isend(torch.ones(1), other) for other in range(rank + 1, RANKS)]
            if rank < 2
            else []
        )
        for work in works:
            work.wait()  # type: ignore[union-attr]
        for _ in range(max(0, rank - 1) and 1):
            dist.recv(torch.empty(1))

    records = [run_ranks(main, RANKS)[1] for _ in range(100)]
    assert records[0].counts["send"] == 5 and records[0].counts["all_reduce"] == 1
    assert all(record == records[0] for record in records)
