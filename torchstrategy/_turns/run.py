"""One run: it begins, replicas take turns, it ends or is undone."""

from __future__ import annotations

import itertools
import operator
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from operator import is_
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy._base.context import (
    current_frame,
    without_autograd,
)
from torchstrategy._base.devices import memory_device
from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.marks import versions_of
from torchstrategy._base.objects.proxies import is_torchs, parameters_of
from torchstrategy._base.torch_internals import run_by
from torchstrategy._base.types import Device, Tree
from torchstrategy._copies.run_warnings import (
    PLAIN_BATCH,
    LostNumbers,
    has_plain_rows,
    mark_training,
    warn_of_plain_batch,
)
from torchstrategy._group.group import Replica, Watch
from torchstrategy._group.participants import Participants
from torchstrategy._group.workers import Workers
from torchstrategy._run.losses.loss_watchers import CLOSURE_OF_TERMS
from torchstrategy._run.metrics import Metric, states_of
from torchstrategy._run.refusals import written_state
from torchstrategy._run.shared_methods import Given, make_ready
from torchstrategy._turns import gradients, refusals
from torchstrategy._turns.acting import (
    Acting,
    refuse_unlike_settings,
)
from torchstrategy._turns.gradients import BatchGradients
from torchstrategy._turns.held import Contents, Held, is_same
from torchstrategy._turns.image import Exchange, Image
from torchstrategy._turns.memory import KnownMemory, ReplicaMemory
from torchstrategy._turns.merging import Merging, component_of, is_kept
from torchstrategy._turns.parts import groups_of
from torchstrategy._turns.reachable import Reached, Walk


@final
class KnownStep:
    """What is known of a step from its earlier runs.

    Args:
        walk: The way to what it reaches.
        reached: What it reaches.
    """

    def __init__(self, walk: Walk, reached: Reached) -> None:
        self.walk = walk
        self.memory = KnownMemory(reached)
        self.gradients = gradients.Known()
        self.lost = LostNumbers()


@final
@dataclass
class Surroundings:
    """What a run knows of its strategy.

    Args:
        devices: The device of each replica.
        parameter_device: The device of the program's own parameters.
        workers: The processes that train together.
        enter: Enters the strategy's cross-replica context.
        warned: What users were warned of before.
        averages_buffers: Whether running statistics become the mean of the replicas'.
    """

    devices: Sequence[Device]
    parameter_device: Device
    workers: Workers
    enter: Callable[[], AbstractContextManager[None]]
    warned: set[tuple[int, str]]
    averages_buffers: bool


