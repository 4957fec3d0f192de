"""The copies of all replicas, made once and kept in step with the user's modules.

A replica's modules are real modules with real leaf parameters. What the user writes on the modules between runs
(`train()`, a dropout rate, a frozen layer, loaded weights) reaches the copies before the next run. What a step writes
on buffers and plain attributes of its own copy (`model.train()`, a counter) reaches the user's modules after the run.

                           parameters                              buffers
    the user's module      the values; the optimizer writes them   the values between runs
    a replica's copy       the same memory on the same device,     memory of its own
                           else memory of its own
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, final

import torch
from torch import nn

from torchstrategy._binding.attribute_contents import PLAIN, Attribute
from torchstrategy._binding.changes import MISSING, Edit, Snapshot, TrackedTensor, TrackedTensors
from torchstrategy._binding.module_traversal import HOOK_TABLES, TORCHS_OWN, computed_by_hooks, tables_of
from torchstrategy._binding.proxies import plain_class
from torchstrategy._communication.transfer import write
from torchstrategy._core.devices import memory_device
from torchstrategy._core.torch_internals import requires_grad_of
from torchstrategy._core.trace import traced
from torchstrategy._core.types import Device
from torchstrategy._replication.copyable import refuse_trainable, refuse_uncopyable
from torchstrategy._replication.metrics import metrics_of, states_of
from torchstrategy._replication.module_replica import BufferSlot, ModuleReplica, differ, return_attribute, uncopyable
from torchstrategy._replication.plain_attributes import Attributes
from torchstrategy._replication.run_warnings import LostBuffers
from torchstrategy._replication.tensor_copies import sharing_memory
from torchstrategy._training.gradient_reducer import AllReduce
from torchstrategy._training.replica_gradients import ReplicaParameter, written_in_replica
from torchstrategy._training.replica_weights import ReplicaWeights
from torchstrategy._variables.kinds import SyncOnReadVariable
from torchstrategy._variables.variable import Variable, is_variable


class Placement(NamedTuple):
    """Where copies are, and how they are kept in step.

    Args:
        devices: The device of each replica.
        parameter_device: The device of the user's parameters.
        may_alias: Whether replicas on that device share the memory of the user's parameters. If not, they have real
            copies, as replicas on several devices have; the numbers are the same.
        averages_buffers: Whether running statistics become the mean of the replicas'; else the first replica's.
        is_mirrored: Whether replicas on other devices update their parameters themselves, with optimizers of their
            own; else values are sent to them.
        all_reduce: Sums gradients and leaves the sums on all devices, for replicas that update their parameters
            themselves.
    """

    devices: Sequence[Device]
    parameter_device: Device
    may_alias: bool = True
    averages_buffers: bool = True
    is_mirrored: bool = False
    all_reduce: AllReduce | None = None

    def aliases(self) -> list[bool]:
        """Of each replica, whether its parameters on the user's device share the user's memory."""
        return [self.may_alias or (self.is_mirrored and r == 0) for r in range(len(self.devices))]


@final
class ReplicatedModules:
    """The copies that all replicas have of the user's modules.

    Args:
        roots: The user's modules that are part of no other.
        layout: Where the copies are, and how they are kept in step.
        variables: Variables to be copied, too, whether or not they are in a module.

    Raises:
        TypeError: If a module cannot be copied; it is named, with what to do.
    """

    def __init__(self, roots: Sequence[nn.Module], layout: Placement, variables: Sequence[Variable]) -> None:
        self._layout = layout
        named = [pair for root in roots for pair in root.named_modules(prefix=type(root).__name__)]
        paths = {id(module): path for path, module in reversed(named)}
        modules = list({id(module): module for _, module in named}.values())
        in_modules = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
        loose = [variable for variable in variables if id(variable) not in in_modules]
        refuse_uncopyable(roots, further=loose)
        # The user's modules are referred to weakly, and only their `__dict__`s are held: the modules die with the
        # user's last reference, and then the storage drops the copies.
        self._references = [weakref.ref(module) for module in modules]
        self._insides = [module.__dict__ for module in modules]
        self._paths = [paths[id(module)] for module in modules]
        by_name = [TrackedTensor(variable.name, variable) for variable in loose]
        self._parameters = TrackedTensors([held for _, held in _originals(modules, paths, "_parameters")], by_name)
        self.names = self._parameters.names  # what the user calls each of the `owners`: `Net.layers.0.weight`
        buffers = _originals(modules, paths, "_buffers")
        self._buffers = TrackedTensors([held for _, held in buffers])
        self._slots = [slot for slot, _ in buffers]
        self.lost_buffers = LostBuffers()
        self.replicas = [
            ModuleReplica(roots, modules, self._parameters, self._buffers, self._slots, memory_device(device), aliases)
            for device, aliases in zip(layout.devices, layout.aliases(), strict=True)
        ]
        self._watch_parameters()
        self._buffers.watch(range(len(self._buffers.names)))
        self.metrics = metrics_of(self._insides, self._paths, self.replicas)
        # The plain attributes that are states of metrics, which `metrics` brings to the replicas and back.
        self._states = [set(states_of(inside)) for inside in self._insides]
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters.tensors)}
        self._classes = list(map(type, modules))
        self._structure = Snapshot(tables_of(self._insides))
        self._attribute_tables = Snapshot(dict(enumerate(self._insides)))
        # Whether a step made, removed or replaced buffers or hooks: then not all copies agree with the user's modules.
        self._is_outdated = False
        # The plain attributes that hooks compute, in each replica for itself.
        self._computed = [computed_by_hooks(module) for module in modules]
        self._known_tensors = self._index_of.keys() | set(map(id, self._buffers.tensors))
        self._attribute_contents = Attributes(self.replicas, self._known_tensors, self._named_attributes)
        self._pointers = self._current_pointers()
        self._overlaps = self._find_overlaps()

    @property
    def owners(self) -> list[torch.Tensor]:
        """The user's parameters."""
        return self._parameters.tensors

    def originals(self) -> list[nn.Module]:
        """The user's modules."""
        return [module for reference in self._references if (module := reference()) is not None]

    def refresh(self) -> bool:
        """Brings what the user wrote on the modules to the copies. False if the copies have to be made anew."""
        # A layer that was added or replaced changes what there is to copy.
        if self._is_outdated or not self._structure.is_same() or not self._have_same_classes():
            return False
        contents = self._attribute_contents
        if not contents.is_empty and not contents.bring(self._named_attributes):
            return False
        if not self._attribute_tables.is_same():
            if not self._bring_attributes():
                return False
            contents.collect(self._named_attributes)
        self.refresh_parameters()
        trained = requires_grad_of(self.owners)
        for replica in self.replicas:
            replica.bring_requires_grad(trained)
        changed = self._changed_buffers()
        if changed:
            for replica in self.replicas:
                replica.bring_buffers(changed, self._buffers)
        if self._overlaps:
            contents.agree()
            for replica in self.replicas:
                replica.note_buffers()
        return self._overlap_as_before()

    def _overlap_as_before(self) -> bool:
        """Whether the same tensors share memory as when the copies were made."""
        if all(map(operator.is_, self._current_pointers(), self._pointers)):
            return True
        self._pointers = self._current_pointers()
        return self._find_overlaps() == self._overlaps

    def _current_pointers(self) -> list[list[int]]:
        return [tracked.pointers for tracked in self._tracked()]

    def _find_overlaps(self) -> list[list[int]]:
        """The ids of the tensors that share memory with one another, in groups."""
        tensors = [tensor for tracked in self._tracked() for tensor in tracked.tensors]
        return sorted([id(tensors[index]) for index in group] for group in sharing_memory(tensors))

    def _tracked(self) -> tuple[TrackedTensors, ...]:
        return self._parameters, self._buffers, self._attribute_contents.tensors

    def _have_same_classes(self) -> bool:
        """Whether nobody has given a module another class, as some libraries do to patch layers."""
        originals = self.originals()
        if not all(map(operator.is_, map(vars, originals), self._insides)):  # somebody has written a `__dict__`
            return False
        now = list(map(type, originals))
        # During a run of another thread they are proxies.
        return now == self._classes or list(map(plain_class, now)) == list(map(plain_class, self._classes))

    def refresh_parameters(self) -> None:
        """Brings changed values of parameters to the copies."""
        # It is also called within a run, where a step may have set `requires_grad` on its copies: that is not brought.
        changed, moved = self._parameters.take_changes()
        try:
            if changed:
                with traced("bring parameters"):
                    owners = self.owners
                    write([replica.bring_parameters(owners, changed, moved) for replica in self.replicas])
        except BaseException:
            # Some copies may not have got the values: the next refresh brings them again.
            self._parameters.note_uncounted(changed)
            raise
        for replica in self.replicas:
            replica.note_parameters()
        if moved:
            self._watch_parameters()

    def _watch_parameters(self) -> None:
        """Looks for writes that torch does not count on the parameters of which some replica has a real copy."""
        # See Note [What is aliased and what is copied]. Where all replicas share the memory, nothing has to be brought.
        by_all = map(all, zip(*self.sharing(), strict=True))
        self._parameters.watch(index for index, is_shared in enumerate(by_all) if not is_shared)

    def sharing(self) -> list[list[bool]]:
        """For each replica, which of its parameters share the memory of the user's."""
        return [list(replica.aliased) for replica in self.replicas]

    def own_parameters(self, replica: ModuleReplica) -> dict[int, ReplicaParameter]:
        """The parameters of one replica that have memory of their own, by the ids of the user's."""
        triples = zip(self.owners, replica.parameters, replica.aliased, strict=True)
        return {id(owner): own for owner, own, is_shared in triples if not is_shared}

    def note_updated(self, owners: Sequence[torch.Tensor]) -> None:
        """Says that the user's parameters, and all copies with memory of their own, were updated alike."""
        for replica in self.replicas:
            replica.note_parameters()
        self._parameters.note_agreement(self._index_of[id(owner)] for owner in owners)

    def note_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """Says that some of the user's parameters were written in a way that torch does not count."""
        index_of = self._index_of
        self._parameters.note_uncounted(index_of[id(p)] for p in parameters if id(p) in index_of)

    def check_unwritten(self, present: Sequence[int]) -> None:
        """Refuses writes of a step on parameters, since every replica would write once.

        Raises:
            RuntimeError: Naming the parameter.
        """
        written = [*self._parameters.written(), *(i for r in present for i in self.replicas[r].written_parameters())]
        if written:
            raise RuntimeError(written_in_replica(self.names[min(written)]))

    def check_structure(self, present: Sequence[int]) -> list[list[Edit]]:
        """Refuses parameters and layers that a step made, replaced or removed in a replica.

        Returns:
            For each of the replicas, what its step did to buffers and hooks.

        Raises:
            RuntimeError: Naming it.
        """
        edits = [self.replicas[r].changes() for r in present]
        for edit in chain.from_iterable(edits):
            where, table = self._paths[edit.place[0]], edit.place[1]
            if table in ("_parameters", "_modules"):
                raise RuntimeError(_REBUILT.format(name=f"{where}.{edit.name}", verb=edit.verb()))
            if table in HOOK_TABLES and not (edit.after is MISSING or isinstance(edit.after, _FUNCTIONS)):
                raise RuntimeError(_HOOK.format(where=where, kind=type(edit.after).__name__))
        return edits

    def return_to_originals(self, replica_weights: ReplicaWeights, changes: Sequence[Sequence[Edit]]) -> None:
        """After a run: brings what the replicas wrote on buffers and plain attributes to the user's modules.

        Running statistics of normalisation layers become the mean of the replicas', weighted by rows, if they are to be
        averaged. States of metrics are reduced as the metrics say. All else is taken from the first replica.
        """
        lead = self.replicas[replica_weights.present[0]]
        self._check_flags(replica_weights)
        values = self._buffer_values(replica_weights)
        for metric in self.metrics:
            metric.put_together(replica_weights)
        # The lines above may raise, and have written nothing of the user's yet. Nothing below refuses anything.
        self._return_attributes(replica_weights.present)
        if not self._attribute_contents.is_empty:
            self._attribute_contents.give_back(replica_weights.present, self._named_attributes)
        if any(changes):
            self._return_changes(replica_weights, changes)
        for metric in self.metrics:
            metric.write_back()
        trained = lead.trained
        if requires_grad_of(self.owners) != trained:
            for owner, flag in zip(self.owners, trained, strict=True):
                owner.requires_grad_(flag)
        replaced = {index: value for index, value in values.items() if lead.has_replaced(index)}
        for index, value in values.items():
            if index not in replaced:
                self._buffers.take(index, value)
        if replaced:
            self._replace_buffers(replaced, lead)

    def _return_attributes(self, present: Sequence[int]) -> None:
        """Brings the data that the first replica wrote on plain attributes to the user's modules.

        Data that another replica wrote does not stay there: the next run brings the values of the user's modules.
        """
        for r in present:
            is_lead = r == present[0]
            for edit in self.replicas[r].take_attributes():
                is_computed = edit.name in self._computed[edit.place]
                is_state = edit.name in self._states[edit.place]
                if is_state or (is_computed and not is_lead):
                    continue
                if return_attribute(edit, self._insides[edit.place], is_computed, is_lead):
                    self._attribute_tables.forget(edit.place, edit.name)

    def _replace_buffers(self, values: Mapping[int, torch.Tensor], lead: ModuleReplica) -> None:
        """Puts new tensors in the places of buffers of the user's, as the first replica's step did.

        Whoever holds the tensor that was there before finds in it what plain PyTorch leaves there: what the step wrote
        on it in place, and nothing else.
        """
        places = Counter(map(id, chain.from_iterable(inside["_buffers"].values() for inside in self._insides)))
        self._is_outdated |= not self._structure.is_same()
        for index, value in values.items():
            before, (position, name) = self._buffers.tensors[index], self._slots[index]
            after = value.detach().to(before.device, copy=True)
            left = lead.left(index)
            if left is not None and left.shape == before.shape:
                self._buffers.take(index, left)
            # A tensor that is also in another place stays there, and is something else from here on.
            self._is_outdated |= places[id(before)] > 1 or id(before) in self._attribute_contents.known_held
            self._insides[position]["_buffers"][name] = after
            self._buffers.replace(index, after)
            self._known_tensors.discard(id(before))
            self._known_tensors.add(id(after))
            for replica in self.replicas:
                replica.replace_buffer(before, after)
        self._structure.take()

    def _return_changes(self, replica_weights: ReplicaWeights, edits: Sequence[Sequence[Edit]]) -> None:
        """Makes or removes hooks and buffers of the user's modules, as the first replica's step did with its own."""
        self._is_outdated = True
        lead = self.replicas[replica_weights.present[0]]
        originals = {id(thing): thing for thing in (*self.originals(), *self.owners)}
        back = {id(local): originals[key] for key, local in lead.local_objects.items() if key in originals}
        for edit in edits[0]:
            position, table = edit.place
            if table == "_buffers":
                made = [e.after for other in edits[1:] for e in other if (e.place, e.name) == (edit.place, edit.name)]
                name = f"{self._paths[position]}.{edit.name}"
                self.lost_buffers.look(id(self._insides[position]), name, edit.after, made)
                lead.return_buffer(edit, self._insides[position], memory_device(self._layout.parameter_device))
            else:
                lead.return_hook(edit, self._insides[position], back)

    def _check_flags(self, replica_weights: ReplicaWeights) -> None:
        flags = [self.replicas[r].noted_requires_grad() for r in replica_weights.present]
        for r, other in zip(replica_weights.present[1:], flags[1:], strict=True):
            if other != flags[0]:
                name = next(n for n, one, two in zip(self.names, flags[0], other, strict=True) if one != two)
                raise RuntimeError(
                    f"The replicas disagree whether {name} is trained: replica {replica_weights.present[0]} and "
                    f"replica {r} left its requires_grad at different values. Set it in every replica alike, or "
                    "outside of strategy.run."
                )

    def _buffer_values(self, replica_weights: ReplicaWeights) -> dict[int, torch.Tensor]:
        """By position, the new values of the buffers that any replica wrote.

        Raises:
            RuntimeError: If a replica put a tensor of another shape or dtype in the place of one.
        """
        present = [self.replicas[r] for r in replica_weights.present]
        combined = {}
        written = [replica.written_buffers(self._buffers) for replica in present]
        for index in sorted(set().union(*written)):
            original = self._buffers.tensors[index]
            values = [replica.buffer(index).detach() for replica in present]
            for value in values:
                if (original.shape, original.dtype) != (value.shape, value.dtype):
                    shapes = tuple(original.shape), original.dtype, tuple(value.shape), value.dtype
                    raise RuntimeError(_REPLACED.format(self._buffers.names[index], *shapes))
            combined[index] = values[0]
            if self._buffers.are_running[index] and self._layout.averages_buffers:
                fractions = [replica_weights.fractions[r] for r in replica_weights.present]
                here = [v.to(original.device) * f for v, f in zip(values, fractions, strict=True) if f]
                combined[index] = torch.stack(here).sum(0)
            elif not self._buffers.are_running[index]:
                others = [value for value, indices in zip(values[1:], written[1:], strict=True) if index in indices]
                module = id(self._insides[self._slots[index].position])
                self.lost_buffers.look(module, self._buffers.names[index], values[0], others)
        return combined

    def _changed_buffers(self) -> list[int]:
        # The copies of all replicas agree between runs, so one is compared with the user's. A forward of the user's own
        # module writes running statistics, and torch's kernels do not count that.
        buffers, local = self._buffers, self.replicas[0]
        running = [index for index, is_running in enumerate(buffers.are_running) if is_running]
        uncounted = [index for index in running if differ(local.buffer(index), buffers.tensors[index])]
        return sorted({*buffers.take_changes()[0], *uncounted})

    def _named_attributes(self) -> Iterator[Attribute]:
        """The plain attributes of all modules: the path, the user's value, and the value in each replica."""
        # Attributes that the user has replaced and that are not brought yet are left out: the replicas still hold the
        # old value.
        unbrought = {(edit.place, edit.name) for edit in self._attribute_tables.edits()}
        for position, inside in enumerate(self._insides):
            left_out = TORCHS_OWN | self._computed[position] | self._states[position]
            for name in [name for name in inside if name not in left_out and (position, name) not in unbrought]:
                local = [replica.insides[position].get(name, MISSING) for replica in self.replicas]
                is_everywhere = not any(value is MISSING for value in local)
                if is_everywhere and type(inside[name]) not in PLAIN and id(inside[name]) not in self._index_of:
                    yield f"{self._paths[position]}.{name}", inside[name], local

    def _bring_attributes(self) -> bool:
        edits = list(self._attribute_tables.edits())
        if any(edit.name in TORCHS_OWN and edit.name != "training" for edit in edits):
            return False
        brought = [e for e in edits if e.name not in self._computed[e.place] | self._states[e.place]]
        paths = [f"{self._paths[edit.place]}.{edit.name}" for edit in brought]
        for path, edit in zip(paths, brought, strict=True):
            refuse_trainable(path, edit.after, self._index_of)
        if self.replicas[0].lacks_parts_in(edit.after for edit in brought):
            return False
        try:
            for r, replica in enumerate(self.replicas):
                replica.bring_attributes(brought, self._attribute_contents.counterparts(r))
        except Exception as error:
            raise uncopyable(", ".join(paths), error) from error
        self._attribute_tables.take()
        for replica in self.replicas:
            replica.note_attributes()
        return True


