"""Loaders that record when they are read, and what their batches hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from torchstrategy import DistributedValues, InputOptions
from torchstrategy._data import reading

INPUT = os.path.dirname(reading.__file__)

HANG = 20.0  # seconds: what these tests wait for takes milliseconds
AHEAD, ON_DEMAND = InputOptions(load_ahead=True), InputOptions(load_ahead=False)
both_ways = pytest.mark.parametrize(
    "options", [AHEAD, ON_DEMAND], ids=["ahead", "on demand"]
)


def prefetchers() -> set[threading.Thread]:
    """The threads of the library that read and carry."""
    names = ("torchstrategy-reader", "torchstrategy-prefetch")
    return {thread for thread in threading.enumerate() if thread.name.startswith(names)}


def nothing(k: int) -> None:
    pass


class Loader:
    """An iterable of batches of two rows, which records when it is asked for one."""

    def __init__(
        self, batches: int = 6, before: Callable[[int], Any] = nothing
    ) -> None:
        self.batches = batches
        self.before = before
        self.asked: list[int] = []
        self.is_asked = [threading.Event() for _ in range(batches)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self._batch, range(self.batches))

    def _batch(self, k: int) -> torch.Tensor:
        self.asked.append(k)
        self.is_asked[k].set()
        self.before(k)
        return torch.tensor([2 * k, 2 * k + 1], device="cpu")


class Rows(Dataset):
    """0 to n - 1, with something that is done before a row is read."""

    def __init__(self, n: int, before: Callable[[int], Any] = nothing) -> None:
        self.n = n
        self.before = before

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.before(index)
        return index


def batch_number(step: Any) -> int:
    """Which of a Loader's batches it is, all of it and in order."""
    first, second = rows_of(step)
    assert second == first + 1
    return first // 2


def rows_of(step: Any) -> list[Any]:
    """The rows that all replicas were dealt of a value."""
    pieces = step.values if isinstance(step, DistributedValues) else [step]
    return torch.cat([piece.cpu() for piece in pieces]).tolist()


def batch_numbers(steps: Any) -> list[int]:
    return [batch_number(step) for step in steps]
