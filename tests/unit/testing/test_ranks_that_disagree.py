"""Faults that hang on a cluster raise at once.

Each names ranks, collective, sizes and line.
"""

from __future__ import annotations

import importlib
import importlib._bootstrap as _bootstrap
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchstrategy.testing import RanksStopped, run_ranks

Program = Callable[[int], object]
FILE = Path(__file__).name
FAULTS: list[tuple[Program, int, str]] = []


def fault(n: int, message: str) -> Callable[[Program], Program]:
    """A program of `n` ranks, and the error that it has to end with.

    `@` stands for a line of this file.
    """

    def add(program: Program) -> Program:
        FAULTS.append(
            (
                program,
                n,
                re.escape(message)
                .replace("@", rf"{FILE}:\d+")
                .replace("\\.\\.\\.", "(.|\n)*"),
            )
        )
        return program

    return add


def begin() -> None:
    dist.init_process_group("nccl")


def wrapped(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(3, 2))


@fault(
    3,
    "No rank can go on:\n"
    "  rank 0 waits in all_reduce #8 of 8 float32, sum (@) for rank 1\n"
    "  rank 1 has ended\n"
    "  rank 2 waits in all_reduce #8 of 8 float32, sum (@) for rank 1",
)
def one_step_less(rank: int) -> None:
    begin()
    model = wrapped(rank)
    for _ in range(2 if rank == 1 else 3):
        model(torch.ones(2, 3)).sum().backward()


@fault(
    2,
    "Ranks 0 and 1 have called what does not fit together; their sizes differ:\n"
    "  rank 0: all_reduce #1 of 4 float32, sum (@)\n"
    "  rank 1: all_reduce #1 of 5 float32, sum (@)\n",
)
def other_sizes(rank: int) -> None:
    begin()
    dist.all_reduce(torch.ones(4 + rank))


@fault(
    2,
    "sizes differ:\n  rank 0: all_reduce #1 of 2x3 float32, sum (@)\n  rank 1: "
    "all_reduce #1 of 3x2 float32, sum (@)",
)
def transposed(rank: int) -> None:
    begin()
    dist.all_reduce(torch.ones(3, 2) if rank else torch.ones(2, 3))


@fault(
    2,
    "dtypes differ:\n  rank 0: all_reduce #1 of 4 float32, sum (@)\n  rank 1: "
    "all_reduce #1 of 4 float64, sum (@)",
)
def other_dtype(rank: int) -> None:
    begin()
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))


@fault(
    2,
    "root or operation differs:\n  rank 0: broadcast #1 of 4 float32, from rank 0 "
    "(@)\n  rank 1: broadcast #1 of 4",
)
def other_root(rank: int) -> None:
    begin()
    dist.broadcast(torch.ones(4), src=rank)


@fault(
    2,
    "root or operation differs:\n"
    "  rank 0: all_reduce #1 of 1 float32, max (@)\n"
    "  rank 1: all_reduce #1 of 1 float32, min",
)
def other_operation(rank: int) -> None:
    begin()
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MIN if rank else dist.ReduceOp.MAX)


@fault(
    2,
    "collective differs:\n"
    "  rank 0: broadcast #1 of 4 float32, from rank 0 (@)\n"
    "  rank 1: all_reduce #1 of 4 float32, sum",
)
def other_order(rank: int) -> None:
    begin()
    for collective in (dist.all_reduce, lambda x: dist.broadcast(x, 0))[
        :: 1 if rank else -1
    ]:
        collective(torch.ones(4))  # type: ignore[operator]


@fault(
    2,
    "No rank can go on:\n  rank 0 waits in barrier #1 (@) for rank 1\n  rank 1 has "
    "ended",
)
def only_the_first_rank(rank: int) -> None:
    begin()
    if rank == 0:
        dist.barrier()


@fault(
    2,
    "collective differs:\n  rank 0: monitored_barrier #1 (@)\n  rank 1: barrier #1 (@)",
)
def another_kind_of_barrier(rank: int) -> None:
    begin()
    (
        dist.barrier
        if rank
        else dist.distributed_c10d._get_default_group().monitored_barrier
    )()


@fault(
    4,
    "  rank 0 waits in all_reduce #1 in group 1 (ranks 0, 1) of 1 float32, sum (@) for "
    "rank 1\n"
    "  rank 1 waits in all_reduce #1 of 1 float32, sum (@) for ranks 0, 2 and 3\n"
    "  rank 2 has ended\n"
    "  rank 3 has ended",
)
def the_group_of_all(rank: int) -> None:
    begin()
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(1), group=None if rank == 1 else group)


