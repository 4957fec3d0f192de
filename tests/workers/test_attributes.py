"""What steps write on plain attributes stays in their worker, as under DDP.

They are those of modules and trainers.
"""

from __future__ import annotations

import pytest
import torch

from conditions import for_changes
from workers import attributes
from workers.cluster import cluster

pytestmark = pytest.mark.slow


@for_changes
def test_attributes_that_a_lone_replica_writes_stay_in_its_worker() -> None:
    """As with `DistributedDataParallel`: forward and trainer are the program's own.

    They see the worker's rows only.
    """
    for w, found in enumerate(cluster(3).run(attributes.of_workers, 1)):
        assert found["kept"] == found["plain"]
        assert found["steps"] == found["kept"]["calls"] == len(attributes.SIZES)
        assert found["kinds"] == {"loss": "Tensor", "number": "float", "rows": "int"}
        assert w == 0 or found["rows"][2] == 1  # lent by worker 0


@for_changes
def test_attributes_that_several_replicas_write_become_the_first_ones() -> None:
    everyone = cluster(2).run(attributes.of_workers, 2)
    for found in everyone:
        assert found["kept"] == found["plain"]
        assert found["steps"] == found["kept"]["calls"] == len(attributes.SIZES)
        # Also of a worker that had no rows in the last step.
        assert found["kinds"]["loss"] == "PerReplica"
    first, second = everyone
    assert first["kept"]["losses"] != second["kept"]["losses"]
    assert all(
        torch.equal(value, second["weights"][name])
        for name, value in first["weights"].items()
    )


def test_a_trainers_number_that_is_one_in_some_workers_only_is_not_summed() -> None:
    for outcome in cluster(2).outcomes(attributes.of_unlike_kinds):
        assert outcome.error is not None
        assert (
            "A value that is not distributed, 2, cannot be summed over 4 replicas"
            in outcome.error
        )
