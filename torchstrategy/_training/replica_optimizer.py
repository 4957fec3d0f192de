"""An optimizer as it is in a replica: with the replica's own parameters, and one step for all replicas."""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy._binding import proxies
from torchstrategy._binding.proxies import own, plain_class
from torchstrategy._core.context import current_frame
from torchstrategy._core.devices import in_use
from torchstrategy._core.torch_internals import hide_from_compiler
from torchstrategy._core.trace import traced
from torchstrategy._core.tree import tree_flatten
from torchstrategy._core.types import Tree
from torchstrategy._execution.replica import Replica
from torchstrategy._training.replica_gradients import ReplicaGradients
from torchstrategy._training.schedulers import refuse_different


class Owners(ABC):
    """The user's own parameters and gradients in one run, as optimizers in its replicas ask for them."""

    @abstractmethod
    def together(self, call: Callable[[], Tree], optimizer: Optimizer | None = None) -> Tree:
        """Calls something for all replicas, while they stand still: with the gradients of the whole batch.

        Args:
            call: What is called.
            optimizer: Of which it is a method, if it is.
        """

    @abstractmethod
    def cross_replica(self) -> AbstractContextManager[None]:
        """For the length of the block, this thread speaks for all replicas, in the caller's default device."""

    @abstractmethod
    def show(self) -> None:
        """From here on, until `take_back`, the user's parameters have the gradients of the whole batch."""

    @abstractmethod
    def take_back(self, optimizer: Optimizer | None = None) -> None:
        """The end of `show`: what an optimizer has written on parameters reaches the replicas."""

    @abstractmethod
    def loss(self, losses: Sequence[Any]) -> Any:
        """The loss of the whole batch, from that of each replica."""


@final
class ReplicaOptimizer:
    """One optimizer in one replica, for one run.

    Args:
        optimizer: The user's own.
        replica: The replica.
        ledger: Its gradients.
        index_of: The position in the ledger of each parameter that it optimizes, by the id of the owner.
        owners: What it updates.
        leads: Whether this replica runs the optimizer's loop, if that asks for the loss and its gradients itself.
        own_state: Asks for the state that this replica has of its own, by its parameters. None: it has the user's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        replica: Replica,
        gradients: ReplicaGradients,
        index_of: Mapping[int, int],
        owners: Owners,
        leads: bool,
        own_state: Callable[[], dict[torch.Tensor, Any]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._replica = replica
        self._ledger = gradients
        self._index_of = index_of
        self._owners = owners
        self._leads = leads
        self._own_state = own_state
        self._groups: list[dict[str, Any]] | None = None  # made when the step asks
        self._shown: list[dict[str, Any]] | None = None  # the same, as they were when the step asked

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with this replica's parameters. What the step writes on them holds from the next update on."""
        refuse_once_per_step_callers()
        if self._groups is None:
            self._groups = [self._local_group(group) for group in self._central_groups]
            self._shown = [self._local_group(group) for group in self._central_groups]
        return self._groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of each of this replica's parameters, to be read."""
        name = plain_class(type(self._optimizer)).__name__
        if self._own_state is not None:
            states = self._own_state()
        else:
            states = {self._local(owner): state for owner, state in own(self._optimizer, "state").items()}
        return _Shown(name, {key: _Shown(name, of) if isinstance(of, dict) else of for key, of in states.items()})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears this replica's gradients, and what was accumulated before. No meeting."""
        self._ledger.clear(list(self._index_of.values()), set_to_none)

    @property
    def step(self) -> Callable[..., Any]:
        """Takes a step; asking for it is refused to those who count steps, before they count one."""
        refuse_once_per_step_callers()
        return self._step

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("step", *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A meeting: the gradients of all replicas are combined and the optimizer takes one step, or a part of it.

        Args:
            method: Of the user's own optimizer.
            *args: For the method, in each replica the same; but a function computes the replica's own loss.
            **kwargs: As `args`.
        """
        name = STEP if method == "step" else f"{plain_class(type(self._optimizer)).__name__}.{method}()"
        closures = [value for value in (*args, *kwargs.values()) if _is_closure(value)]
        if closures:
            return self._call_with(name, method, closures[0], args, kwargs)

        def combine(brought: Sequence[_Given]) -> list[Any]:
            _check(name, brought)
            result = self._owners.together(lambda: self._update(method, *args, **kwargs), self._optimizer)
            return [result] * len(brought)

        self._ledger.accumulate()
        return self._replica.synchronize(name, combine, (args, kwargs))

    def _call_with(
        self, name: str, method: str, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The optimizer asks for the loss and its gradients itself, as often as it likes.

        Its loop runs on the thread of the first replica; the others wait at the meeting that it comes to next. What
        it asks for, all of them compute.
        """
        owners, frame = self._owners, current_frame()
        assert frame is not None

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            value = loss.detach() if isinstance(loss, torch.Tensor) else loss
            return self._replica.synchronize(name, shown, value)

        def shown(losses: Sequence[Any]) -> list[Any]:
            owners.show()
            return [owners.loss(losses)] * len(losses)

        def taken_back(brought: Sequence[Any]) -> list[Any]:
            owners.take_back(self._optimizer)
            return [brought[0]] * len(brought)

        def asked() -> Any:
            self._replica.synchronize(name, taken_back, _EVALUATE)
            with frame, in_use(self._replica.device):
                return evaluate()

        def begun(brought: Sequence[_Given]) -> list[None]:
            _check(name, brought)
            owners.show()
            return [None] * len(brought)

        def given(ask: object) -> _Given:
            own = [ask if value is closure else value for value in args]
            return tuple(own), {key: ask if value is closure else value for key, value in kwargs.items()}

        self._replica.synchronize(name, begun, given(None))
        if self._leads:
            asking, by_name = given(asked)
            with owners.cross_replica():
                result = self._update(method, *asking, **by_name)
            return self._replica.synchronize(name, taken_back, result)
        while (result := self._replica.synchronize(name, taken_back, None)) is _EVALUATE:
            evaluate()
        return result

    def _update(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with traced("update [{}]", self._optimizer):
            return getattr(self._optimizer, method)(*args, **kwargs)

    def forget_settings(self) -> None:
        """The optimizer's settings may have changed; the step is shown them as they are when it asks again."""
        self._groups = self._shown = None

    def return_settings(self) -> None:
        """Brings to the user's own optimizer what the step wrote on the groups, such as a learning rate."""
        if self._groups is None or self._shown is None:
            return  # the step has not asked for them
        for group, shown, central in zip(self._groups, self._shown, self._central_groups, strict=True):
            for name, value in group.items():
                if name != "params" and not _is_as_shown(value, shown.get(name)):
                    if isinstance(value, torch.Tensor) and isinstance(central.get(name), torch.Tensor):
                        central[name].copy_(value)
                    else:
                        central[name] = value

    @property
    def _central_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = own(self._optimizer, "param_groups")
        return groups

    def _local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        # A learning rate may be a tensor, which a step may write in place: once, and not once in each replica.
        local = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in group.items() if name != "params"}
        return {**local, "params": [self._local(owner) for owner in group["params"]]}

    def _local(self, owner: torch.Tensor) -> torch.Tensor:
        index = self._index_of.get(id(owner))
        return owner if index is None else self._ledger.own(index)


@final
class _Shown(dict[Any, Any]):
    """What a replica is shown of the state of an optimizer: of a parameter that has none, an empty one."""

    def __init__(self, optimizer: str, values: Mapping[Any, Any]) -> None:
        super().__init__(values)
        self._optimizer = optimizer

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, torch.Tensor):
            return _Shown(self._optimizer, {})
        raise KeyError(key)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"The step wrote on the state of {self._optimizer} in a replica, which shares the optimizer with the "
            "others. Write on it in a method of the optimizer's class, which is called once for all of them; after "
            "strategy.run; or in a merge function: get_replica_context().merge_call(...)."
        )

    __setitem__ = __delitem__ = setdefault = update = pop = popitem = clear = __ior__ = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


