"""Parameters on one device, and copies of them for each replica.

Each run borrows a set of copies. One set serves all runs that follow one another; runs at the same time, of several
threads or from a merge function, get sets of their own, so no two runs ever touch one copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._caller_state import undisturbed
from torchstrategy._captured import Named, captured
from torchstrategy._context import current_frame, is_default
from torchstrategy._devices import in_use
from torchstrategy._gradients import Gradients
from torchstrategy._ledger import LocalParameter, written_in_replica
from torchstrategy._local_optimizer import LocalOptimizer, Owners
from torchstrategy._mirrors import Mirrors
from torchstrategy._once import OnceAStep, make_ready, refuse_bound_methods
from torchstrategy._optimizer_copies import OptimizerCopies, can_have_copies
from torchstrategy._optimizer_steps import stop_telling, tell_always, tell_before
from torchstrategy._parts import parts_of
from torchstrategy._replica import Replica
from torchstrategy._shares import Shares
from torchstrategy._stand_ins import StandIns
from torchstrategy._storage import CrossReplica, Loan, Step, Storage
from torchstrategy._torch import version
from torchstrategy._trainers import Trainers
from torchstrategy._types import Device, Tree
from torchstrategy._variables import SharedVariable, Variable, is_variable


@final
class CentralStorage(Storage):
    """Parameters live on one device; each replica has copies.

    Args:
        devices: The device of each replica.
        parameter_device: Where the parameters are.
        may_alias: Whether a copy on the parameters' own device may share their memory. Without, each replica's copies
            are real ones, as they are on several accelerators; the numbers are the same.
        averages_buffers: Whether running statistics become the mean of the replicas'; else the first replica's.
        is_mirrored: Whether all replicas but the first have memory and an optimizer of their own, and update their
            parameters themselves; else values are sent to them.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        parameter_device: Device,
        may_alias: bool = True,
        averages_buffers: bool = True,
        is_mirrored: bool = False,
    ) -> None:
        super().__init__(devices, parameter_device)
        self._may_alias = may_alias
        self._is_mirrored = is_mirrored
        self._averages_buffers = averages_buffers
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._variables: dict[int, weakref.ref[Variable]] = {}
        self._idle: list[Copies] = []
        self._in_use: list[Copies] = []
        self._new: set[int] = set()  # modules and variables of which there are no copies yet
        self._generation = 0  # of the set of modules: copies of an earlier one are not used again
        self._stand_ins = StandIns()
        self._lock = threading.RLock()
        self._is_copying = False  # in which case new modules are copies, not the user's
        tell_always(self._before_any_step, self._after_any_step)

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        return self.devices if self._is_mirrored else (self.parameter_device,)

    @contextmanager
    def lend(self, shares: Shares, step: Step, cross_replica: CrossReplica) -> Iterator[Loan]:
        named = captured(*step)
        refuse_bound_methods(named.counters)
        self._take_around(named)
        variables = _alive(self._variables)  # held for as long as the run has copies of them
        copies = self._borrow(variables)
        originals = copies.originals()
        run, loan = object(), None
        # A signal's handler may raise anywhere here: whatever was done is undone, whether or not it was finished.
        try:
            counters = [thing for _, thing in named.counters]
            with undisturbed():
                make_ready(counters, self.parameter_device)
            trainers = Trainers(named.trainers if len(self.devices) > 1 else [], len(self.devices), shares.present)
            originals += [*counters, *trainers.originals()]
            outsiders = list(self._outsiders(named, copies))
            loan = _CentralLoan(copies, shares, outsiders, counters, trainers, cross_replica)
            tell_before(run, loan.before_any_step)
            copies.mirrors.hand_out(shares.present)
            copies.gradients.begin(shares, outsiders)
            self._stand_ins.put_up(originals, run)
            yield loan
            self._stand_ins.take_down(originals, run)
            loan.end()
        except BaseException:
            copies.generation = -1  # a step that failed has written who knows what on them
            self._stand_ins.take_down(originals, run)
            if loan is not None:
                loan.take_back()
            copies.gradients.abort()
            copies.gradients.let_go()
            raise
        finally:
            stop_telling(run)
            if loan is not None:
                loan.let_go()
            self._return(copies)
            variables.clear()

    def like(self) -> Storage:
        settings = self._may_alias, self._averages_buffers, self._is_mirrored
        return CentralStorage(self.devices, self.parameter_device, *settings)

    def take_part(self, module: nn.Module) -> None:
        if id(module) in self._modules or self._is_copying or _in_replica():
            return
        self.claim(module)
        self._modules[id(module)] = weakref.ref(module, _weakly(self._forget))
        self._new.add(id(module))

    def take_variable(self, variable: Variable) -> None:
        self.claim(variable)
        if isinstance(variable, SharedVariable):
            self._variables[id(variable)] = weakref.ref(variable, _weakly(self._forget))
            self._new.add(id(variable))
            for copies in self._standing_still() if self._in_use else []:
                copies.gradients.watch(variable, variable.name)  # the run that makes it has no copies of it

    def take_optimizer(self, optimizer: Optimizer) -> None:
        if not _in_replica():
            self._optimizers[id(optimizer)] = weakref.ref(optimizer, _weakly(self._forget))

    def _forget(self, reference: weakref.ref[Any]) -> None:
        """Drops the copies of what the user no longer has. Called by the collector, on any thread."""
        for table in (self._modules, self._optimizers, self._variables):
            for key in [key for key, known in list(table.items()) if known is reference]:
                del table[key]
                if key in self._new:
                    self._new.discard(key)
                else:
                    self._generation += 1
                    self._idle.clear()

    def _borrow(self, variables: Sequence[Variable]) -> Copies:
        with self._lock:
            optimizers = _alive(self._optimizers)
            if self._new:
                self._new.clear()
                self._generation += 1
            copies = None
            while self._idle and copies is None:
                copies = self._idle.pop()
                if copies.generation != self._generation or not copies.bring_up_to_date(optimizers):
                    copies = None
            if copies is None:
                copies = self._copied(variables, optimizers)
            if self._in_use:
                for other in (copies, *self._in_use):
                    other.gradients.is_alone = False
            copies.thread = threading.get_ident()
            self._in_use.append(copies)
            return copies

    def _standing_still(self) -> list[Copies]:
        """The copies that this thread may write: those of the run in which it is at a meeting, or of the last run."""
        with self._lock:
            if not self._in_use:
                return self._idle[-1:]
            return [self._in_use[-1]] if self._in_use[-1].thread == threading.get_ident() else []

    def _copied(self, variables: Sequence[Variable], optimizers: Sequence[Optimizer]) -> Copies:
        generation = self._generation
        parts = parts_of(_alive(self._modules))
        for part in parts:
            self.claim(part)
        self._is_copying = True
        try:
            aliases = [self._may_alias and (r == 0 or not self._is_mirrored) for r in range(len(self.devices))]
            settings = aliases, self._averages_buffers, self._is_mirrored
            return Copies(_roots(parts), variables, optimizers, self.devices, *settings, generation)
        finally:
            self._is_copying = False

    def _return(self, copies: Copies) -> None:
        with self._lock:
            if copies in self._in_use:
                self._in_use.remove(copies)
            copies.gradients.is_alone = True
            if copies.generation == self._generation:
                self._idle.append(copies)

    def _take_around(self, named: Named) -> None:
        """A module around modules of the scope, without parameters of its own, is as if it were made there, too."""
        for _, module in named.modules:
            if id(module) not in self._modules:
                parts = parts_of([module])
                new = [part for part in parts if id(part) not in self._modules]
                if len(new) < len(parts) and not any(list(part.parameters(recurse=False)) for part in new):
                    for part in new:
                        self.take_part(part)

    def _outsiders(self, named: Named, copies: Copies) -> Iterator[tuple[torch.Tensor, str]]:
        """The parameters and trainable tensors that the step names and no replica has of its own."""
        for name, tensor in named.tensors:
            if id(tensor) not in copies.known:
                yield tensor, f"{name}, a tensor of shape {tuple(tensor.shape)},"
        for name, module in named.modules:
            if id(module) not in self._modules:
                for path, parameter in module.named_parameters():
                    if id(parameter) not in copies.known:
                        yield parameter, f"{name}.{path}"

    def _before_any_step(self, optimizer: Optimizer) -> None:
        if self._is_mirrored and id(optimizer) in self._optimizers:
            for copies in self._standing_still():
                copies.begin_step(optimizer)

    def _after_any_step(self, optimizer: Optimizer) -> None:
        if self._is_mirrored and id(optimizer) in self._optimizers:
            for copies in self._standing_still():
                copies.step(optimizer)
        # A fused optimizer writes parameters without counting it, as in-place operations do.
        if any(group.get("fused") for group in vars(optimizer)["param_groups"]):
            for copies in (*self._idle, *self._in_use):
                copies.mirrors.note_written(_parameters(optimizer))


