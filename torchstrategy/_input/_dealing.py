"""Which rows of a batch go to which replica.

A batch of b rows is cut into contiguous pieces of ceil(b / n) rows, one for each of n replicas in order; the last
ones may be smaller or empty. Rows are along the first dimension, and every leaf of a batch has the same number of
them. A tensor without dimensions, a number, a string or None has no rows, and every replica gets it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchstrategy._errors import an
from torchstrategy._tree import leaves_with_names, map_leaves
from torchstrategy._types import Device, Tree
from torchstrategy._values import PerReplica

_WHOLE = (bool, int, float, complex, str, bytes, type(None), np.generic)


def shares_of(rows: int, replicas: int) -> list[slice]:
    """The rows of each replica."""
    size = -(-rows // replicas)
    return [slice(min(r * size, rows), min((r + 1) * size, rows)) for r in range(replicas)]


def dealt(batch: Tree, devices: Sequence[Device]) -> Tree:
    """`batch` with a per-replica value in place of each leaf that has rows, on the replicas' devices.

    The pieces of a tensor that is where it is needed share its memory. A list of strings, which is what collating
    strings makes, is one leaf with a row for each.

    Raises:
        ValueError: If no leaf has rows, or two have different numbers of them.
        TypeError: If it is not known how to cut a leaf.
    """
    named = leaves_with_names(batch, _is_list_of_strings)
    rows = _rows(named, len(devices))
    slices = shares_of(rows, len(devices))
    record = tuple(piece.stop - piece.start for piece in slices)

    def leaf(value: Any) -> Any:
        if _is_list_of_strings(value):
            return PerReplica([value[piece] for piece in slices], record)
        if not _has_rows(value):
            return value
        tensor = _as_tensor(value)
        pieces = [tensor[piece].to(device, non_blocking=True) for piece, device in zip(slices, devices, strict=True)]
        return PerReplica(pieces, record)

    return map_leaves(leaf, batch, _is_list_of_strings)


def moved(batch: Tree, device: Device) -> Tree:
    """`batch` with each array as a tensor, and each tensor on `device`."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) or _is_numeric(value):
            return _as_tensor(value).to(device, non_blocking=True)
        return value

    return map_leaves(leaf, batch)


def _rows(named: Sequence[tuple[str, Any]], replicas: int) -> int:
    rows: dict[str, int] = {}
    for name, value in named:
        if _is_list_of_strings(value):
            rows[name] = len(value)
        elif _has_rows(value) and (isinstance(value, torch.Tensor) or _is_numeric(value)):
            rows[name] = value.shape[0]
        elif _has_rows(value) or not isinstance(value, (torch.Tensor, np.ndarray, *_WHOLE)):
            kind = f"{type(value).__name__} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(
                f"batch{name} is {an(kind)}, and it is not known how to deal out its rows to "
                f"{replicas} replicas. "
                "Let the loader's collate_fn make tensors, or lists, tuples and dicts of them."
            )
    if not rows:
        raise ValueError(
            f"An element of the dataset has no rows to deal out to {replicas} replicas: it is not batched. Batch the "
            "dataset with the global batch size, as in torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    first = next(iter(rows))
    for name, count in rows.items():
        if count != rows[first]:
            raise ValueError(
                f"The leaves of a batch have different numbers of rows: batch{first} has {rows[first]} and batch{name} "
                f"has {count}. Cut into pieces they would no longer belong together. Give each as many rows, or make "
                "what is not per row a tensor without dimensions."
            )
    return rows[first]


def _has_rows(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0


def _is_numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc"


def _is_list_of_strings(value: Any) -> bool:
    return type(value) is list and bool(value) and all(isinstance(item, (str, bytes)) for item in value)


def _as_tensor(value: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch has no tensors that cannot be written, and would warn
    return torch.as_tensor(value)
