"""Ranks as threads of one process: what each has for itself.

In which order they run, and what is left.
"""

from __future__ import annotations

import os
import random
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchstrategy.testing import (
    Collective,
    RanksStopped,
    fail_in_rank,
    no_leaks,
    run_ranks,
)


def begin(backend: str | None = "nccl", **options: Any) -> None:
    dist.init_process_group(backend, **options)


# What a rank has


def test_a_rank_has_the_variables_that_torchrun_sets() -> None:
    def main(rank: int) -> dict[str, str]:
        dist.is_available()
        names = (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
        begin()
        dist.barrier()
        os.environ["MINE"] = f"of {rank}"
        dist.barrier()
        assert os.getenv("MINE") == f"of {rank}"
        return {name: os.environ[name] for name in names}

    before = dict(os.environ)
    results, _ = run_ranks(main, 2)
    assert results[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    assert dict(os.environ) == before


def test_each_rank_draws_as_a_process_does() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    def main(rank: int) -> list[float]:
        begin()
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
        first = draw()
        dist.barrier()
        return first + draw()

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    state = torch.get_rng_state()
    results, _ = run_ranks(main, 3)
    assert torch.equal(torch.get_rng_state(), state)
    for rank, drawn in enumerate(results):
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
        assert drawn == draw() + draw()


def test_each_rank_has_a_default_dtype() -> None:
    def main(rank: int) -> torch.dtype:
        begin()
        torch.set_default_dtype(torch.float64 if rank else torch.float16)
        dist.barrier()
        return torch.ones(1).dtype

    assert run_ranks(main, 2)[0] == [torch.float16, torch.float64]
    assert torch.get_default_dtype() == torch.float32


# How it begins


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl", None])
def test_a_backend_is_served_by_its_name(backend: str | None) -> None:
    def main(rank: int) -> str:
        begin(backend)
        assert (
            dist.is_initialized()
            and dist.get_rank() == rank
            and dist.get_world_size() == 2
        )
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group([0, 1]))
        assert total.item() == 2
        return dist.get_backend()

    assert run_ranks(main, 2)[0] == [backend or "undefined"] * 2


@pytest.mark.parametrize(
    "options",
    [
        lambda rank: {"rank": rank, "world_size": 2},
        lambda rank: {"init_method": "env://"},
        lambda rank: {
            "init_method": "tcp://10.0.0.1:2345",
            "rank": rank,
            "world_size": 2,
        },
        lambda rank: {
            "store": dist.TCPStore("localhost", 0, 2, rank == 0),
            "rank": rank,
            "world_size": 2,
        },
        lambda rank: {"store": dist.HashStore(), "rank": rank, "world_size": 2},
    ],
)
def test_a_program_may_say_how_its_ranks_meet(
    options: Callable[[int], dict[str, Any]],
) -> None:
    def main(rank: int) -> None:
        begin("gloo", **options(rank))
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        begin()
        dist.barrier()

    assert run_ranks(main, 2)[1].counts == {"barrier": 2}


@pytest.mark.parametrize("url", ["env://", "tcp://127.0.0.1:29500"])
def test_a_program_may_meet_the_other_ranks_itself(url: str) -> None:
    """Each rank waited in C++ for a connection to the first, and let none go on."""

    def main(rank: int) -> list[Any]:
        store, *found = next(iter(dist.rendezvous(url, rank, 2)))  # type: ignore[attr-defined]
        store.set(f"from {rank}", str(rank))
        return [*found, store.get(f"from {1 - rank}")]

    assert run_ranks(main, 2)[0] == [[0, 2, b"1"], [1, 2, b"0"]]


def test_another_rank_than_ones_own_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"init_process_group\(rank=0, world_size=2\) was called in rank 1 of 2",
    ):
        run_ranks(lambda rank: begin("gloo", rank=0, world_size=2), 2)


# torch 2.13 has a new name for it, and warns of the old one.
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# Collectives that the programs of test_ranked_programs.py do not use


