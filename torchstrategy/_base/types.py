"""The type aliases of the package, and what lower rooms know of higher ones.

They know of strategies, contexts and variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

from torchstrategy._base.options import ReduceOp

# A canonical device, which always has an index: `cpu:0`, never `cpu`.
Device: TypeAlias = torch.device

# What a user may write for a device; see
# `torchstrategy._base.devices.canonical_device`.
DeviceLike: TypeAlias = "str | int | torch.device | None"

# A value, or lists, tuples, named tuples and dicts of values to any depth.
Tree: TypeAlias = Any

# The step function, which `Strategy.run` calls once in each replica.
ReplicaFn: TypeAlias = Callable[..., Tree]


class VariableBase:
    """The base class of variables: tensors that have another value in each replica."""

    # It is no Protocol, since `isinstance` with one takes twenty times as long.


class GeneratorLike(Protocol):
    """What the library needs of a `torch.Generator`."""

    def get_state(self) -> torch.Tensor: ...

    def set_state(self, new_state: torch.Tensor) -> object: ...

    def manual_seed(self, seed: int) -> object: ...


class ExtendedLike(Protocol):
    """The part of `Strategy.extended` that the lower rooms call."""

    def _creation_scope(self) -> AbstractContextManager[Any]:
        """A block in which the strategy registers what this thread creates.

        It registers modules and optimizers.
        """

    def _device_of(self, replica: int) -> Device:
        """The device of one replica."""

    def _make_variable(self, value: torch.Tensor, is_trained: bool, wanted: Any) -> Any:
        """Makes a variable of the kind that suits the strategy."""

    def _take_variable(self, variable: Any) -> None:
        """Registers a variable that was created in the scope."""

    def _reduce_leaf(self, reduce_op: ReduceOp, value: Tree) -> Tree:
        """Reduces the values of the replicas to one: the sum or mean of one leaf."""

    def _first_of(self, value: Tree) -> Tree:
        """The value of the first replica that is present."""


class StrategyLike(Protocol):
    """The part of a strategy that the lower rooms call."""

    @property
    def extended(self) -> ExtendedLike:
        """The methods that the strategy offers to libraries."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas the strategy has."""

    def scope(self) -> AbstractContextManager[Any]:
        """A block in which the strategy is the current one."""

    def reduce(
        self, reduce_op: ReduceOp | str, value: Tree, axis: int | tuple[int, ...] | None
    ) -> Tree:
        """Reduces the replicas' values to one, and along `axis` unless this is None."""

    def experimental_local_results(self, value: Tree) -> tuple[Tree, ...]:
        """The components of a distributed value."""


class ReplicaContextLike(Protocol):
    """The part of a replica's context that the lower rooms call."""

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of the replica, from 0."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas the strategy has."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of the replica, in a tuple."""

    def merge_call(
        self,
        merge_fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Any = None,
    ) -> Tree:
        """Calls a function once for all replicas."""

    def _ends(self) -> None:
        """Says that the call of the step is over.

        From here on, the context cannot synchronize with other replicas.
        """

    def _require_active(self, what: str) -> Any:
        """The `ReplicaGroup` with which the replica synchronizes.

        It raises an error if the caller is not in the replica.
        """
