"""One of several processes that record or try, each in a copy of the repository.

Only `__main__.py` calls `python -m tests.mistakes.lane`. It does so in the folder of
the copy, which a trial changes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .kinds import Mistake
from .reached import Recorder
from .trials import Outcome, Trial, Trials


def record(folder: Path, arguments: list[str]) -> None:
    """Runs tests, and writes down what they reach."""
    folder.mkdir(parents=True, exist_ok=True)
    code = pytest.main(["-q", *arguments], plugins=[Recorder(folder)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(code)


def try_mistakes(folder: Path, enough: int, arguments: list[str]) -> None:
    """Takes trials from a folder until none is left, and writes their outcomes."""

    def report(number: int, outcome: Outcome) -> None:
        (folder / f"{number}.outcome").write_text(json.dumps(outcome))
        print(f"{number}: {outcome.how}, {outcome.tests_run} tests run", flush=True)

    trials = Trials(_take_trials(folder), report, enough, folder)
    # Captured output would be that of all trials.
    code = pytest.main(["-q", "-s", *arguments], plugins=[trials])
    if code != pytest.ExitCode.OK:
        raise SystemExit(code)


def _take_trials(folder: Path) -> Iterator[tuple[int, Trial]]:
    """Trials that no other lane has claimed."""
    for path in sorted(folder.glob("*.trial"), key=lambda path: int(path.stem)):
        if path.with_suffix(".outcome").exists():
            continue
        try:
            os.close(os.open(path.with_suffix(".claimed"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        planted, tests, seconds = json.loads(path.read_text())
        mistake = None if planted is None else Mistake(*planted)
        yield int(path.stem), Trial(mistake, tests, seconds)


if __name__ == "__main__":
    what, place, *rest = sys.argv[1:]
    if what == "record":
        record(Path(place), rest)
    else:
        try_mistakes(Path(place), int(rest[0]), rest[1:])
