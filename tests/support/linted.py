"""What lints say of a program that a test runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchstrategy.testing import Finding, lint_training


def findings_of(program: Callable[[], object]) -> list[Finding]:
    with lint_training(check=False) as record:
        program()
    return record.findings


def names_of(program: Callable[[], object]) -> list[str]:
    return [finding.name for finding in findings_of(program)]


def findings_of_file(file: Path) -> list[Finding]:
    """The program is in a file of its own, so that its lines can have comments."""
    return findings_of(
        lambda: exec(
            compile(file.read_bytes(), str(file), "exec"), {"__name__": "program"}
        )
    )
