"""Variables with a component for each replica, and methods that take variables.

The methods are those of `Strategy.extended`.

The component of a replica is a copy of the value, or a value of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from typing_extensions import Self

from torchstrategy._base.context import (
    Frame,
    current_frame,
    current_strategy,
    require_cross_replica,
    without_autograd,
)
from torchstrategy._base.devices import memory_device
from torchstrategy._base.distributed_values import (
    DistributedValues,
    PerReplica,
    describe_components,
    regroup,
    select,
)
from torchstrategy._base.errors import require_type
from torchstrategy._base.marks import version_of
from torchstrategy._base.options import VariableAggregation, VariableSynchronization
from torchstrategy._base.torch_internals import make_parameter
from torchstrategy._base.tree import map_leaves, tree_leaves
from torchstrategy._base.types import Device, StrategyLike, Tree
from torchstrategy._group.transfer import sum_on
from torchstrategy._group.workers import LONE, Workers
from torchstrategy._variables.variable import (
    Variable,
    Wanted,
    is_variable,
    make_data,
    plain_alias,
    write,
)


class DistributedVariable(Variable):
    """A variable with a component for each replica."""

    __slots__ = ("_held",)
    _held: tuple[Component, ...]  # empty: they are made when somebody reads them

    @property
    def values(self) -> tuple[Component, ...]:  # type: ignore[override]
        """The component of each replica."""
        if not self._held:
            with without_autograd():
                self._held = tuple(
                    Component.of(self, memory) for memory in self._memories()
                )
        return self._held

    _components = values

    def _memories(self) -> Sequence[torch.Tensor]:
        """The tensors that hold the values of the components."""
        raise NotImplementedError

    def _in_replica(self, replica: int) -> Self:
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            super().__repr__()
            if self._replica() is not None
            else describe_components(type(self).__name__, self._components)
        )


DistributedValues.register(DistributedVariable)


@final
class MirroredVariable(DistributedVariable):
    """A variable with equal copies on the devices of all replicas.

    The variable itself is that of the first replica.
    """

    __slots__ = ("_devices",)
    _devices: tuple[Device, ...]

    def _memories(self) -> Sequence[torch.Tensor]:
        first = plain_alias(self)
        return [
            first,
            *(
                torch.empty_like(first, device=memory_device(device))
                for device in self._devices[1:]
            ),
        ]

    def _take_memory(self, value: torch.Tensor) -> None:
        super()._take_memory(value)
        self._held = ()

    def _alike(self) -> MirroredVariable:
        made = make_data(MirroredVariable, plain_alias(self), None, self.requires_grad)
        made._devices, made._held = self._devices, ()
        return made

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A block in which the components may be written.

        The caller has to write the same on all of them.
        """
        for component in self._components:
            component._stand_in()
            component.is_open = True
        try:
            yield
        finally:
            for component in self._components:
                component.is_open, component.known = False, -1


