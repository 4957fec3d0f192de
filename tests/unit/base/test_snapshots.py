"""Snapshots see each change of what containers hold, and nothing else."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from torchstrategy._base.objects.changes import MISSING, Edit, Snapshot, edits


class Thing:
    def __init__(self) -> None:
        self.count = 0


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Named(dict[str, int]):
    """A dict that lies: a snapshot must not call its methods."""

    def values(self) -> Any:
        raise AssertionError("a method of the user's was called")


class Word(str):
    """A name of a class of its own, as numpy has."""


def with_another_key(table: dict[Any, Any]) -> None:
    """Replaces the only key by an equal one.

    Two tensors of one shape are neither equal nor different: `==` raises.
    """
    (key,) = table
    value = table.pop(key)
    table[key.clone()] = value


def ordered_with_attribute() -> OrderedDict[str, int]:
    table: OrderedDict[str, Any] = OrderedDict(a=1)
    table.note = 1  # type: ignore[attr-defined]
    return table


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an entry that is replaced": (lambda: {"a": [1]}, lambda c: c.update(a=[1])),
    "an entry that is added": (dict, lambda c: c.update(a=1)),
    "an entry that is removed": (lambda: {"a": 1}, lambda c: c.clear()),
    "an entry with another name": (lambda: {"a": 1}, lambda c: c.update(b=c.pop("a"))),
    "a name of a class of its own": (lambda: {Word("a"): 1}, lambda c: c.update(a=2)),
    "a tensor that is a key": (lambda: {torch.zeros(2): 1}, with_another_key),
    "the order of a dict": (lambda: {"a": 1, "b": 2}, lambda c: c.update(a=c.pop("a"))),
    "an ordered dict": (lambda: OrderedDict(a=1, b=2), lambda c: c.move_to_end("a")),
    "an attribute of an ordered dict": (
        ordered_with_attribute,
        lambda c: setattr(c, "note", 2),
    ),
    "a dict of a class": (lambda: Named(a=1), lambda c: c.update(a=2)),
    "an item of a list": (lambda: [1, 2], lambda c: c.reverse()),
    "the end of a list": (lambda: [1, 2], lambda c: c.append(3)),
    "a set": (lambda: {1}, lambda c: c.add(2)),
    "a deque": (lambda: deque([1, 2]), lambda c: c.rotate()),
    "an attribute": (Thing, lambda c: setattr(c, "count", 1)),
    "a new attribute": (Thing, lambda c: setattr(c, "other", 0)),
    "a slot": (Slotted, lambda c: setattr(c, "count", 1)),
    "a slot that is deleted": (Slotted, lambda c: delattr(c, "count")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_is_seen_and_no_other(what: str) -> None:
    make, change = CHANGES[what]
    containers = {"before": make(), "it": make(), "after": make()}
    snapshot = Snapshot(containers)
    assert snapshot.is_same()
    assert snapshot.differing() == []
    change(containers["it"])
    assert not snapshot.is_same()
    assert snapshot.differing() == ["it"]
    snapshot.take()
    assert snapshot.is_same()


def test_an_entry_that_goes_from_one_table_to_the_next_is_seen() -> None:
    # A list of all names and all values is the same as before.
    one: dict[str, int] = {"a": 1}
    other: dict[str, int] = {}
    snapshot = Snapshot({0: one, 1: other})
    other["a"] = one.pop("a")
    assert list(snapshot.edits()) == [
        Edit(0, "a", 1, MISSING),
        Edit(1, "a", MISSING, 1),
    ]


def test_objects_are_compared_by_identity() -> None:
    table = {"a": torch.ones(3)}
    snapshot = Snapshot({0: table})
    known = table["a"]
    table["a"] = torch.ones(3)  # `==` of tensors gives no bool
    (edit,) = snapshot.edits()
    assert edit.before is known
    assert edit.after is table["a"]


def test_a_forgotten_entry_counts_as_changed_until_the_snapshot_is_taken() -> None:
    table = {"a": 1, "b": 2}
    snapshot = Snapshot({0: table})
    snapshot.forget(0, "a")
    assert [(edit.name, edit.after) for edit in snapshot.edits()] == [("a", 1)]
    snapshot.take()
    assert snapshot.is_same()


def test_an_entry_that_is_forgotten_in_an_empty_table_counts_as_changed() -> None:
    # Tables that are empty are not read: the one that was forgotten is to be seen
    # nevertheless.
    snapshot = Snapshot({0: {}})
    snapshot.forget(0, "a")
    assert [(edit.name, edit.after) for edit in snapshot.edits()] == [("a", MISSING)]
    snapshot.take()
    assert snapshot.is_same()


def test_an_edit_can_be_made_in_another_table() -> None:
    before, after, other = {"a": 1, "b": 2}, {"b": 3, "c": 4}, {"a": 1, "b": 2, "d": 5}
    for edit in edits(before, after):
        edit.apply(other)
    assert other == {"b": 3, "c": 4, "d": 5}
    assert [edit.verb() for edit in edits(before, after)] == [
        "taken away",
        "replaced",
        "made",
    ]


def test_a_hook_that_a_step_puts_straight_into_an_empty_table_is_seen(
    several: torchstrategy.Strategy,
) -> None:
    # torch counts hooks when they are registered, and only then. The library relied on
    # this count.
    with several.scope():
        net = nn.Linear(1, 1)
    several.run(lambda: None)
    calls = []

    def step() -> None:
        net._forward_hooks[1_000_000] = lambda *arguments: calls.append(arguments)

    several.run(step)
    net(torch.ones(1, 1, device=net.weight.device))
    assert len(calls) == 1
