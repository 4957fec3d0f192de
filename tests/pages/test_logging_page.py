"""docs/logging.md runs, and its recipes write what they say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from documents import examples_run_on

PAGE = Path(__file__).resolve().parents[2] / "docs" / "logging.md"


class SummaryWriter:
    """Takes the calls that the page makes of TensorBoard's.

    TensorBoard itself is no dependency of the tests.
    """

    written: ClassVar[list[tuple[str, float, int]]] = []

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def add_scalar(self, tag: str, value: object, step: int) -> None:
        # As TensorBoard does.
        self.written.append((tag, float(value), step))  # type: ignore[arg-type]

    def close(self) -> None:
        """Nothing is open."""


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(SummaryWriter, "written", [])
    monkeypatch.chdir(tmp_path)
    examples_run_on(PAGE)
    assert [(tag, step) for tag, _, step in SummaryWriter.written] == [
        ("loss", 0),
        ("loss", 1),
    ]
    assert (tmp_path / "losses.csv").read_text().startswith("0,")
