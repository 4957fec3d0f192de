"""The objects of a scope whose strategy has one replica in each of several workers, and one run with them.

The step uses the program's own objects. So a run prepares next to nothing, and nothing has to be brought back. What the
workers have to keep alike is told in `Note [What lone replicas keep alike]`.
"""

from __future__ import annotations

import gc
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import sub
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._binding.attribute_contents import things_in
from torchstrategy._binding.module_traversal import computed_by_hooks, parts_of, plain_attributes
from torchstrategy._binding.proxies import is_torchs, parameters_of
from torchstrategy._binding.torch_hooks import Stepper, tell_of_steps
from torchstrategy._communication.workers import Workers
from torchstrategy._core.context import is_in_replica, undisturbed
from torchstrategy._core.torch_internals import backwards_run_by, versions
from torchstrategy._execution.replica_weights import ReplicaWeights
from torchstrategy._input.same_rows import Read, refuse_other_reads
from torchstrategy._replication.copyable import trainable_among
from torchstrategy._replication.metrics import Metric, metrics_among
from torchstrategy._replication.placement import Placement
from torchstrategy._replication.storage import Storage
from torchstrategy._replication.worker_values import refuse_other_values, take_from_first_worker
from torchstrategy._run.own_gradients import OwnGradients
from torchstrategy._run.own_random import OwnRandom
from torchstrategy._run.settings import SettingsOfOptimizers
from torchstrategy._run.trained_tensors import TrainedTensors
from torchstrategy._variables.kinds import SyncOnReadVariable, unwritten
from torchstrategy._variables.variable import Variable


