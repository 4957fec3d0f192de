"""How many mistakes the tests noticed, by room and by depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from depths import Depth

from .kinds import Mistake
from .trials import Outcome


class Answer(NamedTuple):
    """What became of a mistake."""

    mistake: Mistake
    depth: Depth | None  # the first at which a test noticed it; None: no test did
    outcome: Outcome
    tests_that_reach: int


def make_table(answers: Iterable[Answer]) -> str:
    """A line for each room, and one for the package, in Markdown."""
    of_room: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        of_room[room_of(answer.mistake.path)].append(answer)
    rows = [["room", "mistakes", *(f"found by {depth.name}" for depth in Depth)]]
    rows.append(["---"] * len(rows[0]))
    for room in sorted(of_room):
        rows.append([room, *_counts(of_room[room])])
    everything = [answer for some in of_room.values() for answer in some]
    rows.append(["all", *_counts(everything)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def room_of(path: str) -> str:
    """The room of a file: the kit's rooms are those of `testing`."""
    parts = path.split("/")
    count = 2 if parts[0] == "testing" and len(parts) > 2 else 1
    return "/".join(parts[:count])


def list_unnoticed(answers: Iterable[Answer]) -> str:
    """The mistakes that no test noticed, for somebody who writes one."""
    lines = []
    for answer in answers:
        if answer.depth is None:
            mistake = answer.mistake
            run = f"{answer.outcome.tests_run} of {answer.tests_that_reach} tests run"
            where = f"{mistake.path}:{mistake.line} {mistake.function}"
            lines.append(f"{where}: {answer.outcome.how}, {run}")
            lines.append(f"    {mistake.kind}: {mistake.before} -> {mistake.after}")
    return "\n".join(lines)


def _counts(answers: list[Answer]) -> list[str]:
    counts = [str(len(answers))]
    for depth in Depth:
        found = [one for one in answers if one.depth is not None and one.depth <= depth]
        counts.append(str(len(found)))
    return counts
