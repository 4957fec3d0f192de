"""What a test allows a program to take.

It limits the time, how often the program waits, and how much memory it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from torchstrategy._base.errors import plural
from torchstrategy.testing._virtual_time.report import in_words
from torchstrategy.testing._virtual_time.trace import VirtualTrace


@final
@dataclass(frozen=True)
class Limits:
    """Limits of a program, from its first mark on, or of all of it where there is none.

    Args:
        max_seconds: How long it may take.
        max_syncs: How often it may wait for a device.
        min_overlap: The part of the copying during which the same device has to
            compute.
        max_bytes: How many bytes the tensors on each device may hold.
    """

    max_seconds: float | None = None
    max_syncs: int | None = None
    min_overlap: float | None = None
    max_bytes: int | None = None

    def broken(self, trace: VirtualTrace) -> str:
        """The limits that the program went beyond, with their figures, and the report.

        It is empty if the program kept within all limits.
        """
        trace = trace._from_first_mark()
        found = list(self._broken(trace))
        return "\n".join([*found, trace.report()]) if found else ""

    def _broken(self, trace: VirtualTrace) -> Iterator[str]:
        if self.max_seconds is not None and trace.seconds > self.max_seconds:
            yield (
                f"It takes {in_words(trace.seconds)}, and may take "
                f"{in_words(self.max_seconds)} (max_seconds)."
            )
        waits = trace.synchronizations
        if self.max_syncs is not None and len(waits) > self.max_syncs:
            yield (
                f"The program waits for a device {plural(len(waits), 'time')}, and may "
                f"wait {plural(self.max_syncs, 'time')} (max_syncs):"
            )
            for place, count in _counted(
                [f"{wait.where}: {wait.why}" for wait in waits]
            ):
                yield f"  {plural(count, 'time')} at {place}"
        if self.min_overlap is not None and trace.overlap() < self.min_overlap:
            yield (
                f"{trace.overlap():.0%} of the copying is done while the device "
                f"computes, and {self.min_overlap:.0%} has to be (min_overlap)."
            )
        for device in trace._timeline().devices:
            peak = trace.device(device).peak_bytes
            if self.max_bytes is not None and peak > self.max_bytes:
                yield (
                    f"The tensors on sim:{device} hold {peak:,} bytes, and may hold "
                    f"{self.max_bytes:,} (max_bytes)."
                )


def _counted(places: list[str]) -> Iterator[tuple[str, int]]:
    for place in dict.fromkeys(places):
        yield place, places.count(place)
