"""A training that a process is asked to end."""

from __future__ import annotations

import os
import signal

import torch

import torchstrategy
from torchstrategy.experimental import PreemptionCheckpointHandler


def of_signal(culprit: int, when: str, replicas: int) -> tuple[list[bool], bool]:
    """What the handler says after each run.

    Whether the signals are handled as before in the end.
    """
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"] * replicas)
    is_culprit = strategy.extended._workers.index == culprit
    before = signal.getsignal(signal.SIGTERM)
    said = []

    def step() -> torch.Tensor:
        is_last = (
            torchstrategy.get_replica_context().replica_id_in_sync_group % replicas
            == replicas - 1
        )
        if is_culprit and is_last and when == "in a run" and len(said) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.ones(())

    with PreemptionCheckpointHandler(strategy) as handler:
        for _ in range(9):
            strategy.reduce("sum", strategy.run(step), axis=None)
            said.append(handler.requested)
            if handler.requested:
                break
            if is_culprit and when == "between runs" and len(said) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
    return said, signal.getsignal(signal.SIGTERM) == before and handler.requested
