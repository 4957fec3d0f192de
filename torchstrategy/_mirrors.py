"""Copies of the user's modules, one set for each replica, made once and kept in step with the originals.

A replica's modules are real modules with real leaf parameters. What the user writes on the originals between runs
(`train()`, a dropout rate, a frozen layer, loaded weights) reaches them before the next run; what a step writes on its
own copy, if it is plain (`model.train()`, a counter) or a buffer, reaches the originals after it.

                           parameters                              buffers
    the original           the values; the optimizer writes them   the values between runs
    a replica's copy       the same memory on the same device,     memory of its own
                           else memory of its own
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, methodcaller
from typing import Any, final

import torch
from torch import nn

from torchstrategy._comm import sent_to
from torchstrategy._devices import place
from torchstrategy._gradients import LocalParameter
from torchstrategy._shares import Shares
from torchstrategy._torch import foreach_copy_, version
from torchstrategy._types import Device

_TENSOR_TABLES = ("_parameters", "_buffers", "_modules")
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MISSING = object()
_VALUES = methodcaller("values")


@final
@dataclass(slots=True)
class _Original:
    """A tensor of the user's, and what it was when the copies last agreed with it."""

    name: str
    tensor: torch.Tensor
    version: int = -1
    address: int = -1
    dtype: torch.dtype | None = None

    def has_changed(self) -> bool:
        return version(self.tensor) != self.version or self.has_moved()

    def has_moved(self) -> bool:
        return self.tensor.data_ptr() != self.address or self.tensor.dtype is not self.dtype

    def is_known(self) -> None:
        self.version, self.address, self.dtype = version(self.tensor), self.tensor.data_ptr(), self.tensor.dtype