@final
class Copies:
    """What the replicas of one run at a time have of the user's modules and optimizers.

    Args:
        roots: The user's modules.
        variables: The user's variables.
        optimizers: The user's optimizers.
        devices: The device of each replica.
        may_alias: Of each replica; see `CentralStorage`.
        averages_buffers: See `CentralStorage`.
        is_mirrored: See `CentralStorage`.
        generation: Of the set of modules that they are copies of.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        variables: Sequence[Variable],
        optimizers: Sequence[Optimizer],
        devices: Sequence[Device],
        may_alias: Sequence[bool],
        averages_buffers: bool,
        is_mirrored: bool,
        generation: int,
    ) -> None:
        self.generation = generation
        self.thread = 0  # of the run that has them
        self._is_mirrored = is_mirrored
        self._num_replicas = len(devices)
        with undisturbed():
            self.mirrors = Mirrors(roots, devices, may_alias, averages_buffers, variables)
        self._index_of = {id(owner): index for index, owner in enumerate(self.mirrors.owners)}
        self._optimizer_copies: dict[int, OptimizerCopies] = {}
        self._take_optimizers(optimizers)

    def bring_up_to_date(self, optimizers: Sequence[Optimizer]) -> bool:
        """Brings what the user wrote on the originals to the copies. False if they have to be made anew."""
        with undisturbed():
            if not self.mirrors.refresh():
                return False
        if _signature(optimizers) != self._optimizer_signature:
            self._take_optimizers(optimizers)
        return True

    def originals(self) -> list[object]:
        """What stand-ins are needed for."""
        plain = [owner for owner in self.mirrors.owners if isinstance(owner, nn.Parameter) and not is_variable(owner)]
        return [*self.mirrors.originals(), *self.optimizers(), *plain]

    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._optimizer_signature = _signature(optimizers)
        loose = {id(p): (name, p) for o in optimizers for name, p in _named(o) if id(p) not in self._index_of}
        self.gradients = Gradients(
            [*self.mirrors.owners, *(p for _, p in loose.values())],
            [*self.mirrors.names, *(f"{name}, a tensor of shape {tuple(p.shape)}," for name, p in loose.values())],
            [self.mirrors.parameters(r) for r in range(self._num_replicas)],
        )
        index_of = {**self._index_of, **{key: len(self._index_of) + i for i, key in enumerate(loose)}}
        self.optimized = {id(o): {id(p): index_of[id(p)] for p in _parameters(o)} for o in optimizers}
        self.known = index_of.keys()
        if self._is_mirrored:
            local = [self._local_of(r) for r in range(1, self._num_replicas)]
            self._optimizer_copies = {id(o): OptimizerCopies(o, local) for o in optimizers if can_have_copies(o)}

    def begin_step(self, optimizer: Optimizer) -> None:
        """The user's optimizer is about to take a step: what it begins with, its copies begin with."""
        copies = self._optimizer_copies_of(optimizer)
        if copies is not None:
            with undisturbed():
                self.mirrors.refresh_parameters()
                copies.begin(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """The user's optimizer has taken a step: its copies take the same."""
        copies = self._optimizer_copies_of(optimizer)
        if copies is not None:
            copies.step(optimizer)
            self.mirrors.note_updated(_parameters(optimizer))

    def _optimizer_copies_of(self, optimizer: Optimizer) -> OptimizerCopies | None:
        return self._optimizer_copies.get(id(optimizer)) if can_have_copies(optimizer) else None

    def _local_of(self, replica: int) -> dict[int, LocalParameter]:
        owners, local = self.mirrors.owners, self.mirrors.parameters(replica)
        return {id(owner): parameter for owner, parameter in zip(owners, local, strict=True)}


@final
class _CentralLoan(Loan, Owners):
    """One run on one set of copies."""

    def __init__(
        self,
        copies: Copies,
        shares: Shares,
        outsiders: Sequence[tuple[torch.Tensor, str]],
        counters: Sequence[Any],
        trainers: Trainers,
        cross_replica: CrossReplica,
    ) -> None:
        self._copies = copies
        self._shares = shares
        # A variable that is not the strategy's may be assigned: by each replica for itself.
        written = [(tensor, name) for tensor, name in outsiders if not is_variable(tensor)]
        self._outsiders = [(tensor, name, version(tensor)) for tensor, name in written]
        self._outsider_ids = {id(tensor) for tensor, _ in outsiders}
        self._counters = counters
        self._trainers = trainers
        self._cross_replica = cross_replica
        self._thread = threading.get_ident()
        self._callers_device = torch.get_default_device()
        self._local: dict[int, Mapping[int, object]] = {}
        self._optimizers: dict[int, list[LocalOptimizer]] = {}  # of each replica
        self._shown = ExitStack()  # in which the owners have their gradients

    def local_objects(self, replica: Replica) -> Mapping[int, object]:
        copies, leads = self._copies, replica.index == self._shares.present[0]
        copies.gradients.enter(replica)
        ledger = copies.gradients.ledgers[replica.index]
        optimizers = {
            id(optimizer): LocalOptimizer(optimizer, replica, ledger, copies.optimized[id(optimizer)], self, leads)
            for optimizer in copies.optimizers()
        }
        self._optimizers[replica.index] = list(optimizers.values())
        counters = {id(counter): OnceAStep(counter, replica, self.together) for counter in self._counters}
        self._local[replica.index] = local = {
            **copies.mirrors.local_objects(replica.index),
            **self._trainers.local_objects(replica.index),
            **optimizers,
            **counters,
        }
        return local

    @contextmanager
    def published(self) -> Iterator[None]:
        self._check_unwritten()
        with self._copies.gradients.published():
            yield
        with undisturbed():
            self._copies.mirrors.refresh_parameters()
        self._trainers.refresh()
        self._outsiders = [(tensor, name, version(tensor)) for tensor, name, _ in self._outsiders]

    def together(self, call: Callable[[], Tree]) -> Tree:
        with self._cross_replica(), self._updating():
            return call()

    @contextmanager
    def cross_replica(self) -> Iterator[None]:
        with self._cross_replica(), in_use(self._callers_device):
            yield

    def show(self) -> None:
        self._shown.enter_context(self._updating())
        self._copies.gradients.keep()

    def take_back(self) -> None:
        self._shown.close()

    def loss(self, losses: Sequence[Any]) -> Any:
        if any(loss is None for loss in losses):
            return None
        weights = [self._shares.weights[r] for r in self._shares.present]
        return sum(_here(loss) * weight for loss, weight in zip(losses, weights, strict=True) if weight)

    def results_require_grad(self) -> None:
        self._copies.gradients.deliver_late_ones()

    def end(self) -> None:
        """Brings everything that the run made to the user's own objects; what may fail comes first."""
        self._check_unwritten()
        with undisturbed():
            self._copies.gradients.settle()
            written = self._trainers.put_together()
            self._copies.mirrors.return_to_originals(self._shares)
        for change in written:
            change.apply()
        if any(change.requires_grad() for change in written):
            self.results_require_grad()
        self._return_settings()
        self._copies.gradients.end()

    def let_go(self) -> None:
        """What the replicas had is not wanted any more, and does not wait for the collector of cycles."""
        self._local.clear()
        self._optimizers.clear()

    def before_any_step(self, optimizer: Optimizer) -> None:
        """Called before any optimizer in the process takes a step, on its thread."""
        frame = current_frame()
        in_this_run = frame is not None and any(frame.local_objects is local for local in self._local.values())
        if not in_this_run and (_in_replica() or threading.get_ident() != self._thread):
            return
        known = self._copies.known | self._outsider_ids
        if not any(isinstance(p, LocalParameter) or id(p) in known for p in _parameters(optimizer)):
            return  # it trains something of the step's own
        if in_this_run:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called in a replica, and the optimizer was not created in "
                "strategy.scope(): every replica would take a step of its own on the shared parameters. Create it, and "
                "its model, in the scope; or give them to strategy.distribute_module(model) and "
                "strategy.distribute_optimizer(optimizer); or step after strategy.run."
            )
        self._copies.gradients.keep()

    def _check_unwritten(self) -> None:
        self._trainers.check_unwritten()
        if self._copies.gradients.is_alone:  # else another thread may train the same parameters
            self._copies.mirrors.check_unwritten(self._shares.present)
            for tensor, name, known in self._outsiders:
                if version(tensor) != known:
                    raise RuntimeError(written_in_replica(name))

    @contextmanager
    def _updating(self) -> Iterator[None]:
        self._return_settings()
        with self.published():
            yield
        for optimizers in self._optimizers.values():
            for optimizer in optimizers:
                optimizer.forget_settings()

    def _return_settings(self) -> None:
        for optimizer in self._optimizers.get(self._shares.present[0], []):
            optimizer.return_settings()


def _here(loss: Any) -> Any:
    return loss.cpu() if isinstance(loss, torch.Tensor) else loss


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Calls a bound method for as long as its object lives, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        if (alive := reference()) is not None:
            alive(argument)

    return call


def _in_replica() -> bool:
    frame = current_frame()
    return frame is not None and frame.replica_context is not None and not is_default(frame.strategy)


def _alive(references: Mapping[int, weakref.ref[Any]]) -> list[Any]:
    return [thing for reference in list(references.values()) if (thing := reference()) is not None]


def _roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are part of no other."""
    children = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in children]


def _signature(optimizers: Sequence[Optimizer]) -> list[tuple[int, list[int]]]:
    return [(id(o), [len(group["params"]) for group in vars(o)["param_groups"]]) for o in optimizers]


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in vars(optimizer)["param_groups"] for parameter in group["params"]]


def _named(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for i, group in enumerate(vars(optimizer)["param_groups"]):
        for j, parameter in enumerate(group["params"]):
            yield f"{type(optimizer).__name__}.param_groups[{i}]['params'][{j}]", parameter
