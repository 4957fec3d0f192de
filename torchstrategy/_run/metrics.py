"""Metrics of torchmetrics: each replica counts, and the counts become one.

A metric keeps its counts, which are called states, in plain attributes, and says how
the states of several processes are reduced to one. This file reduces the states of the
replicas at the end of each run: the first replica goes on from the states of the user's
own metric, the others begin with the default states, and the reduced states go into the
user's metric. So outside of runs the metric is as if it had seen all rows, and can be
computed, reset and saved. In a replica `compute()` is a synchronization point, through
the hook that a metric has for it (`dist_sync_fn`).

torchmetrics is not imported: a metric is recognized by its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import nn

from torchstrategy._base.context import is_in_replica
from torchstrategy._base.marks import version_of
from torchstrategy._base.objects.changes import are_same
from torchstrategy._group.group import group_here
from torchstrategy._group.participants import Participants
from torchstrategy._group.workers import Workers

Inside = dict[str, Any]  # the `__dict__` of a module

_OF_A_METRIC = {
    "_defaults",
    "_reductions",
    "_update_count",
    "_computed",
    "dist_sync_fn",
    "distributed_available_fn",
}


class _Counted(NamedTuple):
    """What one replica has counted in one state of a metric."""

    value: Any
    is_touched: bool
    fraction: float  # its fraction of the rows


@final
@dataclass(eq=False)
class Metric:
    """A metric, or a collection of metrics, with its copies.

    Args:
        original: The `__dict__` of the user's metric.
        name: What the user calls it.
        local: The `__dict__` of each replica's copy.
        devices: The device of each replica.
        workers: The processes that train together.
    """

    original: Inside
    name: str
    local: Sequence[Inside]
    devices: Sequence[torch.device]
    workers: Workers
    # By replica and name: what each state was when the run began.
    _given: dict[tuple[int, str], list[object]] = field(default_factory=dict)
    # The states with the counts of all replicas, by name.
    _together: dict[str, Any] = field(default_factory=dict)

    def hand_out(self, participants: Participants) -> None:
        """Gives the states of the user's metric to the first replica, before a run.

        The other replicas get the default states.
        """
        original, present = self.original, participants.present
        # The first of the replicas is that of all processes.
        leads = participants.lead_worker == self.workers.index
        if _is_collection(original):
            # A `MetricCollection` lets metrics with equal states share them. In a
            # replica each metric gets states of its own, so each has to update them.
            for r in present:
                groups = {
                    index: [name]
                    for index, name in enumerate(self.local[r]["_modules"])
                }
                self.local[r].update(_groups=groups, _groups_checked=True)
            return
        if self.workers.count > 1 and original["dist_sync_fn"] is None:
            # The user's metric has counted the rows of all workers: its `compute` would
            # add them up once more.
            original["distributed_available_fn"] = _never
        for r in present:
            local = self.local[r]
            local["_computed"] = None
            if (
                original["dist_sync_fn"] is None
                and len(present) * self.workers.count > 1
            ):
                local["dist_sync_fn"], local["distributed_available_fn"] = (
                    _gather,
                    is_in_replica,
                )
            for name in states_of(original):
                # States that are means are averaged over the replicas, so all replicas
                # go on from the user's.
                goes_on = (leads and r == present[0]) or _kind(original, name) == _MEAN
                begun = original[name] if goes_on else original["_defaults"][name]
                state = _bring_to(self.devices[r], begun, copy=True)
                local[name], self._given[r, name] = state, _note_state(state)

    def put_together(self, participants: Participants) -> None:
        """Computes the states from the counts of all replicas, after a run.

        The replicas are those of all processes. `write_back` writes the result.

        Raises:
            RuntimeError: If a metric does not say how a state of several replicas
                becomes one.
        """
        fractions = [(r, participants.fractions[r]) for r in participants.present]
        names = dict.fromkeys(name for _, name in self._given)
        own = {
            name: [self._count_of(name, r, fraction) for r, fraction in fractions]
            for name in names
        }
        # An understudy has counted nothing.
        here = {} if participants.is_understudy else own
        touched = [
            name
            for name, counted in here.items()
            if any(one.is_touched for one in counted)
        ]
        point = f"the states of {self.name}"
        of_any = sorted(set().union(*self.workers.all_gather_object(touched, point)))
        if of_any and self.workers.count > 1:
            own = self._of_all_workers(
                {name: here[name] for name in of_any if name in here}, point
            )
        for name in of_any:
            self._together[name] = self._one(name, own[name])

    def _of_all_workers(
        self, here: dict[str, list[_Counted]], point: str
    ) -> dict[str, list[_Counted]]:
        """What the replicas of all processes counted, by the names of the states."""
        sent = {name: [tuple(one) for one in counted] for name, counted in here.items()}
        together: dict[str, list[_Counted]] = {}
        for of_worker in self.workers.all_gather_object(sent, point):
            for name, counted in of_worker.items():
                device = self._device_of(name)
                there = together.setdefault(name, [])
                for value, is_touched, fraction in counted:
                    there.append(
                        _Counted(_bring_to(device, value), is_touched, fraction)
                    )
        return together

    def _device_of(self, name: str) -> Any:
        """Where a state of the user's metric is."""
        default = self.original["_defaults"][name]
        return (
            default.device
            if isinstance(default, torch.Tensor)
            else self.original["_device"]
        )

    def _count_of(self, name: str, r: int, fraction: float) -> _Counted:
        """What one replica has counted, on the device of the user's metric."""
        state = self.local[r][name]
        is_touched = not are_same(self._given[r, name], _note_state(state))
        return _Counted(_bring_to(self._device_of(name), state), is_touched, fraction)

    def write_back(self) -> None:
        """Writes the states on the user's metric."""
        for name, value in self._together.items():
            before = self.original[name]
            # A metric appends to its list in place, so whoever has the list sees the
            # new items: here, too.
            if isinstance(before, list) and isinstance(value, list):
                before[:] = value
            else:
                self.original[name] = value
            # The result that the metric keeps from an earlier `compute()` is outdated.
            self.original["_computed"] = None
        self._together.clear()
        # The replicas drop what is in their lists, so that a `reset()` of the user's
        # metric frees the memory.
        for r, name in self._given:
            if self.local[r] is not self.original and isinstance(
                self.local[r][name], list
            ):
                self.local[r][name].clear()
        self._given.clear()

    def _one(self, name: str, counted: Sequence[_Counted]) -> Any:
        kind, values = _kind(self.original, name), [one.value for one in counted]
        if not any(one.is_touched for one in counted[1:]) and kind != _MEAN:
            return values[0]
        if all(isinstance(value, list) for value in values):
            return [item for value in values for item in value]
        # All replicas went on from the same state, so the means are weighted by the
        # rows of each. See Note [Where a gradient is weighed] in `_group/weighing`.
        if kind == _MEAN:
            return torch.stack(
                [one.value * one.fraction for one in counted if one.fraction]
            ).sum(0)
        if kind == "dim_zero_cat":
            # A state may be a list of tensors in one replica, and their concatenation
            # in another.
            tensors = [
                value if isinstance(value, torch.Tensor) else torch.cat(value)
                for value in values
            ]
            return torch.cat(tensors)
        reduction = self.original["_reductions"][name]
        if reduction is None:
            raise RuntimeError(
                f"{self.name} was updated in several replicas, and does not say how "
                f"its state {name!r} of several replicas becomes one "
                "(dist_reduce_fx=None). Return what it is to be updated with from the "
                "step, and update it after the run: "
                "metric.update(strategy.gather(predictions, axis=0), ...)."
            )
        return reduction(torch.stack(values))


