"""What came of a sweep: counts, differences, and if `exceptions` says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, final

from sweep.agreement import Outcome, Verdict


@final
class Report:
    """The outcomes of all trials of one database."""

    def __init__(self, database: str, exceptions: Mapping[str, str]) -> None:
        self._database, self._exceptions = database, exceptions
        self._entries: dict[str, list[Outcome]] = {}

    def add(self, name: str, outcomes: Iterable[Outcome]) -> None:
        """Adds those of an entry."""
        self._entries[name] = list(outcomes)

    @property
    def surprises(self) -> dict[str, str]:
        """The entries that differ although no exception is listed, and how."""
        return {
            name: why
            for name, why in self._rest().items()
            if name not in self._exceptions
        }

    @property
    def stale(self) -> list[str]:
        """The entries that agree although an exception is listed."""
        return [
            name
            for name in self._entries
            if name in self._exceptions and name not in self._rest()
        ]

    def __str__(self) -> str:
        rest = self._rest()
        verdicts = Counter(
            outcome.verdict
            for outcomes in self._entries.values()
            for outcome in outcomes
        )
        trials = [f"{verdicts[verdict]} trials {verdict.value}" for verdict in Verdict]
        lines = [
            (
                f"{self._database}: {len(self._entries) - len(rest)} of "
                f"{len(self._entries)} entries agree with the CPU "
                f"({', '.join(trials)})"
            )
        ]
        lines += [
            f"  {name}: {self._exceptions.get(name, f'UNEXPECTED: {why}')}"
            for name, why in rest.items()
        ]
        lines += [
            f"  {name}: agrees, and is listed in exceptions" for name in self.stale
        ]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """All of it, for machines."""
        return {
            name: [
                {
                    "trial": o.trial,
                    "verdict": o.verdict.name,
                    "difference": o.difference,
                }
                for o in outcomes
            ]
            for name, outcomes in self._entries.items()
        }

    def _rest(self) -> dict[str, str]:
        found = {
            name: _disagreement(outcomes) for name, outcomes in self._entries.items()
        }
        return {name: why for name, why in found.items() if why}


def _disagreement(outcomes: list[Outcome]) -> str:
    """Why an entry does not count as agreeing; nothing if it does."""
    for outcome in outcomes:
        if outcome.verdict is Verdict.DIFFERENT:
            return f"{outcome.trial}: {outcome.difference}"
    agreed = {outcome.verdict for outcome in outcomes} & {Verdict.EQUAL, Verdict.CLOSE}
    return "" if agreed else "no trial that the CPU does not refuse"
