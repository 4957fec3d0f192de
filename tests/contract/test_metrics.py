"""Metrics over all replicas are those of one device.

docs/metrics.md runs, and torchmetrics' objects do in a step.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics import classification, wrappers

import torchstrategy
from conditions import only_with_copies
from documents import examples_run_on
from problems import deal, replica_id
from topologies import SIMULATED, central, central_with_copies, compute_devices

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "one_device": lambda: torchstrategy.OneDeviceStrategy(compute_devices(1)[0]),
    "copies_1": lambda: central_with_copies(1),
    "central_3": lambda: central(3),
    "mirrored_2": lambda: torchstrategy.MirroredStrategy(compute_devices(2)),
}
ROWS = (7, 5, 2, 6)
_generator = torch.Generator().manual_seed(0)
SCORES = [
    (
        torch.randn(n, 3, generator=_generator).softmax(1),
        torch.randint(3, (n,), generator=_generator),
    )
    for n in ROWS
]
PAIRS = [
    (torch.randn(n, generator=_generator), torch.randn(n, generator=_generator))
    for n in ROWS
]
VALUES = [(torch.randn(n, generator=_generator),) for n in ROWS]

METRICS: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "accuracy": (lambda: classification.MulticlassAccuracy(3), SCORES),
    "auroc": (lambda: classification.MulticlassAUROC(3), SCORES),
    "confusion": (lambda: classification.MulticlassConfusionMatrix(3), SCORES),
    "classwise": (
        lambda: wrappers.ClasswiseWrapper(
            classification.MulticlassAccuracy(3, average=None)
        ),
        SCORES,
    ),
    "collection": (
        lambda: torchmetrics.MetricCollection(
            {
                "accuracy": classification.MulticlassAccuracy(3),
                "precision": classification.MulticlassPrecision(3),
                "auroc": classification.MulticlassAUROC(3),
            }
        ),
        SCORES,
    ),
    "mean": (torchmetrics.MeanMetric, VALUES),
    "max": (torchmetrics.MaxMetric, VALUES),
    "cat": (torchmetrics.CatMetric, VALUES),
    "sum_and_min": (
        lambda: torchmetrics.SumMetric() + torchmetrics.MinMetric(),
        VALUES,
    ),
    "mse": (torchmetrics.MeanSquaredError, PAIRS),
    "explained_variance": (torchmetrics.ExplainedVariance, PAIRS),
}


class Running(torchmetrics.Metric):
    """A metric whose one state is a mean over its updates."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, values: torch.Tensor) -> None:
        self.mean: torch.Tensor = (
            self.mean + (values.mean() - self.mean) / self._update_count
        )

    def compute(self) -> torch.Tensor:
        return self.mean


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return STRATEGIES[request.param]()


@pytest.fixture
def several() -> torchstrategy.Strategy:
    return STRATEGIES["central_3"]()


def created(strategy: torchstrategy.Strategy, build: Callable[[], Any]) -> Any:
    with strategy.scope():
        return build()


def update(strategy: torchstrategy.Strategy, metric: Any, batch: Any) -> None:
    strategy.run(metric.update, args=deal(strategy, batch))


def assert_same(ours: Any, plain: Any) -> None:
    torch.testing.assert_close(ours, plain, check_device=False)


@pytest.mark.slow
def test_the_examples_of_the_page_run() -> None:
    assert examples_run_on(PAGE) > 20


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_that_of_one_device(
    strategy: torchstrategy.Strategy, name: str
) -> None:
    build, batches = METRICS[name]
    metric, plain = created(strategy, build), build()
    for _ in range(2):
        for batch in batches:
            update(strategy, metric, batch)
            plain.update(*batch)
        assert_same(metric.compute(), plain.compute())
        metric.reset()
        plain.reset()


@pytest.mark.parametrize("name", ["accuracy", "auroc", "collection", "cat"])
def test_a_metric_that_a_replica_computes_is_that_of_all_replicas(
    strategy: torchstrategy.Strategy, name: str
) -> None:
    build, batches = METRICS[name]
    metric, plain = created(strategy, build), build()

    def step(*batch: Any) -> Any:
        metric.update(*batch)
        return metric.compute()

    for batch in batches:
        plain.update(*batch)
        for seen in strategy.experimental_local_results(
            strategy.run(step, args=deal(strategy, batch))
        ):
            assert_same(seen, plain.compute())
    assert_same(metric.compute(), plain.compute())


