"""Values of several replicas, for tests that reduce and gather them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from topologies import central
from torchstrategy import Strategy

TWO = central(2)
# On the user's own objects: whatever is not distributed is reduced already.
SINGLE = ["default", "one_device"]
NO_SUM = r"^The replicas' values cannot be added: "


class Pair(NamedTuple):
    first: Any
    second: Any


def per_replica(strategy: Strategy, components: Sequence[Any]) -> Any:
    """A value with these components, tensors of what is in lists."""
    tensors = [
        torch.tensor(c) if isinstance(c, (list, float)) else c for c in components
    ]
    return strategy.experimental_distribute_values_from_function(
        lambda c: tensors[c.replica_id_in_sync_group]
    )


def in_replicas(
    strategy: Strategy, fn: Callable[..., Any], *components: Sequence[Any]
) -> list[Any]:
    """What `fn` returns in each replica for its component of each of the values."""
    args = tuple(per_replica(strategy, values) for values in components)
    return list(strategy.experimental_local_results(strategy.run(fn, args=args)))


def dealt(strategy: Strategy, rows: torch.Tensor) -> Any:
    return next(iter(strategy.experimental_distribute_dataset([rows])))