def is_metric(inside: Inside) -> bool:
    """Whether a module is a metric of torchmetrics, by the names in its `__dict__`."""
    return inside.keys() >= _OF_A_METRIC


def _is_collection(inside: Inside) -> bool:
    return inside.keys() >= {"_groups", "_groups_checked", "_modules"}


def metrics_of(
    insides: Sequence[Inside],
    names: Sequence[str],
    copies: Sequence[tuple[torch.device, Sequence[Inside]]],
    workers: Workers,
) -> list[Metric]:
    """The metrics and collections of metrics among some modules.

    Args:
        insides: The `__dict__`s of the user's modules.
        names: What the user calls these modules.
        copies: Of each replica, its device and the `__dict__`s of its copies, in the
            same order.
        workers: The processes that train together.
    """
    devices = [device for device, _ in copies]
    found = []
    for i, inside in enumerate(insides):
        if is_metric(inside) or _is_collection(inside):
            local = [of_replica[i] for _, of_replica in copies]
            found.append(Metric(inside, names[i], local, devices, workers))
    return found


def metrics_among(
    modules: Sequence[nn.Module], devices: Sequence[torch.device], workers: Workers
) -> list[Metric]:
    """The metrics among some modules, which a lone replica uses as they are."""
    insides = [(vars(module), type(module).__name__) for module in modules]
    return [
        Metric(inside, name, [inside], devices, workers)
        for inside, name in insides
        if is_metric(inside)
    ]


def states_of(inside: Inside) -> list[str]:
    """The names of a metric's own states.

    A wrapper also lists states that another metric has; they are left out.
    """
    return (
        [name for name in inside["_defaults"] if name in inside]
        if is_metric(inside)
        else []
    )


def _gather(tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
    """Gathers a tensor of each replica.

    A metric calls this when it is computed in a replica.
    """
    group = group_here("compute() of a metric")
    assert group is not None, "outside of replicas a metric has counted everything"
    point = "compute() of a metric"

    def together(brought: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        here = list(brought)
        if group.workers.count > 1:
            counted = (
                [] if group.participants.is_understudy else [one.cpu() for one in here]
            )
            here = [
                one
                for of_worker in group.workers.all_gather_object(counted, point)
                for one in of_worker
            ]
        return [here] * len(brought)

    of_all = group.replica.synchronize(point, together, tensor)
    return [of_one.to(tensor.device) for of_one in of_all]


def _never() -> bool:
    return False


def _kind(original: Inside, name: str) -> str:
    """The name of the function that reduces a state."""
    return getattr(original["_reductions"][name], "__name__", "")


_MEAN = "dim_zero_mean"


def _note_state(state: Any) -> list[object]:
    """A list that differs, item by item, after the state was written or replaced."""
    return [*state, state] if isinstance(state, list) else [state, version_of(state)]


def _bring_to(device: torch.device, state: Any, copy: bool = False) -> Any:
    if isinstance(state, list):
        return [
            item.to(device) if isinstance(item, torch.Tensor) else item
            for item in state
        ]
    return state.detach().to(device, copy=copy)
