"""What lower rooms know of a strategy and of a replica's context, which are classes of the highest room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import Device, Tree


class ExtendedLike(Protocol):
    """Of `Strategy.extended`, what the lower rooms call."""

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """Where parameters are."""

    def _creation_scope(self) -> AbstractContextManager[Any]:
        """A block in which the strategy takes in what this thread creates."""

    def _device_of(self, replica: int) -> Device:
        """The device of one replica."""

    def _take_variable(self, variable: Any) -> None:
        """Takes in a variable that was created in the scope."""

    def _reduce(self, reduce_op: ReduceOp, value: Tree) -> Tree:
        """One value of what the replicas have."""


class StrategyLike(Protocol):
    """Of a strategy, what the lower rooms call."""

    @property
    def extended(self) -> ExtendedLike:
        """What the strategy offers to libraries."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas the strategy has."""

    def scope(self) -> AbstractContextManager[Any]:
        """A block in which the strategy is the current one."""

    def reduce(self, reduce_op: ReduceOp | str, value: Tree, axis: int | tuple[int, ...] | None) -> Tree:
        """One value of what the replicas have, reduced along an axis, too, unless it is None."""

    def experimental_local_results(self, value: Tree) -> tuple[Tree, ...]:
        """The components of a distributed value."""


class ReplicaContextLike(Protocol):
    """Of a replica's context, what the lower rooms call."""

    @property
    def replica_id_in_sync_group(self) -> int:
        """Which replica it is, from 0."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas the strategy has."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of the replica, in a tuple."""

    def merge_call(self, merge_fn: Callable[..., Tree], args: Sequence[Tree] = (), kwargs: Any = None) -> Tree:
        """Calls a function once for all replicas."""

    def _ends(self) -> None:
        """The call of the step is over: from here on the context synchronizes with nobody."""

    def _require_active(self, what: str) -> Any:
        """The `ReplicaGroup` of the replica, in which it may synchronize; refuses a caller that is elsewhere."""
