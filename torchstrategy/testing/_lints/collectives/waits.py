"""Memory that a collective or message still uses, and the program uses, too.

The program has not waited before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, parameters_of
from torchstrategy.testing._lints.evidence.known import is_plain
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower
from torchstrategy.testing._ranks.tensors import in_words
from torchstrategy.testing._ranks.witnesses import UnderWay
from torchstrategy.testing._ranks.world import current_world
from torchstrategy.testing._simulation.memory import span
from torchstrategy.testing._simulation.torch_internals import Operator, schema

_OF_COLLECTIVES = ("c10d::", "_c10d_functional::")
# Operators that look into no memory, besides those that make a tensor or a view.
_WITHOUT_MEMORY = (
    "aten::is_pinned",
    "aten::is_same_size",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
)
_MOST_ELEMENTS = 1_000_000


class _Piece(NamedTuple):
    """Memory that is in use until the program waits."""

    # A backend keeps it; here other tensors may get the memory when it is gone.
    storage: weakref.ref[Any]
    start: int
    end: int
    is_written: bool
    part: Any
    place: Place
    words: str


@final
class Waits(Follower):
    """Keeps what is under way between a program's call and its wait.

    It sees operators only meanwhile.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, list[_Piece]] = {}  # by rank
        self._found: dict[tuple[Place, Place], str] = {}
        self._steps_early: dict[tuple[Place, Place], str] = {}

    @override
    def begins(self, facts: Facts, under_way: UnderWay) -> None:
        pieces, place = [], here()
        written = [_span(tensor) for tensor in under_way.writes]
        for tensor, is_written in [(t, True) for t in under_way.writes] + [
            (t, False) for t in under_way.reads
        ]:
            there = _span(tensor)
            if there is not None and (is_written or there not in written):
                storage = weakref.ref(tensor.untyped_storage())
                pieces.append(
                    _Piece(
                        storage,
                        *there,
                        is_written,
                        under_way.part,
                        place,
                        in_words([tensor]),
                    )
                )
        if pieces:
            self._pieces.setdefault(under_way.rank, []).extend(pieces)

    @override
    def awaited(self, facts: Facts, part: Any) -> None:
        pieces = self._pieces.get(facts.rank, [])
        parts = [piece.part for piece in pieces]
        if part not in parts:
            return
        last = len(parts) - parts[::-1].index(part)
        left = [
            piece
            for index, piece in enumerate(pieces)
            if piece.part is not part
            and not (index < last and piece.part.queue == part.queue)
        ]
        self._keep(facts.rank, left)

    @override
    def synchronized(self, facts: Facts) -> None:
        self._pieces.pop(facts.rank, None)

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        uses = _uses_of(func)
        if uses is None:
            return
        for tensor, is_write in uses(args, kwargs):
            there = _span(tensor)
            if there is None:
                continue
            for piece in self._pieces.get(facts.rank, ()):
                is_used = (
                    (is_write or piece.is_written)
                    and piece.start < there[1]
                    and there[0] < piece.end
                )
                if is_used and piece.storage() is not None:
                    self._uses(facts, func, tensor, is_write, piece)
                    return

    def _uses(
        self,
        facts: Facts,
        func: Any,
        tensor: torch.Tensor,
        is_write: bool,
        piece: _Piece,
    ) -> None:
        rank, world = facts.rank, current_world()
        if world is None or not _has_elements_in(tensor, piece.start, piece.end):
            return
        if not piece.is_written and piece.part.is_known_to_be_read(world.happened):
            self._keep(
                rank, [other for other in self._pieces[rank] if other is not piece]
            )
            return
        place, does = here(), "writes" if is_write else "reads"
        optimizer = facts.stepping
        if (
            piece.is_written
            and optimizer is not None
            and _is_gradient(tensor, optimizer)
        ):
            facts.was_awaited = False
            self._steps_early.setdefault(
                (place, piece.place),
                f"On rank {rank}, `{type(optimizer).__name__}.step()` ({place}) reads "
                f"a gradient before `wait()`, {in_words([tensor])}: {piece.part} has "
                "still to write it. Each rank steps with its own gradient.",
            )
            return
        still = "has still to write" if piece.is_written else "may still be reading"
        name = func.name().partition("::")[2].partition(".")[0]
        self._found.setdefault(
            (place, piece.place),
            f"Rank {rank} {does} {in_words([tensor])} ({name}, {place}), which "
            f"{piece.part} {still}: it has not waited for it.",
        )

    @override
    def findings(self) -> list[Finding | None]:
        of_steps = (
            "Call `wait()` on what each call for a gradient returned before "
            "`optimizer.step()`."
        )
        of_others = (
            "Call `wait()` on what that call returned before you use its tensor, or "
            "use another tensor meanwhile."
        )
        found = [(key, says, of_steps) for key, says in self._steps_early.items()]
        found += [(key, says, of_others) for key, says in self._found.items()]
        return [
            finding("used-before-wait", says, write, list(places))
            for places, says, write in found
        ]

    def _keep(self, rank: int, pieces: list[_Piece]) -> None:
        if pieces:
            self._pieces[rank] = pieces
        else:
            self._pieces.pop(rank, None)


def _is_gradient(tensor: torch.Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the numbers of a tensor are, or are among, a gradient of an optimizer."""
    there = _span(tensor)
    gradients = (_span(parameter.grad) for parameter in parameters_of(optimizer))
    return there is not None and any(
        its is not None and its[0] < there[1] and there[0] < its[1] for its in gradients
    )


def _span(tensor: Any) -> tuple[int, int] | None:
    return span(tensor) if is_plain(tensor) and tensor.numel() else None


def _has_elements_in(tensor: torch.Tensor, start: int, end: int) -> bool:
    """Whether an element of a tensor, which may have gaps, is in some memory."""
    first, last = span(tensor)
    size = tensor.element_size()
    if (last - first) == tensor.numel() * size:
        return True
    if tensor.numel() > _MOST_ELEMENTS:
        return False
    steps = [0]
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            steps = [step + index * stride for step in steps for index in range(count)]
    return any(
        first + step * size < end and start < first + (step + 1) * size
        for step in steps
    )


Uses = Callable[[Sequence[Any], dict[str, Any]], Iterator[tuple[torch.Tensor, bool]]]


@functools.cache
def _uses_of(op: Any) -> Uses | None:
    """A function that finds the tensors which an operator reads or writes.

    It is None of an operator that looks into no memory.
    """
    if not isinstance(op, Operator) or op.name().startswith(_OF_COLLECTIVES):
        return None
    declared = schema(op)
    name = op.name().partition(".")[0]
    views = any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in declared.returns
    )
    makes = name.endswith("_like") or name.startswith(("aten::new_", "aten::empty"))
    if views or makes or name in _WITHOUT_MEMORY:
        return None
    arguments = [
        (
            place,
            argument.name,
            argument.alias_info is not None and argument.alias_info.is_write,
        )
        for place, argument in enumerate(declared.arguments)
        if "Tensor" in str(argument.type)
    ]

    def find(
        args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterator[tuple[torch.Tensor, bool]]:
        for place, argument, is_write in arguments:
            value = args[place] if place < len(args) else kwargs.get(argument)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield tensor, is_write

    return find
