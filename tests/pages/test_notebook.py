"""The notebook runs, and prints what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_hour.ipynb"


def printed_by(notebook: Any) -> list[str]:
    """What each cell prints, in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages that run notebooks
def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="pip install ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient")
    notebook = pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)
    shown = printed_by(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert printed_by(notebook) == shown
    assert shown[2].startswith("RuntimeError Expected all tensors to be on the same device")
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
