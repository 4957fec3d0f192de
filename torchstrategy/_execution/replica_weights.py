"""How much each replica of a run counts, and which replicas take part.

The loss of a step is usually a mean over the rows that the step saw. The mean over all rows of a batch is the sum of
the replicas' means, each multiplied by the replica's fraction of the rows. So this fraction is the weight by which a
replica's gradient is multiplied.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, final

from torchstrategy._communication.workers import LONE, Workers
from torchstrategy._core.distributed_values import ABSENT, DistributedValues, PerReplica, regroup, regroup_in_worker
from torchstrategy._core.errors import plural
from torchstrategy._core.options import ReduceOp, RunOptions
from torchstrategy._core.types import Tree


@final
@dataclass(frozen=True)
class ReplicaWeights:
    """The replicas that take part in one run, and how much each counts.

    Args:
        present: The replicas of this worker that take part, in order.
        fractions: For every replica of this worker, its fraction of the rows: those of all workers add up to 1.
        reduction: How the gradients of the replicas become one.
        num_present: How many replicas of all workers take part.
        lead_worker: The first worker that has a replica which takes part.
        is_understudy: Whether no replica of this worker takes part. Then the first one runs the step all the same, so
            that this worker comes to all exchanges with the others, and nothing that it computes counts.
        total_weight: The sum of the weights of all replicas of all workers.
        has_news: Whether one of several workers has modules or variables that no run has had yet.
    """

    present: tuple[int, ...]
    fractions: tuple[float, ...]
    reduction: ReduceOp
    num_present: int = 1
    lead_worker: int = 0
    is_understudy: bool = False
    total_weight: float = 1.0
    has_news: bool = False

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """What the gradient of each replica of the strategy is multiplied by; 0 where it is dropped."""
        if self.reduction is ReduceOp.MEAN:
            return self.fractions
        return tuple(1.0 if fraction else 0.0 for fraction in self.fractions)

    @cached_property
    def weighing(self) -> tuple[int, ...]:
        """The replicas whose gradients count: those that got rows of the batch."""
        return tuple(r for r in self.present if self.weights[r])

    def regrouped(self, trees: Mapping[int, Tree], workers: Workers, are_results: bool = False) -> Tree:
        """One tree of the trees of the replicas that take part.

        A replica that takes none is absent from it: a distributed value has a component for each of the strategy.
        """
        by_replica = [trees.get(r, ABSENT) for r in range(len(self.fractions))]
        if workers.count == 1:
            return regroup(by_replica, are_results=are_results)
        return regroup_in_worker(by_replica, is_understudy=self.is_understudy, are_results=are_results)

    @classmethod
    def of(
        cls,
        leaves: Sequence[Tree],
        num_replicas: int,
        options: RunOptions,
        default: ReduceOp,
        workers: Workers = LONE,
        has_news: bool = False,
    ) -> ReplicaWeights:
        """The weights for one run whose arguments have these leaves.

        Args:
            leaves: The leaves of the arguments.
            num_replicas: How many replicas this worker has.
            options: What the user has said about the run.
            default: How gradients become one, where the options do not say.
            workers: The processes that train together.
            has_news: Whether this worker has modules or variables that no run has had yet.

        Raises:
            ValueError: If the arguments were split with different row counts, `options.examples` does not fit, or no
                replica has all arguments.
        """
        reduction = options.gradient_reduction or default
        assert isinstance(reduction, ReduceOp)  # `RunOptions` has made one of a name
        rows = _rows(leaves, options, reduction)
        examples = _examples(rows, options, num_replicas)
        distributed = [leaf._components for leaf in leaves if isinstance(leaf, DistributedValues)]
        absent = {r for components in distributed for r, value in enumerate(components) if value is ABSENT}
        own = [_Told(float(examples[r]), r in absent, rows is None or rows[r] > 0) for r in range(num_replicas)]
        of_all = [_OfWorker(own, has_news, workers.is_asked_to_leave)]
        if workers.count > 1:
            workers.compare("RunOptions", (reduction, options.run_empty_replicas))
            told = workers.all_gather_bytes(of_all[0].packed(), "the beginning of a run")
            of_all = list(map(_OfWorker.unpacked, told))
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
        )

    @classmethod
    def of_lone_replicas(
        cls, values: Sequence[DistributedValues], options: RunOptions, default: ReduceOp, workers: Workers
    ) -> ReplicaWeights:
        """The weights where each of several workers has one replica, for one run with these values as arguments.

        The workers ask one another only if the batch does not say how many rows all of them have.

        Raises:
            ValueError: As `of` does.
        """
        rows_of_all: tuple[int, ...] | None = None
        for leaf in values:
            rows = leaf.rows_of_all if type(leaf) is PerReplica else None
            if rows is None or rows != (rows_of_all or rows):
                return cls.of(values, 1, options, default, workers)
            rows_of_all = rows
        if options.examples is not None:
            return cls.of(values, 1, options, default, workers)
        is_mean = (options.gradient_reduction or default) is ReduceOp.MEAN
        rows_of_all = rows_of_all or (1,) * workers.count
        weights, compared = _of_rows(rows_of_all, workers.index, options.run_empty_replicas, is_mean)
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
    ) -> ReplicaWeights:
        """The weights, from what is known of each replica of all `count` workers, of which this is number `index`."""
        # The loss of a replica without rows would be a mean over nothing: NaN. So its step is not called, unless asked.
        leaves_out = not runs_empty and any(one.has_rows for one in everyone)
        takes_part = [not one.is_absent and (one.has_rows or not leaves_out) for one in everyone]
        weights = [one.weight if takes else 0.0 for one, takes in zip(everyone, takes_part, strict=True)]
        # No replica that takes part has rows, as with an empty batch: all of them count the same.
        if not any(weights):
            weights = [float(takes) for takes in takes_part]
        total, first = sum(weights) or 1.0, index * num_replicas
        present = tuple(r for r in range(num_replicas) if takes_part[first + r])
        if not present and count == 1:
            raise ValueError("Each replica lacks one of the arguments of this run, so none can take part in it.")
        return cls(
            present or (0,),
            tuple(weight / total for weight in weights[first : first + num_replicas]),
            reduction,
            num_present=sum(takes_part),
            lead_worker=takes_part.index(True) // num_replicas if any(takes_part) else 0,
            is_understudy=not present,
            total_weight=1.0 if reduction is ReduceOp.MEAN else float(sum(map(bool, weights))),
            has_news=has_news,
        )


@functools.lru_cache(maxsize=64)  # most batches of a training have the same number of rows
def _of_rows(
    rows_of_all: tuple[int, ...], index: int, runs_empty: bool, is_mean: bool
) -> tuple[ReplicaWeights, Sequence[tuple[str, object]]]:
    """The weights, and what the workers compare: lists, which are the very same at each call."""
    reduction = ReduceOp.MEAN if is_mean else ReduceOp.SUM  # not an argument: to look for it would take a call
    everyone = [_Told(float(rows), False, rows > 0) for rows in rows_of_all]
    weights = ReplicaWeights._of_everyone(everyone, 1, runs_empty, reduction, index, len(rows_of_all))
    compared = [("RunOptions", [reduction.value, runs_empty]), ("the rows of the batch:", list(rows_of_all))]
    return weights, compared


def _examples(rows: Sequence[float] | None, options: RunOptions, num_replicas: int) -> Sequence[float]:
    """How much each replica of this worker counts, if it takes part: as the user has said, or as it has rows."""
    if options.examples is None:
        return [1.0] * num_replicas if rows is None else rows
    if len(options.examples) != num_replicas:
        raise ValueError(
            f"RunOptions(examples={tuple(options.examples)}) has {plural(len(options.examples), 'number')}; the "
            f"strategy has {plural(num_replicas, 'replica')}."
        )
    return options.examples


class _Told(NamedTuple):
    """What a worker tells the others of one of its replicas."""

    weight: float  # how much it counts, if it takes part
    is_absent: bool  # whether an argument is missing
    has_rows: bool


class _OfWorker(NamedTuple):
    """What a worker tells the others when a run begins. Every run sends it, so the bytes are few and quickly made."""

    replicas: list[_Told]
    has_news: bool
    is_asked_to_leave: bool

    def packed(self) -> bytes:
        numbers = chain.from_iterable(self.replicas)
        kinds = f"<2?{len(self.replicas) * 'd2?'}"
        return struct.pack(kinds, self.has_news, self.is_asked_to_leave, *numbers)

    @classmethod
    def unpacked(cls, data: bytes) -> _OfWorker:
        count = (len(data) - _HEAD) // _OF_REPLICA
        has_news, is_asked, *numbers = struct.unpack(f"<2?{count * 'd2?'}", data)
        replicas = []
        for i in range(0, len(numbers), 3):
            weight, is_absent, has_rows = numbers[i : i + 3]
            replicas.append(_Told(weight=weight, is_absent=is_absent, has_rows=has_rows))
        return cls(replicas=replicas, has_news=has_news, is_asked_to_leave=is_asked)


_HEAD, _OF_REPLICA = struct.calcsize("<2?"), struct.calcsize("<d2?")


def _rows(leaves: Sequence[Tree], options: RunOptions, reduction: ReduceOp) -> tuple[int, ...] | None:
    records = list(
        dict.fromkeys(leaf.rows for leaf in leaves if isinstance(leaf, PerReplica) and leaf.rows is not None)
    )
    if len(records) < 2:
        return records[0] if records else None
    has_shares = options.examples is not None or reduction is ReduceOp.SUM
    for r, rows in enumerate(zip(*records, strict=True)):
        has_some = any(rows) and not all(rows)
        if has_some and not options.run_empty_replicas:
            told = f" Replica {r} has rows of one and none of another, and would lose them if it sat the step out."
            raise ValueError(_UNEQUAL.format(records=_shown(records), told=told))
        if any(rows) and options.examples is not None and options.examples[r : r + 1] == (0,):
            told = f" RunOptions(examples={options.examples}) drops the gradient of replica {r}, and so its rows."
            raise ValueError(_UNEQUAL.format(records=_shown(records), told=told))
    if not has_shares:
        raise ValueError(_UNEQUAL.format(records=_shown(records), told=""))
    # The weights do not depend on these numbers: a replica takes part if any of the arguments has rows for it.
    return tuple(map(max, zip(*records, strict=True)))


def _shown(records: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(map(str, records))


_UNEQUAL = (
    "The arguments of this run were split with different numbers of rows, {records} by replica, as a labelled batch "
    "and a larger unlabelled one are. No share of a replica in the gradient fits both, so a mean over a replica's own "
    "rows cannot be right.{told} Let the step make each mean by torchstrategy.nn.compute_average_loss(losses), where "
    "losses has one number for each row, as by reduction='none'; and give the run "
    "options=torchstrategy.RunOptions(gradient_reduction='sum', run_empty_replicas=True). If the means are right as "
    "they are, and you know the shares: RunOptions(examples=[...], run_empty_replicas=True), with a number above 0 for "
    "each replica that has rows."
)
