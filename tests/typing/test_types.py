"""Programs of users: mypy and pyright find no error in them.

They see the types that stand behind `reveal_type`.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchstrategy
from conditions import for_changes, for_releases, without_simulated_devices

HERE = Path(__file__).parent
PROGRAMS = sorted(
    path for path in HERE.glob("*.py") if path.name != Path(__file__).name
)
PACKAGE = Path(torchstrategy.__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
# For each program and line, the type that a checker sees there.
Types = dict[tuple[str, int], str]


def written() -> Types:
    """The types that the programs state, in comments."""
    lines = {
        (path.name, i): line
        for path in PROGRAMS
        for i, line in enumerate(path.read_text().split("\n"), start=1)
    }
    return {
        place: line.split("  # ")[1].strip()
        for place, line in lines.items()
        if "reveal_type(" in line
    }


def short(text: str) -> str:
    """A type without the modules of its names: `Tensor` for `torch._tensor.Tensor`."""
    return re.sub(r"(?:\w+\.)+(?=\w)", "", text)


def check(*command: str | Path, folder: Path, **environment: str) -> str:
    """What a checker says of the programs, from a folder that is not the repository."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    } | environment
    arguments = [sys.executable, "-m", *map(str, command), *map(str, PROGRAMS)]
    return subprocess.run(
        arguments,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the package that is tested and nothing else of the repository."""
    (tmp_path / "torchstrategy").symlink_to(PACKAGE)
    return tmp_path


@for_changes
@pytest.mark.slow
@without_simulated_devices
def test_mypy_sees_the_types(place: Path) -> None:
    pytest.importorskip("mypy")
    if (
        f"torch=={torch.__version__.partition('+')[0]}"
        not in CONSTRAINTS.read_text().split()
    ):
        pytest.skip("torch annotates its functions otherwise in other versions")
    cache = HERE.parents[1] / ".mypy_cache"
    options = [
        "--strict",
        "--untyped-calls-exclude=torch",
        "--no-pretty",
        f"--cache-dir={cache}",
        "--config-file=",
    ]
    said = check("mypy", *options, folder=place, MYPYPATH=str(place))
    assert "error:" not in said and "Success" in said, said
    found = re.findall(r'(\w+\.py):(\d+): note: Revealed type is "(.*)"', said)
    assert {(name, int(line)): short(text) for name, line, text in found} == written()


@for_releases
@pytest.mark.slow
@without_simulated_devices
def test_pyright_sees_the_types(place: Path) -> None:
    pytest.importorskip("pyright", reason="pip install -e '.[pyright]'")
    if shutil.which("node") is None:
        pytest.skip("pyright runs in node, which is not here")
    # pyright looks for packages where the interpreter has them, and in the folder of
    # the configuration.
    (place / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(place)]}))
    said = json.loads(
        check(
            "pyright",
            "--outputjson",
            "--pythonpath",
            sys.executable,
            "-p",
            place,
            folder=place,
        )
    )
    found = said["generalDiagnostics"]
    assert not [
        entry for entry in found if entry["severity"] in ("error", "warning")
    ], found
    notes = {
        (Path(entry["file"]).name, entry["range"]["start"]["line"] + 1): entry[
            "message"
        ]
        for entry in found
    }
    types = {
        place: re.sub(r'^Type of ".*" is "(.*)"$', r"\1", text, flags=re.S)
        for place, text in notes.items()
    }
    assert types == written()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_programs_run(path: Path) -> None:
    runpy.run_path(str(path))
