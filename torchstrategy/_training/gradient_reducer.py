"""What becomes of gradients: each replica collects its own, and together they are the gradient of the whole batch.

    so far      the owner's gradient when the run began, and everything that was settled since
    local       what backward added in one replica and nobody has combined yet
    view        a replica's copy of what is so far, made when the step reads it; the step may change it or clear it

    settle:     so far  =  what the replicas left of it in their views  +  sum over replicas of share * local

Replicas settle at `optimizer.step()`, at the first read of a `.grad` after a backward, at `merge_call`, and when the
run ends. Clearing is no meeting: it empties the replica's local gradient and its view.

Nothing is written to the owner's gradients before an update begins, so a run that fails before leaves them as they
were.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import final

import torch

from torchstrategy._communication.transfer import brought
from torchstrategy._communication.weighted_sums import accumulate, equal, weighted
from torchstrategy._core.options import ReduceOp
from torchstrategy._core.thread_state import undisturbed
from torchstrategy._core.torch_internals import (
    has_gradient_hooks,
    have_gradient_hooks,
    hide_from_compiler,
    raw_grad,
    raw_grads,
    set_raw_grad,
    set_raw_grads,
    unseen_by_function_modes,
)
from torchstrategy._core.trace import traced
from torchstrategy._execution.instruments import combined_gradients
from torchstrategy._execution.replica import Replica
from torchstrategy._training.all_reduced_gradients import AllReduce, AllReducedGradients
from torchstrategy._training.hooked_gradients import count_additions, seen_by_hooks
from torchstrategy._training.late_gradients import deliver_late
from torchstrategy._training.replica_gradients import (
    CLEARED,
    CLEARED_NOTHING,
    Reads,
    ReplicaGradients,
    ReplicaParameter,
)
from torchstrategy._training.replica_weights import ReplicaWeights
from torchstrategy._variables.variable import is_variable

Together = Callable[[Callable[[], None]], None]
"""Calls something for all replicas, with the gradients of the whole batch; it may update parameters."""


@final
class GradientReducer:
    """The gradients of all replicas of one run, and what they are together.

    Used on the thread that called `run`, while every replica stands still.

    Args:
        owners: The parameters that the gradients are of.
        names: What to call each of them in a message.
        parameters: For each replica its own parameters, in the order of the owners.
        take_turns: Whether no two replicas ever run at once.
        all_reduce: What adds up gradients for all replicas at once; None: they are added up where the owners are.
    """

    def __init__(
        self,
        owners: Sequence[torch.Tensor],
        names: Sequence[str],
        parameters: Sequence[Sequence[ReplicaParameter]],
        take_turns: bool,
        all_reduce: AllReduce | None = None,
    ) -> None:
        # Between runs a variable is not held: it lives as long as the user has it.
        self._held = [weakref.ref(owner) if is_variable(owner) else _always(owner) for owner in owners]
        self._own_names = list(names)
        self.owners: list[torch.Tensor] = []
        self.names = list(names)
        self.accumulated: list[torch.Tensor | None] = []
        self.of_replicas = [ReplicaGradients(self, local) for local in parameters]
        self.is_alone = True  # whether no other run has had the same owners since this one began
        self._is_remote = [
            any(p.device != o.device for p, o in zip(local, owners, strict=False)) for local in parameters
        ]
        self._all_reduce = None if all_reduce is None else AllReducedGradients(all_reduce)
        self._take_turns = take_turns
        self._total: dict[int, torch.Tensor] = {}  # of what was handed in since gradients were settled, weighed
        self._num_accumulated = 0
        self._replica_weights: ReplicaWeights | None = None
        self._kept: list[torch.Tensor | None] = []  # what the owners get back if the run fails now
        self._has_updated = False
        self.hooked: set[int] = set()  # owners with hooks
        self._together: Together | None = None

    def begin(
        self, replica_weights: ReplicaWeights, outsiders: Sequence[tuple[torch.Tensor, str]], together: Together
    ) -> None:
        """Takes the owners' gradients for the length of a run: whatever backward adds to an owner stands out.

        Args:
            shares: How much each replica counts.
            outsiders: Further trainable tensors that the step names, which no replica has of its own, and their names.
            together: Settles, and calls something that may update parameters.
        """
        own = self._own()
        self._together = together
        self.owners = [*own, *(owner for owner, _ in outsiders)]
        self.names = [*self._own_names, *(name for _, name in outsiders)]
        self._has_updated = False
        with _exchanging:
            self._kept = raw_grads(self.owners)
            self.accumulated = list(self._kept)
            self._replica_weights = replica_weights
            set_raw_grads(self.owners, repeat(None))
        if have_gradient_hooks(own):
            self.hooked = {index for index, owner in enumerate(own) if has_gradient_hooks(owner)}
            for index in self.hooked:
                count_additions(self.of_replicas, index)

    def enter(self, replica: Replica) -> None:
        """The step begins in `replica`."""
        self.of_replicas[replica.index].enter(replica)

    def accumulate(self, replica: int) -> None:
        """Called on the replica's thread, where it has come to what settles gradients, or to its end.

        If it is its turn to be added up, in replica order, and no other replica runs, its gradients become a part of
        the total here, where they are in the processor's caches, and their memory is free for the next replica.
        """
        weighing = self._weighing()
        is_next = self._num_accumulated < len(weighing) and weighing[self._num_accumulated] == replica
        if self._take_turns and self._all_reduce is None and is_next:
            with unseen_by_function_modes(), undisturbed(), traced("hand in gradients"):
                self.of_replicas[replica].accumulated_here = self._add_up(replica)

    def watch(self, owner: torch.Tensor, name: str) -> None:
        """From here on to the end of the run, backward may not reach one more tensor of which replicas have no own."""
        self.owners.append(owner)
        self.names.append(name)
        self.accumulated.append(raw_grad(owner))
        self._kept.append(raw_grad(owner))

    def end(self) -> None:
        """Gives the owners the gradient of everything that was settled."""
        with _exchanging:
            if not self.is_alone:  # what a run of another thread has given them meanwhile is kept, as backward would
                for index, owner in enumerate(self.owners):
                    other = raw_grad(owner)
                    if other is not None:
                        self._add(index, other, is_seen=False)
            self._give(self.accumulated)
        self._leave()

    def abort(self) -> None:
        """Gives the owners what they had before the run, or, if it made an update, what they had then."""
        if self._replica_weights is not None:  # else it has not begun, or has ended
            with _exchanging:
                if not self.is_alone:
                    both = zip(self.owners, self._kept, strict=True)
                    self._kept = [raw_grad(owner) if kept is None else kept for owner, kept in both]
                self._give(self._kept)
        self._leave()

    @contextmanager
    def published(self) -> Iterator[None]:
        """Settles, and for the length of the block the owners have their gradients, as plain PyTorch would."""
        self.reduce()
        self._give(self.accumulated)
        try:
            yield
        finally:
            self.forget_arrived()
            self._take()
            if self._has_updated:
                self._kept = list(self.accumulated)
            self._show_again()

    def arrived(self, gradient: torch.Tensor, replica: int) -> torch.Tensor | None:
        """What a replica has got of an owner's gradient already, if nobody has written on it since."""
        return None if self._all_reduce is None else self._all_reduce.arrived(gradient, replica)

    def forget_arrived(self) -> None:
        """The owners' gradients may be written from here on, also in ways that torch does not count."""
        if self._all_reduce is not None:
            self._all_reduce.forget()

    def keep(self) -> None:
        """An update begins: a failure from here on leaves the owners the gradients that it leaves them."""
        self._has_updated = True

    def deliver_late_ones(self) -> None:
        """From here on, what a backward between runs adds to the replicas' parameters goes on to the owners at once."""
        deliver_late(self._held, [of_replica.parameters for of_replica in self.of_replicas])

    def _own(self) -> list[torch.Tensor]:
        owners = [held() for held in self._held]
        return [owner for owner in owners if owner is not None]  # all of them, while there is a run

    def reduce_in_step(self) -> None:
        """Settles at a meeting after which the step goes on; the hooks of owners may update parameters at it."""
        if self.hooked:
            assert self._together is not None
            self._together(lambda: None)
        else:
            self.reduce()
            self._show_again()

    def reduce(self) -> None:
        """Adds up what the replicas have collected.

        Raises:
            RuntimeError: If some replicas cleared or changed a gradient and others did not; or if backward reached an
                owner itself, which the step used instead of the replica's own parameter.
        """
        assert self._replica_weights is not None
        if self.is_alone:
            for name, stray in zip(self.names, raw_grads(self.owners), strict=True):
                if stray is not None:
                    raise RuntimeError(_stray_gradient(name))
        seen = seen_by_hooks(self.of_replicas, self.owners, self.names) if self.hooked else set()
        self._reduce_visible()
        with torch.no_grad(), traced("settle gradients"):
            combined = self._combined()
            for index, gradient in combined.items():
                if index in seen or self.accumulated[index] is not None:
                    self._add(index, gradient, index in seen)
                else:
                    self.accumulated[index] = gradient
        if combined and len(self.of_replicas) > 1:
            combined_gradients()

    def check_reads(self, reads: Sequence[Reads]) -> None:
        """Refuses to settle if a replica has read, as complete, a gradient that others still had to add to.

        Raises:
            RuntimeError: Naming the parameter and the replicas.
        """
        assert self._replica_weights is not None
        if not any(read.all for read in reads):
            return
        present = self._replica_weights.present
        local = {r: self.of_replicas[r].local_indices() for r in present}
        for r, read in zip(present, reads, strict=True):
            for other, others in zip(present, reads, strict=True):
                missed = local[other] & read.doubtful - local[r]
                if not local[r]:  # it ran no backward: was this read the one at which the other has come here?
                    missed |= local[other] & read.all - others.all
                if missed:
                    raise RuntimeError(_missed(self.names[min(missed)], r, other))

    def _show_again(self) -> None:
        for of_replica in self.of_replicas:
            of_replica.show_again()

    def _weighing(self) -> list[int]:
        """The replicas whose gradients count: those that were dealt rows."""
        assert self._replica_weights is not None
        return [r for r in self._replica_weights.present if self._replica_weights.weights[r]]

    def _reduce_visible(self) -> None:
        assert self._replica_weights is not None
        of_replicas = [self.of_replicas[r] for r in self._weighing()]
        first = of_replicas[0].visible
        if all(view is CLEARED for view in first.values()) and all(other.visible == first for other in of_replicas[1:]):
            for index in first:  # as a rule: every replica called zero_grad()
                self.accumulated[index] = None
        else:
            for index in {index for of_replica in of_replicas for index in of_replica.visible}:
                self.accumulated[index] = self._agreed(index)
        for of_replica in self.of_replicas:
            of_replica.reduced()

    def _agreed(self, index: int) -> torch.Tensor | None:
        """What the replicas have left of the gradient so far."""
        accumulated, device = self.accumulated[index], self.owners[index].device
        visible = [self.of_replicas[r].visible.get(index) for r in self._weighing()]
        if all(view is CLEARED or (view is CLEARED_NOTHING and accumulated is None) for view in visible):
            return None
        shown = [
            None if view is None or view.gradient is None else view.gradient.detach().to(device) for view in visible
        ]
        # A step may write on what it was shown through `.data`, which counts no version: the numbers tell.
        has_changed = any(gradient is not None and not equal(gradient, accumulated) for gradient in shown)
        has_cleared = any(view is CLEARED for view in visible)
        if not has_cleared and not has_changed:
            return accumulated
        tensors = [gradient for gradient in shown if gradient is not None]
        if accumulated is None and not has_cleared and all(view is not None for view in visible):
            return tensors[0]  # zeros in the place of a gradient that not every replica had
        if has_cleared or len(tensors) < len(visible):
            raise RuntimeError(
                f"The replicas disagree about the gradient of {self.names[index]}: some cleared or changed what was "
                "accumulated and others did not. Do it in every replica, or outside of strategy.run."
            )
        if all(equal(tensor, tensors[0]) for tensor in tensors[1:]):
            return tensors[0]  # all did the same to the gradient of the whole step, such as clipping it
        return self._merged(accumulated, tensors)  # each put its own there

    def _merged(self, accumulated: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self._replica_weights is not None
        weights = [self._replica_weights.weights[r] for r in self._weighing()]
        if self._replica_weights.reduction is ReduceOp.MEAN:
            return weighted(tensors, weights)
        start = torch.zeros_like(tensors[0]) if accumulated is None else accumulated
        return start + weighted([tensor - start for tensor in tensors], weights)

    def _combined(self) -> dict[int, torch.Tensor]:
        """The local gradients of all replicas, weighted and added up on their owners' devices."""
        assert self._replica_weights is not None
        weighing = self._weighing()
        for r in set(self._replica_weights.present) - set(weighing):
            self.of_replicas[r].take_local()  # of no rows: dropped, since zero times NaN would be NaN
        if self._all_reduce is not None:
            weights = [self._replica_weights.weights[r] for r in weighing]
            return self._all_reduce.combined(weighing, weights, self.of_replicas, self.owners)
        for r in weighing[self._num_accumulated :]:
            self._add_up(r)
        total, self._total, self._num_accumulated = self._total, {}, 0
        return total

    def _add_up(self, r: int) -> set[int]:
        """Makes the gradients of one more replica a part of the total, and says of which parameters it had any."""
        assert self._replica_weights is not None
        (local, are_ours), weight = self.of_replicas[r].take_local(), self._replica_weights.weights[r]
        if self._is_remote[r]:
            local = self._brought(local)
        if weight == 1 and len(self._weighing()) == 1:
            # What came together is in one piece of memory; the owner's gradients are each in its own.
            self._total = {i: gradient.clone() for i, gradient in local.items()} if self._is_remote[r] else local
        else:
            accumulate(self._total, local, weight, are_ours and not self._is_remote[r])
        self._num_accumulated += 1
        return set(local)

    def _brought(self, local: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The gradients of one replica, each on the device of its owner."""
        arrived: dict[int, torch.Tensor] = {}
        for device in {self.owners[index].device for index in local}:
            indices = [index for index in local if self.owners[index].device == device]
            arrived.update(zip(indices, brought([local[index] for index in indices], device), strict=True))
        return arrived

    def _add(self, index: int, gradient: torch.Tensor, is_seen: bool) -> None:
        owner, accumulated = self.owners[index], self.accumulated[index]
        if is_seen:
            # The owner's hooks see the gradient of the whole batch, once, as autograd would show it to them.
            set_raw_grad(owner, None if accumulated is None else accumulated.clone())
            with torch.autograd.set_multithreading_enabled(False):  # on this thread, on which replicas are known
                torch.autograd.backward([owner], [gradient])
            self.accumulated[index] = raw_grad(owner)
            set_raw_grad(owner, None)
        else:
            self.accumulated[index] = gradient if accumulated is None else accumulated + gradient

    def _take(self) -> None:
        self.accumulated = raw_grads(self.owners)
        set_raw_grads(self.owners, repeat(None))

    def _give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        set_raw_grads(self.owners, gradients)

    def _leave(self) -> None:
        self._replica_weights = None  # first: what is interrupted after this has ended
        self.forget_arrived()
        self.accumulated, self._kept = [], []
        self._total, self._num_accumulated = {}, 0
        self.owners, self.hooked, self._together = [], set(), None
        for of_replica in self.of_replicas:
            of_replica.leave()


def _stray_gradient(name: str) -> str:
    return (
        f"Backward in a replica reached {name} itself, and not the replica's own parameter: every replica would add to "
        "one gradient, without its share. The step uses a module that was not created in strategy.scope(), a trainable "
        "tensor that is in no module, a list of parameters that was made outside of the step, or a thread that it "
        "starts, where names mean the user's own objects. Create the module in the scope or give it to "
        "strategy.distribute_module(module); put the tensor into such a module; call model.parameters() inside the "
        "step; call backward on the thread of the step."
    )


def _missed(name: str, replica: int, other: int) -> str:
    return (
        f"Replica {replica} read the gradient of {name} to which replica {other} still had to add: the parameter was "
        "used in one replica and not in the other, and either the one ran no backward, or backward ran twice without a "
        "forward and a read of all gradients in between. Let every replica run backward, one without a loss on zero: "
        "(outputs.sum() * 0).backward(). Or read gradients after strategy.run."
    )


def _always(owner: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    return lambda: owner


_exchanging = threading.RLock()  # runs of several threads take gradients from the same owners, and give them back


hide_from_compiler(GradientReducer.accumulate)  # a step that is compiled comes here, too
