"""Fixtures for the tests that read loaders on threads and in processes."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Iterator

import pytest

from hangs import ended_if_it_hangs
from loaders import HANG, INPUT


@pytest.fixture
def a_hang_is_a_failure() -> Iterator[None]:
    with ended_if_it_hangs(INPUT, HANG):
        yield


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails the test that leaves a thread or a process behind."""
    before = set(threading.enumerate())
    yield
    if set(threading.enumerate()) - before or multiprocessing.active_children():
        gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG)
        assert not thread.is_alive(), f"{thread.name} is still there"
    assert not multiprocessing.active_children()
