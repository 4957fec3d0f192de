"""Variables with a component for each replica, which is a copy of the value or a value of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from typing_extensions import Self

from torchstrategy._communication.transfer import added
from torchstrategy._core.context import undisturbed
from torchstrategy._core.devices import memory_device
from torchstrategy._core.distributed_values import DistributedValues, listed
from torchstrategy._core.options import VariableAggregation, VariableSynchronization
from torchstrategy._core.torch_internals import make_parameter, version
from torchstrategy._core.types import Device, Tree
from torchstrategy._variables.variable import Variable, Wanted, make_data, plain_alias, write


class DistributedVariable(Variable):
    """A variable with a component for each replica."""

    _held: tuple[Component, ...] = ()  # empty: they are made when somebody reads them

    @property
    def values(self) -> tuple[Component, ...]:  # type: ignore[override]
        """The component of each replica."""
        return self._components

    @property
    def _components(self) -> tuple[Component, ...]:
        if not self._held:
            with undisturbed():
                self._held = tuple(Component.of(self, memory) for memory in self._memories())
        return self._held

    def _memories(self) -> Sequence[torch.Tensor]:
        """The tensors that hold the values of the components."""
        raise NotImplementedError

    def _in_replica(self, replica: int) -> Self:
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return super().__repr__() if self._replica() is not None else listed(type(self).__name__, self._components)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """A block in which the components may be written. The caller has to write the same on all of them."""
        yield


DistributedValues.register(DistributedVariable)


@final
class MirroredVariable(DistributedVariable):
    """A variable with equal copies on the devices of all replicas. The variable itself is that of the first replica."""

    _devices: tuple[Device, ...]

    def _memories(self) -> Sequence[torch.Tensor]:
        first = plain_alias(self)
        return [first, *(torch.empty_like(first, device=memory_device(device)) for device in self._devices[1:])]

    def _take_memory(self, value: torch.Tensor) -> None:
        super()._take_memory(value)
        self._held = ()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        for component in self._components:
            component.memory()
            component.is_open = True
        try:
            yield
        finally:
            for component in self._components:
                component.is_open, component.known = False, -1


@final
class SyncOnReadVariable(DistributedVariable):
    """A variable with a value in each replica. The values become one when it is read outside of replicas."""

    _watches = True
    _parts: list[torch.Tensor]

    def _memories(self) -> Sequence[torch.Tensor]:
        return self._parts

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the variable, also if its value cannot be read."""
        return self._part().shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the variable, also if its value cannot be read."""
        return self._part().dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the replica's own value; outside of replicas, the device of the first replica's value."""
        return self._part().device

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the values require grad.

        Each replica can differentiate with respect to its own value, but backward must not reach it.
        """
        return self._parts[0].requires_grad

    @property
    def grad(self) -> None:
        """Always None, since there is no gradient of the whole batch with respect to one replica's value."""
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            _refuse_gradient(self)

    def _take_memory(self, value: torch.Tensor) -> None:
        self._take_parts([part.detach().to(value.dtype, copy=True) for part in self._parts], self.requires_grad)
        self.assign(value)

    def _take_parts(self, parts: Sequence[torch.Tensor], is_trained: bool) -> None:
        self._parts, self._held = [part.requires_grad_(is_trained) for part in parts], ()
        for part in self._parts if is_trained else ():
            part.register_post_accumulate_grad_hook(_refuse_gradient)

    def _part(self) -> torch.Tensor:
        context = self._replica()
        return self._parts[0 if context is None else context.replica_id_in_sync_group]

    def _stand_in(self) -> torch.Tensor:
        return self._part() if self._replica() is not None else self._read()

    def _read(self) -> torch.Tensor:
        self._require_here("read_value")
        if self._aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self._name} has a value in each replica and no aggregation, so that it cannot be read outside of "
                "them. Make it with an aggregation; or take strategy.experimental_local_results(variable)."
            )
        with undisturbed():
            if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                return self._parts[0].clone()
            total = added(self._parts, self._parts[0].device)
            return total / len(self._parts) if self._aggregation is VariableAggregation.MEAN else total

    def _was_written(self, stand_in: torch.Tensor) -> None:
        if self._replica() is None:
            self.assign(stand_in)

    def _assign(self, operation: Callable[..., Any], value: Tree) -> Self:
        if self._replica() is not None:
            write(self, self._part(), operation, value)
            return self
        self._require_here("assign")
        is_sum = self._aggregation is VariableAggregation.SUM
        if is_sum and operation is not torch.Tensor.copy_:
            raise ValueError(
                f"{self._name} is the sum of a value in each replica. Which of them is to change when something is "
                "added to it outside of the replicas is not known: assign it, or add to it in the step."
            )
        for part, share in zip(self._parts, self._shares(value) if is_sum else [value] * len(self._parts), strict=True):
            write(self, part, operation, share)
        return self

    def _shares(self, value: Tree) -> list[Tree]:
        """The parts of a value, one for each replica, whose sum is the value."""
        with undisturbed():
            whole, count = torch.empty_like(self._parts[0]), len(self._parts)
            write(self, whole, torch.Tensor.copy_, value)
            if whole.is_floating_point() or whole.is_complex():
                return [whole / count] * count
            each = whole // count
            return [whole - each * (count - 1), *[each] * (count - 1)]


