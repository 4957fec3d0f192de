"""Gradients that are sent during backward are those that the step has when it reduces them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchstrategy._communication import workers
from torchstrategy._training import overlapped_sums
from workers import overlapping
from workers.cluster import cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pack", [1, workers.PACK], ids=["each gradient by itself", "all in one pack"])
@pytest.mark.parametrize("count", [6, 5, 1])
@pytest.mark.parametrize("name", [body.__name__ for body in overlapping.BODIES])
def test_the_sums_are_those_of_the_gradients_when_they_are_reduced(name: str, count: int, pack: int) -> None:
    if count == 1 and name == "part_by_part":
        pytest.skip("a single row cannot be split")
    expected = overlapping.of_plain(name, count, 2)
    told = cluster(2).run(overlapping.of_workers, name, count, pack)
    for weights, _ in told:
        for own, plain in zip(weights, expected, strict=True):
            torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-12)
    assert (told[0][1] > 0) is (pack == 1)  # a lone pack is full when backward ends: it leaves at the reduction


@pytest.mark.parametrize("num_kept", [0, 3])
def test_memory_in_which_gradients_are_sent_is_used_again_if_nobody_has_it(num_kept: int) -> None:
    for are_as_before, num_addresses in cluster(2).run(overlapping.of_kept_gradients, num_kept):
        assert are_as_before
        # Of the first run, in which nothing is sent early; of two runs, which take turns; and what the user has.
        assert num_addresses <= 3 + num_kept


@pytest.mark.parametrize("how", ["raises", "goes another way", "another waits"])
def test_a_worker_that_leaves_others_with_gradients_under_way_is_heard_of(how: str) -> None:
    for rank, told in enumerate(cluster(2).run(overlapping.of_failure, how)):
        if how == "raises":
            assert told.startswith("ValueError" if rank else "WorkerError: worker 1 of 2"), told
            assert "in backward" in told
        else:
            assert "The workers came to different synchronization points" in told
            assert "all_reduce" in told and "optimizer.step()" in told


def test_small_packs_are_sent_in_one_order(monkeypatch: Any) -> None:
    parameters = [torch.zeros(size) for size in (1, 5, 1, 4, 2)]
    monkeypatch.setattr(workers, "PACK", 20)
    packs = overlapped_sums._packs([0, 1, 2, 3, 4], parameters)
    # A pack goes when it is full or over: the small tensor between two large ones, as a bias, is not sent by itself.
    assert [pack.indices for pack in packs] == [[4, 3], [2, 1], [0]]
