"""How long a program would take on GPUs, by virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from torchstrategy.testing._virtual_time import VirtualTrace
from torchstrategy.testing._virtual_time.report import HEAD
from torchstrategy.testing._virtual_time.step_times import (
    Steps,
    StepTime,
    mfu,
    steps_of,
)

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

    def save(self, folder: Path) -> None:
        """Writes the timeline as a picture and for Perfetto."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            self._trace.save(folder / name)

    def lines(self) -> list[str]:
        """What the report says."""
        said = self._named(self._trace.report().removeprefix(HEAD)).splitlines()
        head, *rest = filter(None, said)
        return [f"Predicted by a model, +-30 %: {head}", *rest]

    def as_json(self, devices: int) -> dict[str, Any]:
        """The numbers of the report; times are in seconds."""
        trace = self._trace
        timeline = trace._timeline()
        steps = steps_of(timeline)
        return {
            "profile": trace.profile.name,
            "seconds": trace.seconds,
            "set_up": None if steps is None else steps.set_up,
            "steps": [] if steps is None else [step.seconds for step in steps.times],
            "typical_step": None if steps is None else self._step(steps.typical()),
            "each_step": []
            if steps is None
            else [self._step(step) for step in steps.times],
            "without_set_up": None
            if steps is None
            else self._without_set_up(steps, devices),
            "devices": {
                f"{self._device}:{index}": trace.device(index)._asdict()
                for index in range(devices)
            },
            "copies_while_computing": trace.overlap("copy", "compute"),
            "collectives_while_computing": trace.overlap("collective", "compute"),
            "waits": [
                {
                    "why": self._named(wait.why),
                    "line": wait.where,
                    "times": wait.times,
                    "seconds": wait.seconds,
                    "while_idle": wait.idle,
                }
                for wait in timeline.waits()
            ],
            "advice": [
                {"write": one.write, "before": one.before, "after": one.after}
                for one in trace._advice()
            ],
        }

    def _step(self, step: StepTime) -> dict[str, Any]:
        return {
            "seconds": step.seconds,
            "devices": {
                f"{self._device}:{index}": device._asdict()
                for index, device in step.devices.items()
            },
            "waits_while_idle": step.waits_while_idle,
            "waits_while_busy": step.waits_while_busy,
        }

    def _without_set_up(self, steps: Steps, devices: int) -> dict[str, Any]:
        part = steps.all
        return {
            "seconds": part.seconds,
            "mfu": {
                f"{self._device}:{index}": mfu(part, index) for index in range(devices)
            },
            "busy": {
                f"{self._device}:{index}": part.device(index).busy
                for index in range(devices)
            },
            "copies_while_computing": part.overlap("copy", "compute"),
            "collectives_while_computing": part.overlap("collective", "compute"),
        }

    def _named(self, words: str) -> str:
        return words.replace("sim:", f"{self._device}:")
