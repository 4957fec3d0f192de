"""How much each replica of a run counts, and which replicas take part.

The loss of a step is usually a mean over the rows that the step saw. The mean over all
rows of a batch is the sum of the replicas' means, each multiplied by the replica's
fraction of the rows. So this fraction is the weight by which a replica's gradient is
multiplied. If the loss is a mean over something else, such as tokens, the user says how
many of these each replica has: its fraction of them is the weight. Running statistics
are means over rows in any case. What multiplies by these numbers is listed in Note
[Where a gradient is weighed] in `weighing`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, final

from torchstrategy._base.distributed_values import (
    ABSENT,
    DistributedValues,
    PerReplica,
    regroup,
    regroup_in_worker,
)
from torchstrategy._base.options import ReduceOp, RunOptions
from torchstrategy._base.row_errors import examples_count_error, unequal_arguments_error
from torchstrategy._base.types import Tree
from torchstrategy._group.workers import LONE, Workers


# Note [Why a worker without rows runs the step]
# The last batch of an epoch may have fewer rows than there are replicas. In one
# process, a replica without rows sits the step out, and the others synchronize without
# it. A worker cannot: the others wait for it at every exchange, since NCCL and gloo
# know only groups in which all take part. How many exchanges there will be, only the
# step says: a gradient may be sent by itself, and a step may call `all_reduce` as often
# as it likes. A group without this worker would have to be made by all workers, for
# each such step, which takes longer than most steps.
# So its first replica runs the step all the same, as an *understudy*. It needs rows,
# since the mean of no rows is NaN, and many steps fail without any. They are those of
# another worker:
# - of a batch that all workers know, those of replica 0 of all (`Share.borrowed` in
#   `_data/steps`);
# - where each worker reads a dataset of its own, its own last batch or, if it had none,
#   one that another worker sends (`next_of_all_workers` in `_data/reading`).
# Nothing that it computes counts:
# - its gradients, and what it brings to a collective, are replaced by zeros, or by
#   nothing; they are not multiplied by 0, since 0 times NaN is NaN;
# - of buffers it takes what the others send; variables with a value in each replica,
#   and metrics, go on from before;
# - what its step returns only tells the shape and dtype of what the others have
#   (`PerReplica.understudy`).
# Where no worker has a row, and with `run_empty_replicas`, all replicas take part.
@final
@dataclass(frozen=True)
class Participants:
    """The replicas that take part in one run, and how much each counts.

    Args:
        present: The replicas of this worker that take part, in order.
        fractions: For every replica of this worker, its fraction of the rows: those of
            all workers add up to 1. If the batch does not say the rows, its share.
        reduction: How the gradients of the replicas become one.
        count: How many replicas of all workers take part.
        lead_worker: The first worker that has a replica which takes part.
        is_understudy: Whether no replica of this worker takes part. Then the first one
            runs the step all the same, and nothing that it computes counts: see Note
            [Why a worker without rows runs the step].
        total_weight: The sum of the weights of all replicas of all workers.
        has_news: Whether one of several workers has modules or variables that no run
            has had yet.
        shares: For every replica of this worker, how much of the mean gradient is its
            own: those of all workers add up to 1. None: its fraction of the rows.
        parts_of_all: The same for the replicas of all workers, in the order of the
            workers.
        rows_of_all: How many rows each of these has; None: nobody knows.
    """

    present: tuple[int, ...]
    fractions: tuple[float, ...]
    reduction: ReduceOp
    count: int = 1
    lead_worker: int = 0
    is_understudy: bool = False
    total_weight: float = 1.0
    has_news: bool = False
    shares: tuple[float, ...] | None = None
    parts_of_all: tuple[float, ...] = ()
    rows_of_all: tuple[float, ...] | None = None

    @property
    def parts(self) -> tuple[float, ...]:
        """How much of a mean over the batch is each replica's own."""
        return self.fractions if self.shares is None else self.shares

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """What the gradient of each replica of the strategy is multiplied by.

        The weight is 0 where the gradient is dropped.
        """
        if self.reduction is ReduceOp.MEAN:
            return self.parts
        return tuple(1.0 if part else 0.0 for part in self.parts)

    @cached_property
    def weighing(self) -> tuple[int, ...]:
        """The replicas whose gradients count.

        Such a replica got rows of the batch, and does not count 0.
        """
        return tuple(r for r in self.present if self.weights[r])

    def regroup(
        self, trees: Mapping[int, Tree], workers: Workers, are_results: bool = False
    ) -> Tree:
        """One tree of the trees of the replicas that take part.

        A replica that takes none is absent from it: a distributed value has a component
        for each of the strategy.
        """
        by_replica = [trees.get(r, ABSENT) for r in range(len(self.fractions))]
        if workers.count == 1:
            return regroup(by_replica, are_results=are_results)
        return regroup_in_worker(
            by_replica, is_understudy=self.is_understudy, are_results=are_results
        )

    @classmethod
    def of(
        cls,
        leaves: Sequence[Tree],
        num_replicas: int,
        options: RunOptions,
        default: ReduceOp,
        workers: Workers = LONE,
        has_news: bool = False,
        counts: Sequence[float] | None = None,
    ) -> Participants:
        """The weights for one run whose arguments have these leaves.

        Args:
            leaves: The leaves of the arguments.
            num_replicas: How many replicas this worker has.
            options: What the user has said about the run.
            default: How gradients become one, where the options do not say.
            workers: The processes that train together.
            has_news: Whether this worker has modules or variables that no run has had
                yet.
            counts: How much each replica of this worker counts, as a function of the
                user's has said. None: there is no such function, and the options are
                asked.

        Raises:
            ValueError: If the arguments were split with different row counts,
                `options.examples` does not fit, or no replica has all arguments.
        """
        reduction = reduction_of(options, default)
        given = (
            options.examples
            if counts is None and not callable(options.examples)
            else counts
        )
        rows = _rows(leaves, options, reduction, given)
        shares = _shares(rows, given, num_replicas)
        fractions = (
            rows
            if rows is not None and (counts is not None or given is None)
            else shares
        )
        absent = _absent(leaves)
        own = [
            _Told(
                share=float(shares[r]),
                rows=float(fractions[r]),
                is_absent=r in absent,
                has_rows=rows is None or rows[r] > 0,
            )
            for r in range(num_replicas)
        ]
        of_all = [_OfWorker(own, has_news, workers.is_asked_to_leave)]
        if workers.count > 1:
            # Options that all workers must give alike. `_of_rows` compares the same
            # ones where no message is sent.
            workers.compare("RunOptions", (reduction, options.run_empty_replicas))
            told = workers.all_gather_bytes(of_all[0].pack(), "the beginning of a run")
            of_all = list(map(_OfWorker.unpack, told))
        of_workers, have_news, are_asked = zip(*of_all, strict=True)
        workers.all_leave = any(are_asked)
        everyone = list(chain.from_iterable(of_workers))
        return cls._of_everyone(
            everyone,
            num_replicas,
            options.run_empty_replicas,
            reduction,
            workers.index,
            workers.count,
            has_news=any(have_news),
            knows_rows=rows is not None and fractions is rows,
        )

    @classmethod
    def of_lone_replicas(
        cls,
        values: Sequence[DistributedValues],
        options: RunOptions,
        default: ReduceOp,
        workers: Workers,
        counts: Sequence[float] | None = None,
    ) -> Participants:
        """The weights for one run where each of several workers has one replica.

        The run has these values as arguments.

        The workers ask one another only if the batch does not say how many rows all of
        them have, or if these are not what counts.

        Raises:
            ValueError: As `of` does.
        """
        rows_of_all: tuple[int, ...] | None = None
        for leaf in values:
            rows = leaf.rows_of_all if type(leaf) is PerReplica else None
            if rows is None or rows != (rows_of_all or rows):
                return cls.of(values, 1, options, default, workers, counts=counts)
            rows_of_all = rows
        if options.examples is not None or counts is not None:
            return cls.of(values, 1, options, default, workers, counts=counts)
        is_mean, knows_rows = (
            reduction_of(options, default) is ReduceOp.MEAN,
            rows_of_all is not None,
        )
        rows_of_all = rows_of_all or (1,) * workers.count
        weights, compared = _of_rows(
            rows_of_all, workers.index, options.run_empty_replicas, is_mean, knows_rows
        )
        workers.compare_all(compared)
        return weights

    @classmethod
    def _of_everyone(
        cls,
        everyone: Sequence[_Told],
        num_replicas: int,
        runs_empty: bool,
        reduction: ReduceOp,
        index: int,
        count: int,
        has_news: bool = False,
        knows_rows: bool = True,
    ) -> Participants:
        """The weights, computed from what is known of each replica of all workers.

        There are `count` workers, and this one is number `index`.
        """
        # The loss of a replica without rows would be a mean over nothing: NaN. So its
        # step is not called, unless asked; but see Note [Why a worker without rows runs
        # the step].
        leaves_out = not runs_empty and any(one.has_rows for one in everyone)
        takes_part = [
            not one.is_absent and (one.has_rows or not leaves_out) for one in everyone
        ]
        fractions = _parts(
            [one.rows for one in everyone], takes_part, [1.0] * len(everyone)
        )
        # Replicas that all count 0 count by their rows: a term of the loss that is a
        # mean over rows is right then.
        shares = _parts([one.share for one in everyone], takes_part, fractions)
        first = index * num_replicas
        here = slice(first, first + num_replicas)
        present = tuple(r for r in range(num_replicas) if takes_part[first + r])
        if not present and count == 1:
            raise ValueError(
                "Each replica lacks one of the arguments of this run, so none can take "
                "part in it."
            )
        return cls(
            present or (0,),
            tuple(fractions[here]),
            reduction,
            count=sum(takes_part),
            lead_worker=takes_part.index(True) // num_replicas
            if any(takes_part)
            else 0,
            is_understudy=not present,
            total_weight=1.0
            if reduction is ReduceOp.MEAN
            else float(sum(map(bool, shares))),
            has_news=has_news,
            shares=tuple(shares[here]),
            parts_of_all=tuple(shares),
            rows_of_all=tuple([one.rows for one in everyone]) if knows_rows else None,
        )