# Note [The order of a run in turns]
# 1. The walk finds what the step reaches, or what is known is checked (`storage`).
# 2. Each replica gets an image: that of the program's own objects, with its component
#    where there is a value for each replica, and with memory of its own.
# 3. The methods of what acts once are replaced.
# 4. Replicas take turns. Whenever one goes on, the image of the one before is taken
#    off, and what it has written is looked at; then its own is put on (`begin_turn`).
# 5. Where they meet, all images are off, or that of who acts for all is on.
# 6. In the end the images become one, which the program gets (`merging`).
# If anything fails, the methods are given back, and the image of the program's own
# objects is put on as it was, but for two things: what was appended to lists stays, as
# plain PyTorch leaves it, and what an update has written on parameters and gradients.
@final
class TurnsRun(Watch):
    """One run of replicas that take turns.

    Args:
        known: What is known of the step.
        reached: What it reaches.
        weights: How much each replica counts.
        around: The strategy.
        leaves: The leaves of the arguments of the step.
    """

    take_turns = True

    def __init__(
        self,
        known: KnownStep,
        reached: Reached,
        weights: Participants,
        around: Surroundings,
        leaves: Sequence[Any],
    ) -> None:
        self._known, self.weights, self._around = known, weights, around
        self._reached = reached
        home = memory_device(around.parameter_device)
        self._users = Image(home)
        with without_autograd():
            self._exchange = Exchange(reached, self._users)
            self._images = {
                r: Image(device, is_home=device == home)
                for r in weights.present
                for device in [memory_device(around.devices[r])]
            }
            self._lead = next(iter(self._images.values()))
            self._memory = ReplicaMemory(self._exchange, self._images, known.memory)
            self._give_components()
            self.gradients = BatchGradients(
                self._exchange,
                self._images,
                weights,
                self._name_of_parameter,
                known.gradients,
                self._take_off,
                self._acting_with,
            )
        self._metrics = self._hand_out_metrics()
        self._act: Image | None = None  # of who acts for all replicas now
        self._appended: dict[int, list[Any]] = {}
        self._rewritten: set[int] = set()  # lists that were not only appended to
        self._block: AbstractContextManager[object] | None = None
        self._replicas: list[Replica] = []
        self._has_failed = self._is_updating = False
        self._has_trained_on_plain_rows = False
        self._positions = [_position(one) for one in reached.iterators]
        is_plain = (
            len(self._images) > 1
            and PLAIN_BATCH not in around.warned
            and has_plain_rows(leaves)
        )
        # Of the parameters, if all replicas have all rows.
        self._marks = mark_training(self._exchange.parameters) if is_plain else None
        self._look_at_shared()
        make_ready(reached.acting, around.parameter_device)
        self._acting = Acting(reached.acting, self)

    # The beginning

    def _give_components(self) -> None:
        """Gives each replica its own, where the program has a value of each."""
        base = self._exchange.base
        if any(type(v) in _MAY_BE_KEPT and is_kept(v) for v in base.values()):
            for key in self._reached.containers:
                held = base.of(key)
                values = held.values() if isinstance(held, dict) else held
                if any(map(is_kept, values)):
                    for r, image in self._images.items():
                        image.containers[key] = _of_replica(held, r)
        for i, value in enumerate(self._exchange.places):
            if is_kept(value):
                for r, image in self._images.items():
                    image.places[i] = component_of(value, r)

    def _hand_out_metrics(self) -> list[tuple[int, Metric]]:
        """Gives the lead the states of metrics, and the others the default states.

        Returns the metrics, each with the id of its attributes.
        """
        metrics: list[tuple[int, Metric]] = []
        for inside in self._reached.metrics:
            key = id(inside)
            local: Any = {}
            for r, image in self._images.items():
                held = dict(self._exchange.contents(image, key))
                image.containers[key] = local[r] = held
            metric = Metric(
                inside,
                self._reached.details.kinds[key],
                local,
                [memory_device(device) for device in self._around.devices],
                self._around.workers,
            )
            metric.hand_out(self.weights)
            metrics.append((key, metric))
        return metrics

    def _name_of_parameter(self, i: int) -> str:
        parameter = self._exchange.parameters[i]
        name = self._reached.details.name_of(parameter)
        return name or f"a parameter of shape {tuple(parameter.shape)}"

    # Turns

    def look(self, running: Collection[int]) -> None:
        """Nothing: `begin_turn` looks."""

    def begin_turn(self, r: int) -> None:
        """Called before a replica goes on, on the thread that called `run`."""
        if self._exchange.on is self._images[r] and not self._exchange.is_taken_off:
            return
        is_lead = r == self.weights.present[0]
        if is_lead and self._block is not None and self._act is not None:
            # The loop of an optimizer goes on, on the thread of the lead.
            self._wear(self._act)
            return
        with without_autograd():
            self._take_off()
            self._put_on(self._images[r])

    def call(self, replica: Replica, step: Callable[[], Tree]) -> Tree:
        """Calls the step in a replica, on its thread."""
        self._replicas.append(replica)
        thread = threading.get_ident()

        def backward(run: Callable[[], Any], makes_graph: bool) -> Any:
            if threading.get_ident() != thread or self.replica_here() is not replica:
                return run()
            return self.gradients.run_backward(replica, run, makes_graph)

        return run_by(backward, _run_forward, step)

    def _take_off(self) -> None:
        """Takes an image off, and looks at what was written while it was on."""
        if self._exchange.is_taken_off:
            return
        self._exchange.take_off()
        image = self._exchange.on
        if self._is_updating and image is self._act:
            self._users.grads = list(image.grads)  # an update may fail halfway
        is_replica = image is not self._act and image is not self._users
        self._note_appended(image)
        if self._has_failed:
            return
        self._has_failed = True  # until all was looked at
        self._memory.note_writes(is_for_all=not is_replica)
        if is_replica:
            self._refuse_writes()
            self.gradients.note_writes()
        else:
            self._look_at_shared()
        self._has_failed = False

    def _note_appended(self, image: Image) -> None:
        for key, held in image.containers.items():
            if isinstance(held, dict) or not isinstance(
                self._reached.containers[key], list
            ):
                continue
            shown: Contents = image.shown.get(key)
            shown = self._exchange.base.of(key) if shown is None else shown
            count = len(shown)
            if len(held) >= count and all(map(is_, held, shown)):
                if len(held) > count:
                    self._appended.setdefault(key, []).extend(held[count:])
            else:
                self._rewritten.add(key)

    def _wear(self, image: Image) -> None:
        if self._exchange.on is not image or self._exchange.is_taken_off:
            with without_autograd():
                self._take_off()
                self._put_on(image)

    def _put_on(self, image: Image) -> None:
        self._exchange.put_on(image)
        self._memory.note_put_on()

    def _refuse_writes(self) -> None:
        """Refuses what a replica has written on the state of an optimizer."""
        for name, held, states, then in self._states:
            if versions_of(states) != then or not held.is_same():
                raise RuntimeError(written_state(name))

    def _look_at_shared(self) -> None:
        self._states: list[tuple[str, Held, list[torch.Tensor], list[int]]] = []
        for thing in self._reached.acting:
            if isinstance(thing, Optimizer) and "state" in vars(thing):
                states = [
                    value
                    for state in list(thing.state.values())
                    if isinstance(state, dict)
                    for value in state.values()
                    if isinstance(value, torch.Tensor)
                ]
                tables = {id(one): one for one in (thing.state, *thing.state.values())}
                held = Held({k: t for k, t in tables.items() if isinstance(t, dict)})
                written = states, versions_of(states)
                self._states.append((type(thing).__name__, held, *written))

    # Who acts for all

    def replica_here(self) -> Replica | None:
        """See `Host`."""
        frame = current_frame()
        context: Any = None if frame is None else frame.replica_context
        group = getattr(context, "_group", None)
        if group is None or group.replica not in self._replicas:
            return None
        replica: Replica = group.replica
        return replica

    @contextmanager
    def acting(self, of: object = None) -> Iterator[None]:
        """A block in which the objects are those of all replicas.

        Gradients are those of the whole batch, and parameters the program's own. What
        is written in the block all replicas get.

        Args:
            of: What acts. None: a function of the program's.
        """
        is_update = isinstance(of, Optimizer)
        # A scaler, and a function through `.data`, may write without being counted.
        is_counted = isinstance(of, LRScheduler) or (
            isinstance(of, Optimizer) and is_torchs(of)
        )
        with without_autograd():
            self._take_off()
            self._refuse_settings()
            self._memory.refuse_unlike_parameters()
            settled = self.gradients.settle()
        with self._acting_with(settled, is_of_program=of is None) as act:
            before, then = list(act.grads), versions_of(act.grads)
            if is_update:
                self.keep()
            self._is_updating = is_update
            yield
        self._is_updating = False
        if is_update:
            self._users.grads = list(act.grads)
        is_same = is_counted and all(map(is_, act.grads, before))
        if not is_same or versions_of(before) != then:
            with without_autograd():
                self.gradients.lend_sums(act.grads)

    def keep(self) -> None:
        """An update begins: if the run fails later, what it has written stays."""
        if self._act is not None:
            self.gradients.keep()
            self._users.grads = list(self._act.grads)

    @contextmanager
    def _acting_with(
        self, grads: list[torch.Tensor | None], is_of_program: bool = True
    ) -> Iterator[Image]:
        """A block for who acts for all, with gradients on the program's devices."""
        outer = self._act
        with without_autograd():
            act = self._act = Image(self._users.device)
            act.follow(self._lead)
            if is_of_program:
                self._memory.give_act(act, self._lead)
            act.grads = grads
            before = Image(self._users.device)
            before.follow(act)
            act.versions = self._memory.versions_at_home() | act.versions
            self._put_on(act)
        yield act
        with without_autograd():
            self._take_off()
            self._tell(act, before)
            if act.flags != before.flags:
                for image in self._images.values():
                    image.flags = list(act.flags)
            self._memory.tell(act, before.versions)
            self._act = outer

    def before_any_step(self, optimizer: Optimizer) -> None:
        """Called before any optimizer in the process takes a step, on its thread.

        Raises:
            RuntimeError: If it is one that the walk has not found, and trains what all
                replicas share.
        """
        if self._act is not None and self._exchange.on is self._act:
            self.keep()  # a merge function updates
            return
        known = set(map(id, self._exchange.parameters))
        if any(id(p) in known for p in parameters_of(optimizer)):
            raise RuntimeError(refusals.unknown_optimizer(type(optimizer).__name__))

    def begin_acting(self, thing: object) -> None:
        """See `Host`."""
        self._block = self.acting(thing)
        self._block.__enter__()

    def end_acting(self) -> None:
        """See `Host`."""
        block, self._block = self._block, None
        assert block is not None
        block.__exit__(None, None, None)

    @contextmanager
    def cross_replica(self) -> Iterator[None]:
        """See `Host`."""
        with self._around.enter():
            yield

    def leads(self, replica: Replica) -> bool:
        """See `Host`."""
        return replica.index == self.weights.present[0]

    def combine_losses(self, losses: Sequence[Any]) -> Any:
        """See `Host`."""
        if any(loss is None for loss in losses):
            return None
        weights = []
        for r in self.weights.present:
            factor = self.gradients.of_replicas[r].loss_factor
            if factor is None:
                raise RuntimeError(CLOSURE_OF_TERMS)
            weights.append(self.weights.weights[r] * factor)
        here = [one.cpu() if isinstance(one, torch.Tensor) else one for one in losses]
        # What does not count may be NaN, and 0 * NaN is NaN.
        return sum(
            loss * weight for loss, weight in zip(here, weights, strict=True) if weight
        )

    def compare(self, name: str, given: Given) -> None:
        """See `Host`."""

    def _refuse_settings(self) -> None:
        """Refuses settings of optimizers that replicas have set differently."""
        for thing in self._reached.acting:
            groups = groups_of(thing)
            keys = {id(one) for group in groups for one in (group, group["params"])}
            keys.add(id(groups))
            images = self._images.items()
            if any(keys & image.containers.keys() for _, image in images):
                refuse_unlike_settings(
                    thing, {r: self._groups_in(image, groups) for r, image in images}
                )

    def _refuse_unlike_flags(self) -> None:
        for r, image in self._images.items():
            for i, (one, other) in enumerate(
                zip(self._lead.flags, image.flags, strict=True)
            ):
                if one != other:
                    name = self._name_of_parameter(i)
                    raise RuntimeError(refusals.unlike_flags(name, r))

    def _groups_in(self, image: Image, groups: list[Any]) -> list[dict[str, Any]]:
        """What the groups of an optimizer are in an image."""
        contents, known = self._exchange.contents, self._reached.containers
        shown = []
        for group in contents(image, id(groups)):
            held = contents(image, id(group)) if id(group) in known else group
            params = held["params"]
            held = dict(held, params=params)
            if id(params) in known:
                held["params"] = contents(image, id(params))
            shown.append(held)
        return shown

    def _tell(self, act: Image, before: Image) -> None:
        """Gives all replicas what was written where one acted for all."""
        exchange, images = self._exchange, self._images.values()
        for key in {**before.containers, **act.containers}:
            old, new = exchange.contents(before, key), exchange.contents(act, key)
            if not isinstance(new, dict):
                if not is_same(old, new):
                    for image in images:
                        image.containers[key] = new
                continue
            for name in {**old, **new}:
                if old.get(name, _NOTHING) is new.get(name, _NOTHING):
                    continue
                for image in images:
                    table = dict(exchange.contents(image, key))
                    if name in new:
                        table[name] = new[name]
                    else:
                        table.pop(name, None)
                    image.containers[key] = table
        for i in {**before.places, **act.places}:
            value = exchange.content(act, i)
            if value is not exchange.content(before, i):
                for image in images:
                    image.places[i] = value

    # The end

    def end(self) -> None:
        """The images become one, which the program's objects get."""
        with without_autograd():
            self._take_off()
            self._acting.stop()
            self._refuse_settings()
            self._refuse_advanced()
            self._memory.refuse_unlike_parameters()
            self._users.versions = self._memory.versions_at_home()
            settled = self.gradients.settle()
            for key, metric in self._metrics:
                local: Any = {
                    r: self._exchange.contents(image, key)
                    for r, image in self._images.items()
                }
                metric.local = local
                metric.put_together(self.weights)
            appended = {
                key: items
                for key, items in self._appended.items()
                if key not in self._rewritten
            }
            Merging(
                self._exchange,
                self._images,
                len(self._around.devices),
                [self.weights.fractions[r] for r in self._images],
                self._known.memory.written,
                appended,
                self._around.averages_buffers,
                {
                    key: _OF_METRICS.union(states_of(m.original))
                    for key, m in self._metrics
                },
                self._tell_lost,
            ).merge(self._users)
            self._refuse_unlike_flags()
            self._users.grads, self._users.flags = settled, self._lead.flags
            self._exchange.put_on(self._users)
            for _, metric in self._metrics:
                metric.write_back()
            if self._marks is not None and not any(r.was_asked for r in self._replicas):
                now = mark_training(self._exchange.parameters)
                self._has_trained_on_plain_rows = self._marks != now

    def abort(self) -> None:
        """A failure: the program's objects get what they had before the run."""
        self._has_failed = True
        self._acting.stop()
        self.gradients.undo()
        with without_autograd():
            self._exchange.take_off()
            self._note_appended(self._exchange.on)
            with suppress(RuntimeError):  # what replicas have written is taken back
                self._memory.note_writes(is_for_all=self._exchange.on is self._act)
            if self._is_updating and self._exchange.on is self._act:
                self._users.grads = list(self._act.grads)
            users = self._users
            users.containers, users.places, users.states = {}, {}, {}
            users.versions = self._memory.versions_at_home()
            users.flags = self._exchange.flags
            for key, items in self._appended.items():
                if key not in self._rewritten:
                    base = self._exchange.base.of(key)
                    self._users.containers[key] = [*base, *items]
            self._exchange.put_on(self._users)

    def warn(self) -> None:
        """After the run: warns of numbers of which only the lead's are kept."""
        if self._lost.differing:
            self._lost.warn(self._warned)
        if self._has_trained_on_plain_rows:
            self._warned.add(PLAIN_BATCH)
            warn_of_plain_batch(self._num_replicas)

    def _tell_lost(
        self, place: int, name: str, kept: Any, others: Sequence[Any]
    ) -> None:
        self._known.lost.look(place, name, kept, others)

    def _refuse_advanced(self) -> None:
        if len(self._images) > 1:
            now = [_position(one) for one in self._reached.iterators]
            for one, then, here in zip(
                self._reached.iterators, self._positions, now, strict=True
            ):
                if then != here:
                    name = self._reached.details.name_of(one) or type(one).__name__
                    raise RuntimeError(refusals.advanced_iterator(name))

    def let_go(self) -> None:
        """Drops all that it refers to: parts of a run refer to one another.

        The memory would else wait for Python's collector of cycles.
        """
        lost, warned = self._known.lost, self._around.warned
        count, has_trained = len(self._images), self._has_trained_on_plain_rows
        for part in (self._acting, self.gradients, self._memory, self._exchange, self):
            vars(part).clear()
        self._lost, self._warned = lost, warned
        self._num_replicas, self._has_trained_on_plain_rows = count, has_trained


_MAY_BE_KEPT = frozenset({PerReplica, tuple})
_NOTHING = object()
# What a metric has in replicas besides its states, and the program's own has not.
_OF_METRICS = frozenset(
    {
        "dist_sync_fn",
        "distributed_available_fn",
        "_computed",
        "_groups",
        "_groups_checked",
    }
)


def _run_forward(module: Any, run: Callable[[], Any]) -> Any:
    return run()


def _of_replica(held: Contents, r: int) -> Contents:
    if isinstance(held, dict):
        return {name: component_of(value, r) for name, value in held.items()}
    return [component_of(value, r) for value in held]


def _position(iterator: Any) -> object:
    """What differs once an iterator has given out an item."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return None
        return frame.f_lasti, [*map(id, frame.f_locals.values())]
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    inside = getattr(iterator, "_num_yielded", None)  # of a DataLoader
    if inside is not None:
        return inside
    return operator.length_hint(iterator, -1)
