"""The shapes and dtypes of a dataset's elements, as far as they are known before the dataset is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch

from torchstrategy._input.batch_types import applied, has_rows


@final
@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor.

    Args:
        shape: The sizes of the dimensions; None for a size that is not known beforehand.
        dtype: The dtype of the elements.

    Example:
        >>> strategy = torchstrategy.OneDeviceStrategy("cpu")
        >>> loader = torch.utils.data.DataLoader(torch.ones(5, 3), batch_size=2)
        >>> strategy.experimental_distribute_dataset(loader).element_spec
        TensorSpec(shape=(None, 3), dtype=torch.float32)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/TensorSpec
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))


@final
@dataclass(frozen=True)
class PerReplicaSpec:
    """The spec of a per-replica value: what each replica gets.

    Args:
        value_specs: For each replica, a `TensorSpec`; if the value is no tensor, its type.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> loader = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=4, drop_last=True)
        >>> spec = strategy.experimental_distribute_dataset(loader).element_spec
        >>> spec.value_specs[1]
        TensorSpec(shape=(2, 3), dtype=torch.float32)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/DistributedDataset#element_spec
    """

    value_specs: tuple[TensorSpec | type, ...]


def spec_of(value: Any, rows: int | None, *, is_batched: bool) -> TensorSpec | type:
    """The spec of the values of one leaf for one replica.

    Args:
        value: One such value.
        rows: How many rows such values have, if they have rows. None: the number is not known beforehand.
        is_batched: Whether the first dimension of a tensor is that of its rows.
    """
    tensor = applied(value, lambda tensor: tensor)
    if not isinstance(tensor, torch.Tensor):
        return type(value)
    shape: list[int | None] = [size if isinstance(size, int) else None for size in tensor.shape]  # nested: no int
    if is_batched and has_rows(value):
        shape[0] = rows
    return TensorSpec(tuple(shape), tensor.dtype)
