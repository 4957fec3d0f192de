"""Where parameters live, and what a replica has of them.

In place: one replica, on the device of the parameters, uses the user's own modules; nothing is done.

Central: parameters live on one device, replicas have copies. Each run borrows a set of copies. One set serves all
runs that follow one another; runs at the same time, of several threads or from a merge function, get sets of their
own, so no two runs ever touch one copy.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from torchstrategy._captured import captured
from torchstrategy._context import current_frame
from torchstrategy._creation import watched
from torchstrategy._gradients import Gradients, LocalParameter
from torchstrategy._local_optimizer import LocalOptimizer
from torchstrategy._mirrors import Mirrors, written_in_replica
from torchstrategy._replicas import Replica
from torchstrategy._shares import Shares
from torchstrategy._stand_ins import StandIns
from torchstrategy._torch import version
from torchstrategy._types import Device

CrossReplica = Callable[[], AbstractContextManager[None]]
"""Enters the strategy's cross-replica context."""


Step = tuple[Callable[..., Any], Sequence[Any]]
"""What is run, and the leaves of its arguments."""


class Loan(ABC):
    """The parameters as one run has them: from when it begins until it ends or fails."""

    @abstractmethod
    def local_objects(self, replica: Replica) -> Mapping[int, object]:
        """What the user's objects are in `replica`, by their id. Called on its thread, when the step begins there."""

    @abstractmethod
    def published(self) -> AbstractContextManager[None]:
        """For the length of the block, the user's own parameters have the gradients of the run so far."""

    @abstractmethod
    def results_require_grad(self) -> None:
        """The caller may run a backward through the results: its gradients have to reach the user's parameters."""


class Storage(ABC):
    """Where parameters live.

    Args:
        devices: The device of each replica.
        parameter_device: Where parameters are.
    """

    def __init__(self, devices: Sequence[Device], parameter_device: Device) -> None:
        self.devices = tuple(devices)
        self.parameter_device = parameter_device

    def watching(self) -> AbstractContextManager[None]:
        """For the length of the block, takes in what this thread creates."""
        return watched(self.take_part, self.claim, self.take_optimizer)

    def take_module(self, module: nn.Module) -> None:
        """Takes in a module, and all below it.

        Raises:
            RuntimeError: If a part of it belongs to another strategy.
        """
        for part in module.modules():
            self.claim(part)
        for parameter in module.parameters():
            self.claim(parameter)
        for part in module.modules():
            self.take_part(part)

    def claim(self, thing: nn.Module | torch.Tensor) -> None:
        """Notes that a module or parameter belongs here.

        Raises:
            RuntimeError: If it belongs to another strategy.
        """
        owner = _owners.get(thing)
        if owner is not None and owner() not in (None, self):
            raise RuntimeError(
                f"This {type(thing).__name__} already belongs to another strategy, in whose scope it was created. A "
                "module belongs to one strategy: create another one, or copy.deepcopy it outside of any scope."
            )
        if owner is None:
            _owners[thing] = weakref.ref(self)

    def owns(self, thing: nn.Module | torch.Tensor) -> bool:
        """Whether a module or parameter belongs here."""
        owner = _owners.get(thing)
        return owner is not None and owner() is self

    @abstractmethod
    def like(self) -> Storage:
        """An empty storage of the same kind on the same devices."""

    @abstractmethod
    def take_part(self, module: nn.Module) -> None:
        """Takes in one module; it may have been taken in before, and gained a part since."""

    @abstractmethod
    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Takes in an optimizer."""

    @abstractmethod
    def lend(self, shares: Shares, step: Step, cross_replica: CrossReplica) -> AbstractContextManager[Loan]:
        """The parameters for one run. Leaving the block ends it; leaving it by an exception means that it failed.

        Args:
            shares: How much each replica counts.
            step: What is run, with the leaves of its arguments.
            cross_replica: Enters the cross-replica context.
        """


_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()  # modules and parameters -> a weak reference to their storage


def has_owner(thing: nn.Module | torch.Tensor) -> bool:
    """Whether a module or parameter belongs to any strategy."""
    owner = _owners.get(thing)
    return owner is not None and owner() is not None


@final
class InPlaceStorage(Storage):
    """The one replica uses the user's own modules."""

    def like(self) -> Storage:
        return InPlaceStorage(self.devices, self.parameter_device)

    def take_part(self, module: nn.Module) -> None:
        self.claim(module)

    def take_optimizer(self, optimizer: Optimizer) -> None:
        pass  # the replica uses it as it is

    def lend(self, shares: Shares, step: Step, cross_replica: CrossReplica) -> AbstractContextManager[Loan]:
        return _IN_PLACE


@final
class _InPlaceLoan(Loan):
    def local_objects(self, replica: Replica) -> Mapping[int, object]:
        return {}

    def published(self) -> AbstractContextManager[None]:
        return nullcontext()

    def results_require_grad(self) -> None:
        pass  # their graph ends in the user's own parameters


