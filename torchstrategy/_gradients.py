"""What becomes of gradients: each replica collects its own, and together they are the gradient of the whole batch.

    so far      the owner's gradient when the run began, and everything that was settled since
    local       what backward added in one replica and nobody has combined yet; it lives in the parameter's own slot
    view        a replica's copy of what is so far, made when the step reads it; the step may change it or clear it

    settle:     so far  =  what the replicas left of it in their views  +  sum over replicas of share * local

Replicas settle at `optimizer.step()`, at the first read of a `.grad` after a backward, at `merge_call`, and when the
run ends. Clearing is no meeting: it empties the replica's local gradient and its view.

Nothing is written to the owner's gradients before an update begins, so a run that fails before leaves them as they
were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch

from torchstrategy._options import ReduceOp
from torchstrategy._replicas import Replica
from torchstrategy._shares import Shares
from torchstrategy._torch import foreach_add_, foreach_mul, has_gradient_hooks, make_parameter, on_gradient, version

_GRAD: Any = torch.Tensor.grad
_slot: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD.__get__  # the slot that autograd itself writes
_set_slot: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD.__set__

READING = "the first read of a gradient (.grad) after backward"


@final
class LocalParameter(torch.nn.Parameter):
    """A parameter in one replica: a leaf of its own, whose `grad` is the gradient of the whole step.

    Autograd writes the replica's own gradient into the slot below `grad`, and operations on the parameter cost what
    they always cost: nothing but reading, setting and deleting `grad` goes through here. Outside a run it is a plain
    Parameter.
    """

    ledger: ReplicaLedger | None = None
    position: int  # in the ledger
    delivers = False  # whether a gradient that comes between runs goes on to the owner

    @staticmethod
    def over(data: torch.Tensor, requires_grad: bool) -> LocalParameter:
        """A local parameter over the memory of `data`."""
        parameter = make_parameter(LocalParameter, data, requires_grad)
        assert isinstance(parameter, LocalParameter)
        return parameter

    @property
    def grad(self) -> torch.Tensor | None:
        if self.ledger is None or self.ledger.replica is None:
            return _slot(self)
        return self.ledger.read(self.position)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.ledger is None or self.ledger.replica is None:
            _set_slot(self, value)
        else:
            self.ledger.write(self.position, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        memo[id(self)] = copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class _View(NamedTuple):
    """What a step was shown of a gradient, or put in its place; None: it cleared it."""

    gradient: torch.Tensor | None
    written: int  # its version when it was shown; -1: the step put it there

    @property
    def is_as_shown(self) -> bool:
        return self.gradient is not None and version(self.gradient) == self.written


_CLEARED = _View(None, -1)


@final
class ReplicaLedger:
    """The gradients of one replica. Used on that replica's thread, and by `Gradients` while it stands still.

    Args:
        gradients: What it shares with the other replicas.
        parameters: This replica's parameters, in the order of their owners.
    """

    def __init__(self, gradients: Gradients, parameters: Sequence[LocalParameter]) -> None:
        self.replica: Replica | None = None  # None between runs
        self.parameters = list(parameters)
        self.views: dict[int, _View] = {}
        self.seen: set[int] = set()  # read since the last look at all slots, and not local then
        self.gradients = gradients
        for index, parameter in enumerate(self.parameters):
            parameter.ledger, parameter.position = self, index

    def read(self, index: int) -> torch.Tensor | None:
        """The gradient of one parameter, of the whole step. A meeting if this replica has local gradients.

        To know that, all slots would have to be looked at in every read. They are looked at when a parameter is read
        for the second time, which begins a new pass over the parameters; `Gradients.check_reads` finds what that
        misses.
        """
        assert self.replica is not None
        has_local = _slot(self.parameters[index]) is not None
        if not has_local and (index in self.seen or not self.seen):
            self.seen.clear()
            has_local = any(_slot(parameter) is not None for parameter in self.parameters)
        if has_local:
            gradients = self.gradients

            def combine(brought: Sequence[set[int]]) -> list[None]:
                gradients.check_reads(brought)
                gradients.settle()
                return [None] * len(brought)

            self.replica.meet(READING, combine, set(self.seen))
            self.seen.clear()
        self.seen.add(index)
        return self._view(index)

    def write(self, index: int, value: torch.Tensor | None) -> None:
        """What `parameter.grad = value` means for the gradient of the whole step."""
        view = self.views.get(index)
        if value is not None and view is not None and view.gradient is value:
            return  # `p.grad += x` has already changed the view in place
        was_shown = view is not None and view.gradient is not None
        if value is not None and was_shown:
            self.views[index] = _View(value, -1)
            _set_slot(self.parameters[index], None)
        else:
            self.views[index] = _CLEARED
            _set_slot(self.parameters[index], value)

    def clear(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Clears gradients as `zero_grad` does, without reading them."""
        zeroed = [] if set_to_none else [index for index in indices if self._has_gradient(index)]
        self.views.update(dict.fromkeys(indices, _CLEARED))
        for index in zeroed:
            self.views[index] = _View(torch.zeros_like(self.parameters[index]), -1)
        for index in indices:
            if _slot(self.parameters[index]) is not None:
                _set_slot(self.parameters[index], None)

    def take_local(self) -> dict[int, torch.Tensor]:
        """The local gradients, by parameter; the slots are empty afterwards."""
        slots = [_slot(parameter) for parameter in self.parameters]
        taken = {index: local for index, local in enumerate(slots) if local is not None}
        for index, local in taken.items():
            _set_slot(self.parameters[index], None)
            if local.requires_grad:  # of a backward with create_graph=True
                taken[index] = local.detach()
        return taken

    def local_indices(self) -> set[int]:
        """Which parameters have local gradients."""
        return {index for index, parameter in enumerate(self.parameters) if _slot(parameter) is not None}

    def _has_gradient(self, index: int) -> bool:
        view = self.views.get(index)
        shown = self.gradients.so_far[index] if view is None else view.gradient
        return shown is not None or _slot(self.parameters[index]) is not None

    def _view(self, index: int) -> torch.Tensor | None:
        view = self.views.get(index)
        if view is not None:
            return view.gradient
        so_far = self.gradients.so_far[index]
        if so_far is None:
            return None
        shown = so_far.to(self.parameters[index].device, copy=True)
        self.views[index] = _View(shown, version(shown))
        return shown


