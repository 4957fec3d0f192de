"""The storage of a strategy with several replicas in one process.

Its runs borrow replica sets from it.

A storage takes in the modules, variables and optimizers that are created in the
strategy's scope. A replica set has the copies of all replicas for one run. Each run
borrows one. One set serves all runs that follow one another. Runs at the same time, of
several threads or from a merge function, get sets of their own, so no two runs ever use
the same copy.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.context import (
    is_accelerator,
    is_in_replica,
    remember_frames,
    without_autograd,
)
from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.objects.module_traversal import modules_within, roots_of
from torchstrategy._base.objects.proxies import (
    install,
    is_all_in_dict,
    is_torchs,
    parameters_of,
    uninstall,
    users_own,
)
from torchstrategy._base.objects.torch_hooks import Stepper, tell_of_steps
from torchstrategy._base.torch_internals import GLOBAL_MODULE_HOOKS
from torchstrategy._base.trace import traced
from torchstrategy._base.types import ReplicaFn, Tree
from torchstrategy._base.weak_references import living
from torchstrategy._base.writes import listen_to_data
from torchstrategy._copies.attributes.kept_by_hooks import KeptInRun
from torchstrategy._copies.attributes.trainers import (
    RunReplicas,
    SharedGlobal,
    SharedTrainer,
    Trainer,
)
from torchstrategy._copies.device_errors import explain_devices
from torchstrategy._copies.references.step_references import (
    StepReferences,
    find_references,
    list_held,
)
from torchstrategy._copies.refusals import refuse_uncopyable
from torchstrategy._copies.replica_steppers import refuse_bound_methods
from torchstrategy._copies.replicated_run import CrossReplica, ReplicaSet, ReplicatedRun
from torchstrategy._copies.run_warnings import (
    PLAIN_BATCH,
    SharedTensors,
    has_plain_rows,
    mark_training,
)
from torchstrategy._group.participants import Participants
from torchstrategy._run.placement import Placement
from torchstrategy._run.shared_methods import make_ready
from torchstrategy._run.storage import Storage
from torchstrategy._run.worker_values import take_from_first_worker
from torchstrategy._variables.kinds import SyncOnReadVariable, unwritten
from torchstrategy._variables.variable import Variable


@final
class ReplicatedStorage(Storage):
    """The user's parameters live on one device, and each replica has copies.

    These follow, or take the same updates.

    Args:
        placement: Where the copies are, and how they are kept in step.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._steppers: weakref.WeakValueDictionary[int, Stepper] = (
            weakref.WeakValueDictionary()
        )
        self._variables: dict[int, weakref.ref[Variable]] = {}
        self._on_read: weakref.WeakValueDictionary[int, SyncOnReadVariable] = (
            weakref.WeakValueDictionary()
        )
        self._idle: list[ReplicaSet] = []
        # Those that runs have borrowed, with the runs that are told before any
        # optimizer takes a step.
        self._in_use: dict[ReplicaSet, ReplicatedRun | None] = {}
        self._shared = SharedTensors()
        self._warned: set[tuple[int, str]] = set()  # what is warned of once
        # The ids of modules and variables that no run has had yet.
        self._new: set[int] = set()
        # Grows by 1 when modules or variables come or go. A replica set with another
        # number is not used again.
        self._generation = 0
        # Runs of several threads may borrow and return sets at the same time.
        self._lock = threading.RLock()
        # While it is true, new modules are copies and not the user's.
        self._is_copying = False
        self._on_death = functools.partial(_forget, weakref.ref(self))
        tell_of_steps(self)
        if any(map(is_accelerator, (*self.devices, self.parameter_device))):
            listen_to_data()

    # Note [The order of a run and of its undoing]
    # 0. If a worker has new modules or variables, all workers take the values of worker
    #    0. This is not undone.
    # 1. The run takes a replica set that no other run has, and brings it up to date.
    # 2. `ReplicatedRun` is made. It notes the versions of outsiders, so that a step
    #    that writes on one is refused.
    # 3. From here on, the run is told of every step of an optimizer before it is taken.
    #    It refuses those of optimizers that are not the strategy's.
    # 4. The first replica gets the states of the user's metrics, the others the default
    #    states.
    # 5. `.grad` is taken away from the user's parameters. See Note [The states of a
    #    gradient].
    # 6. The user's objects become proxies: in a replica, each acts as the replica's own
    #    object. The replicas run, and the objects get their own classes back.
    # 7. `end` checks everything that may be refused, then writes on the user's objects,
    #    and gives `.grad` back last.
    # If anything fails after 1, the set is never used again, and what was done is
    # undone in this order:
    # - This thread leaves the replica that it was in (6). The user's objects are no
    #   proxies any more (6), since all else writes on them.
    # - The user's modules may have a `PerReplica` of tensors, on which the step may
    #   have written in place. These tensors get back the values from before the run
    #   (1).
    # - If the loop of an optimizer with a closure was under way, the block in which the
    #   user's parameters have gradients is left. What any optimizer has written on
    #   parameters stays.
    # - The gradients are given back (5): those from before the run, or those that its
    #   last update left.
    # The states of metrics (4) are not undone: the replicas have copies of them, which
    # are dropped with the set. Whether or not the run failed, 3 and 1 are undone last.
    # A signal's handler may raise at any line. So each of these must also work if what
    # it undoes was not done.
    @contextmanager
    def begin_run(
        self,
        participants: Participants,
        fn: ReplicaFn,
        leaves: Sequence[Tree],
        cross_replica: CrossReplica,
    ) -> Iterator[ReplicatedRun]:
        """A run, from when it begins until it ends or fails.

        Args:
            participants: How much each replica counts.
            fn: The step.
            leaves: The leaves of its arguments.
            cross_replica: Enters the strategy's cross-replica context.
        """
        named = find_references(fn, leaves)
        self._take_wrappers(named)
        ours = [
            (name, method)
            for name, method in named.updates
            if id(method.__self__) in self._optimizers
        ]
        refuse_bound_methods([*named.steppers, *ours])
        # The numbers below are the steps of Note [The order of a run and of its
        # undoing].
        if participants.has_news:  # 0
            self._take_from_first_worker()
        # The list keeps the variables alive for as long as the run has copies of them.
        variables = living(self._variables.values())
        run_state = None
        originals: list[Any] = []
        leave_replicas = remember_frames()
        replica_set = self._borrow(variables)  # 1
        # A signal's handler may raise anywhere here: whatever was done is undone,
        # whether or not it was completed.
        try:
            originals += replica_set.originals()
            run_state = self._make_run(
                replica_set, participants, named, fn, leaves, cross_replica
            )  # 2
            originals += run_state.proxies()
            self._in_use[replica_set] = run_state  # 3
            for metric in replica_set.replicated.metrics:  # 4
                metric.hand_out(participants)
            # 5
            replica_set.gradients.begin(participants, run_state.outsiders, run_state)
            install(originals, replica_set)  # 6
            yield run_state
            uninstall(originals, replica_set)
            run_state.end()  # 7
        except BaseException as error:
            leave_replicas()
            explain_devices(
                error, named, self._modules, replica_set.known, self.devices
            )
            # A step that failed may have written anything on the copies.
            replica_set.generation = -1
            uninstall(originals, replica_set)
            replica_set.replicated.attributes.restore()
            try:
                if run_state is not None:
                    run_state.stop_showing()
            finally:
                replica_set.gradients.abort()
            raise
        finally:
            if run_state is not None:
                run_state.let_go()
            self._return(replica_set)
            variables.clear()

    def _take_from_first_worker(self) -> None:
        """Gives the modules and variables of the scope the values of worker 0."""
        # What the user has dropped must not be compared, so Python's collector of
        # cycles runs first.
        gc.collect()
        known: list[weakref.ref[Any]] = [
            *self._variables.values(),
            *self._on_read.valuerefs(),
        ]
        roots = roots_of(modules_within(living(self._modules.values())))
        take_from_first_worker(self.placement.workers, roots, variables=living(known))

    def _make_run(
        self,
        replica_set: ReplicaSet,
        participants: Participants,
        named: StepReferences,
        fn: ReplicaFn,
        leaves: Sequence[Tree],
        cross_replica: CrossReplica,
    ) -> ReplicatedRun:
        """The run, with what its step names beside modules.

        That is steppers, trainers, and tensors without copies.
        """
        # The schedulers and scalers of the scope, and those that the step names.
        found = [
            *living(self._steppers.valuerefs()),
            *(stepper for _, stepper in named.steppers),
        ]
        steppers = list({id(stepper): stepper for stepper in found}.values())
        if steppers:
            with without_autograd():
                make_ready(steppers, self.parameter_device)
        num_replicas = len(self.devices)
        run = RunReplicas(
            num_replicas=num_replicas,
            present=participants.present,
            has_others=self.placement.workers.count > 1,
            is_understudy=participants.is_understudy,
        )
        kept = self._kept_by_hooks(replica_set, run, named, [fn, *leaves])
        trainers: list[Trainer] = []
        shared_trainers: list[SharedTrainer | SharedGlobal] = []
        # A lone replica has the user's own trainers: nobody else reads what it writes.
        if num_replicas > 1:
            trainers, shared_trainers = _make_trainers(named, run, kept)
        several = len(participants.present) > 1
        # None if the step reaches no tensor that all replicas share.
        may_share = (
            named.others
            or named.tensors
            or any(id(module) not in self._modules for _, module in named.modules)
        )
        watch = (
            self._shared.watch(named, self._modules, replica_set.known)
            if several and may_share
            else None
        )
        may_be_plain = several and not any(
            isinstance(leaf, PerReplica) for leaf in leaves
        )
        is_plain = (
            may_be_plain and PLAIN_BATCH not in self._warned and has_plain_rows(leaves)
        )
        before = mark_training(replica_set.replicated.owners) if is_plain else None
        return ReplicatedRun(
            replica_set=replica_set,
            participants=participants,
            outsiders=self._find_outsiders(replica_set, named),
            steppers=steppers,
            trainers=trainers,
            shared_trainers=shared_trainers,
            kept=kept,
            enter_cross_replica=cross_replica,
            watch=watch,
            warned=self._warned,
            trained_before=before,
        )

    def _find_outsiders(
        self, replica_set: ReplicaSet, named: StepReferences
    ) -> list[tuple[torch.Tensor, str]]:
        """The parameters and trainable tensors without copies, each with its name.

        Replicas have no copies of them.
        """
        unknown = [
            (name, tensor)
            for name, tensor in named.tensors
            if id(tensor) not in replica_set.known
        ]
        outsiders = [
            (tensor, f"{name}, a tensor of shape {tuple(tensor.shape)},")
            for name, tensor in unknown
        ]
        for name, module in named.modules:
            if id(module) not in self._modules:
                pairs = (
                    (parameter, f"{name}.{path}")
                    for path, parameter in module.named_parameters()
                )
                outsiders += [
                    pair for pair in pairs if id(pair[0]) not in replica_set.known
                ]
        return outsiders

    def _kept_by_hooks(
        self,
        replica_set: ReplicaSet,
        run: RunReplicas,
        named: StepReferences,
        calls: Sequence[Any],
    ) -> KeptInRun | None:
        """What each replica has for what hooks keep outside of the model."""
        replicated = replica_set.replicated
        modules = [
            module for _, module in named.modules if id(module) not in self._modules
        ]
        if not (replicated.kept.hooks or modules or any(GLOBAL_MODULE_HOOKS)):
            return None
        return replicated.kept.begin(
            run,
            calls,
            others=[part for module in modules for part in module.modules()],
            local=[replica.local_objects for replica in replicated.replicas],
            users=replicated.known_in_replicas,
        )

    @property
    def has_news(self) -> bool:
        """Whether there are modules or variables that no run has had yet."""
        return bool(self._new)

    def as_before(self) -> AbstractContextManager[None]:
        """A block for an understudy, which takes back what it wrote.

        Variables with a value for each replica get the values from before.
        """
        return unwritten(living(self._on_read.valuerefs()))

    def take_module(self, module: nn.Module) -> None:
        refuse_uncopyable(roots_of(modules_within([module])), are_all=False)
        super().take_module(module)

    def take_part(self, module: nn.Module) -> None:
        if id(module) in self._modules or self._is_copying or is_in_replica():
            return
        self.claim(module)
        self._modules[id(module)] = weakref.ref(module, self._on_death)
        self._new.add(id(module))

    def take_variable(self, variable: Variable) -> None:
        self.claim(variable)
        self._new.add(id(variable))
        # Each replica has a value of such a variable already.
        if isinstance(variable, SyncOnReadVariable):
            self._on_read[id(variable)] = variable
        else:
            self._variables[id(variable)] = weakref.ref(variable, self._on_death)
            # The run in which the variable is made has no copies of it: a backward that
            # reaches it is refused.
            for replica_set in self._find_at_rest() if self._in_use else []:
                replica_set.gradients.watch(variable, variable.name)

    def take_stepper(self, stepper: Optimizer | Stepper) -> None:
        if is_in_replica():
            return
        if isinstance(stepper, Optimizer):
            self._optimizers[id(stepper)] = weakref.ref(stepper, self._on_death)
        else:
            self._steppers[id(stepper)] = stepper  # no copies depend on it

    def _borrow(self, variables: Sequence[Variable]) -> ReplicaSet:
        with self._lock, without_autograd():
            optimizers = living(self._optimizers.values())
            if any(
                key in self._modules or key in self._variables
                for key in list(self._new)
            ):
                self._generation += 1
            self._new.clear()
            # The last set that was returned comes first. One that does not fit any more
            # is dropped.
            while self._idle:
                replica_set = self._idle.pop()
                if (
                    replica_set.generation == self._generation
                    and replica_set.bring_up_to_date(optimizers)
                ):
                    break
            else:
                generation, replica_set = (
                    self._generation,
                    self._make_replica_set(variables, optimizers),
                )
                # Of before: another thread may have counted it up meanwhile.
                replica_set.generation = generation
            # None of these runs can tell which of them has written a parameter.
            if self._in_use:
                for other in (replica_set, *self._in_use):
                    other.gradients.is_alone = False
            replica_set.thread = threading.get_ident()
            self._in_use[replica_set] = None
            return replica_set

    def _find_at_rest(self) -> list[ReplicaSet]:
        """The replica sets that this thread may write, since no replica uses them now.

        During a run: its set, if this thread called the run. Between runs: the set used
        last.
        """
        with self._lock:
            if not self._in_use:
                return self._idle[-1:]
            newest = list(self._in_use)[-1]
            return [newest] if newest.thread == threading.get_ident() else []

    def _make_replica_set(
        self, variables: Sequence[Variable], optimizers: list[Optimizer]
    ) -> ReplicaSet:
        parts = modules_within(living(self._modules.values()))
        for part in parts:
            self.claim(part)
        self._is_copying = True
        try:
            with traced("copy modules"):
                return ReplicaSet(
                    roots_of(parts), variables, optimizers, self.placement
                )
        finally:
            self._is_copying = False

    def _return(self, replica_set: ReplicaSet) -> None:
        with self._lock:
            self._in_use.pop(replica_set, None)
            replica_set.gradients.is_alone = True
            if replica_set.generation == self._generation:
                self._idle.append(replica_set)

    def _take_wrappers(self, named: StepReferences) -> None:
        """Takes in wrappers that hold modules or optimizers of the scope.

        They have no parameters of their own.
        """
        for optimizer in [
            optimizer
            for optimizer in named.optimizers
            if id(optimizer) not in self._optimizers
        ]:
            is_around = any(
                id(held) in self._optimizers for _, held in list_held(optimizer)
            )
            # An optimizer that does not call `Optimizer.__init__` has no hooks: the
            # scope was not told that it was created, and nobody is told when it takes a
            # step.
            is_untold = "_optimizer_step_pre_hooks" not in vars(optimizer)
            if is_around or (
                is_untold and any(map(self.owns, parameters_of(optimizer)))
            ):
                self.take_stepper(optimizer)
        for _, module in named.modules:
            if id(module) not in self._modules:
                parts = modules_within([module])
                new = [part for part in parts if id(part) not in self._modules]
                if len(new) < len(parts) and not any(
                    list(part.parameters(recurse=False)) for part in new
                ):
                    for part in new:
                        self.take_part(part)

    def before_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before any optimizer in the process takes a step, on its thread."""
        for run in filter(None, list(self._in_use.values())):
            run.before_any_step(optimizer)
        if self.placement.is_mirrored and id(optimizer) in self._optimizers:
            for replica_set in self._find_at_rest():
                replica_set.begin_step(optimizer)

    def after_any_step(self, optimizer: Optimizer) -> None:
        """Called after any optimizer in the process has taken a step, on its thread."""
        if self.placement.is_mirrored and id(optimizer) in self._optimizers:
            for replica_set in self._find_at_rest():
                replica_set.step(optimizer)
        # Version counters show what torch's own optimizers write, except for fused
        # ones. What others write is noted.
        if not is_torchs(optimizer) or any(
            group.get("fused") for group in users_own(optimizer, "param_groups")
        ):
            for replica_set in (*self._idle, *self._in_use):
                replica_set.replicated.note_written(parameters_of(optimizer))


def _make_trainers(
    named: StepReferences, run: RunReplicas, kept: KeptInRun | None
) -> tuple[list[Trainer], list[SharedTrainer | SharedGlobal]]:
    """The trainers with attributes in each replica, and what is one for all.

    Args:
        named: What the step names.
        run: The replicas of the run.
        kept: What hooks keep; None if they keep nothing.
    """
    known_by_hooks = set() if kept is None else kept.known
    trainers: list[Trainer] = []
    shared: list[SharedTrainer | SharedGlobal] = []
    for name, thing in named.trainers():
        if id(thing) in known_by_hooks:
            continue
        if is_all_in_dict(thing):
            trainers.append(Trainer(thing, run))
        else:
            shared.append(SharedTrainer(name, thing))
    if kept is not None:
        proxies = {id(trainer.original) for trainer in trainers}
        shared += [one for one in kept.watched if id(one.thing) not in proxies]
    return trainers, shared


def _forget(
    storage: weakref.ref[ReplicatedStorage], reference: weakref.ref[Any]
) -> None:
    """Drops the copies of an object that the user no longer has.

    Called by the garbage collector, on any thread.
    """
    if (own := storage()) is None:
        return
    for table in (own._modules, own._optimizers, own._variables):
        for key in [key for key, known in list(table.items()) if known is reference]:
            del table[key]
            if key in own._new:
                own._new.discard(key)
            else:
                own._generation += 1
                own._idle.clear()
