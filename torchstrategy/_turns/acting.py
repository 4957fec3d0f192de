"""What acts once for all replicas: optimizers, schedulers and scalers.

For the length of a run, their methods are synchronization points. When all replicas
have come to `optimizer.step()`, the optimizer takes one step, on the gradients of the
whole batch and the program's own parameters. So it is with `step`, `update` and
`unscale_` of schedulers and scalers, and with the public methods that an optimizer of
another package has beside torch's.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import torch
from torch.optim import Optimizer

from torchstrategy._base.context import current_frame, using_device
from torchstrategy._base.objects.torch_hooks import begin_guards, end_guards
from torchstrategy._base.torch_internals import hide_from_compiler
from torchstrategy._base.trace import traced
from torchstrategy._group.group import Replica
from torchstrategy._run.refusals import changed_groups, unlike_settings
from torchstrategy._run.shared_methods import (
    COMPARED,
    Given,
    is_closure,
    refuse_different,
    refuse_graphs,
    replace_argument,
)
from torchstrategy._turns import refusals
from torchstrategy._turns.parts import MISSING

# Tells the other replicas that the optimizer has called the closure and has no result
# yet.
_EVALUATE = object()


class Host(Protocol):
    """The run, as far as what acts for all replicas needs it."""

    def replica_here(self) -> Replica | None:
        """The replica of this run that this thread is in; None if there is none."""

    def acting(self, of: object = None) -> AbstractContextManager[object]:
        """A block in which the objects are those of all replicas.

        `of` is what acts.
        """

    def begin_acting(self, thing: object) -> None:
        """The same until `end_acting`, for a loop that replicas interrupt."""

    def end_acting(self) -> None:
        """Ends `begin_acting`."""

    def cross_replica(self) -> AbstractContextManager[None]:
        """A block in which this thread is in no replica."""

    def leads(self, replica: Replica) -> bool:
        """Whether a replica is the first one that takes part."""

    def combine_losses(self, losses: Sequence[Any]) -> Any:
        """The loss of the whole batch, made of the loss of each replica."""

    def compare(self, name: str, given: Given) -> None:
        """Refuses a method to which other processes give other arguments."""


@final
class Acting:
    """Lets some objects act once for all replicas, until it is told to stop.

    Args:
        things: The objects.
        host: The run.
    """

    def __init__(self, things: Iterable[Any], host: Host) -> None:
        self._host = host
        # What was in the `__dict__` of each object, by its method.
        self._before: list[tuple[Any, str, Any]] = []
        self._is_guarding = True
        begin_guards()
        for thing in things:
            for method in _methods_of(thing):
                self._let_act_once(thing, method)

    def stop(self) -> None:
        """Gives all methods back."""
        for thing, method, before in reversed(self._before):
            if before is MISSING:
                vars(thing).pop(method, None)
            else:
                vars(thing)[method] = before
        self._before.clear()
        if self._is_guarding:
            self._is_guarding = False
            end_guards()

    def _let_act_once(self, thing: Any, method: str) -> None:
        plain = getattr(thing, method)
        before = vars(thing).get(method, MISSING)
        act = _Once(thing, method, plain, self._host)

        # Its own function: a scheduler leaves marks on the `step` of its optimizer.
        def call(_: Any, *args: Any, **kwargs: Any) -> Any:
            return act(*args, **kwargs)

        call.__dict__.update(getattr(plain, "__dict__", {}))
        call.__name__ = method
        hide_from_compiler(call)
        self._before.append((thing, method, before))
        vars(thing)[method] = types.MethodType(call, thing)


@final
class _Once:
    """A method that acts once for all replicas.

    Args:
        thing: The object.
        method: The name of the method.
        plain: The method.
        host: The run.
    """

    def __init__(
        self, thing: Any, method: str, plain: Callable[..., Any], host: Host
    ) -> None:
        self._thing, self._plain, self._host = thing, plain, host
        kind = type(thing).__name__
        is_update = isinstance(thing, Optimizer) and method == "step"
        self.name = "optimizer.step()" if is_update else f"{kind}.{method}()"
        self._refuses = method in _ONLY_OUTSIDE
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replica = self._host.replica_here()
        if replica is None:
            return self._plain(*args, **kwargs)
        if self._refuses:
            raise RuntimeError(
                refusals.only_outside(type(self._thing).__name__, self._method)
            )
        is_optimizer = isinstance(self._thing, Optimizer)
        closures = [v for v in (*args, *kwargs.values()) if is_closure(v)]
        if is_optimizer and closures:
            return self._call_with(replica, closures[0], (args, kwargs))

        def combine(brought: Sequence[Given]) -> list[Any]:
            if is_optimizer:
                refuse_graphs(self.name, brought)
            refuse_different(self.name, brought, self._host)
            with self._host.cross_replica(), self._host.acting(self._thing):
                result = self._act(*args, **kwargs)
            return [result] * len(brought)

        return replica.synchronize(self.name, combine, (args, kwargs))

    def _act(self, *args: Any, **kwargs: Any) -> Any:
        with traced("update [{}]", self._thing):
            return self._plain(*args, **kwargs)

    def _call_with(
        self, replica: Replica, closure: Callable[[], Any], given: Given
    ) -> Any:
        """Runs an optimizer that calls a closure as often as it likes (`LBFGS`).

        The optimizer's loop runs on the thread of the first replica, since the closure
        is a part of the step. The others wait at the next synchronization point.
        Whenever the loop calls the closure, all replicas compute their loss.
        """
        host, frame = self._host, current_frame()
        assert frame is not None

        # Three functions that are called once for all replicas, while they wait.

        def begin(brought: Sequence[Given]) -> list[None]:
            refuse_graphs(self.name, brought)
            refuse_different(self.name, brought, host)
            host.begin_acting(self._thing)
            return [None] * len(brought)

        def stop(brought: Sequence[Any]) -> list[Any]:
            host.end_acting()
            return [brought[0]] * len(brought)

        def begin_again(losses: Sequence[Any]) -> list[Any]:
            loss = host.combine_losses(losses)
            host.begin_acting(self._thing)
            return [loss] * len(losses)

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            value = loss.detach() if isinstance(loss, torch.Tensor) else loss
            return replica.synchronize(self.name, begin_again, value)

        def ask_all() -> Any:
            replica.synchronize(self.name, stop, _EVALUATE)
            with frame, using_device(replica.device):
                return evaluate()

        replica.synchronize(self.name, begin, replace_argument(given, closure, None))
        if host.leads(replica):
            args, kwargs = replace_argument(given, closure, ask_all)
            with host.cross_replica():
                result = self._act(*args, **kwargs)
            return replica.synchronize(self.name, stop, result)
        while True:
            result = replica.synchronize(self.name, stop, None)
            if result is not _EVALUATE:
                return result
            evaluate()


_ONLY_OUTSIDE = ("add_param_group", "load_state_dict")


def _methods_of(thing: Any) -> list[str]:
    """The methods that act once for all replicas."""
    if isinstance(thing, torch.amp.GradScaler):
        return ["step", "update", "unscale_"]
    if not isinstance(thing, Optimizer):
        return ["step"]
    names = ["step"]
    if type(thing).__module__.startswith("torch.optim."):
        return [*names, *_ONLY_OUTSIDE]
    for base in type(thing).__mro__:
        if base is Optimizer:
            break
        for name, value in vars(base).items():
            is_public = isinstance(value, types.FunctionType) and name[0] != "_"
            if is_public and name not in names and not hasattr(Optimizer, name):
                names.append(name)
    return [*names, *_ONLY_OUTSIDE]


def refuse_unlike_settings(
    optimizer: Optimizer, groups: Mapping[int, Sequence[Mapping[str, Any]]]
) -> None:
    """Refuses settings that replicas have set to different values.

    Args:
        optimizer: The optimizer.
        groups: By replica, what the groups of the optimizer hold there.

    Raises:
        RuntimeError: Naming the setting.
    """
    kind = type(optimizer).__name__
    (lead, own), *others = groups.items()
    for r, theirs in others:
        if len(theirs) != len(own):
            raise RuntimeError(changed_groups(kind))
        for i, (mine, other) in enumerate(zip(own, theirs, strict=True)):
            if list(map(id, mine["params"])) != list(map(id, other["params"])):
                raise RuntimeError(changed_groups(kind))
            for name in mine.keys() | other.keys():
                one, two = mine.get(name), other.get(name)
                is_compared = isinstance(one, COMPARED) and isinstance(two, COMPARED)
                if one is not two and is_compared and one != two:
                    setting = f"{kind}.param_groups[{i}][{name!r}]"
                    raise RuntimeError(unlike_settings(setting, one, lead, two, r))


# A compiler that traced it would trace the threads of a synchronization point.
hide_from_compiler(_Once.__call__)
