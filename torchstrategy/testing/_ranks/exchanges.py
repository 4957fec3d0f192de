"""What ranks bring to a collective, and what they get from it.

If the ranks do not fit together, it says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from torchstrategy._base.errors import described
from torchstrategy.testing._ranks.happened import Happened, Moment
from torchstrategy.testing._ranks.lines import is_called_by_torch
from torchstrategy.testing._ranks.moments import Moments, device_of, met
from torchstrategy.testing._ranks.names import names_of
from torchstrategy.testing._ranks.record import Collective
from torchstrategy.testing._ranks.swaps import Said, is_compared
from torchstrategy.testing._ranks.tensors import (
    bring,
    bytes_of,
    in_words,
    is_spoiled,
    overlap,
    spoil,
    taken,
)
from torchstrategy.testing._ranks.turns import Wait
from torchstrategy.testing._simulation.listeners import Listener
from torchstrategy.testing._simulation.program import unwatched
from torchstrategy.testing._simulation.torch_internals import without_dispatch_modes

Values = list[torch.Tensor]
Settle = Callable[[list[Values]], list[Values]]


@contextmanager
def _not_the_programs() -> Iterator[None]:
    """A block whose operators are not the program's.

    The program's `TorchDispatchMode` does not see them, nor does a listener.
    """
    with torch.no_grad(), unwatched(), without_dispatch_modes():
        yield


@final
class Call:
    """A collective as one rank has called it.

    Args:
        kind: Which collective.
        shown: The tensors whose sizes messages show.
        gives: The tensors whose numbers others get. They are read now.
        gets: The tensors that are written, when the rank waits.
        settle: Makes, of what the ranks give, what each gets.
        detail: The reduction or the root.
        size: The bytes of the whole, as `Collective.bytes` counts them.
        same_sizes: Whether all ranks have to show tensors of one size.
        group: Whose collective it is: those of one group are done in order.
    """

    def __init__(
        self,
        kind: str,
        shown: Sequence[torch.Tensor],
        gives: Sequence[torch.Tensor],
        gets: Sequence[torch.Tensor],
        settle: Settle,
        *,
        detail: str = "",
        size: int | None = None,
        same_sizes: bool = True,
        group: Hashable = None,
    ) -> None:
        self.kind, self.detail, self.settle, self.group = kind, detail, settle, group
        self.sizes = in_words(shown)
        self.names = (
            names_of(shown[0])
            if shown and is_compared(kind) and not is_called_by_torch()
            else None
        )
        self.size = sum(map(bytes_of, shown)) if size is None else size
        self.device = device_of(shown)  # not the tensors: what is given is not kept
        self.gets = list(gets)
        with _not_the_programs():
            self.given = [taken(tensor) for tensor in gives]
            for tensor in self.gets:
                spoil(tensor)
        # What has to be the same on all ranks, by the word for it.
        self.terms: dict[str, object] = {"collective": kind}
        if kind not in ("send", "recv"):
            self.terms["root or operation"] = detail
        if same_sizes:
            self.terms["sizes"] = tuple(tensor.shape for tensor in shown)
        self.terms["dtypes"] = tuple(tensor.dtype for tensor in shown)

    def __str__(self) -> str:
        words = f"{self.kind} of {self.sizes}" if self.sizes else self.kind
        return f"{words}, {self.detail}" if self.detail else words


@final
class Exchange:
    """The calls of all ranks that belong together.

    Args:
        ranks: Who has to come, as ranks of the whole run. The sender of a message is as
            `place_of_sender` says.
        name: How messages name it after its kind: `#3`, or `#3 in group 1 (ranks 0,
            2)`.
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self.ranks, self.name = tuple(ranks), name
        self.calls: dict[int, Call] = {}
        self.lines: dict[int, str] = {}
        self.moments: dict[int, Moments] = {}
        # When the exchange is over, as each listener notes it.
        self.ends: dict[Listener, Any] = {}
        self.results: dict[int, Values] | None = None
        # What each rank knew when it called.
        self.clocks: dict[int, tuple[int, ...]] = {}
        self.heard: dict[int, Moment] = {}  # when each rank has waited for it

    def join(self, rank: int, call: Call, line: str) -> None:
        """Adds the call of one rank. With the last of them, what each gets is computed.

        Raises:
            UnlikeCalls: If it does not fit to a call of another rank.
        """
        for other, theirs in self.calls.items():
            _compare(self, (other, theirs, self.lines[other]), (rank, call, line))
        self.calls[rank], self.lines[rank] = call, line
        self.moments[rank] = Moments(call.kind, call.device, line)
        if len(self.calls) == len(self.ranks):
            self._settle()

    def collective(self) -> Collective:
        """What the record keeps of it."""
        first = self.calls[self.ranks[0]]
        lines = tuple(self.lines[rank] for rank in self.ranks)
        return Collective(
            first.kind,
            tuple(map(rank_at, self.ranks)),
            first.detail,
            first.sizes,
            first.size,
            lines,
        )

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank_at(rank) for rank in self.ranks if rank not in self.calls]

    def at(self, rank: int) -> str:
        """What a rank called, and where.

        For example: `all_reduce #3 of 4 float32, sum (train.py:31)`.
        """
        return _at(self, self.calls[rank], self.lines[rank])

    def said(self) -> list[Said]:
        """What each rank has called, if it is to be compared with the others' calls."""
        calls = [(rank, self.calls[rank]) for rank in self.ranks]
        return [
            Said(rank, call.names, self.lines[rank], self.at(rank))
            for rank, call in calls
            if call.names is not None
        ]

    def _settle(self) -> None:
        calls = [self.calls[rank] for rank in self.ranks]
        try:
            with _not_the_programs():
                results = calls[0].settle([call.given for call in calls])
        except (RuntimeError, TypeError) as error:  # torch's own: no rank gets anything
            raise UnlikeCalls(
                f"{self.at(self.ranks[0])} cannot be computed: "
                f"{described(error)}\n{self._all_calls()}"
            ) from error
        for rank, call, values in zip(self.ranks, calls, results, strict=True):
            for tensor, value in zip(call.gets, values, strict=bool(call.gets)):
                if tensor.numel() != value.numel() or tensor.dtype != value.dtype:
                    raise UnlikeCalls(
                        f"Rank {rank_at(rank)} has room for {in_words([tensor])} in "
                        f"{self.at(rank)}, and {in_words([value])} are sent to "
                        f"it:\n{self._all_calls()}"
                    )
            call.given = []
        self.results = dict(zip(self.ranks, results, strict=True))
        self.ends = met(
            calls[0].kind, calls[0].size, [self.moments[rank] for rank in self.ranks]
        )

    def _all_calls(self) -> str:
        return "\n".join(
            f"  rank {rank_at(rank)}: {self.at(rank)}" for rank in self.ranks
        )


