"""Workers with one replica send no messages beside their gradients.

They hear all the same that one of them differs.
"""

from __future__ import annotations

import math

import pytest

from conditions import for_changes
from workers import unlike
from workers.cluster import cluster

pytestmark = pytest.mark.slow

PLACES = "The workers came to different synchronization points"
UNLIKE = "The workers are not alike at"


@for_changes
@pytest.mark.parametrize("size", [1, math.inf], ids=["sent early", "sent in the end"])
@pytest.mark.parametrize(
    ("what", "told", "later"),
    [
        (
            "a setting",
            "the settings of SGD (optimizer 2 of the scope): momentum=0.5",
            0,
        ),
        ("another step", "the gradients of backward 1 of another_step", 0),
        ("another order", "has other numbers in worker 1 than in worker 0", 1),
        ("an extra backward", "(the gradients of backward 3 of step)", 1),
        ("a missing backward", "(the gradients of backward 2 of step)", 1),
        ("a frozen parameter", "which parameters are trained", 0),
        ("a mode", "the modes of the modules", 0),
        ("a message", "all_reduce", 0),
        (
            "a checkpoint",
            "Sequential.0.weight has other numbers in worker 1 than in worker 0",
            0,
        ),
        (
            "a write on a buffer",
            "Sequential.1.running_var has other numbers in worker 1 than in worker 0",
            0,
        ),
        ("another parameter", "the beginning of the first run", 0),
        (
            "a write that is not counted",
            "has other numbers in worker 1 than in worker 0",
            9,
        ),
        ("noise", "has other numbers in worker 1 than in worker 0", 9),
    ],
)
def test_a_worker_that_differs_is_named_in_all(
    what: str, told: str, later: int, size: float
) -> None:
    """Either at the next exchange, or later.

    Later is where no version tells of a write, when the parameter's turn has come.
    """
    for message, run in cluster(2).run(unlike.of_difference, what, size):
        assert told in message, (what, message, run)
        assert any(said in message for said in (PLACES, UNLIKE, "other numbers"))
        assert unlike.FROM <= run <= unlike.FROM + later, (what, run)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "a parameter of nobody",
            (
                "RuntimeError: SGD.step() was called in a replica, and it updates a "
                "parameter of"
            ),
        ),
        (
            "parameters that were replaced",
            "RuntimeError: SGD.step() was called in a replica, and it trains nothing",
        ),
        (
            "a tensor in an attribute",
            (
                "TypeError: Linear.scale is a tensor that requires grad in a plain "
                "attribute"
            ),
        ),
        ("a lazy module", "TypeError: LazyLinear.weight has no shape yet"),
        (
            "a loss of gradients",
            (
                "RuntimeError: A loss was made of parameter.grad after "
                "backward(create_graph=True)"
            ),
        ),
        (
            "a clipped gradient of its own",
            "RuntimeError: The step has put a gradient of its own rows into",
        ),
        (
            "a sum with an earlier gradient",
            "RuntimeError: The step has assigned the gradient of",
        ),
        (
            "an update on another thread",
            "RuntimeError: SGD.step() was called on the thread",
        ),
        ("a run on another thread", "RuntimeError: "),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_what_cannot_work_is_refused_by_name(what: str, told: str) -> None:
    for message in cluster(2).run(unlike.of_refusal, what):
        assert message.startswith(told), (what, message)


@for_changes
def test_a_backward_that_raises_in_all_workers_leaves_no_gradients() -> None:
    (first, weights), (second, others) = cluster(2).run(
        unlike.of_backward_that_raises, math.inf
    )
    assert first == second == "" and weights == others


@for_changes
def test_a_backward_that_raises_after_some_gradients_were_sent_is_the_end() -> None:
    for message, _ in cluster(2).run(unlike.of_backward_that_raises, 1):
        assert "failed: ValueError: too large" in message
