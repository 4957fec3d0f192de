"""The notebook runs, and prints what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conditions import for_changes

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_hour.ipynb"


def printed_by(notebook: Any) -> list[str]:
    """What each cell prints, of those that print.

    A kernel sends what a slow cell prints in several pieces.
    """
    of_cells = (cell.get("outputs", ()) for cell in notebook.cells)
    texts = (
        "".join(one.text for one in outputs if one.get("name") == "stdout")
        for outputs in of_cells
    )
    return [text for text in texts if text]


@pytest.mark.slow
@for_changes
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of the packages that run notebooks
def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="pip install ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient")
    notebook = pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)
    shown = printed_by(notebook)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    assert printed_by(notebook) == shown
    assert shown[2].startswith(
        "RuntimeError The step uses a tensor that is in no module of the strategy"
    )
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
