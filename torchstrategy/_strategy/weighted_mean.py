"""The mean of what replicas computed, each weighing its rows: `Strategy.reduce("mean", ..., weights=...)`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchstrategy._communication.reductions import as_tensor
from torchstrategy._core.distributed_values import ABSENT, DistributedValues, PerReplica, distributed_within
from torchstrategy._core.errors import plural
from torchstrategy._core.types import Tree


def weighted_parts(value: DistributedValues, weights: Tree) -> tuple[PerReplica, PerReplica]:
    """The components times their weights, and the weights; the mean is the sum of the former over that of the latter.

    Raises:
        ValueError: If it is not known how much a replica weighs.
        TypeError: If a component, or a weight, is no number.
    """
    components, found = value._components, _weights(weights, len(value._components))
    pairs = [(ABSENT, ABSENT) if v is ABSENT else _pair(v, w) for v, w in zip(components, found, strict=True)]
    spare = getattr(value, "understudy", None)  # of a worker without rows: what it would bring does not count
    product, size = (None, None) if spare is None else _pair(spare, getattr(weights, "understudy", None) or 0)
    return PerReplica([p for p, _ in pairs], understudy=product), PerReplica([w for _, w in pairs], understudy=size)


def _pair(component: Tree, weight: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    if weight is ABSENT:
        raise ValueError("weights=... has no weight for a replica that has a value: give the batch of the same step.")
    tensor = as_tensor(component)
    # A sum of many rows may be more than a half can hold.
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.get_default_dtype()))
    size = as_tensor(weight).detach().to(wide)
    if size.numel() != 1:
        raise ValueError(f"A weight is one number for each replica; got one of shape {tuple(size.shape)}.")
    size = size.reshape(())
    return torch.where(size == 0, 0, wide * size), size  # the mean of no rows is NaN, and does not count


def _weights(weights: Tree, count: int) -> Sequence[Tree]:
    found = distributed_within(weights)
    rows = {leaf.rows for leaf in found if isinstance(leaf, PerReplica) and leaf.rows is not None}
    if len(rows) == 1:
        return rows.pop()
    if isinstance(weights, DistributedValues) and not rows:
        return weights._components
    if isinstance(weights, (list, tuple)) and not found and len(weights) == count:
        return weights
    raise ValueError(
        "weights=... says how much each replica weighs: give the batch that the strategy split, what strategy.run "
        f"returned, such as a count of tokens, or a list of {plural(count, 'number')}, one for each replica. Got "
        + (f"a batch that was split with different rows, {sorted(rows)}." if rows else f"{weights!r}.")
    )