@fault(
    2,
    "  rank 0 waits in barrier #1 in group 1 (ranks 0, 1) (@) for rank 1\n"
    "  rank 1 waits in barrier #1 in group 2 (ranks 0, 1) (@) for rank 0",
)
def groups_in_another_order(rank: int) -> None:
    begin()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups[:: -1 if rank else 1]:
        dist.barrier(group=group)


@fault(
    2,
    "  rank 0 waits in all_reduce #4 of 6 float32, sum (@) for rank 1\n  rank 1 has "
    "ended",
)
def a_parameter_that_one_rank_does_not_use(rank: int) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.first(x)
            return y + self.second(x) if rank == 0 else y

    begin()
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), bucket_cap_mb=1e-6)  # type: ignore[arg-type]
    model(torch.ones(1, 2)).sum().backward()


@fault(
    2,
    "  rank 0 waits in send of 2 float32, to rank 1 (@) for rank 1\n  rank 1 has ended",
)
def a_message_that_nobody_receives(rank: int) -> None:
    begin()
    if rank == 0:
        dist.send(torch.ones(2), 1)


@fault(
    3,
    "  rank 0 waits in send of 2 float32, to rank 1 (@) for rank 1\n"
    "  rank 1 waits in recv of 2 float32, from rank 2 (@) for rank 2\n"
    "  rank 2 has ended",
)
def a_message_of_another_rank(rank: int) -> None:
    begin()
    if rank == 0:
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        dist.recv(torch.ones(2), 2)


@fault(
    2,
    "  rank 0 waits in send of 2 float32, to rank 1 (@) for rank 1\n"
    "  rank 1 waits in send of 2 float32, to rank 0 (@) for rank 0",
)
def both_send_first(rank: int) -> None:
    begin()
    dist.send(torch.ones(2), 1 - rank)
    dist.recv(torch.ones(2), 1 - rank)


@fault(
    2,
    "  rank 0 waits in send of 2 float32, to rank 1, tag 3 (@) for rank 1\n"
    "  rank 1 waits in recv of 2 float32, from rank 0, tag 4 (@) for rank 0",
)
def another_tag(rank: int) -> None:
    begin()
    if rank == 0:
        dist.send(torch.ones(2), 1, tag=3)
    else:
        dist.recv(torch.ones(2), 0, tag=4)


@fault(
    2,
    "sizes differ:\n  rank 0: send of 2 float32, to rank 1 (@)\n  rank 1: recv of 3 "
    "float32, from rank 0 (@)",
)
def a_message_of_another_size(rank: int) -> None:
    begin()
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(3), 0)


@fault(
    2,
    "rank 1 has written on a tensor of all_reduce #1 of 2 float32, sum (@) before it "
    "waited for it.",
)
def writes_before_it_waits(rank: int) -> None:
    begin()
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    x.fill_(3)
    work.wait()  # type: ignore[union-attr]


@fault(
    2,
    "rank 1 has written on a tensor of recv of 2 int64, from rank 0 (@) before it "
    "waited for it.",
)
def writes_past_torch_before_it_waits(rank: int) -> None:
    begin()
    x = torch.ones(2, dtype=torch.int64)
    seen = x.numpy()
    if rank:
        work = dist.irecv(x, 0)
        seen[0] = 5
        work.wait()  # type: ignore[union-attr]
    else:
        dist.send(x, 1)


@fault(2, "rank 0 has ended, and never waited for all_reduce #1 of 2 float32, sum (@)")
def never_waits_where_a_default_device_is_set(rank: int) -> None:
    begin()
    with torch.device("cpu"):
        dist.all_reduce(torch.ones(2), async_op=True)


@fault(
    2,
    "rank 1 begins a profiler of torch (@), and rank 0 has one open (@). torch has one "
    "profiler for a process",
)
def two_ranks_profile(rank: int) -> None:
    begin()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        dist.all_reduce(torch.ones(2))


@fault(
    2,
    "rank 0 has ended, and never waited for all_reduce #1 of 2 float32, sum (@): its "
    "tensors hold nothing of use",
)
def a_forgotten_wait(rank: int) -> None:
    begin()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    if rank == 1:
        work.wait()


@fault(
    2,
    "Rank 0 has room for 2 float32 in all_gather #1 of 2 float32 (@), and 3 float32 "
    "are sent to it:\n"
    "  rank 0: all_gather #1 of 2 float32 (@)\n"
    "  rank 1: all_gather #1 of 3 float32 (@)",
)
def too_little_room(rank: int) -> None:
    begin()
    dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2 + rank))


