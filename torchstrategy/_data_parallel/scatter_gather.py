"""Scatters the arguments of one call to the replicas, and gathers their outputs.

                        scattered                        gathered
a tensor                pieces along `dim`               concatenated along `dim`
... without dimensions  given to each replica            stacked to a vector
None                    given to each replica            None
a list, tuple or dict   the same container of pieces     the same container of gathered values
a dataclass, a mapping  a copy with pieces               a copy of the first, with gathered values
anything else           given to each replica            a list with one item from each replica
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from torchstrategy._communication.reductions import check_gatherable
from torchstrategy._communication.transfer import concatenated
from torchstrategy._core.devices import is_accelerator, memory_device
from torchstrategy._core.distributed_values import ABSENT, DistributedValues, PerReplica
from torchstrategy._core.errors import an
from torchstrategy._core.structured_types import is_record, leaves_within, parts_of, with_parts
from torchstrategy._core.tree import first_unlike, leaves_with_names, map_leaves, zip_leaves
from torchstrategy._core.types import Device, Tree
from torchstrategy._input.splitting import in_equal_parts


def cut(inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[Device], dim: int) -> PerReplica:
    """The arguments of each replica, on its device: the pieces have ceil(rows / replicas) rows, the last ones fewer.

    If nothing has rows, only the first replica gets the arguments. Gradients flow back to them.

    Raises:
        ValueError: If two tensors have different numbers of rows, or one has no such dimension.
        TypeError: If something has rows and cannot be cut.
    """
    rows = _rows([("inputs", inputs), *kwargs.items()], dim)
    if not rows:
        return PerReplica([moved((inputs, kwargs), devices[0]), *[ABSENT] * (len(devices) - 1)])

    def piece(part: slice, device: Device) -> Tree:
        def narrowed(leaf: Tree) -> Tree:
            is_cut = isinstance(leaf, torch.Tensor) and leaf.dim()
            return leaf.narrow(dim, part.start, part.stop - part.start) if is_cut else leaf

        return moved(_mapped(narrowed, (inputs, kwargs)), device) if part.stop > part.start else ABSENT

    parts = in_equal_parts(len(devices))(rows)  # as `torch.chunk` cuts the inputs of `torch.nn.DataParallel`
    return PerReplica(list(map(piece, parts, devices)), tuple(part.stop - part.start for part in parts))


def put_together(outputs: Sequence[Tree], dim: int, device: Device, name: str = "output") -> Tree:
    """Makes one value on `device` of the values that the replicas returned. Gradients flow back to these.

    Raises:
        ValueError: If they differ in structure, or tensors do not fit together.
    """
    try:
        columns, spec = zip_leaves(outputs)
    except ValueError:
        other, path = first_unlike(outputs)
        raise _unlike(name, other, path) from None
    names = [f"{name}{path}" for path, _ in leaves_with_names(outputs[0])]
    united = [_united(column, dim, device, path) for column, path in zip(columns, names, strict=True)]
    return spec.unflatten(united)


def moved(tree: Tree, device: Device) -> Tree:
    """A tree with its tensors on a device. Gradients flow back."""
    target = memory_device(device)

    def move(leaf: Tree) -> Tree:
        is_movable = isinstance(leaf, (torch.Tensor, PackedSequence))
        return leaf.to(target, non_blocking=is_accelerator(target)) if is_movable else leaf

    return _mapped(move, tree)


def _rows(arguments: Sequence[tuple[str, Tree]], dim: int) -> int | None:
    """How many rows all tensors have; None if there are no tensors with rows."""
    first = None
    for name, leaf in chain.from_iterable(leaves_within(tree, name) for name, tree in arguments):
        _refuse_uncuttable(leaf, name)
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            continue
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(
                f"Inputs are cut along dim={dim}, and {name}, of shape {tuple(leaf.shape)}, has no such dimension."
            )
        rows = leaf.size(dim)
        first = first or (name, rows)
        if rows != first[1]:
            raise ValueError(
                f"Inputs are cut along dim={dim}, where {first[0]} has {first[1]} rows and {name} has {rows}: cut into "
                "pieces they would no longer belong together. Give each as many: tensor.expand(...) repeats rows "
                "without copying them. What is the same for all rows may be a buffer of the module."
            )
    return None if first is None else first[1]


def _refuse_uncuttable(leaf: Tree, name: str) -> None:
    if isinstance(leaf, DistributedValues):
        raise TypeError(
            f"{name} is a distributed value, which is in pieces already. Give the whole batch, or call the module in a "
            "step that strategy.run runs."
        )
    if isinstance(leaf, PackedSequence):
        raise TypeError(
            f"{name} is {an(type(leaf).__name__)}, whose tensors have no dimension with a row for each sequence. Give "
            "the padded sequences and their lengths, and pack them in the module."
        )


def _united(values: Sequence[Tree], dim: int, device: Device, name: str) -> Tree:
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        return _united_tensors(values, dim, memory_device(device), name)
    if all(value is None for value in values):
        return None
    if not is_record(first) or any(type(value) is not type(first) for value in values):
        return [moved(value, device) for value in values]
    parts = [parts_of(value) for value in values]
    for index, other in enumerate(parts):
        if other.keys() != parts[0].keys():
            raise _unlike(name, index, f"what they hold: {', '.join(parts[0])} and {', '.join(other)}")
    return with_parts(first, lambda part, _: put_together([held[part] for held in parts], dim, device, f"{name}{part}"))


def _united_tensors(tensors: Sequence[torch.Tensor], dim: int, device: Device, name: str) -> torch.Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack([tensor.to(device) for tensor in tensors])
    try:
        check_gatherable(tensors, dim)
    except ValueError:
        shapes = " and ".join(dict.fromkeys(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors))
        raise ValueError(
            f"What the replicas returned as {name} cannot be put together along dim={dim}: {shapes}. The tensors may "
            "differ in the size of that dimension only. Two causes are frequent: squeeze() takes away the rows, too, "
            "where there is one: name the dimension, as in squeeze(1). And pad_packed_sequence pads to the longest of "
            "a replica's own rows: give it total_length."
        ) from None
    return tensors[0].to(device) if len(tensors) == 1 else concatenated(tensors, dim, device)


def _unlike(name: str, other: int, how: str) -> ValueError:
    return ValueError(
        f"The replicas returned an {name} of different structure, which cannot be put together: the first of them and "
        f"number {other + 1} differ in {how}. Return the same containers whatever the rows are."
    )


def _mapped(fn: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """A tree with `fn(leaf)` in place of each leaf; an object of which no part changes stays the same."""

    def change(leaf: Tree) -> Tree:
        if not is_record(leaf):
            return fn(leaf)
        parts = parts_of(leaf)
        changed = {name: _mapped(fn, part) for name, part in parts.items()}
        is_same = all(changed[name] is part for name, part in parts.items())
        return leaf if is_same else with_parts(leaf, lambda name, _: changed[name])

    return map_leaves(change, tree)
