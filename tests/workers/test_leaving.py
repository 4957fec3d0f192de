"""Where one worker is asked to end, all leave after the same step."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import torchstrategy
from torchstrategy.experimental import PreemptionCheckpointHandler
from workers import leaving
from workers.cluster import cluster


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("when", "replicas", "runs"),
    [
        ("between runs", 1, 3),
        ("in a run", 1, 3),
        ("between runs", 2, 3),
        ("in a run", 2, 4),
    ],
)
def test_all_workers_leave_after_the_same_run(
    culprit: int, when: str, replicas: int, runs: int
) -> None:
    # A signal that comes in a run is told to the others when it ends, or, with several
    # replicas, when the next begins.
    assert (
        cluster(3).run(leaving.of_signal, culprit, when, replicas)
        == [([False] * (runs - 1) + [True], True)] * 3
    )


def test_a_lone_process_leaves_at_once() -> None:
    strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
    before = signal.getsignal(signal.SIGUSR1)
    handler = PreemptionCheckpointHandler(strategy, signals=(signal.SIGUSR1,))
    assert not handler.requested
    os.kill(os.getpid(), signal.SIGUSR1)
    assert handler.requested
    handler.close()
    handler.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not PreemptionCheckpointHandler(strategy, signals=()).requested


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"takes a torchstrategy\.Strategy; got 'mirrored'"
    ):
        PreemptionCheckpointHandler("mirrored")  # type: ignore[arg-type]
    refused: list[RuntimeError] = []

    def in_a_thread() -> None:
        try:
            PreemptionCheckpointHandler(torchstrategy.MirroredStrategy(["cpu"]))
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert "in the main thread only: make it there" in str(refused[0])
