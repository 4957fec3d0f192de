"""The methods of `Strategy.extended` that take variables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from torchstrategy._core.context import Frame, current_frame, is_default, require_cross_replica
from torchstrategy._core.distributed_values import PerReplica, regroup, select
from torchstrategy._core.errors import an
from torchstrategy._core.tree import map_leaves, tree_flatten
from torchstrategy._core.types import Device, StrategyLike, Tree
from torchstrategy._variables.kinds import Component, DistributedVariable, make_on
from torchstrategy._variables.variable import Variable, Wanted, is_variable


class VariablesOfExtended(ABC):
    """The methods of `StrategyExtended` that take variables."""

    def update(
        self,
        var: torch.Tensor,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        """Calls `fn(component, *args, **kwargs)` for each component of a variable, to write it.

        Args:
            var: A `Variable`, or a parameter of this strategy, which has only one component.
            fn: A function that writes on its component. It has to write the same on all components.
            args: Further arguments of `fn`. In place of a mirrored value, `fn` gets the component of the replica.
            kwargs: Further arguments of `fn` by name, in the same way.
            group: Whether the results of the calls are put together as those of `run` are. If not, the result has, at
                each leaf, a tuple of the results of all calls.

        Example:
            >>> strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
            >>> with strategy.scope():
            ...     v = torchstrategy.Variable(1.0)
            >>> strategy.extended.update(v, lambda component: component.assign_add(2.0).item(), group=False)
            (3.0, 3.0)

        Differs from tf.distribute:
            The components of a mirrored variable stay equal: after the calls, all have the value of the first one.

        Raises:
            TypeError: If `var` is neither a variable nor a parameter.
            ValueError: If an argument is a value for each replica.
            RuntimeError: If called in a replica or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/StrategyExtended#update
        """
        require_cross_replica(self._container_strategy(), "update")
        if not isinstance(var, nn.Parameter):
            raise TypeError(
                f"update writes a variable, and was given {an(type(var).__name__)}. Make it one, in `with "
                "strategy.scope()`: torchstrategy.Variable(value, trainable=False). A tensor of your own you can write "
                "yourself, outside of strategy.run."
            )
        kwargs = kwargs or {}
        if any(type(leaf) is PerReplica for leaf in tree_flatten((args, kwargs))[0]):
            raise ValueError(
                "update was given a value for each replica, and all components are written with the same. Reduce it "
                "first: strategy.extended.reduce_to(reduce_op, value, destinations=variable)."
            )
        with Frame(self._container_strategy()):
            results = _updated(var, fn, args, kwargs)
        return regroup(results) if group else map_leaves(lambda leaf: leaf.values, regroup(results, always_wrap=True))

    def colocate_vars_with(self, colocate_with_variable: torch.Tensor) -> AbstractContextManager[None]:
        """A block in which variables are created on the devices of another one; in a strategy, all of them are there.

        Example:
            >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
            >>> with strategy.scope():
            ...     v = torchstrategy.Variable(1.0)
            ...     with strategy.extended.colocate_vars_with(v):
            ...         momentum = torchstrategy.Variable(0.0, trainable=False)

        Raises:
            RuntimeError: If called outside of the strategy's scope.
            ValueError: If the variable was not created in it.
            TypeError: If it is none.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/StrategyExtended#colocate_vars_with
        """
        frame, strategy = current_frame(), self._container_strategy()
        is_inside = is_default(strategy) if frame is None else frame.strategy is strategy
        if not is_inside or (frame is not None and frame.replica_context is not None):
            raise RuntimeError(
                f'Need to be inside "with strategy.scope()" for {strategy!r}: colocate_vars_with says where variables '
                "are created there."
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError("colocate_vars_with takes a variable that was created in this strategy's scope.")
        return nullcontext()

    def value_container(self, value: Tree) -> Tree:
        """The variable to which a component belongs; anything else is returned as it is.

        Example:
            >>> strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
            >>> with strategy.scope():
            ...     v = torchstrategy.Variable(1.0)
            >>> strategy.extended.value_container(strategy.experimental_local_results(v)[1]) is v
            True

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/StrategyExtended#value_container
        """
        container = value.container() if type(value) is Component else None
        return value if container is None else container

    def read_var(self, v: torch.Tensor) -> torch.Tensor:
        """The value of a variable; if each replica has its own value, their aggregate.

        Example:
            >>> v = torchstrategy.Variable(1.0, trainable=False)
            >>> torchstrategy.get_strategy().extended.read_var(v)
            tensor(1.)

        Raises:
            TypeError: If it is no tensor.
            ValueError: If each replica has one and it has no aggregation.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/compat/v1/distribute/StrategyExtended#read_var
        """
        if not isinstance(v, torch.Tensor):
            raise TypeError(f"read_var reads a torchstrategy.Variable; got {v!r}, a {type(v).__name__}.")
        return v.clone() if is_variable(v) else v

    @property
    @abstractmethod
    def parameter_devices(self) -> tuple[Device, ...]: ...

    @abstractmethod
    def variable_created_in_scope(self, v: Any) -> bool: ...

    @abstractmethod
    def _container_strategy(self) -> StrategyLike: ...

    def _make_variable(self, value: torch.Tensor, is_trained: bool, wanted: Wanted) -> Variable:
        """A new variable of the kind that suits the strategy, with a copy of a value."""
        try:
            devices = self.parameter_devices
        except NotImplementedError:  # a strategy of the user's own class, which keeps no parameters
            devices = ()
        return make_on(devices, value, is_trained, wanted)

    def _take_variable(self, variable: Variable) -> None:  # noqa: B027  a strategy may have no use for it
        """Called when a variable was created in the scope."""


def _updated(var: Any, fn: Callable[..., Tree], args: Sequence[Tree], kwargs: dict[str, Tree]) -> list[Tree]:
    if not isinstance(var, DistributedVariable):
        return [fn(var, *select(tuple(args), 0), **select(kwargs, 0))]
    with var._updating():
        return [
            fn(component, *select(tuple(args), r), **select(kwargs, r)) for r, component in enumerate(var._components)
        ]
