"""What one may say about how values go from replica to replica.

It is validated, or refused with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchstrategy
from problems import context
from topologies import central
from torchstrategy.experimental import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)

AUTO, RING, NCCL = CommunicationImplementation

METHODS: dict[str, Callable[[torchstrategy.Strategy, Any], Any]] = {
    "all_reduce": lambda s, options: s.run(
        lambda: context().all_reduce("sum", torch.ones(2), options=options)
    ),
    "all_gather": lambda s, options: s.run(
        lambda: context().all_gather(torch.ones(2), 0, options=options)
    ),
    "reduce_to": lambda s, options: s.extended.reduce_to(
        "sum", s.run(lambda: torch.ones(2)), "cpu", options=options
    ),
    "batch_reduce_to": lambda s, options: s.extended.batch_reduce_to(
        "sum", [(s.run(lambda: torch.ones(2)), "cpu")], options=options
    ),
}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """Every method that takes options."""
    return request.param


# What may be said


def test_by_default_nothing_is_said() -> None:
    options = CommunicationOptions()
    assert (
        options.bytes_per_pack,
        options.timeout_seconds,
        options.implementation,
    ) == (0, None, AUTO)
    assert options == CommunicationOptions(0, None, "auto") == CollectiveHints()


@given(
    st.integers(0, 2**40),
    st.none() | st.floats(0, 1e9),
    st.sampled_from(["auto", "RING", "Nccl", AUTO, RING, NCCL]),
)
def test_options_are_what_was_said(
    size: int, timeout: float | None, implementation: Any
) -> None:
    options = CommunicationOptions(size, timeout, implementation)
    assert (options.bytes_per_pack, options.timeout_seconds) == (size, timeout)
    assert options.implementation is CommunicationImplementation(
        getattr(implementation, "value", implementation).upper()
    )
    assert CollectiveHints(size, timeout) == CommunicationOptions(size, timeout)
    assert hash(options) == hash(CommunicationOptions(size, timeout, implementation))


def test_the_older_names_are_names_of_the_same() -> None:
    assert CollectiveCommunication is CommunicationImplementation
    assert isinstance(CollectiveHints(bytes_per_pack=1), CommunicationOptions)
    assert [member.name for member in CommunicationImplementation] == [
        "AUTO",
        "RING",
        "NCCL",
    ]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative bytes": (
        {"bytes_per_pack": -1},
        ValueError,
        r"\(bytes_per_pack=-1\): it is 0 or more",
    ),
    "half a byte": (
        {"bytes_per_pack": 0.5},
        TypeError,
        r"\(bytes_per_pack=0\.5\): it is a whole number of bytes",
    ),
    "text for bytes": (
        {"bytes_per_pack": "1MB"},
        TypeError,
        r"\(bytes_per_pack='1MB'\): it is a whole number of bytes",
    ),
    "no bytes": (
        {"bytes_per_pack": None},
        TypeError,
        r"\(bytes_per_pack=None\): it is a whole number of bytes",
    ),
    "a negative timeout": (
        {"timeout_seconds": -1},
        ValueError,
        r"\(timeout_seconds=-1\): it is 0 or more",
    ),
    "no number": (
        {"timeout_seconds": float("nan")},
        ValueError,
        r"\(timeout_seconds=nan\): it is 0 or more",
    ),
    "text for a timeout": (
        {"timeout_seconds": "1"},
        TypeError,
        r"\(timeout_seconds=.*a number, .*got '1'",
    ),
    "an unknown name": (
        {"implementation": "mpi"},
        ValueError,
        r"\(implementation='mpi'\): say 'AUTO', 'RING' or 'NCCL'",
    ),
    "an empty name": (
        {"implementation": ""},
        ValueError,
        r"\(implementation=''\): say 'AUTO', 'RING' or 'NCCL'",
    ),
    "no implementation": (
        {"implementation": None},
        ValueError,
        r"\(implementation=None\): say 'AUTO'",
    ),
    "something else": (
        {"implementation": 1},
        ValueError,
        r"\(implementation=1\): say 'AUTO'",
    ),
    "something unhashable": (
        {"implementation": []},
        ValueError,
        r"\(implementation=\[\]\): say 'AUTO'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_said_is_refused(case: str) -> None:
    said, error, sentence = WRONG[case]
    with pytest.raises(error, match="^CommunicationOptions" + sentence):
        CommunicationOptions(**said)


def test_options_do_not_change() -> None:
    with pytest.raises(AttributeError):
        CommunicationOptions().bytes_per_pack = 1  # type: ignore[misc]


def test_a_replica_that_is_alone_sends_nothing_and_packs_are_no_error(
    strategy: torchstrategy.Strategy, method: str
) -> None:
    METHODS[method](strategy, CommunicationOptions(bytes_per_pack=1024))
    METHODS[method](strategy, CommunicationOptions(timeout_seconds=0))
    METHODS[method](strategy, CollectiveHints())


# What is refused


@pytest.mark.parametrize(
    "options", [3, "auto", {"bytes_per_pack": 1}, torchstrategy.RunOptions()]
)
def test_what_is_no_option_is_refused(
    strategy: torchstrategy.Strategy, method: str, options: Any
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^{method}\(options=.*\): options are torchstrategy\.experimental\.",
    ):
        METHODS[method](strategy, options)


def test_a_timeout_is_refused_on_one_machine(
    strategy: torchstrategy.Strategy, method: str
) -> None:
    sentence = (
        r"\(options=CommunicationOptions\(timeout_seconds=1\.5\)\): the replicas are "
        r"in one process, .* Leave it out"
    )
    with pytest.raises(ValueError, match=f"^{method}{sentence}"):
        METHODS[method](strategy, CommunicationOptions(timeout_seconds=1.5))


def test_rings_are_refused(strategy: torchstrategy.Strategy, method: str) -> None:
    sentence = (
        r"\(options=CommunicationOptions\(implementation=RING\)\): TensorFlow's rings "
        r"are not here\. Leave it out"
    )
    with pytest.raises(ValueError, match=f"^{method}{sentence}"):
        METHODS[method](strategy, CommunicationOptions(implementation="ring"))


def test_nccl_is_refused_where_it_cannot_be_used(
    strategy: torchstrategy.Strategy, method: str
) -> None:
    why = (
        "NCCL is for sums; gathers are"
        if method == "all_gather"
        else "NCCL joins CUDA devices only, and these are "
    )
    with pytest.raises(
        ValueError,
        match=(
            rf"^{method}\(options=CommunicationOptions\(implementation=NCCL\)\): "
            rf"{why}"
        ),
    ):
        METHODS[method](strategy, CommunicationOptions(implementation=NCCL))


@pytest.mark.parametrize("other", ["all_reduce", "reduce_to", "batch_reduce_to"])
def test_nccl_is_used_where_it_can(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    # Sums among CUDA devices go by NCCL as they are; there is nothing else to do.
    monkeypatch.setattr(
        "torchstrategy._parity.options.why_not_nccl", lambda devices: None
    )
    METHODS[other](central(3), CommunicationOptions(implementation=NCCL))
