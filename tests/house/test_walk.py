"""The way of a step through the house grows no longer.

A limit is what was counted when it was last lowered. Whoever makes the way shorter lowers it. The aim is at most 30
files, and 200 passages between rooms.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from house.walk import Passage, Walk, walk

pytestmark = pytest.mark.slow

LIMITS = {"files": 46, "passages between rooms": 241}


def _walked() -> Walk:
    """Counted in a process of its own: what other tests have left, such as simulated devices, makes the way longer."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        walked = Walk()
        walked.calls, walked.between_files = pool.submit(_counts).result()
        return walked


def _counts() -> tuple[Counter[str], Counter[Passage]]:
    walked = walk()
    return walked.calls, walked.between_files


@pytest.fixture(scope="module")
def walked() -> Walk:
    return _walked()


def test_a_step_passes_few_files(walked: Walk) -> None:
    assert len(walked.calls) <= LIMITS["files"], walked.table(top=25)


def test_a_step_seldom_goes_from_room_to_room(walked: Walk) -> None:
    assert walked.between_rooms.total() <= LIMITS["passages between rooms"], walked.table(top=25)


def test_a_limit_that_is_reached_is_lowered(walked: Walk) -> None:
    """A limit far above what is counted holds nothing."""
    assert len(walked.calls) >= LIMITS["files"] - 5
    assert walked.between_rooms.total() >= LIMITS["passages between rooms"] * 0.9


def test_the_walk_begins_at_the_strategy_and_sees_the_threads_of_the_replicas(walked: Walk) -> None:
    assert walked.calls["_strategy/replicated"]
    assert any(start == "_execution/replica_threads" for start, _ in walked.between_files)
    assert any(end == "_training/replica_optimizer" for _, end in walked.between_files)


def test_the_same_way_is_counted_again(walked: Walk) -> None:
    again = _walked()
    assert again.calls == walked.calls
    assert again.between_files == walked.between_files
