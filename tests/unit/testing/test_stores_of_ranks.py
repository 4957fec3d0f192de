"""The stores that ranks of a run make.

Each is one of its own, and a wait may be over without an end.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from torchstrategy.testing import RanksStopped, run_ranks

_dist: Any = dist  # where types do not say that it has stores


def make_by_port(rank: int, number: int, folder: Path) -> Any:
    return _dist.TCPStore(
        "localhost", 29700 + number, 2, rank == 0, timedelta(seconds=20)
    )


def make_by_file(rank: int, number: int, folder: Path) -> Any:
    return _dist.FileStore(str(folder / f"store{number}"), 2)


@pytest.mark.parametrize("make", [make_by_port, make_by_file])
def test_stores_at_two_places_are_two(make: Any, tmp_path: Path) -> None:
    """All stores were one, and counted together."""

    def main(rank: int) -> tuple[int, int]:
        dist.init_process_group("gloo")
        first, second = make(rank, 1, tmp_path), make(rank, 2, tmp_path)
        first.add("count", 5)
        second.add("count", 7)
        dist.barrier()
        return first.add("count", 0), make(rank, 2, tmp_path).add("count", 0)

    assert run_ranks(main, 2)[0] == [(10, 14), (10, 14)]


def test_a_store_says_where_it_is(tmp_path: Path) -> None:
    def main(rank: int) -> None:
        free = [_dist.TCPStore("localhost", 0, 1, True) for _ in range(2)]
        assert (
            free[0].port != free[1].port
            and free[0].host == "localhost"
            and isinstance(free[0], _dist.TCPStore)
        )
        free[0].set("mine", "1")
        assert not free[1].check(["mine"])
        assert make_by_file(rank, 1, tmp_path).path == str(tmp_path / "store1")

    run_ranks(main, 2)


def test_what_a_store_has_can_be_counted_deleted_and_queued() -> None:
    """`delete_key` of the default group's store called a function unknown to C++."""

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        mine = make_by_port(rank, rank, Path())
        mine.set("a", "1")
        assert (
            mine.num_keys() == 1
            and mine.list_keys() == ["a"]
            and mine.clone().get("a") == b"1"
        )
        assert (
            mine.delete_key("a") and not mine.delete_key("a") and not mine.check(["a"])
        )
        mine.queue_push("jobs", "one")
        assert mine.queue_len("jobs") == 1 and mine.queue_pop("jobs") == b"one"
        with pytest.raises(dist.QueueEmptyError):
            mine.queue_pop("jobs", block=False)
        shared = _dist.distributed_c10d._get_default_store()
        shared.set(f"note{rank}", "x")
        assert (
            shared.num_keys() >= 1
            and shared.delete_key(f"note{rank}")
            and not shared.check([f"note{rank}"])
        )

    run_ranks(main, 2)


def test_a_wait_with_a_timeout_is_over_where_no_rank_can_go_on() -> None:
    """The run was ended.

    A program that looks whether something comes, and goes on without it, could not be
    run.
    """

    def main(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        store = _dist.distributed_c10d._get_default_store()
        told = []
        if rank == 0:
            for limit in 200, 100:
                with pytest.raises(
                    dist.DistStoreError,
                    match=f"wait timeout after {limit}ms, keys: .*maybe",
                ):
                    store.wait(["maybe"], timedelta(milliseconds=limit))
                told.append(f"{limit} ms")
        dist.barrier()
        if rank == 1:
            store.set("maybe", "1")
        # The time does not pass while another rank can go on.
        store.wait(["maybe"], timedelta(milliseconds=1))
        return told

    assert run_ranks(main, 2)[0] == [["200 ms", "100 ms"], []]


def test_the_shortest_timeout_is_over_first() -> None:
    def main(rank: int) -> str:
        store = make_by_port(rank, 0, Path())
        try:
            store.wait(["go"], timedelta(seconds=2 - rank))
        except dist.DistStoreError:
            store.set("go", "")
            return "is late"
        return "goes on"

    assert run_ranks(main, 2)[0] == ["goes on", "is late"]


def test_a_wait_without_a_timeout_of_its_own_ends_the_run() -> None:
    def main(rank: int) -> None:
        store = make_by_file(rank, 0, Path())
        if rank == 0:
            store.wait(["never"])

    told = (
        "rank 0 waits for 'never' in the store of torch.distributed\n  rank 1 has ended"
    )
    with pytest.raises(RanksStopped, match=re.escape(told)):
        run_ranks(main, 2)
