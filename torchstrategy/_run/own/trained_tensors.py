"""The parameters and buffers that all workers have alike.

All workers keep them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard, final

import torch
from torch import nn

from torchstrategy._base.marks import version_of, versions_of
from torchstrategy._base.memory import flatten, has_lost_memory, sizes_of, wraps_others
from torchstrategy._base.objects.changes import are_same
from torchstrategy._base.torch_internals import (
    dtypes,
    forms,
    is_distributed_tensor,
    requires_grad_of,
    shapes,
)
from torchstrategy._base.writes import UncountedWrites, write_value
from torchstrategy._run.module_tensors import is_running, writes_unseen
from torchstrategy._run.own.sharded_models import ShardedModels


class BufferLayout(NamedTuple):
    """The buffers of some modules.

    Workers that have the same ones have equal layouts.
    """

    # The positions among all names of buffers, of which some may stand for None.
    positions: tuple[int, ...]
    names: tuple[tuple[int, str], ...]  # each with the position of the module
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]


@final
class TrainedTensors:
    """The parameters and buffers of some modules, and some variables.

    Parameters that are sharded are not among `parameters`: who has sharded them sends
    their gradients.

    Args:
        modules: The modules, in the order in which they were made, which is the same in
            all workers.
        variables: The variables.
        averages_buffers: Whether running statistics become the mean of the workers'.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        variables: Sequence[torch.Tensor],
        averages_buffers: bool,
    ) -> None:
        self._modules = modules
        self.sharded = ShardedModels(modules)
        tables = [
            module._parameters
            for module in modules
            if not self.sharded.has_places(module)
        ]
        self._variables = list(variables)
        # Between forward and backward, `fully_shard` has other tensors in the places of
        # its parameters: of modules with such places, the names are looked at, and what
        # they have under other names.
        sharded = [module for module in modules if self.sharded.has_places(module)]
        self._tables_of_sharded = [module._parameters for module in sharded]
        self._names_of_sharded = self._list_names_of_sharded()
        self._places_beside = [
            (module._parameters, name)
            for module in sharded
            for name in module._parameters
            if not self.sharded.has_place(module, name)
        ]
        held: list[Any] = [*chain.from_iterable(map(_VALUES, tables)), *self._variables]
        held += [table[name] for table, name in self._places_beside]
        known = {
            id(p): p for p in held if p is not None and not is_distributed_tensor(p)
        }
        self.parameters: list[torch.Tensor] = list(known.values())
        self._tables: list[dict[str, Any]] = [
            *tables,
            *(module._modules for module in modules),
        ]
        self._parts = self._list_parts()
        self._forms = forms(self.parameters)
        self._tables_of_buffers = [module._buffers for module in modules]
        self._averages = averages_buffers
        # Before how many runs this process has written buffers.
        self.num_writes_between_runs = 0
        self.index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self.positions = list(range(len(self.parameters)))
        self._known_flags: list[bool] = []
        self._known_modes: list[bool] = []
        self._text_of_flags = self._text_of_modes = ""
        self._take_buffers()

    def is_current(self) -> bool:
        """Whether the modules still have the same parameters and the same modules.

        The parameters also have to have the same shapes.
        """
        if (
            self._tables_of_sharded
            and self._list_names_of_sharded() != self._names_of_sharded
        ):
            return False
        return (
            are_same(self._list_parts(), self._parts)
            and forms(self.parameters) == self._forms
        )

    def _list_names_of_sharded(self) -> list[str]:
        return list(chain.from_iterable(self._tables_of_sharded))

    def _list_parts(self) -> list[Any]:
        """The modules' parameters and children, but for `fully_shard`'s parameters."""
        held: list[Any] = list(chain.from_iterable(map(_VALUES, self._tables)))
        if self._places_beside:
            held += [table[name] for table, name in self._places_beside]
        return held

    def without_sharded(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters that are none of the sharded ones of the modules."""
        if self.sharded.is_empty or not parameters:
            return list(parameters)
        # They are listed anew, since some ways of loading a checkpoint replace
        # parameters.
        ids = set(map(id, self.sharded.parameters()))
        if ids.issuperset(map(id, parameters)):  # as mostly
            return []
        return [p for p in parameters if id(p) not in ids]

    def names(self) -> list[str]:
        """The names of the parameters, for messages."""
        named = {}
        for module in self._modules:
            for name, parameter in module.named_parameters(
                prefix=type(module).__name__
            ):
                # A module that holds others says more about the place of a parameter,
                # and was made after them.
                named[id(parameter)] = name
        for variable in self._variables:
            named[id(variable)] = getattr(variable, "name", "Variable")
        return [
            named.get(id(parameter), "a parameter") for parameter in self.parameters
        ]

    def flags(self) -> str:
        """A text that says which parameters are trained.

        It is the same object for as long as it says the same.
        """
        sharded = self.sharded
        flags = requires_grad_of(
            self.parameters
            if sharded.is_empty
            else [*self.parameters, *sharded.parameters()]
        )
        if flags != self._known_flags:
            self._known_flags = flags
            self._text_of_flags = "".join("1" if flag else "0" for flag in flags)
        return self._text_of_flags

    def modes(self) -> str:
        """A text that says which modules are in training mode.

        As for `flags`, it is mostly the same object.
        """
        modes = list(map(_MODE, self._modules))
        if modes != self._known_modes:
            self._known_modes = modes
            words = ["train" if mode else "eval" for mode in modes]
            self._text_of_modes = words[0] if len(set(words)) == 1 else " ".join(words)
        return self._text_of_modes

    # Buffers

    def layout_of_written(self) -> BufferLayout | None:
        """Which buffers there are, if one has changed since the workers last agreed.

        A buffer changes if it is written, made or replaced.

        Statistics on an accelerator that change unseen count as written. To compare
        them, the host would wait for it.
        """
        has_written = self._has_written()
        if has_written:
            self._refuse_written_unsendable()
        return (
            self.layout()
            if has_written or any(map(writes_unseen, self._unread))
            else None
        )

    def _refuse_written_unsendable(self) -> None:
        """Refuses a write of the step on a buffer that cannot be sent beside others.

        For example, a sparse buffer has no fixed size.
        """
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if _is_unsendable(buffer) and not self._is_as_before(buffer):
                    raise RuntimeError(
                        _UNSENDABLE.format(
                            f"{type(module).__name__}.{name}", _kind_of(buffer)
                        )
                    )

    def _is_as_before(self, buffer: torch.Tensor) -> bool:
        """Whether such a buffer was there when the workers last agreed about buffers.

        The answer is no if it was written since.
        """
        return self._versions_of_unsendable.get(id(buffer)) == version_of(buffer)

    def layout(self) -> BufferLayout:
        """Which buffers there are."""
        if self._were_replaced():
            self._look_at_buffers()
        there = [i for i, buffer in enumerate(self.buffers) if buffer is not None]
        tensors = self._present_buffers()
        slots = tuple(self._names[i] for i in there)
        return BufferLayout(
            tuple(there), slots, tuple(shapes(tensors)), tuple(dtypes(tensors))
        )

    def _take_buffers(self) -> None:
        """Notes which buffers there are now, and counts none of them as written."""
        self._look_at_buffers()
        self._take_values()
        # What all workers should have had when the newest run began.
        self._known: list[_Copies] = []

    def _look_at_buffers(self) -> None:
        self._slots = [
            (module, name) for module in self._modules for name in module._buffers
        ]
        self._names = [
            (i, name)
            for i, module in enumerate(self._modules)
            for name in module._buffers
        ]
        self._held = [module._buffers[name] for module, name in self._slots]
        self._unsendable = list(filter(_is_unsendable, self._held))
        # A buffer whose memory the program has taken away has no values until it gets
        # memory again.
        strided = [
            buffer
            for buffer in self._held
            if buffer is not None and buffer.layout is torch.strided
        ]
        self._storages = [buffer.untyped_storage() for buffer in strided]
        self._sizes_of_storages = sizes_of(self._storages)
        self.buffers = [
            None
            if buffer is None or _is_unsendable(buffer) or has_lost_memory(buffer)
            else buffer
            for buffer in self._held
        ]
        there = zip(self._slots, self.buffers, strict=True)
        self._unread = {
            module
            for (module, _), buffer in there
            if buffer is not None and not buffer.is_cpu
        }

    def _take_values(self) -> None:
        there = self._present_buffers()
        self._versions = versions_of(there)
        self._versions_of_unsendable = {
            id(buffer): version_of(buffer) for buffer in self._unsendable
        }
        # torch's kernels write running statistics and do not count it.
        self._uncounted = UncountedWrites(
            {i: buffer for i, buffer in enumerate(there) if buffer.is_floating_point()},
            is_exact=True,
        )

    def _present_buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.buffers if buffer is not None]

    def known_buffers(self) -> dict[str, torch.Tensor]:
        """By name, the values of buffers that all workers should have had at the start.

        The start is the moment at which the run began.
        """
        known = {
            i: value for copies in self._known for i, value in copies.by_position()
        }
        paths = self._paths()
        return {
            paths[id(buffer)]: known.get(i, buffer) for i, buffer in self._by_position()
        }

    def shown_buffers(self) -> list[dict[str, str]]:
        """Their names and shapes, to be compared with those of other workers."""
        paths = self._paths()
        return [
            {
                paths[id(buffer)]: f"{tuple(buffer.shape)} {buffer.dtype}"
                for _, buffer in self._by_position()
            }
        ]

    def _paths(self) -> dict[int, str]:
        """The names of buffers, with those of the modules that have them."""
        found = {}
        for module in self._modules:
            for name, buffer in module.named_buffers(prefix=type(module).__name__):
                # As for parameters, the outermost module comes last.
                found[id(buffer)] = name
        return found

    def begin_run(self) -> None:
        """A run begins: what the program has written before is no write of the step."""
        if self._has_written():
            self._take_buffers()
            self._known = _copies_of(dict(self._by_position()))
            self.num_writes_between_runs += 1

    def _has_written(self) -> bool:
        has_buffers = bool(self._slots) or any(self._tables_of_buffers)
        return has_buffers and (self._were_replaced() or self._note_writes())

    def _were_replaced(self) -> bool:
        slots = [(module, name) for module in self._modules for name in module._buffers]
        if slots != self._slots or not are_same(
            [m._buffers[name] for m, name in slots], self._held
        ):
            return True
        return sizes_of(self._storages) != self._sizes_of_storages

    def _note_writes(self) -> bool:
        """Whether buffers were written since the last call."""
        has_refused_writes = not all(map(self._is_as_before, self._unsendable))
        before, self._versions = self._versions, versions_of(self._present_buffers())
        changed, unsure = self._uncounted.take(set())
        return bool(changed or unsure) or has_refused_writes or self._versions != before

    def averaged(self) -> dict[int, torch.Tensor]:
        """By position, the running statistics that become the mean of the workers'."""
        return {
            i: b
            for i, b in self._by_position()
            if self._averages and is_running(*self._slots[i])
        }

    def taken(self) -> dict[int, torch.Tensor]:
        """By position, all other buffers, which become those of the first worker."""
        averaged = self.averaged()
        return {i: buffer for i, buffer in self._by_position() if i not in averaged}

    def _by_position(self) -> list[tuple[int, torch.Tensor]]:
        return [
            (i, buffer) for i, buffer in enumerate(self.buffers) if buffer is not None
        ]

    def write_buffers(self, values: dict[int, torch.Tensor]) -> None:
        """Writes what all workers' buffers became, and counts them as not written."""
        for i, value in values.items():
            buffer = self.buffers[i]
            assert buffer is not None
            write_value(buffer, value, is_counted=not is_running(*self._slots[i]))
        self._take_values()
        self._known = _copies_of(values)


_VALUES: Callable[[dict[str, Any]], Iterable[Any]] = dict.values
_MODE: Callable[[nn.Module], bool] = attrgetter("training")


def _is_unsendable(buffer: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether a buffer cannot be sent beside others in one piece of memory."""
    return buffer is not None and (
        buffer.layout is not torch.strided
        or buffer.is_quantized
        or wraps_others(buffer)
    )


def _kind_of(buffer: torch.Tensor) -> str:
    if wraps_others(buffer):
        return (
            f"a buffer of the class {type(buffer).__name__}, which wraps other tensors"
        )
    return "a quantized buffer" if buffer.is_quantized else "a sparse buffer"


_UNSENDABLE = (
    "{} is {}, and the step has written it. Workers send the buffers that a step has "
    "written, and such a one may have another size in each worker. Write it between "
    "runs, alike in all workers, or keep it as a plain dense tensor."
)


class _Copies(NamedTuple):
    """Copies of tensors of one dtype and device, in one piece of memory."""

    shapes: dict[int, torch.Size]
    flat: torch.Tensor

    def by_position(self) -> list[tuple[int, torch.Tensor]]:
        """Each copy with its position."""
        parts = self.flat.split([shape.numel() for shape in self.shapes.values()])
        return [
            (i, part.view(self.shapes[i]))
            for i, part in zip(self.shapes, parts, strict=True)
        ]


def _copies_of(values: dict[int, torch.Tensor]) -> list[_Copies]:
    groups: dict[object, dict[int, torch.Tensor]] = {}
    for i, value in values.items():
        groups.setdefault((value.dtype, value.device), {})[i] = value.detach()
    return [
        _Copies({i: v.shape for i, v in group.items()}, flatten(group.values()))
        for group in groups.values()
    ]
