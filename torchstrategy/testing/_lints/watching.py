"""A block in which lints watch a program."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchstrategy.testing._lints.checkpoints.checkpoints import replaced as replaced_for_checkpoints
from torchstrategy.testing._lints.collectives.files import replaced as replaced_for_files
from torchstrategy.testing._lints.evidence.asking import asked, attribute
from torchstrategy.testing._lints.evidence.facts import Backward
from torchstrategy.testing._lints.evidence.fingerprints import fingerprint, number_of
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.own_steps import WRITES
from torchstrategy.testing._lints.findings import Finding
from torchstrategy.testing._lints.gradients.gradient_hooks import replaced as replaced_for_hooks
from torchstrategy.testing._lints.session import Session
from torchstrategy.testing._lints.torch_internals import (
    LoaderIterator,
    replaced_functions,
    scale_of,
    sharded_parameter_class,
)
from torchstrategy.testing._lints.weights.lost_ties import replaced as replaced_for_ties
from torchstrategy.testing._lints.weights.thrown_replicas import state_of
from torchstrategy.testing._ranks.witnesses import Told, UnderWay, WorkWitness, witnesses, work_witnesses
from torchstrategy.testing._ranks.world import World, current_rank, current_world
from torchstrategy.testing._simulation.cuda_graphs import CUDAGraph
from torchstrategy.testing._simulation.ordinals import NAME
from torchstrategy.testing._simulation.program import is_unwatched
from torchstrategy.testing._simulation.replacing import replacing

Method = Callable[..., Any]
_SHOWING = ("__repr__", "__format__")


@final
class _Here(threading.local):
    depth = 0  # of calls of `backward` within each other
    is_at_file = False
    is_changing = False  # whether the mode of a module is changed, and with it that of the modules in it
    opening: Any = None  # the loader whose iterator is being made
    known: tuple[World | None, Session] | None = None  # the run that was asked for last


@final
class Watch:
    """Tells the lints of each run what its program does: of ranks, or of the thread of the block."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._sessions: list[Session] = []
        self._operators = Session(1).operators()
        self._of_world: Objects[World, Session] = Objects()
        self._alone: Session | None = None
        self._here = _Here()
        self._at_the_end: ExitStack | None = None  # of the block
        self._watches_sharding = False
        self._samplers: set[type] = {DistributedSampler}  # whose `set_epoch` is watched
        self._loaders: Objects[Any, Any] = Objects()  # by their iterators

    def findings(self) -> list[Finding]:
        """What was found, each thing once."""
        found = [finding for session in self._sessions for finding in session.findings()]
        return list(dict.fromkeys(found))

    def session(self) -> Session | None:
        """The run of this thread; None if it is a thread of the program that is no rank."""
        world = current_world()
        known = self._here.known
        if known is not None and known[0] is world:
            return known[1]
        if world is None and threading.get_ident() != self._thread:
            return None
        made = self._alone if world is None else self._of_world.get(world)
        if made is None:
            made = Session(1 if world is None else world.size)
            self._sessions.append(made)
            if world is None:
                self._alone = made
            else:
                self._of_world[world] = made
        self._here.known = world, made
        return made

    def writes(self, func: Any, args: Any) -> None:
        """An operator is going to run on this thread."""
        if func in WRITES and not is_unwatched():
            self._say("writes", current_rank(), args[0])

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """An operator has run on this thread."""
        if func not in self._operators and not any(session.follows for session in self._sessions):
            return
        if is_unwatched():  # it is not the program's
            return
        session = self.session()
        if session is not None:
            session.operator(current_rank(), func, args, kwargs, result)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The block. Operators are told by the caller."""
        hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._tell("steps", optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._tell("stepped", optimizer)),
        ]
        work = WorkWitness(self._begins, self._over)
        witnesses.append(self._told)
        work_witnesses.append(work)
        try:
            more = [*replaced_for_checkpoints(self._saw), *replaced_for_hooks(self._saw), *replaced_functions()]
            more += replaced_for_ties(self._saw)
            with ExitStack() as self._at_the_end:
                self._at_the_end.enter_context(replacing([*self._replaced(), *replaced_for_files(self._file), *more]))
                yield
        finally:
            self._at_the_end = None
            witnesses.remove(self._told)
            work_witnesses.remove(work)
            for hook in hooks:
                hook.remove()

    def _replaced(self) -> list[tuple[Any, str, Any]]:
        autograd: Any = torch.autograd
        scaler: Any = torch.amp.GradScaler
        device: Any = getattr(torch, NAME, None)  # None while no devices are simulated
        devices: list[Any] = [torch.cuda, torch.accelerator]
        devices += [] if device is None else [device, device.Stream, device.Event]
        waits = [(owner, "synchronize") for owner in devices]
        optimizer, module, wrapped = torch.optim.Optimizer, torch.nn.Module, DistributedDataParallel
        return [
            *[(owner, name, self._after(getattr(owner, name), self._synchronized)) for owner, name in waits],
            (autograd, "backward", self._backward(autograd.backward)),
            (autograd, "grad", self._grad(autograd.grad)),
            (wrapped, "__init__", self._after(wrapped.__init__, self._made)),
            (wrapped, "forward", self._before(wrapped.forward, self._calls)),
            (optimizer, "__init__", self._after(optimizer.__init__, self._has_optimizer)),
            (optimizer, "zero_grad", self._before(optimizer.zero_grad, self._zeroed)),
            (module, "zero_grad", self._before(module.zero_grad, self._zeroed)),
            (torch.nn.DataParallel, "parallel_apply", self._replicating(torch.nn.DataParallel.parallel_apply)),
            (module, "train", self._changing(module.train)),
            (LRScheduler, "step", self._after(LRScheduler.step, self._scheduled)),
            (ReduceLROnPlateau, "step", self._after(ReduceLROnPlateau.step, self._measured)),
            *[(torch.Tensor, name, self._before(getattr(torch.Tensor, name), self._shown)) for name in _SHOWING],
            *self._replaced_of_graphs(),
            (dist, "new_group", self._grouping(dist.new_group)),
            (scaler, "scale", self._after(scaler.scale, self._scaled)),
            (scaler, "step", self._scaled_step(scaler.step)),
            (DataLoader, "__iter__", self._iterating(DataLoader.__iter__)),
            (LoaderIterator, "__next__", self._getting(LoaderIterator.__next__)),
            (DistributedSampler, "set_epoch", self._after(DistributedSampler.set_epoch, self._sets_epoch)),
            (LoaderIterator, "_next_index", self._drawing(LoaderIterator._next_index)),
        ]

    def _say(self, what: str, *args: Any) -> Any:
        """Calls a method of the session. An error of its own is none of the program's."""
        session = self.session()
        if session is None:
            return None
        try:
            return getattr(session, what)(*args)
        except Exception as error:
            return session.loses(None, error)

    def _tell(self, what: str, *args: Any) -> Any:
        self._watch_sharding()
        return self._say(what, current_rank(), *args)

    def _saw(self, what: str, *args: Any) -> None:
        self._tell("saw", what, *args)

    def _told(self, told: Told) -> None:
        self._watch_sharding()
        self._say("told", told)

    def _begins(self, under_way: UnderWay) -> None:
        self._say("saw", under_way.rank, "begins", under_way)

    def _over(self, rank: int, part: Any) -> None:
        self._say("saw", rank, "awaited", part)

    def _file(self, what: str, file: Any) -> None:
        world = current_world()
        if world is None or world.size < 2 or self._here.is_at_file:
            return
        self._here.is_at_file = True  # the lint looks into the source of the program
        try:
            self._say("saw", current_rank(), "uses_file", world.happened, what, file)
        finally:
            self._here.is_at_file = False

    def _synchronized(self, *_: Any, **__: Any) -> None:
        self._saw("synchronized")

    def _before(self, method: Method, tell: Method) -> Method:
        @functools.wraps(method)
        def told(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                tell(*args, **kwargs)
            return method(*args, **kwargs)

        return told

    def _after(self, method: Method, tell: Method) -> Method:
        @functools.wraps(method)
        def told(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if not torch.compiler.is_compiling():
                tell(*args, **kwargs)
            return result

        return told

    def _made(self, wrapped: Any, *_: Any, **__: Any) -> None:
        self._tell("made", wrapped)

    def _calls(self, wrapped: Any, *args: Any, **kwargs: Any) -> None:
        self._tell("calls", wrapped, (*args, *kwargs.values()))

    def _zeroed(self, *_: Any, **__: Any) -> None:
        self._tell("zeroed")

    def _has_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._tell("has_optimizer", optimizer)

    def _grouping(self, make: Method) -> Method:
        @functools.wraps(make)
        def told(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(ranks, Iterator):  # which can be gone through only once
                ranks = list(ranks)
            is_local = args[3] if len(args) > 3 else kwargs.get("use_local_synchronization", False)
            if not is_local:  # all ranks have to make the call, and not only the members
                self._saw("groups", None if ranks is None else list(ranks))
            return make(ranks, *args, **kwargs)

        return told

    def _scaled(self, scaler: Any, *_: Any, **__: Any) -> None:
        session, scale = self.session(), scale_of(scaler)
        if session is not None and scale is not None:
            session.facts(current_rank()).scale = number_of(scale)

    def _scaled_step(self, step: Method) -> Method:
        @functools.wraps(step)
        def told(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            session = self.session()
            if session is None:
                return step(scaler, optimizer, *args, **kwargs)
            with session.scaled_step(current_rank()):
                return step(scaler, optimizer, *args, **kwargs)

        return told

    def _scheduled(self, scheduler: Any, *_: Any, **__: Any) -> None:
        self._saw("scheduled", scheduler)

    def _watch_sharding(self) -> None:
        """Watches `fully_shard` from the first event on after the program has imported it: its import is slow."""
        kind = None if self._watches_sharding else sharded_parameter_class()
        if kind is not None and self._at_the_end is not None:
            self._watches_sharding = True
            self._at_the_end.enter_context(replacing([(kind, "__init__", self._sharding(kind.__init__))]))

    def _watch_sampler(self, sampler: Any) -> None:
        """Watches `set_epoch` of a sampler of the program's own, from its first loader on."""
        kind = next((one for one in type(sampler).__mro__ if "set_epoch" in vars(one)), None)
        if kind is None or kind in self._samplers or self._at_the_end is None:
            return
        self._samplers.add(kind)
        method = vars(kind)["set_epoch"]
        if isinstance(method, FunctionType):
            told = self._after(method, self._sets_epoch)
            self._at_the_end.enter_context(replacing([(kind, "set_epoch", told)]))

    def _sets_epoch(self, sampler: Any, *_: Any, **__: Any) -> None:
        self._saw("sets_epoch", sampler)

    def _sharding(self, make: Method) -> Method:
        @functools.wraps(make)
        def told(own: Any, param: Any, *args: Any, **kwargs: Any) -> None:
            before = fingerprint(param.detach())
            make(own, param, *args, **kwargs)
            self._saw("sharded", param, own.sharded_param, before)

        return told

    def _shown(self, tensor: Any, *_: Any, **__: Any) -> None:
        if type(tensor) is torch.Tensor:
            self._saw("shown", tensor)

    def _measured(self, scheduler: Any, metrics: Any = None, *_: Any, **__: Any) -> None:
        self._saw("measured", scheduler, metrics)

    def _replaced_of_graphs(self) -> list[tuple[Any, str, Any]]:
        def begins(graph: Any, *_: Any, **__: Any) -> None:
            self._saw("captures", graph, False)

        def ends(graph: Any) -> None:
            self._saw("captures", graph, True)

        def replays(graph: Any) -> None:
            self._saw("replayed", graph)

        told = {"capture_begin": begins, "capture_end": ends, "replay": replays}
        # The program may get the simulated one under torch's name only later.
        kinds: dict[Any, None] = {CUDAGraph: None, torch.cuda.CUDAGraph: None}
        return [(kind, name, self._after(getattr(kind, name), tell)) for kind in kinds for name, tell in told.items()]

    def _backward(self, backward: Method) -> Method:
        @functools.wraps(backward)
        def told(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            session = self.session()
            if session is None or self._here.depth:  # a part of a backward pass, as of a checkpoint
                return backward(tensors, grad_tensors, *args, **kwargs)
            if isinstance(tensors, Iterator):  # which can be gone through only once
                tensors = tuple(tensors)
            losses = [one for one in _listed(tensors) if _is_tensor(one)]
            keeps = kwargs.get("retain_graph", args[0] if args else None)
            gradients = _listed(grad_tensors)
            has_gradient = any(one is not None for one in gradients)
            if has_gradient:
                self._saw("continues", _listed(tensors), gradients)
            with self._going_back(losses, not keeps and not has_gradient) as call:
                result = backward(tensors, grad_tensors, *args, **kwargs)
            if call is not None:
                self._tell("went_back", call)
            return result

        return told

    @contextmanager
    def _going_back(self, losses: list[Any], is_plain: bool) -> Iterator[Backward | None]:
        """A block in which a backward pass runs. It gets what the session has made of the call."""
        call = self._tell("goes_back", losses, is_plain)
        self._here.depth += 1
        try:
            yield call
        finally:
            self._here.depth -= 1

    def _grad(self, grad: Method) -> Method:
        @functools.wraps(grad)
        def told(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(inputs, Iterator):  # which can be gone through only once
                inputs = tuple(inputs)
            session, losses, parameters = self.session(), _listed(outputs), _listed(inputs)
            # Gradients of a graph of gradients, or of rows, are for a loss and not for a step.
            is_plain = not args and not kwargs.get("create_graph") and len(losses) == 1
            are_of_parameters = len(parameters) > 1 and all(_is_tensor(one) and one.is_leaf for one in parameters)
            has_optimizers = session is None or session.has_had_optimizers(current_rank())
            if self._here.depth or has_optimizers or not is_plain or not are_of_parameters:
                return grad(outputs, inputs, *args, **kwargs)
            with self._going_back(losses, not kwargs.get("retain_graph")) as call:
                gradients = grad(outputs, inputs, *args, **kwargs)
            if call is not None:
                self._tell("gave_gradients", call, parameters, gradients)
                self._tell("went_back", call)
            return gradients

        return told

    def _replicating(self, run: Method) -> Method:
        @functools.wraps(run)
        def told(parallel: Any, replicas: Any, *args: Any, **kwargs: Any) -> Any:
            if len(replicas) < 2:  # the model itself
                return run(parallel, replicas, *args, **kwargs)
            nothing: dict[tuple[str, str], Any] = {}
            before = asked(functools.partial(state_of, replicas[0]), nothing)
            results = run(parallel, replicas, *args, **kwargs)
            self._saw("ran_replicas", replicas[0], before)
            return results

        return told

    def _changing(self, train: Method) -> Method:
        @functools.wraps(train)
        def told(module: Any, mode: bool = True) -> Any:
            if self._here.is_changing or torch.compiler.is_compiling():
                return train(module, mode)
            self._saw("changes_mode", module, mode)
            self._here.is_changing = True
            try:
                return train(module, mode)
            finally:
                self._here.is_changing = False

        return told

    def _iterating(self, iterate: Method) -> Method:
        @functools.wraps(iterate)
        def told(loader: Any) -> Any:
            if self.session() is None:
                return iterate(loader)
            batches = attribute(loader, "batch_sampler")
            for sampler in (batches, attribute(batches, "sampler"), attribute(loader, "sampler")):
                asked(functools.partial(self._watch_sampler, sampler), None)  # its class may refuse to be changed
            if not isinstance(loader.dataset, IterableDataset):
                self._saw("opened", loader)
            before, self._here.opening = self._here.opening, loader
            try:
                iterator = iterate(loader)
            finally:
                self._here.opening = before
            # `for batch in DataLoader(...)` keeps the iterator alone. One that keeps its iterator is kept by others.
            keeps = bool(getattr(loader, "persistent_workers", False))
            self._loaders[iterator] = weakref.ref(loader) if keeps else functools.partial(_same, loader)
            return iterator

        return told

    def _getting(self, get: Method) -> Method:
        @functools.wraps(get)
        def told(iterator: Any) -> Any:
            batch = get(iterator)
            there = self._loaders.get(iterator)
            loader = None if there is None else there()
            if loader is not None and isinstance(loader.dataset, IterableDataset):
                self._saw("got", loader, batch)
            return batch

        return told

    def _drawing(self, draw: Method) -> Method:
        @functools.wraps(draw)
        def told(iterator: Any) -> Any:
            there = self._loaders.get(iterator)
            loader = self._here.opening
            if (
                loader is None and there is not None
            ):  # a loader is false, or asks for its length, if it is taken as bool
                loader = there()
            if loader is not None and isinstance(loader.dataset, IterableDataset):
                return draw(iterator)
            try:
                rows = draw(iterator)
            except StopIteration:
                if loader is not None:
                    self._saw("drew", loader, None)
                raise
            if loader is not None:
                self._saw("drew", loader, rows)
            return rows

        return told


def _same(value: Any) -> Any:
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
