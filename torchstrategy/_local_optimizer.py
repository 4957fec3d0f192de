"""An optimizer as it is in a replica: with the replica's own parameters, and one step for all replicas."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy import _stand_ins
from torchstrategy._ledger import ReplicaLedger
from torchstrategy._replica import Replica

Update = Callable[[Optimizer, dict[str, Any]], Any]
"""Takes one step of an optimizer on the owners' parameters, with these keyword arguments."""


@final
class LocalOptimizer:
    """One optimizer in one replica, for one run.

    Args:
        optimizer: The user's own.
        replica: The replica.
        ledger: Its gradients.
        index_of: The position in the ledger of each parameter that it optimizes, by the id of the owner.
        update: What happens at the meeting.
    """

    def __init__(
        self, optimizer: Optimizer, replica: Replica, ledger: ReplicaLedger, index_of: Mapping[int, int], update: Update
    ) -> None:
        self._optimizer = optimizer
        self._replica = replica
        self._ledger = ledger
        self._index_of = index_of
        self._update = update
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
        return {self._local(owner): state for owner, state in vars(self._optimizer)["state"].items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears this replica's gradients, and what was accumulated before. No meeting."""
        self._ledger.clear(list(self._index_of.values()), set_to_none)

    @property
    def step(self) -> Callable[..., Any]:
        """Takes a step; asking for it is refused to those who count steps, before they count one."""
        refuse_once_per_step_callers()
        return self._step

    def _step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """A meeting: the gradients of all replicas are combined and the optimizer takes one step.

        Raises:
            RuntimeError: If there is a closure: it would have to be run in every replica at once.
        """
        if closure is not None:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step(closure) was called in a replica: the optimizer, which is "
                "one for all replicas, cannot call the closures of all. Call the closure in the step and then "
                "optimizer.step()."
            )

        def combine(brought: Sequence[None]) -> list[Any]:
            self.return_settings()
            result = self._update(self._optimizer, kwargs)
            return [result] * len(brought)

        result = self._replica.meet("optimizer.step()", combine, None)
        self._groups = self._shown = None  # the optimizer may have changed its settings
        return result

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
        groups: list[dict[str, Any]] = vars(self._optimizer)["param_groups"]
        return groups

    def _local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        # A learning rate may be a tensor, which a step may write in place: once, and not once in each replica.
        local = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in group.items() if name != "params"}
        return {**local, "params": [self._local(owner) for owner in group["params"]]}

    def _local(self, owner: torch.Tensor) -> torch.Tensor:
        index = self._index_of.get(id(owner))
        return owner if index is None else self._ledger.parameters[index]


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
    while frame is not None and frame.f_code.co_filename in (__file__, _stand_ins.__file__):
        frame = frame.f_back
    caller = frame.f_locals.get("self") if frame is not None else None
    if isinstance(caller, (LRScheduler, torch.amp.GradScaler)):
        lines = "scheduler.step()"
        if isinstance(caller, torch.amp.GradScaler):
            lines = "scaler.step(optimizer)\n    scaler.update()"
        raise RuntimeError(
            f"{type(caller).__name__} was stepped in a replica: it would count one step for each of them. Do it "
            "after the run, where gradients are those of the whole batch:\n"
            "    strategy.run(step, ...)\n"
            f"    {lines}"
        )
