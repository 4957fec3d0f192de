"""Runs public programs as they are on simulated devices.

Writes the table of docs/public-programs.md.

python benchmarks/public_programs.py FOLDER [--only WORD] [--for SECONDS] [--again]
[--page FILE]

FOLDER has clones of the repositories, each by the last part of its name: `git clone
https://github.com/pytorch/examples FOLDER/examples`. A repository that is not there is
left out. Nothing in the programs is changed. Data that they would download is made up,
and put where they look for it. The packages that they need have to be there; the table
says which is missing.

Each program is run by `python -m torchstrategy.testing.run`. If it can do without a
GPU, it is run twice more, with as many steps of its optimizer: by plain Python on the
CPU, and on simulated devices that draw the random numbers of the CPU; `comparable_runs`
tells how. The losses and the like that these print are compared, and the gradients of
each step. Results are kept in FOLDER/results.json, so that a second call goes on where
the first one stopped. Rows of the table whose programs have no result there stay as
they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from comparable_runs import LOADED_ALIKE, ON_SIMULATED_DEVICES, ON_THE_CPU
from programs_of_others import PROGRAMS, Program, make_data

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240  # that a program may take, on a busy machine
TOLERANCE = 2e-4  # of gradients, and of numbers that programs print with a few digits
NUMBER = r"-?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
SAID = re.compile(
    r"(?i)\b(loss\w*|ppl|perplexity|accuracy|acc@?\d*|mse|average "
    rf"loss|\w*return)\b[^-\d\n]{{0,12}}?({NUMBER})"
)
TO_DO = {
    "ModuleNotFoundError": "Install it.",
    "not done": "Give it less to do.",
    "IndexError: invalid index of a 0-dim tensor": (
        "It is older than torch 0.5: write `.item()` there."
    ),
    "RuntimeError: one of the variables needed": (
        "It is older than torch 1.5: step after both losses went backward."
    ),
    "TypeError: TransformObservation": "Install gymnasium before 1.0.",
    "huggingface_hub": "Download the weights before, or name a checkpoint.",
    "NameError": "Nothing in it defines this name: mend the program.",
}  # by the beginning of an error
LEAST_GRADIENT = 1e-6  # below this, its norm is rounding
DRAWN_ALIKE = "with the CPU's random numbers"
BEGIN, END = (
    "<!-- the table: benchmarks/public_programs.py -->",
    "<!-- the end of the table -->",
)


def main() -> None:
    """Runs what has no result yet, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--only", default="", help="programs whose names have this word in them"
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=float,
        default=math.inf,
        help="begin no program after these",
    )
    parser.add_argument(
        "--again", action="store_true", help="also those that have a result"
    )
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "public-programs.md"
    )
    options = parser.parse_args()
    file, began = options.folder / "results.json", time.monotonic()
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for program in PROGRAMS:
        known = program.name in results and not options.again
        if (
            known
            or options.only not in program.name
            or not (options.folder / program.clone).is_dir()
        ):
            continue
        if time.monotonic() - began > options.seconds:
            print("there is more: call it again")
            break
        results[program.name] = result_of(program, options.folder.resolve())
        file.write_text(json.dumps(results, indent=1))
        print(
            program.name,
            "|",
            " | ".join(row(program, results[program.name])[3:]),
            flush=True,
        )
    if options.page.exists():
        write_table(options.page, results)


def result_of(program: Program, folder: Path) -> dict[str, Any]:
    """What came of a program on simulated devices, and on the CPU.

    It also runs on simulated devices with the CPU's numbers.
    """
    make_data(program, folder / program.clone)
    with tempfile.TemporaryDirectory() as scratch:
        report, notes = Path(scratch) / "report.json", Path(scratch) / "notes.json"
        options = [
            "--json",
            str(report),
            "--as-cuda",
            "--devices",
            str(program.devices),
        ]
        options += ["--ranks", str(program.ranks)] if program.ranks else []
        options += ["--stop-after", str(program.steps)] if program.steps else []
        options += [program.file, *program.arguments]
        result = run(["-m", "torchstrategy.testing.run", *options], program, folder)
        result |= picked(json.loads(report.read_text()) if report.exists() else {})
        result["commit"] = commit(folder / program.clone)
        if program.on_cpu is not None:
            plain = [str(program.steps), program.file, *program.on_cpu]
            starts = [
                ("cpu", ON_THE_CPU, plain),
                ("drawn_alike", ON_SIMULATED_DEVICES, options),
            ]
            for name, start, rest in starts[:1] if result["status"] else starts:
                notes.unlink(missing_ok=True)
                start = (
                    LOADED_ALIKE + start if program.loads_otherwise_on_gpus else start
                )
                result[name] = run(["-c", start, str(notes), *rest], program, folder)
                result[name]["gradients"] = (
                    json.loads(notes.read_text()) if notes.exists() else []
                )
    return result


