"""docs/public-programs.md has the table that benchmarks/public_programs.py makes."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conditions import for_changes

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "public-programs.md"

PROGRAM = """
import random
import numpy, torch
from torch.utils.data import DataLoader
has_gpu = torch.cuda.is_available()
device = "cuda" if has_gpu else "cpu"
model = torch.nn.Linear(3, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in {batches}:
    loss = model({inputs}).square().mean()
    loss.backward()
    optimizer.step()
    print(f"loss {{loss.item():.3f}}")
"""
SEEDED = "import torch\ntorch.manual_seed(0)\n" + PROGRAM.format(
    inputs="batch.to(device)", batches="[torch.ones(1, 3)] * 9"
)
DRAWS = PROGRAM.format(
    inputs=(
        "batch.to(device) * torch.rand(4, 3, device=device) * random.random() * "
        "numpy.random.rand()"
    ),
    batches=(
        "DataLoader(torch.rand(24, 3), 4, shuffle=has_gpu, num_workers=int(has_gpu), "
        "persistent_workers=has_gpu)"
    ),
)


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


@pytest.fixture
def folder(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four programs of somebody, and an empty page."""
    (tmp_path / "things").mkdir()
    for name, text in (
        ("right", SEEDED),
        ("draws", DRAWS),
        ("wrong", "raise ValueError('it has | no data')"),
        ("absent", "import nothing_of_this_name"),
    ):
        (tmp_path / "things" / f"{name}.py").write_text(text)
    programs = [script.Program("somebody/things", "right.py", on_cpu=(), steps=3)]
    programs.append(
        script.Program(
            "somebody/things",
            "draws.py",
            on_cpu=(),
            steps=3,
            loads_otherwise_on_gpus=True,
        )
    )
    programs.append(
        script.Program(
            "somebody/things", "wrong.py", on_cpu=(), short="--now", why="Give it some."
        )
    )
    programs.append(script.Program("somebody/things", "absent.py", ranks=2))
    programs.append(script.Program("nobody/gone", "main.py"))
    monkeypatch.setattr(script, "PROGRAMS", programs)
    (tmp_path / "page.md").write_text(
        f"# A page\n\n{script.BEGIN}\nold\n{script.END}\nthe rest\n"
    )
    return tmp_path


@for_changes
def test_the_script_runs_what_is_there_and_writes_the_table(
    script: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["public_programs.py", str(folder), "--page", str(folder / "page.md")],
    )
    script.main()
    text = (folder / "page.md").read_text()
    rows = [
        line.split(" | ") for line in text.splitlines() if "somebody/things" in line
    ]
    assert [row[1] for row in rows] == [
        "`right.py`",
        "`draws.py`",
        "`wrong.py`",
        "`absent.py`",
    ]
    assert [row[2] for row in rows] == ["", "", "`--now`", "`--ranks 2`"]
    assert [row[3] for row in rows] == [
        "well, 3 steps",
        "well, 3 steps",
        "ValueError: it has \\| no data Give it some.",
        "ModuleNotFoundError: No module named 'nothing_of_this_name' Install it.",
    ]
    # The third step ends the program before it prints.
    equal = [
        "equal (2)",
        "equal (2) with the CPU's random numbers",
        "fails there, too",
        "",
    ]
    assert [row[4] for row in rows] == equal
    assert rows[0][5].startswith("0.7 waits and 1.7 blocking copies a step")
    assert (
        "4 programs with torch" in text
        and "2 ended well. 2 of them ran on the CPU, too." in text
    )
    assert (
        "The numbers of 2 were equal, of 1 without" in text
        and "old" not in text
        and "the rest" in text
    )

    # What has a result is not run again.
    (folder / "things" / "right.py").write_text("raise SystemExit(1)")
    script.main()
    assert (folder / "page.md").read_text() == text
    assert len(json.loads((folder / "results.json").read_text())) == 4

    # Rows of programs that are not there any more stay.
    shutil.rmtree(folder / "things")
    (folder / "results.json").unlink()
    script.main()
    assert (folder / "page.md").read_text() == text


def test_what_is_equal_is_said_with_the_reason_why_the_rest_is_not(script: Any) -> None:
    def compared(
        numbers: list[float],
        alike: tuple[list[float], list[float]],
        cpu: tuple[list[float], list[float]],
        **about: Any,
    ) -> str:
        of_the_cpu, drawn_alike = (
            {"status": 0, "numbers": one[0], "gradients": one[1]}
            for one in (cpu, alike)
        )
        result = {
            "status": 0,
            "numbers": numbers,
            "cpu": of_the_cpu,
            "drawn_alike": drawn_alike,
        }
        text: str = script.compared(
            script.Program("somebody/things", "main.py", **about), result
        )
        return text

    assert compared([1, 2], ([1, 2], [5]), ([1, 2], [5])) == "equal (2)"
    assert (
        compared([1, 3], ([1, 2], [5]), ([1, 2], [5]))
        == "equal (2) with the CPU's random numbers"
    )
    assert (
        compared([], ([], [5, 6]), ([], [5, 6]))
        == "equal (2 gradients) with the CPU's random numbers"
    )
    assert compared([], ([], []), ([], [])) == "prints none"
    # What is missing is not equal.
    mine, reason = ([1.0], [5.0]), "it is another one"
    assert (
        compared([1], mine, ([1, 2], [5]), differs=reason)
        == f"1 of 2 with the CPU's random numbers: {reason}"
    )
    assert (
        compared([1], mine, ([1], [7]))
        == "equal (1), and 0 of 1 gradient: it is not known why"
    )


def test_numbers_are_those_that_matter(script: Any) -> None:
    printed = (
        "Epoch 3 Time 1.25 Loss 2.5e+00 ( 2.5e+00) Acc@1 12.50\ntrain loss: nan, 17 "
        "ms\nppl   300.2\n"
    )
    found = script.numbers(printed)
    assert str(found) == "[2.5, 12.5, nan, 300.2]"
    assert (
        script.is_same(2.5, 2.5001)
        and not script.is_same(2.5, 2.502)
        and script.is_same(found[2], found[2])
    )


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