@final
class Gradients:
    """The gradients of all replicas of one run, and what they are together.

    Used on the thread that called `run`, while every replica stands still.

    Args:
        owners: The parameters that the gradients are of.
        names: What to call each of them in a message.
        parameters: For each replica its own parameters, in the order of the owners.
    """

    def __init__(
        self,
        owners: Sequence[torch.Tensor],
        names: Sequence[str],
        parameters: Sequence[Sequence[LocalParameter]],
    ) -> None:
        self._own = list(zip(owners, names, strict=True))
        self.owners = list(owners)
        self.so_far: list[torch.Tensor | None] = []
        self.ledgers = [ReplicaLedger(self, local) for local in parameters]
        self._is_remote = [
            any(p.device != o.device for p, o in zip(local, owners, strict=False)) for local in parameters
        ]
        self._names = list(names)
        self._shares: Shares | None = None
        self._kept: list[torch.Tensor | None] = []  # what the owners get back if the run fails now
        self.is_alone = True  # whether no other run has had the same owners since this one began

    def begin(self, shares: Shares, outsiders: Sequence[tuple[torch.Tensor, str]]) -> None:
        """Takes the owners' gradients for the length of a run: whatever backward adds to an owner stands out.

        Args:
            shares: How much each replica counts.
            outsiders: Further trainable tensors that the step names, which no replica has of its own, and their names.
        """
        self._shares = shares
        self.owners = [owner for owner, _ in (*self._own, *outsiders)]
        self._names = [name for _, name in (*self._own, *outsiders)]
        self._take()
        self._kept = list(self.so_far)

    def enter(self, replica: Replica) -> None:
        """The step begins in `replica`."""
        self.ledgers[replica.index].replica = replica

    def end(self) -> None:
        """Gives the owners the gradient of everything that was settled."""
        if not self.is_alone:  # what a run of another thread has given them meanwhile is kept, as backward would
            for index, owner in enumerate(self.owners):
                if owner.grad is not None:
                    self._add(index, owner.grad)
        self._give(self.so_far)
        self._leave()

    def abort(self) -> None:
        """Gives the owners what they had before the run, or, if it made an update, what they had then."""
        if not self.is_alone:
            self._kept = [o.grad if kept is None else kept for o, kept in zip(self.owners, self._kept, strict=True)]
        self._give(self._kept)
        self._leave()

    @contextmanager
    def published(self) -> Iterator[None]:
        """Settles, and for the length of the block the owners have their gradients, as plain PyTorch would."""
        self.settle()
        self._give(self.so_far)
        try:
            yield
        finally:
            self._take()

    def keep(self) -> None:
        """An update begins: a failure from here on leaves the owners the gradients that it uses."""
        self._kept = [owner.grad for owner in self.owners]

    def deliver_late_ones(self) -> None:
        """From here on, what a backward between runs adds to the replicas' parameters goes on to the owners at once."""
        for ledger in self.ledgers:
            for parameter in ledger.parameters:
                if parameter.requires_grad and not parameter.delivers:
                    parameter.delivers = True
                    on_gradient(parameter, _deliver)

    def deliver(self, index: int, gradient: torch.Tensor) -> None:
        """Adds a gradient to its owner's, as it is: whoever ran the backward has weighed the replicas."""
        owner = self.owners[index]
        with _delivering, torch.no_grad():
            gradient = gradient.to(owner.device)
            owner.grad = gradient if owner.grad is None else owner.grad + gradient

    def settle(self) -> None:
        """Adds up what the replicas have collected.

        Raises:
            RuntimeError: If some replicas cleared or changed a gradient and others did not; or if backward reached an
                owner itself, which the step used instead of the replica's own parameter.
        """
        assert self._shares is not None
        for name, owner in zip(self._names, self.owners, strict=True):
            if owner.grad is not None and self.is_alone:
                raise RuntimeError(stray_gradient(name))
        ledgers = [self.ledgers[r] for r in self._shares.present]
        self._settle_views(ledgers)
        with torch.no_grad():
            for index, gradient in self._combined().items():
                self._add(index, gradient)

    def check_reads(self, seen: Sequence[set[int]]) -> None:
        """Refuses to settle if a replica has read, as complete, a gradient that others still had to add to.

        Raises:
            RuntimeError: Naming the parameter and the replicas.
        """
        assert self._shares is not None
        present = self._shares.present
        local = {r: self.ledgers[r].local_indices() for r in present}
        for r, read in zip(present, seen, strict=True):
            for other in present:
                missed = (read & local[other]) - local[r]
                if missed:
                    raise RuntimeError(
                        f"Replica {r} read the gradient of {self._names[min(missed)]} to which replica {other} still "
                        "had to add: the parameter was used in one replica and not in the other. Read gradients "
                        "after strategy.run."
                    )

    def _settle_views(self, ledgers: Sequence[ReplicaLedger]) -> None:
        first = ledgers[0].views
        if all(view is _CLEARED for view in first.values()) and all(other.views == first for other in ledgers[1:]):
            for index in first:  # as a rule: every replica called zero_grad()
                self.so_far[index] = None
        else:
            for index in {index for ledger in ledgers for index in ledger.views}:
                self.so_far[index] = self._agreed(index, ledgers)
        for ledger in ledgers:
            ledger.views.clear()

    def _combined(self) -> dict[int, torch.Tensor]:
        """The local gradients of all replicas, weighted and added up on their owners' devices."""
        assert self._shares is not None
        weighing = [r for r in self._shares.present if self._shares.weights[r]]
        for r in set(self._shares.present) - set(weighing):
            self.ledgers[r].take_local()  # of no rows: dropped, since zero times NaN would be NaN
        total: dict[int, torch.Tensor] = {}
        for r in weighing:
            weight = self._shares.weights[r]
            local = self.ledgers[r].take_local()
            if self._is_remote[r]:
                local = {index: gradient.to(self.owners[index].device) for index, gradient in local.items()}
            if len(weighing) == 1 and weight == 1:
                return local
            _accumulate(total, local, weight)
        return total

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        owner, so_far = self.owners[index], self.so_far[index]
        if has_gradient_hooks(owner):
            # The owner's hooks see the gradient of the whole batch, once, as autograd would show it to them.
            owner.grad = None if so_far is None else so_far.clone()
            torch.autograd.backward([owner], [gradient])
            self.so_far[index], owner.grad = owner.grad, None
        else:
            self.so_far[index] = gradient if so_far is None else so_far + gradient

    def _agreed(self, index: int, ledgers: Sequence[ReplicaLedger]) -> torch.Tensor | None:
        """What the replicas have left of the gradient so far."""
        so_far = self.so_far[index]
        views = [ledger.views.get(index) for ledger in ledgers]
        intact = [view is None or view.is_as_shown or (view.gradient is None and so_far is None) for view in views]
        if all(intact):
            return so_far
        left = [view.gradient for view in views if view is not None and not view.is_as_shown]
        cleared = [gradient is None for gradient in left]
        if any(intact) or any(cleared) != all(cleared):
            raise RuntimeError(
                f"The replicas disagree about the gradient of {self._names[index]} that was accumulated before: some "
                "cleared or changed it and others did not. Do it in every replica, or outside of strategy.run."
            )
        if all(cleared):
            return None
        device = self.owners[index].device
        tensors = [gradient.detach().to(device) for gradient in left if gradient is not None]
        if all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            return tensors[0]  # all did the same to the gradient of the whole step, such as clipping it
        return self._merged(so_far, tensors)  # each put its own there

    def _merged(self, so_far: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self._shares is not None
        weights = [self._shares.weights[r] for r in self._shares.present]
        if self._shares.reduction is ReduceOp.MEAN:
            return torch.stack([t * w for t, w in zip(tensors, weights, strict=True)]).sum(0)
        start = torch.zeros_like(tensors[0]) if so_far is None else so_far
        return start + torch.stack([(t - start) * w for t, w in zip(tensors, weights, strict=True)]).sum(0)

    def _take(self) -> None:
        self.so_far = [owner.grad for owner in self.owners]
        for owner, gradient in zip(self.owners, self.so_far, strict=True):
            if gradient is not None:
                owner.grad = None

    def _give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for owner, gradient in zip(self.owners, gradients, strict=True):
            if gradient is not None or owner.grad is not None:
                owner.grad = gradient

    def _leave(self) -> None:
        self.so_far, self._kept, self._shares = [], [], None
        self.owners = [owner for owner, _ in self._own]
        for ledger in self.ledgers:
            ledger.replica = None
            ledger.views.clear()
            ledger.seen.clear()


def stray_gradient(name: str) -> str:
    """The message for a trainable tensor that a step used as it stands outside of replicas."""
    return (
        f"Backward in a replica reached {name} itself, and not the replica's own parameter: every replica would add to "
        "one gradient, without its share. The step uses a module that was not created in strategy.scope(), a trainable "
        "tensor that is in no module, or a list of parameters that was made outside of the step. Create the module in "
        "the scope or give it to strategy.distribute_module(module); put the tensor into such a module; call "
        "model.parameters() inside the step."
    )


_delivering = threading.Lock()  # the backward of several accelerators runs on a thread for each


def _deliver(parameter: torch.Tensor) -> None:
    assert isinstance(parameter, LocalParameter) and parameter.ledger is not None
    if parameter.ledger.replica is None:
        gradient = _slot(parameter)
        assert gradient is not None
        _set_slot(parameter, None)
        parameter.ledger.gradients.deliver(parameter.position, gradient)


def _accumulate(total: dict[int, torch.Tensor], gradients: dict[int, torch.Tensor], weight: float) -> None:
    """`total += weight * gradients`, parameter by parameter, in fused loops; `gradients` are not written."""
    fresh = [index for index in gradients if index not in total]
    known = [index for index in gradients if index in total]
    if {gradient.layout for gradient in (*gradients.values(), *total.values())} != {torch.strided}:
        for index in known:
            total[index] = total[index] + gradients[index] * weight
        total.update((index, gradients[index] * weight) for index in fresh)
        return
    if known:
        foreach_add_([total[index] for index in known], [gradients[index] for index in known], alpha=weight)
    if fresh:
        total.update(zip(fresh, foreach_mul([gradients[index] for index in fresh], weight), strict=True))
