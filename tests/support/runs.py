"""What tests of Strategy.run share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from topologies import TOPOLOGIES, central
from torchstrategy import DistributedValues, Strategy

REBUILD = [name for name in TOPOLOGIES if name not in ("default", "one_device")]


class Opaque:
    """Holds a value that is not to be looked into."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def per_replica(strategy: Strategy, components: Sequence[Any]) -> Any:
    """A value with these components."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: components[c.replica_id_in_sync_group]
    )


def dealt(strategy: Strategy, rows: int) -> Any:
    """A batch of the rows 0, 1, ..."""
    return next(iter(strategy.experimental_distribute_dataset([torch.arange(rows)])))


def from_each(strategy: Strategy, value: Any) -> list[Any]:
    """What each present replica returned, of a value that may have become one."""
    if isinstance(value, DistributedValues):
        return list(value.values)
    return [value] * strategy.num_replicas_in_sync


def one_of(strategy: Strategy, value: Any) -> Any:
    """What all replicas returned, which is equal."""
    (one,) = set(from_each(strategy, value))
    return one


def partial(replicas: int = 3) -> tuple[Strategy, Any]:
    """A strategy, and a batch that has rows for all of its replicas but the last."""
    strategy = central(replicas)
    return strategy, dealt(strategy, replicas - 1)
