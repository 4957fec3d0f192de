"""What the ranks of a run have told each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True)
class Collective:
    """One collective of a run of `run_ranks`, or one message from a rank to another.

    Example:
        >>> def main(rank):
        ...     torch.distributed.init_process_group("gloo")
        ...     torch.distributed.all_reduce(torch.ones(3))
        >>> _, record = torchstrategy.testing.run_ranks(main, 2)
        >>> (collective,) = record.collectives
        >>> (
        ...     collective.kind,
        ...     collective.ranks,
        ...     collective.detail,
        ...     collective.sizes,
        ...     collective.bytes,
        ... )
        ('all_reduce', (0, 1), 'sum', '3 float32', 12)
    """

    kind: str
    """What it is: one of torch's collectives, or a message.

    It is `all_reduce`, `broadcast`, `all_gather`, `reduce_scatter`, `reduce`, `gather`,
    `scatter`, `all_to_all`, `barrier`, `monitored_barrier` or `send`. The variants that
    torch has of one kind count as this kind.
    """
    ranks: tuple[int, ...]
    """The ranks that took part; of a `send`, the sender and the receiver."""
    detail: str
    """The operation (`sum`), the root (`from rank 0`), the tag; empty without these."""
    sizes: str
    """The tensors that a rank gave, as messages show them: `3x4 float32, 7 int64`."""
    bytes: int
    """The bytes of the whole.

    They are those of the reduced, broadcast or sent tensors; of what is gathered from
    all ranks; of what one rank gives to be scattered or to go to all.
    """
    lines: tuple[str, ...]
    """Where each rank called it, such as `train.py:31`, in the order of `ranks`."""

    def __str__(self) -> str:
        words = [
            f"{self.kind} of {self.sizes}" if self.sizes else self.kind,
            *filter(None, [self.detail]),
        ]
        return (
            f"{', '.join(words)}, ranks {', '.join(map(str, self.ranks))} "
            f"({', '.join(dict.fromkeys(self.lines))})"
        )


@final
@dataclass
class RankRecord:
    """What the ranks of `run_ranks` told each other, in the order of completion.

    Records of two runs are equal if all collectives are: programs that do the same
    twice have equal records.

    Example:
        >>> def main(rank):
        ...     torch.distributed.init_process_group("gloo")
        ...     torch.distributed.all_reduce(torch.ones(3))
        ...     torch.distributed.barrier()
        >>> _, record = torchstrategy.testing.run_ranks(main, 2)
        >>> print(record)
        all_reduce: 1 with 12 bytes
        barrier: 1
        >>> record.counts["all_reduce"], record.bytes["all_reduce"]
        (1, 12)
    """

    collectives: list[Collective] = field(default_factory=list)
    """Every collective that all its ranks came to, and every received message."""
    order: str = field(default="", compare=False)
    """The order in which ranks went on, as `run_ranks` takes it again: `random:7`.

    It is empty for that of the ranks.
    """
    failed: dict[int, str] = field(default_factory=dict, compare=False)
    """What ranks raised of their own, in that order: `{1: "ValueError: no rows"}`."""
    waiting: dict[int, str] = field(default_factory=dict, compare=False)
    """Where ranks waited for what could not come any more.

    For example: `{0: "waits in barrier #1 (train.py:31) for rank 1"}`.
    """

    @property
    def counts(self) -> Counter[str]:
        """How many there were of each kind."""
        return Counter(collective.kind for collective in self.collectives)

    @property
    def bytes(self) -> Counter[str]:
        """The bytes of each kind; see `Collective.bytes`."""
        total: Counter[str] = Counter()
        for collective in self.collectives:
            total[collective.kind] += collective.bytes
        return total

    def __str__(self) -> str:
        moved = self.bytes
        return "\n".join(
            f"{kind}: {count} with {moved[kind]:,} bytes"
            if moved[kind]
            else f"{kind}: {count}"
            for kind, count in self.counts.items()
        )
