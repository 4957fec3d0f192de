"""Where a worker is lost, all others soon name this one, and no other one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import pytest

import torchstrategy
from conditions import for_changes, for_releases
from workers import blaming
from workers.cluster import Outcome, alone, cluster, free_ports

pytestmark = pytest.mark.slow

# On a machine that is ten times slower than one on which it takes half a second to
# three seconds.
SOON_S = 30.0


def together(
    count: int, call: Any, *args: Any, without: Collection[int] = ()
) -> list[Outcome]:
    """What a call comes to in processes that find each other by their environment.

    The first one keeps the store.
    """
    (port,) = free_ports(1)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
    }
    return alone(
        call,
        [{**common, "RANK": str(rank)} for rank in range(count)],
        *args,
        without=without,
    )


def blamed(text: str) -> set[int]:
    return {
        int(worker)
        for worker in re.findall(r"[Ww]orker (\d)", text.partition("This is worker")[0])
    }


@for_changes
@pytest.mark.parametrize(
    ("count", "culprit", "busy"), [(4, 1, None), (4, 0, None), (3, 2, 0), (4, 0, 3)]
)
def test_only_the_worker_that_was_killed_is_named(
    count: int, culprit: int, busy: int | None
) -> None:
    """In a ring of four, the one that is opposite to the dead one heard late.

    It was named, or named a survivor.

    A worker that was busy when another one was killed was told of those that had ended
    because of it.
    """
    outcomes = together(count, blaming.of_killed, culprit, busy)
    assert outcomes.pop(culprit).error == "ended"
    for outcome in outcomes:
        assert blamed(outcome.value) == {culprit}, outcome
        assert "is gone: the process has ended" in outcome.value


@for_changes
@pytest.mark.parametrize(("count", "culprit"), [(2, 0), (4, 0), (3, 1)])
def test_a_worker_that_was_stopped_is_said_not_to_answer(
    count: int, culprit: int
) -> None:
    """Where worker 0, which keeps the store, was stopped, others asked it for ever."""
    outcomes = together(count, blaming.of_stopped, culprit, without=[culprit])
    del outcomes[culprit]
    for outcome in outcomes:
        assert blamed(outcome.value) == {culprit}, outcome
        assert re.search(r"has not answered for \d+ s", outcome.value)


@for_releases
def test_a_stopped_worker_is_named_where_the_others_wait_at_different_places() -> None:
    """A sum had come to its end in some of them.

    They and the others were said to be apart, and nobody was named.
    """
    for outcome in together(3, blaming.of_stopped_between, 2, without=[2])[:2]:
        assert blamed(outcome.value) == {2}, outcome
        assert re.search(r"has not answered for \d+ s", outcome.value)


@for_changes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("how", ["fork", "loader"])
def test_a_death_is_heard_of_although_children_live_on(how: str) -> None:
    """The children kept the connections of their dead parent open.

    The others heard of it when these ended.
    """
    outcomes = together(3, blaming.of_forked_child, how)
    for outcome in (outcomes[0], outcomes[2]):
        told, seconds = outcome.value
        assert blamed(told) == {1}, outcome
        assert seconds < 7


@for_changes
@pytest.mark.skipif(sys.platform != "linux", reason="sockets are counted in /proc")
def test_a_forked_child_has_no_part_in_the_training() -> None:
    for told, heard, sockets in [
        outcome.value for outcome in together(3, blaming.run_in_forked_child)
    ]:
        *refused, in_child = told
        assert len(refused) == 2
        for text in refused:
            assert text.startswith("RuntimeError: ") and "forked from worker" in text, (
                text
            )
        assert heard == "nothing"
        # Three groups and two lifelines, each with two connections, at least.
        assert sockets - int(in_child) >= 9


@for_changes
@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_who_has_not_come_is_named(culprit: int) -> None:
    """It was said that 3 of 4 clients had joined."""
    outcomes = together(4, blaming.of_joining, culprit, "does not come")
    del outcomes[culprit]
    for outcome in outcomes:
        told, seconds = outcome.value
        assert blamed(told) == {culprit}, outcome
        assert "has not come within 4 s" in told
        assert seconds < SOON_S


@for_changes
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_worker_that_is_stopped_while_all_join_is_named(culprit: int) -> None:
    outcomes = together(3, blaming.of_joining, culprit, "is stopped", without=[culprit])
    del outcomes[culprit]
    for outcome in outcomes:
        told, seconds = outcome.value
        assert blamed(told) == {culprit}, outcome
        assert seconds < SOON_S


@for_releases
def test_a_worker_that_is_stopped_before_it_answers_is_named_alone() -> None:
    """Whoever had called it waited for its answer, answered nobody, and was named.

    It was named, too.
    """
    outcomes = together(4, blaming.of_joining, 1, "is stopped at the door", without=[1])
    del outcomes[1]
    for outcome in outcomes:
        told, seconds = outcome.value
        assert blamed(told) == {1}, outcome
        assert "has not answered within 4 s" in told
        assert seconds < SOON_S


@for_changes
@pytest.mark.parametrize("how", ["is killed", "raises"])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_worker_that_ends_while_all_join_is_named_at_once(
    culprit: int, how: str
) -> None:
    """The others waited for it as long as the timeout said, which was half an hour."""
    outcomes = together(4, blaming.of_joining, culprit, how)
    gone = outcomes.pop(culprit)
    assert gone.error == "ended" or gone.value[0] == "ValueError: no such luck"
    for outcome in outcomes:
        told, seconds = outcome.value
        assert blamed(told) == {culprit}, outcome
        assert seconds < SOON_S


@for_changes
def test_half_of_a_surrogate_pair_is_told_with_an_escape() -> None:
    first, second = cluster(2).run(blaming.of_surrogate)
    assert re.match(
        r"WorkerError: worker 1 of 2 \(.*\) failed: ValueError: bad name \\udce9\.",
        first,
    ), first
    assert second == "ValueError: bad name \udce9"


@for_changes
def test_settings_that_differ_are_named_with_both_values() -> None:
    for told in cluster(2).run(blaming.of_other_settings):
        assert re.search(
            r"not alike at .*worker 0 has the settings of AdamW: lr=0\.1, worker 1 has",
            told,
        ), told
        assert "the settings of AdamW: lr=0.2" in told
        assert "betas" not in told


@pytest.mark.parametrize(
    ("timeout", "error", "told"),
    [
        (6, TypeError, r"timeout=6\).*Write timeout=timedelta\(seconds=6\)"),
        (0.5, TypeError, r"Write timeout=timedelta\(seconds=0\.5\)"),
        ("6", TypeError, "takes a datetime.timedelta or None; got '6', a str"),
        (timedelta(0), ValueError, "Give a timeout above 0"),
    ],
)
def test_a_timeout_that_is_none_is_refused(
    timeout: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"], timeout=timeout)
