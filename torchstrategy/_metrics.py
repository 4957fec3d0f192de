"""Metrics of torchmetrics among the user's modules: each replica counts for itself, and the counts become one.

A metric keeps what it has counted, its states, in plain attributes, and says how those of several processes become one.
That is done here at the end of each run: the first replica goes on from what the user's own metric has, the others
begin afresh, and their states are reduced into it. So outside of runs the metric is as if it had seen all rows, and can
be computed, reset and saved. `compute()` in a replica is a meeting, by way of the metric's own hook for it.

torchmetrics is not imported: its metrics are known by what they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from torchstrategy._context import get_replica_context

Inside = dict[str, Any]  # what a module has in its `__dict__`

_OF_A_METRIC = {"_defaults", "_reductions", "_update_count", "_computed", "dist_sync_fn", "distributed_available_fn"}
_OF_A_COLLECTION = {"_groups", "_groups_checked", "_modules"}


class State(NamedTuple):
    """What a run has made of one state of a metric."""

    position: int  # of the metric, among the modules
    name: str
    value: Any


@final
class Metrics:
    """The metrics among some modules.

    Args:
        originals: What the user's modules have inside.
        names: What the user calls them.
        local: The same of each replica's copies.
    """

    def __init__(self, originals: Sequence[Inside], names: Sequence[str], local: Sequence[Sequence[Inside]]) -> None:
        self._originals = originals
        self._names = names
        self._local = local
        self._metrics = [p for p, inside in enumerate(originals) if inside.keys() >= _OF_A_METRIC]
        self._collections = [p for p, inside in enumerate(originals) if inside.keys() >= _OF_A_COLLECTION]

    def hand_out(self, present: Sequence[int]) -> None:
        """Before a run: the first replica goes on from what the user's metrics have, the others begin afresh."""
        for position in self._metrics:
            original = self._originals[position]
            for r in present:
                local = self._local[r][position]
                local["_computed"] = None
                if original["dist_sync_fn"] is None and len(present) > 1:
                    local["dist_sync_fn"], local["distributed_available_fn"] = _gathered, _is_in_replica
                local["_update_count"] = original["_update_count"] if r == present[0] else 0
                for name in _states(original):
                    state = original[name] if r == present[0] else original["_defaults"][name]
                    local[name] = _copied(state, local["_defaults"][name])
        for position in self._collections:
            for r in present:  # metrics that share states would share them with nobody else here
                local = self._local[r][position]
                local["_groups"] = {index: [name] for index, name in enumerate(local["_modules"])}
                local["_groups_checked"] = True

    def put_together(self, present: Sequence[int]) -> list[State]:
        """After a run: what the user's metrics have, with what the replicas have counted.

        Raises:
            RuntimeError: If a metric does not say how a state of several replicas becomes one.
        """
        return [
            State(position, name, self._one(position, name, present))
            for position in self._metrics
            for name in _states(self._originals[position])
            if self._is_touched(position, name, present)
        ]

    def _is_touched(self, position: int, name: str, present: Sequence[int]) -> bool:
        before = self._originals[position]
        lead, *others = (self._local[r][position] for r in present)
        counts = lead["_update_count"] != before["_update_count"] or any(other["_update_count"] for other in others)
        return counts or not _are_same(lead[name], before[name])

    def _one(self, position: int, name: str, present: Sequence[int]) -> Any:
        original = self._originals[position]
        local = [self._local[r][position] for r in present]
        counted = [inside for inside in local if inside is local[0] or inside["_update_count"]]
        values = [_on(_place_of(original, name), inside[name]) for inside in counted]
        if len(values) == 1:
            return values[0]
        if all(isinstance(value, list) for value in values):
            return [item for value in values for item in value]
        reduction = original["_reductions"][name]
        kind = getattr(reduction, "__name__", "")
        if kind == "dim_zero_mean":
            return _mean(values, [inside["_update_count"] for inside in counted])
        if kind == "dim_zero_cat":
            return torch.cat([value if isinstance(value, torch.Tensor) else torch.cat(value) for value in values])
        if reduction is None:
            raise RuntimeError(
                f"{self._names[position]} was updated in several replicas, and does not say how its state {name!r} of "
                "several replicas becomes one (dist_reduce_fx=None). Return what it is to be updated with from the "
                f"step, and update it after the run: metric.update(strategy.gather(predictions, axis=0), ...)."
            )
        return reduction(torch.stack(values))


def _states(original: Inside) -> list[str]:
    """The names of what a metric counts; a wrapper may pass on those of another metric."""
    return [name for name in original["_defaults"] if name in original]


def _gathered(tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
    """A tensor of each replica; what a metric calls when it is computed in a replica."""
    context = get_replica_context()
    assert context is not None, "outside of replicas a metric has counted everything"
    replica = context._require_active("compute() of a metric").replica
    of_all = replica.meet("compute() of a metric", lambda brought: [list(brought)] * len(brought), tensor)
    return [of_one.to(tensor.device) for of_one in of_all]


def _is_in_replica() -> bool:
    context = get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def _copied(state: Any, like: Any) -> Any:
    """A copy of a state for a replica that has its default `like`."""
    if isinstance(state, list):
        return list(state)
    return state.detach().to(like.device if isinstance(like, torch.Tensor) else state.device, copy=True)


def _place_of(original: Mapping[str, Any], name: str) -> torch.device:
    default = original["_defaults"][name]
    return default.device if isinstance(default, torch.Tensor) else original["_device"]


def _on(device: torch.device, state: Any) -> Any:
    if isinstance(state, list):
        return [item.to(device) if isinstance(item, torch.Tensor) else item for item in state]
    return state.detach().to(device)


def _mean(values: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    terms = [value * (count / sum(counts)) for value, count in zip(values, counts, strict=True)]
    return torch.stack(terms).sum(0)


def _are_same(state: Any, other: Any) -> bool:
    if isinstance(state, list) or isinstance(other, list):
        return isinstance(state, list) and isinstance(other, list) and len(state) == len(other)
    return state.shape == other.shape and bool(torch.equal(state, other.to(state.device)))