@final
class Mirrors:
    """The copies of some modules, and all below them, on some devices.

    Args:
        roots: The originals: none of them is part of another.
        devices: The device of each replica.
        may_alias: Whether a copy on the device of its original shares the memory of its parameters.

    Raises:
        TypeError: If a module cannot be copied; it is named, with what to do.
    """

    def __init__(self, roots: Sequence[nn.Module], devices: Sequence[Device], may_alias: bool) -> None:
        named = [pair for root in roots for pair in root.named_modules(prefix=type(root).__name__)]
        paths = {id(module): path for path, module in reversed(named)}
        modules = list({id(module): module for _, module in named}.values())
        for module in modules:
            _refuse_uncopyable(module, paths[id(module)])
        # Only the insides of the originals are held: they die with the user's last reference, and the copies with them.
        self._references = [weakref.ref(module) for module in modules]
        self._insides = [module.__dict__ for module in modules]
        self._parameters = _originals(modules, paths, "_parameters")
        self._buffers = _originals(modules, paths, "_buffers")
        self._averaged = {id(b) for m in modules if _has_running_statistics(m) for b in m.buffers(recurse=False)}
        self._replicas = [
            _ReplicaModules(roots, modules, self._parameters, self._buffers, place(device), may_alias)
            for device in devices
        ]
        for original in (*self._parameters, *self._buffers):
            original.is_known()
        self._tables = [inside[name] for inside in self._insides for name in (*_TENSOR_TABLES, *_HOOK_TABLES)]
        self._structure = self._current_structure()
        self._attributes = [dict(inside) for inside in self._insides]
        self._attribute_values = _values_of(self._insides)

    @property
    def owners(self) -> list[torch.Tensor]:
        """The parameters of the originals."""
        return [original.tensor for original in self._parameters]

    @property
    def names(self) -> list[str]:
        """What the user calls each of the owners: `Net.layers.0.weight`."""
        return [original.name for original in self._parameters]

    def parameters(self, replica: int) -> list[LocalParameter]:
        """The parameters of one replica, in the order of `owners`."""
        return self._replicas[replica].parameters

    def originals(self) -> list[nn.Module]:
        """The user's modules."""
        return [module for reference in self._references if (module := reference()) is not None]

    def local_modules(self, replica: int) -> dict[int, nn.Module]:
        """The modules of one replica, by the id of the original."""
        return self._replicas[replica].by_original

    def refresh(self) -> bool:
        """Brings to the copies what was written on the originals. False if they have to be made anew."""
        if not _same(self._structure, self._current_structure()):
            return False
        values = _values_of(self._insides)  # the tables are among them
        if not _same(self._attribute_values, values):
            if not self._bring_attributes():
                return False
            self._attribute_values = values
        self.refresh_parameters()
        changed = [index for index, buffer in enumerate(self._buffers) if buffer.has_changed()]
        if changed:
            for replica in self._replicas:
                replica.bring_buffers(changed, [self._buffers[index].tensor for index in changed])
            for index in changed:
                self._buffers[index].is_known()
        return True

    def refresh_parameters(self) -> None:
        """Brings changed parameters to the copies, and whether they require grad."""
        changed = [index for index, parameter in enumerate(self._parameters) if parameter.has_changed()]
        moved = {index for index in changed if self._parameters[index].has_moved()}
        requires_grad = [parameter.tensor.requires_grad for parameter in self._parameters]
        for replica in self._replicas:
            replica.bring_parameters(self._parameters, changed, moved)
            replica.bring_requires_grad(requires_grad)
        for index in changed:
            self._parameters[index].is_known()

    def check_unwritten(self, present: Sequence[int]) -> None:
        """Refuses that the step of a replica wrote on parameters, which every replica would do once.

        Raises:
            RuntimeError: Naming the parameter.
        """
        for index, original in enumerate(self._parameters):
            written = version(original.tensor) != original.version
            if written or any(self._replicas[r].has_written(index) for r in present):
                raise RuntimeError(written_in_replica(original.name))

    def return_to_originals(self, shares: Shares) -> None:
        """After a run: brings to the originals what the replicas wrote on their buffers and plain attributes.

        The running statistics of normalisation layers are averaged by share; all else is that of the first replica.
        """
        lead = self._replicas[shares.present[0]]
        values = self._buffer_values(shares)  # which may refuse; after it nothing does
        lead.return_attributes(self._insides)
        for original, local in zip(self._parameters, lead.parameters, strict=True):
            if original.tensor.requires_grad is not local.requires_grad:
                original.tensor.requires_grad_(local.requires_grad)
        for index, value in values.items():
            self._buffers[index].tensor.copy_(value)

    def _buffer_values(self, shares: Shares) -> dict[int, torch.Tensor]:
        """What becomes of the buffers that a replica wrote.

        Raises:
            RuntimeError: If a replica put a tensor of another shape or dtype in the place of one.
        """
        present = [self._replicas[r] for r in shares.present]
        total = sum(shares.weights)
        combined = {}
        for index in set().union(*(replica.written_buffers() for replica in present)):
            original = self._buffers[index]
            values = [replica.buffer(index).detach() for replica in present]
            for value in values:
                _check_fits(original, value)
            combined[index] = values[0]
            if id(original.tensor) in self._averaged and original.tensor.is_floating_point() and total:
                weights = [shares.weights[r] / total for r in shares.present]
                here = [v.to(original.tensor.device) * w for v, w in zip(values, weights, strict=True) if w]
                combined[index] = torch.stack(here).sum(0)
        return combined

    def _current_structure(self) -> list[object]:
        return list(chain.from_iterable(map(_VALUES, self._tables)))

    def _bring_attributes(self) -> bool:
        for position, (known, now) in enumerate(zip(self._attributes, self._insides, strict=True)):
            if len(known) == len(now) and all(map(is_, known.values(), now.values())):
                continue
            changed = [name for name in {**known, **now} if known.get(name, _MISSING) is not now.get(name, _MISSING)]
            if any(name in _TENSOR_TABLES or name in _HOOK_TABLES for name in changed):
                return False
            for replica in self._replicas:
                for name in changed:
                    replica.bring_attribute(position, name, now.get(name, _MISSING))
            self._attributes[position] = dict(now)
        return True


