"""`python -m tests.gpu`, for a machine with a GPU, runs without one, too."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conditions import for_changes, for_releases, without_simulated_devices
from gpu.__main__ import PACKAGES, ROOT, test_files

TESTS = ROOT / "tests"
test_files.__test__ = False  # type: ignore[attr-defined]  # it is no test
ALWAYS_THERE = {"torch", "numpy", "pytest", "torchstrategy", "typing_extensions"}


def imported(path: Path) -> Iterator[str]:
    """What a file imports at its top: the first parts of the names."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@for_changes
def test_it_needs_no_package_but_torch_numpy_and_pytest() -> None:
    shared = [
        TESTS / "conftest.py",
        *(TESTS / "support").rglob("*.py"),
        *(TESTS / "gpu").glob("*.py"),
    ]
    own = {path.stem for path in shared} | {"gpu", "features"}
    others = (
        {name for path in shared for name in imported(path)}
        - set(sys.stdlib_module_names)
        - ALWAYS_THERE
        - own
    )
    assert not others
    folders = [
        path
        for folder in ("equality", "contract")
        for path in (TESTS / folder).glob("*.py")
    ]
    needed = (
        {name for path in folders for name in imported(path)}
        - set(sys.stdlib_module_names)
        - ALWAYS_THERE
    )
    at_home = (
        {path.stem for path in TESTS.rglob("*.py")}
        | {path.name for path in TESTS.iterdir()}
        | {"tests", "features"}
    )
    assert needed - at_home <= set(PACKAGES)


@for_releases
@without_simulated_devices
@pytest.mark.parametrize(
    "options", [["ON=cpu"], ["--simulate"]], ids=["on the CPU", "on simulated devices"]
)
def test_a_short_form_of_it_runs_without_a_gpu(
    options: list[str], tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ON"}
    environment |= {"ON": "cpu"} if options == ["ON=cpu"] else {}
    command = [sys.executable, "-m", "tests.gpu", "--short", "--logs", str(tmp_path)]
    command += [option for option in options if option.startswith("--")]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all went well" in done.stdout
