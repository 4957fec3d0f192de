"""What each rank knows of what the others have done.

A rank knows it from the collectives, messages and notes that it got.
"""

from __future__ import annotations

from typing import NamedTuple, final


class Moment(NamedTuple):
    """A moment in the program of one rank."""

    rank: int
    time: int


@final
class Happened:
    """For each rank, until when it knows of every other one: a vector clock.

    A rank that waits for a collective knows what the others did before they called it.
    What two ranks do without knowing of each other may happen in either order, whatever
    the order was in this run.
    """

    def __init__(self, size: int) -> None:
        self._clocks = [[0] * size for _ in range(size)]
        # What is known to a rank that reads the store of `torch.distributed`.
        self._notes = [0] * size

    def now(self, rank: int) -> Moment:
        """This moment in the program of a rank."""
        self._clocks[rank][rank] += 1
        return Moment(rank, self._clocks[rank][rank])

    def clock(self, rank: int) -> tuple[int, ...]:
        """What a rank knows now, and tells those who hear of it."""
        return tuple(self._clocks[rank])

    def hears(self, rank: int, clock: tuple[int, ...] | list[int]) -> None:
        """A rank hears what another one knew."""
        self._clocks[rank] = list(map(max, self._clocks[rank], clock))

    def knows(self, rank: int, moment: Moment) -> bool:
        """Whether a moment is over, as far as a rank knows."""
        return self._clocks[rank][moment.rank] >= moment.time

    def sees(self, rank: int, moment: Moment) -> None:
        """A rank sees what another one has done at a moment, and so knows of it."""
        self._clocks[rank][moment.rank] = max(
            self._clocks[rank][moment.rank], moment.time
        )

    def writes_note(self, rank: int) -> None:
        """A rank leaves a note in the store."""
        self._notes = list(map(max, self._notes, self._clocks[rank]))

    def reads_note(self, rank: int) -> None:
        """A rank reads one.

        Of whom it is does not matter: the store has no order that a program could miss.
        """
        self.hears(rank, self._notes)
