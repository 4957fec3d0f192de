"""Plants mistakes, and prints which of them the tests notice.

See the docstring of the package. If a run was broken off, begin it again with the same
`--folder`: it goes on where it was, with the copies that it made. Take a new folder for
a new measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

from depths import Depth

from .kinds import Mistake, choose_mistakes
from .reached import Reached
from .table import Answer, list_unnoticed, make_table
from .trials import Outcome, Trial

REPOSITORY = Path(__file__).parents[2]
# The two runs of the README: on the CPU, and on simulated devices.
RUNS = {"cpu": [], "simulated": ["--simulate-devices=5"]}
NONE_PLANTED = 10_000  # the number of the trial that plants nothing


def main() -> None:
    options = _options()
    lanes = [Lane(options.folder, number) for number in range(options.jobs)]
    package = lanes[0].tree / "torchstrategy"
    mistakes = choose_mistakes(package, options.count, options.seed)
    found: dict[int, Answer] = {}
    for run, arguments in RUNS.items():
        recorded = [options.folder / run / lane.name for lane in lanes]
        _record(lanes, recorded, [*arguments, *options.depth], options.tests)
        reached = Reached(recorded)
        trials = options.folder / run / "trials"
        trials.mkdir(exist_ok=True)
        for taken in trials.glob("*.taken"):  # by a run that was broken off
            taken.unlink()
        unnoticed = [
            number
            for number in range(len(mistakes))
            if number not in found or found[number].depth is None
        ]
        for number in unnoticed:
            trial = choose_tests(reached, mistakes[number], options.seconds)
            (trials / f"{number}.trial").write_text(json.dumps(trial))
        anything = sorted(reached.times)[:: max(1, len(reached.times) // 100)]
        anything = [name for name in anything if reached.times[name].has_passed]
        nothing = Trial(None, anything, options.seconds)
        (trials / f"{NONE_PLANTED}.trial").write_text(json.dumps(nothing))
        command = ["try", str(trials), str(options.enough), *arguments, *options.depth]
        _wait_for(lane.start(command) for lane in lanes)
        _check_that_nothing_is_noticed(trials)
        for number in unnoticed:
            answer = _answer(mistakes[number], trials / f"{number}.outcome", reached)
            before = found.get(number)
            if before is not None:
                ran = before.tests_run + answer.tests_run
                answer = answer._replace(tests_run=ran)
            found[number] = answer
    answers = [found[number] for number in sorted(found)]
    print(make_table(answers))
    print()
    print("No test has noticed:")
    print(list_unnoticed(answers))


def choose_tests(reached: Reached, mistake: Mistake, seconds: float) -> Trial:
    """The tests of a trial: as many as take so many seconds without a mistake.

    Tests that start processes come last, since nobody knows which lines they reach
    there.
    """
    room = Path(mistake.path).parts[0].strip("_").removesuffix(".py")
    here = reached.tests_of(mistake.path, mistake.line, mistake.last_line)
    # Programs of the kit know no strategy, and workers no kit.
    elsewhere = {
        name
        for name in reached.tests_with_processes()
        if name not in here and ("testing" in name) == (room == "testing")
    }
    chosen, taken = [], 0.0
    for names in (reached.in_order(here, room), reached.in_order(elsewhere, room)):
        limit = taken + seconds
        for name in names:
            if taken + reached.times[name].seconds > limit:
                break
            chosen.append(name)
            taken += reached.times[name].seconds
    return Trial(mistake, chosen, taken)


class Lane:
    """A copy of the repository, with a Python that imports the package from there."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name = f"lane{number}"
        self.tree = folder / self.name
        if not self.tree.exists():
            self._copy()

    def _copy(self) -> None:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        files = subprocess.check_output(command, cwd=REPOSITORY, text=True)
        for name in files.splitlines():
            if (REPOSITORY / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, self.tree / name)
        venv.create(self.tree / ".venv", symlinks=os.name != "nt")
        packages = next((self.tree / ".venv").glob("lib/python*/site-packages"))
        ours = f"{self.tree}\n{sysconfig.get_path('purelib')}\n"
        (packages / "lane.pth").write_text(ours)

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Starts `lane` in the copy, with one thread for torch."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        python = str(self.tree / ".venv" / "bin" / "python")
        return subprocess.Popen(
            [python, "-m", "tests.mistakes.lane", *command],
            cwd=self.tree,
            env=environment,
        )


def _record(
    lanes: list[Lane], folders: list[Path], arguments: list[str], tests: list[Path]
) -> None:
    """Lets each lane run some of the test files, unless that was done before."""
    if all((folder / "times.json").exists() for folder in folders):
        return
    files: list[Path] = []
    for place in tests:
        files += sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    files = [file for file in files if "thirdparty" not in file.parts]
    running = []
    for index, (lane, folder) in enumerate(zip(lanes, folders, strict=True)):
        names = [
            str(file.relative_to(REPOSITORY)) for file in files[index :: len(lanes)]
        ]
        running.append(lane.start(["record", str(folder), *arguments, *names]))
    _wait_for(running)


def _wait_for(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in list(processes):
        if process.wait() != 0:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")


def _check_that_nothing_is_noticed(trials: Path) -> None:
    path = trials / f"{NONE_PLANTED}.outcome"
    outcome = Outcome(*json.loads(path.read_text()))
    if outcome.noticed_by:
        raise SystemExit(f"without a mistake these fail: {outcome.noticed_by}")


def _answer(mistake: Mistake, path: Path, reached: Reached) -> Answer:
    outcome = Outcome(*json.loads(path.read_text()))
    depths = [
        Depth[reached.times[name].depth]
        for name in outcome.noticed_by
        if name in reached.times
    ]
    # A mistake that ends or hangs pytest is noticed whatever is run.
    depth = min(depths, default=Depth.QUICK) if outcome.noticed_by else None
    return Answer(mistake, depth, outcome.noticed_by, outcome.tests_run)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mistakes", description=__doc__
    )
    add = parser.add_argument
    tests = [REPOSITORY / "tests"]
    add("tests", type=Path, nargs="*", default=tests, help="that may notice (all)")
    add("--count", type=int, default=240, help="how many mistakes (240)")
    add("--seed", type=int, default=1, help="which mistakes (1)")
    add("--jobs", type=int, default=2, help="how many are tried at once (2)")
    add("--enough", type=int, default=1, help="failing tests that end a trial (1)")
    add("--seconds", type=float, default=60.0, help="of tests for each mistake (60)")
    add(
        "--folder",
        type=Path,
        default=REPOSITORY / "build" / "mistakes",
        help="for the copies and what is found (build/mistakes)",
    )
    add("--ci", action="store_true", help="try the tests of a change only, not all")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.depth = ["--ci"] if options.ci else ["--all"]
    options.tests = [path.resolve() for path in options.tests]
    return options


if __name__ == "__main__":
    main()