@final
class SyncOnReadVariable(DistributedVariable):
    """A variable with a value in each replica.

    The values become one when it is read outside of replicas.
    """

    __slots__ = ("_is_as_made", "_parts", "_workers")
    _watches = True
    _parts: list[torch.Tensor]
    _is_as_made: bool  # whether its values are still those with which it was made
    _workers: Workers

    def _memories(self) -> Sequence[torch.Tensor]:
        return self._parts

    # Of the replica's own value; outside of replicas, of the first replica's. They are
    # known also if it cannot be read.
    shape: Any = property(
        lambda self: self._part().shape, doc="The shape of the variable."
    )
    dtype: Any = property(
        lambda self: self._part().dtype, doc="The dtype of the variable."
    )
    device: Any = property(
        lambda self: self._part().device, doc="The device of the variable."
    )

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the values require grad.

        Each replica can differentiate with respect to its own value, but backward must
        not reach it.
        """
        return self._parts[0].requires_grad

    @property
    def grad(self) -> None:
        """Always None.

        The gradient of the whole batch with respect to one replica's value does not
        exist.
        """
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            _refuse_gradient(self)

    def _take_memory(self, value: torch.Tensor) -> None:
        self._take_parts(
            [part.detach().to(value.dtype, copy=True) for part in self._parts],
            self.requires_grad,
        )
        self.assign(value)

    def _take_parts(self, parts: Sequence[torch.Tensor], is_trained: bool) -> None:
        self._parts, self._held = (
            [part.requires_grad_(is_trained) for part in parts],
            (),
        )
        for part in self._parts if is_trained else ():
            part.register_post_accumulate_grad_hook(_refuse_gradient)

    def _alike(self) -> SyncOnReadVariable:
        made = make_data(SyncOnReadVariable, plain_alias(self), None, False)
        made._workers, made._is_as_made = self._workers, self._is_as_made
        made._take_parts(
            [part.detach().clone() for part in self._parts], self.requires_grad
        )
        return made

    def _part(self) -> torch.Tensor:
        context = self._replica()
        # Of several processes, each has the values of its own replicas.
        return self._parts[
            0
            if context is None
            else context.replica_id_in_sync_group % len(self._parts)
        ]

    def _stand_in(self) -> torch.Tensor:
        return self._part() if self._replica() is not None else self._read()

    def _read(self) -> torch.Tensor:
        self._require_here("read_value")
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self.name} has a value in each replica and no aggregation, so that "
                "it cannot be read outside of them. Make it with an aggregation; or "
                "take strategy.experimental_local_results(variable)."
            )
        with without_autograd():
            point = f"the reading of {self.name}"
            if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                first = self._parts[0].clone()
                self._workers.broadcast([first], 0, point)
                return first
            (total,) = self._workers.all_reduce(
                [sum_on(self._parts, self._parts[0].device)], point
            )
            return (
                total / self._num_parts
                if self.aggregation is VariableAggregation.MEAN
                else total
            )

    @property
    def _num_parts(self) -> int:
        """How many values the replicas of all processes have."""
        return len(self._parts) * self._workers.count

    def _was_written(self, stand_in: torch.Tensor) -> None:
        if self._replica() is None:
            self.assign(stand_in)

    def _take_as_made(self) -> list[torch.Tensor]:
        """The values with which the variable was made, which it returns once.

        With these values, the workers begin alike. After an assignment, there are none.
        """
        parts, self._is_as_made = self._parts if self._is_as_made else [], False
        return parts

    def _assign(self, operation: Callable[..., Any], value: Tree) -> Self:
        self._is_as_made = False
        if self._replica() is not None:
            write(self, self._part(), operation, value)
            return self
        self._require_here("assign")
        is_sum = self.aggregation is VariableAggregation.SUM
        if is_sum and operation is not torch.Tensor.copy_:
            raise ValueError(
                f"{self.name} is the sum of a value in each replica. Which of them is "
                "to change when something is added to it outside of the replicas is "
                "not known: assign it, or add to it in the step."
            )
        for part, share in zip(
            self._parts,
            self._shares(value) if is_sum else [value] * len(self._parts),
            strict=True,
        ):
            write(self, part, operation, share)
        return self

    def _shares(self, value: Tree) -> list[Tree]:
        """The parts of a value, one for each replica, whose sum is the value."""
        with without_autograd():
            whole, count = torch.empty_like(self._parts[0]), self._num_parts
            write(self, whole, torch.Tensor.copy_, value)
            if whole.is_floating_point() or whole.is_complex():
                return [whole / count] * len(self._parts)
            each = whole // count
            first = each if self._workers.index else whole - each * (count - 1)
            return [first, *[each] * (len(self._parts) - 1)]


@contextmanager
def unwritten(variables: Sequence[SyncOnReadVariable]) -> Iterator[None]:
    """A block after which variables have the values of before.

    So what an understudy writes in it does not count.

    See Note [Why a worker without rows runs the step] in `_group/participants`.
    """
    parts = [part for variable in variables for part in variable._parts]
    values = [part.detach().clone() for part in parts]
    try:
        yield
    finally:
        with without_autograd():
            for part, value in zip(parts, values, strict=True):
                part.copy_(value)


@final
class Component(Variable):
    """The component of a distributed variable in one replica.

    The program holds it outside of this replica.
    """

    __slots__ = ("_memory", "container", "is_open", "known")
    _watches = True
    container: weakref.ref[DistributedVariable]
    is_open: bool  # whether the component may be written now
    # The version of the first component when this one was last copied from it.
    known: int
    _memory: torch.Tensor

    @staticmethod
    def of(container: DistributedVariable, memory: torch.Tensor) -> Component:
        """The component of a variable whose value is in `memory` or copied to it."""
        component = make_parameter(Component, memory, False)
        component.container, component._memory = weakref.ref(container), memory
        component._wanted, component._strategy = container._wanted, container._strategy
        component.is_open, component.known = False, -1
        return component

    def _stand_in(self) -> torch.Tensor:
        """The present value of the component, brought up to date if need be."""
        container = self.container()
        if isinstance(container, MirroredVariable) and not self.is_open:
            first = container._components[0]._memory
            if self._memory is not first and self.known != version_of(first):
                with without_autograd():
                    self._memory.copy_(first)
                self.known = version_of(first)
        return self._memory

    def _assign(self, operation: Callable[..., Any], value: Tree) -> Self:
        self._require_open()
        write(self, self._stand_in(), operation, value)
        return self

    def _alike(self) -> Variable:
        return make_data(Variable, self._stand_in(), None, self.requires_grad)

    def _require_open(self, stand_in: torch.Tensor | None = None) -> None:
        if isinstance(self.container(), MirroredVariable) and not self.is_open:
            raise RuntimeError(
                f"A component of {self.name} was assigned by itself: the components of "
                "a mirrored variable are always equal. Assign the variable, or write "
                "on its components in strategy.extended.update(variable, fn)."
            )

    _was_written = _require_open


def _refuse_gradient(value: torch.Tensor) -> None:
    raise RuntimeError(
        f"A gradient came to a torchstrategy.Variable of shape {tuple(value.shape)} "
        "with trainable=True and synchronization=ON_READ: each replica has its own "
        "value, and there is no gradient of the whole batch. Leave out "
        "synchronization, or take each replica's own gradient: "
        "torch.autograd.grad(loss, variable)."
    )


class VariablesOfExtended:
    """What `StrategyExtended` knows of its strategy, and its methods for variables."""

    def __init__(self, container_strategy: StrategyLike | None = None) -> None:
        self._strategy_reference: weakref.ref[StrategyLike] | None = None
        if container_strategy is not None:
            self._bind(container_strategy)

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """Where parameters live."""
        raise self._missing("parameter_devices")

    def variable_created_in_scope(self, v: nn.Module | torch.Tensor) -> bool:
        """Whether you created a module or parameter in a scope of this strategy.

        A parameter also counts if you gave it to a module there.

        Raises:
            TypeError: If it is neither.
        """
        raise self._missing("variable_created_in_scope")

    _workers: Workers = LONE  # the processes that train together

    def update(
        self,
        var: torch.Tensor,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        """Calls `fn(component, *args, **kwargs)` for each component, to write it.

        Args:
            var: A `Variable`, or a parameter of this strategy, which has only one
                component.
            fn: A function that writes on its component. It has to write the same on all
                components.
            args: Further arguments of `fn`. In place of a mirrored value, `fn` gets the
                component of the replica.
            kwargs: Further arguments of `fn` by name, in the same way.
            group: Whether the results of the calls are put together as those of `run`
                are. If not, the result has, at each leaf, a tuple of the results of all
                calls.

        Example:
            >>> strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
            >>> with strategy.scope():
            ...     v = torchstrategy.Variable(1.0)
            >>> strategy.extended.update(
            ...     v, lambda component: component.assign_add(2.0).item(), group=False
            ... )
            (3.0, 3.0)

        Differs from tf.distribute:
            The components of a mirrored variable stay equal: after the calls, all have
            the value of the first one.

        Raises:
            TypeError: If `var` is neither a variable nor a parameter.
            ValueError: If an argument is a value for each replica.
            RuntimeError: If called in a replica or in another strategy's scope.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/StrategyExtended#update
        """
        require_cross_replica(self._container_strategy(), "update")
        require_type(
            var,
            nn.Parameter,
            "update writes a variable, torchstrategy.Variable(value, trainable=False)",
        )
        if any(type(leaf) is PerReplica for leaf in tree_leaves((args, kwargs))):
            raise ValueError(
                "update was given a value for each replica, and all components are "
                "written with the same. Reduce it first: "
                "strategy.extended.reduce_to(reduce_op, value, destinations=variable)."
            )
        components: Sequence[Any] = (
            var._components if isinstance(var, DistributedVariable) else (var,)
        )
        opened = var.updating() if isinstance(var, MirroredVariable) else nullcontext()
        with Frame(self._container_strategy()), opened:
            return self._call_for_each(fn, components, args, kwargs, group)

    def colocate_vars_with(
        self, colocate_with_variable: torch.Tensor
    ) -> AbstractContextManager[None]:
        """A block in which variables are created on the devices of another variable.

        All variables of one strategy are on the same devices anyway.

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
        if current_strategy() is not strategy or (
            frame is not None and frame.replica_context is not None
        ):
            raise RuntimeError(
                f'Need to be inside "with strategy.scope()" for {strategy!r} in '
                "colocate_vars_with."
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                "colocate_vars_with takes a variable that was created in this "
                "strategy's scope."
            )
        return nullcontext()

    def value_container(self, value: Tree) -> Tree:
        """The variable that a component belongs to; anything else is returned as it is.

        Example:
            >>> strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
            >>> with strategy.scope():
            ...     v = torchstrategy.Variable(1.0)
            >>> component = strategy.experimental_local_results(v)[1]
            >>> strategy.extended.value_container(component) is v
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
        require_type(v, torch.Tensor, "read_var reads a torchstrategy.Variable")
        return v.clone() if is_variable(v) else v

    # What a subclass can rely on

    def _select(self, tree: Tree, replica: int) -> Tree:
        """`tree` as a replica sees it, with its component of distributed values."""
        return select(tree, replica)

    def _regroup(self, by_replica: Sequence[Tree]) -> Tree:
        """One tree out of what replicas returned.

        A leaf is the object that is the same in all replicas, or a `DistributedValues`.
        """
        return regroup(by_replica, are_results=True)

    def _container_strategy(self) -> StrategyLike:
        """The strategy that this is of."""
        strategy = (
            self._strategy_reference() if self._strategy_reference is not None else None
        )
        if strategy is None:
            raise RuntimeError(
                "The strategy of this `extended` is gone. Keep the strategy, not only "
                "its `extended`."
            )
        return strategy

    def _bind(self, strategy: StrategyLike) -> None:
        owner = self._strategy_reference and self._strategy_reference()
        if (
            owner is not None
            and owner is not strategy
            and getattr(owner, "_extended", None) is self
        ):
            raise ValueError(
                f"The `extended` belongs to {owner!r}. Two cannot share one: try "
                "copy.deepcopy(strategy)."
            )
        self._strategy_reference = weakref.ref(strategy)

    def _missing(self, name: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} does not bring {name}, which this needs: define it "
            "there."
        )

    def _call_for_each(
        self,
        fn: Callable[..., Tree],
        places: Sequence[Any],
        args: Sequence[Tree],
        kwargs: Any,
        group: bool,
    ) -> Tree:
        """What `fn` returns for each of several places, joined to one value.

        Each call gets the place's components of the arguments.
        """
        results = [
            fn(one, *select(tuple(args), i), **select(dict(kwargs or {}), i))
            for i, one in enumerate(places)
        ]
        return (
            regroup(results)
            if group
            else map_leaves(
                lambda leaf: leaf.values, regroup(results, always_wrap=True)
            )
        )

    def _make_variable(
        self, value: torch.Tensor, is_trained: bool, wanted: Wanted
    ) -> Variable:
        """A new variable of the kind that suits the strategy, with a value's copy."""
        try:
            devices = self.parameter_devices
        # A strategy of the user's own class, which keeps no parameters.
        except NotImplementedError:
            devices = ()
        first = memory_device(devices[0]) if devices else None
        if len(devices) * self._workers.count < 2:
            return make_data(Variable, value, first, is_trained)
        if wanted.synchronization is VariableSynchronization.NONE:
            raise ValueError(
                "Variable(synchronization=NONE) in the scope of a strategy that keeps "
                "a copy in each replica: they have to be synchronized, on writing or "
                "on reading. Leave it out, or say ON_READ."
            )
        is_integer = not (value.dtype.is_floating_point or value.dtype.is_complex)
        if is_integer and wanted.aggregation is VariableAggregation.MEAN:
            raise ValueError(
                f"Variable(aggregation=MEAN) of {value.dtype}: the mean of integers is "
                "none. Use a float."
            )
        if wanted.synchronization is not VariableSynchronization.ON_READ:
            mirrored = make_data(MirroredVariable, value, first, is_trained)
            mirrored._devices, mirrored._held = tuple(devices), ()
            return mirrored
        on_read = make_data(SyncOnReadVariable, value, first, False)
        on_read._workers, on_read._is_as_made = self._workers, True
        on_read._take_parts(
            [value.detach().to(memory_device(device), copy=True) for device in devices],
            is_trained,
        )
        return on_read

    def _first_of(self, value: Tree) -> Tree:
        """The value of the first replica that is present."""
        return value.values[0] if type(value) is PerReplica else value

    def _take_variable(self, variable: Variable) -> None:
        """Called when a variable was created in the scope."""