# Most batches of a training have the same number of rows.
@functools.lru_cache(maxsize=64)
def _of_rows(
    rows_of_all: tuple[int, ...],
    index: int,
    runs_empty: bool,
    is_mean: bool,
    knows_rows: bool,
) -> tuple[Participants, Sequence[tuple[str, object]]]:
    """The weights, and the lists that workers compare.

    Each call returns the very same lists.
    """
    # `reduction` is no argument: the cache would take a call to look for it.
    reduction = ReduceOp.MEAN if is_mean else ReduceOp.SUM
    everyone = [
        _Told(share=float(rows), rows=float(rows), is_absent=False, has_rows=rows > 0)
        for rows in rows_of_all
    ]
    weights = Participants._of_everyone(
        everyone,
        1,
        runs_empty,
        reduction,
        index,
        len(rows_of_all),
        knows_rows=knows_rows,
    )
    # The same options as in `Participants.of`.
    compared = [
        ("RunOptions", [reduction.value, runs_empty]),
        ("the rows of the batch:", list(rows_of_all)),
    ]
    return weights, compared


def reduction_of(options: RunOptions, default: ReduceOp) -> ReduceOp:
    """How gradients become one, once each is weighted.

    It is `default` if the options do not say.
    """
    said = options.gradient_reduction
    if isinstance(said, ReduceOp):
        return said
    # Else it is "loss", which says how each is weighted.
    return default if said is None else ReduceOp.MEAN


