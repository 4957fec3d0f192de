"""What workers say that are at different places."""

from __future__ import annotations

from torchstrategy._group.processes.comparisons import WHICH_IT_REFUSED, describe_standstill

NAMES = [f"worker {w} of 3 (node{w}, process {w})" for w in range(3)]


def test_places_are_listed_in_the_order_of_the_workers() -> None:
    text, blamed = describe_standstill({2: "reduce", 0: "the gradients of backward 1 of step"}, NAMES)
    assert "worker 0 is at the gradients of backward 1 of step, worker 2 is at reduce." in text
    assert blamed == []


def test_a_worker_that_refused_its_arguments_is_the_one_to_be_named() -> None:
    """The others, which waited for gradients, were named beside it."""
    places = {0: "the gradients of backward 1 of step", 1: f"a run{WHICH_IT_REFUSED}TypeError: no function."}
    text, blamed = describe_standstill({**places, 2: places[0]}, NAMES)
    assert text.startswith("worker 1 of 3 (node1, process 1) refused what it was given") and blamed == [1]
    assert "TypeError: no function. Give all workers" in text and "worker 0" not in text and "worker 2" not in text
