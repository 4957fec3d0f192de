"""docs/data.md says what is so: it runs, and its tables are complete."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import pkgutil
import re
from enum import Enum
from pathlib import Path

import pytest

import torchstrategy
from documents import examples_run_on
from torchstrategy import _data
from torchstrategy._data import batch_types
from torchstrategy._data.dataset import (
    DistributedDataset,
    DistributedIterator,
    Optional,
)
from torchstrategy._data.options import InputOptions
from torchstrategy._data.steps import split_equally

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
TEXT = PAGE.read_text()


def rows_of_table(header: str) -> list[list[str]]:
    """The cells of the table that begins with this header."""
    _, _, below = TEXT.partition(f"\n| {header} |")
    table = below.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples_run_on(PAGE, optionflags=doctest.ELLIPSIS)


def test_the_table_of_pieces_is_the_rule() -> None:
    table = rows_of_table("rows | 2 replicas | 3 replicas | 4 replicas")
    assert len(table) == 8
    for rows, *cells in table:
        for replicas, cell in enumerate(cells, start=2):
            assert cell == ", ".join(
                str(piece.stop - piece.start)
                for piece in split_equally(replicas, int(rows))
            )


def test_the_table_of_kinds_has_all_of_them_in_their_order() -> None:
    kinds = re.findall(r"^    (\S.*?)  ", batch_types.__doc__ or "", re.MULTILINE)
    assert len(kinds) > 5
    assert [kind for kind, _ in rows_of_table("kind | its rows")] == kinds


def test_the_table_of_options_has_all_of_them_with_their_defaults() -> None:
    def shown(default: object) -> str:
        return f"`{default.name}`" if isinstance(default, Enum) else str(default)

    defaults = InputOptions()
    expected = [
        [f"`{f.name}`", shown(getattr(defaults, f.name))]
        for f in dataclasses.fields(InputOptions)
    ]
    assert [
        row[:2] for row in rows_of_table("option | default | what it does")
    ] == expected


def test_the_page_names_all_that_users_have_to_do_with() -> None:
    files = [
        importlib.import_module(f"{_data.__name__}.{file.name}")
        for file in pkgutil.iter_modules(_data.__path__)
    ]
    names = {name for file in files for name in vars(file)} & set(torchstrategy.__all__)
    for cls in (DistributedDataset, DistributedIterator, Optional):
        names |= {name for name in vars(cls) if not name.startswith("_")}
    assert len(names) > 10
    assert {name for name in names if not re.search(rf"\b{name}\b", TEXT)} == set()


def test_links_of_the_page_and_to_it_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
    }
    links = re.findall(r"\]\((\S+?)\)", TEXT)
    assert links
    for link in links:
        assert (
            link[1:] in anchors
            if link.startswith("#")
            else (PAGE.parent / link.partition("#")[0]).is_file()
        ), link
    from_outside = re.findall(
        r"\(docs/data\.md(?:#(\S+))?\)", (PAGE.parents[1] / "README.md").read_text()
    )
    assert "" in from_outside
    assert set(from_outside) <= {"", *anchors}
