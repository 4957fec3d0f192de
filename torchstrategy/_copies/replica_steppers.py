"""Optimizers, learning-rate schedulers and `GradScaler` in a replica.

Their step is one step for all replicas.

An optimizer shows the replica's own parameters. When all replicas have come to
`optimizer.step()`, the user's own optimizer takes the step on the gradients of the
whole batch.

So it is with the methods that schedulers and scalers run once a step (`step`, `update`,
`unscale_`): they are synchronization points, at which the user's own object runs the
method once. Everything else about them can be asked anywhere.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy._base.context import current_frame, using_device
from torchstrategy._base.marks import Versions
from torchstrategy._base.objects.proxies import plain_class, users_own
from torchstrategy._base.torch_internals import hide_from_compiler
from torchstrategy._base.trace import traced
from torchstrategy._base.types import Tree
from torchstrategy._copies.gradients.replica_gradients import ReplicaGradients
from torchstrategy._group.group import Replica
from torchstrategy._run import refusals
from torchstrategy._run.shared_methods import (
    COMPARED,
    Given,
    have_same_value,
    is_closure,
    refuse_different,
    refuse_graphs,
    replace_argument,
)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group has beside parameters, for another optimizer or replica."""
    settings: dict[str, Any] = {}
    for name, value in group.items():
        if name != "params":
            # A learning rate may be a tensor. Each replica gets a clone: `lr.mul_(0.5)`
            # on one would act n times.
            settings[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return settings


class OptimizerHost(Protocol):
    """The user's own parameters and gradients in one run, for replicas' optimizers."""

    def call_for_all(
        self, call: Callable[[], Tree], optimizer: Optimizer | None = None
    ) -> Tree:
        """Calls a function once for all replicas, while they wait.

        The user's parameters have all gradients.

        Args:
            call: The function.
            optimizer: The optimizer of which the function calls a method, if it does.
        """

    def compare(self, name: str, given: Given) -> None:
        """Refuses a method that acts once for all replicas if arguments differ.

        Those of other processes give it other arguments.
        """

    def cross_replica(self) -> AbstractContextManager[None]:
        """For the length of the block, this thread acts for all replicas.

        It has the caller's default device.
        """

    def show(self) -> None:
        """From here on, the user's parameters have the gradients of the whole batch.

        They do until `stop_showing`.
        """

    def stop_showing(self, optimizer: Optimizer | None = None) -> None:
        """Ends `show`.

        The values that an optimizer has written on the user's parameters reach the
        replicas.
        """

    def combine_losses(self, losses: Sequence[Any]) -> Any:
        """The loss of the whole batch, made of the loss of each replica."""


@final
@dataclass(eq=False)
class ReplicaOptimizer:
    """One optimizer in one replica, for one run.

    Args:
        optimizer: The user's own.
        replica: The replica.
        gradients: The gradients of the replica.
        index_of: The position in `gradients` of each parameter that the optimizer
            updates, by the id of the user's parameter.
        host: Acts on the user's parameters and gradients.
        leads: Whether the optimizer's loop runs in this replica, for an optimizer that
            calls a closure.
        own_state: Returns the state of this replica's own copy of the optimizer, by the
            replica's parameters. None: the replica has no copy, and is shown the state
            of the user's optimizer.
    """

    optimizer: Optimizer
    replica: Replica
    gradients: ReplicaGradients
    index_of: Mapping[int, int]
    host: OptimizerHost
    leads: bool
    own_state: Callable[[], dict[torch.Tensor, Any]] | None
    # The groups that the step was shown, on which it may write, and the same groups as
    # they were then.
    _groups: list[dict[str, Any]] = field(default_factory=list)
    _shown: list[dict[str, Any]] = field(default_factory=list)
    # The tensors of the state that the step was shown, with their versions then; None:
    # it was shown none.
    _shown_state: Versions | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with this replica's parameters.

        Settings that the step writes there hold from the next update.
        """
        if not self._shown:
            self._groups = [self._local_group(group) for group in self._central_groups]
            self._shown = [self._local_group(group) for group in self._central_groups]
        return self._groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The optimizer's state for each of this replica's parameters.

        The step may read it, and not write on it.
        """
        name = plain_class(type(self.optimizer)).__name__
        if self.own_state is not None:
            # The first replica that asks brings the state to all of them.
            with self.gradients.on_callers_streams():
                states = self.own_state()
        else:
            states = {
                self._local(owner): state
                for owner, state in users_own(self.optimizer, "state").items()
            }
        if self._shown_state is None:
            values = chain.from_iterable(
                of.values() for of in states.values() if isinstance(of, dict)
            )
            self._shown_state = Versions(
                [value for value in values if isinstance(value, torch.Tensor)]
            )
        shown: dict[torch.Tensor, Any] = {}
        for parameter, state in states.items():
            shown[parameter] = _Shown(name, state) if isinstance(state, dict) else state
        return _Shown(name, shown)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears this replica's local and visible gradients.

        A synchronization point only if a hook waits for one.
        """
        self.gradients.clear(list(self.index_of.values()), set_to_none)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step, once for all replicas."""
        return self.call("step", *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A synchronization point: a method of the user's optimizer runs there once.

        Gradients are reduced there, too.

        Args:
            method: The name of the method.
            *args: Its arguments, the same in each replica. But a closure computes the
                replica's own loss.
            **kwargs: Its keyword arguments, likewise.
        """
        name = (
            "optimizer.step()"
            if method == "step"
            else f"{plain_class(type(self.optimizer)).__name__}.{method}()"
        )
        closures = [value for value in (*args, *kwargs.values()) if is_closure(value)]
        if closures:
            return self._call_with(closures[0], name, method, (args, kwargs))

        def combine(brought: Sequence[Given]) -> list[Any]:
            refuse_graphs(name, brought)
            refuse_different(name, brought, self.host)
            result = self.host.call_for_all(
                lambda: self._update(method, *args, **kwargs), self.optimizer
            )
            return [result] * len(brought)

        self.gradients.totals.accumulate(self.replica.index)
        return self.replica.synchronize(name, combine, (args, kwargs))

    def _call_with(
        self, closure: Callable[[], Any], name: str, method: str, arguments: Given
    ) -> Any:
        """Runs an optimizer that calls a closure as often as it likes (`LBFGS`).

        It calls the closure for the loss and its gradients.

        The optimizer's loop runs on the thread of the first replica, and the others
        wait at the next synchronization point. Whenever the loop calls the closure, all
        replicas compute their loss.
        """
        host, frame = self.host, current_frame()
        assert frame is not None

        # Three functions that are called once for all replicas, while they wait.

        def begin(brought: Sequence[Given]) -> list[None]:
            refuse_graphs(name, brought)
            refuse_different(name, brought, host)
            host.show()
            return [None] * len(brought)

        def stop_showing(brought: Sequence[Any]) -> list[Any]:
            host.stop_showing(self.optimizer)
            return [brought[0]] * len(brought)

        def show_again(losses: Sequence[Any]) -> list[Any]:
            host.show()
            return [host.combine_losses(losses)] * len(losses)

        # What each replica calls to compute its loss, and what the optimizer's loop
        # calls in the place of the closure.

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            value = loss.detach() if isinstance(loss, torch.Tensor) else loss
            return self.replica.synchronize(name, show_again, value)

        def ask_all() -> Any:
            self.replica.synchronize(name, stop_showing, _EVALUATE)
            with frame, using_device(self.replica.device):
                return evaluate()

        # The closure cannot run on the thread of the caller, which is the one that
        # combines: it is a part of the step, and needs the thread-local state of its
        # replica. So the loop has to run on the thread of a replica, too.
        self.replica.synchronize(
            name, begin, replace_argument(arguments, closure, None)
        )
        if self.leads:
            args, kwargs = replace_argument(arguments, closure, ask_all)
            with host.cross_replica():
                result = self._update(method, *args, **kwargs)
            return self.replica.synchronize(name, stop_showing, result)
        while True:
            result = self.replica.synchronize(name, stop_showing, None)
            if result is not _EVALUATE:
                return result
            evaluate()

    def _update(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with traced("update [{}]", self.optimizer):
            return getattr(self.optimizer, method)(*args, **kwargs)

    def forget_settings(self) -> None:
        """Forgets what the step was shown.

        An update may have changed settings and state.
        """
        self._groups, self._shown, self._shown_state = [], [], None

    def return_settings(self) -> None:
        """Brings settings that the step wrote on groups to the user's own optimizer.

        A learning rate is such a setting.
        """
        if not self._shown:
            return
        central = self._central_groups
        for (i, name), value in self.written_settings().items():
            if isinstance(value, torch.Tensor) and isinstance(
                central[i].get(name), torch.Tensor
            ):
                central[i][name].copy_(value)
            else:
                central[i][name] = value
        for group, shown, own in zip(self._groups, self._shown, central, strict=True):
            for name in shown.keys() - group.keys():
                own.pop(name, None)

    def written_settings(self) -> dict[tuple[int, str], Any]:
        """The settings that the step wrote on the groups.

        They are by the position of the group and the setting's name.

        Raises:
            RuntimeError: If the step has changed which parameters a group has, or which
                groups there are.
        """
        parameters = [list(map(id, group["params"])) for group in self._groups]
        parameters_shown = [list(map(id, group["params"])) for group in self._shown]
        if parameters != parameters_shown:
            raise RuntimeError(
                refusals.changed_groups(plain_class(type(self.optimizer)).__name__)
            )
        written: dict[tuple[int, str], Any] = {}
        for i, (group, shown) in enumerate(zip(self._groups, self._shown, strict=True)):
            for name, value in group.items():
                if name != "params" and not have_same_value(value, shown.get(name)):
                    written[i, name] = value
        return written

    def settings(self) -> list[dict[str, Any]]:
        """For each group, the next update's settings: numbers, flags or the like."""
        groups: list[dict[str, Any]] = []
        for group in self._central_groups:
            groups.append(
                {name: value for name, value in group.items() if _is_setting(value)}
            )
        for (i, name), value in self.written_settings().items():
            groups[i][name] = value
        return groups

    def refuse_other_settings(
        self, mine: int, others: Mapping[int, ReplicaOptimizer]
    ) -> None:
        """Refuses a write on the state, and a setting that replicas set differently.

        Another replica has set it to another number than this one has.

        Args:
            mine: The id of this replica.
            others: This optimizer in the other replicas, by their ids.

        Raises:
            RuntimeError: Naming it.
        """
        shown_states = [one._shown_state for one in (self, *others.values())]
        if any(state is not None and state.have_changed() for state in shown_states):
            raise RuntimeError(
                refusals.written_state(plain_class(type(self.optimizer)).__name__)
            )
        written = self.written_settings()
        for replica, other in others.items():
            for (i, name), value in other.written_settings().items():
                own = written.get((i, name), self._central_groups[i].get(name))
                if (
                    isinstance(value, COMPARED)
                    and isinstance(own, COMPARED)
                    and own != value
                ):
                    kind = plain_class(type(self.optimizer)).__name__
                    setting = f"{kind}.param_groups[{i}][{name!r}]"
                    raise RuntimeError(
                        refusals.unlike_settings(setting, own, mine, value, replica)
                    )

    @property
    def _central_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = users_own(self.optimizer, "param_groups")
        return groups

    def _local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            **settings_of(group),
            "params": [self._local(owner) for owner in group["params"]],
        }

    def _local(self, owner: torch.Tensor) -> torch.Tensor:
        index = self.index_of.get(id(owner))
        return owner if index is None else self.gradients.own(index)


@final
class _Shown(dict[Any, Any]):
    """The state of an optimizer as a replica is shown it.

    It is read-only, and empty for a parameter without state.
    """

    def __init__(self, optimizer: str, values: Mapping[Any, Any]) -> None:
        super().__init__(values)
        self._optimizer = optimizer

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, torch.Tensor):
            return _Shown(self._optimizer, {})
        raise KeyError(key)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(refusals.written_state(self._optimizer))

    __setitem__ = __delitem__ = setdefault = update = pop = popitem = clear = (
        __ior__
    ) = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _is_setting(value: object) -> bool:
    """Whether workers compare a setting.

    A text, such as a group's name, may be another one in each.
    """
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_number or isinstance(value, (int, float, tuple, type(None)))


