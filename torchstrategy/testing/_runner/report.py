"""What a program did, in words and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torchstrategy._base.errors import plural
from torchstrategy.testing._lints import Finding
from torchstrategy.testing._ranks.record import RankRecord
from torchstrategy.testing._runner.observer import Observations
from torchstrategy.testing._runner.prediction import Prediction
from torchstrategy.testing._simulation.words import in_words_of_cuda

_LINES_SHOWN = 5


@final
@dataclass
class Report:
    """What a program did.

    Attributes:
        program: Its name.
        status: What it exited with.
        seen: What was observed.
        peaks: The most bytes that each device held, in order.
        races: The races that were found, in words.
        collectives: What ranks have told each other; None if it had no ranks.
        device: What devices are called: `cuda` or `sim`.
        prediction: How long it would take on GPUs; None if nobody asked.
        notes: What was done in another way than the program says, a line for each.
        findings: What lints have found.
    """

    program: str
    status: int
    seen: Observations
    peaks: Sequence[int]
    races: Sequence[str]
    collectives: RankRecord | None
    device: str
    prediction: Prediction | None = None
    notes: Sequence[str] = ()
    findings: Sequence[Finding] = ()

    def as_json(self) -> dict[str, Any]:
        """The numbers of the report, for other programs."""
        seen = self.seen
        routes = sorted(seen.bytes_by_route)
        return {
            "program": self.program,
            "status": self.status,
            "devices": len(self.peaks),
            "steps": seen.steps,
            "notes": list(self.notes),
            "routes": [
                {
                    "from": self._named(source),
                    "to": self._named(target),
                    "copies": seen.copies_by_route[source, target],
                    "bytes": seen.bytes_by_route[source, target],
                }
                for source, target in routes
            ],
            "blocking_copies": dict(seen.blocking_copies.most_common()),
            "pageable_copies": dict((+seen.pageable_copies).most_common()),
            "synchronizations": [
                {"why": why, "line": line, "times": times}
                for (why, line), times in seen.synchronizations.most_common()
            ],
            "peak_bytes": {
                f"{self.device}:{index}": peak for index, peak in enumerate(self.peaks)
            },
            "races": list(self.races),
            "findings": [finding.as_json() for finding in self.findings],
            "collectives": None
            if self.collectives is None
            else _collectives(self.collectives),
            "ranks": None
            if self.collectives is None
            else self._ranks_as_json(self.collectives),
            "predicted": None
            if self.prediction is None
            else self.prediction.as_json(len(self.peaks)),
        }

    def __str__(self) -> str:
        seen = self.seen
        head = (
            f"{self.program}: {plural(seen.steps, 'step')} on "
            f"{plural(len(self.peaks), 'simulated device')}, exit status {self.status}"
        )
        return "\n".join(
            [
                head,
                *[f"Note: {note}" for note in self.notes],
                "Copies",
                *self._routes(),
                f"  {_places('block the program', seen.blocking_copies)}",
                f"  {_places('are from or to pageable memory', +seen.pageable_copies)}",
                *self._waits(),
                "Peak memory",
                *[
                    f"  {self.device}:{index}  {_bytes(peak)}"
                    for index, peak in enumerate(self.peaks)
                ],
                *self._told(),
                *([] if self.prediction is None else self.prediction.lines()),
                *([f"Findings: {len(self.findings)}"] if self.findings else []),
                *[f"  {finding}" for finding in self.findings],
                f"Races: {len(self.races) or 'none'}",
                *[f"  {race}" for race in self.races],
            ]
        )

    def _named(self, device: str) -> str:
        return device.replace("sim", self.device)

    def _routes(self) -> list[str]:
        return [
            f"  {self._named(source)} -> {self._named(target)}  {_bytes(size)} in "
            f"{plural(self.seen.copies_by_route[source, target], 'tensor')}"
            for (source, target), size in sorted(self.seen.bytes_by_route.items())
        ]

    def _waits(self) -> list[str]:
        waits = self.seen.synchronizations
        total = sum(waits.values())
        a_step = f", {total / self.seen.steps:.1f} a step" if self.seen.steps else ""
        rows = [
            f"  {times:5}  {why}  {line}"
            for (why, line), times in waits.most_common(_LINES_SHOWN)
        ]
        return [
            f"Waits of the program for a device: {total}{a_step}",
            *rows,
            *_more(len(waits)),
        ]

    def _told(self) -> list[str]:
        if self.collectives is None:
            return []
        rows = [
            f"  {kind}  {count}{f' with {_bytes(size)}' if size else ''}"
            for kind, (count, size) in _counted(self.collectives).items()
        ]
        return [*self._stopped(self.collectives), "Collectives of all ranks", *rows]

    def _stopped(self, record: RankRecord) -> list[str]:
        """In which order ranks went on, and where they were when they got stuck."""
        order = [f"Order of the ranks: {record.order}"] if record.order else []
        rows = [
            f"  rank {rank} failed: {_first_line(error)}"
            for rank, error in record.failed.items()
        ]
        rows = [in_words_of_cuda(row) for row in rows]
        rows += [
            f"  rank {rank} {where}" for rank, where in sorted(record.waiting.items())
        ]
        return [*order, *(["Ranks that could not go on", *rows] if rows else [])]

    def _ranks_as_json(self, record: RankRecord) -> dict[str, Any]:
        return {
            "order": record.order or None,
            "failed": [
                {"rank": rank, "error": error} for rank, error in record.failed.items()
            ],
            "waiting": [
                {"rank": rank, "where": where}
                for rank, where in sorted(record.waiting.items())
            ],
        }


def _counted(record: RankRecord) -> Mapping[str, tuple[int, int]]:
    sizes = record.bytes
    return {kind: (count, sizes[kind]) for kind, count in record.counts.items()}


def _collectives(record: RankRecord) -> dict[str, dict[str, int]]:
    return {
        kind: {"calls": count, "bytes": size}
        for kind, (count, size) in _counted(record).items()
    }


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _places(what: str, lines: Counter[str]) -> str:
    places = ", ".join(
        f"{line} ({times})" for line, times in lines.most_common(_LINES_SHOWN)
    )
    more = _more(len(lines))
    return (
        f"{sum(lines.values())} "
        f"{what}{f': {places}' if places else ''}{f',{more[0]}' if more else ''}"
    )


def _more(count: int) -> list[str]:
    return [f"  and {count - _LINES_SHOWN} more lines"] if count > _LINES_SHOWN else []


def _bytes(count: int) -> str:
    if count < 10_000:
        return plural(count, "byte")
    return f"{count / 2**20:,.2f} MiB"