@final
class _ReplicaModules:
    """The copies of one replica."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        modules: Sequence[nn.Module],
        parameters: Sequence[_Original],
        buffers: Sequence[_Original],
        device: Device,
        may_alias: bool,
    ) -> None:
        owners = [original.tensor for original in parameters]
        self._aliased = [may_alias and owner.device == device for owner in owners]
        data = [
            owner.detach() if aliased else sent_to([owner], [device])[0][0]
            for owner, aliased in zip(owners, self._aliased, strict=True)
        ]
        self.parameters = [LocalParameter.over(d, owner.requires_grad) for d, owner in zip(data, owners, strict=True)]
        self._versions = [-1] * len(owners)  # of those with memory of their own, when they were last brought
        self._note_versions()
        self._memo: dict[int, Any] = {id(owner): p for owner, p in zip(owners, self.parameters, strict=True)}
        own = sent_to([original.tensor for original in buffers], [device])[0]
        self._memo.update((id(original.tensor), tensor) for original, tensor in zip(buffers, own, strict=True))
        for module in modules:
            self._memo.update((id(hook), hook) for hook in _hooks_to_share(module))
        copied = _copied(roots, dict(self._memo))
        originals = (m for root in roots for m in root.modules())
        pairs = {
            id(m): local for m, local in zip(originals, (m for root in copied for m in root.modules()), strict=True)
        }
        self._memo.update(pairs)
        self.by_original: dict[int, nn.Module] = {id(module): pairs[id(module)] for module in modules}
        self._insides = [module.__dict__ for module in self.by_original.values()]
        self._slots = [_slot_of(original.tensor, modules, self.by_original) for original in buffers]
        self._agreed = [(tensor, version(tensor)) for tensor in own]
        self._attribute_values = _values_of(self._insides)

    def bring_parameters(self, originals: Sequence[_Original], changed: Sequence[int], moved: set[int]) -> None:
        # What was written in place, in memory that is shared, is there already.
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
                sources.append(owner)
        if targets:
            foreach_copy_(targets, sources)
        self._note_versions()

    def has_written(self, index: int) -> bool:
        """Whether the step wrote on a parameter that has memory of its own; where it is shared, the original tells."""
        return self._versions[index] not in (-1, version(self.parameters[index]))

    def _note_versions(self) -> None:
        if not all(self._aliased):
            pairs = zip(self.parameters, self._aliased, strict=True)
            self._versions = [-1 if aliased else version(parameter) for parameter, aliased in pairs]

    def bring_requires_grad(self, flags: Sequence[bool]) -> None:
        if [parameter.requires_grad for parameter in self.parameters] != flags:
            for parameter, flag in zip(self.parameters, flags, strict=True):
                parameter.requires_grad_(flag)

    def bring_buffers(self, indices: Sequence[int], originals: Sequence[torch.Tensor]) -> None:
        for index, original in zip(indices, originals, strict=True):
            own, _ = self._agreed[index]
            if own.shape != original.shape or own.dtype != original.dtype or own.requires_grad:
                own = original.detach().to(own.device, copy=True)
            else:
                own.copy_(original.detach())
            table, name = self._slots[index]
            table[name] = own
            self._agreed[index] = (own, version(own))

    def bring_attribute(self, position: int, name: str, value: object) -> None:
        inside = self._insides[position]
        if value is _MISSING:
            inside.pop(name, None)
        else:
            inside[name] = copy.deepcopy(value, dict(self._memo))
        self._attribute_values = _values_of(self._insides)

    def return_attributes(self, originals: Sequence[dict[str, Any]]) -> None:
        values = _values_of(self._insides)
        if _same(self._attribute_values, values):
            return
        self._attribute_values = values
        for original, local in zip(originals, self._insides, strict=True):
            for name, value in local.items():
                if isinstance(value, _PLAIN) and original.get(name, _MISSING) is not value:
                    original[name] = value

    def buffer(self, index: int) -> torch.Tensor:
        table, name = self._slots[index]
        value = table[name]
        return self._agreed[index][0] if value is None else value

    def written_buffers(self) -> set[int]:
        """The buffers that the step wrote, or put another tensor in the place of."""
        return {
            index
            for index, (own, agreed) in enumerate(self._agreed)
            if self.buffer(index) is not own or version(own) != agreed
        }


def _originals(modules: Sequence[nn.Module], paths: dict[int, str], table: str) -> list[_Original]:
    found: dict[int, _Original] = {}
    for module in modules:
        for name, tensor in module.__dict__[table].items():
            if tensor is not None:
                found.setdefault(id(tensor), _Original(f"{paths[id(module)]}.{name}", tensor))
    return list(found.values())


def _values_of(insides: Sequence[dict[str, Any]]) -> list[object]:
    return list(chain.from_iterable(map(_VALUES, insides)))


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    """Whether two lists hold the very same objects; what they are equal to is not asked."""
    return len(first) == len(second) and all(map(is_, first, second))


def _slot_of(
    tensor: torch.Tensor, modules: Sequence[nn.Module], local: dict[int, nn.Module]
) -> tuple[dict[str, Any], str]:
    """Where the replica's copy of a buffer is held."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is tensor:
                return local[id(module)]._buffers, name
    raise AssertionError("a buffer of no module")