@fault(
    2,
    "sizes differ:\n"
    "  rank 0: reduce_scatter #1 of 2 float32, sum (@)\n"
    "  rank 1: reduce_scatter #1 of 3 float32, sum (@)",
)
def scattered_by_other_sizes(rank: int) -> None:
    begin()
    dist.reduce_scatter_tensor(torch.empty(2 + rank), torch.ones(4 + 2 * rank))


@fault(
    2,
    "Rank 0 has room for 1 float32 in all_to_all #1 of 2 float32 (@), and 2 float32 "
    "are sent to it",
)
def splits_that_do_not_fit(rank: int) -> None:
    begin()
    dist.all_to_all_single(
        torch.empty(2), torch.ones(3 if rank else 2), [1, 1], [2, 1] if rank else [1, 1]
    )


@fault(
    2,
    "  rank 0 waits for 'default_pg/...answer' in the store of torch.distributed\n  "
    "rank 1 has ended",
)
def a_note_that_nobody_leaves(rank: int) -> None:
    begin()
    if rank == 0:
        dist.distributed_c10d._get_default_store().get("answer")


@fault(2, "  rank 0 waits in barrier #1 (@) for rank 1\n  rank 1 has ended")
def a_question_without_end(rank: int) -> None:
    begin()
    if rank == 0:
        work = dist.barrier(async_op=True)
        while not work.is_completed():  # type: ignore[union-attr]
            pass


@fault(
    2,
    "  rank 0 waits in all_gather #... of ... float32 (@) for rank 1\n  rank 1 has "
    "ended",
)
def a_whole_tensor_on_the_first_rank_only(rank: int) -> None:
    begin()
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if rank == 0:
        model.weight.full_tensor()  # type: ignore[attr-defined]


@fault(2, "all_reduce #1 of 2 float32, bor (@) cannot be computed: ")
def numbers_that_have_no_bits(rank: int) -> None:
    """The last rank to come was told; the others waited for nobody."""
    begin()
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BOR)


@fault(2, "Ranks 0 and 1 have called what does not fit together; their sizes differ")
def an_error_that_is_swallowed(rank: int) -> None:
    """The end of the run spoke of a collective that nobody had waited for."""
    begin()
    with suppress(RuntimeError):
        dist.all_reduce(torch.ones(2 + rank))


@fault(
    2,
    "init_rpc was called in a rank. torch.distributed.rpc has one agent for a process",
)
def calls_of_functions_elsewhere(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)


@fault(2, "rank 0 called a collective on thread 'mine', which it started")
def a_thread_of_its_own(rank: int) -> None:
    begin()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            dist.barrier()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="mine")
    thread.start()
    thread.join()
    raise errors[0]


