"""Runs public programs as they are on simulated devices, and writes the table of docs/public-programs.md.

python benchmarks/public_programs.py FOLDER [--only WORD] [--for SECONDS] [--again] [--page FILE]

FOLDER has clones of the repositories, each by the last part of its name: `git clone
https://github.com/pytorch/examples FOLDER/examples`. A repository that is not there is left out. Nothing in the
programs is changed. Data that they would download is made up, and put where they look for it. The packages that they
need have to be there; the table says which is missing.

Each program is run twice: by `python -m torchstrategy.testing.run`, and, if it can do without a GPU, by plain Python on
the CPU, with as many steps of its optimizer. The losses and the like that the two print are compared. Results are kept
in FOLDER/results.json, so that a second call goes on where the first one stopped.
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
from typing import Any

import torch

from programs_of_others import PROGRAMS, Program, make_data

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 55  # that a program may take
TOLERANCE = 2e-3  # of numbers that programs print with a few digits
NUMBER = r"-?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
SAID = re.compile(
    rf"(?i)\b(loss\w*|ppl|perplexity|accuracy|acc@?\d*|mse|average loss|\w*return)\b[^-\d\n]{{0,12}}?({NUMBER})"
)
TO_DO = {
    "ModuleNotFoundError": "Install it.",
    "not done": "Give it less to do.",
    "IndexError: invalid index of a 0-dim tensor": "It is older than torch 0.5: write `.item()` there.",
    "NameError": "Nothing in it defines this name: mend the program.",
}  # by the beginning of an error
DRAWS = re.compile(r"(?<![\w.])(np\.|numpy\.)?random\.\w+\(")  # with the modules of Python or NumPy
SEEDS = re.compile(r"(?<![\w.])(np\.|numpy\.)?random\.seed\(")
BEGIN, END = "<!-- the table: benchmarks/public_programs.py -->", "<!-- the end of the table -->"

# Runs a program in plain Python, for a number of steps, and notes what draws random numbers from the first forward on.
PLAIN = """
import runpy, sys, torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
most, notes, file, steps, drawn, called = int(sys.argv[1]), sys.argv[2], sys.argv[3], {}, set(), set()
register_module_forward_pre_hook(lambda module, inputs: called.add(1))
class Draws(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if called and torch.Tag.nondeterministic_seeded in func.tags:
            drawn.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
def stepped(optimizer, *_):
    steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
    if steps[id(optimizer)] == most:
        raise SystemExit(0)
register_optimizer_step_post_hook(stepped)
sys.argv = sys.argv[3:]
sys.path[0] = file.rpartition("/")[0] or "."
try:
    with Draws():
        runpy.run_path(file, run_name="__main__")
finally:
    print(*sorted(drawn - {"randperm", "random_"}), sep="\\n", file=open(notes, "w"))
"""


def main() -> None:
    """Runs what has no result yet, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="programs whose names have this word in them")
    parser.add_argument("--for", dest="seconds", type=float, default=math.inf, help="begin no program after these")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "public-programs.md")
    options = parser.parse_args()
    file, began = options.folder / "results.json", time.monotonic()
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for program in PROGRAMS:
        known = program.name in results and not options.again
        if known or options.only not in program.name or not (options.folder / program.clone).is_dir():
            continue
        if time.monotonic() - began > options.seconds:
            print("there is more: call it again")
            break
        results[program.name] = result_of(program, options.folder.resolve())
        file.write_text(json.dumps(results, indent=1))
        print(program.name, "|", " | ".join(row(program, results[program.name])[3:]), flush=True)
    if options.page.exists():
        write_table(options.page, results)


def result_of(program: Program, folder: Path) -> dict[str, Any]:
    """What came of a program: on simulated devices, and on the CPU."""
    make_data(program, folder / program.clone)
    there = folder / program.clone / program.folder
    with tempfile.TemporaryDirectory() as scratch:
        report, notes = Path(scratch) / "report.json", Path(scratch) / "notes"
        options = ["--json", str(report), "--as-cuda", "--devices", str(program.devices)]
        options += ["--ranks", str(program.ranks)] if program.ranks else []
        options += ["--stop-after", str(program.steps)] if program.steps else []
        command = ["-m", "torchstrategy.testing.run", *options, program.file, *program.arguments]
        status, out, errors = run(command, there, program, folder)
        found = json.loads(report.read_text()) if report.exists() else {}
        result = {"status": status, "numbers": numbers(out), "error": error_in(errors), **picked(found)}
        result["commit"] = commit(folder / program.clone)
        source = (there / program.file).read_text(errors="replace")
        result["has_no_seed"] = bool(DRAWS.search(source)) and not SEEDS.search(source)
        if program.on_cpu is not None and not status:
            plain = ["-c", PLAIN, str(program.steps or 0), str(notes), program.file, *program.on_cpu]
            status, out, errors = run(plain, there, program, folder)
            drawn = notes.read_text().split() if notes.exists() else []
            result["cpu"] = {"status": status, "numbers": numbers(out), "error": error_in(errors), "drawn": drawn}
    return result


