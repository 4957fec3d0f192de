"""A call that refuses its arguments refuses them before anything is sent.

The workers go on with the next call.
"""

from __future__ import annotations

import pytest

from conditions import for_changes
from workers import refusing
from workers.cluster import cluster

pytestmark = pytest.mark.slow

NAMES = list(refusing.CALLS)


@for_changes
@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("one_only", [False, True], ids=["in all workers", "in one"])
def test_a_refused_argument_is_refused_by_all_and_the_strategy_goes_on(
    workers: int, replicas: int, one_only: bool
) -> None:
    """Who caught the error of `gather` could not use the strategy any more.

    The others heard that it failed.
    """
    names = [
        name
        for name in NAMES
        if replicas == 2 or ("weights" not in name and "examples" not in name)
    ]
    if one_only:
        # The others send nothing, and hear of it where they come next.
        names.remove("reduce plain")
    of_all = cluster(workers).run(refusing.refused, names, replicas, one_only)
    trained = [calls.pop()[1] for calls in of_all]
    assert trained == trained[:1] * workers
    for calls in zip(*of_all, strict=True):
        name, told, _ = calls[1]
        assert told.startswith(("TypeError: ", "ValueError: ")), (name, told)
        assert "refused what it was given" not in told, (name, told)
        for w, (_, heard, total) in enumerate(calls):
            assert total == workers * replicas, name
            if not one_only:
                assert heard == told, name
            elif w != 1:
                why = told.partition(": ")[2].removeprefix("value['b']: ")
                assert f"worker 1 of {workers} (" in heard and why in heard, (
                    name,
                    heard,
                )
                assert heard.partition(":")[0] == told.partition(":")[0], (name, heard)


@pytest.mark.parametrize(
    ("kind", "told"), [("dataclass", "A Held "), ("named tuple", "A Pair ")]
)
def test_a_batch_that_cannot_be_lent_is_refused_in_all_workers(
    kind: str, told: str
) -> None:
    """Its class would say how to make one in the worker that has none.

    It was unpickled there.
    """
    (first, total), (second, _) = cluster(2).run(refusing.lent, kind)
    assert second.startswith(f"TypeError: {told}cannot be sent to other workers")
    assert first.startswith("TypeError: worker 1 of 2 (") and second in first
    assert total == "2.0"