# Tells the other replicas that the optimizer has called the closure and has no result
# yet.
_EVALUATE = object()


@final
@dataclass(eq=False)
class SharedStepper:
    """A scheduler or scaler in one replica, for one run.

    Args:
        stepper: The user's own.
        replica: The replica.
        host: Calls a function once for all replicas.
    """

    stepper: LRScheduler | torch.amp.GradScaler
    replica: Replica
    host: OptimizerHost

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A synchronization point for one call of a scheduler or scaler of the user's.

        A method of it runs once for all.
        """
        name = f"{type(self.stepper).__name__}.{method}()"

        def combine(brought: Sequence[Given]) -> list[Any]:
            refuse_different(name, brought, self.host)
            return [
                self.host.call_for_all(
                    lambda: getattr(self.stepper, method)(*args, **kwargs)
                )
            ] * len(brought)

        return self.replica.synchronize(name, combine, (args, kwargs))


def refuse_bound_methods(named: Iterable[tuple[str, object]]) -> None:
    """Refuses steps that hold a bound method of a scheduler, a scaler or an optimizer.

    Such a method is bound to the user's own object, so the step would pass by the
    object that acts for all replicas.

    Raises:
        RuntimeError: Naming it.
    """
    for name, thing in named:
        if isinstance(thing, types.MethodType):
            kind = type(thing.__self__).__name__
            raise RuntimeError(
                f"The step holds {kind}.{name}, a method that was taken from its "
                "object before the run: each replica would call it, and it acts once "
                f"for all of them. Name the object in the step, and call its {name} "
                "there; or call it after the run."
            )


# A compiler that traced these would trace the locks and threads of a synchronization
# point.
hide_from_compiler(ReplicaOptimizer.step)
hide_from_compiler(ReplicaOptimizer.call)
hide_from_compiler(ReplicaOptimizer.zero_grad)
