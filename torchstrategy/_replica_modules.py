"""The copies of the user's modules that one replica has: how they are made, and how values reach them.

`copy.deepcopy` copies the structure, with every tensor put there beforehand: the replica's own parameters, and its
buffers.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy._closures import Rebinding
from torchstrategy._comm import Write, sent_to
from torchstrategy._ledger import LocalParameter
from torchstrategy._parts import TORCHS_OWN, held_plainly
from torchstrategy._structure import HOOK_FLAGS, HOOK_TABLES, MISSING, VALUES, Change, Structure, same
from torchstrategy._torch import compile_alike, keeping_version, version
from torchstrategy._types import Device
from torchstrategy._variables import LocalVariable, Variable, is_variable

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@final
@dataclass(slots=True)
class Original:
    """A tensor of the user's, and what it was when the copies last agreed with it."""

    name: str
    held: torch.Tensor | weakref.ref[torch.Tensor]  # a variable in no module lives as long as the user has it
    is_running: bool = False  # a running statistic, which torch's kernels write without counting it
    version: int = -1
    place: tuple[object, ...] = ()
    memory: torch.UntypedStorage | None = None  # kept, so that nothing else can come to lie at that place

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself."""
        tensor = self.held() if isinstance(self.held, weakref.ref) else self.held
        assert tensor is not None, "copies are given up when a variable dies"
        return tensor

    def has_changed(self) -> bool:
        """Whether it was written, or lies elsewhere."""
        return version(self.tensor) != self.version or self.has_moved()

    def has_moved(self) -> bool:
        """Whether it lies elsewhere, or means another part of the same memory."""
        return _place(self.tensor) != self.place

    def is_known(self) -> None:
        """The copies agree with it."""
        self.version = version(self.tensor)
        if self.has_moved():
            self.place = _place(self.tensor)
            self.memory = self.tensor.untyped_storage() if self.tensor.layout is torch.strided else None

    def is_written(self) -> None:
        """It was written in a way that counts no version."""
        self.version = -1

    def take(self, value: torch.Tensor) -> None:
        """Writes it; the copies do not agree with it any more."""
        _write(self.tensor, value, self.is_running)
        self.is_written()


@final
class ReplicaModules:
    """The copies of one replica.

    Args:
        roots: The user's modules: none of them is part of another.
        modules: They and everything below them.
        parameters: Their parameters.
        buffers: Their buffers.
        device: Where the replica computes.
        may_alias: Whether a parameter on that device shares the memory of its original.

    Raises:
        TypeError: If a module cannot be copied.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        modules: Sequence[nn.Module],
        parameters: Sequence[Original],
        buffers: Sequence[Original],
        device: Device,
        may_alias: bool,
    ) -> None:
        owners = [original.tensor for original in parameters]
        self._aliased = [may_alias and owner.device == device for owner in owners]
        data = [
            owner.detach() if aliased else sent_to([owner], [device])[0][0]
            for owner, aliased in zip(owners, self._aliased, strict=True)
        ]
        self.parameters = [_local(owner, d) for d, owner in zip(data, owners, strict=True)]
        self._versions = [-1] * len(owners)  # of those with memory of their own, when they were last brought
        self.parameters_are_known()
        own = sent_to([original.tensor for original in buffers], [device])[0]
        self._memo: dict[int, Any] = {id(owner): p for owner, p in zip(owners, self.parameters, strict=True)}
        self._memo.update((id(original.tensor), tensor) for original, tensor in zip(buffers, own, strict=True))
        for module in modules:
            self._memo.update((id(thing), thing) for thing in (*_hooks_to_share(module), *_one_for_all(vars(module))))
            for _, held in held_plainly(module):
                if isinstance(held, torch.Tensor) and id(held) not in self._memo:
                    self._memo[id(held)] = held if is_variable(held) else sent_to([held], [device])[0][0]
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._memo.setdefault(id(tensor), tensor)  # a variable of which each replica has a value
        copied = _copied(roots, dict(self._memo))
        originals = (m for root in roots for m in root.modules())
        pairs = {
            id(m): local for m, local in zip(originals, (m for root in copied for m in root.modules()), strict=True)
        }
        for module in modules:
            compile_alike(module, pairs[id(module)])
        self._memo.update(pairs)
        self._device = device
        self.insides = [pairs[id(module)].__dict__ for module in modules]
        self._close_over_own()
        self.local_objects: dict[int, object] = {id(module): pairs[id(module)] for module in modules}
        self.local_objects.update((id(o), p) for o, p in zip(owners, self.parameters, strict=True))
        self._slots = [_slot_of(original.tensor, modules, pairs) for original in buffers]
        self._agreed = [(tensor, version(tensor)) for tensor in own]
        self._attribute_values = values_of(self.insides)
        self._parts = Structure(self.insides, ("_parameters", "_modules"))
        self._hooks = Structure(self.insides, HOOK_TABLES)
        self._buffer_slots = Structure(self.insides, ("_buffers",))

    def _close_over_own(self) -> None:
        """Functions that the modules hold close over this replica's, where the user's close over the originals."""
        rebinding = Rebinding(self._memo)
        for inside in self.insides:
            for name in inside.keys() - TORCHS_OWN:
                inside[name] = rebinding.of(inside[name])
            for table in HOOK_TABLES:
                inside[table].update({key: rebinding.of(hook) for key, hook in inside[table].items()})

    def bring_parameters(self, originals: Sequence[Original], changed: Sequence[int], moved: set[int]) -> Write:
        """What has to be written to bring the values of parameters: of what is in shared memory, nothing."""
        targets, sources = [], []
        for index in moved if all(self._aliased) else changed:
            if self._aliased[index] and index not in moved:
                continue
            local, owner = self.parameters[index], originals[index].tensor.detach()
            if self._aliased[index] and owner.device == local.device:
                local.data = owner
            elif self._aliased[index] or local.shape != owner.shape or local.dtype != owner.dtype:
                local.data = owner.to(local.device, copy=True)
                self._aliased[index] = False
            else:
                targets.append(local.detach())
                sources.append(originals[index].tensor)  # the very same for each replica: `write` may broadcast it
        return Write(targets, sources)

    def shares(self, index: int) -> bool:
        """Whether a parameter has the memory of the original."""
        return self._aliased[index]

    def parameters_are_known(self) -> None:
        """The parameters agree with the originals: whatever is written on them from here on, the step writes."""
        if not all(self._aliased):
            pairs = zip(self.parameters, self._aliased, strict=True)
            self._versions = [-1 if aliased else version(parameter) for parameter, aliased in pairs]

    def has_written(self, index: int) -> bool:
        """Whether the step wrote on a parameter that has memory of its own; where it is shared, the original tells."""
        return self._versions[index] not in (-1, version(self.parameters[index]))

    def bring_requires_grad(self, flags: Sequence[bool]) -> None:
        """Brings which parameters are trained."""
        if [parameter.requires_grad for parameter in self.parameters] != flags:
            for parameter, flag in zip(self.parameters, flags, strict=True):
                parameter.requires_grad_(flag)

    def bring_buffers(self, indices: Sequence[int], originals: Sequence[Original]) -> None:
        """Brings the values of buffers."""
        for index in indices:
            own, original = self._agreed[index][0], originals[index].tensor
            if own.shape != original.shape or own.dtype != original.dtype or own.requires_grad:
                own = original.detach().to(own.device, copy=True)
            else:
                _write(own, original, originals[index].is_running)
            table, name = self._slots[index]
            table[name] = own
            self._agreed[index] = (own, version(own))

    def bring_attribute(self, position: int, name: str, value: object) -> None:
        """Brings a plain attribute of a module; `MISSING` takes it away."""
        inside = self.insides[position]
        if value is MISSING:
            inside.pop(name, None)
        else:
            memo = {**self._memo, **{id(thing): thing for thing in _one_for_all({name: value})}}
            if isinstance(value, torch.Tensor):
                memo[id(value)] = sent_to([value], [self._device])[0][0]
            inside[name] = Rebinding(self._memo).of(copy.deepcopy(value, memo))
        self._attribute_values = values_of(self.insides)

    def changed_parts(self) -> Iterator[Change]:
        """Which parameters and layers the step made, replaced or took away; and the hooks that no original can have."""
        yield from self._parts.changes()
        functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
        for change in self._hooks.changes():
            if change.after is not MISSING and not isinstance(change.after, functions):
                yield change

    def changed_hooks(self) -> list[Change]:
        """Which hooks the step registered or removed."""
        return self._hooks.take_changes()

    def changed_buffers(self) -> list[Change]:
        """Which buffers the step made or took away; None in the place of one is one that was taken away."""
        changes = self._buffer_slots.take_changes()
        return [c for c in changes if not (isinstance(c.before, torch.Tensor) and isinstance(c.after, torch.Tensor))]

    def has(self, position: int, name: str, value: object) -> bool:
        """Whether it holds the very object in a plain attribute, and no copy."""
        return self.insides[position].get(name, MISSING) is value

    def return_attributes(self, originals: Sequence[dict[str, Any]]) -> None:
        """Brings to the originals the plain attributes that the step wrote."""
        values = values_of(self.insides)
        if not same(self._attribute_values, values):
            self._attribute_values = values
            for original, local in zip(originals, self.insides, strict=True):
                for name, value in local.items():
                    if isinstance(value, _PLAIN) and original.get(name, MISSING) is not value:
                        original[name] = value

    def return_hook(self, change: Change, original: dict[str, Any], originals: Mapping[int, object]) -> None:
        """Registers a hook on an original, or removes it, as the step did on the copy.

        It closes over originals, by the id of what this replica has in the place of each.
        """
        table, number = original[change.table], change.name
        if change.after is MISSING:
            table.pop(number, None)
            return
        table[number] = Rebinding(originals).of(change.after)
        for flags in HOOK_FLAGS:
            if number in self.insides[change.position][flags]:
                original[flags][number] = True

    def return_buffer(self, change: Change, original: dict[str, Any], device: Device) -> None:
        """Makes a buffer in an original, or takes it away, as the step did in the copy."""
        table, name, value = original["_buffers"], change.name, change.after
        if isinstance(value, torch.Tensor):
            table[name] = value.detach().to(device, copy=True)
        elif value is None:
            table[name] = None
        else:
            table.pop(name, None)
        unsaved = "_non_persistent_buffers_set"
        original[unsaved].discard(name)
        original[unsaved].update({name} & self.insides[change.position][unsaved])

    def buffer(self, index: int) -> torch.Tensor:
        """The replica's own buffer, or what the step put in its place."""
        table, name = self._slots[index]
        value = table.get(name)
        return self._agreed[index][0] if value is None else value

    def written_buffers(self, originals: Sequence[Original]) -> set[int]:
        """The buffers that the step wrote, or put another tensor in the place of."""
        written = set()
        for index, (own, agreed) in enumerate(self._agreed):
            buffer = self.buffer(index)
            is_uncounted = originals[index].is_running and differ(own, originals[index].tensor)
            if is_uncounted or buffer is not own or version(own) != agreed:
                written.add(index)
        return written


