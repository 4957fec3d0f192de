"""Replicas without rows sit the step out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from problems import context, replica_id
from runs import Opaque, dealt, partial, per_replica
from topologies import central
from torchstrategy import RunOptions


@pytest.mark.parametrize(
    ("replicas", "rows", "present"),
    [(2, 1, 1), (3, 2, 2), (3, 4, 2), (4, 1, 1), (4, 6, 3)],
)
def test_a_replica_without_rows_is_not_called(
    replicas: int, rows: int, present: int
) -> None:
    strategy = central(replicas)
    called: list[int] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        called.append(replica_id())
        return batch.max()

    result = strategy.run(step, args=(dealt(strategy, rows),))
    assert sorted(called) == list(range(present))
    assert len(result.values) == present


def test_wherever_the_batch_stands_in_the_arguments_it_decides_who_runs() -> None:
    strategy, batch = partial()
    assert (
        len(
            strategy.run(
                lambda tree: replica_id() + 1000, args=({"x": [batch]},)
            ).values
        )
        == 2
    )
    assert (
        len(
            strategy.run(
                lambda x, *, b: replica_id() + 1000, args=(1,), kwargs={"b": batch}
            ).values
        )
        == 2
    )


def test_an_absent_replica_has_no_component_in_the_results() -> None:
    strategy, batch = partial()
    value = strategy.run(lambda x: x.float() + 1, args=(batch,))
    assert [component.tolist() for component in value.values] == [[1], [2]]
    assert [
        component.tolist() for component in strategy.experimental_local_results(value)
    ] == [[1], [2]]
    assert (
        str(value)
        == "PerReplica:{\n"
        + ",\n".join(f"  {r}: {c}" for r, c in enumerate(value.values))
        + "\n}"
    )
    assert strategy.reduce("sum", value, axis=None).tolist() == [3]
    assert strategy.reduce("mean", value, axis=None).tolist() == [1.5]
    assert strategy.reduce("mean", value, axis=0).item() == 1.5
    assert strategy.gather(value, axis=0).tolist() == [1, 2]


def test_results_of_the_lone_replica_that_is_present_are_distributed_values() -> None:
    strategy, batch = partial(2)
    constant = strategy.run(lambda x: 7, args=(batch,))
    assert constant.values == (7,)
    assert strategy.run(lambda x: None, args=(batch,)) is None
    nested = strategy.run(lambda x: {"x": [x * 2]}, args=(batch,))
    assert nested["x"][0].values[0].tolist() == [0]


def test_a_replica_that_sat_out_sits_out_again() -> None:
    strategy, batch = partial()
    value = strategy.run(lambda x: x + 1, args=(batch,))
    for options in (None, RunOptions(run_empty_replicas=True)):
        again = strategy.run(lambda x: int(x) + 1000, args=(value,), options=options)
        assert again.values == (1001, 1002)


def test_a_replica_sits_out_if_any_argument_has_nothing_for_it() -> None:
    strategy, batch = partial()
    everywhere = strategy.run(lambda: torch.ones(1) * replica_id())
    absent = strategy.run(lambda x: x + 1, args=(batch,))
    assert len(strategy.run(lambda a, b: a + b, args=(everywhere, absent)).values) == 2


def test_who_is_present_meets_without_the_absent() -> None:
    strategy, batch = partial()

    def step(x: torch.Tensor) -> Any:
        merged = context().merge_call(
            lambda s, v: (len(v.values), s.reduce("sum", v, axis=None)), args=(x + 1,)
        )
        reduced = context().all_reduce("mean", x + 1.0)
        gathered = context().all_gather(x, axis=0)
        return Opaque(
            (merged[0], merged[1].tolist(), reduced.tolist(), gathered.tolist())
        )

    expected = (2, [3], [1.5], [0, 1])
    assert [held.value for held in strategy.run(step, args=(batch,)).values] == [
        expected,
        expected,
    ]


def test_the_number_of_replicas_in_sync_counts_the_absent_too() -> None:
    strategy, batch = partial()
    assert strategy.run(
        lambda x: context().num_replicas_in_sync + 1000, args=(batch,)
    ).values == (1003, 1003)


def test_empty_replicas_can_be_made_to_run() -> None:
    strategy, batch = partial()
    result = strategy.run(
        lambda x: (len(x), replica_id()),
        args=(batch,),
        options=RunOptions(run_empty_replicas=True),
    )
    assert strategy.experimental_local_results(result) == ((1, 0), (1, 1), (0, 2))


def test_a_full_batch_after_a_partial_one_is_run_by_all() -> None:
    strategy, batch = partial()
    strategy.run(lambda x: x, args=(batch,))
    assert len(strategy.run(lambda x: x * 1, args=(dealt(strategy, 3),)).values) == 3


def test_a_value_that_nobody_dealt_has_no_empty_replicas() -> None:
    strategy = central(2)
    value = per_replica(strategy, [torch.ones(1), torch.ones(0)])
    assert strategy.run(lambda x: len(x) + 1000, args=(value,)).values == (1001, 1000)
