"""What workers compare: as bytes that differ where two values do, and in words that show the difference."""

from __future__ import annotations

import enum
import marshal
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchstrategy._communication.native_dtypes import bits
from torchstrategy._communication.workers import digest


def by_name(value: object) -> dict[str, str]:
    """The parts of a value that are shown if they differ: those of a list of dicts each by itself."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return {"": _printed(value)}
    return {
        f"{name} of group {i}" if len(value) > 1 else str(name): _printed(part)
        for i, one in enumerate(value)
        for name, part in one.items()
    }


def told_apart(of_all: Sequence[tuple[str, Sequence[tuple[str, dict[str, str]]]]]) -> str:
    """What to say of workers that are at different exchanges, or compare different values at one.

    Args:
        of_all: For each worker where it is, and the parts of all that it compares there.
    """
    places = [place for place, _ in of_all]
    if len(set(places)) > 1:  # and there they compare different things anyway
        return APART.format(_listed(of_all, [f"is at {place}" for place in places]))
    return _UNLIKE.format(places[0], _listed(of_all, ["has" for _ in places]))


def _listed(of_all: Sequence[tuple[str, Sequence[tuple[str, dict[str, str]]]]], beginnings: Sequence[str]) -> str:
    """What each worker has that some other has not, after the beginning of what is said of it."""
    are_at_one_place = len({place for place, _ in of_all}) == 1
    listed = []
    for w, (_, compared) in enumerate(of_all):
        differing = []
        for what, parts in compared:
            theirs = [dict(others).get(what) for _, others in of_all]
            for name, value in parts.items():
                if any(are_at_one_place if one is None else one.get(name) != value for one in theirs):
                    differing.append(f"{what} {name}={value}" if name else f"{what} {value}")
        separator = " " if are_at_one_place else ", "
        said = ", ".join(differing) or ("nothing of this" if are_at_one_place else "")
        listed.append(f"worker {w} {beginnings[w]}{separator if said else ''}{said}")
    return ", ".join(listed)


def apart_in_groups(places: Mapping[int, str], names: Sequence[str]) -> tuple[str, list[int]]:
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


def _printed(value: object) -> str:
    """A text that differs where two values do."""
    if isinstance(value, torch.Tensor):
        if value.numel() < _FEW:
            return _printed(value.tolist())
        return f"{tuple(value.shape)} {digest(bits(value).cpu().numpy().tobytes()).hex()}"
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
