"""Metrics of torchmetrics among the user's modules: each replica counts for itself, and the counts become one.

A metric keeps what it has counted, its states, in plain attributes, and says how those of several processes become one.
That is done here at the end of each run: the first replica goes on from what the user's own metric has, the others
begin afresh, and their states are reduced into it. So outside of runs the metric is as if it had seen all rows, and can
be computed, reset and saved. `compute()` in a replica is a meeting, by way of the metric's own hook for it.

torchmetrics is not imported: its metrics are known by what they have.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch

from torchstrategy._core.context import current_replica_context
from torchstrategy._core.torch_internals import version
from torchstrategy._execution.replica_group import group_here
from torchstrategy._training.replica_weights import ReplicaWeights

Inside = dict[str, Any]  # what a module has in its `__dict__`

_OF_A_METRIC = {"_defaults", "_reductions", "_update_count", "_computed", "dist_sync_fn", "distributed_available_fn"}
_OF_A_COLLECTION = {"_groups", "_groups_checked", "_modules"}


class State(NamedTuple):
    """What a run has made of one state of a metric."""

    position: int  # of the metric, among the modules
    name: str
    value: Any

    def write(self, inside: Inside) -> None:
        """Puts it into the user's metric, which has computed nothing of it yet."""
        before = inside[self.name]
        if isinstance(before, list) and isinstance(self.value, list):
            before[:] = self.value  # as the metric itself appends to it
        else:
            inside[self.name] = self.value
        inside["_computed"] = None


@final
class Metrics:
    """The metrics among some modules.

    Args:
        originals: What the user's modules have inside.
        names: What the user calls them.
        local: The same of each replica's copies.
        devices: Where each replica computes.
    """

    def __init__(
        self,
        originals: Sequence[Inside],
        names: Sequence[str],
        local: Sequence[Sequence[Inside]],
        devices: Sequence[torch.device],
    ) -> None:
        self._originals = originals
        self._names = names
        self._local = local
        self._devices = devices
        self._metrics = [p for p, inside in enumerate(originals) if is_metric(inside)]
        self._collections = [p for p, inside in enumerate(originals) if inside.keys() >= _OF_A_COLLECTION]
        self.states = {p: set(_states(originals[p])) for p in self._metrics}  # which are brought here, at each run
        self._given: dict[tuple[int, int, str], list[object]] = {}  # how each state was when the run began

    def hand_out(self, present: Sequence[int]) -> None:
        """Before a run: the first replica goes on from what the user's metrics have, the others begin afresh."""
        for position in self._metrics:
            for r in present:
                self._hand_out(position, r, r == present[0], len(present) > 1)
        for position in self._collections:
            for r in present:  # metrics that share states would share them with nobody else here
                local = self._local[r][position]
                local["_groups"] = {index: [name] for index, name in enumerate(local["_modules"])}
                local["_groups_checked"] = True

    def _hand_out(self, position: int, r: int, is_lead: bool, can_meet: bool) -> None:
        original, local = self._originals[position], self._local[r][position]
        local["_computed"] = None
        if original["dist_sync_fn"] is None and can_meet:
            local["dist_sync_fn"], local["distributed_available_fn"] = _gathered, _is_in_replica
        for name in _states(original):
            goes_on = is_lead or _kind(original, name) == _MEAN
            state = _on(self._devices[r], original[name] if goes_on else original["_defaults"][name], copy=True)
            local[name], self._given[r, position, name] = state, _noted(state)

    def put_together(self, replica_weights: ReplicaWeights) -> list[State]:
        """After a run: what the user's metrics have, with what the replicas have counted.

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
        """What was counted is in the user's metrics now, and is theirs to drop."""
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
        if _kind(original, name) == _MEAN:  # all went on from the same, so that each brings its rows' part
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
    """Whether a module is a metric of torchmetrics, by what it has inside."""
    return inside.keys() >= _OF_A_METRIC


def _states(original: Inside) -> list[str]:
    """The names of what a metric counts; a wrapper may pass on those of another metric."""
    return [name for name in original["_defaults"] if name in original]


def _gathered(tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
    """A tensor of each replica; what a metric calls when it is computed in a replica."""
    group = group_here("compute() of a metric")
    assert group is not None, "outside of replicas a metric has counted everything"
    of_all = group.replica.synchronize("compute() of a metric", lambda brought: [list(brought)] * len(brought), tensor)
    return [of_one.to(tensor.device) for of_one in of_all]


def _is_in_replica() -> bool:
    context = current_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def _kind(original: Inside, name: str) -> str:
    """What the reduction of a state is called."""
    return getattr(original["_reductions"][name], "__name__", "")


_MEAN = "dim_zero_mean"


def _noted(state: Any) -> list[object]:
    """What is another list after the state was written, or put another in the place of."""
    return [*state, state] if isinstance(state, list) else [state, version(state)]


def _place_of(original: Inside, name: str) -> torch.device:
    default = original["_defaults"][name]
    place: torch.device = default.device if isinstance(default, torch.Tensor) else original["_device"]
    return place


def _on(device: torch.device, state: Any, copy: bool = False) -> Any:
    if isinstance(state, list):
        return [item.to(device) if isinstance(item, torch.Tensor) else item for item in state]
    return state.detach().to(device, copy=copy)
