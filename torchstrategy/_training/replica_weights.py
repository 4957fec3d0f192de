"""How much each replica of a run counts, and which replicas take part.

The loss of a step is usually a mean over the rows that the step saw. The mean over all rows of a batch is the sum of
the replicas' means, each multiplied by the replica's fraction of the rows. So this fraction is the weight by which a
replica's gradient is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from torchstrategy._core.distributed_values import ABSENT, DistributedValues, PerReplica
from torchstrategy._core.errors import plural
from torchstrategy._core.options import ReduceOp, RunOptions
from torchstrategy._core.types import Tree


@final
@dataclass(frozen=True)
class ReplicaWeights:
    """The replicas that take part in one run, and how much each counts.

    Args:
        present: The replicas that take part, in order.
        fractions: For every replica of the strategy, its fraction of the rows: they add up to 1.
        reduction: How the gradients of the replicas become one.
    """

    present: tuple[int, ...]
    fractions: tuple[float, ...]
    reduction: ReduceOp

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

    @classmethod
    def of(cls, leaves: Sequence[Tree], num_replicas: int, options: RunOptions, default: ReduceOp) -> ReplicaWeights:
        """The weights for one run whose arguments have these leaves.

        Raises:
            ValueError: If the arguments were split with different row counts, or `options.examples` does not fit.
        """
        everyone = tuple(range(num_replicas))
        reduction = options.gradient_reduction or default
        assert isinstance(reduction, ReduceOp)  # `RunOptions` has made one of a name
        rows = _rows(leaves, options, reduction)
        examples: tuple[float, ...] | None = rows
        if options.examples is not None:
            examples = tuple(options.examples)
            if len(examples) != num_replicas:
                raise ValueError(
                    f"RunOptions(examples={examples}) has {plural(len(examples), 'number')}; the strategy has "
                    f"{plural(num_replicas, 'replica')}."
                )
        distributed = [leaf._components for leaf in leaves if isinstance(leaf, DistributedValues)]
        absent = {r for components in distributed for r, value in enumerate(components) if value is ABSENT}
        # The loss of a replica without rows would be a mean over nothing: NaN. So its step is not called, unless asked.
        if rows is not None and any(rows) and not options.run_empty_replicas:
            absent.update(r for r in everyone if not rows[r])
        present = tuple(r for r in everyone if r not in absent)
        counts = [1.0 if examples is None else float(examples[r]) for r in everyone]
        total = sum(counts[r] for r in present)
        # No replica that takes part has rows, as with an empty batch: all of them count the same.
        if not total:
            counts, total = [1.0] * num_replicas, float(len(present))
        return cls(present, tuple(counts[r] / total if r in present else 0.0 for r in everyone), reduction)


def _rows(leaves: Sequence[Tree], options: RunOptions, reduction: ReduceOp) -> tuple[int, ...] | None:
    records = {leaf.rows for leaf in leaves if isinstance(leaf, PerReplica) and leaf.rows is not None}
    if len(records) < 2:
        return next(iter(records), None)
    first, second = sorted(records)[:2]
    told = f"The arguments of this run were split with different numbers of rows, {first} and {second} by replica, "
    if options.examples is None and reduction is ReduceOp.MEAN:
        raise ValueError(
            f"{told}so the share of each replica in the gradient is not known. Say it: RunOptions(examples=[...])."
        )
    for r, rows in enumerate(zip(*records, strict=True)):
        if any(rows) and not all(rows) and not options.run_empty_replicas:
            raise ValueError(
                f"{told}and replica {r} has rows of one and none of another: it cannot sit the step out without "
                "losing them. Call the step there, too: RunOptions(run_empty_replicas=True)."
            )
    # Only where `options.examples` or a sum makes the weights independent of these numbers: a replica takes part if any
    # of the arguments has rows for it.
    return tuple(map(max, zip(*records, strict=True)))
