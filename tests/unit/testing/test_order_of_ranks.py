"""The order in which ranks go on.

Races through files show, and collectives in another order are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conditions import for_changes, for_releases
from torchstrategy.testing import RanksStopped, run_ranks

FILE = re.escape(Path(__file__).name)
ORDERS = [None, "reversed", [1, 0], *(f"random:{seed}" for seed in range(4))]


def begin() -> None:
    dist.init_process_group("nccl")


# Races through files


def reads_what_the_first_writes(
    rank: int, file: Path, collectives: int, is_right: bool
) -> str:
    begin()
    for _ in range(collectives):
        dist.barrier()
    if rank == 0:
        file.write_text("weights")
    if is_right:
        dist.barrier()
    return file.read_text()


def fails(order: Any, file: Path, collectives: int, is_right: bool = False) -> bool:
    file.unlink(missing_ok=True)
    try:
        run_ranks(
            reads_what_the_first_writes,
            2,
            args=(file, collectives, is_right),
            order=order,
        )
    except FileNotFoundError as error:
        assert (
            order is None
            or f"the ranks went on in this order: {order}" in error.__notes__
        )
        return True
    return False


@for_changes
@pytest.mark.parametrize("collectives", [0, 1, 2, 3])
def test_a_missing_barrier_shows_in_one_of_two_orders(
    collectives: int, tmp_path: Path
) -> None:
    orders: list[Any] = [None, "reversed"]
    assert [fails(order, tmp_path / "file", collectives) for order in orders].count(
        True
    ) == 1
    found = [
        fails(f"random:{seed}", tmp_path / "file", collectives) for seed in range(8)
    ]
    assert 0 < found.count(True) < 8
    assert not any(
        fails(order, tmp_path / "file", collectives, is_right=True) for order in ORDERS
    )


@for_releases
def test_a_seed_makes_the_same_order_again() -> None:
    def history(order: str) -> tuple[list[int], str]:
        seen: list[int] = []

        def main(rank: int) -> None:
            begin()
            for _ in range(4):
                seen.append(rank)
                dist.barrier()

        _, record = run_ranks(main, 3, order=order)
        return seen, record.order

    by_seed = [history(f"random:{seed}") for seed in range(6)]
    assert by_seed == [history(f"random:{seed}") for seed in range(6)]
    assert len({str(seen) for seen, _ in by_seed}) > 4 and by_seed[5][1] == "random:5"
    seen, drawn = history("random")
    assert re.fullmatch(r"random:\d+", drawn) and history(drawn) == (seen, drawn)


@pytest.mark.parametrize("order", ORDERS)
def test_a_right_program_computes_the_same_in_any_order(order: Any) -> None:
    def train(rank: int) -> list[float]:
        begin()
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(3, 1), bucket_cap_mb=1e-6)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 3), rank + step + 1.0)).sum().backward()
            optimizer.step()
        if rank:
            dist.send(torch.ones(1), 0)
        else:
            dist.recv(torch.ones(1), 1)
        left = dist.all_reduce(torch.ones(1), async_op=True)
        while not left.is_completed():  # type: ignore[union-attr]
            pass
        return [
            number
            for parameter in model.parameters()
            for number in parameter.flatten().tolist()
        ]

    plain, before = run_ranks(train, 2)
    results, record = run_ranks(train, 2, order=order)
    assert results == plain and record.counts == before.counts


def test_an_error_is_one_in_any_order() -> None:
    def main(rank: int) -> None:
        begin()
        if rank == 0:
            dist.barrier()

    for order in ORDERS:
        with pytest.raises(
            RanksStopped, match=r"rank 0 waits in barrier #1 .* for rank 1"
        ):
            run_ranks(main, 2, order=order)


@pytest.mark.parametrize("order", ["backwards", "random:x", "reversed:1"])
def test_an_order_that_there_is_not_is_refused(order: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"'{order}' is no order: write 'reversed', 'random', or 'random:7'",
    ):
        run_ranks(lambda rank: None, 2, order=order)


# Collectives of one size in another order


def by_loop_variable(rank: int) -> None:
    a, b = torch.ones(4), torch.ones(4) * 2
    for tensor in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(tensor)


def reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def by_the_name_of_a_caller(rank: int) -> None:
    a, b = torch.ones(4), torch.ones(4) * 2
    for tensor in (a, b) if rank == 0 else (b, a):
        reduce(tensor)


def by_key(rank: int) -> None:
    sums = {"loss": torch.ones(4), "hits": torch.ones(4)}
    for name in ("loss", "hits") if rank == 0 else ("hits", "loss"):
        dist.all_reduce(sums[name])


def by_parameter(rank: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    for layer in model if rank == 0 else reversed(model):  # type: ignore[arg-type]
        dist.all_reduce(layer.weight.grad)


def by_lines_of_two_functions(rank: int) -> None:
    def losses() -> None:
        dist.all_reduce(torch.ones(2))

    def hits() -> None:
        dist.all_reduce(torch.ones(2))

    for gather in (losses, hits) if rank == 0 else (hits, losses):
        gather()


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (by_loop_variable, ("a", "b")),
        (by_the_name_of_a_caller, ("a", "b")),
        (by_key, ("sums['loss']", "sums['hits']")),
        (by_parameter, (r"model.0.weight.grad", r"model.1.weight.grad")),
        (by_lines_of_two_functions, ("line 1", "line 2")),
    ],
)
def test_another_order_is_told_by_names_or_lines(
    program: Callable[[int], None], names: tuple[str, str]
) -> None:
    def main(rank: int) -> None:
        begin()
        program(rank)

    with pytest.raises(RanksStopped) as caught:
        run_ranks(main, 2)
    told = str(caught.value)
    assert told.startswith(
        "Ranks 0 and 1 have called collectives of the same size in another order:\n  "
        "rank 0: all_reduce #1"
    )
    if "line" not in names[0]:
        first, other = (
            rf"all_reduce #{n} of \w+ float32, sum \({FILE}:\d+\) of `%s`"
            for n in (1, 2)
        )
        one, two = map(re.escape, names)
        assert re.search(
            f"rank 0: {first % one}\n +{other % two}\n  rank 1: {first % two}\n "
            f"+{other % one}",
            told,
        ), told


@pytest.mark.parametrize("others", ["bca", "cab", "cba", "bacd", "bcda"])
def test_entries_in_any_other_order_are_told(others: str) -> None:
    """Each name stands beside another one, and no two have changed places.

    Of `a`, `b` and `c`, that was not told.
    """

    def main(rank: int) -> None:
        begin()
        hits = {
            name: torch.ones(2) for name in (sorted(others) if rank == 0 else others)
        }
        for name in hits:
            dist.all_reduce(hits[name])

    with pytest.raises(
        RanksStopped, match="called collectives of the same size in another order"
    ) as caught:
        run_ranks(main, 2)
    told = str(caught.value)
    ring = [name for name in "abcd" if f"`hits['{name}']`" in told]
    # Once on each rank.
    assert len(ring) > 1 and all(told.count(f"`hits['{name}']`") == 2 for name in ring)


def round_robin(rank: int) -> None:
    for root in range(2):
        if rank == root:
            mine = torch.ones(2)
            dist.broadcast(mine, root)
        else:
            theirs = torch.ones(2)
            dist.broadcast(theirs, root)


def each_rank_has_its_branch(rank: int) -> None:
    for _ in range(3):
        if rank == 0:
            whole = torch.ones(2)
            dist.all_reduce(whole)
        else:
            part = torch.zeros(2)
            dist.all_reduce(part)


def one_name_more(rank: int) -> None:
    also = None
    for step in range(4):
        total = torch.ones(2)
        if step % 2 == rank:
            also = total
        dist.all_reduce(total)
        assert step < 0 or also is total or rank != step % 2


def branches_by_turns(rank: int) -> None:
    for step in range(4):
        total = torch.ones(2)
        if step % 2 == rank:
            dist.all_reduce(total)
        else:
            dist.all_reduce(total)


def buffers_by_turns(rank: int) -> None:
    now, later = torch.ones(2), torch.ones(2)
    for _ in range(4):
        dist.all_reduce(now)
        now, later = later, now


def three_buffers_by_turns(rank: int) -> None:
    first, second, third = (torch.ones(2) for _ in range(3))
    for _ in range(7):
        dist.all_reduce(first)
        first, second, third = second, third, first


def names_of_its_own(rank: int) -> None:
    hits = {f"{name} of rank {rank}": torch.ones(2) for name in "abc"}
    for name in hits:
        dist.all_reduce(hits[name])


def groups_by_parity(rank: int) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    a, b = torch.ones(2), torch.ones(2)
    for tensor in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(tensor, group=groups[rank])


@pytest.mark.parametrize(
    "program",
    [
        round_robin,
        each_rank_has_its_branch,
        one_name_more,
        branches_by_turns,
        buffers_by_turns,
        three_buffers_by_turns,
        names_of_its_own,
        groups_by_parity,
    ],
)
def test_a_right_program_is_not_told_of_an_order(
    program: Callable[[int], None],
) -> None:
    def main(rank: int) -> None:
        begin()
        program(rank)

    for order in ORDERS:
        run_ranks(main, 2, order=order)
