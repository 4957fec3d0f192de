"""What workers hold together: values, variables, metrics, trainers, models."""

from __future__ import annotations

import pytest
import torch

import torchstrategy
from conditions import for_changes
from token_losses import printed_over_tokens
from workers import values
from workers.cluster import cluster
from workers.trainings import batches, difference

pytestmark = pytest.mark.slow


@for_changes
@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
def test_values_have_the_numbers_of_all_replicas(workers: int, replicas: int) -> None:
    count = workers * replicas
    given = [float(r + 10 * count) for r in range(count)]
    for w, found in enumerate(cluster(workers).run(values.of_values, replicas)):
        own = range(w * replicas, (w + 1) * replicas)
        assert found["in sync"] == count
        assert found["saves"] == (w == 0, w == 0)
        assert found["local"] == [given[r] for r in own]
        assert [one[0].item() for one in found["returned"]] == list(own)
        assert [one[1] for one in found["returned"]] == [count] * replicas
        assert [one[2].item() for one in found["returned"]] == [sum(given)] * replicas
        assert found["none"] is None
        assert found["ids"] == list(range(count))
        assert found["sum"] == 2 * sum(given)
        assert found["mean"] == 2 * sum(given) / count


@for_changes
@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
def test_a_scalar_loss_is_the_mean_over_the_rows_of_all_workers_and_one_replica_prints(
    workers: int, replicas: int
) -> None:
    alone = values.weighted_means_of(torchstrategy.OneDeviceStrategy("cpu"))
    everyone = cluster(workers).run(values.of_weighted_means, replicas)
    assert everyone[0] == pytest.approx(alone, rel=1e-12)
    for found in everyone[1:]:
        assert found == pytest.approx(
            [loss for i, loss in enumerate(alone) if i % 3], rel=1e-12
        )  # and printed nothing


@for_changes
@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (2, 2), (3, 1)])
def test_a_loss_over_tokens_is_logged_as_plain_pytorch_prints_it(
    workers: int, replicas: int
) -> None:
    expected = printed_over_tokens()
    for found in cluster(workers).run(values.of_losses_over_tokens, replicas):
        assert found == pytest.approx(expected, rel=1e-12)


@for_changes
@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
def test_variables_are_those_of_replicas_in_one_process(
    workers: int, replicas: int
) -> None:
    alone = values.variables_of(
        torchstrategy.MirroredStrategy(["cpu"] * workers * replicas)
    )
    for found in cluster(workers).run(values.of_variables, replicas):
        assert difference(found, alone) < 1e-12
    assert alone["assigned"] == 6


@for_changes
@pytest.mark.parametrize("replicas", [1, 2])
def test_values_that_each_replica_has_begin_with_those_of_worker_0(
    replicas: int,
) -> None:
    for w, (first, assigned, late) in enumerate(
        cluster(2).run(values.of_variables_that_begin, replicas)
    ):
        ids = range(w * replicas, (w + 1) * replicas)
        assert first == (
            [2.0 + r for r in ids],
            2.0 + sum(range(2 * replicas)) / (2 * replicas),
        )
        assert assigned == ([3.0 + w] * replicas, 3.5)  # the last word is the program's
        assert late == ([7.0] * replicas, 7.0)


@for_changes
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_expanded_buffer_begins_with_the_values_of_worker_0(replicas: int) -> None:
    """The first run failed.

    Torch refused to write on a tensor that has each of its numbers several times.
    """
    for found in cluster(2).run(values.of_an_expanded_buffer, replicas):
        assert torch.equal(found, torch.arange(3.0).expand(2, 2, 3))


@for_changes
@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
def test_metrics_count_the_rows_of_all_workers(workers: int, replicas: int) -> None:
    alone = values.metrics_of(
        torchstrategy.MirroredStrategy(["cpu"] * workers * replicas)
    )
    assert alone["rows"] == 17
    for found in cluster(workers).run(values.of_metrics, replicas):
        assert found == pytest.approx(alone, rel=1e-6)


def test_a_moving_average_in_a_plain_attribute_is_warned_of_in_each_worker() -> None:
    """They went on with different ones."""
    for found in cluster(2).run(values.of_attributes, 2):
        assert len(found) == 1 and found[0].startswith(
            "The attribute Averaging.average has other numbers in each"
        )


def test_a_moving_average_of_a_lone_replica_stays_in_its_worker() -> None:
    assert cluster(2).run(values.of_attributes, 1) == [[], []]


