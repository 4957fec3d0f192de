"""States that a distributed dataset cannot load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from problems import shown
from resumable import (
    LOADERS,
    STEPS,
    Remembers,
    a_pipeline_for_each,
    batched,
    over,
    read,
    same,
)


def counted() -> Any:
    dataset = over(LOADERS["generator of the loader"]())
    read(iter(dataset), 2)
    return dataset.state_dict()


def changed(name: str, value: Any) -> Any:
    state = counted()
    state["sources"][0][name] = value
    return state


def refuses(state: Any) -> None:
    """Nothing of what is no state is taken."""
    dataset = over(LOADERS["generator of the loader"]())
    read(iter(dataset), 3)
    before = dataset.state_dict()
    with pytest.raises(TypeError, match=r"returned|returns"):
        dataset.load_state_dict(state)
    assert same(dataset.state_dict(), before)
    assert len(read(dataset)) == STEPS


JUNK = [
    None,
    3,
    "state",
    [],
    {},
    {"sources": None},
    {"sources": [3]},
    {"sources": [{}]},
    {"batches": 3},
    nn.ReLU(),
]


@pytest.mark.parametrize("junk", JUNK, ids=shown)
def test_what_is_no_state_is_refused(junk: Any) -> None:
    refuses(junk)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("batches", wrong) for wrong in (-1, 1.5, None, "2")),
        *(("batch_size", wrong) for wrong in (-1, 1.5, "2")),
        *(
            ("began", wrong)
            for wrong in (
                None,
                3,
                [None],
                [torch.ones(3)],
                [torch.tensor(3, dtype=torch.uint8)],
            )
        ),
        *(("asked", wrong) for wrong in (3, "no", {}, [None])),
        *(("is_begun", wrong) for wrong in (None, 1, "yes")),
        *(("batches", wrong) for wrong in (True, 10**30, torch.tensor(1))),
        *(("batch_size", wrong) for wrong in (0, True, 10**30)),
        ("more", 1),
    ],
    ids=shown,
)
def test_a_state_with_something_wrong_in_it_is_refused(name: str, wrong: Any) -> None:
    refuses(changed(name, wrong))
    with pytest.raises(TypeError, match=repr(name)):
        over(LOADERS["generator of the loader"]()).load_state_dict(changed(name, wrong))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "batches",
            STEPS + 1,
            rf"batches={STEPS + 1} were consumed, and this loader has {STEPS}\.",
        ),
        ("batches", sys.maxsize, rf"were consumed, and this loader has {STEPS}\."),
        ("began", [], "'began', is of a loader with 0 random generators"),
        (
            "began",
            [torch.zeros(7, dtype=torch.uint8)] * 2,
            r"began\[0\] in the state is not that of",
        ),
        (
            "asked",
            [torch.zeros(7, dtype=torch.uint8)] * 2,
            r"asked\[0\] in the state is not that of",
        ),
        ("is_begun", False, "is_begun=False, and batches=2"),
    ],
    ids=shown,
)
def test_a_state_that_cannot_be_of_this_loader_is_refused(
    name: str, wrong: Any, message: str
) -> None:
    """It was accepted, and the next iteration had no batches, or other ones.

    Or it failed with an error of torch's.
    """
    dataset = over(LOADERS["generator of the loader"]())
    with pytest.raises(ValueError, match=message):
        dataset.load_state_dict(changed(name, wrong))
    assert len(read(dataset)) == STEPS


@pytest.mark.parametrize("kind", ["stream", "list"])
def test_more_batches_than_there_are_are_not_silently_left_out(kind: str) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    source: Any = batched(Stream()) if kind == "stream" else [torch.ones(2)] * 4
    state = over(source).state_dict()
    state["sources"][0].update(is_begun=True, batches=9)
    resumed = over(source)
    with pytest.raises(ValueError, match="batches=9 were consumed"):
        resumed.load_state_dict(state)
        next(iter(resumed))


def test_a_state_with_further_entries_is_refused() -> None:
    with pytest.raises(TypeError, match="sources"):
        over(LOADERS["generator of the loader"]()).load_state_dict(
            {**counted(), "epoch": 3}
        )


@pytest.mark.parametrize(
    "name", ["is_begun", "batches", "batch_size", "began", "asked"]
)
def test_a_state_in_which_something_is_missing_is_refused(name: str) -> None:
    state = counted()
    del state["sources"][0][name]
    refuses(state)


def test_the_state_of_a_loader_of_another_kind_is_refused() -> None:
    plain, remembers = over(LOADERS["in order"]()), over(Remembers())
    with pytest.raises(
        ValueError,
        match=(
            r"^The state is of a loader that keeps its own state \(state_dict\), and "
            r"this"
        ),
    ):
        plain.load_state_dict(remembers.state_dict())
    with pytest.raises(
        ValueError, match=r"this one, a Remembers, is one that keeps its own state"
    ):
        remembers.load_state_dict(plain.state_dict())
    assert len(read(plain)) == STEPS
    assert len(read(remembers)) == 4


def test_the_state_of_a_loader_with_other_generators_is_refused() -> None:
    with pytest.raises(
        ValueError, match="with 1 random generators of its own, and this one has 0"
    ):
        over(LOADERS["shuffled"]()).load_state_dict(counted())
    with pytest.raises(
        ValueError, match="with 1 random generators of its own, and this one has 2"
    ):
        over(LOADERS["two generators"]()).load_state_dict(counted())
    with pytest.raises(
        ValueError,
        match=(
            r"'asked', is of a loader with 0 random "
            r"generators .*, and this one has 1"
        ),
    ):
        over(LOADERS["generator of the loader"]()).load_state_dict(
            changed("asked", counted()["sources"][0]["began"][:1])
        )


def test_of_several_states_either_all_are_taken_or_none() -> None:
    dataset = a_pipeline_for_each()
    read(iter(dataset), 1)
    state = dataset.state_dict()
    state["sources"][1] = counted()["sources"][0]
    resumed = a_pipeline_for_each()
    with pytest.raises(ValueError, match="random generators"):
        resumed.load_state_dict(state)
    assert sum(map(len, read(resumed))) == 11


def test_a_generator_that_was_read_cannot_be_turned_back() -> None:
    dataset = over(torch.ones(2) for _ in range(3))
    read(iter(dataset), 1)
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(
        RuntimeError,
        match=r"^The dataset is a generator, which can be iterated over once, and has",
    ):
        iter(dataset)
