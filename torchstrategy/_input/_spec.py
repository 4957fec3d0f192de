"""What the elements of a distributed dataset are made of, as far as that is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from torchstrategy._input._kinds import applied, counts_within, is_leaf
from torchstrategy._tree import map_leaves
from torchstrategy._types import Tree


@final
@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor.

    Args:
        shape: Its sizes; None for one that is not known beforehand.
        dtype: Of its elements.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> loader = torch.utils.data.DataLoader(torch.ones(5, 3), batch_size=2)
        >>> strategy.experimental_distribute_dataset(loader).element_spec
        TensorSpec(shape=(None, 3), dtype=torch.float32)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/TensorSpec
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype


@final
@dataclass(frozen=True)
class PerReplicaSpec:
    """What each replica is given of a per-replica value.

    Args:
        value_specs: A `TensorSpec` for each replica; of what is no tensor, its type.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> loader = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=4, drop_last=True)
        >>> spec = strategy.experimental_distribute_dataset(loader).element_spec
        >>> spec.value_specs[1]
        TensorSpec(shape=(2, 3), dtype=torch.float32)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/DistributedDataset#element_spec
    """

    value_specs: tuple[TensorSpec | type, ...]


def spec_of(element: Tree, rows: Sequence[int | None]) -> Tree:
    """The specs of elements like `element`, of which each replica gets so many rows; bare for a lone one."""

    def leaf(value: Any) -> Any:
        has_rows = bool(counts_within(value))
        specs = tuple(_spec_of_leaf(value, count, has_rows) for count in rows)
        return PerReplicaSpec(specs) if len(specs) > 1 and has_rows else specs[0]

    return map_leaves(leaf, element, is_leaf)


def _spec_of_leaf(value: Any, rows: int | None, has_rows: bool) -> TensorSpec | type:
    tensor = applied(value, lambda tensor: tensor)
    if not isinstance(tensor, torch.Tensor):
        return type(value)
    shape = tuple(tensor.shape)
    return TensorSpec((rows, *shape[1:]) if has_rows else shape, tensor.dtype)