# Note [What lone replicas keep alike]
# - Parameters and variables: worker 0's values at the first run; after it, all workers make the same updates, of the
#   gradients of the whole batch.
# - Buffers that a step writes: the workers' mean for running statistics, else those of the first worker that has rows.
#   They are sent with the gradients of the next backward, or when the run ends.
# - Random generators: see Note [Random streams of lone replicas].
# - Settings of optimizers, modes of modules, and which parameters are trained: compared at each backward.
# - Values of parameters: compared where their versions have moved apart. A write that changes no version is found by a
#   checksum of a part of the parameters, another part at each backward.
# What else a step writes, such as an attribute of a module, stays in its worker, as with `DistributedDataParallel`.
@final
class OwnObjects(Storage):
    """The objects of a scope, which the only replica of each worker uses as they are.

    Args:
        layout: Where the replica is, and which processes train together.
    """

    def __init__(self, layout: Placement) -> None:
        super().__init__(layout)
        self._workers = layout.workers
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._variables: dict[int, weakref.ref[Variable]] = {}
        self._on_read: weakref.WeakValueDictionary[int, SyncOnReadVariable] = weakref.WeakValueDictionary()
        # Plain tables: each backward looks through them, and to look through a `WeakValueDictionary` takes longer.
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._settings = SettingsOfOptimizers()
        self._steppers: dict[int, weakref.ref[Stepper]] = {}
        self._has_news = False
        self._reads: Sequence[Read] = ()
        self._mark_of_reads = 0
        self.gradients = OwnGradients(self._workers)
        self.random = OwnRandom(self._workers, self.devices[0])
        self._values = ValuesOfParameters(self._workers)
        self._thread: int | None = None  # that of the run under way
        self._follows_first = False  # whether the generators of the workers were found to differ in this run
        self._metrics: list[Metric] = []
        # The blocks of updates under way whose random numbers are the same in all workers.
        self._updating: list[AbstractContextManager[None]] = []
        tell_of_steps(self)

    def take_part(self, module: nn.Module) -> None:
        if id(module) in self._modules or is_in_replica():
            return
        self.claim(module)
        self._modules[id(module)] = weakref.ref(module, _forgetting(self._modules, id(module)))
        self._has_news = True

    def take_variable(self, variable: Variable) -> None:
        self.claim(variable)
        self._has_news = True
        if isinstance(variable, SyncOnReadVariable):  # each worker has a value of its own
            self._on_read[id(variable)] = variable
        else:
            self._variables[id(variable)] = weakref.ref(variable, _forgetting(self._variables, id(variable)))

    def take_stepper(self, stepper: Optimizer | Stepper) -> None:
        known: dict[int, Any] = self._optimizers if isinstance(stepper, Optimizer) else self._steppers
        known[id(stepper)] = weakref.ref(stepper, _forgetting(known, id(stepper)))

    # A run

    @contextmanager
    def run(self, weights: ReplicaWeights, step: str, reads: Sequence[Read] = ()) -> Iterator[None]:
        """A run, from when it begins until it ends.

        Args:
            weights: How much the replica counts.
            step: What to call the step.
            reads: What the workers have read of the batch.
        """
        self._reads = reads
        self._begin(weights, step)
        as_before = unwritten(list(self._on_read.values())) if weights.is_understudy else nullcontext()
        self._thread = threading.get_ident()
        try:
            self.random.begin_run()
            try:
                with as_before, backwards_run_by(self._run_backward):
                    yield
            finally:
                self.random.end_run()
            self._end(weights)
        finally:
            self._thread = None
            self._updating.clear()
            self.gradients.end_run()

    def _begin(self, weights: ReplicaWeights, step: str) -> None:
        if self._has_news or not self.gradients.tensors.is_same():
            # What the user has dropped must not be compared, so Python's collector of cycles runs first.
            gc.collect()
            roots = _roots(self._parts())
            _refuse_untrained(roots)
            known = [*_alive(self._variables.values()), *self._on_read.values()]
            take_from_first_worker(self._workers, roots, known)
            self.random.follow_first()
            self._has_news = False
            self._take_tensors()
        else:
            self.gradients.tensors.begin_run()
        self.gradients.begin_run(weights, step, self)
        for metric in self._metrics:
            metric.hand_out(weights)

    def _end(self, weights: ReplicaWeights) -> None:
        self._workers.arrive("the end of strategy.run")
        if self._follows_first:
            self._follows_first = False
            self.random.follow_first()
        self.gradients.send_buffers()
        if self._workers.watches_leaving and not self.gradients.has_exchanged:
            asked = self._workers.all_gather_object(self._workers.is_asked_to_leave, "the end of strategy.run")
            self._workers.all_leave = any(asked)
        for metric in self._metrics:
            metric.put_together(weights)
            metric.write_back()

    def _take_tensors(self) -> None:
        modules = self._parts()
        variables = [variable for variable in _alive(self._variables.values()) if variable.requires_grad]
        tensors = TrainedTensors(modules, variables, self.layout.averages_buffers)
        self.gradients.train(tensors)
        self._values.take(tensors)
        self._metrics = metrics_among(modules, self.devices, self._workers)

    def _parts(self) -> list[nn.Module]:
        """The modules of the scope, with those that were put into them elsewhere."""
        return parts_of(_alive(self._modules.values()))

    def _run_backward(self, backward: Callable[[], Any], makes_graph: bool) -> Any:
        if not self.gradients.tensors.is_same():
            self._take_tensors()
        return self.gradients.run_backward(backward, makes_graph)

    # What has to be alike, and what is looked at if it is not

    def compare(self) -> None:
        """Notes what the next exchange compares."""
        compare, tensors = self._workers.compare, self.gradients.tensors
        for number, optimizer in enumerate(_alive(self._optimizers.values())):
            which = f" (optimizer {number + 1} of the scope)" if number else ""
            compare(f"the settings of {type(optimizer).__name__}{which}:", self._settings.of(optimizer))
        for stepper in _alive(self._steppers.values()):
            compare(f"the state of {type(stepper).__name__}:", _numbers(stepper))
        compare("which parameters are trained:", tensors.flags())
        compare("the modes of the modules:", tensors.modes())

    def number(self) -> int:
        """See `Mentions`: the random generators, what was read, and marks of the values of parameters."""
        self._mark_of_reads = zlib.crc32(repr(self._reads).encode()) if self._reads else 0
        return zlib.crc32(b"%d %d %d" % (self.random.mark, self._values.mark(), self._mark_of_reads))

    def settle(self, name: str) -> None:
        """See `Mentions`."""
        if len(set(self._workers.all_gather_object(self._mark_of_reads, name))) > 1:
            refuse_other_reads(self._workers, self._reads)
        self._values.refuse_others()
        self._follows_first |= self.random.compare(name)

    # Updates

    def before_any_step(self, optimizer: Optimizer) -> None:
        """Called before any optimizer in the process takes a step, on its thread."""
        if self._thread is None:
            return
        parameters = parameters_of(optimizer)
        positions = list(map(self.gradients.tensors.index.get, map(id, parameters)))
        ours = [i for i in positions if i is not None]
        if not ours and id(optimizer) not in self._optimizers:
            return
        name = type(optimizer).__name__
        if self._thread != threading.get_ident():
            raise RuntimeError(_ON_OTHER_THREAD.format(name, threading.current_thread().name))
        if len(ours) < len(positions):
            for position, parameter in zip(positions, parameters, strict=True):
                if position is None and parameter.grad is not None:
                    raise RuntimeError(_OUTSIDE.format(name, tuple(parameter.shape)))
        if id(optimizer) not in self._optimizers:
            self.take_stepper(optimizer)
        assigned = self.gradients.assigned(ours)
        if assigned:
            with undisturbed():
                self._add_up_assigned(assigned, name)
        if _may_draw(optimizer):
            self._updating.append(self.random.for_all_workers())
            self._updating[-1].__enter__()

    def after_any_step(self, optimizer: Optimizer) -> None:
        """Called after any optimizer in the process has taken a step, on its thread."""
        if self._updating and self._thread == threading.get_ident() and _may_draw(optimizer):
            self._updating.pop().__exit__(None, None, None)

    def _add_up_assigned(self, indices: Sequence[int], name: str) -> None:
        """Gradients that the step has put there itself: they are alike in all workers, or of each worker's own rows."""
        parameters, point = self.gradients.tensors.parameters, f"{name}.step()"
        found = {i: g.detach() for i in indices if (g := parameters[i].grad) is not None}
        # To read a checksum from an accelerator, the host would wait for it.
        is_read = any(gradient.is_cpu or gradient.is_sparse for gradient in found.values())
        of_all = self._workers.all_gather_object((list(indices), _checksums(found) if is_read else None), point)
        for w, (theirs, _) in enumerate(of_all):
            for i in set(theirs).symmetric_difference(indices):
                raise RuntimeError(_ASSIGNED.format(self.gradients.tensors.names()[i], self._workers.index, w))
        marks = [mark for _, mark in of_all]
        if marks == [None] * len(marks):
            self._add_up_unread(found, point)
        else:
            if None in marks:
                marks = self._workers.all_gather_object(_checksums(found), point)
            unlike = [i for k, i in enumerate(found) if len({mark[k] for mark in marks}) > 1]
            self._add_up(unlike, [found[i].to_dense() for i in unlike], point)
        self.gradients.note_made(indices)

    def _add_up(self, indices: Sequence[int], own: Sequence[torch.Tensor], point: str) -> None:
        weight, parameters = self.gradients.weight, self.gradients.tensors.parameters
        weighed = [gradient * weight if weight else torch.zeros_like(gradient) for gradient in own]
        for i, total in zip(indices, self._workers.all_reduce(weighed, point, agreed=True), strict=True):
            parameters[i].grad = total

    def _add_up_unread(self, found: dict[int, torch.Tensor], point: str) -> None:
        """Adds up gradients on an accelerator, which decides itself which of them are alike."""
        of_all = torch.stack(self._workers.all_gather(torch.stack(list(map(_sum_of_bits, found.values()))), 0, point))
        are_alike = (of_all == of_all[0]).all(0)
        self._add_up(list(found), list(found.values()), point)
        for (i, own), is_alike in zip(found.items(), are_alike, strict=True):
            parameter = self.gradients.tensors.parameters[i]
            assert parameter.grad is not None
            parameter.grad = torch.where(is_alike, own, parameter.grad)

    def changed_arguments(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a step, with a closure whose loss is that of the whole batch; None: as they are."""
        if self._thread != threading.get_ident() or id(optimizer) not in self._optimizers:
            return None
        if len(args) > 1 and callable(args[1]):  # the first one is the optimizer
            return (args[0], self._of_all_workers(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._of_all_workers(kwargs["closure"])}
        return None

    def _of_all_workers(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def whole() -> Any:
            loss = closure()
            if loss is None:
                return None
            weight = self.gradients.weight
            own = (
                loss.detach()
                if isinstance(loss, torch.Tensor)
                else torch.tensor(float(loss), dtype=torch.float64, device="cpu")
            )
            own = own.to(torch.promote_types(own.dtype, torch.float32))
            weighed = own * weight if weight else torch.zeros_like(own)
            (total,) = self._workers.all_reduce([weighed], "the loss of a closure")
            return total.to(loss.dtype) if isinstance(loss, torch.Tensor) else total.item()

        return whole


_SLICE = 1 << 12  # the elements of a tensor that are compared at a backward


@final
class ValuesOfParameters:
    """Finds parameters that have other values in some workers.

    Args:
        workers: The processes that train together.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.take(TrainedTensors([], [], averages_buffers=True))

    def take(self, tensors: TrainedTensors) -> None:
        """Takes other parameters, which the workers have alike now."""
        self._tensors = tensors
        self._agreed = versions(tensors.parameters)
        self._next = (0, 0)  # the tensor, and the element, with which the next slice begins

    def mark(self) -> int:
        """A number that differs where the workers have written parameters otherwise."""
        moved = map(sub, versions(self._tensors.parameters), self._agreed)
        writes = self._tensors.num_writes_between_runs
        return hash((*moved, writes, self._checksum_of_next())) & 0xFFFFFFFF

    def _checksum_of_next(self) -> int:
        tensors = self._tensors.parameters
        i, begin = self._next
        if i >= len(tensors):
            self._next = (0, 0)
            return 0
        tensor, end = tensors[i], begin + _SLICE
        self._next = (i, end) if end < tensor.numel() else (i + 1, 0)
        # To read the memory of an accelerator, the host would wait for it.
        if not (tensor.is_cpu and tensor.is_contiguous()):
            return 0
        # A sum, by torch or by NumPy, takes three times as long here: its code is in no cache of the processor.
        if tensor.dtype in _KNOWN_TO_NUMPY:
            return zlib.crc32(tensor.detach().numpy().reshape(-1)[begin:end].data)
        return _checksum(tensor.detach().view(-1)[begin:end])

    def refuse_others(self) -> None:
        """Compares all values.

        Raises:
            RuntimeError: Naming a tensor that has other values in another worker.
        """
        tensors, buffers = self._tensors, self._tensors.known_buffers()
        names, values = [*tensors.names(), *buffers], [*tensors.parameters, *buffers.values()]
        refuse_other_values(self._workers, names, values)
        self._agreed = versions(tensors.parameters)
        tensors.num_writes_between_runs = 0


_KNOWN_TO_NUMPY = (torch.float16, torch.float32, torch.float64)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: torch.Tensor) -> int:
    return int(_sum_of_bits(tensor))


