"""CONTRIBUTING.md speaks of files, rooms and commands that there are."""

from __future__ import annotations

import ast
import re
import shlex

import pytest
from test_readme import BLOCK, commands_in, commands_of_ci

from house.rooms import ROOT, package, rooms

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SHELL = [match[2] for match in BLOCK.finditer(PAGE) if match[1] == "bash"]
COMMANDS = [command for text in SHELL for command in commands_in(text)]
QUOTED = sorted(
    {
        quoted
        for quoted in re.findall(r"`([^`\n]+)`", BLOCK.sub("", PAGE))
        if " " not in quoted
    }
)
LINKS = sorted(set(re.findall(r"\]\(([^)#]+)", PAGE)))
SCRIPT = re.compile(r"`python (\S+\.py)`")


def paths() -> list[str]:
    """The files and folders that it names, by themselves or in a command.

    Those that a command builds are left out.
    """
    named = {
        quoted for quoted in QUOTED if "/" in quoted or quoted.endswith((".py", ".md"))
    }
    in_commands = {
        word.partition("::")[0]
        for command in COMMANDS
        for word in command.split()
        if "tests/" in word
    }
    found = named | in_commands | set(SCRIPT.findall(PAGE)) | set(LINKS)
    return sorted(path for path in found if not path.startswith("build/"))


def is_there(path: str) -> bool:
    """Whether a path exists below the repository or package, or in a room.

    In a room, it may stand without folders.
    """
    inside = path.removeprefix("torchstrategy/")
    return (
        (ROOT / path).exists()
        or (package() / inside).exists()
        or ("/" not in path and any(package().rglob(path)))
    )


@pytest.mark.parametrize("path", paths())
def test_a_file_that_is_named_exists(path: str) -> None:
    assert is_there(path)


def test_the_table_of_rooms_has_each_room_once() -> None:
    table = PAGE.partition("| Room | What is in it |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)` \| ", table, re.MULTILINE)
    assert sorted(named) == sorted(rooms()), (
        "the table of rooms in CONTRIBUTING.md needs one line for each room"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_of_ci_or_names_a_test(command: str) -> None:
    if command in commands_of_ci():
        return
    program, *options, target = [
        word for word in shlex.split(command) if word != "--simulate-devices=5"
    ]
    assert [program, *options] == [".venv/bin/python", "-m", "pytest"]
    path, _, test = target.partition("::")
    assert (ROOT / path).exists()
    if test:
        tree = ast.parse((ROOT / path).read_text())
        assert test in {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef)
        }
