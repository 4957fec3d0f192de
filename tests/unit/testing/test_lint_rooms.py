"""Each lint is made once for each run, by the room that it stands in."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

from torchstrategy.testing import _lints
from torchstrategy.testing._lints import session
from torchstrategy.testing._lints.lint import Lint

ROOMS = [info.name for info in pkgutil.iter_modules(_lints.__path__) if info.ispkg]


def lints_in(room: str) -> Iterator[type[Lint]]:
    """The lints that have a class in a room."""
    folder = importlib.import_module(f"{_lints.__name__}.{room}")
    for info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        module = importlib.import_module(info.name)
        for kind in vars(module).values():
            is_its_own = (
                inspect.isclass(kind)
                and issubclass(kind, Lint)
                and kind.__module__ == info.name
            )
            if is_its_own and not kind.__subclasses__():
                yield kind


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_makes_each_of_its_lints(room: str) -> None:
    folder = importlib.import_module(f"{_lints.__name__}.{room}")
    made = (
        [type(lint) for lint in folder.make_lints()]
        if hasattr(folder, "make_lints")
        else []
    )
    assert sorted(kind.__name__ for kind in made) == sorted(
        kind.__name__ for kind in lints_in(room)
    )


def test_a_run_has_the_lints_of_all_rooms() -> None:
    there = {room.__name__.rpartition(".")[2] for room in session.ROOMS}
    assert there == {room for room in ROOMS if any(lints_in(room))}
