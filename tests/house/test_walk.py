"""The way of a step through the house grows no longer.

A limit is what was counted when it was last lowered. Whoever makes the way shorter lowers it. The aim is at most 30
files, and 100 passages between rooms. It was raised by 2 once: the backward of each replica passes a function that
finds the replica's own parameters for `backward(inputs=...)`, which were silently left out before. And by 1, as the
files were: `run` passes what says which keyword argument was meant, where one is misspelt.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

import torchstrategy
from house.walk import Passage, Walk, room_of
from processes import python

pytestmark = pytest.mark.slow

LIMITS = {"files": 34, "passages between rooms": 141}
FOLDERS = [Path(__file__).parents[1], Path(torchstrategy.__file__).parents[1]]
# Where the step of one replica stays, alone or in one of several workers: it knows no copies.
ROOMS_OF_ONE_REPLICA = {"_base", "_group", "_run", "top level"}
ROOMS_OF_ONE_REPLICA |= {
    "_data",
    "_variables",
}  # the rows that workers have read; values of variables
PROGRAM = """
import json
from house.walk import walk, walk_alone, walk_of_a_worker

for walked in (walk(), walk(), walk_alone(), walk_of_a_worker()):
    print(json.dumps([[*walked.calls.items()], [*walked.between_files.items()]]))
"""


@pytest.fixture(scope="module")
def walks() -> list[Walk]:
    """Counted in a process of its own: what other tests have left, such as simulated devices, makes the way longer."""
    done = python("-c", PROGRAM, PYTHONPATH=os.pathsep.join(map(str, FOLDERS)))
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        calls, between_files = json.loads(line)
        walked = Walk()
        walked.calls = Counter(dict(calls))
        walked.between_files = Counter(
            {Passage(*passage): count for passage, count in between_files}
        )
        found.append(walked)
    return found


@pytest.fixture
def walked(walks: list[Walk]) -> Walk:
    return walks[0]


def test_a_step_passes_few_files(walked: Walk) -> None:
    assert len(walked.calls) <= LIMITS["files"], walked.table(top=25)


def test_a_step_seldom_goes_from_room_to_room(walked: Walk) -> None:
    assert walked.between_rooms.total() <= LIMITS["passages between rooms"], (
        walked.table(top=25)
    )


def test_a_limit_that_is_reached_is_lowered(walked: Walk) -> None:
    """A limit far above what is counted holds nothing."""
    assert len(walked.calls) >= LIMITS["files"] - 5
    assert walked.between_rooms.total() >= LIMITS["passages between rooms"] * 0.9


def test_the_walk_begins_at_the_strategy_and_sees_the_threads_of_the_replicas(
    walked: Walk,
) -> None:
    assert walked.calls["replicated"]
    assert any(start == "_group/replica_threads" for start, _ in walked.between_files)
    assert any(end == "_copies/replica_steppers" for _, end in walked.between_files)


def test_a_step_of_one_replica_stays_in_few_rooms(walks: list[Walk]) -> None:
    """A worker with one replica went through the room of copies, of which it has none."""
    for one in walks[2:]:
        assert one.calls
        assert {
            file for file in one.calls if room_of(file) not in ROOMS_OF_ONE_REPLICA
        } == set()


def test_the_same_way_is_counted_again(walks: list[Walk]) -> None:
    first, again = walks[:2]
    assert again.calls == first.calls
    assert again.between_files == first.between_files