@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
@pytest.mark.parametrize(
    ("program", "n", "message"),
    FAULTS,
    ids=[program.__name__ for program, _, _ in FAULTS],
)
def test_a_fault_is_named_at_once(program: Program, n: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_ranks(program, n)


def test_what_a_rank_raises_comes_out_and_the_others_are_told() -> None:
    told: dict[int, str] = {}

    def main(rank: int) -> None:
        begin()
        if rank == 1:
            raise ZeroDivisionError("rank 1 divides")
        try:
            dist.barrier()
        except RanksStopped as error:
            told[rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError, match="rank 1 divides") as caught:
        run_ranks(main, 3)
    where, waits = caught.value.__notes__
    assert where == "raised in rank 1 of 3"
    assert re.fullmatch(
        "Others waited then, and could not go on:\n"
        rf"  rank 0 waits in barrier #1 \({FILE}:\d+\) for rank 1\n"
        rf"  rank 2 waits in barrier #1 \({FILE}:\d+\) for rank 1",
        waits,
    )
    assert set(told) == {0, 2} and told[0] == told[2]
    assert "  rank 1 has failed: ZeroDivisionError: rank 1 divides" in told[0]


def test_a_module_that_waits_for_other_ranks_while_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank waited for Python's lock of the module for ever.

    The first one held it in its barrier.
    """
    (tmp_path / "meets.py").write_text(
        "import torch.distributed as dist\ndist.barrier()\n"
    )
    # The lock may be that of a module further inside.
    (tmp_path / "imports_it.py").write_text("import meets\n")
    monkeypatch.syspath_prepend(tmp_path)

    def main(rank: int) -> None:
        begin()
        importlib.import_module("imports_it")

    acquire = _bootstrap._ModuleLock.acquire
    with pytest.raises(RanksStopped) as caught:
        run_ranks(main, 2)
    first, second = str(caught.value).splitlines()[1:]
    assert first == "  rank 0 waits in barrier #1 (meets.py:2) for rank 1"
    assert second.startswith(
        "  rank 1 imports imports_it, which another rank has begun to import. Ranks "
        "share modules"
    )
    assert _bootstrap._ModuleLock.acquire is acquire
    assert not {"meets", "imports_it"} & sys.modules.keys()


def test_an_exit_status_is_an_error_of_its_rank_and_none_is_an_end() -> None:
    def main(rank: int) -> None:
        raise SystemExit(rank)

    with pytest.raises(SystemExit) as caught:
        run_ranks(main, 2)
    assert caught.value.code == 1
    assert run_ranks(lambda rank: (_ for _ in ()).throw(SystemExit(0)), 2)[0] == [
        None,
        None,
    ]


def test_torch_finds_models_that_differ_between_ranks() -> None:
    def main(rank: int) -> None:
        begin()
        DistributedDataParallel(nn.Linear(2 + rank, 2))

    with pytest.raises(RuntimeError, match="appears not to match"):
        run_ranks(main, 2)


def test_an_asynchronous_result_holds_nothing_of_use_before_it_is_waited_for() -> None:
    def main(rank: int) -> tuple[bool, int, float, int]:
        begin()
        x, count = torch.ones(1), torch.ones(1, dtype=torch.int64)
        works = [
            dist.all_reduce(x, async_op=True),
            dist.all_reduce(count, async_op=True),
        ]
        early = bool(x.isnan()), int(count)
        for work in works:
            work.wait()  # type: ignore[union-attr]
        return *early, x.item(), int(count)

    assert run_ranks(main, 2)[0] == [(True, torch.iinfo(torch.int64).min, 2.0, 2)] * 2


def test_sparse_tensors_and_splits_in_a_tensor_are_exchanged() -> None:
    def main(rank: int) -> list[object]:
        dist.init_process_group("gloo")
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], (3,), check_invariants=True)
        dist.all_reduce(sparse)
        model = DistributedDataParallel(nn.EmbeddingBag(6, 1, sparse=True))
        model(torch.tensor([[rank, 5]])).sum().backward()
        gradient = model.module.weight.grad
        whole = [torch.zeros(2), torch.zeros(2)]
        group = dist.distributed_c10d._get_default_group()
        group.allgather_coalesced(
            [[piece] for piece in whole], [torch.full((2,), float(rank))]
        ).wait()
        got = torch.zeros(3)
        splits: Any = torch.tensor([1, 2] if rank == 0 else [2, 1])
        dist.all_to_all_single(got, torch.arange(3.0) + 10 * rank, splits, splits)
        assert gradient is not None
        return [
            sparse.to_dense().tolist(),
            gradient.to_dense().flatten().tolist(),
            whole[1].tolist(),
            got.tolist(),
        ]

    first, second = run_ranks(main, 2)[0]
    assert first == [[1, 1, 0], [0.25, 0.25, 0, 0, 0, 0.5], [1, 1], [0, 10, 11]]
    assert second == [[1, 1, 0], [0.25, 0.25, 0, 0, 0, 0.5], [1, 1], [1, 2, 12]]


REFUSED_BEFORE: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(3)),
        ValueError,
        "output tensor size must be equal to world_size times input tensor size",
    ),
    (
        lambda: dist.all_gather_into_tensor(torch.ones(6).half(), torch.ones(3)),
        TypeError,
        "output tensor must have the same type as input tensor",
    ),
    (
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(3)),
        ValueError,
        "input tensor must be the same size as output size times world size",
    ),
    (
        lambda: dist.reduce_scatter_tensor(torch.ones(2).half(), torch.ones(4)),
        TypeError,
        "input tensor must be the same type as the output tensor",
    ),
    (
        lambda: dist.all_to_all_single(torch.ones(3, 2), torch.ones(3, 2)),
        RuntimeError,
        "Tensor's dim 0 does not divide equally across group size",
    ),
    (
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [2, 1]),
        RuntimeError,
        "Split sizes doesn't match total dim 0 size",
    ),
]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "call, error, words", REFUSED_BEFORE, ids=range(len(REFUSED_BEFORE))
)
def test_a_rank_that_can_see_its_own_mistake_goes_on(
    call: Callable[[], object], error: type[Exception], words: str
) -> None:
    def main(rank: int) -> float:
        begin()
        if rank == 1:  # the other one has not come, and need not
            with pytest.raises(error, match=words):
                call()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(main, 2)[0] == [2.0, 2.0]
