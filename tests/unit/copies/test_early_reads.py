"""Which replica is said to have read a gradient too early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchstrategy._copies.gradients.replica_gradients import EarlyReads, Reads


def having(replica: int, *local: int) -> Any:
    """The gradients of a replica, which has some of its own."""
    return SimpleNamespace(
        replica=SimpleNamespace(index=replica), local_indices=lambda: set(local)
    )


def test_the_replica_that_read_too_early_is_named_and_no_other_one() -> None:
    """The first replica that had read the gradient was named.

    Its own read was none too early.
    """
    of_replicas = [having(0), having(1, 1), having(2, 0)]
    reads = [Reads({0}, set()), Reads({0}, {0}), Reads({0}, set())]
    with pytest.raises(
        RuntimeError,
        match=(
            "Replica 1 read the gradient of first to which replica 2 still had to add"
        ),
    ):
        EarlyReads.of(of_replicas, reads, ["first", "second"])
