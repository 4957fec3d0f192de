"""What came of a program."""

from __future__ import annotations

import enum
import re
import traceback
import warnings
from dataclasses import dataclass

import torch

import torchstrategy

from . import refusals
from .comparison import differences, size_of
from .execution import Plain, executed, place_of
from .programs import Program


class Verdict(enum.Enum):
    """What may come of a program."""

    EQUAL = "equal"
    REFUSED = "refused"
    DIFFERENT = "different"
    FAILED = "failed otherwise"
    NO_PROGRAM = "no program"  # plain PyTorch does not run it


@dataclass(frozen=True)
class Outcome:
    """What came of one program: a verdict, its kind, and everything there is to say."""

    verdict: Verdict
    kind: str = ""
    said: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the library is to blame."""
        return self.verdict in (Verdict.DIFFERENT, Verdict.FAILED)


def judged(program: Program) -> Outcome:
    """Runs a program both ways."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", torchstrategy.ReplicaBufferWarning)
            outcome = _judged(program)
        # A buffer whose numbers depend on the rows, which the documentation says and
        # the run warns of.
        is_warned_of = outcome.verdict is Verdict.DIFFERENT and caught
        return (
            Outcome(Verdict.REFUSED, "a warning: ReplicaBufferWarning", outcome.said)
            if is_warned_of
            else outcome
        )
    finally:
        torch.set_default_dtype(before)


def _judged(program: Program) -> Outcome:
    try:
        plain = executed(program, Plain())
    except Exception as error:
        return Outcome(Verdict.NO_PROGRAM, _kind_of(error), _shown(error))
    try:
        ours = executed(program, place_of(program))
    except Exception as error:
        refusal = refusals.documented(str(error))
        return Outcome(
            Verdict.REFUSED if refusal else Verdict.FAILED,
            refusal or _kind_of(error),
            _shown(error),
        )
    found = differences(ours, plain)
    if not found:
        return Outcome(Verdict.EQUAL)
    if size_of(ours, plain) <= 1000 * size_of(
        executed(program, Plain(noise=1e-14)), plain
    ):
        return Outcome(
            Verdict.NO_PROGRAM, "its own numbers move as much when its batches do"
        )
    said = "\n".join(f"{path} {how}" for path, how in list(found.items())[:8])
    return Outcome(Verdict.DIFFERENT, _category(found), said)


def _category(found: dict[str, str]) -> str:
    """The kind of the first thing that differs, of those that say most."""
    names = [
        "(attribute)",
        "training",
        "requires_grad",
        "(buffer)",
        "optimizer",
        "scheduler",
        "scaler",
        ".grad",
    ]
    weights = [
        path
        for path in found
        if not any(name in path for name in names) and not path.startswith("result")
    ]
    if weights:
        return "parameters"
    for name in (
        "(buffer)",
        "optimizer",
        ".grad",
        "result",
        "scheduler",
        "scaler",
        "(attribute)",
    ):
        if any(name in path for path in found):
            return name
    return "modes"


def _kind_of(error: Exception) -> str:
    if "drifted apart" in str(error):
        return f"drifted apart: {'optimizer' if '.state[' in str(error) else 'model'}"
    words = re.sub(r"0x[0-9a-f]+|\d+|'[^']*'|\S*\.(weight|bias|\w+)\b", "_", str(error))
    return f"{type(error).__name__}: {' '.join(words.split()[:9])}"


def _shown(error: Exception) -> str:
    return "".join(traceback.format_exception(error)[-5:])
