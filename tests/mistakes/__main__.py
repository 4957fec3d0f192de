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
import time
import venv
from pathlib import Path

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
    folder = Folder(options.folder)
    folder.begin({name: str(value) for name, value in vars(options).items()})
    files = _test_files(options.tests)
    lanes = [Lane(folder, number) for number in range(min(options.jobs, len(files)))]
    package = folder.original / "torchstrategy"
    mistakes = choose_mistakes(package, options.count, options.seed)
    answers: dict[int, Answer] = {}
    for run, arguments in RUNS.items():
        place = options.folder / run
        arguments = [*arguments, options.depth]
        reached = _record(lanes, files, place, arguments)
        unnoticed = [
            number
            for number in range(len(mistakes))
            if number not in answers or answers[number].depth is None
        ]
        chosen = {
            number: choose_tests(reached, mistakes[number], options.seconds)
            for number in unnoticed
        }
        outcomes = _try(lanes, place, arguments, options.enough, chosen)
        for number in unnoticed:
            mistake, outcome = mistakes[number], outcomes[number]
            lines = mistake.line, mistake.last_line
            reach = len(reached.tests_of(mistake.path, *lines))
            before = answers.get(number)
            if before is not None:
                reach += before.tests_that_reach
                run_before = before.outcome.tests_run
                outcome = outcome._replace(tests_run=outcome.tests_run + run_before)
            depth = reached.first_depth(outcome.noticed_by)
            answers[number] = Answer(mistake, depth, outcome, reach)
    in_order = [answers[number] for number in sorted(answers)]
    print(make_table(in_order))
    print("\nNo test has noticed:\n" + list_unnoticed(in_order))


def choose_tests(reached: Reached, mistake: Mistake, seconds: float) -> Trial:
    """The tests of a trial: as many as take so many seconds without a mistake.

    Tests of unseen processes come last: nobody knows which lines they reach there.
    """
    room = Path(mistake.path).parts[0].strip("_").removesuffix(".py")
    here = reached.tests_of(mistake.path, mistake.line, mistake.last_line)
    # Programs of the kit know no strategy, and workers no kit.
    elsewhere = {
        name
        for name in reached.tests_of_unseen_processes()
        if name not in here and ("testing" in name) == (room == "testing")
    }
    chosen, taken = [], 0.0
    for names in (reached.in_order(here, room), reached.in_order(elsewhere, room)):
        limit = taken + seconds
        for name in names:
            if taken + reached.times[name].seconds <= limit:
                chosen.append(name)
                taken += reached.times[name].seconds
    return Trial(mistake, chosen, taken)


class Folder:
    """Where the copies of the repository are, and what is found."""

    def __init__(self, path: Path) -> None:
        self.path, self.original = path, path / "original"

    def begin(self, options: dict[str, str]) -> None:
        """Copies the repository, or goes on with the copy of a run that was broken off.

        Raises:
            SystemExit: The run that was broken off had other options.
        """
        told = self.path / "options.json"
        if told.exists():
            if json.loads(told.read_text()) != options:
                raise SystemExit(
                    f"{self.path} belongs to a run with other options: "
                    f"{told.read_text()}. Give another --folder, or delete this one."
                )
            return
        shutil.rmtree(self.original, ignore_errors=True)
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        files = subprocess.check_output(command, cwd=REPOSITORY, text=True)
        for name in files.splitlines():
            if (REPOSITORY / name).is_file():
                (self.original / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, self.original / name)
        told.write_text(json.dumps(options))  # the copy is whole


class Lane:
    """A copy of the repository, with a Python that imports the package from there."""

    def __init__(self, folder: Folder, number: int) -> None:
        self.name = f"lane{number}"
        self.tree = folder.path / self.name
        # A run that was broken off may have left a mistake.
        shutil.rmtree(self.tree, ignore_errors=True)
        shutil.copytree(folder.original, self.tree)
        venv.create(self.tree / ".venv", symlinks=os.name != "nt")
        packages = next((self.tree / ".venv").glob("lib/python*/site-packages"))
        ours = f"{self.tree}\n{sysconfig.get_path('purelib')}\n"
        (packages / "lane.pth").write_text(ours)

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Starts `lane` in the copy, with one thread for torch."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["COVERAGE_CORE"] = "ctrace"  # others lose who has reached a line
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        python = str(self.tree / ".venv" / "bin" / "python")
        return subprocess.Popen(
            [python, "-m", "tests.mistakes.lane", *command],
            cwd=self.tree,
            env=environment,
        )


def _test_files(places: list[Path]) -> list[str]:
    """The files of tests in some places, by their paths in the repository."""
    files: list[Path] = []
    for place in places:
        files += sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    files = [file for file in files if "thirdparty" not in file.parts]
    return [str(file.relative_to(REPOSITORY)) for file in files]


def _record(
    lanes: list[Lane], files: list[str], place: Path, arguments: list[str]
) -> Reached:
    """Lets each lane run some of the files, unless that was done before."""
    folders = [place / lane.name for lane in lanes]
    running = []
    for index, (lane, folder) in enumerate(zip(lanes, folders, strict=True)):
        if not (folder / "times.json").exists():
            names = files[index :: len(lanes)]
            running.append(lane.start(["record", str(folder), *arguments, *names]))
    _await_all(running)
    return Reached(folders)


def _try(
    lanes: list[Lane],
    place: Path,
    arguments: list[str],
    enough: int,
    chosen: dict[int, Trial],
) -> dict[int, Outcome]:
    """Lets the lanes try mistakes, and then the tests that noticed without a mistake.

    What such a test says without a mistake says nothing about any.
    """
    trials = place / "trials"
    trials.mkdir(exist_ok=True)
    for claimed in trials.glob("*.claimed"):  # by a run that was broken off
        claimed.unlink()
    command = ["try", str(trials), str(enough), *arguments]

    def outcomes_of(some: dict[int, Trial]) -> dict[int, Outcome]:
        for number, trial in some.items():
            (trials / f"{number}.trial").write_text(json.dumps(trial))
        _await_all([lane.start(command) for lane in lanes])
        return {
            number: Outcome(*json.loads((trials / f"{number}.outcome").read_text()))
            for number in some
        }

    outcomes = outcomes_of(chosen)
    noticing = {name for outcome in outcomes.values() for name in outcome.noticed_by}
    seconds = sum(trial.seconds for trial in chosen.values())
    nothing = Trial(None, sorted(noticing), seconds)
    outcome = outcomes_of({NONE_PLANTED: nothing})[NONE_PLANTED]
    fail_anyway = set(outcome.noticed_by)
    if fail_anyway:
        print(f"fail without a mistake, too: {sorted(fail_anyway)}")
    return {
        number: outcome.without(fail_anyway) for number, outcome in outcomes.items()
    }


def _await_all(running: list[subprocess.Popen[bytes]]) -> None:
    """Waits for all lanes; where one fails, or on Ctrl-C, the others end, too."""
    try:
        while any(process.poll() is None for process in running):
            failed = [process for process in running if process.poll()]
            if failed:
                raise SystemExit(f"a lane ended with {failed[0].returncode}")
            time.sleep(0.1)
    finally:
        for process in running:
            process.terminate()
            process.wait()
    if any(process.returncode for process in running):
        raise SystemExit("a lane failed")


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
    options.depth = "--ci" if options.ci else "--all"
    options.tests = [path.resolve() for path in options.tests]
    return options


if __name__ == "__main__":
    main()
