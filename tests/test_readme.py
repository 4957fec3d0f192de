"""The documents say what is so: programs run, commands are the ones that are checked, versions agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchstrategy

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> list:
    """The fenced blocks of all documents that are in one of the languages, as (document, line, text)."""
    found = []
    for path in DOCUMENTS:
        document = path.read_text()
        for match in BLOCK.finditer(document):
            if match[1] in languages:
                line = document.count("\n", 0, match.start(2)) + 1
                found.append(pytest.param(path, line, match[2], id=f"{path.name}:{line}"))
    return found


def commands_in(shell: str) -> list[str]:
    """The commands of a shell text, in order, without comments, prompts and the `&&` between them."""
    lines = (line.strip().removeprefix("$ ") for line in shell.replace("\\\n", " ").splitlines())
    pieces = (piece.strip() for line in lines if not line.startswith("#") for piece in line.split("&&"))
    return [piece for piece in pieces if piece]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "line", "text"), blocks("python"))
def test_python_blocks_run(path: Path, line: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = "\n" * (line - 1) + text  # so that a traceback shows the line of the document
    exec(compile(program, str(path), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("path", "line", "text"), blocks("bash", "console", "sh"))
def test_commands_are_the_ones_that_are_checked(path: Path, line: int, text: str) -> None:
    checked = commands_in((ROOT / ".ci" / "run").read_text())
    for command in commands_in(text):
        assert command in checked, f"{path.name}:{line}: .ci/run does not run {command!r}"


def test_the_readme_has_a_program_and_commands() -> None:
    assert blocks("python")
    assert len(blocks("bash", "console", "sh")) >= 2


def test_the_newest_release_in_the_changelog_is_this_version() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    releases = re.findall(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version and releases[0] == version[1] == torchstrategy.__version__