def run(command: Sequence[str], program: Program, folder: Path) -> dict[str, Any]:
    """The exit status and what was printed; a status of 124 if it took too long."""
    clone = folder / program.clone
    paths = [
        str(ROOT),
        *(str(clone / path) for path in program.paths),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "WANDB_MODE": "disabled",
    }
    environment["PYTHONHASHSEED"] = "0"  # sets of words have one order in all runs
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=clone / program.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {
            "status": 124,
            "numbers": [],
            "error": f"not done after {SECONDS} seconds",
        }
    printed = done.stdout if numbers(done.stdout) else done.stderr
    return {
        "status": done.returncode,
        "numbers": numbers(printed),
        "error": error_in(done.stderr),
    }


def numbers(out: str) -> list[float]:
    """The losses and the like that were printed, in order."""
    return [float(number) for _, number in SAID.findall(out)]


def error_in(errors: str) -> str:
    """The last line that names an error."""
    named = [
        line
        for line in errors.splitlines()
        if re.match(r"[\w.]+(Error|Exception|Stopped|Unavailable)\b", line)
    ]
    return named[-1] if named else errors.strip().rpartition("\n")[2]


def picked(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a report."""
    steps = max(1, report.get("steps", 0))
    return {
        "steps": report.get("steps", 0),
        "waits": sum(one["times"] for one in report.get("synchronizations", []))
        / steps,
        "blocking": sum(report.get("blocking_copies", {}).values()) / steps,
        "findings": [
            (one["name"], ", ".join(one["lines"])) for one in report.get("findings", [])
        ],
        "races": len(report.get("races", [])),
        "notes": report.get("notes", []),
    }


def commit(clone: Path) -> str:
    """The commit of a clone, short."""
    done = subprocess.run(
        ["git", "-C", str(clone), "rev-parse", "--short=7", "HEAD"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "?"


# A program in the table: its repository, its file and its options.
Called: TypeAlias = tuple[str, str, str]


def called(program: Program) -> Called:
    """What the table shows of a program before it has a result."""
    options = " ".join(
        [f"--ranks {program.ranks}" if program.ranks else "", program.short]
    ).strip()
    file = f"`{program.folder}/{program.file}`".replace("`./", "`")
    return program.repository, file, f"`{options}`" if options else ""


def row(program: Program, result: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    repository, file, options = called(program)
    return [
        f"[{repository}](https://github.com/{repository}) {result['commit']}",
        file,
        options,
        ended(program, result),
        compared(program, result),
        what_was_found(result),
    ]


def ended(program: Program, result: Mapping[str, Any]) -> str:
    """How it ended; a failure with its known reason, or with its error."""
    if not result["status"]:
        steps = result["steps"]
        return f"well, {steps} step{'s' if steps > 1 else ''}" if steps else "well"
    error = result["error"].replace("|", "\\|")
    short = error if len(error) < 300 else error[:297] + "..."
    advice = next(
        (words for name, words in TO_DO.items() if error.startswith(name)), program.why
    )
    return f"{short} {advice}".strip()


class Same(NamedTuple):
    """How many of some numbers are equal."""

    count: int
    of: int

    @property
    def is_all(self) -> bool:
        return self.count == self.of

    def said(self, what: str = "") -> str:
        """In words."""
        things = f" {what}{'s' if self.of > 1 else ''}" if what else ""
        return (
            f"equal ({self.count}{things})"
            if self.is_all
            else f"{self.count} of {self.of}{things}"
        )


def compared(program: Program, result: Mapping[str, Any]) -> str:
    """Whether its numbers are those of the CPU."""
    cpu = result.get("cpu")
    if cpu is None:
        return "" if result["status"] else "not run there"
    if result["status"]:
        return "fails there, too" if cpu["status"] else "does not fail there"
    if cpu["status"]:
        return f"not on the CPU: {cpu['error'][:80]}"
    alike = result["drawn_alike"]
    gradients = same_of(alike["gradients"], cpu["gradients"], LEAST_GRADIENT)
    if not cpu["numbers"]:
        if not cpu["gradients"]:
            return "prints none"
        return f"{gradients.said('gradient')} {DRAWN_ALIKE}{why(program, gradients)}"
    numbers, how = same_of(result["numbers"], cpu["numbers"]), ""
    if not numbers.is_all:
        numbers, how = same_of(alike["numbers"], cpu["numbers"]), f" {DRAWN_ALIKE}"
    others = "" if gradients.is_all else f", and {gradients.said('gradient')}"
    return f"{numbers.said()}{how}{others}{why(program, numbers, gradients)}"


def why(program: Program, *compared: Same) -> str:
    """Why some numbers are others; nothing if all are equal."""
    return (
        ""
        if all(same.is_all for same in compared)
        else f": {program.differs or 'it is not known why'}"
    )


def same_of(
    some: Sequence[float], others: Sequence[float], least: float = TOLERANCE
) -> Same:
    """How many numbers are equal but for rounding. One that is missing is not equal."""
    count = sum(is_same(*pair, least) for pair in zip(some, others, strict=False))
    return Same(count, max(len(some), len(others)))


def is_same(one: float, other: float, least: float = TOLERANCE) -> bool:
    """Whether two numbers are equal but for rounding."""
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=least) or (
        math.isnan(one) and math.isnan(other)
    )


def what_was_found(result: Mapping[str, Any]) -> str:
    """Findings and races, or else how often it waits."""
    found = [f"`{name}` ({lines})" for name, lines in result["findings"]]
    found += [f"{result['races']} races"] if result["races"] else []
    found += (
        [
            (
                f"{result['waits']:.1f} waits and {result['blocking']:.1f} blocking "
                "copies a step"
            )
        ]
        if result["steps"]
        else []
    )
    return "; ".join([*found, *result["notes"]])


def write_table(page: Path, results: Mapping[str, Any]) -> None:
    """Puts the table into the page. A program that has no result here keeps its row."""
    text = page.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    written = dict(map(read_row, re.findall(r"^\| \[.*$", text, re.MULTILINE)))
    rows = [
        row(program, results[program.name])
        if program.name in results
        else written[called(program)]
        for program in PROGRAMS
        if program.name in results or called(program) in written
    ]
    head = ["repository", "program", "with", "ended", "numbers of the CPU", "found"]
    lines = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]]
    page.write_text(
        "\n".join([before + BEGIN, "", summary(rows), "", *lines, "", after])
    )


def read_row(line: str) -> tuple[Called, list[str]]:
    """Which program a line of the table is about, and its cells."""
    cells = re.split(r" ?(?<!\\)\| ?", line)[1:-1]
    return (cells[0].partition("](")[0].removeprefix("["), cells[1], cells[2]), cells


def summary(rows: Sequence[Sequence[str]]) -> str:
    """How many there are, how many ended well, and how many have the CPU's numbers."""
    well = [numbers for _, _, _, ended, numbers, _ in rows if ended.startswith("well")]
    both = [numbers for numbers in well if numbers and not numbers.startswith("not ")]
    equal = [
        numbers
        for numbers in both
        if numbers.startswith("equal") and ":" not in numbers
    ]
    as_they_are = [numbers for numbers in equal if DRAWN_ALIKE not in numbers]
    version = torch.__version__.partition("+")[0]
    return (
        f"{len(rows)} programs with torch {version}: {len(well)} ended well. "
        f"{len(both)} of them ran on the CPU, too. The numbers of {len(equal)} were "
        f"equal, of {len(as_they_are)} without the CPU's random numbers."
    )


if __name__ == "__main__":
    main()
