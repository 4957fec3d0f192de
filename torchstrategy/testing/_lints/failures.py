"""Lints that end with an error of their own, which no program has to end with."""

from __future__ import annotations

import traceback
from pathlib import Path

from torchstrategy.testing._lints.evidence.places import here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint


def of_failed(lint: type[Lint] | None, error: Exception) -> Finding | None:
    """Says which lint has failed, with what; None: what all lints share."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(frame.filename).name}:{frame.lineno}"
    which = "what all lints share" if lint is None else f"the lint `{lint.__name__}`"
    place = here()
    return finding(
        "lint-failed",
        f"At {place}, {which} has ended with {type(error).__name__}: {error} ({at}). "
        "Your program went on without it, so the report lacks what it would have "
        "found.",
        "This is a mistake of torchstrategy, and not of your program: please report it "
        "with these lines.",
        [place],
    )