def _checksums(tensors: dict[int, torch.Tensor]) -> list[int]:
    return list(map(_checksum, tensors.values()))


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A number that differs where the bits of two tensors do, but for unlikely cases."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return dense.contiguous().view(_INTEGERS[dense.element_size()]).sum(dtype=torch.int64)


def _may_draw(optimizer: Optimizer) -> bool:
    """Whether an update may draw random numbers: those of torch's own optimizers do not."""
    return not is_torchs(optimizer) or bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _numbers(stepper: Stepper) -> dict[str, Any]:
    return {key: value for key, value in vars(stepper).items() if type(value) in (int, float, bool)}


def _forgetting(table: dict[int, Any], key: int) -> Callable[[Any], None]:
    def forget(reference: Any) -> None:
        if table.get(key) is reference:
            del table[key]

    return forget


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [thing for reference in list(references) if (thing := reference()) is not None]


def _roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    children = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in children]


def _refuse_untrained(roots: Sequence[nn.Module]) -> None:
    """Refuses modules with numbers that would be trained in each worker by itself.

    Raises:
        TypeError: Naming what is no parameter, or no parameter yet.
    """
    named = [pair for root in roots for pair in root.named_modules(prefix=type(root).__name__)]
    parameters = {id(parameter) for _, module in named for parameter in module.parameters(recurse=False)}
    for path, module in named:
        for name, parameter in module._parameters.items():
            if parameter is not None and nn.parameter.is_lazy(parameter):
                raise TypeError(_LAZY.format(f"{path}.{name}", type(module).__name__))
        computed = computed_by_hooks(module)
        for name, value in {**module._buffers, **plain_attributes(module)}.items():
            held = () if name in computed else things_in(f"{path}.{name}", value)
            for where in trainable_among(held, parameters):
                raise TypeError(_NO_PARAMETER.format(where))


_LAZY = (
    "{} has no shape yet: {} is lazy, and each worker would draw weights of its own. Run one batch through the module, "
    "outside of strategy.run, before the first step."
)

_NO_PARAMETER = (
    "{} is a tensor that requires grad in a plain attribute, so its gradient would be that of each worker's rows. Make "
    "it a torch.nn.Parameter(...) or torch.nn.ParameterList([...]) of the module, or detach it."
)

_ON_OTHER_THREAD = (
    "{}.step() was called on the thread {!r} while strategy.run was at work with the same parameters. The other "
    "workers cannot know when it happens. Call backward and optimizer.step() in the step itself."
)

_OUTSIDE = (
    "{}.step() was called in a replica, and it updates a parameter of shape {} that no module of strategy.scope() has: "
    "its gradient is that of this worker's rows, so each worker would make another update. Make its module in the "
    "scope, or give it to strategy.distribute_module(model)."
)

_ASSIGNED = (
    "The workers disagree about the gradient of {}: of workers {} and {}, only one has put a gradient of its own there "
    "before optimizer.step(). Do it in all workers alike."
)
