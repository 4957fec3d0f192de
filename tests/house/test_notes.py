"""A Note tells, once and beside the code that keeps its promise, what is longer than a line; the code cites it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from house.picture import ROOT, package

FILES = sorted(package().rglob("*.py"))
CITED = re.compile(r"Note \[([^\]]+)\]")
WRITTEN = re.compile(r"^ *(?:# )?Note \[([^\]]+)\](?::|$)", re.MULTILINE)


def unwrapped(text: str) -> str:
    """A text in one line, as if no comment or docstring had been wrapped."""
    return re.sub(r"\s*\n\s*(?:# ?)?", " ", text)


def written(files: list[Path]) -> list[str]:
    return [title for path in files for title in WRITTEN.findall(path.read_text())]


def test_a_note_is_written_once() -> None:
    titles = written(FILES)
    assert len(titles) > 20
    assert sorted(titles) == sorted(set(titles))


@pytest.mark.parametrize(
    "path",
    [*FILES, ROOT / "CONTRIBUTING.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_note_that_is_cited_is_there(path: Path) -> None:
    """A reader who looks for a Note by its title finds it."""
    assert set(CITED.findall(unwrapped(path.read_text()))) <= set(written(FILES))


def test_a_citation_is_found_where_it_is_wrapped() -> None:
    text = "    # What is told. See Note [What\n    # happens on Ctrl-C].\n"
    assert CITED.findall(unwrapped(text)) == ["What happens on Ctrl-C"]
