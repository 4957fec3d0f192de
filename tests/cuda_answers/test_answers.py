"""What simulated devices answer under `--as-cuda`, beside what a real H100 answered.

`h100.json` was recorded on 2026-11-27, with torch 2.11 and CUDA 13. `different.txt`
names the questions whose answers differ, and why. Any other question that is answered
otherwise fails here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conditions import for_releases, without_simulated_devices

FOLDER = Path(__file__).parent
RECORD: dict[str, str] = json.loads((FOLDER / "h100.json").read_text(encoding="utf-8"))
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)(?![\w.])")


def known() -> set[str]:
    """The questions whose answers differ."""
    lines = (FOLDER / "different.txt").read_text(encoding="utf-8").splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert len(names) == len(set(names))
    return set(names)


def are_alike(real: str, simulated: str) -> bool:
    """Whether two answers are one text; floating-point ones may differ by a percent.

    These are numbers with a point.
    """
    if NUMBER.sub("#", real) != NUMBER.sub("#", simulated):
        return False
    pairs = zip(NUMBER.findall(real), NUMBER.findall(simulated), strict=True)
    return all(
        abs(float(one) - float(other)) <= 1e-5 + 1e-2 * abs(float(one))
        for one, other in pairs
    )


def test_the_names_are_those_of_questions() -> None:
    assert known() <= RECORD.keys()


@for_releases
@without_simulated_devices
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="messages differ between versions of torch",
)
def test_simulated_devices_answer_as_an_h100_does(tmp_path: Path) -> None:
    out = tmp_path / "answers.json"
    asking = [str(FOLDER / "questions.py"), str(out)]
    command = [
        sys.executable,
        "-m",
        "torchstrategy.testing.run",
        "--as-cuda",
        "--devices",
        "1",
        *asking,
    ]
    # Some messages print sets, whose order is that of the hashes.
    fixed = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=fixed
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "lint-failed" not in done.stdout
    answers = json.loads(out.read_text())
    assert answers.keys() == RECORD.keys()
    different = {
        name for name, real in RECORD.items() if not are_alike(real, answers[name])
    }
    new = "\n".join(
        f"{name}\n  H100      {RECORD[name]}\n  simulated {answers[name]}"
        for name in different - known()
    )
    assert not new, f"These answers are different from those of an H100:\n{new}"
