"""The gradients of all replicas, reduced to the gradient of the whole batch.

    local          what backward has added in one replica since the last reduction
    accumulated    the `.grad` of the user's parameter when the run began, plus
                   everything that was reduced since
    visible        one replica's copy of the accumulated gradient, which the step may
                   read, change or clear

    reduce:        accumulated  =  accumulated, as the replicas changed it
                                   +  sum over replicas of weight * local

Before the local gradients are added, each step may have changed the `.grad` that it
saw. If all replicas cleared it, it becomes None. If all made the same change, this
change is kept. If each assigned a tensor of its own, these tensors are weighted and
added up. Anything else is an error.

Gradients are reduced at `optimizer.step()` and the other methods of an optimizer that
act once for all replicas, at `step`, `update` and `unscale_` of schedulers and scalers,
at the first read of a `.grad` after a backward, at `merge_call`, and when the run ends.
Clearing a gradient empties the replica's local and visible gradient. It is no
synchronization point, and neither is the assignment of one, unless the user's parameter
has a hook: then gradients are reduced before the step clears what backward has made,
and after it has assigned something.

When a run begins, the `.grad` of the user's parameters becomes None. If the run fails,
they get back what they had, or what the last update of the run has left. The sums are
written into the tensors that were there before the run, as backward does it: see
`_copies/gradients/user_gradients`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple, Protocol, final

import torch

from torchstrategy._base import torch_internals
from torchstrategy._base.context import without_autograd
from torchstrategy._base.marks import version_of
from torchstrategy._base.options import ReduceOp
from torchstrategy._base.torch_internals import (
    have_gradient_hooks,
    raw_grad,
    raw_grads,
    set_raw_grads,
    take_raw_grads,
)
from torchstrategy._base.trace import traced
from torchstrategy._base.types import Device
from torchstrategy._copies.gradients.early_copies import EarlyCopies
from torchstrategy._copies.gradients.gradient_hooks import (
    count_additions,
    deliver_late,
    find_seen_by_hooks,
    send_through_hooks,
)
from torchstrategy._copies.gradients.replica_gradients import (
    CLEARED,
    CLEARED_NOTHING,
    EarlyReads,
    Reads,
    ReplicaGradients,
    ReplicaParameter,
    VisibleGradient,
    stray_gradient_message,
)
from torchstrategy._copies.gradients.user_gradients import UserGradients
from torchstrategy._copies.gradients.worker_gradients import WorkerReduction
from torchstrategy._copies.gradients.written_gradients import can_be_chosen, choose
from torchstrategy._group.instruments import tell_combined_gradients
from torchstrategy._group.participants import Participants
from torchstrategy._group.transfer import copy_to, equal, in_own_memory
from torchstrategy._group.weighing import add_weighted, weighted_sum
from torchstrategy._group.workers import LONE, Workers
from torchstrategy._run.placement import AllReduce
from torchstrategy._variables.variable import is_variable


class Run(Protocol):
    """What the reduction of gradients uses of the run that is under way."""

    def call_for_all(self, call: Callable[[], None]) -> None:
        """Calls a function once for all replicas, with the gradients of the batch.

        It may update parameters.
        """

    def before_workers_meet(self) -> None:
        """Several workers are about to exchange something.

        Notes what they are to compare beside it.
        """

    def when_workers_have_met(self) -> None:
        """They have compared it, and stand at one place."""


class _Arrived(NamedTuple):
    """The accumulated gradient's copies that the replicas' devices have already."""

    gradient: torch.Tensor  # which keeps its id
    version: int  # that of the gradient when the copies were made
    copies: list[torch.Tensor]  # by replica


# Note [The states of a gradient]
# While a run is under way, the gradient of one of the user's parameters is in these
# places:
# - local: each replica's parameter has a slot of its own, which autograd writes, so
#   that backward needs no lock and waits for nobody.
# - added early: if no two replicas ever run at once, each one adds its weighted local
#   gradients to `_total` before it waits or ends (`accumulate`). It does so on its own
#   thread, and no other thread works meanwhile.
# - accumulated: one tensor for all replicas, in `GradientReducer.accumulated`. Only the
#   thread that called `run` changes it, while no replica runs: `begin` and `_leave`
#   before and after all replicas, `watch`, `reduce` and `published` at synchronization
#   points, and `reduce` and `end` when all steps have ended.
# - visible: a replica's copy of the accumulated gradient, made when the step reads
#   `.grad`. What the step does to it stays in the replica until `reduce`, which
#   requires that all replicas did the same or each put a gradient there.
# - kept: in `_kept`, what the user's parameters get if the run fails: what they had
#   before it, or at its last update.
# `reduce` empties the local and visible gradients of all replicas, and `_total`, into
# the accumulated ones. From `begin` on, `.grad` of the user's own parameter is None, so
# that a backward which reaches it by mistake is noticed. It has a gradient only inside
# `published` (an update, a merge function), in `_send_through_hooks`, and from `end` or
# `abort` on.


@final
class GradientReducer:
    """The gradients of all replicas of one run, and their sum.

    The sum is the gradient of the whole batch.

    Used on the thread that called `run`, while every replica stands still. Only
    `accumulate` is called on the thread of a replica.

    Args:
        owners: The user's parameters.
        names: What to call each of them in a message.
        parameters: For each replica its own parameters, in the order of the user's.
        take_turns: Whether no two replicas ever run at once.
        all_reduce: Adds up gradients for all replicas at once; None: they are added up
            on the devices of the user's parameters.
        workers: The processes that train together.
    """

    def __init__(
        self,
        owners: Sequence[torch.Tensor],
        names: Sequence[str],
        parameters: Sequence[Sequence[ReplicaParameter]],
        take_turns: bool,
        all_reduce: AllReduce | None = None,
        workers: Workers = LONE,
    ) -> None:
        self._workers, self._has_others = workers, workers.count > 1
        # What the replicas of this worker have read since the last reduction.
        self._early = EarlyReads()
        # Between runs no variable is held here: it lives only as long as the user has a
        # reference to it.
        self._held = [
            weakref.ref(owner) if is_variable(owner) else _refer_strongly(owner)
            for owner in owners
        ]
        self._own_names = self.names = list(names)
        self.of_replicas = [ReplicaGradients(self, local) for local in parameters]
        # Whether no run of another thread has had the same parameters since. Else a
        # gradient there may be the other's.
        self.is_alone = True
        self._is_remote = [
            any(p.device != o.device for p, o in zip(own, owners, strict=False))
            for own in parameters
        ]
        self._all_reduce = all_reduce
        # Where all replicas would have copies at once, which may be more than the
        # memory, nothing is copied early.
        one_at_a_time = (take_turns or len(parameters) == 1) and all_reduce is None
        pairs = zip(parameters, self._is_remote, strict=True)
        self._early_copies = [
            EarlyCopies(own) if one_at_a_time and is_remote else None
            for own, is_remote in pairs
        ]
        for of_replica, copies in zip(
            self.of_replicas, self._early_copies, strict=True
        ):
            of_replica.sender = copies
        self._take_turns = take_turns
        self._leave()

    def _leave(self) -> None:
        # First, since a signal's handler may raise at any line: once this is None,
        # `abort` gives nothing back again.
        self._replica_weights: Participants | None = None  # None between runs
        self.forget_arrived()
        self.accumulated: list[torch.Tensor | None] = []
        # The gradients that the user's parameters get if the run fails now.
        self._kept: list[torch.Tensor | None] = []
        self._users = UserGradients([])
        # The weighted sum of the local gradients that were added early since the last
        # reduction, and of how many replicas it is.
        self._total: dict[int, torch.Tensor] = {}
        self._num_added = 0
        self.owners: list[torch.Tensor] = []
        # The positions of the user's parameters that have gradient hooks.
        self.hooked: set[int] = set()
        self._run: Run | None = None
        for of_replica in self.of_replicas:
            of_replica.leave()
        for early in self._early_copies:
            if early is not None:
                # Those of a run that failed, or of a replica without rows.
                early.take({})

    def forget_arrived(self) -> None:
        """From here on, accumulated gradients may be written without being counted.

        Torch's version counters do not show such writes.
        """
        # The copies that the all-reduce left on the devices, by the id of an
        # accumulated gradient.
        self._arrived: dict[int, _Arrived] = {}

    def begin(
        self,
        participants: Participants,
        outsiders: Sequence[tuple[torch.Tensor, str]],
        run: Run,
    ) -> None:
        """Takes the gradients of the user's parameters away for the length of a run.

        So a gradient that backward adds to the user's own parameter is noticed.

        Args:
            participants: How much each replica counts.
            outsiders: Further trainable tensors that the step names and of which the
                replicas have no copies, each with its name.
            run: The run.
        """
        referred = [held() for held in self._held]
        # None is missing, since the run holds its variables.
        own = [owner for owner in referred if owner is not None]
        self._run = run
        self.owners = [*own, *(owner for owner, _ in outsiders)]
        self.names = [*self._own_names, *(name for _, name in outsiders)]
        self._has_updated = False
        # See Note [The states of a gradient]. A signal's handler may raise between any
        # two of these lines. Once `_replica_weights` is set, `abort` gives `_kept`
        # back: so it is set after `_kept`, before the slots are empty.
        with _exchanging:
            self._kept = raw_grads(self.owners)
            self.accumulated, self._users = list(self._kept), UserGradients(self._kept)
            self._replica_weights = participants
            set_raw_grads(self.owners, repeat(None))
        if have_gradient_hooks(own):
            self.hooked = {
                index
                for index, owner in enumerate(own)
                if have_gradient_hooks((owner,))
            }
            for index in self.hooked:
                count_additions(self.of_replicas, index)
        for early in self._early_copies:
            if early is not None:
                early.begin(self.owners)

    def accumulate(self, replica: int) -> None:
        """A replica calls this where gradients are to be reduced, or its step ended.

        It calls this on its own thread.

        If this replica is the next one in replica order and no other replica runs, its
        weighted gradients are added to `_total` here, while they are in the processor's
        caches, and their memory is free for the next replica. Later, `reduce` adds the
        total to the accumulated gradients.
        """
        weighing = self._weights.weighing
        is_next = (
            self._num_added < len(weighing) and weighing[self._num_added] == replica
        )
        if self._take_turns and self._all_reduce is None and is_next:
            # As at the end of most steps.
            if not self.of_replicas[replica].has_any_local():
                self._num_added += 1
                return
            # The user's modes, which are in force on this thread, must neither see
            # these operations nor act on them.
            of_replica = self.of_replicas[replica]
            with (
                torch_internals.unseen_by_function_modes(),
                without_autograd(),
                traced("accumulate gradients"),
                of_replica.on_callers_streams(),
            ):
                of_replica.added_early = self._add_up(replica)

    def watch(self, owner: torch.Tensor, name: str) -> None:
        """Until the end of the run, backward may not reach one more tensor.

        The replicas have no copies of this tensor.
        """
        self.owners.append(owner)
        self.names.append(name)
        for gradients in (self.accumulated, self._kept, self._users.tensors):
            gradients.append(raw_grad(owner))

    def end(self) -> None:
        """Gives the user's parameters their accumulated gradients."""
        with _exchanging:
            # Another thread's run may have given them gradients: both are added.
            if not self.is_alone:
                for index, other in enumerate(raw_grads(self.owners)):
                    if other is not None:
                        self._add(index, other)
            self._users.take(self.accumulated)
            set_raw_grads(self.owners, self.accumulated)
            # The write takes a while, so a signal's handler may raise right after it:
            # `abort` must not undo a part.
            self._replica_weights = None
            self._users.write()
        self._leave()

    def abort(self) -> None:
        """Gives the user's parameters the gradients from before the run.

        If the run made an update, they get those from its last one.
        """
        # Else the run has not begun, or has ended.
        if self._replica_weights is not None:
            with _exchanging:
                if not self.is_alone:
                    both = zip(self.owners, self._kept, strict=True)
                    self._kept = [
                        raw_grad(owner) if kept is None else kept
                        for owner, kept in both
                    ]
                self._users.restore()
                set_raw_grads(self.owners, self._kept)
        self._leave()

    @contextmanager
    def published(self) -> Iterator[None]:
        """Reduces gradients.

        For the length of the block the user's parameters have them, as in plain
        PyTorch.
        """
        self.reduce(can_wait=True)
        self._users.take(self.accumulated)
        self._users.write(can_fail=True)
        set_raw_grads(self.owners, self.accumulated)
        try:
            yield
        finally:
            self.forget_arrived()
            self.accumulated = take_raw_grads(self.owners)
            self._users.tensors = list(self.accumulated)
            # After an update, the gradients from before the run belong to parameter
            # values that are gone.
            if self._has_updated:
                self._kept = list(self.accumulated)
                self._users.forget()
            self._show_again()

    def find_arrived(self, gradient: torch.Tensor, replica: int) -> torch.Tensor | None:
        """The accumulated gradient's copy that an all-reduce left on a device.

        It is the device of a replica.

        None if there is none, or somebody has written on the gradient since.
        """
        known = self._arrived.get(id(gradient))
        if known is None or version_of(gradient) != known.version:
            return None
        return known.copies[replica]

    def keep(self) -> None:
        """An update begins.

        If the run fails later, the user's parameters keep the gradients that the update
        leaves.
        """
        self._has_updated = True
        self._users.forget()

    def deliver_late_ones(self) -> None:
        """From here on, passes on gradients of a backward between runs at once.

        They go to the user's parameters.
        """
        deliver_late(
            self._held, [of_replica.parameters for of_replica in self.of_replicas]
        )

    def reduce_in_step(self, reads: Sequence[Reads]) -> list[None]:
        """Reduces gradients at a synchronization point after which the step goes on.

        Args:
            reads: What each replica has read since the last reduction.

        Raises:
            RuntimeError: If a replica has read, as complete, a gradient to which others
                still had to add. The message names the parameter and the replicas.
        """
        if self._has_others or any(read.all for read in reads):
            early = EarlyReads.of(
                [self.of_replicas[r] for r in self._weights.present], reads, self.names
            )
            self._early = EarlyReads() if self._weights.is_understudy else early
        # A hook of one of the user's parameters may update parameters, as an optimizer
        # in a `register_post_accumulate_grad_hook` does. So it is called like an
        # update, as one for all replicas.
        if self.hooked:
            assert self._run is not None
            self._run.call_for_all(_do_nothing)
        else:
            self.reduce()
            self._show_again()
        return [None] * len(reads)

    def reduce(self, can_wait: bool = False) -> None:
        """Adds the local gradients of all replicas to the accumulated gradients.

        Args:
            can_wait: Whether nobody reads the sums before they are written into the
                user's tensors.

        Raises:
            RuntimeError: If some replicas cleared or changed a gradient and others did
                not; or if backward reached an owner itself, which the step used instead
                of the replica's own parameter.
        """
        # See Note [The states of a gradient].
        if self.is_alone:
            for name, stray in zip(self.names, raw_grads(self.owners), strict=True):
                if stray is not None:
                    raise RuntimeError(stray_gradient_message(name))
        seen = (
            find_seen_by_hooks(self.of_replicas, self.owners, self.names)
            if self.hooked
            else set()
        )
        before = list(self.accumulated) if self._has_others else []
        self._reduce_visible()
        with torch.no_grad(), traced("reduce gradients"):
            combined = self._combine()
            if self._has_others:
                combined, seen = self._sum_over_workers(before, combined, seen)
            for of_replica in self.of_replicas:
                # autograd adds in place only without a graph.
                self._users.replace(of_replica.with_graph)
            for index in combined.keys() - seen:
                if not (
                    can_wait
                    and self._users.will_add(
                        index, self.accumulated[index], combined[index]
                    )
                ):
                    self._add(index, combined[index])
            if hooked := sorted(combined.keys() & seen):
                self._send_through_hooks(hooked, [combined[index] for index in hooked])
        if combined and len(self.of_replicas) > 1:
            tell_combined_gradients()

    def _sum_over_workers(
        self,
        before: list[torch.Tensor | None],
        combined: dict[int, torch.Tensor],
        seen: set[int],
    ) -> tuple[dict[int, torch.Tensor], set[int]]:
        """The sums of all workers, and the positions of those that hooks see."""
        assert self._run is not None
        early, self._early = self._early, EarlyReads()
        reduction = WorkerReduction(
            workers=self._workers,
            weights=self._weights,
            owners=self.owners,
            names=self.names,
            before=before,
            accumulated=self.accumulated,
            total=combined,
            seen=seen,
            early=early,
        )
        self._run.before_workers_meet()
        reduction.meet()
        self._run.when_workers_have_met()
        return reduction.sums()

    def _show_again(self) -> None:
        for of_replica in self.of_replicas:
            of_replica.show_again()

    @property
    def _weights(self) -> Participants:
        """How much each replica of the run counts."""
        assert self._replica_weights is not None
        return self._replica_weights

    def _reduce_visible(self) -> None:
        # Replicas with rows decide what becomes of a gradient which they have changed
        # or cleared.
        of_replicas = [
            self.of_replicas[r] for r in self._weights.weighing or self._weights.present
        ]
        first = of_replicas[0].visible
        self._users.replace(index for index, view in first.items() if view.is_other)
        if all(view is CLEARED for view in first.values()) and all(
            other.visible == first for other in of_replicas[1:]
        ):
            # The usual case: every replica called zero_grad(). No gradient has to be
            # compared.
            for index in first:
                self.accumulated[index] = None
        else:
            indices = {
                index for of_replica in of_replicas for index in of_replica.visible
            }
            columns = {
                index: [of_replica.visible.get(index) for of_replica in of_replicas]
                for index in indices
            }
            for index in indices - self._choose_written(columns):
                self.accumulated[index] = self._agree_on(index, columns[index])
        for of_replica in self.of_replicas:
            of_replica.note_reduction()

    def _choose_written(
        self, columns: Mapping[int, Sequence[VisibleGradient | None]]
    ) -> set[int]:
        """Takes gradients on accelerators that all replicas have written.

        Returns the positions of their parameters.
        """
        by_device: dict[Device, dict[int, list[torch.Tensor]]] = {}
        for index, views in columns.items():
            are_written = len(views) > 1 and all(
                view is not None and view.was_written() for view in views
            )
            if not are_written or self.accumulated[index] is None:
                continue
            gradients = [
                view.gradient.detach()
                for view in views
                if view is not None and view.gradient is not None
            ]
            if can_be_chosen(gradients):
                device = self.owners[index].device
                by_device.setdefault(device, {})[index] = [
                    gradient.to(device) for gradient in gradients
                ]
        chosen: dict[int, torch.Tensor] = {}
        for written in by_device.values():
            chosen.update(choose(written, self._merge))
        for index, gradient in chosen.items():
            self.accumulated[index] = gradient
        return set(chosen)

    def _agree_on(
        self, index: int, visible: Sequence[VisibleGradient | None]
    ) -> torch.Tensor | None:
        """What the replicas' visible gradients have left of an accumulated gradient."""
        accumulated, device = self.accumulated[index], self.owners[index].device
        tensors = [
            view.gradient.detach()
            for view in visible
            if view is not None and view.gradient is not None
        ]
        if any(tensor.device != device for tensor in tensors):
            tensors = [tensor.to(device) for tensor in tensors]
        # Where there is nothing to clear, `CLEARED_NOTHING` says the same as `CLEARED`.
        mean_cleared = [CLEARED, CLEARED_NOTHING] if accumulated is None else [CLEARED]
        if all(any(view is cleared for cleared in mean_cleared) for view in visible):
            return None
        # A step may write on its visible gradient through `.data`, which counts no
        # version: the numbers are compared.
        if len(tensors) == len(visible) and all(
            equal(tensor, tensors[0]) for tensor in tensors[1:]
        ):
            # All replicas did the same to the gradient of the whole batch, such as
            # clipping it; or nothing.
            was_written = visible[0] is not None and visible[0].was_written()
            return (
                tensors[0]
                if was_written or not equal(tensors[0], accumulated)
                else accumulated
            )
        has_cleared = any(view is CLEARED for view in visible)
        if not has_cleared and all(equal(tensor, accumulated) for tensor in tensors):
            return accumulated
        if (
            accumulated is None
            and not has_cleared
            and all(view is not None for view in visible)
        ):
            # `zero_grad(set_to_none=False)` left zeros here, where not every replica
            # had a gradient.
            return tensors[0]
        if has_cleared or len(tensors) < len(visible):
            raise RuntimeError(
                f"The replicas disagree about the gradient of {self.names[index]}: "
                "some cleared or changed what was accumulated and others did not. Do "
                "it in every replica, or outside of strategy.run."
            )
        # Each replica put a gradient of its own rows there: they are weighted as local
        # gradients are.
        return self._merge(index, tensors)

    def _merge(self, index: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradient of one parameter.

        Each replica with rows has brought what its own rows make of it.
        """
        accumulated = self.accumulated[index]
        weights = [self._weights.weights[r] for r in self._weights.weighing]
        if self._weights.reduction is ReduceOp.MEAN:
            # The weights of one worker's replicas add up to its part of all rows.
            total = sum(weights) if self._has_others else 1.0
            return weighted_sum(tensors, [weight / total for weight in weights])
        start = torch.zeros_like(tensors[0]) if accumulated is None else accumulated
        return start + weighted_sum([tensor - start for tensor in tensors], weights)

    def _combine(self) -> dict[int, torch.Tensor]:
        """The local gradients of all replicas, weighted and added up.

        They are added up on the devices of the user's parameters.
        """
        weighing = self._weights.weighing
        for r in set(self._weights.present) - set(weighing):
            # Gradients of a replica without rows may be NaN, also times zero: they are
            # dropped.
            self.of_replicas[r].take_local()
        if self._all_reduce is not None:
            return self._combine_by_all_reduce(self._all_reduce)
        for r in weighing[self._num_added :]:
            self._add_up(r)
        total, self._total, self._num_added = self._total, {}, 0
        return total

    def _combine_by_all_reduce(self, all_reduce: AllReduce) -> dict[int, torch.Tensor]:
        """The same by an all-reduce.

        It leaves a copy of each sum on the device of every replica.
        """
        weighing = self._weights.weighing
        local = [self.of_replicas[r].take_local()[0] for r in weighing]
        indices = sorted(set().union(*local))
        sums = all_reduce(
            [[gradients.get(index) for index in indices] for gradients in local],
            [self._weights.weights[r] for r in weighing],
            [
                [of_replica.parameters[index] for index in indices]
                for of_replica in self.of_replicas
            ],
        )
        self.forget_arrived()
        total: dict[int, torch.Tensor] = {}
        for index, column in zip(indices, zip(*sums, strict=True), strict=True):
            gradients = [gradient for gradient in column if gradient is not None]
            # A sum may be a view of the pack in which it was sent, and torch cannot
            # clear a gradient that is a view.
            total[index] = gradient = (
                gradients[0].detach().to(self.owners[index].device)
            )
            self._arrived[id(gradient)] = _Arrived(
                gradient, version_of(gradient), gradients
            )
        return total

    def _add_up(self, r: int) -> set[int]:
        """Adds the gradients of one more replica to the total.

        Returns the positions of their parameters.
        """
        (local, are_ours), weight = (
            self.of_replicas[r].take_local(),
            self._weights.weights[r],
        )
        positions = set(local)
        if self._is_remote[r]:
            local = self._bring_to_owners(local, self._early_copies[r])
        if weight == 1 and len(self._weights.weighing) == 1:
            self._total = (
                {i: in_own_memory(gradient) for i, gradient in local.items()}
                if self._is_remote[r]
                else local
            )
        else:
            # See Note [Where a gradient is weighed] in `_group/weighing`.
            add_weighted(
                self._total, local, weight, are_ours and not self._is_remote[r]
            )
        self._num_added += 1
        return positions

    def _bring_to_owners(
        self, local: dict[int, torch.Tensor], early: EarlyCopies | None
    ) -> dict[int, torch.Tensor]:
        """The gradients of one replica, each on the device of the user's parameter."""
        arrived = {} if early is None else early.take(local)
        left = [index for index in local if index not in arrived]
        by_device: dict[Device, list[int]] = {}
        for index in left:
            by_device.setdefault(self.owners[index].device, []).append(index)
        for device, indices in by_device.items():
            here = copy_to([local[index] for index in indices], device)
            arrived.update(zip(indices, here, strict=True))
        return arrived

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        accumulated = self.accumulated[index]
        self.accumulated[index] = (
            gradient if accumulated is None else accumulated + gradient
        )

    def _send_through_hooks(
        self, indices: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Adds gradients of the whole batch to the accumulated ones.

        The user's hooks see them, each once.
        """
        owners = [self.owners[index] for index in indices]
        before = [self.accumulated[index] for index in indices]
        set_raw_grads(
            owners,
            [
                None if accumulated is None else accumulated.clone()
                for accumulated in before
            ],
        )
        send_through_hooks(owners, gradients)
        for index, gradient in zip(indices, take_raw_grads(owners), strict=True):
            self.accumulated[index] = gradient


def _do_nothing() -> None:
    """An update that does nothing."""


def _refer_strongly(owner: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    return lambda: owner


# Runs of several threads take gradients from the same parameters, and give them back.
_exchanging = threading.RLock()


# A compiled step calls this, too. A compiler that followed it would trace locks, and
# sums of other replicas.
torch_internals.hide_from_compiler(GradientReducer.accumulate)