@for_changes
def test_attributes_of_trainers_are_those_of_each_worker() -> None:
    found = cluster(2).run(values.of_trainers, 2)
    # In the last batch of one row the second worker is an understudy. It counts its
    # step. Only replica 0 has a loss.
    assert [(steps, losses) for steps, losses, _ in found] == [
        (len(batches()), 1),
        (len(batches()), 0),
    ]
    assert all(
        torch.equal(value, found[1][2][name]) for name, value in found[0][2].items()
    )


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "shape",
            (
                "worker 0 has Linear.weight of shape (2, 3) and torch.float32 where "
                "worker 1 has Linear.weight"
            ),
        ),
        (
            "number",
            "worker 0 has nothing where worker 1 has Linear.weight of shape (1, 1)",
        ),
    ],
)
def test_different_models_are_refused_by_name(what: str, told: str) -> None:
    for outcome in cluster(2).outcomes(values.of_different_models, what):
        assert outcome.error is not None
        assert outcome.error.startswith(
            "RuntimeError: Workers 0 and 1 have different models:"
        )
        assert told in outcome.error


@pytest.mark.parametrize(
    ("what", "replicas", "told"),
    [
        ("a setting", 2, "the settings of SGD: "),
        ("a setting", 1, "the settings of SGD: "),
        ("a setting between runs", 2, "the settings of SGD: "),
        ("a setting between runs", 1, "the settings of SGD: "),
        ("an argument", 2, "the arguments of ReduceLROnPlateau.step():"),
        ("an argument", 1, "the state of ReduceLROnPlateau:"),
        ("a cleared gradient", 2, "The workers disagree about the gradient of"),
        (
            "a cleared gradient",
            1,
            "Linear.weight has other numbers in worker 1 than in worker 0",
        ),
        ("a frozen parameter", 2, "which parameters are trained"),
        ("a frozen parameter", 1, "which parameters are trained"),
        ("a mode", 2, "the modes of the modules: 'eval'"),
        ("a mode", 1, "the modes of the modules: 'eval'"),
        (
            "an idle reader",
            2,
            (
                "worker 1 is at the first read of a gradient (.grad) after backward of "
                "run 1"
            ),
        ),
        ("an idle reader", 1, "of run 2 (the gradients of backward 1 of step)"),
    ],
)
def test_what_workers_do_differently_is_refused(
    what: str, replicas: int, told: str
) -> None:
    for outcome in cluster(2).outcomes(values.of_different, what, replicas):
        assert outcome.error is not None and told in outcome.error, outcome


@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
def test_dataclasses_are_gathered_from_all_workers(workers: int, replicas: int) -> None:
    for found in cluster(workers).run(values.of_dataclasses, replicas):
        assert found == [([2.0 * row for row in range(9)], 36.0), ([0.0], 0.0)]


def test_settings_that_are_equal_are_not_refused() -> None:
    first, second = cluster(2).run(values.of_equal_settings)
    assert first == second


@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), (2, 2)])
def test_python_objects_are_gathered_from_all_workers_in_order(
    workers: int, replicas: int
) -> None:
    for found in cluster(workers).run(values.of_objects, replicas):
        for size, (texts, ids, dicts, none, few) in zip((9, 1, 4), found, strict=True):
            assert ids == list(range(size)) and none == [None] * size and few == [0]
            assert texts == [["cat", "dog"][i % 2] for i in range(size)]
            assert dicts == [
                {"text": texts[i], "id": i, "more": [None] * (i % 3)}
                for i in range(size)
            ]
    for found in cluster(workers).run(values.of_loaded_texts, replicas):
        assert found == [
            ["row 0", "row 1", "row 2"],
            ["row 3", "row 4", "row 5"],
            ["row 6"],
        ]


@pytest.mark.parametrize("one_only", [False, True], ids=["in all workers", "in one"])
def test_objects_that_cannot_be_gathered_are_refused_in_all_workers(
    one_only: bool,
) -> None:
    first, second = cluster(2).run(values.of_unsendable_objects, one_only)
    assert second[0].startswith(
        "TypeError: An Unsendable cannot be sent to other workers"
    )
    assert second[1].startswith(
        "ValueError: A list with a Python object for each row is gathered along axis=0"
    )
    assert first[2] == second[2] == 2
    for told, refusal in zip(first[:2], second[:2], strict=True):
        assert told == refusal or (
            one_only and "worker 1 of 2 (" in told and refusal in told
        )
