"""What steps write on plain attributes of modules and trainers is what replicas of one process come to."""

from __future__ import annotations

import pytest

import torchstrategy
from workers import attributes
from workers.cluster import cluster
from workers.trainings import difference

pytestmark = pytest.mark.slow


def test_attributes_are_those_of_replicas_in_one_process() -> None:
    workers, replicas = 2, 2
    alone = attributes.written(torchstrategy.MirroredStrategy(["cpu"] * workers * replicas))
    together = cluster(workers).run(attributes.of_workers, replicas)
    for found in together:
        # Nobody warns of a tuple that differs between workers only.
        assert set(alone["warned"]) - {"The attribute Writing.pair[0]"} <= set(found["warned"]) <= set(alone["warned"])
        assert difference(found["model"], alone["model"]) < 1e-12
    for i, expected in enumerate(alone["steps"]):
        for name, value in expected.items():
            of_workers = [found["steps"][i][name] for found in together]
            if name in attributes.OF_REPLICAS:
                # Each worker has the values of its own replicas; one that had no rows has none of its own.
                flat = [one for of_worker in of_workers for one in of_worker]
                assert [one for one in flat if one != []] == [one for one in value if one != []], (i, name)
            elif name.startswith("reduced"):
                assert of_workers == [pytest.approx(value, rel=1e-12)] * workers
            else:
                assert of_workers == [value] * workers, (i, name)


def test_attributes_that_a_lone_replica_writes_stay_in_its_worker() -> None:
    """As with `DistributedDataParallel`: forward and trainer are the program's own, and see the worker's rows only."""
    for w, (found, rows) in enumerate(cluster(3).run(attributes.of_lone_replicas)):
        assert found["steps"] == found["calls"] == len(attributes.SIZES)
        assert found["kinds"] == {"loss": "Tensor", "number": "float", "rows": "int"}
        assert found["losses"] == [pytest.approx(sum(batch) / len(batch)) for batch in rows]
        assert w == 0 or len(rows[2]) == 1  # lent by worker 0