def replicas_with_rows(leaves: Sequence[Tree], num_replicas: int) -> list[int]:
    """The replicas of this worker that have all arguments, and rows of some batch.

    If no batch says how many rows it has, replicas need no rows.
    """
    records = [
        leaf.rows
        for leaf in leaves
        if isinstance(leaf, PerReplica) and leaf.rows is not None
    ]
    present = sorted(set(range(num_replicas)) - _absent(leaves))
    if not records:
        return present
    return [r for r in present if any(rows[r] for rows in records)]


def _absent(leaves: Sequence[Tree]) -> set[int]:
    """The replicas that lack one of the arguments."""
    distributed = [
        leaf._components for leaf in leaves if isinstance(leaf, DistributedValues)
    ]
    return {
        r
        for components in distributed
        for r, value in enumerate(components)
        if value is ABSENT
    }


def _parts(
    numbers: Sequence[float], takes_part: Sequence[bool], otherwise: Sequence[float]
) -> list[float]:
    """Which part of the sum each number of a replica that takes part is.

    If all are 0, `otherwise` are the numbers.
    """
    counted = [
        number if takes else 0.0
        for number, takes in zip(numbers, takes_part, strict=True)
    ]
    if not any(counted):
        counted = [
            number if takes else 0.0
            for number, takes in zip(otherwise, takes_part, strict=True)
        ]
    total = sum(counted) or 1.0
    return [number / total for number in counted]


