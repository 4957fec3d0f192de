"""Variables: parameters that replicas share, and that a step may assign.

`Variable` has one value, and is the base class of the variables of `kinds`, which have
a component for each replica.

When a step uses a parameter or a variable, it uses the component of its own replica.
This is one of these tensors:

    a parameter of a module, or a variable that replicas write together     the
                                                                            replica's
                                                                            copy, made
                                                                            by the
                                                                            storage
    a variable that each replica writes for itself (`SyncOnReadVariable`)   one of the
                                                                            tensors that
                                                                            the variable
                                                                            holds
    outside of replicas                                                     the variable
                                                                            itself, or
                                                                            its value

All torch functions on a variable go through `__torch_function__`, which puts this
tensor in place of the variable.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

import numpy
import torch
from torch import nn
from typing_extensions import Self

from torchstrategy._base.context import (
    current_frame,
    is_default,
    local_object,
    require_cross_replica,
    without_autograd,
)
from torchstrategy._base.devices import memory_device
from torchstrategy._base.distributed_values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    describe_value,
)
from torchstrategy._base.errors import require_type
from torchstrategy._base.marks import version_of
from torchstrategy._base.objects.proxies import ShowsLocalGrad
from torchstrategy._base.options import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from torchstrategy._base.torch_internals import hide_from_compiler, make_parameter
from torchstrategy._base.tree import map_leaves
from torchstrategy._base.types import (
    Device,
    ReplicaContextLike,
    StrategyLike,
    Tree,
    VariableBase,
)
from torchstrategy._group.reductions import as_tensor

V = TypeVar("V", bound="Variable")
_Operation = Callable[[torch.Tensor, torch.Tensor], Any]


class Variable(ShowsLocalGrad, VariableBase):
    """A tensor that all replicas of a strategy share, and that a step may assign.

    It is a `torch.nn.Parameter`, so torch functions, optimizers and modules take it. If
    it is created in a strategy's `scope()`, it belongs to the strategy. A step that
    uses it gets the component of its own replica. If the step assigns it, `aggregation`
    says how the values of all replicas become one. Results of operations are plain
    tensors.

    `v.assign(x)` in a replica is a synchronization point: every replica makes the call,
    and then all read the new value. A variable with `synchronization=ON_READ` under
    `MirroredStrategy` has a value in each replica. A replica assigns its value without
    waiting for the others, and the values become one when the program reads the
    variable outside of replicas. Metrics are counted in this way.

    Write in place (`v.add_(1)`) only outside of replicas; in a replica, this is refused
    as with any parameter. So is setting an attribute of your own on the variable.

    `copy.deepcopy(v)` makes a variable of the same kind, which belongs to the same
    strategy, also outside of its scope. A pickle is loaded for the strategy in whose
    scope it is loaded.

    Args:
        initial_value: A tensor, which is copied; an array; a number; or a function
            without arguments that returns one.
        trainable: Whether it requires grad. None: if its dtype allows it and
            `synchronization` is not `ON_READ`.
        name: The name of the variable in messages.
        dtype: The dtype of the variable. None: that of `initial_value`.
        synchronization: When the values of replicas become one: see
            `VariableSynchronization`. Only `MirroredStrategy` with several replicas has
            components that can differ; other strategies only record it.
        aggregation: How the values become one: see `VariableAggregation`.

    Example:
        >>> strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
        >>> with strategy.scope():
        ...     v = torchstrategy.Variable(
        ...         1.0, aggregation=torchstrategy.VariableAggregation.SUM
        ...     )
        >>> def step():
        ...     context = torchstrategy.get_replica_context()
        ...     v.assign_add(context.replica_id_in_sync_group + torch.tensor(1.0))
        ...     return v.item()
        >>> strategy.experimental_local_results(strategy.run(step))
        (4.0, 4.0)
        >>> v
        MirroredVariable:{
          0: 4.0,
          1: 4.0
        }

    Differs from tf.distribute:
        To create a variable in a replica is a synchronization point: all replicas
        create it together. Replicas cannot make a mirrored variable diverge: assigning
        it in a replica without an aggregation is an error.

    Raises:
        ValueError: If an enum is none; if it is to be trained and its dtype cannot be;
            under `MirroredStrategy`, if `synchronization` is `NONE`, or integers are to
            be averaged.
        TypeError: If there is no tensor to be made of `initial_value`, or an argument
            is of the wrong kind.
        RuntimeError: From `run`, if the replicas create different ones; from
            `backward`, if it comes to one of which each replica has a value of its own.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/Variable
    """

    # The `__dict__` of a variable is for the attributes that the user sets on it, as on
    # any tensor.
    __slots__ = ("_strategy", "_wanted")
    _wanted: Wanted  # without the initial value
    _strategy: weakref.ref[StrategyLike] | None
    # Whether `_stand_in` is another tensor, and `_was_written` is to be called when it
    # is written.
    _watches = False

    def __new__(
        cls,
        initial_value: Any,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: torch.dtype | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> Self:
        made: Any = create(
            Wanted(initial_value, trainable, name, dtype, synchronization, aggregation)
        )
        return made  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """The name of the variable in messages."""
        return self._wanted.name or "Variable"

    @property
    def trainable(self) -> bool:
        """Whether the variable requires grad."""
        return bool(self.requires_grad)

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the values of replicas become one."""
        return self._wanted.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the values of replicas become one."""
        return self._wanted.aggregation

    def read_value(self) -> torch.Tensor:
        """The value of the variable, as a new tensor.

        Gradients flow back to the variable.
        """
        return self.clone()

    def numpy(self, *, force: bool = False) -> numpy.ndarray[Any, Any]:
        """The value of the variable, as a new array."""
        return (
            self.read_value().detach().numpy(force=force or self.device.type != "cpu")
        )

    def assign(self, value: Tree) -> Self:
        """Assigns a value.

        In a replica, if the replicas write the variable together, this is a
        synchronization point.

        Args:
            value: A tensor of the variable's shape, a number or an array. In a replica:
                the value of this replica.

        Returns:
            The variable.

        Example:
            >>> v = torchstrategy.Variable([1.0, 2.0])
            >>> v.assign([3.0, 4.0])
            Variable(tensor([3., 4.]))

        Raises:
            ValueError: If the shape is another, or the dtype cannot be converted; in a
                replica, if there is no aggregation, or `SUM` is to be taken of one and
                the same object in all replicas.
            TypeError: If outside of replicas the value is that of several replicas; or
                it is no number.
            RuntimeError: In another strategy's scope; from `run`, if not all replicas
                assign this variable.
        """
        return self._assign(torch.Tensor.copy_, value)

    def assign_add(self, delta: Tree) -> Self:
        """Adds to the variable, in the same way as `assign`."""
        return self._assign(torch.Tensor.add_, delta)

    def assign_sub(self, delta: Tree) -> Self:
        """Subtracts from the variable, in the same way as `assign`."""
        return self._assign(torch.Tensor.sub_, delta)

    @property
    def data(self) -> torch.Tensor:
        """A tensor with the variable's memory, and without history for autograd."""
        local: Any = local_object(self)
        return plain_data(self) if local is self else local.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        local: Any = local_object(self)
        if local is self:
            self._take_memory(value)
        else:
            local.data = value

    def __repr__(self) -> str:  # type: ignore[override]
        named = f"{self.name!r}, " if self._wanted.name else ""
        return f"Variable({named}{describe_value(self.detach())})"

    def __format__(self, format_spec: str) -> str:
        return format(self.detach(), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        memo[id(self)] = copied = self._make_copy(copy.deepcopy(vars(self), memo))
        return copied

    def __copy__(self) -> Variable:
        return self._make_copy(dict(vars(self)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _created_again, (self._as_it_is(), dict(vars(self)))

    def __setattr__(self, name: str, value: Any) -> None:
        self._require_outside(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._require_outside(name)
        super().__delattr__(name)

    def _require_outside(self, name: str) -> None:
        """Refuses a write on an attribute of the user's in a replica.

        All replicas share the one variable.
        """
        # torch's compiler has notes of its own on tensors.
        is_known = hasattr(
            type(getattr(type(self), name, None)), "__set__"
        ) or name.startswith("_dynamo_")
        if (
            not is_known
            and (context := self._replica()) is not None
            and context.num_replicas_in_sync > 1
        ):
            raise RuntimeError(
                f"The step wrote the attribute {name!r} of {self.name} in a replica. "
                "All replicas share the variable, and one would read what another "
                "wrote. Write it outside of strategy.run; or keep it on the module."
            )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        used: dict[int, tuple[Variable, torch.Tensor]] = {}
        args, kwargs = _with_stand_ins(args, used), _with_stand_ins(kwargs or {}, used)
        watched = [(v, t, version_of(t)) for v, t in used.values() if v._watches]
        if any(map(_has_a_say, types)):
            result = func(*_without_variables(args), **_without_variables(kwargs))
        else:
            result = _call_plainly(func, (), args, kwargs)
        for variable, tensor, before in watched:
            if version_of(tensor) != before:
                variable._was_written(tensor)
                result = variable if result is tensor else result
        return result

    def _stand_in(self) -> torch.Tensor:
        """The tensor that torch functions use in place of the variable.

        Each replica has its own such tensor, and so has the caller outside of replicas.
        """
        local: torch.Tensor = local_object(self)
        if local is self and (context := self._replica()) is not None:
            # It was created in this run, and has no copies yet. Gradients flow back to
            # the variable.
            there: torch.Tensor = _call_plainly(
                torch.Tensor.to, (), (self, memory_device(context.devices[0])), {}
            )
            return there
        return local

    def _assign(self, operation: _Operation, value: Tree) -> Self:
        """Writes a value, in the caller's replica or outside."""
        context = self._replica()
        if is_variable(value):
            value = value.read_value()
        if context is None or (
            context.num_replicas_in_sync == 1 and local_object(self) is self
        ):
            if context is None:
                self._require_here("assign")
            write(self, self, operation, value)
            return self
        if (
            self.aggregation is VariableAggregation.NONE
            and context.num_replicas_in_sync > 1
        ):
            raise ValueError(
                f"{self.name} was assigned in a replica, and has no aggregation. Make "
                "it with SUM, MEAN or ONLY_FIRST_REPLICA of "
                "torchstrategy.VariableAggregation, or assign it outside of "
                "strategy.run."
            )
        context.merge_call(_assign_together, args=((self, operation), value))
        return self

    def _take_memory(self, value: torch.Tensor) -> None:
        """Gives the variable other memory, as `module.double()` does.

        The memory may have another dtype.
        """
        _call_plainly(set_plain_data, (), (self, value), {})

    def _was_written(self, stand_in: torch.Tensor) -> None:
        """Called when an operation has written on the tensor in a variable's place."""

    def _replica(self) -> ReplicaContextLike | None:
        """The context of the replica that the caller is in.

        It is None unless the variable belongs to the replica's strategy.
        """
        frame = current_frame()
        if frame is None or frame.replica_context is None:
            return None
        is_own = local_object(self) is not self or (
            self._strategy is not None and self._strategy() is frame.strategy
        )
        return frame.replica_context if is_own else None

    def _require_here(self, what: str) -> None:
        """Raises an error if the caller is in the context of another strategy."""
        strategy = None if self._strategy is None else self._strategy()
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            require_cross_replica(strategy, f"Variable.{what}")

    def _make_copy(self, attributes: dict[str, Any]) -> Variable:
        """A copy of this kind, which belongs to the same strategy, wherever it is made.

        In a replica of this strategy it is one for all replicas, as one that is created
        there is.

        Args:
            attributes: What the user has set on the variable, for the copy.

        Raises:
            RuntimeError: In another strategy's scope; from `run`, if the replicas copy
                different variables.
        """
        context = self._replica()
        if context is not None and context.num_replicas_in_sync > 1:
            made: Variable = context.merge_call(
                _copy_for_all, args=(self, _Given(attributes))
            )
            return made
        if context is None:
            self._require_here("__deepcopy__")
        with without_autograd():
            copied = self._alike()
        copied._wanted, copied._strategy = self._wanted, self._strategy
        vars(copied).update(attributes)
        strategy = None if self._strategy is None else self._strategy()
        if strategy is not None:
            strategy.extended._take_variable(copied)
        return copied

    def _alike(self) -> Variable:
        """A variable of this kind with the same value."""
        return make_data(type(self), plain_alias(self), None, self.requires_grad)

    def _as_it_is(self) -> Wanted:
        """The arguments with which an equal variable is created."""
        return replace(
            self._wanted,
            initial_value=self.detach().clone(),
            trainable=self.trainable,
            dtype=None,
        )


# If `torch.compile` traced this method, it would find the component of one replica, and
# use it in all replicas.
hide_from_compiler(Variable.__torch_function__.__func__)  # type: ignore[attr-defined]

_DATA: Any = torch.Tensor.data
plain_data: Callable[[torch.Tensor], torch.Tensor] = _DATA.__get__
set_plain_data: Callable[[torch.Tensor, torch.Tensor], None] = _DATA.__set__
_call_plainly: Callable[
    [Callable[..., Any], tuple[()], Any, Mapping[str, Any]], Any
] = nn.Parameter.__torch_function__


def is_variable(thing: object) -> bool:
    """Whether an object is a variable.

    `isinstance` is slow for subclasses of `torch.nn.Parameter`.
    """
    return issubclass(type(thing), Variable)


def _with_stand_ins(value: Any, used: dict[int, tuple[Variable, torch.Tensor]]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_with_stand_ins(item, used) for item in value])
    if kind is dict:
        return {key: _with_stand_ins(item, used) for key, item in value.items()}
    if not issubclass(kind, Variable):
        return value
    if id(value) not in used:
        used[id(value)] = value, value._stand_in()
    return used[id(value)][1]


def _has_a_say(kind: Any) -> bool:
    """Whether a class of tensors has a `__torch_function__` that must be called."""
    says_nothing = (
        kind is torch.Tensor
        or kind.__torch_function__ is nn.Parameter.__torch_function__
    )
    return not says_nothing and not issubclass(kind, Variable)


def _without_variables(value: Any) -> Any:
    """The arguments for the `__torch_function__` of another class.

    They hold no variables, since that class may not know them.
    """

    def plain(leaf: Any) -> Any:
        return (
            _call_plainly(torch.Tensor.view_as, (), (leaf, leaf), {})
            if is_variable(leaf)
            else leaf
        )

    return map_leaves(plain, value)


def plain_alias(variable: Variable) -> torch.Tensor:
    """A plain tensor that shares the memory of a variable."""
    alias: torch.Tensor = _call_plainly(torch.Tensor.detach, (), (variable,), {})
    return alias


# Runs of several threads may add to one variable. The lock is reentrant, since a mode
# of the caller may write another variable during a write.
_writing = threading.RLock()


def write(
    variable: Variable, memory: torch.Tensor, operation: _Operation, value: Tree
) -> None:
    """Does `assign`, `assign_add` or `assign_sub` on the memory of a variable.

    It also does so on the memory of a component.

    Raises:
        ValueError: If the value does not fit.
        TypeError: If it is no tensor or number, or one of several replicas.
    """
    if type(value) is PerReplica:
        raise TypeError(
            f"{variable.name} was given a value for each replica, outside of them: "
            "which of them it is to have is not known. Reduce it first, "
            "strategy.reduce(...), or assign it in the step, each replica its own."
        )
    with without_autograd():
        given = as_tensor(value.values[0] if type(value) is Mirrored else value)
        if given.shape != memory.shape:
            raise ValueError(
                f"{variable.name} has shape {tuple(memory.shape)}; "
                f"{tuple(given.shape)} does not fit."
            )
        if not torch.can_cast(given.dtype, memory.dtype):
            raise ValueError(
                f"{variable.name} holds {memory.dtype}: {given.dtype} cannot be "
                "converted without loss."
            )
        with _writing:
            _call_plainly(
                operation, (), (memory, given.to(memory.device, memory.dtype)), {}
            )


@final
@dataclass(frozen=True)
class Wanted:
    """The arguments with which a variable is created.

    They are equal if they may create one variable in several replicas.
    """

    initial_value: Any = field(compare=False, repr=False)
    trainable: bool | None
    name: str | None
    dtype: torch.dtype | None
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    def __post_init__(self) -> None:
        require_type(
            self.trainable,
            bool | None,
            "Variable(trainable=...) is True, False or None",
        )
        require_type(self.name, str | None, "Variable(name=...) is a string or None")
        for given, kind in (
            (self.synchronization, VariableSynchronization),
            (self.aggregation, VariableAggregation),
        ):
            if not isinstance(given, kind):
                raise ValueError(
                    f"{given!r} is no torchstrategy.{kind.__name__}: "
                    f"{', '.join(kind.__members__)}."
                )

    def value(self) -> torch.Tensor:
        """The initial value.

        Raises:
            TypeError: If it is no tensor, and none can be made of it.
        """
        given = self.initial_value
        if callable(given) and not isinstance(given, torch.Tensor):
            given = given()
        given = given.values[0] if type(given) is Mirrored else given
        if isinstance(given, DistributedValues) and not isinstance(given, torch.Tensor):
            raise TypeError(
                "A variable has one initial value; it was given a value for each "
                "replica."
            )
        try:
            return torch.as_tensor(given, dtype=self.dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                "A variable's initial value is a tensor, an array or numbers; got "
                f"{given!r}."
            ) from error

    def is_trained(self, dtype: torch.dtype) -> bool:
        """Whether the variable requires grad.

        Raises:
            ValueError: If its dtype cannot.
        """
        can_be = dtype.is_floating_point or dtype.is_complex
        if self.trainable and not can_be:
            raise ValueError(
                f"Variable(trainable=True) of {dtype}: only floating-point numbers "
                "have gradients."
            )
        if self.trainable is None:
            return (
                can_be and self.synchronization is not VariableSynchronization.ON_READ
            )
        return self.trainable


def create(wanted: Wanted) -> Variable:
    """Creates a variable for the strategy of the caller.

    In a replica, it does so together with the other replicas.
    """
    frame = current_frame()
    if frame is None or is_default(frame.strategy):
        return _make(wanted, None)
    if frame.replica_context is None or frame.strategy.num_replicas_in_sync == 1:
        return _make(wanted, frame.strategy)
    made: Variable = frame.replica_context.merge_call(_make_for_all, args=(wanted,))
    return made


def _created_again(wanted: Wanted, attributes: dict[str, Any]) -> Variable:
    """Creates a variable out of a pickle, for the strategy of the caller."""
    variable = create(wanted)
    vars(variable).update(attributes)
    return variable


@final
@dataclass(frozen=True)
class _Given:
    """Attributes that a replica brings to where all copy a variable."""

    attributes: dict[str, Any]


def _copy_for_all(strategy: StrategyLike, brought: Tree, given: Tree) -> Variable:
    variable, *others = brought.values if type(brought) is PerReplica else (brought,)
    if any(other is not variable for other in others):
        raise RuntimeError(
            f"The replicas copied different variables at once: {variable.name} in one. "
            "A copy is one for all replicas: every replica copies the same variables "
            "in the same order."
        )
    first: _Given = given.values[0] if isinstance(given, DistributedValues) else given
    copied: Variable = variable._make_copy(first.attributes)
    return copied


def _make(wanted: Wanted, strategy: StrategyLike | None) -> Variable:
    with without_autograd():
        value = wanted.value()
        is_trained = wanted.is_trained(value.dtype)
        if strategy is None:
            variable = make_data(Variable, value, None, is_trained)
        else:
            variable = strategy.extended._make_variable(value, is_trained, wanted)
    variable._wanted = replace(wanted, initial_value=None)
    variable._strategy = None if strategy is None else weakref.ref(strategy)
    if strategy is not None:
        strategy.extended._take_variable(variable)
    return variable


def _make_for_all(strategy: StrategyLike, brought: Tree) -> Variable:
    wishes: list[Wanted] = (
        list(brought.values) if isinstance(brought, DistributedValues) else [brought]
    )
    for other in wishes[1:]:
        if other != wishes[0]:
            raise RuntimeError(
                "A variable that a replica creates is one for all; these created "
                f"different ones: mismatching name or settings {wishes[0]} and "
                f"{other}. Create the same ones in the same order, or before "
                "strategy.run."
            )
    return _make(wishes[0], strategy)


def _assign_together(
    strategy: StrategyLike, what: tuple[Tree, Tree], value: Tree
) -> None:
    brought_variable, brought_operation = what
    # In each, what all replicas have brought: one object, if all have brought the same.
    variable, *others = (
        brought_variable.values
        if type(brought_variable) is PerReplica
        else (brought_variable,)
    )
    operation, *ways = (
        brought_operation.values
        if type(brought_operation) is PerReplica
        else (brought_operation,)
    )
    if any(other is not variable for other in others) or any(
        way is not operation for way in ways
    ):
        raise RuntimeError(
            "The replicas assigned different variables, or in different ways, at once: "
            f"{variable.name} in one. Every replica makes the same assignments in the "
            "same order."
        )
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        value = strategy.extended._first_of(value)
    # With `VariableAggregation.NONE`, there is only one replica.
    elif variable.aggregation is not VariableAggregation.NONE:
        with without_autograd():
            value = strategy.extended._reduce_leaf(
                ReduceOp.from_variable_aggregation(variable.aggregation), value
            )
    write(variable, variable, operation, value)


def make_data(
    kind: type[V], value: torch.Tensor, device: Device | None, is_trained: bool
) -> V:
    """A variable of a class `kind` with a copy of a value, on a device.

    None: the device of the value.
    """
    return make_parameter(
        kind,
        value.to(value.device if device is None else device, copy=True),
        is_trained,
    )