def test_every_reduction() -> None:
    operations = dist.ReduceOp
    expected = {
        operations.SUM: [5, 7],
        operations.PRODUCT: [6, 12],
        operations.MIN: [2, 3],
        operations.MAX: [3, 4],
        operations.BAND: [2, 0],
        operations.BOR: [3, 7],
        operations.BXOR: [1, 7],
        operations.AVG: [2, 3],
    }

    def main(rank: int) -> None:
        begin()
        for operation, result in expected.items():
            x = torch.tensor([2, 3]) + rank
            dist.all_reduce(x, op=operation)
            assert x.tolist() == result, operation
        x = torch.tensor([2.0, 3.0]) + rank
        dist.all_reduce(x, op=operations.AVG)
        assert x.tolist() == [2.5, 3.5]

    run_ranks(main, 2)


def test_what_goes_to_one_rank_and_from_one() -> None:
    def main(rank: int) -> None:
        begin()
        x = torch.full((2,), float(rank))
        dist.reduce(x, dst=1)
        assert x.tolist() == ([3.0, 3.0] if rank == 1 else [rank, rank])
        parts = [torch.empty(1) for _ in range(3)] if rank == 2 else None
        dist.gather(torch.full((1,), float(rank)), parts, dst=2)
        assert parts is None or [part.item() for part in parts] == [0, 1, 2]
        got = torch.empty(1)
        dist.scatter(
            got,
            [torch.full((1,), float(i)) for i in range(3)] if rank == 0 else None,
            src=0,
        )
        assert got.item() == rank

    record = run_ranks(main, 3)[1]
    assert record.bytes == {"reduce": 8, "gather": 12, "scatter": 12}


def test_everything_to_everybody() -> None:
    def main(rank: int) -> None:
        begin()
        out = torch.empty(4)
        dist.all_to_all_single(out, torch.arange(4.0) + 10 * rank)
        assert out.tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
        uneven = torch.empty(2 if rank == 0 else 4)
        dist.all_to_all_single(
            uneven,
            torch.arange(3.0) + 10 * rank,
            [1, 1] if rank == 0 else [2, 2],
            [1, 2],
        )
        assert uneven.tolist() == ([0, 10] if rank == 0 else [1, 2, 11, 12])
        outs = [torch.empty(1), torch.empty(1)]
        dist.all_to_all(outs, [torch.tensor([float(rank)]), torch.tensor([rank + 5.0])])
        assert [x.item() for x in outs] == ([0, 1] if rank == 0 else [5, 6])
        # torch allows other sizes in each rank.
        pieces = [torch.empty(2), torch.empty(3)]
        dist.all_gather(pieces, torch.full((2 + rank,), float(rank)))
        assert [piece.tolist() for piece in pieces] == [[0, 0], [1, 1, 1]]
        scattered = torch.empty(1, 2)
        reduce_scatter(scattered, torch.arange(4.0).view(2, 2), op=dist.ReduceOp.AVG)
        assert scattered.tolist() == [[0, 1]] if rank == 0 else [[2, 3]]
        listed = torch.empty(2)
        dist.reduce_scatter(listed, [torch.ones(2), torch.full((2,), 2.0)])
        assert listed.tolist() == ([2, 2] if rank == 0 else [4, 4])

    run_ranks(main, 2)


def test_what_is_reduced_may_be_scattered_in_pieces_of_several_sizes() -> None:
    def main(rank: int) -> list[float]:
        begin()
        mine = torch.empty(1 + rank)
        dist.reduce_scatter(
            mine, [torch.full((1,), 1.0 + rank), torch.full((2,), 10.0 + rank)]
        )
        return mine.tolist()

    results, record = run_ranks(main, 2)
    assert results == [[3.0], [21.0, 21.0]]
    assert (
        record.collectives[0].sizes == "1 float32, 2 float32"
        and record.collectives[0].bytes == 12
    )