STEP = "optimizer.step()"
_EVALUATE = object()  # what the optimizer asks for, in the place of its result

_Given = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a method."""


def _is_closure(value: Any) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, torch.Tensor, type))


def _check(name: str, brought: Sequence[_Given]) -> None:
    for given in brought if any(brought[0]) else ():
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_flatten(given)[0]):
            raise RuntimeError(
                f"{name} acts once for all replicas, and was given a tensor that requires grad, which is one replica's "
                "own. In the step, run backward and give the method nothing of the graph; or call it outside of "
                "strategy.run, on what the user's own parameters are."
            )
    for other in brought[1:]:
        refuse_different(name, brought[0], other)


def _is_as_shown(value: Any, shown: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(shown, torch.Tensor):
        return torch.equal(value, shown)
    return value is shown


def refuse_once_per_step_callers() -> None:
    """Refuses what may act on an optimizer once a step, and would act once in each replica.

    Schedulers count their own steps and GradScaler its updates, in objects that all replicas share. They are known by
    who asks: they need not have been made in a scope, and not all of them run the constructor of their base class.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, proxies.__file__):
        frame = frame.f_back
    caller = frame.f_locals.get("self") if frame is not None else None
    if isinstance(caller, (LRScheduler, torch.amp.GradScaler)):
        lines = "scheduler.step()"
        if isinstance(caller, torch.amp.GradScaler):
            lines = "scaler.step(optimizer)\n    scaler.update()"
        raise RuntimeError(
            f"{type(caller).__name__} was stepped in a replica, by a step that does not name it, and it was not "
            "created in strategy.scope(): it would count one step for each of them. Create it in the scope, or name it "
            "in the step, and it counts once; or do it after the run, where gradients are those of the whole batch:\n"
            "    strategy.run(step, ...)\n"
            f"    {lines}"
        )


# A compiler that followed a step to the meeting would find locks and threads, and to the gradients graphs of nothing.
hide_from_compiler(refuse_once_per_step_callers)
hide_from_compiler(ReplicaOptimizer._step)
hide_from_compiler(ReplicaOptimizer.call)
hide_from_compiler(ReplicaOptimizer.zero_grad)
