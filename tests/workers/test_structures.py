"""Values of several parts.

Each part is put together with that of the same name in the other workers.
"""

from __future__ import annotations

import pytest

from workers import structures
from workers.cluster import cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_parts_are_matched_by_name_and_not_by_order(
    workers: int, replicas: int
) -> None:
    """An evaluation made its metrics of a set.

    Workers had them in another order, and losses were added to counts.
    """
    n = workers * replicas
    for found in cluster(workers).run(structures.in_another_order, replicas):
        total, mean, rows, gathered, sent, record, summed, joined = found
        assert (
            total
            == sent
            == record
            == summed
            == {"accuracy": [100.0 * n], "loss": [1.0 * n], "rows": [7.0 * n]}
        )
        assert mean == {"accuracy": [100.0], "loss": [1.0], "rows": [7.0]}
        assert rows == {"accuracy": 100.0 * n, "loss": 1.0 * n, "rows": 7.0 * n}
        assert (
            gathered
            == joined
            == {"accuracy": [100.0] * n, "loss": [1.0] * n, "rows": [7.0] * n}
        )


@pytest.mark.parametrize(
    "call", ["reduce", "reduce over rows", "gather", "gather of lists"]
)
def test_parts_that_only_one_worker_has_are_refused_in_all(call: str) -> None:
    """The part met the next call of the other workers, without a word."""
    for told, after in cluster(2).run(structures.of_other_parts, call):
        assert told.startswith(
            "Workers 0 and 1 brought values of different structure: only one of them "
            "has value["
        )
        assert after == "2.0"


def test_other_keys_of_a_collective_are_not_added() -> None:
    for outcome in cluster(2).outcomes(structures.of_other_keys_in_the_step):
        assert outcome.error is not None
        assert "the parts of the value: \"['a']\"" in outcome.error
        assert "the parts of the value: \"['b']\"" in outcome.error


def test_a_refusal_that_a_step_catches_shifts_no_sum() -> None:
    """The next collective of this worker met the first one of the others.

    All went on with wrong sums.
    """
    first, second = cluster(2).run(structures.of_a_refusal_that_is_caught)
    for sums, told in (first, second):
        assert not any(sums)
        assert (
            "the number of this call in the step: 2" in told
            and "the number of this call in the step: 1" in told
        )
