"""How long a program would take on GPUs, by virtual time."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any, final

from torchstrategy.testing._virtual_time import VirtualTrace
from torchstrategy.testing._virtual_time.report import HEAD, in_words

FILES = ("timeline.svg", "trace.json")


@final
class Prediction:
    """What virtual time says of a program, in words and as JSON.

    Args:
        trace: The trace of its run.
        device: What devices are called: `cuda` or `sim`.
    """

    def __init__(self, trace: VirtualTrace, device: str) -> None:
        self._trace, self._device = trace, device
        self._ends: list[float] = []  # of each step: when all is done that was asked for until then

    def stepped(self) -> None:
        """Notes that a step of the program has ended."""
        self._ends.append(self._trace._end_here())

    @property
    def steps(self) -> list[float]:
        """The seconds of each step after the first, which is not told apart from what comes before it."""
        return [end - start for start, end in pairwise(self._ends)]

    def save(self, folder: Path) -> None:
        """Writes the timeline as a picture and for Perfetto."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            self._trace.save(folder / name)

    def lines(self) -> list[str]:
        """What the report says."""
        said = self._named(self._trace.report().removeprefix(HEAD)).splitlines()
        step = [f"  a step takes {in_words(statistics.median(self.steps))}"] if self.steps else []
        head, *rest = filter(None, said)
        return [f"Predicted by a model, +-30 %: {head}", *step, *rest]

    def as_json(self, devices: int) -> dict[str, Any]:
        """The numbers of the report; times are in seconds."""
        trace = self._trace
        waits: dict[tuple[str, str], list[float]] = {}
        for wait in trace.synchronizations:
            waits.setdefault((self._named(wait.why), wait.where), []).append(wait.seconds)
        return {
            "profile": trace.profile.name,
            "seconds": trace.seconds,
            "steps": self.steps,
            "devices": {f"{self._device}:{index}": trace.device(index)._asdict() for index in range(devices)},
            "copies_while_computing": trace.overlap("copy", "compute"),
            "collectives_while_computing": trace.overlap("collective", "compute"),
            "waits": [
                {"why": why, "line": line, "times": len(seconds), "seconds": sum(seconds)}
                for (why, line), seconds in sorted(waits.items(), key=lambda wait: -sum(wait[1]))
            ],
        }

    def _named(self, words: str) -> str:
        return words.replace("sim:", f"{self._device}:")
