"""A warning for steps that train on batches that were not distributed: every replica computes with all rows.

An argument that is the same tensor in all replicas is nothing unusual: a mask, noise, a table of weights. So the
warning comes only if three conditions hold. No argument is a distributed value, and one is a tensor with rows. No
replica asked for its id, by which it could choose rows of its own. And the run trained: parameters got gradients, or
were updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torchstrategy._core.distributed_values import DistributedValues
from torchstrategy._core.errors import UndistributedBatchWarning, warn
from torchstrategy._core.structured_types import is_record, parts_of
from torchstrategy._core.torch_internals import raw_grads, version, versions
from torchstrategy._core.tree import tree_flatten
from torchstrategy._core.types import VariableBase


def has_plain_rows(leaves: Sequence[Any]) -> bool:
    """Whether a leaf of the arguments has rows, and none is a distributed value."""
    flat = [leaf for leaf in _within(leaves) if not isinstance(leaf, VariableBase)]
    is_dealt = any(isinstance(leaf, DistributedValues) for leaf in flat)
    return not is_dealt and any(isinstance(leaf, _ARRAYS) and leaf.ndim and len(leaf) > 1 for leaf in flat)


def _within(leaves: Sequence[Any]) -> Iterator[Any]:
    for leaf in leaves:
        yield from tree_flatten(list(parts_of(leaf).values()))[0] if is_record(leaf) else (leaf,)


def trained(parameters: Sequence[torch.Tensor]) -> list[object]:
    """A list that differs, item by item, after some parameters got gradients or were updated."""
    gradients = raw_grads(parameters)
    return [*versions(parameters), *((id(g), None if g is None else version(g)) for g in gradients)]


def warn_of_plain_batch(num_replicas: int) -> None:
    """Warns at the user's line."""
    warn(_NOT_DEALT.format(count=num_replicas), UndistributedBatchWarning)


_ARRAYS = (torch.Tensor, np.ndarray)
_NOT_DEALT = (
    "This run trained on tensors that were not distributed: each of the {count} replicas computed with all rows, which "
    "costs {count} times the work, and counts each row {count} times where results are added up. Deal the batches out, "
    "and run the step with what that yields: for batch in strategy.experimental_distribute_dataset(loader): "
    "strategy.run(step, args=(batch,)). If each replica is to have all rows: "
    'warnings.filterwarnings("ignore", category=torchstrategy.UndistributedBatchWarning).'
)