_IN_PLACE: AbstractContextManager[Loan] = nullcontext(_InPlaceLoan())


@final
class CentralStorage(Storage):
    """Parameters live on one device; each replica has copies.

    Args:
        devices: The device of each replica.
        parameter_device: Where the parameters are.
        may_alias: Whether a copy on the parameters' own device may share their memory. Without, each replica's copies
            are real ones, as they are on several accelerators; the numbers are the same.
    """

    def __init__(self, devices: Sequence[Device], parameter_device: Device, may_alias: bool = True) -> None:
        super().__init__(devices, parameter_device)
        self._may_alias = may_alias
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._idle: list[Copies] = []
        self._in_use: list[Copies] = []
        self._generation = 0  # of the set of modules: copies of an earlier one are not used again
        self._stand_ins = StandIns()
        self._lock = threading.RLock()
        self._is_copying = False  # in which case new modules are copies, not the user's

    def take_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers[id(optimizer)] = weakref.ref(optimizer, self._forget)

    @contextmanager
    def lend(self, shares: Shares, step: Step, cross_replica: CrossReplica) -> Iterator[Loan]:
        copies = self._borrow()
        outsiders = list(self._outsiders(step, copies))
        loan = _CentralLoan(copies, shares, outsiders, cross_replica)
        hook = register_optimizer_step_pre_hook(loan.before_any_step)
        originals = copies.originals()
        copies.gradients.begin(shares, outsiders)
        try:
            self._stand_ins.put_up(originals)
            try:
                yield loan
            finally:
                self._stand_ins.take_down(originals)
            loan.end()
        except BaseException:
            copies.gradients.abort()
            copies.generation = -1  # a step that failed has written who knows what on them
            raise
        finally:
            hook.remove()
            self._return(copies)

    def _outsiders(self, step: Step, copies: Copies) -> Iterator[tuple[torch.Tensor, str]]:
        """The parameters and trainable tensors that the step names and no replica has of its own."""
        fn, leaves = step
        modules = (("an argument", leaf) for leaf in leaves if isinstance(leaf, nn.Module))
        for name, thing in (*captured(fn), *modules):
            if isinstance(thing, torch.Tensor):
                if id(thing) not in copies.known:
                    yield thing, f"{name}, a tensor of shape {tuple(thing.shape)},"
            elif id(thing) not in self._modules:
                for path, parameter in thing.named_parameters():
                    if id(parameter) not in copies.known:
                        yield parameter, f"{name}.{path}"

    def like(self) -> Storage:
        return CentralStorage(self.devices, self.parameter_device, self._may_alias)

    def take_part(self, module: nn.Module) -> None:
        if id(module) in self._modules or self._is_copying or _in_replica():
            return
        self.claim(module)
        self._modules[id(module)] = weakref.ref(module, self._forget)
        self._generation += 1

    def _forget(self, reference: weakref.ref[Any]) -> None:
        """Drops the copies of what the user no longer has. Called by the collector, on any thread."""
        for table in (self._modules, self._optimizers):
            for key in [key for key, known in list(table.items()) if known is reference]:
                del table[key]
        self._generation += 1
        self._idle.clear()

    def _borrow(self) -> Copies:
        with self._lock:
            optimizers = _alive(self._optimizers)
            copies = None
            while self._idle and copies is None:
                copies = self._idle.pop()
                if copies.generation != self._generation or not copies.bring_up_to_date(optimizers):
                    copies = None
            if copies is None:
                generation = self._generation
                self._is_copying = True
                try:
                    roots = _roots(_alive(self._modules))
                    copies = Copies(roots, optimizers, self.devices, self._may_alias, generation)
                finally:
                    self._is_copying = False
            if self._in_use:
                for other in (copies, *self._in_use):
                    other.gradients.is_alone = False
            self._in_use.append(copies)
            return copies

    def _return(self, copies: Copies) -> None:
        with self._lock:
            self._in_use.remove(copies)
            copies.gradients.is_alone = True
            if copies.generation == self._generation:
                self._idle.append(copies)