def _originals(
    modules: Sequence[nn.Module], paths: dict[int, str], table: str
) -> list[tuple[BufferSlot, TrackedTensor]]:
    """The tensors in the tables of this name, each once, with its first place."""
    found: dict[int, tuple[BufferSlot, TrackedTensor]] = {}
    for position, module in enumerate(modules):
        for name, tensor in module.__dict__[table].items():
            # A variable that is registered as a buffer is copied as a variable. A `SyncOnReadVariable` is not copied:
            # it holds a component for each replica already.
            if is_variable(tensor) and (table == "_buffers" or type(tensor) is SyncOnReadVariable):
                continue
            if tensor is not None:
                is_running = table == "_buffers" and tensor.is_floating_point() and _is_statistic(module, name)
                tracked = TrackedTensor(f"{paths[id(module)]}.{name}", tensor, is_running)
                found.setdefault(id(tensor), (BufferSlot(position, name), tracked))
    return list(found.values())


def _is_statistic(module: nn.Module, name: str) -> bool:
    # The base classes of torch's batch and instance normalisation layers have private names. Layers of other packages
    # follow torch in the names of such buffers.
    norms = (nn.BatchNorm1d.__mro__[1], nn.InstanceNorm1d.__mro__[1])
    return isinstance(module, norms) or name in ("running_mean", "running_var")


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)

_REBUILT = (
    "{name} was {verb} in a replica: the model and its optimizer would not have this change, and the other replicas "
    "would not, either. Do it outside of strategy.run. If forward makes it when it is first called, call the module "
    "with one batch before the first run; the module of a DataParallel is model.module."
)

_REPLACED = (
    "A replica replaced the buffer {}, of shape {} and {}, by one of shape {} and {}. Write the buffer in place, or "
    "keep such a value in a plain attribute."
)

_HOOK = (
    "A step registered a hook on {where} in a replica, and left it there: an object of the class {kind}, which may "
    "hold parts of that replica. Register it outside of strategy.run, remove it in the step, with handle.remove(), or "
    "make it a function."
)
