"""`reduce("mean", loss, axis=None, weights=batch)` logs what plain PyTorch logs.

The loss is a scalar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from token_losses import logged_over_tokens, printed_over_tokens
from topologies import TOPOLOGIES, compute_devices

# Of each batch of an epoch: four replicas get 3 3 3 2, 2 2 2 1, 1 1 1 1, 1 1 0 0, 1 0 0
# 0.
ROWS = (11, 7, 4, 2, 1)


def epoch() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        (
            torch.randn(rows, 3, dtype=torch.float64),
            torch.randn(rows, 1, dtype=torch.float64),
        )
        for rows in ROWS
    ]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def logged(strategy: torchstrategy.Strategy) -> list[float]:
    """The loss of each step of an epoch, as a script logs it."""
    with strategy.scope():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for batch in strategy.experimental_distribute_dataset(epoch()):
        loss = strategy.run(
            step, args=batch if isinstance(batch, tuple) else tuple(batch)
        )
        losses.append(strategy.reduce("mean", loss, axis=None, weights=batch).item())
    return losses


@pytest.mark.parametrize(
    "kind", [*TOPOLOGIES, "four central", "four mirrored", "four in version 1"]
)
def test_over_an_epoch_a_scalar_loss_is_plain_pytorchs(kind: str) -> None:
    """Also where the replicas have uneven rows."""
    four: dict[str, Any] = {
        "four central": lambda: torchstrategy.CentralStorageStrategy(
            compute_devices(4)
        ),
        "four mirrored": lambda: torchstrategy.MirroredStrategy(compute_devices(4)),
        "four in version 1": lambda: (
            torchstrategy.compat.v1.experimental.CentralStorageStrategy(
                compute_devices(4)
            )
        ),
    }
    strategy = {**TOPOLOGIES, **four}[kind]()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    plain = []
    for inputs, targets in epoch():
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    found = logged(strategy)
    assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) < 1e-12
    assert abs(sum(found) - sum(plain)) < 1e-12


def kinds() -> dict[str, Any]:
    devices = compute_devices(3)
    return {
        "one device": lambda: torchstrategy.OneDeviceStrategy(devices[0]),
        "default": torchstrategy.get_strategy,
        **{
            f"central {n}": lambda n=n: torchstrategy.CentralStorageStrategy(
                devices[:n]
            )
            for n in (1, 3)
        },
        **{
            f"mirrored {n}": lambda n=n: torchstrategy.MirroredStrategy(devices[:n])
            for n in (1, 3)
        },
    }


@pytest.mark.parametrize("counts", ["a tensor", "a number"])
@pytest.mark.parametrize("kind", kinds())
def test_a_loss_over_tokens_is_logged_as_plain_pytorch_prints_it(
    kind: str, counts: str
) -> None:
    """Each step returns its loss and its count; the counts weight gradients, too."""
    found = logged_over_tokens(kinds()[kind](), counts)
    assert found == pytest.approx(printed_over_tokens(), rel=1e-12)


@pytest.fixture
def four() -> torchstrategy.Strategy:
    return torchstrategy.CentralStorageStrategy(compute_devices(4))


def means_of(strategy: torchstrategy.Strategy, rows: torch.Tensor) -> tuple[Any, Any]:
    (batch,) = strategy.experimental_distribute_dataset([rows])
    return strategy.run(torch.mean, args=(batch,)), batch


def test_without_weights_every_replica_counts_the_same(
    four: torchstrategy.Strategy,
) -> None:
    means, batch = means_of(four, torch.arange(10.0))  # 0 1 2, 3 4 5, 6 7 8, 9
    assert four.reduce("mean", means, axis=None).item() == 5.25
    assert four.reduce("mean", means, axis=None, weights=batch).item() == 4.5


def test_weights_may_be_numbers_and_what_the_step_counted(
    four: torchstrategy.Strategy,
) -> None:
    means, batch = means_of(four, torch.arange(10.0))
    assert four.reduce("mean", means, axis=None, weights=[3, 3, 3, 1]).item() == 4.5
    assert four.reduce("mean", means, axis=None, weights=(0.5, 0, 0, 0.5)).item() == 5.0
    counts = four.run(len, args=(batch,))
    assert four.reduce("mean", means, axis=None, weights=counts).item() == 4.5
    tokens = four.run(lambda rows: rows.sum(), args=(batch,))  # 3, 12, 21, 9
    expected = (1 * 3 + 4 * 12 + 7 * 21 + 9 * 9) / 45
    assert four.reduce(
        "mean", means, axis=None, weights=tokens
    ).item() == pytest.approx(expected, rel=1e-6)


def test_containers_and_values_that_are_one_for_all(
    four: torchstrategy.Strategy,
) -> None:
    (batch,) = four.experimental_distribute_dataset(
        [{"x": torch.arange(5.0), "name": "five"}]
    )
    found = four.run(
        lambda batch: {"loss": batch["x"].mean(), "parts": [batch["x"].sum()]},
        args=(batch,),
    )
    # 2, 2, 1 and no rows.
    reduced = four.reduce("mean", {**found, "lr": 0.1}, axis=None, weights=batch)
    assert reduced["loss"].item() == 2.0
    assert reduced["parts"][0].item() == pytest.approx((1 * 2 + 5 * 2 + 4 * 1) / 5)
    assert reduced["lr"] == 0.1


def test_a_batch_of_a_class_of_the_users(four: torchstrategy.Strategy) -> None:
    @dataclass
    class Batch:
        x: torch.Tensor

    (batch,) = four.experimental_distribute_dataset([Batch(torch.arange(5.0))])
    means = four.run(lambda batch: batch.x.mean(), args=(batch,))
    assert four.reduce("mean", means, axis=None, weights=batch).item() == 2.0


def test_a_nan_of_a_replica_without_rows_does_not_count(
    four: torchstrategy.Strategy,
) -> None:
    (batch,) = four.experimental_distribute_dataset([torch.arange(2.0)])
    run_empty = torchstrategy.RunOptions(run_empty_replicas=True)
    means = four.run(torch.mean, args=(batch,), options=run_empty)
    assert means.values[2].isnan()
    assert four.reduce("mean", means, axis=None, weights=batch).item() == 0.5


@pytest.mark.parametrize(
    ("dtype", "found"),
    [
        (torch.float16, torch.float16),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_half_numbers_do_not_overflow_and_integers_become_floats(
    four: torchstrategy.Strategy, dtype: torch.dtype, found: torch.dtype
) -> None:
    (batch,) = four.experimental_distribute_dataset([torch.ones(1001)])
    number = 1 if dtype == torch.bool else 1000
    values = four.run(
        lambda rows: torch.full((), number, device=rows.device).to(dtype), args=(batch,)
    )
    mean = four.reduce("mean", values, axis=None, weights=batch)
    assert mean.dtype == found
    assert mean.item() == number


def test_weights_are_refused_where_every_row_counts_once(
    four: torchstrategy.Strategy,
) -> None:
    means, batch = means_of(four, torch.arange(10.0))
    with pytest.raises(
        ValueError, match=r"this is a MEAN along axis=0, in which every row counts once"
    ):
        four.reduce("mean", batch, axis=0, weights=batch)
    with pytest.raises(ValueError, match=r"this is a SUM along axis=None"):
        four.reduce("sum", means, axis=None, weights=batch)


@pytest.mark.parametrize(
    "weights", [[1, 2], "rows", 3, torch.ones(4), {}, {"x": [1, 2, 3, 4]}]
)
def test_what_is_no_weight_is_refused(
    four: torchstrategy.Strategy, weights: Any
) -> None:
    means, _ = means_of(four, torch.arange(10.0))
    with pytest.raises(
        ValueError, match=r"the batch that the strategy split.*a list of 4 numbers, one"
    ):
        four.reduce("mean", means, axis=None, weights=weights)


def test_a_vector_is_no_weight(four: torchstrategy.Strategy) -> None:
    means, batch = means_of(four, torch.arange(10.0))
    vectors = four.run(lambda rows: rows + 1, args=(batch,))
    with pytest.raises(
        ValueError, match=r"one number for each replica; got one of shape \(3,\)"
    ):
        four.reduce("mean", means, axis=None, weights=vectors)


def test_batches_that_were_split_otherwise_are_refused(
    four: torchstrategy.Strategy,
) -> None:
    means, batch = means_of(four, torch.arange(10.0))
    (other,) = four.experimental_distribute_dataset([torch.arange(9.0)])
    with pytest.raises(
        ValueError,
        match=r"split with different rows, \[\(3, 3, 3, 0\), \(3, 3, 3, 1\)\]",
    ):
        four.reduce("mean", means, axis=None, weights=[batch, other])


def test_a_weight_of_a_replica_that_sat_out_is_refused(
    four: torchstrategy.Strategy,
) -> None:
    means, _ = means_of(four, torch.arange(10.0))
    (short,) = four.experimental_distribute_dataset([torch.arange(2.0)])
    counts = four.run(len, args=(short,))
    with pytest.raises(
        ValueError,
        match=(
            r"no weight for a replica that has a value: give "
            r"the batch of the same step"
        ),
    ):
        four.reduce("mean", means, axis=None, weights=counts)


# A thing that is done once


@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_exactly_one_replica_is_the_first(kind: str) -> None:
    strategy = TOPOLOGIES[kind]()
    printed = []

    def step(rows: torch.Tensor) -> None:
        context = torchstrategy.get_replica_context()
        assert context is not None
        if context.is_first_replica:
            printed.append(context.replica_id_in_sync_group)

    for batch in strategy.experimental_distribute_dataset(
        [torch.ones(7), torch.ones(1)]
    ):
        strategy.run(step, args=(batch,))
    assert printed == [0, 0]


def test_the_first_replica_with_rows_is_the_first() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
    options = torchstrategy.InputOptions(row_shares=[0, 1, 1])
    (batch,) = strategy.experimental_distribute_dataset([torch.ones(4)], options)
    first = strategy.run(
        lambda rows: torchstrategy.get_replica_context().is_first_replica, args=(batch,)
    )
    assert first.values == (True, False)


def test_outside_of_a_strategy_the_caller_is_the_first() -> None:
    context = torchstrategy.get_replica_context()
    assert context is not None and context.is_first_replica
    entered = torchstrategy.ReplicaContext(
        torchstrategy.CentralStorageStrategy(["cpu"] * 2), 1
    )
    assert not entered.is_first_replica
