"""docs/features.md says what is so: it runs.

Its tables have what the matrix of tests trains, and nothing else.
"""

from __future__ import annotations

import doctest
import fnmatch
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from conditions import for_changes
from documents import anchors_of, dead_links_of, examples_run_on
from features.training import FEATURES, Training

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"
TEXT = PAGE.read_text()
# The features that are trained for each row.
TRAINED: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("features_page.json").read_text()
)
HEADER = "| what | update in the step | update after the run | equal |"


class Row(NamedTuple):
    """A row of a table."""

    what: str
    equal: str
    patterns: list[str]

    @property
    def names(self) -> list[str]:
        """The features that are trained for it."""
        return [
            name
            for name in FEATURES
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)
        ]

    @property
    def tolerance(self) -> float:
        """How much the row says is equal."""
        said = re.match(r"to (\d+e-\d+): ", self.equal)
        return float(said[1]) if said else Training.tolerance


def rows() -> list[Row]:
    """Those of all tables with the header."""
    tables = [
        part.partition("\n\n")[0].splitlines()[1:]
        for part in TEXT.split(HEADER + "\n")[1:]
    ]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for table in tables
        for line in table
    ]
    return [Row(what, equal, TRAINED[what]) for what, _, _, equal in cells]


@for_changes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
# Torch's own, in its forward mode.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_the_page_runs() -> None:
    examples_run_on(PAGE, optionflags=doctest.ELLIPSIS)


def test_every_feature_that_is_trained_is_in_a_row() -> None:
    assert [row.what for row in rows()] == list(TRAINED)
    assert len(rows()) > 30
    assert set(FEATURES) - {name for row in rows() for name in row.names} == set()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.what)
def test_a_row_says_what_is_trained(row: Row) -> None:
    for pattern in row.patterns:
        assert fnmatch.filter(FEATURES, pattern), f"no feature is called {pattern}"
    assert row.equal.startswith(("yes", "to "))
    for name in row.names:
        assert FEATURES[name]().tolerance == row.tolerance, name


def test_links_of_the_page_and_to_it_lead_somewhere() -> None:
    assert dead_links_of(PAGE) == []
    anchors = anchors_of(TEXT)
    for document in [PAGE.parents[1] / "README.md", *PAGE.parent.glob("*.md")]:
        for anchor in re.findall(r"features\.md#(\S+?)\)", document.read_text()):
            assert anchor in anchors, document
    assert "(docs/features.md)" in (PAGE.parents[1] / "README.md").read_text()
