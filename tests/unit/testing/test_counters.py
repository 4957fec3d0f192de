"""`count_traffic`: copies and meetings of all threads of a run, nothing else."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from problems import context, data, deal, mlp, mse, sgd
from topologies import TOPOLOGIES
from torchstrategy._base.devices import canonical_device
from torchstrategy._copies.replicated_storage import ReplicatedStorage
from torchstrategy._run.placement import Placement
from torchstrategy.replicated import ReplicatedExtended
from torchstrategy.testing import count_traffic

CPU, META = torch.device("cpu"), torch.device("meta")


def central(replicas: int, may_alias: bool = True) -> torchstrategy.Strategy:
    """Some replicas on the one CPU.

    Their parameters share the owner's memory, or are real copies there.
    """
    devices = [canonical_device("cpu:0")] * replicas
    storage = ReplicatedStorage(Placement(devices, devices[0], may_alias))
    return torchstrategy.Strategy(
        ReplicatedExtended(storage, torchstrategy.ReduceOp.MEAN)
    )


# What is a copy


@pytest.mark.parametrize(
    ("copy", "count", "size"),
    [
        (lambda: torch.ones(3).to("meta"), 1, 12),
        (lambda: torch.ones(3).to("meta", torch.float64), 1, 24),
        (lambda: nn.Linear(2, 3).to("meta"), 2, 36),
        (lambda: torch.empty(3, device="meta").copy_(torch.ones(3)), 1, 12),
        (lambda: torch.empty(3, device="meta").data.copy_(torch.ones(3)), 1, 12),
        (
            lambda: torch._foreach_copy_(
                [torch.empty(3, device="meta")] * 2, [torch.ones(3)] * 2
            ),
            2,
            24,
        ),
        (lambda: torch.ones(3).to("cpu"), 0, 0),
        (lambda: torch.ones(3).to("cpu", copy=True), 0, 0),
        (lambda: torch.ones(3).double(), 0, 0),
        (lambda: torch.empty_like(torch.ones(3), device="meta"), 0, 0),
    ],
)
def test_what_torch_does_is_counted(
    copy: Callable[[], Any], count: int, size: int
) -> None:
    with count_traffic() as traffic:
        copy()
    assert (traffic.copies, traffic.bytes) == (count, size)
    assert traffic.copies_by_route == Counter({(CPU, META): count} if count else {})
    assert traffic.bytes_by_route == Counter({(CPU, META): size} if count else {})
    assert traffic.copies_by_route[META, CPU] == 0
    assert traffic.writes == 0


def test_values_that_are_overwritten_on_their_own_device_are_writes() -> None:
    with count_traffic() as traffic:
        torch.zeros(3).copy_(torch.ones(3))
        torch._foreach_copy_([torch.zeros(3)] * 2, [torch.ones(3)] * 2)
        torch.zeros(3).add_(1)
    assert (traffic.writes, traffic.copies) == (3, 0)


# Whose


def test_the_copies_of_all_replicas_are_counted() -> None:
    with count_traffic() as traffic:
        central(3).run(lambda: torch.ones(1).to("meta"))
    assert traffic.copies_by_route == {(CPU, META): 3}


def test_the_copies_in_backward_and_in_merge_functions_are_counted() -> None:
    def step() -> None:
        (torch.ones(2, requires_grad=True).double() * 2).sum().backward()
        context().merge_call(lambda strategy: torch.ones(1).to("meta"))

    with count_traffic() as traffic:
        central(2).run(step)
    assert traffic.copies == 1
    assert traffic.meetings == {"merge_call": 1}


def test_what_other_threads_do_and_what_is_done_after_the_block_is_not_counted() -> (
    None
):
    strategy = central(2)

    def work() -> None:
        torch.ones(1).to("meta")
        strategy.run(lambda: context().all_reduce("sum", 1))

    with count_traffic() as traffic:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    assert (traffic.copies, dict(traffic.meetings)) == (0, {})


def test_blocks_within_blocks_all_count() -> None:
    with count_traffic() as outer:
        torch.ones(1).to("meta")
        with count_traffic() as inner:
            torch.ones(1).to("meta")
            central(2).run(lambda: context().all_reduce("sum", 1))
    assert (outer.copies, inner.copies) == (2, 1)
    assert outer.meetings == inner.meetings == {"all_reduce(SUM)": 1}


# A step


@pytest.mark.parametrize("replicas", [2, 3])
def test_mirrors_are_written_once_per_parameter_and_replica_if_it_changed(
    replicas: int,
) -> None:
    def writes(strategy: torchstrategy.Strategy) -> list[int]:
        with strategy.scope():
            model = mlp()
            optimizer = sgd(model)

        def train(batch: Any) -> None:
            mse(model, batch).backward()
            optimizer.step()

        found = []
        strategy.run(train, args=(deal(strategy, data(6)),))
        for step in (train, lambda batch: mse(model, batch)):
            with count_traffic() as traffic:
                strategy.run(step, args=(deal(strategy, data(6)),))
            found.append(traffic.writes)
        return found

    assert writes(central(replicas, may_alias=False)) == [4 * replicas, 0]
    assert writes(central(replicas)) == [0, 0]


@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_meetings_are_counted_once_however_many_replicas_there_are(name: str) -> None:
    strategy = TOPOLOGIES[name]()
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        context().all_reduce("sum", torch.ones(1))
        optimizer.step()

    with count_traffic() as traffic:
        for batch in strategy.experimental_distribute_dataset(
            [data(6), data(1), data(7)]
        ):
            strategy.run(step, args=(batch,))
    expected = {"all_reduce(SUM)": 3}
    # Else the replica uses the user's own optimizer.
    if strategy.num_replicas_in_sync > 1 or name == "copies_1":
        expected |= {
            "optimizer.step()": 3,
            "the first read of a gradient (.grad) after backward": 3,
        }
    assert traffic.meetings == expected


def test_the_meetings_of_replicas_that_are_not_all_present_are_counted() -> None:
    strategy = central(2)
    with count_traffic() as traffic:
        for examples in ([0, 2], [2, 0]):
            strategy.run(
                lambda: context().all_reduce("sum", 1),
                options=torchstrategy.RunOptions(examples=examples),
            )
    assert traffic.meetings == {"all_reduce(SUM)": 2}


def test_meetings_that_do_not_come_about_are_not_counted() -> None:
    def step() -> None:
        if context().replica_id_in_sync_group:
            context().all_reduce("sum", 1)

    with (
        count_traffic() as traffic,
        pytest.raises(RuntimeError, match="different number of times"),
    ):
        central(2).run(step)
    assert not traffic.meetings


@pytest.mark.parametrize(
    "inside", [True, False], ids=["an update inside", "an update outside"]
)
@pytest.mark.parametrize("may_alias", [True, False], ids=["aliased", "copies"])
def test_gradients_become_one_once_a_step_however_often_they_are_read(
    may_alias: bool, inside: bool
) -> None:
    strategy = central(3, may_alias)
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if inside:
            optimizer.step()

    with count_traffic() as traffic:
        for batch in strategy.experimental_distribute_dataset([data(6), data(7)]):
            strategy.run(step, args=(batch,))
            if not inside:
                optimizer.step()
    assert traffic.gradient_reductions == 2


def test_gradients_of_a_lone_replica_do_not_become_one() -> None:
    strategy = central(1, may_alias=False)
    with strategy.scope():
        model = mlp()
    with count_traffic() as traffic:
        strategy.run(
            lambda b: mse(model, b).backward(), args=(deal(strategy, data(6)),)
        )
    assert model[0].weight.grad is not None
    assert traffic.gradient_reductions == 0


def test_what_was_counted_is_shown() -> None:
    with count_traffic() as traffic:
        torch.ones(1).to("meta")
    assert (
        repr(traffic)
        == "Traffic(copies=1, bytes=4, writes=0, meetings={}, gradient_reductions=0)"
    )


def test_counting_is_not_begun_in_a_replica() -> None:
    def step() -> None:
        with count_traffic():
            pass

    with pytest.raises(RuntimeError, match="count_traffic was called in replica 0"):
        central(2).run(step)
