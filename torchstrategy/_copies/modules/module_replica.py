"""The copies of the user's modules that one replica has.

This file has how they are made, and how values reach them.

`copy.deepcopy` copies the modules. By itself it would copy too much and too little:
each parameter, also where the replica is to share its memory; the outputs that a module
has kept, with their graphs; and no function, so that a hook of the copy would go on
using the user's model. So its memo has beforehand what the replica is to have in the
place of parameters, buffers and other tensors: it copies the structure and no tensor.
Functions are made anew after it.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict
from collections.abc import (
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeGuard, final

import numpy
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy._base.devices import memory_device
from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.marks import Versions
from torchstrategy._base.objects.attribute_contents import drop, things_in
from torchstrategy._base.objects.changes import MISSING, Edit, Snapshot, edits_of
from torchstrategy._base.objects.module_traversal import (
    HOOK_TABLES,
    TABLES,
    plain_attributes,
    tables_of,
    tensors_with_attributes,
)
from torchstrategy._base.plain import PLAIN
from torchstrategy._base.torch_internals import compile_alike
from torchstrategy._base.types import Device
from torchstrategy._base.writes import StepWrites, TrackedTensors, Writes, bring_value
from torchstrategy._copies.attributes.kept_by_hooks import KeptByHooks
from torchstrategy._copies.attributes.late_attributes import Late, postpone
from torchstrategy._copies.attributes.trainers import to_replica
from torchstrategy._copies.gradients.replica_gradients import (
    ReplicaParameter,
    end_history,
    make_local,
)
from torchstrategy._copies.references.deep_copies import (
    ClosureRebinder,
    deep_copy,
    is_function,
)
from torchstrategy._copies.tensor_copies import copy_tensors, lay_in_one_piece
from torchstrategy._group.transfer import Write, detached_copy, equal
from torchstrategy._run.placement import Placement
from torchstrategy._variables.variable import Variable, is_variable, set_plain_data

# Note [What is aliased and what is copied]
# - A parameter is a leaf of the replica's own, with its own slot for gradients. On the
#   device of the user's parameter it shares the memory (`aliased`), so that after an
#   update nothing has to be copied. On another device, or without `may_alias`, it has
#   memory of its own: `bring_parameters` says what is to be written there, and
#   `transfer.write` writes it. Under `MirroredStrategy`, `optimizer_copies` updates it
#   there, too.
# - A variable with one value for all replicas is treated as a parameter. A
#   `SyncOnReadVariable` holds a component for each replica itself: the copies of the
#   modules have the user's variable.
# - Buffers and tensors in plain attributes are always copied: a step may write on them,
#   from the rows of its replica. But a parameter or variable that a plain attribute
#   holds is the replica's own, the one that its modules have.
# - The attributes that a program has set on a tensor (`weight.is_expert`) are copied as
#   those of a module are.
# - Containers and other objects in plain attributes are deep copies. What cannot be
#   copied (a lock, a file) is the same object in all replicas, and so are optimizers,
#   schedulers and scalers, which act once for all replicas.
# - A function that closes over a part of the model, be it a hook or in a plain
#   attribute, is made anew for each replica, over the replica's part. A method of a
#   module is that of the replica's module.
# - Of what a hook keeps outside of the model, each replica has its own: see
#   `kept_by_hooks`.
# - Of the states of a metric the first replica has copies, and the others have copies
#   of the default states; see `metrics`.
# - The arguments of the step are not copied. Each replica gets new containers, with its
#   component in the place of each distributed value; any other tensor in them is one
#   for all replicas (`distributed_values.select`).
# - A trainer has attributes of its own in each replica, which begin as the user's own
#   objects: these are not copied.
# - The state of an optimizer is one for all replicas. Under `MirroredStrategy`, a
#   replica whose parameters have memory of their own also has a copy of the optimizer,
#   with a state of its own (`optimizer_copies.can_have_copies`).


_OF_VARIABLES = frozenset(
    {
        "aggregation",
        "assign",
        "assign_add",
        "assign_sub",
        "read_value",
        "synchronization",
        "trainable",
    }
)


@final
class ReplicaVariable(ReplicaParameter):
    """A replica's own copy of a variable: a parameter that can be assigned."""

    # Weak, since copies stay between runs, and the variable lives only as long as the
    # user has a reference to it.
    __slots__ = ("torchstrategy_variable",)
    torchstrategy_variable: weakref.ref[Variable]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = copy.deepcopy(self._variable, memo)
        return copied

    @property
    def name(self) -> str:
        return self._variable.name

    def numpy(self, *, force: bool = False) -> numpy.ndarray[Any, Any]:
        return self._variable.numpy(force=force)

    def __getattr__(self, name: str) -> Any:
        # A method of the user's variable acts for the replica that calls it: the
        # variable asks whose thread it is on.
        if name in _OF_VARIABLES:
            return getattr(self._variable, name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    @property
    def _variable(self) -> Variable:
        variable = self.torchstrategy_variable()
        assert variable is not None, "the run holds the variables of its strategy"
        return variable


@final
class Originals(NamedTuple):
    """What all replicas have copies of, for as long as the copies live."""

    roots: Sequence[nn.Module]  # the user's modules that are part of no other
    modules: Sequence[nn.Module]  # these and all modules below them
    parameters: TrackedTensors
    buffers: TrackedTensors
    # Where each of the buffers is: the position of its module, and its name there.
    slots: Sequence[tuple[int, str]]
    late: Late  # the plain attributes that are copied when a step reads them
    kept: KeptByHooks  # what the hooks of the modules keep


@final
class ModuleReplica:
    """The copies of the user's modules that one replica has.

    Args:
        originals: The user's modules, and what they hold. It is not kept, so that
            modules die with the user's last reference.
        placement: Where the copies are.
        replica: Which replica this is.

    Raises:
        TypeError: If a module cannot be copied.
    """

    def __init__(
        self, originals: Originals, placement: Placement, replica: int
    ) -> None:
        roots, modules, parameters, buffers, slots, late, kept = originals
        self.number = replica
        self._num_replicas = len(placement.devices)
        self._kept = kept
        self.device = device = memory_device(placement.devices[replica])
        self._copy_parameters(owners := parameters.tensors, placement)
        # What this replica has in the place of the user's objects, by the ids of these;
        # also the memo of `deepcopy`.
        self.local_objects = {
            id(thing): thing
            for module in modules
            for thing in _shared_with_user(module)
        }
        self.local_objects.update(zip(map(id, owners), self.parameters, strict=True))
        named = list(_named_values(modules, owners))
        waiting = {
            id(vars(modules[position])[name]): later
            for (position, name), later in late.items()
        }
        known = self.local_objects.keys() | set(map(id, buffers.tensors))
        own = self._find_own(named, known, is_new=True)
        # While the ids of the user's tensors are in the memo, no other object may get
        # these ids.
        self._held = own.constants
        tensors = [*buffers.tensors, *self._held]
        copies = copy_tensors(tensors, device)
        self.local_objects.update(
            (id(tensor), copied) for tensor, copied in zip(tensors, copies, strict=True)
        )
        try:
            # All roots are copied at once, so that objects that they share stay shared.
            memo = {
                **self.local_objects,
                **own.objects,
                **waiting,
                **_empty_tables(modules),
            }
            memo.update(kept.held_in_copies(replica))
            copied, with_attributes = _copy_with_attributes(
                list(roots), [*owners, *tensors, *own.outputs], memo
            )
        except Exception as error:
            raise uncopyable_error(
                ", ".join(type(root).__name__ for root in roots), error
            ) from error
        pairs = {
            id(m): local
            for one, other in zip(roots, copied, strict=True)
            for m, local in _pair_modules(one, other)
        }
        for module in modules:
            compile_alike(module, pairs[id(module)])
        self.local_objects.update(pairs)
        self._recurrent = [
            copied for copied in pairs.values() if isinstance(copied, nn.RNNBase)
        ]
        self._lay_weights()
        self.note_parameters()
        self.insides = [pairs[id(module)].__dict__ for module in modules]
        self._close_over_own(with_attributes)
        for position in {position for position, _ in late}:
            postpone(
                pairs[id(modules[position])],
                {name for other, name in late if other == position},
            )
        # This replica lacks a part of a `PerReplica`.
        if any(value is MISSING for value in own.objects.values()):
            drop(with_attributes, MISSING)
            self._drop_missing()
        self._slots = slots
        self.buffers = StepWrites(copies[: len(buffers.tensors)])
        self._structure = Snapshot(tables_of(self.insides))

    def _drop_missing(self) -> None:
        """Takes away attributes, and items of containers, that this replica lacks."""
        for inside in self.insides:
            kept = {name: inside.pop(name) for name in inside.keys() - TABLES}
            drop(kept, MISSING)
            inside.update(kept)

    def _copy_parameters(
        self, owners: Sequence[torch.Tensor], placement: Placement
    ) -> None:
        # See Note [What is aliased and what is copied].
        may_alias = placement.may_alias or (placement.is_mirrored and self.number == 0)
        self.aliased = [may_alias and owner.device == self.device for owner in owners]
        apart = [
            owner
            for owner, aliased in zip(owners, self.aliased, strict=True)
            if not aliased
        ]
        sent = iter(copy_tensors(apart, self.device))
        self.parameters: list[ReplicaParameter] = []
        for owner, is_aliased in zip(owners, self.aliased, strict=True):
            memory = owner.detach() if is_aliased else next(sent)
            self.parameters.append(_make_local(owner, memory))
        # Whether writes on all parameters are counted by the user's parameters: where a
        # replica's parameter has shared the memory from the beginning, both have one
        # version counter.
        self._is_counted_by_users = all(self.aliased)

    def _lay_weights(self) -> None:
        if self._recurrent:
            own = [
                own
                for own, aliased in zip(self.parameters, self.aliased, strict=True)
                if not aliased
            ]
            lay_in_one_piece(self._recurrent, own)

    def _find_own(
        self, named: Iterable[tuple[str, Any]], known: Container[int], is_new: bool
    ) -> _Own:
        """What this replica has in the place of what some values of the user's hold.

        Args:
            named: The values, each with what to call it.
            known: The ids of things that the replica has already.
            is_new: Whether the replica is made now, and has none of the parts that an
                earlier one had.
        """
        # A tensor with a history is an output, which holds its graph, and so parameters
        # and activations. The replica does not hold it, so that the user can drop it.
        own: dict[int, Any] = {}
        constants: dict[int, torch.Tensor] = {}
        outputs: list[torch.Tensor] = []
        for path, held in chain.from_iterable(
            things_in(name, value) for name, value in named
        ):
            if id(held) in known or id(held) in own:
                continue
            if isinstance(held, _ONE_FOR_ALL) or is_variable(held):
                own[id(held)] = held
            elif isinstance(held, PerReplica):
                component = to_replica(held, self.number, self._num_replicas)
                if isinstance(component, torch.Tensor) and not component.numel():
                    component = component.to(self.device)
                own[id(held)] = component
                if is_new and is_function(component):
                    raise RuntimeError(_OUTDATED.format(path=path))
                if is_new and _has_history(component):
                    own[id(held)] = _copy_without_history(component, self.device, path)
            elif _has_history(held):
                own[id(held)] = _copy_without_history(held, self.device, path)
                outputs.append(held)
            elif isinstance(held, torch.Tensor):
                constants[id(held)] = held
        return _Own(own, list(constants.values()), outputs)

    def _close_over_own(self, marked: Iterable[torch.Tensor]) -> None:
        """Makes functions that the copies hold close over this replica's objects.

        They closed over the user's.

        Args:
            marked: The replica's tensors that have attributes.
        """
        between_runs = ClosureRebinder(self.local_objects)
        in_run = ClosureRebinder({**self.local_objects, **self._kept.own[self.number]})
        for tensor in marked:
            in_run.rebind(vars(tensor))
        for inside in self.insides:
            for name in inside.keys() - TABLES:
                inside[name] = in_run.rebind(inside[name])
            for table in filter(None, map(inside.__getitem__, HOOK_TABLES)):
                for key, hook in table.items():
                    table[key] = self._kept.make_switch(
                        in_run.rebind(hook), between_runs.rebind(hook)
                    )

    def bring_parameters(self, owners: Sequence[torch.Tensor], found: Writes) -> Write:
        """The writes that bring the values of parameters.

        Parameters that share the user's memory need none.

        Args:
            owners: The user's parameters.
            found: Which of them were written or moved.
        """
        changed, moved = found.all, found.moved
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        is_anew = False
        for index in moved if self._is_counted_by_users else changed:
            if self.aliased[index] and index not in moved:
                continue
            local, owner = self.parameters[index], owners[index]
            if self.aliased[index] and owner.device == local.device:
                set_plain_data(local, owner.detach())
            elif (
                self.aliased[index]
                or local.shape != owner.shape
                or local.dtype != owner.dtype
            ):
                set_plain_data(local, owner.detach().to(local.device, copy=True))
                self.aliased[index], is_anew = False, True
            else:
                # The source is the same tensor for every replica, so that `write` can
                # broadcast it.
                targets.append(local)
                sources.append(owner)
        self._is_counted_by_users &= not moved
        if is_anew:
            self._lay_weights()
        return Write(targets, sources)

    def note_parameters(self) -> None:
        """Says that the parameters agree with the user's.

        Whatever is written on them from here on, the step writes.
        """
        # Most replicas have nothing to look at, and each run asks several times.
        self._versions = (
            None if self._is_counted_by_users else Versions(self.parameters)
        )

    def written_parameters(self) -> list[int]:
        """The positions of parameters on which the step wrote.

        Only those count that the user's parameters do not count.
        """
        return [] if self._versions is None else self._versions.written()

    def can_bring_buffers(
        self, indices: Sequence[int], originals: TrackedTensors
    ) -> bool:
        """Whether `bring_buffers` can also bring attributes that are set on buffers.

        The user has set them.
        """
        tensors = originals.tensors
        # Mostly, and it needs no Python call for each buffer.
        if not any(map(vars, tensors)):
            return True
        replaced = self.replaced_buffers()
        for index in indices:
            are_plain = all(
                isinstance(value, PLAIN) for value in vars(tensors[index]).values()
            )
            if not are_plain and (
                index in replaced
                or _is_other(self.buffers.tensors[index], tensors[index])
            ):
                return False
        return True

    def bring_buffers(
        self, indices: Sequence[int], originals: TrackedTensors, unsure: Set[int]
    ) -> bool:
        """Brings the values of buffers, of which some may agree already.

        Returns:
            Whether the replica has other tensors in their place now.
        """
        tensors, users, are_others = (
            list(self.buffers.tensors),
            originals.tensors,
            False,
        )
        replaced = self.replaced_buffers()
        for index in indices:
            own, original = tensors[index], users[index]
            # If the step replaced the buffer, both tensors may be in use in the
            # replica: write on neither.
            if index in replaced or _is_other(own, original):
                own, are_others = original.detach().to(own.device, copy=True), True
                # Plain values: see `can_bring_buffers`.
                vars(own).update(vars(original))
                self.local_objects[id(original)] = own
            else:
                bring_value(own, original, index in unsure, index in originals.running)
            position, name = self._slots[index]
            self.insides[position]["_buffers"][name] = own
            tensors[index] = own
        if are_others:
            self.buffers = StepWrites(tensors)
        self.buffers.note()
        return are_others

    def lacks_parts_in(self, values: Iterable[Any]) -> bool:
        """Whether some values of the user's hold what this replica has no copy of.

        That is a module or a trainable tensor.
        """
        for _, thing in chain.from_iterable(things_in("", value) for value in values):
            is_known = id(thing) in self.local_objects
            if not is_known and (isinstance(thing, nn.Module) or _is_trainable(thing)):
                return True
        return False

    def copy_values(
        self, values: Mapping[tuple[str, str], Any], own: Mapping[int, Any]
    ) -> dict[tuple[str, str], Any]:
        """Copies of values of the user's for this replica.

        They have the replica's own objects where it has them already.

        Its copy of a tensor that no attribute has held meanwhile may be outdated: such
        a tensor is copied anew.

        Args:
            values: The user's values, which are copied at once: what several of them
                hold is one object in the copies, too. A message calls each what the
                parts of its key make together. If the second is empty, the value is
                what `named_items` returned for a container.
            own: By the ids of further objects of the user's: the objects that this
                replica has in their place.
        """
        buffers = set(map(id, self.buffers.tensors))
        memo: dict[int, Any] = {}
        for key, one in self.local_objects.items():
            may_be_outdated = type(one) is torch.Tensor and id(one) not in buffers
            if not may_be_outdated:
                memo[key] = one
        memo.update(own)
        named: list[tuple[str, Any]] = []
        for (path, name), value in values.items():
            if name:
                named.append((path + name, value))
            else:  # each item of a container has a name of its own
                named += [
                    (path + shown.format(key), held)
                    for (shown, key), held in value.items()
                ]
        new = self._find_own(named, memo, is_new=False)
        memo.update(new.objects)
        memo.update(
            zip(
                map(id, new.constants),
                copy_tensors(new.constants, self.device),
                strict=True,
            )
        )
        memo.update(self._kept.held_in_copies(self.number))
        rebinding = ClosureRebinder(
            {**self.local_objects, **own, **self._kept.own[self.number]}
        )
        copies, marked = _copy_with_attributes(
            dict(values), [*new.constants, *new.outputs], memo
        )
        if any(value is MISSING for value in memo.values()):
            drop([*copies.values(), *marked], MISSING)
        for tensor in marked:
            rebinding.rebind(vars(tensor))
        return {key: rebinding.rebind(copied) for key, copied in copies.items()}

    def tensors(self, without: Collection[int] = ()) -> list[torch.Tensor]:
        """The parameters and buffers from before the step, but for some positions."""
        return [
            *self.parameters,
            *(own for i, own in enumerate(self.buffers.tensors) if i not in without),
        ]

    def _leave_out_values(self, found: Sequence[Edit]) -> list[Edit]:
        """The edits that change what the modules consist of: see `list_changes`."""
        changes: list[Edit] = []
        for edit in found:
            is_value_of_buffer = (
                _is_value(edit) and (edit.place[0], edit.name) in self._slots
            )
            if not is_value_of_buffer:
                changes.append(edit)
        if found and not changes:
            self._structure.take()
        return changes

    def buffer(self, index: int) -> torch.Tensor:
        """The replica's own buffer, or the tensor that the step put in its place."""
        position, name = self._slots[index]
        value: torch.Tensor | None = self.insides[position]["_buffers"].get(name)
        return self.buffers.tensors[index] if value is None else value

    def replaced_buffers(self) -> set[int]:
        """The positions of buffers in whose place the step put other tensors."""
        own = self.buffers.tensors
        if not own:
            return set()
        there = [
            self.insides[position]["_buffers"].get(name)
            for position, name in self._slots
        ]
        if all(map(is_, there, own)):  # mostly
            return set()
        return {
            index
            for index, value in enumerate(there)
            if value is not None and value is not own[index]
        }

    def written_buffers(self, originals: TrackedTensors, reads_all: bool) -> set[int]:
        """The positions of buffers that the step wrote or replaced.

        Args:
            originals: The user's buffers.
            reads_all: Whether running statistics on accelerators are compared. Else all
                of these count as written.
        """
        # Torch's kernels write running statistics without counting a version. On the
        # CPU `buffers` has seen that.
        own = self.buffers.tensors
        if not own:
            return set()
        elsewhere = {index for index in originals.running if not own[index].is_cpu}
        if reads_all:
            elsewhere = {
                index
                for index in elsewhere
                if have_other_numbers(own[index], originals.tensors[index])
            }
        return self.buffers.written() | elsewhere | self.replaced_buffers()


def list_changes(replicas: Sequence[ModuleReplica]) -> list[list[Edit]]:
    """By replica, the parameters, layers, buffers and hooks that the step changed.

    It made, replaced or removed them.

    A tensor in the place of a buffer is a value of this buffer, and no change, if the
    buffer is nowhere else.
    """
    found = edits_of([replica._structure for replica in replicas])
    return [
        replica._leave_out_values(edits)
        for replica, edits in zip(replicas, found, strict=True)
    ]


@final
class _Own(NamedTuple):
    """What a replica is to have in the place of what some values of the user's hold."""

    objects: dict[int, Any]  # by the ids of the user's objects
    # Of which it gets copies that share memory with each other where the user's do.
    constants: list[torch.Tensor]
    # With a history, of which `objects` has copies without it.
    outputs: list[torch.Tensor]


def _copy_with_attributes(
    value: Any, tensors: Sequence[torch.Tensor], memo: Mapping[int, Any]
) -> tuple[Any, list[torch.Tensor]]:
    """A deep copy of a value.

    The replica's tensors get copies of the attributes that the user has set on theirs.

    Args:
        value: What is copied.
        tensors: The user's tensors. `memo` has those of the replica.
        memo: By the ids of objects of the user's: what the copies have in their place.

    Returns:
        The copy, and those of the replica's tensors that got attributes.
    """
    with_attributes = [tensor for tensor in tensors if vars(tensor)]
    # All is copied at once, so that objects that a module and a tensor share stay
    # shared.
    copied, *of_tensors = deep_copy([value, *map(vars, with_attributes)], memo)
    marked = [memo[id(tensor)] for tensor in with_attributes]
    for own, attributes in zip(marked, of_tensors, strict=True):
        vars(own).update(attributes)
    return copied, marked


_OUTDATED = (
    "{path} is a function that a step has made over parts of each replica. The "
    "replicas are made anew now, since a layer or hook was added, and have other "
    "parts: set the attribute to None before."
)


def _named_values(
    modules: Sequence[nn.Module], owners: Sequence[torch.Tensor]
) -> Iterator[tuple[str, Any]]:
    """What a replica needs copies of, each with what to call it.

    Parameters and buffers are not among them.
    """
    for module in modules:
        for name, value in plain_attributes(module).items():
            yield f"{type(module).__name__}.{name}", value
    for module in modules:
        for name, tensor in tensors_with_attributes(module):
            yield f"{type(module).__name__}.{name}", tensor
    for owner in owners:
        if isinstance(owner, Variable) and vars(owner):
            yield owner.name, owner


def _is_other(own: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether a replica's buffer cannot take the value of the user's."""
    # A buffer with a history is from the last step: a write on it would become a part
    # of that graph.
    return (
        own.shape != original.shape or own.dtype != original.dtype or own.requires_grad
    )


def _is_value(edit: Edit) -> bool:
    """Whether a change only gives a buffer another tensor."""
    is_tensor = isinstance(edit.before, torch.Tensor) and isinstance(
        edit.after, torch.Tensor
    )
    return edit.place[1] == "_buffers" and is_tensor


def have_other_numbers(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors hold different numbers."""
    return not equal(first, second.to(first.device))


def _make_local(owner: torch.Tensor, data: torch.Tensor) -> ReplicaParameter:
    """The copy of a parameter or variable over the memory of `data`."""
    if not isinstance(owner, Variable):
        return make_local(ReplicaParameter, data, owner.requires_grad)
    local = make_local(ReplicaVariable, data, owner.requires_grad)
    local.torchstrategy_variable = weakref.ref(owner)
    return local


def _shared_with_user(module: nn.Module) -> Iterator[Any]:
    """The user's own objects that a copy of a module has, too.

    They are hooks, and variables that hold a component for each.
    """
    # `copy.deepcopy` would copy a hook that is an object. It stays the user's own: in a
    # run it is a proxy.
    hooks = chain.from_iterable(module.__dict__[name].values() for name in HOOK_TABLES)
    yield from (
        h
        for h in hooks
        if not (isinstance(h, types.MethodType) and isinstance(h.__self__, nn.Module))
    )
    yield from (
        held
        for held in chain(module._parameters.values(), module._buffers.values())
        if is_variable(held)
    )


# A module may hold one, which is not copied.
_ONE_FOR_ALL = (Optimizer, LRScheduler, torch.amp.GradScaler)


def _is_trainable(thing: object) -> bool:
    """Whether a backward gives gradients to a thing."""
    return isinstance(thing, torch.Tensor) and thing.is_leaf and thing.requires_grad


def _has_history(thing: object) -> TypeGuard[torch.Tensor]:
    return isinstance(thing, torch.Tensor) and thing.requires_grad and not thing.is_leaf


def _copy_without_history(
    tensor: torch.Tensor, device: Device, path: str
) -> torch.Tensor:
    """A replica's copy of an output that a module holds in a plain attribute."""
    return end_history(
        detached_copy(tensor, device),
        f"This backward goes through {path}, which was computed outside of "
        "strategy.run and kept in a plain attribute: a replica has a copy of it, whose "
        "history ends there. Compute it in the step; or, if it is to be constant, "
        "detach it.",
    )


def _empty_tables(modules: Sequence[nn.Module]) -> dict[int, Any]:
    """A new table for each empty table of the modules, by the id of the user's."""
    # Most tables of hooks are empty. For `copy.deepcopy` they would be most of the
    # work.
    tables = (
        value
        for module in modules
        for value in vars(module).values()
        if type(value) in (OrderedDict, dict)
    )
    return {id(table): type(table)() for table in tables if not table}


def _pair_modules(
    root: nn.Module, copied: nn.Module
) -> Iterator[tuple[nn.Module, nn.Module]]:
    modules, copies = list(root.modules()), list(copied.modules())
    if len(modules) != len(copies):
        what = (
            f"copy.deepcopy gives {type(copied).__name__}, with {len(copies)} modules "
            f"in place of {len(modules)}"
        )
        raise uncopyable_error(type(root).__name__, TypeError(what))
    return zip(modules, copies, strict=True)


def uncopyable_error(name: str, error: Exception) -> TypeError:
    """The error for objects of the user's on which `copy.deepcopy` fails."""
    return TypeError(
        f"{name} cannot be copied for the replicas: {type(error).__name__}: {error}. "
        "Tensors and modules that a module holds must be ones that copy.deepcopy can "
        "copy; keep tensors with a history elsewhere."
    )
