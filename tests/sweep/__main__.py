"""The sweep as a command: `python tests/sweep --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch

# As it is in tests, which use the same modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sweep import exceptions, mixing, modules, operators, optimizers
from sweep.agreement import judge
from sweep.mixing import Answer
from sweep.reports import Report
from torchstrategy.testing import simulate_devices

DATABASES = {
    "operators": (operators, exceptions.OPERATORS),
    "modules": (modules, exceptions.MODULES),
    "optimizers": (optimizers, exceptions.OPTIMIZERS),
}


def main() -> int:
    """Runs it; 0 if everything is as `exceptions` says."""
    options = _options()
    torch.set_num_threads(1)  # so that sums are added up in one order
    simulate_devices(5)
    surprises, found = 0, {}
    for database in options.what:
        if database == "mixing":
            surprises += _mix(options)
            continue
        report = _swept(database, options)
        print(report, flush=True)
        surprises += len(report.surprises)
        found[database] = report.as_json()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(surprises > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/sweep", description=__doc__)
    choices = [*DATABASES, "mixing"]
    parser.add_argument(
        "what",
        nargs="*",
        default=choices,
        help=f"of {', '.join(choices)}; all unless given",
    )
    parser.add_argument(
        "--samples", type=int, default=3, help="how many samples of each operator"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        help="names of entries, with commas",
    )
    parser.add_argument("--dtype", default="float32", help="where an entry takes it")
    parser.add_argument("--json", type=Path, help="a file for every outcome")
    options = parser.parse_args()
    unknown = set(options.what) - set(choices)
    if unknown:
        parser.error(
            f"there is no {', '.join(sorted(unknown))}: choose of {', '.join(choices)}"
        )
    return options


def _swept(database: str, options: argparse.Namespace) -> Report:
    source, known = DATABASES[database]
    report = Report(database, known)
    for name in source.names():
        if options.only is None or name in options.only:
            trials = source.trials(name, options.samples, getattr(torch, options.dtype))
            report.add(name, [judge(trial, torch.device("sim:1")) for trial in trials])
    return report


def _mix(options: argparse.Namespace) -> int:
    """Prints what operators do with tensors of two devices.

    Returns how many do what is not listed.
    """
    unlisted = 0
    for elsewhere in (torch.device("sim:2"), torch.device("cpu")):
        answers: Counter[Answer] = Counter()
        taken: set[str] = set()
        for name in operators.names():
            if options.only is not None and name not in options.only:
                continue
            for mixture in mixing.mixtures(
                name, options.samples, torch.device("sim:1"), elsewhere
            ):
                answers[mixture.answer] += 1
                if mixture.answer is Answer.TAKEN:
                    taken.add(name)
                if mixture.answer is Answer.WRONG or (
                    mixture.answer is Answer.TAKEN and name not in exceptions.MIXED
                ):
                    print(
                        f"  {name}, {mixture.name}: UNEXPECTED: "
                        f"{mixture.answer.value}: {mixture.said}"
                    )
                    unlisted += 1
        counts = ", ".join(f"{answers[answer]} {answer.value}" for answer in Answer)
        print(f"one tensor on {elsewhere} and the rest on sim:1: {counts}")
        print(
            "".join(
                f"  taken by {name}: {exceptions.MIXED[name]}\n"
                for name in sorted(taken & {*exceptions.MIXED})
            )
        )
    return unlisted


if __name__ == "__main__":
    sys.exit(main())
