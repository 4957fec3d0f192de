"""What workers compare, as bytes and in words.

The bytes differ where two values do, and the words show the difference.
"""

from __future__ import annotations

import enum
import marshal
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base.errors import plural
from torchstrategy._base.marks import digest_of


def by_name(value: object) -> dict[str, str]:
    """The parts of a value that are shown if they differ.

    A list of dicts shows the parts of each dict by itself.
    """
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return {"": _printed(value)}
    shown = {}
    for i, one in enumerate(value):
        for name, part in one.items():
            called = f"{name} of group {i}" if len(value) > 1 else str(name)
            shown[called] = _printed(part)
    return shown


# For the name of each thing, its parts.
_Compared = Sequence[tuple[str, dict[str, str]]]


def describe_difference(of_all: Sequence[tuple[str, _Compared]]) -> str:
    """What to say of workers at different exchanges, or with different values at one.

    Args:
        of_all: For each worker where it is, and the parts of all that it compares
            there.
    """
    places = [place for place, _ in of_all]
    differing = [_differing(compared, of_all) for _, compared in of_all]
    if len(set(places)) == 1:
        listed = [
            f"worker {w} has {', '.join(own) or 'nothing of this'}"
            for w, own in enumerate(differing)
        ]
        return _UNLIKE.format(places[0], ", ".join(listed))
    listed = [
        ", ".join([f"worker {w} is at {places[w]}", *own])
        for w, own in enumerate(differing)
    ]
    return APART.format(", ".join(listed)) + hint_of_one_alone(dict(enumerate(places)))


def _differing(
    compared: _Compared, of_all: Sequence[tuple[str, _Compared]]
) -> list[str]:
    """What one worker compares that is not the same in all."""
    # Workers at different places compare different things anyway.
    are_at_one_place = len({place for place, _ in of_all}) == 1
    found = []
    for what, parts in compared:
        theirs = [dict(others).get(what) for _, others in of_all]
        has_other = [one for one in theirs if one is not None]
        is_missing = are_at_one_place and len(has_other) < len(theirs)
        for name, value in parts.items():
            if is_missing or any(one.get(name) != value for one in has_other):
                found.append(f"{what} {name}={value}" if name else f"{what} {value}")
    return found


def describe_standstill(
    places: Mapping[int, str], names: Sequence[str]
) -> tuple[str, list[int]]:
    """What to say where workers wait in different groups, and who is to blame.

    Args:
        places: Where workers wait, by their numbers.
        names: What to call each worker.
    """
    for w, place in places.items():
        _, refuses, why = place.partition(WHICH_IT_REFUSED)
        if refuses:
            return _REFUSED_BY_ONE.format(names[w], why.rstrip(".")), [w]
    listed = ", ".join(f"worker {w} is at {places[w]}" for w in sorted(places))
    return APART.format(listed) + hint_of_one_alone(places), []


class _Place(NamedTuple):
    """Where a worker is, in the parts of its words."""

    run: int
    exchange: str
    call: str  # of the user's, outside of the step; empty in a run


def _place_of(text: str) -> _Place | None:
    match = _WORDS_OF_PLACE.match(text)
    if match is None:
        return None
    exchange = match["exchange"]
    is_in_run = match["point"] not in ("the first run", "the end of strategy.run")
    call = (
        ""
        if is_in_run
        else next(
            (call for start, call in _CALLS.items() if exchange.startswith(start)), ""
        )
    )
    return _Place(int(match["run"]), exchange, call)


def is_outside_of_step(place: str) -> bool:
    """Whether a worker that waits there has called something that asks all workers.

    The worker has called it outside of its step.
    """
    found = _place_of(place)
    return found is not None and bool(found.call)


def hint_of_one_alone(places: Mapping[int, str]) -> str:
    """A hint, if the workers are apart as they are where one alone validates or logs.

    Otherwise it is empty.

    That is so if a worker has made a call outside of its step that another one has not
    made, and if one has made more runs than another one. Workers that part within a
    step have another reason, such as a decision by their rows.
    """
    found = {
        w: place
        for w, text in sorted(places.items())
        if (place := _place_of(text)) is not None
    }
    first = min(found, default=0)
    other = next((w for w in found if found[w] != found[first]), None)
    if other is None:
        return ""
    one, another = found[first], found[other]
    if one.exchange == another.exchange:
        calls = [
            f"worker {w} called strategy.run {plural(found[w].run, 'time')}"
            for w in (first, other)
        ]
    elif one.call != another.call:
        calls = [
            f"worker {w} {found[w].call or 'called strategy.run'}"
            for w in (first, other)
        ]
    else:
        return ""
    return f" Here, {calls[0]} while {calls[1]}: {_LET_ALL}"


def comparable(named: Any) -> bytes:
    """Bytes that differ where two values do. Nobody reads them back."""
    try:
        return marshal.dumps(named, 0)  # for numbers and texts, in a tenth of the time
    except ValueError:
        return _printed(named).encode()


@final
class ComparedBytes:
    """Makes the bytes by which workers see whether they are at one place.

    The bytes also show whether the values that have to be alike there are alike.
    """

    def __init__(self) -> None:
        # By name, what was compared last, and its bytes: mostly, the same object is
        # compared again.
        self._made: dict[str, tuple[object, bytes]] = {}

    def join(self, place: str, compared: Sequence[tuple[str, object]]) -> bytes:
        """The bytes of a place, and of values with names that are compared there."""
        parts = [place.encode()]
        for what, value in compared:
            known, made = self._made.get(what, _NOTHING)
            if known is not value:
                made = comparable(value)
                # Other values may be large, and would live for longer than they should.
                if isinstance(value, (str, list)):
                    self._made[what] = value, made
            parts.append(made)
        return b"".join(parts)


# Stands for a value that was not compared yet.
_NOTHING: tuple[object, bytes] = (object(), b"")


def _printed(value: object) -> str:
    """A text that differs where two values do."""
    if isinstance(value, torch.Tensor):
        if value.numel() < _FEW:
            return _printed(value.tolist())
        return f"{tuple(value.shape)} {digest_of(value).hex()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_printed, value))}]"
    if isinstance(value, dict):
        return _printed(
            sorted((str(key), _printed(item)) for key, item in value.items())
        )
    return (
        repr(value)
        if isinstance(value, (bool, int, float, str, type(None), enum.Enum))
        else type(value).__name__
    )


_FEW = 9

WHICH_IT_REFUSED = ", which it refused: "

_REFUSED_BY_ONE = (
    "{} refused what it was given, when others had gone on to the gradients of their "
    "step: {}. Give all workers what fits, and start the training again."
)

_UNLIKE = (
    "The workers are not alike at {}: {}. Every worker must have the same there: make "
    "models, optimizers and their settings alike in all of them, and change them in "
    "all at the same time."
)

# A place in the words of `ProcessGroup`: the point, the run, and the exchange.
_WORDS_OF_PLACE = re.compile(
    r"(?P<point>.*?) of run (?P<run>\d+) \((?P<exchange>.*?)(?: with \[|$)", re.DOTALL
)

# What a user has called, by the beginning of what the exchange is called.
_CALLS = {
    "reduce(": "called strategy.reduce",
    "gather(": "called strategy.gather",
    "strategy.barrier": "called strategy.barrier",
    "the beginning of an iteration": "began to iterate over a dataset",
}

_LET_ALL = (
    "if one worker alone validates or logs, let all workers make these calls, and let "
    "one of them print the result."
)

APART = (
    "The workers came to different synchronization points: {}. Every worker must come "
    "to the same ones in the same order, with tensors of the same shapes: let no such "
    "call depend on the worker or on its rows."
)
