"""How values become one in the replicas: all_reduce and all_gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from components import NO_SUM, SINGLE, TWO, Pair, dealt, in_replicas
from problems import context, replica_id, shown
from topologies import TOPOLOGIES
from torchstrategy import ReduceOp, Strategy

# ReplicaContext.all_reduce


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 3.0), ("Mean", 1.5), (ReduceOp.SUM, 3.0)]
)
def test_every_replica_gets_the_reduction(op: Any, expected: float) -> None:
    assert (
        in_replicas(TWO, lambda x: context().all_reduce(op, x).item(), [1.0, 2.0])
        == [expected] * 2
    )


def test_every_replica_gets_a_tensor_of_its_own(several: Strategy) -> None:
    shared = torch.ones(2)
    for op in ("sum", "mean"):
        value = several.run(
            lambda op=op: context().all_reduce(op, shared).add_(replica_id())
        )
        start = several.num_replicas_in_sync if op == "sum" else 1
        assert [mine.tolist() for mine in value.values] == [
            [start + r] * 2 for r in range(several.num_replicas_in_sync)
        ]
    assert shared.tolist() == [1, 1]


def test_one_replica_gets_a_tensor_of_its_own_too(strategy: Strategy) -> None:
    shared = torch.ones(2)
    strategy.run(lambda: context().all_reduce("sum", shared).add_(1))
    strategy.run(lambda: context().all_reduce("mean", shared).add_(1))
    strategy.run(lambda: context().all_gather(shared, axis=0).add_(1))
    assert shared.tolist() == [1, 1]


def test_a_tensor_that_all_replicas_share_counts_once_for_each(
    several: Strategy,
) -> None:
    shared = torch.tensor(4.0)
    value = several.run(lambda: context().all_reduce("sum", shared))
    assert [mine.item() for mine in value.values] == [
        4 * several.num_replicas_in_sync
    ] * several.num_replicas_in_sync


def test_containers_are_all_reduced_leaf_by_leaf(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync

    def step() -> None:
        r = float(replica_id())
        tree = {
            "a": torch.tensor([r, 1.0]),
            "b": [(torch.tensor(r),), Pair(r, torch.ones(2, 2))],
        }
        total = context().all_reduce("sum", tree)
        assert type(total["b"][1]) is Pair
        assert total["a"].tolist() == [n * (n - 1) / 2, n]
        assert total["b"][0][0].item() == float(total["b"][1].first) == n * (n - 1) / 2
        assert total["b"][1].second.tolist() == [[n, n], [n, n]]
        assert tree["a"].tolist() == [r, 1.0]

    strategy.run(step)


@pytest.mark.parametrize("empty", [[], {}, ()], ids=shown)
def test_an_empty_container_is_all_reduced_to_itself(
    kind: Strategy, empty: Any
) -> None:
    assert kind.run(lambda: context().all_reduce("sum", empty)) == empty
    assert kind.run(lambda: context().all_gather(empty, axis=0)) == empty


def test_numbers_are_all_reduced_in_every_strategy(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync
    for mine in strategy.experimental_local_results(
        strategy.run(lambda: context().all_reduce("sum", replica_id() + 0.5))
    ):
        assert isinstance(mine, torch.Tensor)
        assert mine.item() == n * (n - 1) / 2 + n * 0.5


def test_a_sum_of_integers_keeps_its_dtype_and_their_mean_is_a_float(
    several: Strategy,
) -> None:
    def step() -> Any:
        mine = torch.tensor([replica_id(), 1], dtype=torch.int32)
        return context().all_reduce("sum", mine), context().all_reduce("mean", mine)

    n = several.num_replicas_in_sync
    for total, mean in several.experimental_local_results(several.run(step)):
        assert total.dtype is torch.int32
        assert total.tolist() == [n * (n - 1) // 2, n]
        assert mean.dtype is torch.float32
        assert mean.tolist() == [(n - 1) / 2, 1]


def test_the_dtype_of_a_mean_does_not_depend_on_who_is_present() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return context().all_reduce("mean", torch.tensor([1, 2]))

    full = TWO.run(step, args=(dealt(TWO, torch.ones(2)),))
    partial = TWO.run(step, args=(dealt(TWO, torch.ones(1)),))
    assert [mine.dtype for mine in full.values] == [torch.float32] * 2
    assert [mine.dtype for mine in partial.values] == [torch.float32]


def test_one_replica_reduces_to_what_it_has(strategy: Strategy) -> None:
    if strategy.num_replicas_in_sync == 1:
        for op in ("sum", "mean"):
            reduced = strategy.run(
                lambda op=op: context().all_reduce(op, torch.tensor([1, 2]))
            )
            assert reduced.dtype is torch.int64
            assert reduced.tolist() == [1, 2]


def test_uneven_shapes_are_not_all_reduced(several: Strategy) -> None:
    with pytest.raises(
        ValueError, match=NO_SUM + r"\(1,\) torch\.float32 and \(2,\) torch\.float32"
    ):
        several.run(lambda: context().all_reduce("sum", torch.ones(replica_id() + 1)))


ALL_REDUCE_ERRORS: dict[
    str, tuple[Callable[[], Any], type[Exception] | tuple[type[Exception], ...], str]
] = {
    "an unknown reduction": (
        lambda: context().all_reduce("MAX", 1.0),
        ValueError,
        r"^'MAX' is not one of the reductions 'SUM', 'MEAN'\.",
    ),
    "no reduction": (
        lambda: context().all_reduce(None, 1.0),
        (TypeError, ValueError),
        r"^Expected reduce_op to be ",
    ),
    "text": (
        lambda: context().all_reduce("sum", "text"),
        TypeError,
        r"^Only tensors, arrays and numbers can be ",
    ),
    "options": (
        lambda: context().all_reduce("sum", 1.0, options=3),
        ValueError,
        r"^all_reduce\(options=3\): ",
    ),
    "options of a gather": (
        lambda: context().all_gather(torch.ones(1), 0, options=3),
        ValueError,
        r"^all_gather\(options=3\): ",
    ),
    "a scalar": (
        lambda: context().all_gather(1.0, 0),
        ValueError,
        r"^Scalars cannot be gathered: they have no axis\.",
    ),
    "no axis": (
        lambda: context().all_gather(torch.ones(1), 1),
        ValueError,
        r"^There is no axis 1 to gather along: ",
    ),
}


@pytest.mark.parametrize("case", ALL_REDUCE_ERRORS)
def test_what_cannot_be_reduced_or_gathered_in_a_replica_is_refused(
    kind: Strategy, case: str
) -> None:
    call, error, sentence = ALL_REDUCE_ERRORS[case]
    with pytest.raises(error, match=sentence):
        kind.run(call)


def test_none_is_not_all_reduced() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^Only tensors, arrays and numbers can be combined across replicas; got "
            r"None"
        ),
    ):
        TWO.run(lambda: context().all_reduce("sum", None))


def test_containers_meet_key_by_key_in_whatever_order_the_keys_are(
    several: Strategy,
) -> None:
    n = several.num_replicas_in_sync

    def step() -> None:
        items = [("a", torch.tensor([1.0])), ("b", torch.tensor([10.0]))]
        tree = dict(reversed(items) if replica_id() else items)
        total = context().all_reduce("sum", tree)
        assert total["a"].tolist() == [n]
        assert total["b"].tolist() == [10 * n]
        gathered = context().all_gather(tree, axis=0)
        assert gathered["a"].tolist() == [1.0] * n
        assert gathered["b"].tolist() == [10.0] * n

    several.run(step)


STRUCTURES: dict[str, tuple[Any, Any]] = {
    "keys": ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
    "depths": ([torch.ones(1)], torch.ones(1)),
    "lengths": ([torch.ones(1)], [torch.ones(1), torch.ones(1)]),
}


@pytest.mark.parametrize("case", STRUCTURES)
@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
def test_containers_that_differ_do_not_meet(method: str, case: str) -> None:
    def step() -> None:
        tree = STRUCTURES[case][replica_id()]
        if method == "all_reduce":
            context().all_reduce("sum", tree)
        else:
            context().all_gather(tree, axis=0)

    with pytest.raises(ValueError, match=r"^Replicas 0 and 1 .*of different structure"):
        TWO.run(step)


def test_a_collective_that_not_every_replica_comes_to_is_an_error(
    several: Strategy,
) -> None:
    def step(who: int) -> None:
        if replica_id() == who:
            context().all_reduce("sum", torch.ones(1))

    for who in (0, 1):
        with pytest.raises(
            RuntimeError,
            match=rf"^The replicas synchronized .*replica {who} is at all_reduce",
        ):
            several.run(step, args=(who,))


# ReplicaContext.all_gather


def test_every_replica_gets_all_values_in_replica_order(several: Strategy) -> None:
    n = several.num_replicas_in_sync

    def step() -> None:
        r = replica_id()
        gathered = context().all_gather(
            {"x": torch.full((1, 2), r), "y": [torch.arange(r)]}, axis=0
        )
        assert gathered["x"].tolist() == [[i, i] for i in range(n)]
        assert gathered["y"][0].tolist() == [k for i in range(n) for k in range(i)]
        assert (
            context().all_gather(torch.full((2, 1), r), axis=-1).tolist()
            == [list(range(n))] * 2
        )

    several.run(step)


def test_one_replica_gathers_what_it_has() -> None:
    for topology in (*SINGLE, "central_1", "copies_1"):
        gathered = TOPOLOGIES[topology]().run(
            lambda: context().all_gather(torch.tensor([[1.0, 2.0]]), axis=1)
        )
        assert gathered.tolist() == [[1, 2]]
