"""What a test needs of the machine or of the run, with a reason.

The reason says what is missing and what to do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TypeVar

import pytest
import torch

from topologies import SIMULATED

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
takes_long = pytest.mark.skipif(
    "CI" not in os.environ, reason="takes several seconds: set CI=1 to run it"
)
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
    """Each sixth of a test's cases, and all of them where CI is set."""
    return cases if "CI" in os.environ else cases[::6]