def place_of_sender(rank: int, target: int) -> int:
    """What an exchange calls the sender of a message: the rank, or `~rank`.

    It is `~rank` if the rank sends to itself, since the rank is there twice then.

    The receiver is `rank` then.
    """
    return ~rank if rank == target else rank


def rank_at(place: int) -> int:
    """The rank that an exchange calls so."""
    return max(place, ~place)


class UnlikeCalls(Exception):
    """Ranks have called what does not fit together. The message names them."""


def _compare(
    exchange: Exchange, theirs: tuple[int, Call, str], ours: tuple[int, Call, str]
) -> None:
    (other, their_call, their_line), (rank, call, line) = theirs, ours
    differing = [
        term for term in call.terms if call.terms[term] != their_call.terms.get(term)
    ]
    if {call.kind, their_call.kind} == {"send", "recv"}:
        differing = [term for term in differing if term != "collective"]
    if not differing:
        return
    term = differing[0]
    raise UnlikeCalls(
        f"Ranks {rank_at(other)} and {rank_at(rank)} have called what does not fit "
        f"together; their {term} differ{'' if term.endswith('s') else 's'}:\n"
        f"  rank {rank_at(other)}: {_at(exchange, their_call, their_line)}\n"
        f"  rank {rank_at(rank)}: {_at(exchange, call, line)}\n{_ADVICE[term]}"
    )


_ADVICE = {
    "collective": (
        "All ranks of a group have to call the same collectives in the same order."
    ),
    "root or operation": "Give all ranks of the group the same `src`, `dst` or `op`.",
    "sizes": (
        "Give all ranks tensors of the same sizes: pad them, or exchange the sizes "
        "first."
    ),
    "dtypes": "Give all ranks tensors of the same dtype.",
}


