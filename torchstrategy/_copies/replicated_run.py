"""What all replicas have of the user's modules and optimizers, and one run on it.

How a run begins, ends and is undone.

A `ReplicaSet` lives from run to run, since to make copies takes longer than most steps.
A `ReplicatedRun` is one call of `run` on such a set: what depends on the step, and what
acts for all replicas while they stand still. So a run that fails leaves nothing but a
set that is not used again.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.context import (
    current_frame,
    is_in_replica,
    using_device,
    without_autograd,
)
from torchstrategy._base.devices import memory_device
from torchstrategy._base.marks import Versions
from torchstrategy._base.objects.proxies import (
    is_torchs,
    parameters_of,
    plain_class,
    suspended,
    users_own,
)
from torchstrategy._base.types import Tree
from torchstrategy._copies.attributes.kept_by_hooks import KeptInRun
from torchstrategy._copies.attributes.trainers import (
    SharedGlobal,
    SharedTrainer,
    Trainer,
)
from torchstrategy._copies.gradients.gradient_reducer import GradientReducer
from torchstrategy._copies.gradients.replica_gradients import (
    ReplicaParameter,
)
from torchstrategy._copies.modules.replicated_modules import ReplicatedModules
from torchstrategy._copies.optimizer_copies import OptimizerCopies, can_have_copies
from torchstrategy._copies.replica_steppers import (
    OptimizerHost,
    ReplicaOptimizer,
    SharedStepper,
)
from torchstrategy._copies.run_warnings import (
    PLAIN_BATCH,
    SharedWrites,
    mark_training,
    warn_of_plain_batch,
)
from torchstrategy._group.group import Replica
from torchstrategy._group.participants import Participants
from torchstrategy._run.losses.loss_watchers import CLOSURE_OF_TERMS
from torchstrategy._run.placement import Placement
from torchstrategy._run.refusals import written_parameter
from torchstrategy._variables.variable import Variable, is_variable


@final
class ReplicaSet:
    """What all replicas have of the user's modules and optimizers, for one run.

    Args:
        roots: The user's modules that are part of no other.
        variables: The user's variables.
        optimizers: The user's optimizers.
        placement: Where the copies are, and how they are kept in step.

    Attributes:
        generation: A number that the storage counts up when the user's set of modules
            changes.
        thread: The thread that called the run which has this set.
    """

    generation = thread = 0

    def __init__(
        self,
        roots: list[nn.Module],
        variables: Sequence[Variable],
        optimizers: list[Optimizer],
        placement: Placement,
    ) -> None:
        self.placement = placement
        self.replicated = ReplicatedModules(roots, placement, variables)
        # A variable needs no proxy: it asks by itself which replica it is in.
        self.plain_owners = [
            o
            for o in self.replicated.owners
            if isinstance(o, nn.Parameter) and not is_variable(o)
        ]
        self._take_optimizers(optimizers)

    def bring_up_to_date(self, optimizers: Sequence[Optimizer]) -> bool:
        """Brings what the user wrote on modules and optimizers to the copies.

        False if a new set has to be made.
        """
        if not self.replicated.refresh():
            return False
        # The gradients of a set are those of the parameters of these optimizers, and
        # their copies are made for these parameters: after `add_param_group`, or where
        # a parameter moved, both are made anew.
        if (
            _signature(optimizers) != self._optimizer_signature
            or self.replicated.list_sharing() != self._sharing
        ):
            self._take_optimizers(optimizers)
        return True

    def originals(self) -> list[object]:
        """The user's objects that become proxies during a run."""
        return [*self.replicated.originals(), *self.optimizers(), *self.plain_owners]

    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers."""
        return [
            optimizer
            for reference in self._optimizers
            if (optimizer := reference()) is not None
        ]

    def _take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._optimizer_signature = _signature(optimizers)
        # Parameters that an optimizer has and no module, such as those of a layer that
        # the user has removed. Replicas have no copies of them, and may clear and read
        # their gradients.
        loose: dict[int, torch.Tensor] = {}
        names_of_loose: list[str] = []
        for optimizer in optimizers:
            for name, parameter in _name_parameters(optimizer):
                if (
                    id(parameter) not in self.replicated.index_of
                    and id(parameter) not in loose
                ):
                    loose[id(parameter)] = parameter
                    names_of_loose.append(
                        f"{name}, a tensor of shape {tuple(parameter.shape)},"
                    )
        self.gradients = GradientReducer(
            owners=[*self.replicated.owners, *loose.values()],
            names=[*self.replicated.names, *names_of_loose],
            parameters=[replica.parameters for replica in self.replicated.replicas],
            # Replicas on one device run one at a time.
            take_turns=len({memory_device(device) for device in self.placement.devices})
            == 1,
            all_reduce=self.placement.all_reduce,
            workers=self.placement.workers,
        )
        indices = {
            key: index for index, key in enumerate([*self.replicated.index_of, *loose])
        }
        # By optimizer: the positions of its parameters, by their ids.
        self.optimized: dict[int, dict[int, int]] = {}
        for optimizer in optimizers:
            self.optimized[id(optimizer)] = {
                id(p): indices[id(p)] for p in parameters_of(optimizer)
            }
        self.known = indices.keys()
        self._sharing = self.replicated.list_sharing()
        self._local = self.replicated.own_parameters()
        # The user's optimizer updates the first replica's parameters only if these
        # share the memory of the user's.
        is_updated = (
            self.placement.is_mirrored and self._local and all(self._sharing[0])
        )
        followed = [
            optimizer
            for optimizer in optimizers
            if is_updated and can_have_copies(optimizer)
        ]
        self._optimizer_copies = {
            id(optimizer): OptimizerCopies(optimizer, self._local)
            for optimizer in followed
        }

    def own_state(
        self, optimizer: Optimizer, replica: int
    ) -> Callable[[], dict[torch.Tensor, Any]] | None:
        """Returns a function for the state of a replica's copy of an optimizer.

        It is None if the replica has no copy.
        """
        copies = self._optimizer_copies.get(id(optimizer))
        if copies is None or replica not in copies.of_replicas:
            return None
        return functools.partial(copies.state, optimizer, replica)

    def begin_step(self, optimizer: Optimizer) -> None:
        """The user's optimizer is about to take a step.

        Its copies get the settings and the state that it has now.
        """
        copies = self._optimizer_copies_of(optimizer)
        if copies is not None:
            with without_autograd():
                if _signature([optimizer])[0] not in self._optimizer_signature:
                    copies = self._optimizer_copies[id(optimizer)] = OptimizerCopies(
                        optimizer, self._local
                    )
                self.replicated.refresh_parameters()
                self.replicated.wait_until_sent()
                copies.begin(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """The user's optimizer has taken a step: its copies take the same step."""
        copies = self._optimizer_copies_of(optimizer)
        if copies is not None:
            owners = [
                parameter
                for parameter in parameters_of(optimizer)
                if id(parameter) in self.replicated.index_of
            ]
            if copies.step(optimizer, owners, self.gradients.find_arrived):
                self.replicated.note_updated(owners)

    def _optimizer_copies_of(self, optimizer: Optimizer) -> OptimizerCopies | None:
        copies = self._optimizer_copies.get(id(optimizer))
        # If parameters moved to other memory in this run, the copies would update the
        # old memory. So values are sent until the next run, which makes new copies.
        if (
            copies is None
            or not can_have_copies(optimizer)
            or self.replicated.list_sharing() != self._sharing
        ):
            return None
        return copies


