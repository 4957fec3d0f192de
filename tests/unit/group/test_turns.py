"""Whose turn it is: replicas of one place take turns, others do not.

All wait at meetings.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from torchstrategy._base.devices import canonical_device
from torchstrategy._group import replica_threads
from torchstrategy._group.group import Replica
from torchstrategy._group.replica_threads import Replicas

PATIENCE = 5.0  # seconds that a test waits for what must happen at once


def cpus(*indices: int) -> list[torch.device]:
    return [canonical_device(f"cpu:{index}") for index in indices]


@pytest.fixture
def several_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each logical CPU a place of its own, as each accelerator is.

    All logical CPUs are in one place, and there may be no accelerators here. Who gives
    the turns asks nothing about a device but its place; so this is all that it takes to
    see replicas run at the same time, and all else is as it is.
    """
    monkeypatch.setattr(replica_threads, "memory_device", lambda device: device)


@pytest.fixture(autouse=True)
def a_hang_is_a_failure() -> Iterator[None]:
    """Ends a run that hangs, again and again, so that the suite does not hang."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: Any) -> None:
        while frame is not None:
            if frame.f_code.co_filename == replica_threads.__file__:
                raise TimeoutError("this run would never have returned")
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE + 1, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def everyone(replicas: Replicas) -> Sequence[int]:
    return range(len(replicas.devices))


def echo(brought: Sequence[Any]) -> Sequence[Any]:
    return list(brought)


# One place


# Meetings


# Several places


@pytest.mark.usefixtures("several_places")
def test_replicas_in_different_places_run_at_the_same_time() -> None:
    replicas, together = Replicas(cpus(0, 1, 2)), threading.Barrier(3)

    def call(replica: Replica) -> None:
        together.wait(PATIENCE)
        replica.synchronize("m", echo, None)
        together.wait(PATIENCE)

    replicas.run(call, everyone(replicas))
    assert not together.broken


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.usefixtures("several_places")
@pytest.mark.parametrize(
    "other", [KeyError("also bad"), Unprintable()], ids=["KeyError", "Unprintable"]
)
def test_of_two_failures_the_lower_replicas_comes_out_and_speaks_of_the_other(
    other: BaseException,
) -> None:
    error, together = ValueError("bad"), threading.Barrier(2)

    def call(replica: Replica) -> None:
        together.wait(PATIENCE)
        raise error if replica.index == 0 else other

    replicas = Replicas(cpus(0, 1))
    with pytest.raises(ValueError, match="bad") as caught:
        replicas.run(call, everyone(replicas))
    assert caught.value is error
    notes = "".join(error.__notes__)
    assert "replica 0 of 2" in notes
    assert "replica 1" in notes
    assert type(other).__name__ in notes


# Teams


# Streams of random numbers