def _shares(
    rows: Sequence[float] | None, given: Sequence[float] | None, num_replicas: int
) -> Sequence[float]:
    """How much each replica of this worker counts, if it takes part.

    The user has said how much, or its rows say so.
    """
    if given is None:
        return [1.0] * num_replicas if rows is None else rows
    if len(given) != num_replicas:
        raise examples_count_error(given, num_replicas)
    return given


class _Told(NamedTuple):
    """What a worker tells the others of one of its replicas."""

    share: float  # how much it counts, if it takes part
    rows: float  # how many rows it has; if nobody knows, how much it counts
    is_absent: bool  # whether an argument is missing
    has_rows: bool


class _OfWorker(NamedTuple):
    """What a worker tells the others when a run begins.

    Every run sends it, so the bytes are few and quickly made.
    """

    replicas: list[_Told]
    has_news: bool
    is_asked_to_leave: bool

    def pack(self) -> bytes:
        numbers = chain.from_iterable(self.replicas)
        kinds = f"<2?{len(self.replicas) * 'dd2?'}"
        return struct.pack(kinds, self.has_news, self.is_asked_to_leave, *numbers)

    @classmethod
    def unpack(cls, data: bytes) -> _OfWorker:
        count = (len(data) - _HEAD) // _OF_REPLICA
        has_news, is_asked, *numbers = struct.unpack(f"<2?{count * 'dd2?'}", data)
        replicas = []
        for i in range(0, len(numbers), 4):
            share, rows, is_absent, has_rows = numbers[i : i + 4]
            replicas.append(
                _Told(share=share, rows=rows, is_absent=is_absent, has_rows=has_rows)
            )
        return cls(replicas=replicas, has_news=has_news, is_asked_to_leave=is_asked)


_HEAD, _OF_REPLICA = struct.calcsize("<2?"), struct.calcsize("<dd2?")


def _rows(
    leaves: Sequence[Tree],
    options: RunOptions,
    reduction: ReduceOp,
    given: Sequence[float] | None,
) -> tuple[int, ...] | None:
    """How many rows each replica has, if the arguments say so.

    It must also be known how much each replica counts.
    """
    known = [
        leaf.rows
        for leaf in leaves
        if isinstance(leaf, PerReplica) and leaf.rows is not None
    ]
    records = list(dict.fromkeys(known))
    if len(records) < 2:
        return records[0] if records else None
    for r, rows in enumerate(zip(*records, strict=True)):
        has_some = any(rows) and not all(rows)
        if has_some and not options.run_empty_replicas:
            told = (
                f" Replica {r} has rows of one and none of another, and would lose "
                "them if it sat the step out."
            )
            raise unequal_arguments_error(records, told)
        if given is not None and any(rows) and tuple(given[r : r + 1]) == (0,):
            told = (
                f" RunOptions(examples={tuple(given)}) drops the gradient of replica "
                f"{r}, and so its rows."
            )
            raise unequal_arguments_error(records, told)
    has_shares = given is not None or reduction is ReduceOp.SUM
    if not has_shares:
        raise unequal_arguments_error(records)
    # The weights do not depend on these numbers: a replica takes part if any of the
    # arguments has rows for it.
    return tuple(map(max, zip(*records, strict=True)))
