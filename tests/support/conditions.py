"""What a test needs of the machine or of the run, with a reason.

The reason says what is missing and what to do.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TypeVar

import pytest
import torch

from depths import Depth, current_depth
from topologies import SIMULATED
from torchstrategy._turns.switch import IN_TURNS

T = TypeVar("T")

needs_simulated_devices = pytest.mark.skipif(
    not SIMULATED,
    reason="needs simulated devices: run pytest with --simulate-devices=5",
)
without_simulated_devices = pytest.mark.skipif(
    bool(SIMULATED),
    reason="tests what happens on the CPU: run pytest without --simulate-devices",
)
without_accelerators = pytest.mark.skipif(
    torch.accelerator.is_available(),
    reason=(
        "tests a machine without accelerators, and this one has some: hide them, and "
        "run without --simulate-devices"
    ),
)
# Replicas have copies of the program's objects, or take turns on the objects: see
# `torchstrategy/_turns`.
only_with_copies = pytest.mark.skipif(
    IN_TURNS, reason="says what only copies do, or cannot do: unset TORCHSTRATEGY_TURNS"
)
only_in_turns = pytest.mark.skipif(
    not IN_TURNS, reason="says what only turns do: set TORCHSTRATEGY_TURNS=1"
)
# The first depth at which a test runs: see `depths.py`.
for_changes = pytest.mark.depth("CHANGE")
for_releases = pytest.mark.depth("ALL")
needs_fork = pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="forks a process that has threads: run it on Linux",
)
needs_signals = pytest.mark.skipif(
    not (hasattr(signal, "pthread_kill") and hasattr(signal, "setitimer")),
    reason=(
        "sends signals to threads, which this system cannot: run it on Linux or macOS"
    ),
)


def some_of(cases: Sequence[T]) -> Sequence[T]:
    """Each sixth of the cases that one test goes through, or all for a release."""
    return cases if current_depth() is Depth.ALL else cases[::6]
