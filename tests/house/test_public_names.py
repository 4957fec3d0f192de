"""No public name, parameter or default changes unnoticed, and each has one home."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import torchstrategy
from house import public_names
from house.public_names import NAMESPACES, public_things
from house.rooms import ROOT, listed, package

# Names of one thing, which says the second.
OTHER_NAMES = {"CollectiveCommunication": "CommunicationImplementation"}


def test_the_public_names_are_those_of_the_list() -> None:
    found = set(public_names.lines())
    known = set(public_names.LIST.read_text().splitlines())
    gone, new = sorted(known - found), sorted(found - known)
    assert not gone and not new, (
        "the public names are not those of public_names.txt. If you mean this change, "
        "run `python tests/house/public_names.py`.\n"
        f"gone:{listed(gone)}\nnew:{listed(new)}"
    )


def test_all_lists_every_public_name_in_order() -> None:
    wrong = []
    for namespace in NAMESPACES:
        module = importlib.import_module(namespace)
        # A module below it that somebody has imported is an attribute, too.
        public = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and not isinstance(value, ModuleType)
        }
        missing = sorted(public - set(module.__all__))
        if missing:
            wrong.append(f"{namespace}: __all__ lacks {missing}")
        if module.__all__ != sorted(set(module.__all__)):
            wrong.append(f"{namespace}: __all__ is not sorted, or names one twice")
    assert not wrong, (
        f"list each public name, or import it as a private one:{listed(wrong)}"
    )


def test_public_names_report_their_public_home() -> None:
    """A message says `torchstrategy.Strategy`, which a user can import."""
    wrong = [
        f"{namespace}.{name} says {thing.__module__}.{thing.__qualname__}"
        for namespace, name, thing in public_things()
        if not reports_its_home(name, thing)
    ]
    assert not wrong, (
        "set `__module__` to the namespace that users import, as the last lines of "
        f"torchstrategy/__init__.py do:{listed(wrong)}"
    )


def reports_its_home(name: str, thing: object) -> bool:
    home = thing.__module__
    return (
        home in NAMESPACES
        and getattr(importlib.import_module(home), name, None) is thing
        and getattr(thing, "__qualname__", None) == OTHER_NAMES.get(name, name)
    )


def test_the_version_is_that_of_the_newest_heading_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest, *_ = re.findall(r"^## \[(\d\S*)\]", changelog, re.MULTILINE)
    assert torchstrategy.__version__ == newest, (
        "write the version into torchstrategy/__init__.py and into CHANGELOG.md"
    )


def test_types_are_shipped() -> None:
    assert (package() / "py.typed").is_file(), (
        "type checkers ignore our annotations without torchstrategy/py.typed, which "
        "`[tool.setuptools.package-data]` of pyproject.toml names"
    )
