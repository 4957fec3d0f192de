"""Programs of several ranks, each on a simulated device of its own.

The numbers are those of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ranked_programs import EVERYWHERE, Place, run_ranks, synchronized_batch_norm
from torchstrategy.testing import RankRecord


@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
@pytest.mark.parametrize("program", EVERYWHERE, ids=lambda program: program.__name__)
def test_a_program_of_four_ranks_is_right(
    program: Callable[[Place], RankRecord],
) -> None:
    program(lambda rank: torch.device("sim", rank))


def test_torchs_synchronized_batch_norm_is_right() -> None:
    synchronized_batch_norm(lambda rank: torch.device("sim", rank))


def test_a_rank_begins_with_a_device_of_its_own() -> None:
    def main(rank: int) -> tuple[int, torch.Tensor]:
        torch.manual_seed(rank)
        return torch.accelerator.current_device_index(), torch.rand(
            2, device="sim"
        ).cpu()

    results, _ = run_ranks(main, 7)
    assert [index for index, _ in results] == [0, 1, 2, 3, 4, 0, 1]
    for rank, (_, drawn) in enumerate(results):
        torch.manual_seed(rank)
        assert torch.equal(torch.rand(2, device=f"sim:{rank % 5}").cpu(), drawn)