@pytest.mark.parametrize(
    ("room", "pieces", "message"),
    [
        ([1, 1], [[1, 2], [1, 2]], "Rank 1 has room for 1 float32 in reduce_scatter"),
        ([1, 2], [[1, 2], [2, 1]], "their sizes differ"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(
    room: list[int], pieces: list[list[int]], message: str
) -> None:
    def main(rank: int) -> None:
        begin()
        dist.reduce_scatter(
            torch.empty(room[rank]), [torch.ones(size) for size in pieces[rank]]
        )

    with pytest.raises(RanksStopped, match=message):
        run_ranks(main, 2)


def test_what_is_gathered_is_one_tensor_in_a_future_of_nccl() -> None:
    """Hooks of `DistributedDataParallel` in torch rely on it."""

    def main(rank: int, backend: str) -> list[Any]:
        begin(backend)
        mine = torch.tensor([1.0 + rank])
        gathered = [[torch.empty(1), torch.empty(1)] for _ in range(2)]
        works: list[Any] = [
            dist.all_gather(pieces, mine, async_op=True) for pieces in gathered
        ]
        values = [works[0].get_future().wait(), works[1].result()]
        assert [[x.item() for x in pieces] for pieces in gathered] == [[1, 2], [1, 2]]
        return [[x.tolist() for x in value] for value in values]

    assert run_ranks(main, 2, args=["nccl"])[0] == [[[[[1.0], [2.0]]]] * 2] * 2
    assert run_ranks(main, 2, args=["gloo"])[0] == [[[[1.0], [2.0]]] * 2] * 2


def test_messages_may_cross_if_both_are_posted_first() -> None:
    def main(rank: int) -> float:
        begin()
        x = torch.empty(1)
        operations = [
            dist.P2POp(dist.isend, torch.full((1,), float(rank)), 1 - rank),
            dist.P2POp(dist.irecv, x, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return x.item()

    assert run_ranks(main, 2)[0] == [1.0, 0.0]


@pytest.mark.parametrize("is_sent_first", [True, False])
def test_a_batch_may_have_messages_of_a_rank_to_itself(is_sent_first: bool) -> None:
    """Each end waited for another one, for ever."""

    def main(rank: int) -> list[float]:
        begin()
        got = [torch.empty(1), torch.empty(1)]
        sent = [
            dist.P2POp(dist.isend, torch.tensor([10.0 * rank + other]), other)
            for other in (0, 1)
        ]
        received = [dist.P2POp(dist.irecv, got[other], other) for other in (0, 1)]
        for work in dist.batch_isend_irecv(
            sent + received if is_sent_first else received + sent
        ):
            work.wait()
        return [x.item() for x in got]

    results, record = run_ranks(main, 2)
    assert results == [[0.0, 10.0], [1.0, 11.0]]
    assert sorted(collective.ranks for collective in record.collectives) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_a_message_of_a_rank_to_itself_may_be_received_from_any() -> None:
    def main(rank: int) -> float:
        begin("mpi")
        x = torch.empty(1)
        work = dist.irecv(x)
        dist.isend(torch.ones(1), 0)
        work.wait()  # type: ignore[union-attr]
        return x.item()

    assert run_ranks(main, 1)[0] == [1.0]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "nccl",
            (
                "rank 1 sends a message to itself, and NCCL takes both ends of such a "
                "message only together."
            ),
        ),
        (
            "gloo",
            (
                "rank 1 sends a message to itself, and gloo has no connection of a "
                "rank to itself. Copy the tensor."
            ),
        ),
    ],
)
def test_a_message_of_a_rank_to_itself_is_refused_where_the_backend_refuses_it(
    backend: str, message: str
) -> None:
    def main(rank: int) -> None:
        begin(backend)
        if rank:
            dist.isend(torch.ones(1), 1)

    with pytest.raises(RuntimeError, match=re.escape(message)):
        run_ranks(main, 2)


def test_a_question_lets_others_run() -> None:
    def main(rank: int) -> int:
        begin()
        x, asked = torch.ones(1), 0
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():  # type: ignore[union-attr]
            asked += 1
        assert x.item() == 3
        return asked

    assert run_ranks(main, 3)[0] == [0, 0, 0]


def test_a_dispatch_mode_of_the_program_does_not_see_how_ranks_exchange() -> None:
    """It saw clones and copies, which the program did not call."""

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def main(rank: int) -> list[str]:
        begin()
        x = torch.ones(2)
        with Seen() as seen:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
        assert x.tolist() == [4.0, 4.0]
        return seen.names

    assert run_ranks(main, 2)[0] == [[], []]


def test_complex_and_half_precision_numbers() -> None:
    def main(rank: int) -> None:
        begin()
        for dtype in (torch.complex64, torch.bfloat16, torch.float16):
            x = torch.ones(2, dtype=dtype)
            dist.all_reduce(x)
            assert x.dtype == dtype and x.tolist() == [2, 2]

    run_ranks(main, 2)


# The order, and the record


def test_ranks_run_in_the_order_that_was_asked_for() -> None:
    seen: list[int] = []

    def main(rank: int) -> None:
        begin()
        seen.append(rank)
        dist.barrier()
        seen.append(rank)

    run_ranks(main, 3, order=[2, 0, 1])
    assert seen == [2, 0, 1, 2, 0, 1] or seen == [2, 0, 1, 1, 2, 0]


def test_the_record_says_who_told_whom_what_and_where() -> None:
    def main(rank: int) -> None:
        begin()
        pair = dist.new_group([0, 2])
        if rank != 1:
            dist.all_reduce(torch.ones(2, 3), group=pair)
        if rank == 0:
            dist.send(torch.ones(5), 1, tag=7)
        if rank == 1:
            dist.recv(torch.ones(5), 0, tag=7)

    record = run_ranks(main, 3)[1]
    first = main.__code__.co_firstlineno
    at = [f"test_ranks.py:{first + number}" for number in range(9)]
    assert record.collectives == [
        Collective("all_reduce", (0, 2), "sum", "2x3 float32", 24, (at[4], at[4])),
        Collective("send", (0, 1), "to rank 1, tag 7", "5 float32", 20, (at[6], at[8])),
    ]
    assert str(record) == "all_reduce: 1 with 24 bytes\nsend: 1 with 20 bytes"


# What is refused, and what is left


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run_ranks(begin, True), "takes a number of ranks; got True"),
        (lambda: run_ranks(begin, 0), r"run_ranks\(0\): a run has 1 rank or more"),
        (
            lambda: run_ranks(begin, 2, order=[0, 0]),
            r"lists each of the 2 ranks, 0 to 1, once; got \[0, 0\]",
        ),
        (
            lambda: run_ranks(lambda rank: run_ranks(begin, 1), 1),
            "run_ranks was called in rank 0 of another",
        ),
    ],
)
def test_a_call_that_means_nothing_is_refused(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call()


def test_nothing_is_left() -> None:
    def main(rank: int) -> None:
        begin()
        dist.new_group([0])
        dist.barrier()
        if rank:
            raise ZeroDivisionError

    hook, nccl = sys.excepthook, torch.cuda.nccl.version
    with no_leaks(), pytest.raises(ZeroDivisionError):
        run_ranks(main, 2)
    assert not dist.is_initialized()
    assert sys.excepthook is hook and torch.cuda.nccl.version is nccl
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("rank")
    ]


