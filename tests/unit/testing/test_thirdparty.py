"""A package that is none of ours uses the plugin with its public names only.

See `thirdparty/`.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conditions import for_releases
from processes import NO_ACCELERATOR, python

SOURCES = Path(__file__).resolve().parents[2] / "thirdparty"


@pytest.fixture(scope="module")
def tinytrainer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package's repository, out of reach of our own settings for pytest.

    With the place where it was installed.
    """
    repository = tmp_path_factory.mktemp("repository") / "tinytrainer"
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(SOURCES, repository, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*pip, "--target", str(site), str(repository)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return repository, site


def summary(tinytrainer: tuple[Path, Path], *options: str) -> str:
    """Runs the package's own tests, and returns how they went."""
    repository, site = tinytrainer
    command = ("-m", "pytest", "-p", "no:cacheprovider", *options)
    done = python(*command, folder=repository, PYTHONPATH=str(site), **NO_ACCELERATOR)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@for_releases
@pytest.mark.slow
def test_its_suite_passes_on_the_cpu_and_skips_what_needs_devices(
    tinytrainer: tuple[Path, Path],
) -> None:
    output = summary(tinytrainer)
    assert " passed, 2 skipped in " in output
    assert "torchstrategy: " not in output


@for_releases
@pytest.mark.slow
def test_its_suite_passes_on_simulated_devices(tinytrainer: tuple[Path, Path]) -> None:
    output = summary(tinytrainer, "--simulate-devices=4", "--real-devices")
    assert " passed in " in output, "something was skipped"
    assert (
        "torchstrategy: 4 simulated devices (sim:0 to sim:3); real devices: none"
        in output
    )


def test_it_imports_public_names_only() -> None:
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [
                    *(getattr(node, "module", "") or "").split("."),
                    *(alias.name for alias in node.names),
                ]
                parts = [part for name in names for part in name.split(".")]
                assert not [part for part in parts if part.startswith("_")], (
                    f"{path.name}: {ast.unparse(node)}"
                )
