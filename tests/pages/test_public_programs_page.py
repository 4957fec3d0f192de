"""docs/public-programs.md has the table that benchmarks/public_programs.py makes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "public-programs.md"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The module benchmarks/public_programs.py."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("public_programs")
    for name in (
        set(sys.modules)
        & {"public_programs", "programs_of_others", "comparable_runs"} - known
    ):
        del sys.modules[name]


def test_the_page_has_a_row_for_each_program(script: Any) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    cells = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    known = {
        (program.repository, program.file.rpartition("/")[2])
        for program in script.PROGRAMS
    }
    shown = {
        (
            cell[0].partition("[")[2].partition("]")[0],
            cell[1].strip("`").rpartition("/")[2],
        )
        for cell in cells
    }
    assert shown and shown <= known and all(len(cell) == 6 for cell in cells)


def test_no_program_differs_from_the_cpu_without_a_reason() -> None:
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ["):
            compared = line.split(" | ")[4]
            assert (
                "it is not known why" not in compared
                and "does not fail there" not in compared
            ), line