def _signature(optimizers: Sequence[Optimizer]) -> list[tuple[int, list[list[int]]]]:
    """What differs once there are other optimizers, or one has other parameters.

    They may be in other groups.
    """
    signature = []
    for optimizer in optimizers:
        groups = users_own(optimizer, "param_groups")
        signature.append(
            (id(optimizer), [list(map(id, group["params"])) for group in groups])
        )
    return signature


def _name_parameters(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for i, group in enumerate(users_own(optimizer, "param_groups")):
        for j, parameter in enumerate(group["params"]):
            yield (
                f"{type(optimizer).__name__}.param_groups[{i}]['params'][{j}]",
                parameter,
            )


# Enters the strategy's cross-replica context.
CrossReplica = Callable[[], AbstractContextManager[None]]


@final
@dataclass(eq=False)
class ReplicatedRun(OptimizerHost):
    """One run on one replica set: its replicas' things, what acts for all, how it ends.

    Args:
        replica_set: The replica set.
        participants: How much each replica counts.
        outsiders: Trainable tensors that the step names and of which replicas have no
            copies, each with its name.
        steppers: The schedulers and scalers of the strategy, and those that the step
            names.
        trainers: The user's objects that hold models, with their attributes in each
            replica.
        shared_trainers: Those that all replicas share, and what hooks reach by a global
            name.
        kept: What hooks keep outside of the model; None if they keep nothing.
        enter_cross_replica: Enters the strategy's cross-replica context.
        watch: Looks on while the replicas run, for writes on shared tensors.
        warned: What users were warned of before.
        trained_before: What `mark_training` returned when the run began, if the
            arguments have rows and were not distributed.
    """

    replica_set: ReplicaSet
    participants: Participants
    outsiders: Sequence[tuple[torch.Tensor, str]]
    steppers: Sequence[Any]
    trainers: Sequence[Trainer]
    shared_trainers: Sequence[SharedTrainer | SharedGlobal]
    kept: KeptInRun | None
    enter_cross_replica: CrossReplica
    watch: SharedWrites | None
    warned: set[tuple[int, str]]
    trained_before: list[object] | None
    _lent: list[Replica] = field(default_factory=list)
    # By replica: what stands there for the user's objects.
    _local: dict[int, Mapping[int, object]] = field(default_factory=dict)
    # By replica.
    _optimizers: dict[int, list[ReplicaOptimizer]] = field(default_factory=dict)
    # The message for an optimizer that took a step on a thread of the user's own. The
    # caller's thread raises it later: on the other thread, nobody might see it.
    _on_other_thread: str | None = None
    # While it is open, the user's parameters have their gradients; see `show`.
    _shown: ExitStack = field(default_factory=ExitStack)
    _callers_device: torch.device = field(default_factory=torch.get_default_device)

    def __post_init__(self) -> None:
        # A variable that is not the strategy's may be assigned, and each replica does
        # so for itself: it is not checked.
        checked = [
            (tensor, name) for tensor, name in self.outsiders if not is_variable(tensor)
        ]
        self._names_of_outsiders = [name for _, name in checked]
        # None: the step names no such tensor, as mostly.
        self._outsiders_then = (
            Versions([tensor for tensor, _ in checked]) if checked else None
        )
        # The threads that act for all replicas: the caller's; and the first replica's,
        # while an optimizer's loop runs.
        self._threads = {threading.get_ident()}
        # All that replicas have attributes or items of their own of.
        self._writers: list[Trainer | KeptInRun] = [
            *self.trainers,
            *([] if self.kept is None else [self.kept]),
        ]

    def proxies(self) -> list[object]:
        """The user's objects besides modules and optimizers that become proxies."""
        kept = [] if self.kept is None else self.kept.proxies()
        return [
            *self.steppers,
            *(trainer.original for trainer in (*self.trainers, *kept)),
        ]

    def local_objects(self, replica: Replica) -> Mapping[int, object]:
        """What `replica` has in place of the user's objects, by the ids of the user's.

        Called on the replica's thread, when the step begins there.
        """
        replica_set, r = self.replica_set, replica.index
        kept = [] if self.kept is None else self.kept.proxies()
        self._lent.append(replica)
        gradients = replica_set.gradients.of_replicas[r]
        gradients.enter(replica)
        own: list[ReplicaOptimizer] = []
        for optimizer in replica_set.optimizers():
            made = ReplicaOptimizer(
                optimizer=optimizer,
                replica=replica,
                gradients=gradients,
                index_of=replica_set.optimized[id(optimizer)],
                host=self,
                leads=r == self.participants.present[0],
                own_state=replica_set.own_state(optimizer, r),
            )
            own.append(made)
        self._optimizers[r] = own
        trainers = (*self.trainers, *kept)
        self._local[r] = local = {
            **replica_set.replicated.replicas[r].local_objects,
            **{id(trainer.original): trainer.attributes[r] for trainer in trainers},
            **{id(one.optimizer): one for one in own},
            **{
                id(stepper): SharedStepper(stepper, replica, self)
                for stepper in self.steppers
            },
        }
        return local

    @contextmanager
    def published(
        self, optimizer: Optimizer | None = None, is_for_optimizer: bool = False
    ) -> Iterator[Callable[[Any], Any] | None]:
        """A block in which the user's own parameters have the accumulated gradients.

        They are those of the run.

        Args:
            optimizer: The optimizer of which the block does no more than call a method.
            is_for_optimizer: Whether an optimizer acts in the block. All else may write
                on gradients there in ways that torch does not count: a merge function
                through `.data`; a scaler, which divides them by its scale.
        """
        # Writes of the step on parameters are looked for now: after the block they
        # could not be told from an update.
        self._check_unwritten()
        # Optimizers look at the class of parameters, and update those of a subclass one
        # after the other, which is slow. So while an optimizer steps, the user's
        # parameters are no proxies.
        with (
            suspended(self.replica_set.plain_owners, self.replica_set),
            self.replica_set.gradients.published(),
        ):
            if not is_for_optimizer:
                self.replica_set.gradients.forget_arrived()
            # A merge function of a replica is over what the replica has for itself, and
            # acts for all.
            yield None if self.kept is None else self.kept.to_users
        for own in chain.from_iterable(self._optimizers.values()):
            own.forget_settings()
        with without_autograd():
            self.replica_set.replicated.refresh_parameters(
                in_run=True, optimizer=optimizer
            )
        for writer in self._writers:
            writer.refresh()
        for shared in self.shared_trainers:
            shared.refresh()
        if self._outsiders_then is not None:
            self._outsiders_then.take()

    def call_for_all(
        self, call: Callable[[], Tree], optimizer: Optimizer | None = None
    ) -> Tree:
        with (
            self.enter_cross_replica(),
            self._updating(optimizer, optimizer is not None),
        ):
            result = call()
            self._has_written(optimizer)
            return result

    def before_workers_meet(self) -> None:
        if self.replica_set.placement.streams is not None:
            self.replica_set.placement.streams.mention()

    def when_workers_have_met(self) -> None:
        if self.replica_set.placement.streams is not None:
            self.replica_set.placement.streams.settle()
        self.replica_set.replicated.check_workers()

    def compare(self, name: str, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.replica_set.placement.workers.compare(f"the arguments of {name}:", given)

    @contextmanager
    def cross_replica(self) -> Iterator[None]:
        before = self._threads
        self._threads = before | {threading.get_ident()}
        try:
            with self.enter_cross_replica(), using_device(self._callers_device):
                yield
        finally:
            self._threads = before

    def show(self) -> None:
        self._shown.enter_context(self._updating(None, is_for_optimizer=True))
        self.replica_set.gradients.keep()

    def stop_showing(self, optimizer: Optimizer | None = None) -> None:
        self._has_written(optimizer)
        self._shown.close()

    def combine_losses(self, losses: Sequence[Any]) -> Any:
        if any(loss is None for loss in losses):
            return None
        present, weights = self.participants.present, []
        for r in present:
            factor = self.replica_set.gradients.of_replicas[r].loss_factor
            if factor is None:
                raise RuntimeError(CLOSURE_OF_TERMS)
            weights.append(self.participants.weights[r] * factor)
        here = [
            loss.cpu() if isinstance(loss, torch.Tensor) else loss for loss in losses
        ]
        # What does not count may be NaN, and 0 * NaN is NaN.
        total = sum(
            loss * weight for loss, weight in zip(here, weights, strict=True) if weight
        )
        workers = self.replica_set.placement.workers
        if workers.count == 1:
            return total
        (of_all,) = workers.all_reduce(
            [torch.as_tensor(total, dtype=torch.float64)], "the loss of a closure"
        )
        return (
            of_all.to(losses[0].dtype)
            if isinstance(losses[0], torch.Tensor)
            else of_all.item()
        )

    def end(self) -> None:
        """Brings everything that the run made to the user's own objects.

        The parts that may raise come first.
        """
        # See Note [The order of a run and of its undoing] in `replicated_storage`, step
        # 7.
        self._check_unwritten()
        changes = self.replica_set.replicated.check_structure(self.participants.present)
        self._check_settings()
        with without_autograd():
            for writer in self._writers:
                writer.put_together()
            self.replica_set.replicated.put_together(self.participants, changes)
            # It also tells whether the workers wrote the same buffers.
            self.replica_set.gradients.reduce(can_wait=True)
            self.replica_set.replicated.return_to_originals(self.participants, changes)
        # A list, since all are written.
        if any([writer.write_back() for writer in self._writers]):
            self.replica_set.gradients.deliver_late_ones()
        self._return_settings()
        self.replica_set.gradients.end()

    def warn(self) -> None:
        """After the run: warns of numbers that may not be those of one device."""
        if self.watch is not None:
            self.watch.warn()
        replicated = self.replica_set.replicated
        if replicated.lost_numbers.differing:
            replicated.lost_numbers.warn(self.warned)
        if self.trained_before is None or any(
            replica.was_asked for replica in self._lent
        ):
            return
        if self.trained_before != mark_training(replicated.owners):
            self.warned.add(PLAIN_BATCH)
            warn_of_plain_batch(len(self._lent))

    def let_go(self) -> None:
        """Drops the objects that the replicas had.

        Their memory would else wait for Python's collector of cycles.
        """
        self._local.clear()
        self._optimizers.clear()
        self.replica_set.replicated.kept.is_under_way = False
        if self.kept is not None:
            self.kept.let_go()
        self.replica_set.replicated.wait_until_sent()

    def before_any_step(self, optimizer: Optimizer) -> None:
        """Called before any optimizer in the process takes a step, on its thread."""
        frame = current_frame()
        in_this_run = frame is not None and any(
            frame.local_objects is local for local in list(self._local.values())
        )
        is_on_other_thread = (
            not in_this_run and threading.get_ident() not in self._threads
        )
        # The optimizer belongs to another run, or to this run on the thread of a
        # replica.
        if not in_this_run and (
            is_in_replica() or (is_on_other_thread and frame is not None)
        ):
            return
        # Else the optimizer trains something that the step made itself.
        known = self.replica_set.known | {id(tensor) for tensor, _ in self.outsiders}
        if not any(
            isinstance(p, ReplicaParameter) or id(p) in known
            for p in parameters_of(optimizer)
        ):
            return
        if is_on_other_thread:
            names = (
                plain_class(type(optimizer)).__name__,
                threading.current_thread().name,
            )
            self._on_other_thread = _ON_OTHER_THREAD.format(*names)
        elif in_this_run:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called in a replica, and the "
                "optimizer was not created in strategy.scope(): every replica would "
                "take a step of its own on the shared parameters. Create it, and its "
                "model, in the scope; or give them to "
                "strategy.distribute_module(model) and "
                "strategy.distribute_optimizer(optimizer); or step after strategy.run."
            )
        else:
            self.replica_set.gradients.keep()

    def _has_written(self, optimizer: Optimizer | None) -> None:
        """Says that an optimizer may have written on parameters without a count."""
        # Torch's own optimizers count their writes, but for fused ones, which
        # `ReplicatedStorage` handles. Others may write through `.data`, and need not
        # call the hooks that torch calls at each step.
        if optimizer is not None and not is_torchs(optimizer):
            self.replica_set.gradients.keep()
            self.replica_set.replicated.note_written(parameters_of(optimizer))

    def _check_unwritten(self) -> None:
        self.replica_set.replicated.wait_until_sent()
        for trainer in self.shared_trainers:
            trainer.check_unwritten()
        # Else a run of another thread may have trained the same parameters meanwhile.
        if self.replica_set.gradients.is_alone:
            if self._on_other_thread is not None:
                raise RuntimeError(self._on_other_thread)
            self.replica_set.replicated.check_unwritten(self.participants.present)
            written = (
                [] if self._outsiders_then is None else self._outsiders_then.written()
            )
            if written:
                raise RuntimeError(
                    written_parameter(self._names_of_outsiders[written[0]])
                )

    def _updating(
        self, optimizer: Optimizer | None, is_for_optimizer: bool
    ) -> AbstractContextManager[object]:
        self.replica_set.replicated.check_structure(self.participants.present)
        self._check_settings()
        # The update is to use the learning rate that the step has just set.
        self._return_settings()
        return self.published(optimizer, is_for_optimizer)

    def _check_settings(self) -> None:
        """Refuses settings of optimizers that cannot become one.

        See `ReplicaOptimizer.refuse_other_settings`.
        """
        lead, *others = self.participants.present
        for i, optimizer in enumerate(self._optimizers.get(lead, [])):
            optimizer.refuse_other_settings(
                lead,
                {r: self._optimizers[r][i] for r in others if r in self._optimizers},
            )
            if self.replica_set.placement.workers.count > 1:
                name = plain_class(type(optimizer.optimizer)).__name__
                self.replica_set.placement.workers.compare(
                    f"the settings of {name}:", optimizer.settings()
                )

    def _return_settings(self) -> None:
        for optimizer in self._optimizers.get(self.participants.present[0], []):
            optimizer.return_settings()


_ON_OTHER_THREAD = (
    "{}.step() was called on the thread {!r}, which is none of a replica, while "
    "strategy.run was at work with the same parameters. A thread that a step starts "
    "has your own model and optimizer, not its replica's; so has a hook that autograd "
    "calls on a thread of its own. Call backward and optimizer.step() in the step "
    "itself; or train on the other thread when strategy.run has returned."
)
