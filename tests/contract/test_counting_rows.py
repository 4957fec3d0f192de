"""`Strategy.count_rows`, and calls of a strategy that are misspelt or unfinished."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchstrategy


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_rows_of_a_batch_and_of_what_a_step_returns_are_counted(
    strategy: Any, rows: int
) -> None:
    source = [
        {
            "x": torch.randn(rows, 2),
            "names": [str(row) for row in range(rows)],
            "rate": 0.1,
        }
    ]
    (batch,) = strategy.experimental_distribute_dataset(source)
    assert strategy.count_rows(batch) == rows
    assert (
        strategy.count_rows(batch["x"]) == strategy.count_rows(batch["names"]) == rows
    )
    assert (
        strategy.count_rows(strategy.run(lambda x: x[:, 0], args=(batch["x"],))) == rows
    )
    assert strategy.count_rows(torch.ones(5)) == 5


def test_what_has_no_rows_is_refused(strategy: Any) -> None:
    with pytest.raises(
        ValueError,
        match=(
            "count_rows takes a batch, or a value with rows; nothing in this one has "
            "any"
        ),
    ):
        strategy.count_rows(strategy.run(lambda: torch.ones(())))


def test_parts_of_two_batches_are_refused() -> None:
    strategy = torchstrategy.MirroredStrategy(["cpu"] * 2)
    one, other = strategy.experimental_distribute_dataset(
        [torch.ones(4), torch.ones(3)]
    )
    with pytest.raises(
        ValueError,
        match=r"count_rows takes one batch; got parts of several, .*\(2, 1\), \(2, 2\)",
    ):
        strategy.count_rows((one, other))


def test_reduce_without_axis_says_what_to_write() -> None:
    strategy = torchstrategy.MirroredStrategy(["cpu"] * 2)
    with pytest.raises(
        TypeError,
        match=r'give it axis. Write\n  strategy.reduce\("sum", value, axis=None\)',
    ):
        strategy.reduce("sum", torch.ones(2))  # type: ignore[call-overload]


def test_a_misspelt_name_says_which_was_meant() -> None:
    strategy: Any = torchstrategy.MirroredStrategy(["cpu"])
    with pytest.raises(
        AttributeError, match="Did you mean 'experimental_distribute_dataset'"
    ):
        strategy.distribute_dataset([])
    with pytest.raises(AttributeError, match="Did you mean 'num_replicas_in_sync'"):
        _ = strategy.num_replicas
    with pytest.raises(AttributeError, match="Did you mean 'MirroredStrategy'"):
        _ = torchstrategy.MirorredStrategy  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'xyz'\.$"):
        _ = strategy.xyz


def misspelt_calls() -> list[tuple[str, Callable[[], Any]]]:
    strategy: Any = torchstrategy.MirroredStrategy(["cpu"] * 2)
    package: Any = torchstrategy
    model = torch.nn.Linear(1, 1)
    return [
        (
            r"MirroredStrategy\(\) got .* 'device'. Did you mean 'devices'\?",
            lambda: package.MirroredStrategy(device=[]),
        ),
        (
            "Did you mean 'parameter_device'",
            lambda: package.CentralStorageStrategy(["cpu"], param_device="cpu"),
        ),
        (
            "Did you mean 'devices'",
            lambda: package.MultiWorkerMirroredStrategy(device=["cpu"]),
        ),
        ("Did you mean 'device'", lambda: package.OneDeviceStrategy(devices="cpu")),
        (
            r"run\(\) got .* 'arg'. Did you mean 'args'\? It takes fn, args",
            lambda: strategy.run(len, arg=("",)),
        ),
        ("Did you mean 'axis'", lambda: strategy.reduce("mean", torch.ones(2), axes=0)),
        ("Did you mean 'axis'", lambda: strategy.gather(torch.ones(2), axes=0)),
        (
            "Did you mean 'options'",
            lambda: strategy.experimental_distribute_dataset([], option=None),
        ),
        (
            "Did you mean 'device_ids'",
            lambda: package.DataParallel(model, devices_ids=["cpu"]),
        ),
        (
            "Did you mean 'gradient_reduction'",
            lambda: package.RunOptions(gradients_reduction="sum"),
        ),
        ("Did you mean 'row_shares'", lambda: package.InputOptions(row_share=[1])),
        ("Did you mean 'aggregation'", lambda: package.Variable(0.0, agregation=None)),
        ("Did you mean 'momentum'", lambda: package.nn.SyncBatchNorm(2, momentun=0.1)),
        (
            "Did you mean 'strategy'",
            lambda: package.testing.assert_same_as_plain(strategi=strategy),
        ),
        (
            r"run\(\) got an unexpected keyword argument 'xyz'. It takes fn",
            lambda: strategy.run(len, xyz=1),
        ),
    ]


@pytest.mark.parametrize("case", range(15))
def test_a_misspelt_keyword_says_which_was_meant(case: int) -> None:
    message, call = misspelt_calls()[case]
    with pytest.raises(TypeError, match=message):
        call()


def test_a_misspelt_keyword_in_a_step_says_which_was_meant() -> None:
    strategy = torchstrategy.MirroredStrategy(["cpu"] * 2)
    with pytest.raises(TypeError, match="Did you mean 'axis'"):
        strategy.run(
            lambda: torchstrategy.get_replica_context().all_gather(
                torch.ones(1), axes=0
            )
        )  # type: ignore


def test_what_says_its_keywords_has_its_own_signature() -> None:
    for thing in (
        torchstrategy.MirroredStrategy,
        torchstrategy.Strategy.run,
        torchstrategy.RunOptions,
    ):
        assert (
            "args" not in inspect.signature(thing).parameters
            or thing is torchstrategy.Strategy.run
        )
    assert list(inspect.signature(torchstrategy.Strategy.run).parameters) == [
        "self",
        "fn",
        "args",
        "kwargs",
        "options",
    ]


def test_a_count_in_place_of_devices_says_what_to_write() -> None:
    with pytest.raises(
        TypeError, match=r'got 4\. For 4 replicas write \["cpu"\] \* 4 on the CPU, or '
    ):
        torchstrategy.MirroredStrategy(4)  # type: ignore[arg-type]
