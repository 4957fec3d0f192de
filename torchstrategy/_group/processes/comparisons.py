"""What workers compare: as bytes that differ where two values do, and in words that show the difference."""

from __future__ import annotations

import enum
import marshal
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from torchstrategy._base.marks import digest_of


def by_name(value: object) -> dict[str, str]:
    """The parts of a value that are shown if they differ: those of a list of dicts each by itself."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return {"": _printed(value)}
    shown = {}
    for i, one in enumerate(value):
        for name, part in one.items():
            called = f"{name} of group {i}" if len(value) > 1 else str(name)
            shown[called] = _printed(part)
    return shown


_Compared = Sequence[tuple[str, dict[str, str]]]  # by what it is called, the parts of each thing


def describe_difference(of_all: Sequence[tuple[str, _Compared]]) -> str:
    """What to say of workers that are at different exchanges, or compare different values at one.

    Args:
        of_all: For each worker where it is, and the parts of all that it compares there.
    """
    places = [place for place, _ in of_all]
    differing = [_differing(compared, of_all) for _, compared in of_all]
    if len(set(places)) == 1:
        listed = [f"worker {w} has {', '.join(own) or 'nothing of this'}" for w, own in enumerate(differing)]
        return _UNLIKE.format(places[0], ", ".join(listed))
    listed = [", ".join([f"worker {w} is at {places[w]}", *own]) for w, own in enumerate(differing)]
    return APART.format(", ".join(listed))


def _differing(compared: _Compared, of_all: Sequence[tuple[str, _Compared]]) -> list[str]:
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


def describe_standstill(places: Mapping[int, str], names: Sequence[str]) -> tuple[str, list[int]]:
    """What to say where workers wait in different groups, and who is to blame.

    Args:
        places: Where workers wait, by their numbers.
        names: What to call each worker.
    """
    for w, place in places.items():
        _, refuses, why = place.partition(WHICH_IT_REFUSED)
        if refuses:
            return _REFUSED_BY_ONE.format(names[w], why.rstrip(".")), [w]
    return APART.format(", ".join(f"worker {w} is at {places[w]}" for w in sorted(places))), []


def comparable(named: Any) -> bytes:
    """Bytes that differ where two values do. Nobody reads them back."""
    try:
        return marshal.dumps(named, 0)  # for numbers and texts, in a tenth of the time
    except ValueError:
        return _printed(named).encode()


@final
class ComparedBytes:
    """Makes the bytes by which workers see whether they are at one place, and have there what is alike."""

    def __init__(self) -> None:
        # By name, what was compared last, and its bytes: mostly, the same object is compared again.
        self._made: dict[str, tuple[object, bytes]] = {}

    def join(self, place: str, compared: Sequence[tuple[str, object]]) -> bytes:
        """The bytes of a place, and of values that are compared there, each with what it is called."""
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


_NOTHING: tuple[object, bytes] = (object(), b"")  # stands for a value that was not compared yet


def _printed(value: object) -> str:
    """A text that differs where two values do."""
    if isinstance(value, torch.Tensor):
        if value.numel() < _FEW:
            return _printed(value.tolist())
        return f"{tuple(value.shape)} {digest_of(value).hex()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_printed, value))}]"
    if isinstance(value, dict):
        return _printed(sorted((str(key), _printed(item)) for key, item in value.items()))
    return repr(value) if isinstance(value, (bool, int, float, str, type(None), enum.Enum)) else type(value).__name__


_FEW = 9

WHICH_IT_REFUSED = ", which it refused: "

_REFUSED_BY_ONE = (
    "{} refused what it was given, when others had gone on to the gradients of their step: {}. Give all workers what "
    "fits, and start the training again."
)

_UNLIKE = (
    "The workers are not alike at {}: {}. Every worker must have the same there: make models, optimizers and their "
    "settings alike in all of them, and change them in all at the same time."
)

APART = (
    "The workers came to different synchronization points: {}. Every worker must come to the same ones in the same "
    "order, with tensors of the same shapes: let no such call depend on the worker or on its rows."
)
