"""What workers say that are at different places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from torchstrategy._group.processes.blame import guess_lost
from torchstrategy._group.processes.comparisons import (
    WHICH_IT_REFUSED,
    describe_difference,
    describe_standstill,
)
from torchstrategy._group.processes.lifelines import Lifelines

NAMES = [f"worker {w} of 3 (node{w}, process {w})" for w in range(3)]


def test_places_are_listed_in_the_order_of_the_workers() -> None:
    text, blamed = describe_standstill(
        {2: "reduce", 0: "the gradients of backward 1 of step"}, NAMES
    )
    assert (
        "worker 0 is at the gradients of backward 1 of step, worker 2 is at reduce."
        in text
    )
    assert blamed == []


def test_a_worker_that_refused_its_arguments_is_the_one_to_be_named() -> None:
    """The others, which waited for gradients, were named beside it."""
    places = {
        0: "the gradients of backward 1 of step",
        1: f"a run{WHICH_IT_REFUSED}TypeError: no function.",
    }
    text, blamed = describe_standstill({**places, 2: places[0]}, NAMES)
    assert text.startswith(
        "worker 1 of 3 (node1, process 1) refused what it was given"
    ) and blamed == [1]
    assert (
        "TypeError: no function. Give all workers" in text
        and "worker 0" not in text
        and "worker 2" not in text
    )


TRAINS = "the step of run 4 (the gradients of backward 1 of train_step)"
REDUCES = (
    "the end of strategy.run of run 4 (reduce(MEAN)) with [(torch.float32, ()), "
    "(torch.float32, (2,))]"
)
ITERATES = (
    "the end of strategy.run of run 3 (the beginning of an iteration over a dataset)"
)
LET_ALL = (
    "if one worker alone validates or logs, let all workers make these calls, and let "
    "one of them print the result."
)


@pytest.mark.parametrize(
    ("places", "calls"),
    [
        (
            [REDUCES, TRAINS],
            "worker 0 called strategy.reduce while worker 1 called strategy.run",
        ),
        (
            [TRAINS, TRAINS, REDUCES],
            "worker 0 called strategy.run while worker 2 called strategy.reduce",
        ),
        (
            [REDUCES, ITERATES],
            (
                "worker 0 called strategy.reduce while worker 1 began to iterate over "
                "a dataset"
            ),
        ),
        (
            [TRAINS.replace("4", "9"), TRAINS],
            (
                "worker 0 called strategy.run 9 times while worker 1 called "
                "strategy.run 4 times"
            ),
        ),
        (
            [ITERATES.replace("3", "1"), ITERATES],
            "worker 0 called strategy.run 1 time while worker 1 called",
        ),
        (
            [
                "the first run of run 0 (strategy.barrier)",
                "the beginning of strategy.run of run 1 (the beginning of a run)",
            ],
            "worker 0 called strategy.barrier while worker 1 called strategy.run",
        ),
    ],
)
def test_one_worker_that_validates_alone_is_named(
    places: list[str], calls: str
) -> None:
    """It read of synchronization points, in words of its step.

    It did not think of its validation.
    """
    told = [
        describe_difference([(place, []) for place in places]),
        describe_standstill(dict(enumerate(places)), NAMES)[0],
    ]
    for text in told:
        assert f" Here, {calls}" in text and text.endswith(LET_ALL)


@pytest.mark.parametrize(
    "other",
    [
        TRAINS.replace("backward 1", "backward 2"),
        "the step of run 5 (the gradients of backward 2 of train_step)",
        "all_reduce(SUM) of run 4 (all_reduce(SUM)) with [(torch.float32, (3,))]",
        "the end of strategy.run of run 4 (the buffers)",
    ],
)
def test_workers_that_part_within_a_step_hear_nothing_of_validation(other: str) -> None:
    assert "validates" not in describe_difference([(TRAINS, []), (other, [])])


def test_tensors_of_other_shapes_in_one_call_are_not_said_to_be_a_validation() -> None:
    other = REDUCES.replace("(2,)", "(3,)")
    assert "validates" not in describe_difference([(REDUCES, []), (other, [])])


def test_a_worker_waiting_in_its_own_call_hears_that_others_may_have_ended() -> None:
    lines = cast(
        Lifelines,
        SimpleNamespace(first=lambda kind: (1, {}) if kind == "left" else None),
    )
    for where, is_hinted in ((REDUCES, True), (ITERATES, True), (TRAINS, False)):
        text, blamed = guess_lost(lines, NAMES, where, 1.0, RuntimeError())
        assert text.startswith(f"{NAMES[1]} has left: ") and blamed == [1]
        assert (
            "If one worker alone validates or logs when the others have ended, let all"
            in text
        ) == is_hinted
