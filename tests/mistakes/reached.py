"""Which test reaches which line of the package, and how long it takes.

`Recorder` is a plugin of pytest: with it, a run of tests writes two files into a
folder, and `Reached` reads them. What a test reaches in processes that it calls is
written by those: see `recorded_lines`. What it reaches in others is not seen.
`Reached.tests_of_unseen_processes` names such tests: they may reach every line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

import torchstrategy
from depths import Depth, depth_of
from recorded_lines import FOLDER, PREFIX

PACKAGE = Path(torchstrategy.__file__).parent
# A test that waits this long, and does not compute, waits for a process.
WAITED_S = 0.5


class Timed(NamedTuple):
    """How a test went, without any mistake."""

    seconds: float
    waited_s: float
    has_passed: bool
    depth: str  # the first depth at which it runs

    @property
    def waits_for_processes(self) -> bool:
        return self.waited_s > max(WAITED_S, self.seconds / 2)


class Recorder:
    """Writes down for each test which lines it reaches, and how long it takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.coverage = coverage.Coverage(
            data_file=str(folder / "lines"),
            include=[f"{PACKAGE}/*"],
            config_file=False,
        )
        self.coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self.times: dict[str, Timed] = {}
        self._failed: set[str] = set()
        os.environ[FOLDER] = str(folder)
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, None]:
        self.coverage.switch_context(item.nodeid)
        began, computed = time.perf_counter(), time.process_time()
        yield
        seconds = time.perf_counter() - began
        waited = seconds - (time.process_time() - computed)
        passed = item.nodeid not in self._failed
        depth = depth_of(item).name
        self.times[item.nodeid] = Timed(seconds, waited, passed, depth)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.coverage.stop()
        self.coverage.save()
        of_processes = coverage.CoverageData(str(self.folder / "lines-of-processes"))
        for file in self.folder.glob(f"{PREFIX}.*"):
            lines = coverage.CoverageData(str(file))
            lines.read()
            of_processes.update(lines)
            file.unlink()
        # A run that was broken off has not seen all tests.
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            (self.folder / "times.json").write_text(json.dumps(self.times))


class Reached:
    """What was recorded in some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.times: dict[str, Timed] = {}
        self._lines: list[coverage.CoverageData] = []
        self._seen_in_processes: set[str] = set()
        for folder in folders:
            times = json.loads((folder / "times.json").read_text())
            self.times.update({name: Timed(*values) for name, values in times.items()})
            lines = coverage.CoverageData(str(folder / "lines"))
            lines.read()
            self._lines.append(lines)
            in_processes = coverage.CoverageData(str(folder / "lines-of-processes"))
            in_processes.read()
            self._seen_in_processes |= in_processes.measured_contexts()
            self._lines.append(in_processes)

    def tests_of(self, path: str, first: int, last: int) -> list[str]:
        """The tests that reach a line from `first` to `last` of a file of the package.

        Tests that were skipped or failed without a mistake are left out.
        """
        reached: set[str] = set()
        for lines in self._lines:
            # Each run was that of another copy of the repository.
            for file in lines.measured_files():
                if file.endswith(f"/{PACKAGE.name}/{path}"):
                    contexts = lines.contexts_by_lineno(file)
                    for line in range(first, last + 1):
                        reached.update(contexts.get(line, []))
        return [name for name in reached if self._passes(name)]

    def tests_of_unseen_processes(self) -> list[str]:
        """The tests that wait for processes that nobody has recorded."""
        return [
            name
            for name, timed in self.times.items()
            if timed.waits_for_processes
            and timed.has_passed
            and name not in self._seen_in_processes
        ]

    def in_order(self, names: Iterable[str], near: str) -> list[str]:
        """Tests in the order in which a trial runs them.

        Those of the first depth come first, so that the tests that noticed say at which
        depth a mistake is found. Of one depth, tests come first whose folder is named
        like the room of the mistake, and then those that take the least time.
        """

        def order(name: str) -> tuple[int, bool, float]:
            timed = self.times[name]
            return Depth[timed.depth].value, near not in name, timed.seconds

        return sorted(names, key=order)

    def first_depth(self, names: Iterable[str]) -> Depth | None:
        """The first depth at which one of the tests runs; None if there is no test."""
        depths = [Depth[self.times[name].depth] for name in names]
        return min(depths, default=None)

    def _passes(self, name: str) -> bool:
        return name in self.times and self.times[name].has_passed