def values_of(insides: Sequence[dict[str, Any]]) -> list[object]:
    """What the modules with these insides hold, one list for all of them."""
    return list(chain.from_iterable(map(VALUES, insides)))


def differ(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors hold different numbers."""
    return first.shape != second.shape or not torch.equal(first, second.to(first.device))


def _local(owner: torch.Tensor, data: torch.Tensor) -> LocalParameter:
    if isinstance(owner, Variable):
        return LocalVariable.of(owner, data, owner.requires_grad)
    return LocalParameter.over(data, owner.requires_grad)


def _write(buffer: torch.Tensor, value: torch.Tensor, is_running: bool) -> None:
    # torch's kernels do not count what they write on running statistics: an earlier forward of the module, which saved
    # them, may still run backward.
    with keeping_version(buffer) if is_running else nullcontext():
        buffer.copy_(value.detach())


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _slot_of(
    tensor: torch.Tensor, modules: Sequence[nn.Module], local: dict[int, nn.Module]
) -> tuple[dict[str, Any], str]:
    """Where the replica's copy of a buffer is held."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is tensor:
                return local[id(module)]._buffers, name
    raise AssertionError("a buffer of no module")


def _hooks_to_share(module: nn.Module) -> list[object]:
    """The hooks of which a replica uses the user's own object: a recorder that is not copied records all replicas."""
    hooks = chain.from_iterable(module.__dict__[name].values() for name in HOOK_TABLES)
    return [h for h in hooks if not (isinstance(h, types.MethodType) and isinstance(h.__self__, nn.Module))]


def _one_for_all(attributes: dict[str, Any], depth: int = 2) -> Iterator[object]:
    """The optimizers, schedulers and scalers that a module holds, perhaps in an object: of them there are no copies."""
    for value in attributes.values():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for item in several:
            if isinstance(item, (Optimizer, LRScheduler, torch.amp.GradScaler)):
                yield item
            elif depth and not isinstance(item, (nn.Module, torch.Tensor, type)):
                yield from _one_for_all(getattr(item, "__dict__", {}), depth - 1)


def _copied(roots: Sequence[nn.Module], memo: dict[int, Any]) -> list[nn.Module]:
    """Copies of all roots at once, so that what they share stays shared."""
    try:
        return copy.deepcopy(list(roots), memo)
    except Exception as error:
        raise uncopyable(", ".join(type(root).__name__ for root in roots), error) from error


def uncopyable(name: str, error: Exception) -> TypeError:
    """What is raised when `copy.deepcopy` fails on something of the user's."""
    return TypeError(
        f"{name} cannot be copied for the replicas: {type(error).__name__}: {error}. Every attribute of a module "
        "must be one that copy.deepcopy can copy; keep files, locks and tensors with a history elsewhere."
    )
