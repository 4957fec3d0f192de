"""Lists with one Python object for each row, such as texts and ids.

Each replica has a list of its own rows.

In a result of `Strategy.run` such a list is a `PerReplica` of lists, or, where all
replicas returned lists of one length, a list of `PerReplica`s. The outermost list is
the one of rows: a row may be a list, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from torchstrategy._base.distributed_values import (
    ABSENT,
    DistributedValues,
    PerReplica,
    distributed_within,
    select,
)
from torchstrategy._base.tree import is_one_thing, is_record, parts_of
from torchstrategy._base.types import Tree


def is_row_list(value: Tree) -> bool:
    """Whether a value is a list with a Python object for each row.

    It may be the list of one replica or of several.
    """
    if type(value) is PerReplica:
        there = [
            component for component in value._components if component is not ABSENT
        ] or [value.understudy]
        return all(
            _is_list(component) and _holds_objects(component) for component in there
        )
    return _is_list(value) and value != () and _holds_objects(value)


def is_row_list_or_one_thing(value: Tree) -> bool:
    """Which values `Strategy.gather` does not look into."""
    return is_one_thing(value) or is_row_list(value)


def own_rows(value: Tree) -> list[tuple[Tree, ...]] | None:
    """The rows of each replica of this process that is present.

    It is None for a list that is not distributed.
    """
    if isinstance(value, PerReplica):
        return [tuple(component) for component in value.values]
    found = distributed_within(value)
    if not found:
        return None
    count = len(found[0]._components)
    present = [
        r
        for r in range(count)
        if all(one._components[r] is not ABSENT for one in found)
    ]
    return [tuple(select(row, r) for row in value) for r in present]


def _is_list(value: Any) -> bool:
    if type(value) is tuple:  # of texts, as a `DataLoader` makes it
        return all(map(_is_text, value))
    return isinstance(value, list)


def _is_text(item: Any) -> bool:
    if type(item) is PerReplica:
        return all(
            isinstance(one, (str, bytes)) for one in item.values or [item.understudy]
        )
    return isinstance(item, (str, bytes))


def _holds_objects(value: Any) -> bool:
    if type(value) is PerReplica:
        return all(map(_holds_objects, value.values or [value.understudy]))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_holds_objects, value))
    if isinstance(value, dict):
        return all(map(_holds_objects, value.values()))
    if is_record(value):
        return all(map(_holds_objects, parts_of(value).values()))
    return not isinstance(
        value, (torch.Tensor, np.ndarray, nn.Module, DistributedValues)
    )