def run(command: Sequence[str], there: Path, program: Program, folder: Path) -> tuple[int, str, str]:
    """The exit status and what was printed; a status of 124 if it took too long."""
    paths = [
        str(ROOT),
        *(str(folder / program.clone / path) for path in program.paths),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "WANDB_MODE": "disabled"}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=there,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"not done after {SECONDS} seconds"
    return done.returncode, done.stdout if numbers(done.stdout) else done.stderr, done.stderr


def numbers(out: str) -> list[float]:
    """The losses and the like that were printed, in order."""
    return [float(number) for _, number in SAID.findall(out)]


def error_in(errors: str) -> str:
    """The last line that names an error."""
    named = [line for line in errors.splitlines() if re.match(r"[\w.]+(Error|Exception|Stopped|Unavailable)\b", line)]
    return named[-1] if named else errors.strip().rpartition("\n")[2]


def picked(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a report."""
    steps = max(1, report.get("steps", 0))
    return {
        "steps": report.get("steps", 0),
        "waits": sum(one["times"] for one in report.get("synchronizations", [])) / steps,
        "blocking": sum(report.get("blocking_copies", {}).values()) / steps,
        "findings": [(one["name"], ", ".join(one["lines"])) for one in report.get("findings", [])],
        "races": len(report.get("races", [])),
        "notes": report.get("notes", []),
    }


def commit(clone: Path) -> str:
    """The commit of a clone, short."""
    done = subprocess.run(["git", "-C", str(clone), "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "?"


def row(program: Program, result: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    called = " ".join([f"--ranks {program.ranks}" if program.ranks else "", program.short]).strip()
    return [
        f"[{program.repository}](https://github.com/{program.repository}) {result['commit']}",
        f"`{program.folder}/{program.file}`".replace("`./", "`"),
        f"`{called}`" if called else "",
        ended(program, result),
        compared(program, result),
        what_was_found(result),
    ]


def ended(program: Program, result: Mapping[str, Any]) -> str:
    """How it ended; a failure with the reason that is known of it, or with its error."""
    if not result["status"]:
        steps = result["steps"]
        return f"well, {steps} step{'s' if steps > 1 else ''}" if steps else "well"
    error = result["error"].replace("|", "\\|")
    short = error if len(error) < 160 else error[:157] + "..."
    advice = next((words for name, words in TO_DO.items() if error.startswith(name)), program.why)
    return f"{short} {advice}".strip()


def compared(program: Program, result: Mapping[str, Any]) -> str:
    """Whether its numbers are those of the CPU."""
    cpu = result.get("cpu")
    if cpu is None:
        return "" if result["status"] else "not run there"
    if cpu["status"]:
        return f"not on the CPU: {cpu['error'][:80]}"
    pairs = list(zip(result["numbers"], cpu["numbers"], strict=False))
    if not pairs:
        return "prints none"
    same = sum(is_same(*pair) for pair in pairs)
    if same == len(pairs):
        return f"equal ({same})"
    if result["has_no_seed"]:
        return f"{same} of {len(pairs)}: it draws with Python or NumPy, and sets no seed there"
    why = f": `{'`, `'.join(cpu['drawn'])}` draw others on a GPU" if cpu["drawn"] else ""
    return f"{same} of {len(pairs)}{why}"


def is_same(one: float, other: float) -> bool:
    """Whether two numbers are equal but for rounding."""
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))


def what_was_found(result: Mapping[str, Any]) -> str:
    """Findings and races, or else how often it waits."""
    found = [f"`{name}` ({lines})" for name, lines in result["findings"]]
    found += [f"{result['races']} races"] if result["races"] else []
    found += (
        [f"{result['waits']:.1f} waits and {result['blocking']:.1f} blocking copies a step"] if result["steps"] else []
    )
    return "; ".join([*found, *result["notes"]])


def write_table(page: Path, results: Mapping[str, Any]) -> None:
    """Puts the table into the page."""
    head = ["repository", "program", "with", "ended", "numbers of the CPU", "found"]
    rows = [row(program, results[program.name]) for program in PROGRAMS if program.name in results]
    text = page.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    lines = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]]
    page.write_text("\n".join([before + BEGIN, "", summary(results), "", *lines, "", after]))


def summary(results: Mapping[str, Any]) -> str:
    """How many there are, and how many ended well."""
    mine = [results[program.name] for program in PROGRAMS if program.name in results]
    well = sum(not result["status"] for result in mine)
    both = [result for result in mine if "cpu" in result and not result["cpu"]["status"]]
    equal = sum(compared(PROGRAMS[0], result).startswith("equal") for result in both)
    version = torch.__version__.partition("+")[0]
    return (
        f"{len(mine)} programs with torch {version}: {well} ended well. {len(both)} of them "
        f"ran on the CPU, too, and the numbers of {equal} were equal."
    )


if __name__ == "__main__":
    main()