def test_a_metric_that_a_replica_calls_returns_that_of_its_own_rows(
    several: torchstrategy.Strategy,
) -> None:
    metric = created(several, torchmetrics.MeanMetric)
    values = torch.arange(6.0)
    seen = several.experimental_local_results(
        several.run(metric, args=(deal(several, values),))
    )
    assert [value.item() for value in seen] == [0.5, 2.5, 4.5]
    assert metric.compute().item() == 2.5


def test_a_mean_over_updates_weighs_them_alike(several: torchstrategy.Strategy) -> None:
    metric = created(several, Running)
    for start in (0.0, 30.0):
        # Two rows, two, and one.
        update(several, metric, (start + torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0]),))
    assert metric.compute().item() == pytest.approx(18.0)


def test_a_collection_has_what_a_loop_outside_of_runs_has_made_of_it(
    several: torchstrategy.Strategy,
) -> None:
    build, batches = METRICS["collection"]
    metric, plain = created(several, build), build()
    # Metrics that share states do so from the first update outside on.
    for index, batch in enumerate(batches):
        if index % 2:
            update(several, metric, batch)
        else:
            metric.update(
                *(tensor.to(metric["accuracy"].tp.device) for tensor in batch)
            )
        plain.update(*batch)
        assert_same(metric.compute(), plain.compute())


def test_a_run_that_fails_counts_nothing(several: torchstrategy.Strategy) -> None:
    metric = created(several, torchmetrics.CatMetric)
    update(several, metric, VALUES[0])
    before = copy.deepcopy(metric.metric_state), metric.update_count

    def step(values: torch.Tensor) -> None:
        metric.update(values)
        if replica_id() == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        several.run(step, args=deal(several, VALUES[1]))
    assert_same(metric.metric_state, before[0])
    assert metric.update_count == before[1]
    update(several, metric, VALUES[1])
    assert_same(
        metric.compute().sort()[0], torch.cat([VALUES[0][0], VALUES[1][0]]).sort()[0]
    )


def test_a_replica_may_reset_what_all_reset(several: torchstrategy.Strategy) -> None:
    metric = created(several, torchmetrics.SumMetric)
    update(several, metric, (torch.ones(3),))

    def step(values: torch.Tensor) -> None:
        metric.reset()
        metric.update(values)

    several.run(step, args=(deal(several, torch.full((6,), 2.0)),))
    assert metric.compute().item() == 12.0
    several.run(lambda: metric.reset())
    assert metric.sum_value.item() == 0.0


def test_states_that_do_not_become_one_are_refused(
    several: torchstrategy.Strategy,
) -> None:
    metric, plain = (
        created(several, torchmetrics.PearsonCorrCoef),
        torchmetrics.PearsonCorrCoef(),
    )
    with pytest.raises(
        RuntimeError,
        match=r"PearsonCorrCoef was updated in several replicas.*dist_reduce_fx=None",
    ):
        update(several, metric, PAIRS[0])
    for batch in (pair for pair in PAIRS if len(pair[0]) > 2):  # as the message says
        gathered = several.gather(
            several.run(lambda *pair: pair, args=deal(several, batch)), axis=0
        )
        metric.update(*gathered)
        plain.update(*batch)
    assert_same(metric.compute(), plain.compute())


def test_what_was_counted_is_dropped_with_a_reset(
    several: torchstrategy.Strategy,
) -> None:
    metric = created(several, torchmetrics.CatMetric)
    for batch in VALUES[:2]:
        update(several, metric, batch)
    references = [weakref.ref(tensor) for tensor in metric.value]
    assert len(references) == 2 * several.num_replicas_in_sync
    metric.reset()
    gc.collect()
    assert not any(reference() is not None for reference in references)
    update(several, metric, VALUES[2])
    assert_same(metric.compute(), VALUES[2][0])


@only_with_copies
def test_the_copies_are_not_made_anew_for_what_was_counted(
    several: torchstrategy.Strategy,
) -> None:
    metric = created(several, torchmetrics.CatMetric)
    copies = []

    def step(values: torch.Tensor) -> None:
        metric.update(values)
        copies.append(metric.add_state.__self__)  # the replica's own

    for batch in VALUES:
        several.run(step, args=deal(several, batch))
    assert len({id(own) for own in copies}) == several.num_replicas_in_sync > 1


def test_a_metric_is_on_the_devices_of_its_replicas(
    several: torchstrategy.Strategy,
) -> None:
    metric = created(several, torchmetrics.SumMetric)
    seen = several.run(lambda: metric.sum_value.device)
    expected = [SIMULATED[r] if SIMULATED else torch.device("cpu") for r in range(3)]
    assert list(several.experimental_local_results(seen)) == expected
