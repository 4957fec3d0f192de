"""Metrics of torchmetrics: each replica counts, and the counts become one.

A metric keeps its counts, which are called states, in plain attributes, and says how the states of several processes
are reduced to one. This file reduces the states of the replicas at the end of each run: the first replica goes on from
the states of the user's own metric, the others begin with the default states, and the reduced states go into the user's
metric. So outside of runs the metric is as if it had seen all rows, and can be computed, reset and saved. In a replica
`compute()` is a synchronization point, through the hook that a metric has for it (`dist_sync_fn`).

torchmetrics is not imported: a metric is recognized by its attributes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch

from torchstrategy._core.context import current_replica_context
from torchstrategy._core.torch_internals import version
from torchstrategy._execution.replica import group_here
from torchstrategy._replication.module_replica import ModuleReplica
from torchstrategy._training.replica_weights import ReplicaWeights

Inside = dict[str, Any]  # the `__dict__` of a module

_OF_A_METRIC = {"_defaults", "_reductions", "_update_count", "_computed", "dist_sync_fn", "distributed_available_fn"}
_OF_A_COLLECTION = {"_groups", "_groups_checked", "_modules"}


class State(NamedTuple):
    """One state of a metric after a run."""

    position: int  # of the metric, among the modules
    name: str
    value: Any

    def write(self, inside: Inside) -> None:
        """Puts the state into the user's metric."""
        before = inside[self.name]
        # A metric appends to its list in place, so whoever has the list sees the new items: here, too.
        if isinstance(before, list) and isinstance(self.value, list):
            before[:] = self.value
        else:
            inside[self.name] = self.value
        # The result that the metric keeps from an earlier `compute()` is outdated.
        inside["_computed"] = None


