"""The objects of a scope whose strategy has one replica in each worker.

There are several workers. This file also makes one run with the objects.

The step uses the program's own objects. So a run prepares next to nothing, and nothing
has to be brought back. What the workers have to keep alike is told in `Note [What lone
replicas keep alike]`.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.context import is_in_replica
from torchstrategy._base.memory import LOST_MEMORY, has_lost_memory, wraps_others
from torchstrategy._base.objects.attribute_contents import things_in
from torchstrategy._base.objects.changes import are_same
from torchstrategy._base.objects.module_traversal import (
    computed_by_hooks,
    modules_within,
    plain_attributes,
    roots_of,
)
from torchstrategy._base.objects.proxies import is_torchs, parameters_of
from torchstrategy._base.objects.torch_hooks import Stepper, tell_of_steps
from torchstrategy._base.torch_internals import run_by
from torchstrategy._base.types import Tree
from torchstrategy._base.weak_references import living
from torchstrategy._data.same_rows import Read, reads_among, refuse_other_reads
from torchstrategy._group.participants import Participants
from torchstrategy._run.losses.loss_watchers import CLOSURE_OF_TERMS
from torchstrategy._run.metrics import Metric, metrics_among
from torchstrategy._run.module_tensors import trainable_among
from torchstrategy._run.own.lone_losses import (
    LoneLosses,
    LoneLossNotes,
    LoneLossWeigher,
)
from torchstrategy._run.own.own_gradients import OwnGradients
from torchstrategy._run.own.own_random import OwnRandom
from torchstrategy._run.own.parameter_values import ValuesOfParameters
from torchstrategy._run.own.row_peers import RowPeers
from torchstrategy._run.own.settings import SettingsOfOptimizers
from torchstrategy._run.own.sharded_models import refuse_flat
from torchstrategy._run.own.trained_tensors import TrainedTensors
from torchstrategy._run.own.wrapped_models import WrappedModels
from torchstrategy._run.placement import Placement
from torchstrategy._run.storage import Storage
from torchstrategy._run.worker_values import take_from_first_worker
from torchstrategy._variables.kinds import SyncOnReadVariable, unwritten
from torchstrategy._variables.variable import Variable


# Note [What lone replicas keep alike]
# - Parameters and variables: worker 0's values at the first run; after it, all workers
#   make the same updates, of the gradients of the whole batch.
#   Each worker has a part of sharded parameters: see Note [Gradients that others
#   send].
# - Buffers that a step writes: the workers' mean for running statistics, else those of
#   the first worker that has rows. They are sent with the gradients of the next
#   backward, or when the run ends.
# - Random generators: see Note [Random streams of lone replicas].
# - Settings of optimizers, modes of modules, and which parameters are trained: compared
#   at each backward.
# - Values of parameters: compared where their versions have moved apart. A write that
#   changes no version is found by a checksum of a part of the parameters, another part
#   at each backward.
# What else a step writes, such as an attribute of a module, stays in its worker, as
# with `DistributedDataParallel`.
@final
class OwnObjects(Storage):
    """The objects of a scope, which the only replica of each worker uses as they are.

    Args:
        placement: Where the replica is, and which processes train together.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._workers = placement.workers
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._variables: dict[int, weakref.ref[Variable]] = {}
        self._on_read: weakref.WeakValueDictionary[int, SyncOnReadVariable] = (
            weakref.WeakValueDictionary()
        )
        # Plain tables: each backward looks through them, and to look through a
        # `WeakValueDictionary` takes longer.
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._settings = SettingsOfOptimizers()
        self._steppers: dict[int, weakref.ref[Stepper]] = {}
        self._has_news = False
        self._reads: Sequence[Read] = ()
        self._mark_of_reads = 0
        self.gradients = OwnGradients(self._workers)
        self.random = OwnRandom(self._workers, self.devices[0])
        self._values = ValuesOfParameters(self._workers)
        self._peers = RowPeers(self._workers, [self._workers.index])
        self._wrapped = WrappedModels(self._workers)
        self._thread: int | None = None  # that of the run under way
        self._num_runs = 0
        # Optimizers of parameters that no module of the scope has, each with the run in
        # which it first took a step.
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        # Whether the generators of the workers were found to differ in this run.
        self._follows_first = False
        self._metrics: list[Metric] = []
        self.losses = LoneLosses(self._workers)
        self._loss_notes: LoneLossNotes | None = None
        self._mark_of_losses = 0
        # The blocks of updates under way whose random numbers are the same in all
        # workers.
        self._updating: list[AbstractContextManager[None]] = []
        tell_of_steps(self)

    def take_part(self, module: nn.Module) -> None:
        if id(module) in self._modules or is_in_replica():
            return
        self.claim(module)
        self._modules[id(module)] = weakref.ref(
            module, _make_forget(self._modules, id(module))
        )
        self._has_news = True

    def take_variable(self, variable: Variable) -> None:
        self.claim(variable)
        self._has_news = True
        # Each worker has a value of its own.
        if isinstance(variable, SyncOnReadVariable):
            self._on_read[id(variable)] = variable
        else:
            self._variables[id(variable)] = weakref.ref(
                variable, _make_forget(self._variables, id(variable))
            )

    def take_stepper(self, stepper: Optimizer | Stepper) -> None:
        known: dict[int, Any] = (
            self._optimizers if isinstance(stepper, Optimizer) else self._steppers
        )
        known[id(stepper)] = weakref.ref(stepper, _make_forget(known, id(stepper)))

    # A run

    def run(
        self,
        weights: Participants,
        step: str,
        values: Sequence[Tree],
        given: Tree,
        call: Callable[[], Tree],
    ) -> Tree:
        """A run, from when it begins until it ends.

        Args:
            weights: How much the replica counts.
            step: What to call the step.
            values: The distributed values among the arguments of the run.
            given: The arguments that the step gets in this worker.
            call: Calls the step.

        Returns:
            What `call` has returned.
        """
        self._num_runs += 1
        self._reads = reads_among(values)
        self._begin(weights, step)
        self._peers.refuse_other_rows(values, given)
        self._thread = threading.get_ident()
        try:
            self.random.begin_run()
            try:
                self._workers.arrive("the step")
                # See Note [Why a worker without rows runs the step] in
                # `_group/participants`.
                if weights.is_understudy:
                    call = self._restore_values_after(call)
                result = run_by(self._run_backward, self._run_forward, call)
            finally:
                self.random.end_run()
            self._end(weights)
            return result
        except RuntimeError as error:
            # A model that is sharded waits for other workers itself, and does not tell
            # which of them is lost.
            lost = (
                error
                if self.gradients.tensors.sharded.is_empty
                else self._workers.explain_lost_worker(error)
            )
            if lost is error:
                raise
            raise lost from error
        finally:
            self._thread = self._loss_notes = None
            self._updating.clear()
            self.gradients.end_run()

    def _restore_values_after(self, call: Callable[[], Tree]) -> Callable[[], Tree]:
        """The call, after which some variables have their values from before it.

        These variables have a value for each replica, and become one when they are
        read.
        """

        def call_and_restore() -> Tree:
            with unwritten(list(self._on_read.values())):
                return call()

        return call_and_restore

    def _begin(self, weights: Participants, step: str) -> None:
        if self._has_news or not self.gradients.tensors.is_current():
            parts = self._parts()
            if len(roots_of(parts)) + len(self._variables) + len(self._on_read) > 1:
                # What the user has dropped must not be compared, so Python's collector
                # of cycles runs first. It takes a tenth of a second, and one model
                # alone is the one that the step uses.
                del parts
                gc.collect()
                parts = self._parts()
            refuse_flat(parts)
            roots = roots_of(parts)
            _refuse_untrained(roots)
            known = [*living(self._variables.values()), *self._on_read.values()]
            take_from_first_worker(
                self._workers, roots, known, self.random.generators()
            )
            self._has_news = False
            self._take_tensors()
            self._take_sharded()
        else:
            self.gradients.tensors.begin_run()
        self.gradients.begin_run(weights, step, self)
        self._values.begin_run()
        for metric in self._metrics:
            metric.hand_out(weights)

    def _end(self, weights: Participants) -> None:
        self._workers.arrive("the end of strategy.run")
        if self._follows_first:
            self._follows_first = False
            self.random.follow_first()
        self.gradients.settle_assigned("the end of strategy.run")
        self.gradients.send_buffers()
        if not self.gradients.has_exchanged and self._values.were_written():
            # Where a step makes updates without a backward, no gradient would ever take
            # the marks along.
            of_all = self._workers.all_gather_object(
                self._values.mark(), "the parameters that the step has written"
            )
            if len(set(of_all)) > 1:
                self._values.refuse_others()
        if self._workers.watches_leaving and not self.gradients.has_exchanged:
            asked = self._workers.all_gather_object(
                self._workers.is_asked_to_leave, "the end of strategy.run"
            )
            self._workers.all_leave = any(asked)
        for metric in self._metrics:
            metric.put_together(weights)
            metric.write_back()

    def _take_tensors(self) -> None:
        modules = self._parts()
        variables = [
            variable
            for variable in living(self._variables.values())
            if variable.requires_grad
        ]
        tensors = TrainedTensors(modules, variables, self.placement.averages_buffers)
        self.gradients.train(tensors)
        self._values.take(tensors)
        self._metrics = metrics_among(modules, self.devices, self._workers)

    def _take_sharded(self) -> None:
        """Learns which workers compute together.

        Called in all workers, which have the same models.
        """
        sharded, peers = (
            self.gradients.tensors.sharded,
            RowPeers(self._workers, [self._workers.index]),
        )
        if not sharded.is_empty:
            sharded.take_from_first()
            peers = RowPeers.of(self._workers, sharded)
        if peers.first != self._peers.first:
            self.random.draw_from(peers.first)
        self._peers = peers

    def _parts(self) -> list[nn.Module]:
        """The modules of the scope, with those that were put into them elsewhere."""
        return modules_within(living(self._modules.values()))

    def weigher_of_losses(self, weights: Participants, step: str) -> LoneLossWeigher:
        """Weighs the backwards of the next run by what its losses were divided by."""
        return LoneLossWeigher(
            self.losses,
            weights,
            self.gradients,
            self._workers.index,
            step,
            self._prepare_backward,
        )

    def notes_of_losses(self, weights: Participants) -> LoneLossNotes:
        """Notes what the losses of the next run were divided by."""
        self._loss_notes = LoneLossNotes(
            self.losses.told, weights, self._workers.index, self._mention_losses
        )
        return self._loss_notes

    def _mention_losses(self, mark: int) -> None:
        self._mark_of_losses = mark

    def _prepare_backward(self) -> None:
        if not self.gradients.tensors.is_current():
            self._take_changed()

    def _take_changed(self) -> None:
        """Takes the parameters that the modules have by now: a backward begins."""
        known = self.gradients.tensors.sharded.names()
        self._take_tensors()
        if self.gradients.tensors.sharded.names() != known:
            raise RuntimeError(_SHARDED_IN_STEP)
        # The step may have made parameters, whose values each worker has drawn for
        # itself.
        self._values.refuse_other_parameters()

    def _run_backward(self, backward: Callable[[], Any], makes_graph: bool) -> Any:
        if not self.gradients.tensors.is_current():
            self._take_changed()
        sharded = self.gradients.tensors.sharded
        if sharded.is_empty:
            return self.gradients.run_backward(backward, makes_graph)
        with sharded.weighing(float(self.gradients.sent_weight), self._workers.count):
            return self.gradients.run_backward(backward, makes_graph)

    def _run_forward(self, model: Any, forward: Callable[[], Any]) -> Any:
        """Runs the forward of a `DistributedDataParallel`."""
        return self._wrapped.run_forward(model, forward, self.gradients.tensors.index)

    # What has to be alike, and what is looked at if it is not

    def note_compared(self) -> None:
        """Notes settings, steppers' states, trained parameters and modes.

        See `Mentions`.
        """
        compared: list[tuple[str, object]] = []
        for reference in list(self._optimizers.values()):
            optimizer = reference()
            if optimizer is not None:
                which = (
                    f" (optimizer {len(compared) + 1} of the scope)" if compared else ""
                )
                compared.append(
                    (
                        f"the settings of {type(optimizer).__name__}{which}:",
                        self._settings.of(optimizer),
                    )
                )
        if self._steppers:
            for stepper in living(self._steppers.values()):
                compared.append(
                    (f"the state of {type(stepper).__name__}:", _counts_of(stepper))
                )
        tensors = self.gradients.tensors
        compared.append(("which parameters are trained:", tensors.flags()))
        compared.append(("the modes of the modules:", tensors.modes()))
        self._workers.compare_all(compared)

    def mark(self) -> int:
        """A mark of what should be alike in all workers; see `Mentions`.

        This is random generators, what was read, the values of parameters, and counts
        of losses.
        """
        # Of plain tuples: what Python prints of a named one comes by several calls.
        self._mark_of_reads = (
            zlib.crc32(repr([*map(tuple, self._reads)]).encode()) if self._reads else 0
        )
        mark = zlib.crc32(
            b"%d %d %d" % (self.random.mark, self._values.mark(), self._mark_of_reads)
        )
        return mark ^ self._mark_of_losses

    def settle_difference(self, name: str) -> None:
        """Refuses other rows and other values; see `Mentions`.

        All workers then take the random states of worker 0.

        Losses that were noted are compared here, too.
        """
        notes = self._loss_notes
        told = (self._mark_of_reads, notes is not None and notes.has_reading)
        marks, have_notes = zip(
            *self._workers.all_gather_object(told, name), strict=True
        )
        if len(set(marks)) > 1:
            refuse_other_reads(self._workers, self._reads)
        self._values.refuse_others()
        self._follows_first |= self.random.compare(name)
        if notes is not None and all(have_notes):
            notes.settle(name)

    # Updates

    def before_any_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called before any optimizer in the process takes a step, on its thread.

        Returns:
            The arguments of the step, with a closure whose loss is that of the whole
            batch; None: as they are.
        """
        name, parameters, tensors = (
            type(optimizer).__name__,
            parameters_of(optimizer),
            self.gradients.tensors,
        )
        ours: Sequence[int] = tensors.positions
        strange: list[torch.Tensor] = []
        # Mostly, an optimizer has all parameters, in their order.
        if not are_same(parameters, tensors.parameters):
            positions = list(map(tensors.index.get, map(id, parameters)))
            ours = [i for i in positions if i is not None]
            others = [
                p
                for p, position in zip(parameters, positions, strict=True)
                if position is None
            ]
            strange = tensors.without_sharded(others)
        if self._thread is None:
            # No run has made these gradients, as where the step is called by itself.
            if ours and self.gradients.has_others(ours):
                warnings.warn(_BETWEEN_RUNS.format(name), UserWarning, stacklevel=2)
            return None
        if len(strange) == len(parameters) and id(optimizer) not in self._optimizers:
            # A step may make an optimizer for a copy of the model. One that has taken a
            # step in an earlier run trains something that every worker has, and that
            # each would train with its own rows.
            is_new = (
                self._strangers.setdefault(optimizer, self._num_runs) == self._num_runs
            )
            if is_new or self._thread != threading.get_ident():
                return None
        if self._thread != threading.get_ident():
            raise RuntimeError(
                _ON_OTHER_THREAD.format(name, threading.current_thread().name)
            )
        for parameter in strange:
            if parameter.grad is not None:
                raise RuntimeError(_OUTSIDE.format(name, tuple(parameter.shape)))
        if parameters and len(strange) == len(parameters):
            raise RuntimeError(_TRAINS_NOTHING.format(name))
        if id(optimizer) not in self._optimizers:
            self.take_stepper(optimizer)
        self.gradients.settle_assigned(f"{name}.step()", ours)
        if _may_draw(optimizer):
            self._updating.append(self.random.for_all_workers())
            self._updating[-1].__enter__()
        return (
            self._changed_arguments(args, kwargs) if len(args) > 1 or kwargs else None
        )

    def after_any_step(self, optimizer: Optimizer) -> None:
        """Called after any optimizer in the process has taken a step, on its thread."""
        if (
            self._updating
            and self._thread == threading.get_ident()
            and _may_draw(optimizer)
        ):
            self._updating.pop().__exit__(None, None, None)

    def _changed_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a step, with a closure whose loss is the whole batch's.

        None means that the arguments stay as they are.
        """
        if len(args) > 1 and callable(args[1]):  # the first one is the optimizer
            return (args[0], self._closure_of_all_workers(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {
                **kwargs,
                "closure": self._closure_of_all_workers(kwargs["closure"]),
            }
        return None

    def _closure_of_all_workers(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that returns the loss of the whole batch.

        The user's closure returns the loss of this worker's rows.
        """

        def whole() -> Any:
            loss = closure()
            if loss is None:
                return None
            if self.gradients.loss_factor is None:
                raise RuntimeError(CLOSURE_OF_TERMS)
            weight = self.gradients.weight * self.gradients.loss_factor
            if isinstance(loss, torch.Tensor):
                own = loss.detach()
            else:
                own = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
            own = own.to(torch.promote_types(own.dtype, torch.float32))
            weighed = own * weight if weight else torch.zeros_like(own)
            (total,) = self._workers.all_reduce([weighed], "the loss of a closure")
            return (
                total.to(loss.dtype) if isinstance(loss, torch.Tensor) else total.item()
            )

        return whole


def _may_draw(optimizer: Optimizer) -> bool:
    """Whether an update may draw random numbers: those of torch's optimizers do not."""
    return not is_torchs(optimizer) or bool(
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )


def _counts_of(stepper: Stepper) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(stepper).items()
        if type(value) in (int, float, bool)
    }


def _make_forget(table: dict[int, Any], key: int) -> Callable[[Any], None]:
    def forget(reference: Any) -> None:
        if table.get(key) is reference:
            del table[key]

    return forget


def _refuse_untrained(roots: Sequence[nn.Module]) -> None:
    """Refuses modules with numbers that would be trained in each worker by itself.

    Raises:
        TypeError: Naming what is no parameter, or no parameter yet.
    """
    named = [
        pair
        for root in roots
        for pair in root.named_modules(prefix=type(root).__name__)
    ]
    parameters = {
        id(parameter)
        for _, module in named
        for parameter in module.parameters(recurse=False)
    }
    for path, module in named:
        for name, parameter in module._parameters.items():
            if parameter is not None and nn.parameter.is_lazy(parameter):
                raise TypeError(_LAZY.format(f"{path}.{name}", type(module).__name__))
            if (
                parameter is not None
                and parameter.layout is not torch.strided
                and not wraps_others(parameter)
            ):
                raise TypeError(_SPARSE.format(f"{path}.{name}", parameter.layout))
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and has_lost_memory(tensor):
                raise TypeError(LOST_MEMORY.format(f"{path}.{name}"))
        computed = computed_by_hooks(module)
        for name, value in {**module._buffers, **plain_attributes(module)}.items():
            held = () if name in computed else things_in(f"{path}.{name}", value)
            for where in trainable_among(held, parameters):
                raise TypeError(_NO_PARAMETER.format(where))


_LAZY = (
    "{} has no shape yet: {} is lazy, and each worker would draw weights of its own. "
    "Run one batch through the module, outside of strategy.run, before the first step."
)

_SPARSE = (
    "{} is a parameter of the layout {}. Workers send and compare parameters as "
    "numbers in one piece of memory. Make it a dense parameter, by tensor.to_dense(); "
    "or, if it is not trained, register it as a buffer."
)

_NO_PARAMETER = (
    "{} is a tensor that requires grad in a plain attribute, so its gradient would be "
    "that of each worker's rows. Make it a torch.nn.Parameter(...) or "
    "torch.nn.ParameterList([...]) of the module, or detach it."
)

_ON_OTHER_THREAD = (
    "{}.step() was called on the thread {!r} while strategy.run was at work with the "
    "same parameters. The other workers cannot know when it happens. Call backward and "
    "optimizer.step() in the step itself."
)

_OUTSIDE = (
    "{}.step() was called in a replica, and it updates a parameter of shape {} that no "
    "module of strategy.scope() has: its gradient is that of this worker's rows, so "
    "each worker would make another update. Make its module in the scope, or give it "
    "to strategy.distribute_module(model)."
)

_TRAINS_NOTHING = (
    "{}.step() was called in a replica, and it trains nothing: no module of "
    "strategy.scope() has any of its parameters, and none of them has a gradient. "
    "fully_shard(module) and module.weight = nn.Parameter(...) put new parameters in "
    "the place of those that the optimizer has: make the optimizer after them."
)

_BETWEEN_RUNS = (
    "{}.step() was called outside of strategy.run, with gradients that no run has "
    "made. If each worker has made them of its own rows, the workers will have "
    "different models: call the step by strategy.run(step, args=(batch,))."
)

_SHARDED_IN_STEP = (
    "A model was sharded during strategy.run. The workers compare before a run how "
    "their models are sharded: call fully_shard, or parallelize_module, before "
    "strategy.run."
)