@final
class Copies:
    """What the replicas of one run at a time have of the user's modules and optimizers.

    Args:
        roots: The user's modules.
        optimizers: The user's optimizers.
        devices: The device of each replica.
        may_alias: See `CentralStorage`.
        generation: Of the set of modules that they are copies of.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        devices: Sequence[Device],
        may_alias: bool,
        generation: int,
    ) -> None:
        self.generation = generation
        self._num_replicas = len(devices)
        with undisturbed():
            self.mirrors = Mirrors(roots, devices, may_alias)
        self.index_of = {id(owner): index for index, owner in enumerate(self.mirrors.owners)}
        self._take_optimizers(optimizers)

    def bring_up_to_date(self, optimizers: Sequence[Optimizer]) -> bool:
        """Brings what the user wrote on the originals to the copies. False if they have to be made anew."""
        with undisturbed():
            if not self.mirrors.refresh():
                return False
        if _signature(optimizers) != self._optimizer_signature:
            self._take_optimizers(optimizers)
        return True

    def originals(self) -> list[nn.Module | Optimizer]:
        """What stand-ins are needed for."""
        return [*self.mirrors.originals(), *self.optimizers()]

    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._optimizer_signature = _signature(optimizers)
        loose = {id(p): (name, p) for name, p in _named_parameters(optimizers) if id(p) not in self.index_of}
        self.gradients = Gradients(
            [*self.mirrors.owners, *(p for _, p in loose.values())],
            [*self.mirrors.names, *(f"{name}, a tensor of shape {tuple(p.shape)}," for name, p in loose.values())],
            [self.mirrors.parameters(r) for r in range(self._num_replicas)],
        )
        self.optimized = {
            id(o): {id(p): self.index_of[id(p)] for _, p in _named_parameters([o]) if id(p) in self.index_of}
            for o in optimizers
        }
        self.known = self.index_of.keys() | loose.keys()


@final
class _CentralLoan(Loan):
    """One run on one set of copies."""

    def __init__(
        self,
        copies: Copies,
        shares: Shares,
        outsiders: Sequence[tuple[torch.Tensor, str]],
        cross_replica: CrossReplica,
    ) -> None:
        self._copies = copies
        self._shares = shares
        self._outsiders = [(tensor, name, version(tensor)) for tensor, name in outsiders]
        self._cross_replica = cross_replica
        self._thread = threading.get_ident()
        self._local: dict[int, Mapping[int, object]] = {}
        self._lead_optimizers: list[LocalOptimizer] = []

    def local_objects(self, replica: Replica) -> Mapping[int, object]:
        copies = self._copies
        copies.gradients.enter(replica)
        ledger = copies.gradients.ledgers[replica.index]
        optimizers = {
            id(optimizer): LocalOptimizer(optimizer, replica, ledger, copies.optimized[id(optimizer)], self._update)
            for optimizer in copies.optimizers()
        }
        if replica.index == self._shares.present[0]:
            self._lead_optimizers = list(optimizers.values())
        self._local[replica.index] = local = {**copies.mirrors.local_modules(replica.index), **optimizers}
        return local

    @contextmanager
    def published(self) -> Iterator[None]:
        self._check_unwritten()
        with self._copies.gradients.published():
            yield
        with undisturbed():
            self._copies.mirrors.refresh_parameters()
        self._outsiders = [(tensor, name, version(tensor)) for tensor, name, _ in self._outsiders]

    def results_require_grad(self) -> None:
        self._copies.gradients.deliver_late_ones()

    def end(self) -> None:
        """Brings everything that the run made to the user's own objects; what may fail comes first."""
        self._check_unwritten()
        with undisturbed():
            self._copies.gradients.settle()
            self._copies.mirrors.return_to_originals(self._shares)
        for optimizer in self._lead_optimizers:
            optimizer.return_settings()
        self._copies.gradients.end()

    def before_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before any optimizer in the process takes a step, on its thread."""
        frame = current_frame()
        in_this_run = frame is not None and any(frame.local_objects is local for local in self._local.values())
        if not in_this_run and (_in_replica() or threading.get_ident() != self._thread):
            return
        parameters = [p for group in vars(optimizer)["param_groups"] for p in group["params"]]
        if not any(isinstance(p, LocalParameter) or id(p) in self._copies.index_of for p in parameters):
            return  # it trains something of the step's own
        if in_this_run:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called in a replica, and the optimizer was not created in "
                "strategy.scope(): every replica would take a step of its own on the shared parameters. Create it "
                "in the scope, or call strategy.distribute_optimizer(optimizer), or step after strategy.run."
            )
        self._copies.gradients.keep()

    def _check_unwritten(self) -> None:
        if self._copies.gradients.is_alone:  # else another thread may train the same parameters
            self._copies.mirrors.check_unwritten(self._shares.present)
            for tensor, name, known in self._outsiders:
                if version(tensor) != known:
                    raise RuntimeError(written_in_replica(name))

    def _update(self, optimizer: Optimizer, kwargs: dict[str, Any]) -> Any:
        with self._cross_replica(), self.published():
            return optimizer.step(**kwargs)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block whose tensors are ordinary ones, and whose operations no graph records, whatever the caller wears."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _in_replica() -> bool:
    frame = current_frame()
    return frame is not None and frame.replica_context is not None


def _alive(references: Mapping[int, weakref.ref[Any]]) -> list[Any]:
    return [thing for reference in list(references.values()) if (thing := reference()) is not None]


def _roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are part of no other."""
    children = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in children]


def _signature(optimizers: Sequence[Optimizer]) -> list[tuple[int, list[int]]]:
    return [(id(o), [len(group["params"]) for group in o.param_groups]) for o in optimizers]


def _named_parameters(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                yield f"{type(optimizer).__name__}.param_groups[{i}]['params'][{j}]", parameter