def _at(exchange: Exchange, call: Call, line: str) -> str:
    kind, of, rest = str(call).partition(" of ")
    return (
        f"{kind} {exchange.name}{of}{rest} ({line})"
        if exchange.name
        else f"{call} ({line})"
    )


@final
class Part(Wait):
    """The part of one rank in an exchange: what it waits for.

    Args:
        exchange: What it takes part in.
        place: What the exchange calls the rank.
    """

    def __init__(self, exchange: Exchange, place: int) -> None:
        self._exchange, self._place, self._rank = exchange, place, rank_at(place)
        self._gets = exchange.calls[place].gets
        self._group = exchange.calls[place].group
        # torch knows what it does: `Join` never waits for some of its collectives.
        self.is_the_programs = not is_called_by_torch()
        self.has_to_be_waited_for = (
            bool(exchange.calls[place].gets) and self.is_the_programs
        )
        self.is_delivered = False
        self._is_received = False
        # How often the rank has asked for it, and nobody else could go on.
        self.idle_questions = 0

    def is_over(self) -> bool:
        return self._exchange.results is not None

    def describe(self) -> str:
        missing = self._exchange.missing()
        # All have come, and one of them with something that does not fit.
        if not missing:
            return f"waits in {self}"
        for_whom = " and ".join(
            [", ".join(map(str, missing[:-1])), str(missing[-1])]
        ).removeprefix(" and ")
        return (
            f"waits in {self} for {'rank' if len(missing) == 1 else 'ranks'} {for_whom}"
        )

    def receive(self) -> None:
        """Says to those who listen that the rank waits for what it gets, once."""
        if not self._is_received:
            self._is_received = True
            self._exchange.moments[self._place].received(self._exchange.ends)

    def deliver(self) -> list[torch.Tensor]:
        """Writes what the rank gets on its tensors, once, and returns them.

        Raises:
            RuntimeError: If the program has written on them since it called the
                collective.
        """
        if not self.is_delivered and self._exchange.results is not None:
            self.is_delivered = True
            self._check_untouched()
            # Another rank may keep the exchange, and not these tensors.
            self._exchange.calls[self._place].gets = []
            with _not_the_programs():
                for tensor, value in zip(
                    self._gets, self._exchange.results.pop(self._place), strict=False
                ):
                    bring(value, tensor)
        return self._gets

    def hear(self, happened: Happened) -> None:
        """The rank has waited: now it knows what the others did before they called."""
        if self._place not in self._exchange.heard:
            for clock in self._exchange.clocks.values():
                happened.hears(self._rank, clock)
            self._exchange.heard[self._place] = happened.now(self._rank)

    def is_known_to_be_read(self, happened: Happened) -> bool:
        """Whether the rank knows from later events that others have all it gave."""
        heard = self._exchange.heard
        others = [rank for rank in self._exchange.ranks if rank != self._place]
        return all(
            rank in heard and happened.knows(self._rank, heard[rank]) for rank in others
        )

    @property
    def queue(self) -> Hashable:
        """An object that is the same for what is done one after the other.

        The collectives of a group come one after the other, and so do the messages of a
        pair.
        """
        group = self._exchange.calls[self._place].group
        return group, None if self.message is None else frozenset(self._exchange.ranks)

    @property
    def message(self) -> object | None:
        """An object that is the same for the sender and the receiver of a message.

        For a collective, it is None.
        """
        return (
            self._exchange
            if self._exchange.calls[self._place].kind in ("send", "recv")
            else None
        )

    def writes_on(self, group: Hashable, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this collective of a group has still to write on some tensors."""
        return (
            not self.is_delivered
            and group == self._group
            and overlap(self._gets, tensors)
        )

    def _check_untouched(self) -> None:
        if not self.has_to_be_waited_for:
            return
        with _not_the_programs():
            is_untouched = all(is_spoiled(tensor) for tensor in self._gets)
        if not is_untouched:
            raise RuntimeError(
                f"rank {self._rank} has written on a tensor of {self} before it waited "
                "for it. The collective writes there, too: on a cluster one of the two "
                "is lost, or they are mixed. Call `wait()` on what the asynchronous "
                "collective returned first, or write on a clone."
            )

    def sender(self) -> int:
        """The rank that sent a message."""
        return rank_at(self._exchange.ranks[0])

    def __str__(self) -> str:
        return self._exchange.at(self._place)