@final
class Metrics:
    """The metrics among some modules.

    Args:
        originals: The `__dict__` of each of the user's modules.
        names: What the user calls the modules.
        replicas: The copies of the modules in each replica.
    """

    def __init__(self, originals: Sequence[Inside], names: Sequence[str], replicas: Sequence[ModuleReplica]) -> None:
        self._originals = originals
        self._names = names
        self._local = [replica.insides for replica in replicas]
        self._devices = [replica.device for replica in replicas]
        self._metrics = [p for p, inside in enumerate(originals) if is_metric(inside)]
        self._collections = [p for p, inside in enumerate(originals) if inside.keys() >= _OF_A_COLLECTION]
        # The attributes that are states: this file brings them to the replicas and back, at each run.
        self.states = [set(_states(inside)) if is_metric(inside) else set() for inside in originals]
        # By replica, position and name: what each state was when the run began.
        self._given: dict[tuple[int, int, str], list[object]] = {}

    def hand_out(self, present: Sequence[int]) -> None:
        """Before a run: the first replica gets the states of the user's metrics, the others the default states."""
        for position in self._metrics:
            for r in present:
                self._hand_out(position, r, r == present[0], len(present) > 1)
        for position in self._collections:
            # A `MetricCollection` lets metrics with equal states share them. In a replica each metric got states of its
            # own above, so each has to update them.
            for r in present:
                local = self._local[r][position]
                local["_groups"] = {index: [name] for index, name in enumerate(local["_modules"])}
                local["_groups_checked"] = True

    def _hand_out(self, position: int, r: int, is_lead: bool, can_meet: bool) -> None:
        original, local = self._originals[position], self._local[r][position]
        local["_computed"] = None
        if original["dist_sync_fn"] is None and can_meet:
            local["dist_sync_fn"], local["distributed_available_fn"] = _gathered, _is_in_replica
        for name in _states(original):
            # States that are means are averaged over the replicas, so all replicas go on from the user's.
            goes_on = is_lead or _kind(original, name) == _MEAN
            state = _on(self._devices[r], original[name] if goes_on else original["_defaults"][name], copy=True)
            local[name], self._given[r, position, name] = state, _noted(state)

    def put_together(self, replica_weights: ReplicaWeights) -> list[State]:
        """After a run: the states of the user's metrics with the counts of all replicas.

        Raises:
            RuntimeError: If a metric does not say how a state of several replicas becomes one.
        """
        return [
            State(position, name, self._one(position, name, replica_weights))
            for position in self._metrics
            for name in _states(self._originals[position])
            if any(self._is_touched(position, name, r) for r in replica_weights.present)
        ]

    def let_go(self) -> None:
        """Drops the replicas' references to their lists, so that a `reset()` of the user's metric frees the memory."""
        for r, position, name in self._given:
            local = self._local[r][position]
            if isinstance(local[name], list):
                local[name].clear()
        self._given.clear()

    def _is_touched(self, position: int, name: str, r: int) -> bool:
        before, now = self._given[r, position, name], _noted(self._local[r][position][name])
        return len(before) != len(now) or not all(map(operator.is_, before, now))

    def _one(self, position: int, name: str, replica_weights: ReplicaWeights) -> Any:
        original, present = self._originals[position], replica_weights.present
        device = _place_of(original, name)
        values = [_on(device, self._local[r][position][name]) for r in present]
        if not any(self._is_touched(position, name, r) for r in present[1:]) and _kind(original, name) != _MEAN:
            return values[0]
        if all(isinstance(value, list) for value in values):
            return [item for value in values for item in value]
        # All replicas went on from the same state, so the means are weighted by the rows of each.
        if _kind(original, name) == _MEAN:
            parts = [(replica_weights.fractions[r], value) for r, value in zip(present, values, strict=True)]
            return torch.stack([value * fraction for fraction, value in parts if fraction]).sum(0)
        if _kind(original, name) == "dim_zero_cat":
            return torch.cat([value if isinstance(value, torch.Tensor) else torch.cat(value) for value in values])
        reduction = original["_reductions"][name]
        if reduction is None:
            raise RuntimeError(
                f"{self._names[position]} was updated in several replicas, and does not say how its state {name!r} of "
                "several replicas becomes one (dist_reduce_fx=None). Return what it is to be updated with from the "
                "step, and update it after the run: metric.update(strategy.gather(predictions, axis=0), ...)."
            )
        return reduction(torch.stack(values))


def is_metric(inside: Inside) -> bool:
    """Whether a module is a metric of torchmetrics, by the names in its `__dict__`."""
    return inside.keys() >= _OF_A_METRIC


def _states(original: Inside) -> list[str]:
    """The names of the states of a metric. A wrapper may list states that another metric has."""
    return [name for name in original["_defaults"] if name in original]


def _gathered(tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
    """Gathers a tensor of each replica. A metric calls this when it is computed in a replica."""
    group = group_here("compute() of a metric")
    assert group is not None, "outside of replicas a metric has counted everything"
    of_all = group.replica.synchronize("compute() of a metric", lambda brought: [list(brought)] * len(brought), tensor)
    return [of_one.to(tensor.device) for of_one in of_all]


def _is_in_replica() -> bool:
    context = current_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def _kind(original: Inside, name: str) -> str:
    """The name of the function that reduces a state."""
    return getattr(original["_reductions"][name], "__name__", "")


_MEAN = "dim_zero_mean"


def _noted(state: Any) -> list[object]:
    """A list that differs, item by item, after the state was written or replaced."""
    return [*state, state] if isinstance(state, list) else [state, version(state)]


def _place_of(original: Inside, name: str) -> torch.device:
    default = original["_defaults"][name]
    place: torch.device = default.device if isinstance(default, torch.Tensor) else original["_device"]
    return place


def _on(device: torch.device, state: Any, copy: bool = False) -> Any:
    if isinstance(state, list):
        return [item.to(device) if isinstance(item, torch.Tensor) else item for item in state]
    return state.detach().to(device, copy=copy)