def written_in_replica(name: str) -> str:
    """The message for a parameter on which a step wrote in place."""
    return (
        f"{name} was written in place in a replica. Every replica would do so once, on memory that they may share or may "
        "not, and nothing would bring the copies together. Write on parameters after strategy.run, or in a merge "
        "function: get_replica_context().merge_call(lambda strategy: ...)."
    )


def _check_fits(original: _Original, value: torch.Tensor) -> None:
    if original.tensor.shape != value.shape or original.tensor.dtype != value.dtype:
        raise RuntimeError(
            f"A replica replaced the buffer {original.name}, of shape {tuple(original.tensor.shape)} and "
            f"{original.tensor.dtype}, by one of shape {tuple(value.shape)} and {value.dtype}. Write the buffer in "
            "place, or keep such a value in a plain attribute."
        )


def _has_running_statistics(module: nn.Module) -> bool:
    # The base class of all batch and instance normalisation layers, without its private name.
    return isinstance(module, (nn.BatchNorm1d.__mro__[1], nn.InstanceNorm1d.__mro__[1]))


def _hooks_to_share(module: nn.Module) -> list[object]:
    """The hooks of which a replica uses the user's own object: a recorder that is not copied records all replicas."""
    hooks = chain.from_iterable(module.__dict__[name].values() for name in _HOOK_TABLES)
    return [h for h in hooks if not (isinstance(h, types.MethodType) and isinstance(h.__self__, nn.Module))]


def _copied(roots: Sequence[nn.Module], memo: dict[int, Any]) -> list[nn.Module]:
    """Copies of all roots at once, so that what they share stays shared."""
    try:
        return copy.deepcopy(list(roots), memo)
    except Exception as error:
        names = ", ".join(type(root).__name__ for root in roots)
        raise TypeError(
            f"The module {names} cannot be copied for the replicas: {type(error).__name__}: {error}. Every attribute "
            "of a module must be one that copy.deepcopy can copy; keep files, locks and tensors with a history "
            "elsewhere."
        ) from error


def _refuse_uncopyable(module: nn.Module, path: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{path} is a ScriptModule, which replicas cannot have copies of. Use the Python module it was made from."
        )
    for name, parameter in module._parameters.items():
        if parameter is not None and nn.parameter.is_lazy(parameter):
            raise TypeError(
                f"{path}.{name} has no shape yet: {type(module).__name__} is lazy. Run one batch through the module, "
                "outside of strategy.run, before the first step."
            )
        if parameter is not None and type(parameter) is not nn.Parameter:
            raise TypeError(
                f"{path}.{name} is a {type(parameter).__name__}. Replicas can have copies of torch.nn.Parameter "
                "itself, and not of its subclasses."
            )
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise TypeError(
                f"{path}.{name} is a tensor that requires grad in a plain attribute, so a replica's copy would not "
                f"learn. Make it a parameter, self.{name} = torch.nn.Parameter(...), or detach it."
            )
