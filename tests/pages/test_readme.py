"""The documents say what is so.

Programs run, commands are the ones that are checked, versions agree.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pytest_torchstrategy
import torchstrategy
import torchstrategy.testing
from conditions import for_changes, for_releases
from processes import LEAN, NO_ACCELERATOR, python

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")


class Block(NamedTuple):
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that it is, if its first line says so."""
        match = FILE.match(self.text)
        return match[1] if match else None

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(document, text.count("\n", 0, m.start(2)) + 1, m[1], m[2])
        for m in BLOCK.finditer(text)
    ]


def blocks(*languages: str) -> list[Block]:
    """The blocks of all documents that are in one of the languages."""
    return [
        block
        for document in DOCUMENTS
        for block in blocks_of(document)
        if block.language in languages
    ]


def commands_in(shell: str) -> list[str]:
    """The commands of a shell text, in order, without comments or `&&`."""
    lines = (line.strip() for line in shell.replace("\\\n", " ").splitlines())
    pieces = (
        piece.strip()
        for line in lines
        if not line.startswith("#")
        for piece in line.split("&&")
    )
    return [piece for piece in pieces if piece]


def commands_of_ci() -> list[str]:
    """The commands of .ci/run, without the option that says how deep the tests go."""
    script = (ROOT / ".ci" / "run").read_text()
    return [command.removesuffix(' "$depth"') for command in commands_in(script)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block in blocks("python") if not block.file], ids=str
)
def test_python_blocks_run(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # So that a traceback shows the line of the document.
    program = "\n" * (block.line - 1) + block.text
    exec(compile(program, str(block.document), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("bash", "sh"), ids=str)
def test_commands_are_the_ones_that_are_checked(block: Block) -> None:
    checked = commands_of_ci()
    for command in commands_in(block.text):
        assert command in checked, f"{block}: .ci/run does not run {command!r}"


# A page whose Python blocks are the files of one folder, and whose consoles show what
# commands print there


HERE = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    **NO_ACCELERATOR,
    "OMP_NUM_THREADS": "1",  # torchrun warns where nobody says it
}


def printed_by(command: str, folder: Path) -> str:
    """What a reader sees who has our environment and no accelerator."""
    environment = {**os.environ, **LEAN, **HERE, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


def printed_sooner_by(command: str, folder: Path) -> str:
    """The same, without a shell, and in a process that has imported torch already."""
    program, *arguments = shlex.split(command)
    if program != "python":
        found = shutil.which(program, path=HERE["PATH"])
        assert found, f"there is no {program} here"
        arguments = [found, *arguments]
    done = python(*arguments, folder=folder, **HERE)
    return done.stdout + done.stderr


def last_console_of(document: Path) -> Block:
    return [block for block in blocks_of(document) if block.language == "console"][-1]


def consoles() -> list[Any]:
    """All but those of the tutorial.

    The tests that one page shows take several seconds.
    """
    return [
        pytest.param(
            block,
            marks=[for_releases] if block.document.stem == "testing" else [],
            id=str(block),
        )
        for block in blocks("console")
        if block.document.stem != "tutorial"
    ]


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize("console", consoles())
def test_a_reader_who_follows_a_page_sees_what_it_shows(
    console: Block, tmp_path: Path
) -> None:
    for block in blocks_of(console.document):
        # A later version takes the place of an earlier one.
        if block.file and block.line < console.line:
            (tmp_path / block.file).write_text(block.text)
    is_last = console == last_console_of(console.document)
    assert_prints(console, tmp_path, printed_by if is_last else printed_sooner_by)


@for_releases
def test_a_reader_who_follows_the_tutorial_sees_what_it_shows(tmp_path: Path) -> None:
    """Its commands read what those before them have written."""
    (document,) = {
        block.document
        for block in blocks("console")
        if block.document.stem == "tutorial"
    }
    for block in blocks_of(document):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "console":
            assert_prints(block, tmp_path, printed_sooner_by)


def assert_prints(
    console: Block, folder: Path, printed: Callable[[str, Path], str]
) -> None:
    command, shown = console.text.removeprefix("$ ").split("\n", 1)
    output = printed(command, folder)
    is_shown = OutputChecker().check_output(
        shown, output, ELLIPSIS | NORMALIZE_WHITESPACE
    )
    assert is_shown, f"{console}: {command} does not print\n\n{shown}\nbut\n\n{output}"


# The reference of what tests use


def names_in_reference() -> set[str]:
    """What the first column of its tables names, without arguments."""
    reference = (
        (ROOT / "docs" / "testing.md").read_text().partition("\n## Reference\n")[2]
    )
    rows = re.findall(r"^\| (`.*?) \|", reference, re.MULTILINE)
    return {
        re.split(r"[(=]", name)[0]
        for row in rows
        for name in re.findall(r"`(.+?)`", row)
    }


def test_the_reference_names_all_that_tests_can_use() -> None:
    plugin = inspect.getsource(pytest_torchstrategy)
    options = re.findall(r'addoption\(\s*"(--[\w-]+)"', plugin)
    fixtures = re.findall(
        r"^@pytest.fixture(?:\(.*\).*)?\ndef (\w+)", plugin, re.MULTILINE
    )
    assert options and fixtures
    marks = [
        f"@pytest.mark.{name}"
        for name in re.findall(r'^_\w*MARK = "(\w+)"', plugin, re.MULTILINE)
    ]
    assert len(marks) == 3
    public = {*torchstrategy.testing.__all__, *options, *fixtures, *marks}
    assert names_in_reference() == public


def test_the_newest_release_in_the_changelog_is_this_version() -> None:
    releases = re.findall(
        r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert releases[0] == torchstrategy.__version__


def test_the_version_is_said_in_one_place() -> None:
    folder = Path(torchstrategy.__file__).parent
    assert [
        path
        for path in folder.rglob("*.py")
        if torchstrategy.__version__ in path.read_text()
    ] == [folder / "__init__.py"]
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and "torchstrategy.__version__" in project
    assert torchstrategy.__version__ not in project
