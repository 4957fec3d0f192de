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

from torchstrategy._captured import Found, captured, held_by
from torchstrategy._context import current_frame, is_default
from torchstrategy._devices import in_use
from torchstrategy._gradients import Gradients
from torchstrategy._ledger import LocalParameter, written_in_replica
from torchstrategy._local_optimizer import LocalOptimizer, Owners
from torchstrategy._mirrors import Mirrors
from torchstrategy._once import KINDS, OnceAStep, make_ready, refuse_bound_methods
from torchstrategy._optimizer_steps import stop_telling, tell_after, tell_before
from torchstrategy._parts import parts_of
from torchstrategy._replica import Replica
from torchstrategy._shares import Shares
from torchstrategy._stand_ins import StandIns
from torchstrategy._storage import CrossReplica, Loan, Step, Storage
from torchstrategy._torch import version
from torchstrategy._types import Device, Tree
from torchstrategy._values import DistributedValues


@final
class CentralStorage(Storage):
    """Parameters live on one device; each replica has copies.

    Args:
        devices: The device of each replica.
        parameter_device: Where the parameters are.
        may_alias: Whether a copy on the parameters' own device may share their memory. Without, each replica's copies
            are real ones, as they are on several accelerators; the numbers are the same.
        averages_buffers: Whether running statistics become the mean of the replicas'; else the first replica's.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        parameter_device: Device,
        may_alias: bool = True,
        averages_buffers: bool = True,
    ) -> None:
        super().__init__(devices, parameter_device)
        self._may_alias = may_alias
        self._averages_buffers = averages_buffers
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._idle: list[Copies] = []
        self._in_use: list[Copies] = []
        self._new: set[int] = set()  # modules of which there are no copies yet
        self._generation = 0  # of the set of modules: copies of an earlier one are not used again
        self._stand_ins = StandIns()
        self._lock = threading.RLock()
        self._is_copying = False  # in which case new modules are copies, not the user's
        tell_after(self._after_any_step)

    @contextmanager
    def lend(self, shares: Shares, step: Step, cross_replica: CrossReplica) -> Iterator[Loan]:
        copies = self._borrow()
        originals = copies.originals()
        run, loan = object(), None
        # A signal's handler may raise anywhere here: whatever was done is undone, whether or not it was finished.
        try:
            named = list(_named_by(step))
            counters = [thing for _, thing in named if isinstance(thing, KINDS)]
            refuse_bound_methods(named)
            with undisturbed():
                make_ready(counters, self.parameter_device)
            originals += counters
            outsiders = list(self._outsiders(named, copies))
            loan = _CentralLoan(copies, shares, outsiders, counters, cross_replica)
            tell_before(run, loan.before_any_step)
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
            self._return(copies)

    def like(self) -> Storage:
        return CentralStorage(self.devices, self.parameter_device, self._may_alias, self._averages_buffers)

    def take_part(self, module: nn.Module) -> None:
        if id(module) in self._modules or self._is_copying or _in_replica():
            return
        self.claim(module)
        self._modules[id(module)] = weakref.ref(module, _weakly(self._forget))
        self._new.add(id(module))

    def take_optimizer(self, optimizer: Optimizer) -> None:
        if not _in_replica():
            self._optimizers[id(optimizer)] = weakref.ref(optimizer, _weakly(self._forget))

    def _forget(self, reference: weakref.ref[Any]) -> None:
        """Drops the copies of what the user no longer has. Called by the collector, on any thread."""
        for table in (self._modules, self._optimizers):
            for key in [key for key, known in list(table.items()) if known is reference]:
                del table[key]
                if key in self._new:
                    self._new.discard(key)
                else:
                    self._generation += 1
                    self._idle.clear()

    def _borrow(self) -> Copies:
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
                copies = self._copied(optimizers)
            if self._in_use:
                for other in (copies, *self._in_use):
                    other.gradients.is_alone = False
            self._in_use.append(copies)
            return copies

    def _copied(self, optimizers: Sequence[Optimizer]) -> Copies:
        generation = self._generation
        parts = parts_of(_alive(self._modules))
        for part in parts:
            self.claim(part)
        self._is_copying = True
        try:
            return Copies(_roots(parts), optimizers, self.devices, self._may_alias, self._averages_buffers, generation)
        finally:
            self._is_copying = False

    def _return(self, copies: Copies) -> None:
        with self._lock:
            if copies in self._in_use:
                self._in_use.remove(copies)
            copies.gradients.is_alone = True
            if copies.generation == self._generation:
                self._idle.append(copies)

    def _outsiders(self, named: Sequence[tuple[str, Found]], copies: Copies) -> Iterator[tuple[torch.Tensor, str]]:
        """The parameters and trainable tensors that the step names and no replica has of its own."""
        for name, thing in named:
            if isinstance(thing, torch.Tensor):
                if id(thing) not in copies.known:
                    yield thing, f"{name}, a tensor of shape {tuple(thing.shape)},"
            elif isinstance(thing, nn.Module) and id(thing) not in self._modules:
                for path, parameter in thing.named_parameters():
                    if id(parameter) not in copies.known:
                        yield parameter, f"{name}.{path}"

    def _after_any_step(self, optimizer: Optimizer) -> None:
        """A fused optimizer writes parameters without counting it, as in-place operations do."""
        if any(group.get("fused") for group in vars(optimizer)["param_groups"]):
            for copies in (*self._idle, *self._in_use):
                copies.mirrors.note_written(_parameters(optimizer))


@final
class Copies:
    """What the replicas of one run at a time have of the user's modules and optimizers.

    Args:
        roots: The user's modules.
        optimizers: The user's optimizers.
        devices: The device of each replica.
        may_alias: See `CentralStorage`.
        averages_buffers: See `CentralStorage`.
        generation: Of the set of modules that they are copies of.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        devices: Sequence[Device],
        may_alias: bool,
        averages_buffers: bool,
        generation: int,
    ) -> None:
        self.generation = generation
        self._num_replicas = len(devices)
        with undisturbed():
            self.mirrors = Mirrors(roots, devices, may_alias, averages_buffers)
        self._index_of = {id(owner): index for index, owner in enumerate(self.mirrors.owners)}
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
        plain = [owner for owner in self.mirrors.owners if isinstance(owner, nn.Parameter)]
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
        indices = {id(owner): index for index, owner in enumerate(self.gradients.owners)}
        self.optimized = {id(o): {id(p): indices[id(p)] for p in _parameters(o)} for o in optimizers}
        self.known = self._index_of.keys() | loose.keys()


@final
class _CentralLoan(Loan, Owners):
    """One run on one set of copies."""

    def __init__(
        self,
        copies: Copies,
        shares: Shares,
        outsiders: Sequence[tuple[torch.Tensor, str]],
        counters: Sequence[Any],
        cross_replica: CrossReplica,
    ) -> None:
        self._copies = copies
        self._shares = shares
        self._outsiders = [(tensor, name, version(tensor)) for tensor, name in outsiders]
        self._outsider_ids = {id(tensor) for tensor, _ in outsiders}
        self._counters = counters
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
            self._copies.mirrors.return_to_originals(self._shares)
        self._return_settings()
        self._copies.gradients.end()

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


def _named_by(step: Step) -> Iterator[tuple[str, Found]]:
    fn, leaves = step
    yield from captured(fn)
    for leaf in leaves:
        if isinstance(leaf, (nn.Module, *KINDS)):
            yield "an argument", leaf
        elif not isinstance(leaf, (torch.Tensor, DistributedValues)):
            yield from held_by(leaf)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block whose tensors are ordinary ones, and whose operations no graph records, whatever the caller wears."""
    with torch.inference_mode(False), torch.no_grad():
        yield


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
