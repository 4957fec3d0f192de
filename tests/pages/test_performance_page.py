"""docs/performance.md says what is so: it runs, and names the ranges that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from documents import dead_links_of, examples_run_on
from torchstrategy._base import trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
TEXT = PAGE.read_text()


# By torch before 2.13.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_the_page_runs() -> None:
    assert examples_run_on(PAGE) > 10


def test_the_ranges_that_there_are_are_shown_and_no_others() -> None:
    there = set(
        re.findall(r"^    torchstrategy\.(\S+ \S+)", trace.__doc__ or "", re.MULTILINE)
    )
    assert len(there) > 5
    assert {name for name in there if name not in TEXT} == set()
    assert set(re.findall(r"\btorchstrategy\.([a-z]+ [^\s`]+)", TEXT)) <= there


def test_links_of_the_page_lead_somewhere() -> None:
    assert dead_links_of(PAGE) == []