def test_a_process_group_of_the_caller_is_there_before_and_after(tmp_path: Any) -> None:
    begin("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert run_ranks(lambda rank: dist.is_initialized(), 2)[0] == [False, False]
        dist.barrier()
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


# Planned failures


def test_a_rank_fails_where_the_test_says() -> None:
    def main(rank: int) -> None:
        begin()
        for _ in range(3):
            x = torch.nn.functional.relu(torch.ones(1))
            dist.all_reduce(x)

    oom = torch.OutOfMemoryError
    with fail_in_rank(1, at="all_reduce", skip=2, error=oom), pytest.raises(oom):
        run_ranks(main, 2)
    for at in ("start", "end", "relu"):
        with (
            fail_in_rank(0, at=at),
            pytest.raises(RuntimeError, match=f"rank 0 has come to '{at}'"),
        ):
            run_ranks(main, 2)


def test_a_failure_that_does_not_happen_is_one_of_the_test() -> None:
    def main(rank: int) -> None:
        begin()
        dist.barrier()

    message = "failed 0 times instead of 1. Rank 0 came to: start, device, barrier, end"
    with pytest.raises(AssertionError, match=message), fail_in_rank(0, at="all_reduce"):
        run_ranks(main, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fail_in_rank("a"), "a rank is an int from 0; got 'a'"),  # type: ignore[arg-type]
        (lambda: fail_in_rank(-1), "a rank is 0 or more; got -1"),
        (lambda: fail_in_rank(0, at=""), "`at` is the name of where the rank fails"),
        (lambda: fail_in_rank(0, times=0), "`times` is 1 or more; got 0"),
        (
            lambda: fail_in_rank(2),
            (
                "names rank 2, and run_ranks was called with 2 ranks in its block: "
                "they end at 1"
            ),
        ),
    ],
)
def test_a_failure_that_cannot_happen_is_refused(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message), call():
        run_ranks(begin, 2)