@final
class Component(Variable):
    """The component of a distributed variable in one replica, as the program has it outside of this replica."""

    _watches = True
    container: weakref.ref[DistributedVariable]
    is_open = False  # whether the component may be written now
    known = -1  # the version of the first component when this one was last copied from it
    _memory: torch.Tensor

    @staticmethod
    def of(container: DistributedVariable, memory: torch.Tensor) -> Component:
        """The component of a variable whose value is in `memory`, or is copied to it."""
        component = make_parameter(Component, memory, False)
        assert isinstance(component, Component)
        component.container, component._memory = weakref.ref(container), memory
        component._name, component._strategy = container._name, container._strategy
        component._synchronization, component._aggregation = container._synchronization, container._aggregation
        return component

    def memory(self) -> torch.Tensor:
        """The present value of the component, brought up to date if need be."""
        container = self.container()
        if isinstance(container, MirroredVariable) and not self.is_open:
            first = container._components[0]._memory
            if self._memory is not first and self.known != version(first):
                with undisturbed():
                    self._memory.copy_(first)
                self.known = version(first)
        return self._memory

    def _stand_in(self) -> torch.Tensor:
        return self.memory()

    def _assign(self, operation: Callable[..., Any], value: Tree) -> Self:
        self._require_open()
        write(self, self.memory(), operation, value)
        return self

    def _was_written(self, stand_in: torch.Tensor) -> None:
        self._require_open()

    def _require_open(self) -> None:
        if isinstance(self.container(), MirroredVariable) and not self.is_open:
            raise RuntimeError(
                f"A component of {self._name} was assigned by itself: the components of a mirrored variable are always "
                "equal. Assign the variable, or write on its components in strategy.extended.update(variable, fn)."
            )


def _refuse_gradient(value: torch.Tensor) -> None:
    raise RuntimeError(
        f"A gradient came to a torchstrategy.Variable of shape {tuple(value.shape)} with trainable=True and "
        "synchronization=ON_READ. Each replica has a value of its own, of which there is no gradient of the whole "
        "batch. Leave out synchronization, and all replicas train one value; or take each replica's own gradient: "
        "torch.autograd.grad(loss, variable)."
    )


def make_on(devices: Sequence[Device], value: torch.Tensor, is_trained: bool, wanted: Wanted) -> Variable:
    """A variable of the kind that suits a strategy with parameters on some devices."""
    first = memory_device(devices[0]) if devices else None
    if len(devices) < 2:
        return make_data(Variable, value, first, is_trained)
    _refuse_unmirrorable(wanted, value)
    if wanted.synchronization is not VariableSynchronization.ON_READ:
        mirrored = make_data(MirroredVariable, value, first, is_trained)
        mirrored._devices = tuple(devices)
        return mirrored
    on_read = make_data(SyncOnReadVariable, value, first, False)
    on_read._take_parts([value.detach().to(memory_device(device), copy=True) for device in devices], is_trained)
    return on_read


def _refuse_unmirrorable(wanted: Wanted, value: torch.Tensor) -> None:
    if wanted.synchronization is VariableSynchronization.NONE:
        raise ValueError(
            "Variable(synchronization=NONE) in the scope of a strategy that keeps a copy in each replica: they have to "
            "be synchronized, on writing or on reading. Leave it out, or say ON_READ."
        )
    is_integer = not (value.dtype.is_floating_point or value.dtype.is_complex)
    if is_integer and wanted.aggregation is VariableAggregation.MEAN:
        raise ValueError(f"Variable(aggregation=MEAN) of {value.dtype}: the mean of integers is none. Use a float.")
