"""The library in unusual surroundings.

docs/versions.md has the table of what was tried. Each surrounding runs `program.py` and
a test with the pytest plugin in processes of their own, which takes half a minute: they
are for releases.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conditions import for_changes, for_releases, without_simulated_devices
from house.rooms import package

pytestmark = [for_releases, without_simulated_devices]

HERE = Path(__file__).parent
# Containers often have such a number.
USERS = {"nobody": 65534, "a number without a name": 54321}
TEST = "def test(strategy):\n    assert strategy.num_replicas_in_sync >= 1\n"
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@dataclass
class Surroundings:
    """What is unusual."""

    options: Sequence[str] = ()  # of Python
    set: Mapping[str, str] = field(default_factory=dict)  # variables of the environment
    unset: Sequence[str] = ()
    before: Sequence[str] = ()  # what starts Python
    arguments: Sequence[str] = ()  # of the program


NO_LOCALE = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
IN_A_SHELL = 'ip link set lo up 2>/dev/null; exec "$@"'
# Several at once, where they have nothing to do with each other: a run takes half a
# minute.
TOGETHER: dict[str, Surroundings] = {
    "-W error": Surroundings(["-W", "error"], arguments=["loaders"]),
    "-O, hash seed 0, no TMPDIR": Surroundings(
        ["-O"],
        {"PYTHONHASHSEED": "0"},
        ["TMPDIR", "TEMP", "TMP"],
        arguments=["loaders"],
    ),
    "-OO, no HOME": Surroundings(
        ["-OO"], unset=["HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"]
    ),
    "-X dev, -bb, hash seed 77": Surroundings(
        ["-X", "dev", "-bb"], {"PYTHONHASHSEED": "77"}, arguments=["loaders"]
    ),
    "ASCII, TMPDIR that is not there": Surroundings(
        set={**NO_LOCALE, "TMPDIR": "/no/such/folder"}
    ),
    "no network": Surroundings(before=["unshare", "-n"], arguments=["alone"]),
    "no network but this machine": Surroundings(
        before=["unshare", "-n", "sh", "-c", IN_A_SHELL, "sh"]
    ),
}


def run(
    command: Sequence[str],
    told: Surroundings,
    paths: Sequence[Path],
    folder: Path,
    **options: object,
) -> str:
    environment = {
        key: value for key, value in os.environ.items() if key not in told.unset
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **told.set,
    }
    whole = [*told.before, sys.executable, *told.options, *command]
    done = subprocess.run(
        whole,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        **options,  # type: ignore
    )
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, (
        f"{' '.join(whole)} ended with {done.returncode}:\n{said[-6000:]}"
    )
    return said


def works(
    told: Surroundings,
    folder: Path,
    paths: Sequence[Path] | None = None,
    **options: object,
) -> None:
    """Runs the program, and a test with the plugin."""
    test = folder / "test_of_a_user.py"
    test.write_text(TEST)
    program = folder / "program.py"
    shutil.copy(HERE / "program.py", program)
    paths = [package().parent] if paths is None else paths
    said = run([str(program), *told.arguments], told, paths, folder, **options)
    assert "all went well" in said
    plugin = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "pytest_torchstrategy",
        "-p",
        "no:cacheprovider",
        "--simulate-devices=2",
    ]
    said = run([*plugin, str(test)], told, paths, folder, **options)
    assert "passed" in said and "failed" not in said


def check_that_it_can_start(told: Surroundings) -> None:
    if told.before and (
        shutil.which(told.before[0]) is None
        or subprocess.run([*told.before, "true"], capture_output=True).returncode
    ):
        pytest.skip(
            f"needs {' '.join(told.before[:2])}, which this user may not run here"
        )


@for_changes
@pytest.mark.parametrize("name", TOGETHER)
def test_everything_works(name: str, tmp_path: Path) -> None:
    told = TOGETHER[name]
    check_that_it_can_start(told)
    works(told, tmp_path)


def installed_in(folder: Path) -> Path:
    """A copy of the package, as an installation has it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package(), folder / "torchstrategy", ignore=ignored)
    shutil.copy(package().parent / "pytest_torchstrategy.py", folder)
    return folder


@for_changes
def test_a_path_with_spaces_and_letters_beyond_ascii(tmp_path: Path) -> None:
    folder = tmp_path / "mit Leerzeichen und Zeichen äßλ日本"
    (folder / "site").mkdir(parents=True)
    works(Surroundings(arguments=["loaders"]), folder, [installed_in(folder / "site")])


@for_changes
@pytest.mark.skipif(not IS_ROOT, reason="becomes another user: run it as root")
@pytest.mark.parametrize("user", USERS)
def test_a_user_who_may_write_nothing_but_one_folder(user: str, tmp_path: Path) -> None:
    """Neither the installation, nor a home, which this user does not have."""
    hidden = [
        str(folder)
        for folder in Path(sys.executable).resolve().parents
        if not folder.stat().st_mode & 0o001
    ]
    hidden += [
        str(folder)
        for folder in Path(sys.prefix).parents
        if not folder.stat().st_mode & 0o001
    ]
    if hidden:
        pytest.skip(
            f"other users cannot reach this Python: {hidden[0]} is closed to them"
        )
    site, work = (
        installed_in(tmp_path_of_all(tmp_path, "site")),
        tmp_path_of_all(tmp_path, "work"),
    )
    for path in [site, *site.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    number = USERS[user]
    os.chown(work, number, number)
    told = Surroundings(
        set={"HOME": "/nonexistent", "TMPDIR": str(work)}, unset=["USER", "LOGNAME"]
    )
    works(told, work, [site], user=number, group=number, extra_groups=[])
    assert not list(site.rglob("__pycache__"))


def tmp_path_of_all(tmp_path: Path, name: str) -> Path:
    """A new folder that every user may reach."""
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest-of-" in str(folder):
            folder.chmod(0o755)
    made = tmp_path / name
    made.mkdir(mode=0o755)
    return made
