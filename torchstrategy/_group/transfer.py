"""Copies and sums between devices: the only caller of `torch.nn.parallel` and of NCCL.

The primitives of `torch.nn.parallel` move many tensors in few transfers, but only
between CUDA devices that are all different. For all other devices, the CPU included,
plain copies do the same.

Many small tensors are sent as a few large ones, the buckets. They are flattened, put
one after the other and cut into buckets; after the transfer they are taken apart again.
A *column* has the tensors of one shape that the replicas have of one value, a tensor
for each replica. Columns of one dtype and on the same devices share buckets; a sparse
or empty tensor is sent as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.cuda import nccl
from torch.nn.parallel import comm

from torchstrategy._base import torch_internals
from torchstrategy._base.context import is_accelerator
from torchstrategy._base.devices import copies_by_itself, memory_device
from torchstrategy._base.memory import flatten
from torchstrategy._base.streams import on_stream
from torchstrategy._base.types import Device
from torchstrategy._group.copy_streams import Cargo, begin_copy_to_host, copy_stream
from torchstrategy._group.native_dtypes import (
    as_addable,
    as_sendable,
    can_be_added,
    from_addable,
    from_sendable,
    is_sent_as_it_is,
)

# The types of devices that NCCL and the primitives support.
_KNOWN = frozenset({"cuda"})
# Bytes: tensors up to this size are sent together, since larger ones fill the bus
# alone.
_SMALL = 1 << 18
# Bytes that are sent together: for a while, both devices need as much extra memory.
_TOGETHER = 1 << 24


def detached_copy(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """A copy on a device, through which no gradient flows.

    It never shares memory with the original.
    """
    return tensor.detach().to(memory_device(device), copy=True)


class Write(NamedTuple):
    """Values to write on tensors of one device.

    Several writes that have the same sources are sent together.
    """

    targets: list[torch.Tensor]
    # All sources are on one device, which may be another one than that of the targets.
    sources: list[torch.Tensor]


def write(writes: Sequence[Write]) -> list[torch.Event]:
    """Does all `writes` in few transfers, in which small tensors are sent together.

    No gradient flows.

    Transfers to an accelerator are on its copy stream, so that transfers to several
    devices overlap.

    Returns:
        The ends of transfers from the CPU. Until then, sources in pinned memory may
        still be read: the caller waits before anybody may write them.
    """
    writes = [write for write in writes if write.targets]
    if _is_broadcast(writes):
        _broadcast(writes)
        return []
    for targets, sources in writes:
        device = targets[0].device
        if sources[0].device == device:
            torch_internals.foreach_copy_(targets, sources)
            continue
        with _copying_to(device):
            # The program waits for the small ones, which come from memory that is not
            # pinned. So they go first.
            for group in sorted(_plan_transfers(sources), key=len, reverse=True):
                there = [targets[index] for index in group]
                if len(group) > 1:
                    torch_internals.foreach_copy_(
                        there, copy_to([sources[index] for index in group], device)
                    )
                else:
                    # A large tensor is copied without a temporary tensor on the target
                    # device.
                    there[0].copy_(
                        sources[group[0]], non_blocking=copies_by_itself(device)
                    )
    ends = []
    for targets, sources in writes:
        device = targets[0].device
        if sources[0].is_cpu and is_accelerator(device):
            ends.append(copy_stream(device, Cargo.VALUES).record_event())
    return ends


def _broadcast(writes: Sequence[Write]) -> None:
    """Writes tensors of one CUDA device on those of several others.

    Small tensors are sent together and large ones into the targets themselves, so that
    no device needs memory for all values twice.
    """
    for group in _plan_transfers(writes[0].sources):
        sources = [writes[0].sources[index] for index in group]
        # A list for each device.
        targets = [[write.targets[index] for index in group] for write in writes]
        if len(group) == 1:
            single = [tensors[0] for tensors in targets]
            if all(map(is_sent_as_it_is, [sources[0], *single])):
                with torch_internals.counting_writes(single):
                    comm.broadcast(
                        sources[0].detach(), out=[tensor.detach() for tensor in single]
                    )
                continue
        devices = [sources[0].device, *(tensors[0].device for tensors in targets)]
        _, *copies = comm.broadcast_coalesced(
            [as_sendable(tensor) for tensor in sources], devices
        )
        for tensors, copy in zip(targets, copies, strict=True):
            arrived = [
                from_sendable(sent, like)
                for sent, like in zip(copy, sources, strict=True)
            ]
            torch_internals.foreach_copy_(tensors, arrived)


def copy_to(tensors: Sequence[torch.Tensor], device: Device) -> list[torch.Tensor]:
    """Tensors of one device, on `device`; not copied if they are there.

    Small ones go together, and share memory.

    From an accelerator to the CPU, large ones come into pinned memory: see Note
    [Gradients that leave early].
    """
    if not tensors or tensors[0].device == device:
        return list(tensors)
    leave = device.type == "cpu" and copies_by_itself(tensors[0].device)
    arrived: dict[int, torch.Tensor] = {}
    for indices in _plan_transfers(tensors):
        if len(indices) == 1:
            single = tensors[indices[0]]
            copy = (
                begin_copy_to_host(single)
                if leave
                else single.to(device, non_blocking=copies_by_itself(device))
            )
            arrived[indices[0]] = copy
            continue
        like = [tensors[index] for index in indices]
        together = flatten(like)
        arrived.update(
            zip(
                indices,
                torch_internals.unflatten(together.to(device), like),
                strict=True,
            )
        )
    if leave:
        torch.accelerator.current_stream(tensors[0].device).synchronize()
    return [arrived[index] for index in range(len(tensors))]


def in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own, as in plain PyTorch.

    Those that came together, by `copy_to`, are parts of one piece.
    """
    is_whole = (
        tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
    return tensor if is_whole else tensor.clone()


def sum_on(tensors: Sequence[torch.Tensor], device: Device) -> torch.Tensor:
    """The sum of tensors of one shape on any devices, as a new tensor on `device`.

    Differentiable.
    """
    target = memory_device(device)
    if _are_added_by_primitives(tensors) and not _any_requires_grad(tensors):
        # `reduce_add` can only sum on a device that has one of the tensors.
        devices = [tensor.device for tensor in tensors]
        root = target if target in devices else devices[0]
        if not torch_internals.are_dense(tensors):
            summed: torch.Tensor = comm.reduce_add(list(tensors), root.index)
            return summed.to(target)
        numbers: torch.Tensor = comm.reduce_add(
            [as_addable(tensor) for tensor in tensors], root.index
        )
        return from_addable(numbers, tensors[0].dtype).to(target)
    total = tensors[0].to(target)
    if len(tensors) == 1:
        return total.clone() if total is tensors[0] else total
    total = total + tensors[1].to(target)
    for tensor in tensors[2:]:
        there = tensor.to(target)
        can_take = total.layout is torch.strided and total.dtype == there.dtype
        total = total.add_(there) if can_take else total + there
    return total


def sum_each_on(
    columns: Sequence[Sequence[torch.Tensor]], device: Device
) -> list[torch.Tensor]:
    """The result of `sum_on` for each column of tensors of one dtype.

    Fused loops compute it where possible.
    """
    rows = [list(row) for row in zip(*columns, strict=False)]
    if not _are_fusible(columns, rows):
        return [sum_on(column, device) for column in columns]
    first, second, *others = (copy_to(row, memory_device(device)) for row in rows)
    totals = torch_internals.foreach_add(first, second)
    for row in others:
        torch_internals.foreach_add_(totals, row)
    return list(totals)


def _are_fusible(
    columns: Sequence[Sequence[torch.Tensor]], rows: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Whether fused loops can add the columns, and are the best way.

    Every column must have several dense tensors, and every row must be on one device.
    The primitives, where they work, are better.
    """
    if len(rows) < 2 or any(len(column) != len(rows) for column in columns):
        return False
    devices = [{tensor.device for tensor in row} for row in rows]
    if any(len(several) > 1 for several in devices) or _have_primitives(
        [device for (device,) in devices]
    ):
        return False
    return all(
        torch_internals.are_dense(row) and not _any_requires_grad(row) for row in rows
    )


def why_not_nccl(devices: Sequence[Device]) -> str | None:
    """Why NCCL cannot sum tensors on these devices; None if it can."""
    if not all(device.type in _KNOWN for device in devices):
        return (
            "NCCL joins CUDA devices only, and these are "
            f"{', '.join(map(str, devices))}"
        )
    if len(set(devices)) < len(devices):
        return (
            "NCCL joins devices that are all different, and these are "
            f"{', '.join(map(str, devices))}"
        )
    return None if torch_internals.HAS_NCCL else "this build of torch has no NCCL"


def sum_by_nccl(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of tensors of one shape, on the device of each of them.

    No gradient flows.

    Args:
        tensors: Dense tensors on devices between which NCCL can send.
    """
    if not can_be_added(tensors[0].dtype):  # torch itself says so
        return [sum_on(tensors, tensor.device) for tensor in tensors]
    inputs = [as_addable(tensor).contiguous() for tensor in tensors]
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    nccl.all_reduce(inputs, outputs)
    return [from_addable(output, tensors[0].dtype) for output in outputs]


def concatenate_on(
    tensors: Sequence[torch.Tensor], axis: int, device: Device
) -> torch.Tensor:
    """Tensors on any devices, concatenated along `axis`, on `device`.

    Differentiable.
    """
    return torch.cat([tensor.to(memory_device(device)) for tensor in tensors], dim=axis)


def _plan_transfers(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Which tensors are sent together, by position.

    Small ones of one device and dtype go together, up to a total size.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    kinds: list[Hashable] = []
    for index, tensor in enumerate(tensors):
        is_alone = is_sent_alone(tensor)
        # Nothing else is of the kind `index`.
        kinds.append(index if is_alone else (tensor.device, tensor.dtype))
    return plan_groups(kinds, sizes, _TOGETHER)


def is_sent_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is large enough for a transfer of its own.

    A tensor with a layout that does not go with others is also sent alone.
    """
    return (
        tensor.layout is not torch.strided
        or tensor.numel() * tensor.element_size() > _SMALL
    )


def _is_broadcast(writes: Sequence[Write]) -> bool:
    """Whether the same values go from one CUDA device to several others.

    PyTorch has a primitive for that.
    """
    if len(writes) < 2 or len({tuple(map(id, write.sources)) for write in writes}) > 1:
        return False
    return _have_primitives(
        [writes[0].sources[0].device, *(write.targets[0].device for write in writes)]
    )


@contextmanager
def _copying_to(device: Device) -> Iterator[None]:
    """A block whose work is on the copy stream of a device.

    The copy stream waits for what the current stream has been given before, and the
    current stream waits for the work.
    """
    if not is_accelerator(device):
        yield
        return
    stream, current = (
        copy_stream(device, Cargo.VALUES),
        torch.accelerator.current_stream(device),
    )
    if stream == current:  # such as on MPS, which has one stream
        yield
        return
    stream.wait_stream(current)
    with on_stream(stream):
        yield
    current.wait_stream(stream)


def _are_added_by_primitives(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the primitives can add up tensors of one dtype."""
    return (
        len(tensors) > 1
        and can_be_added(tensors[0].dtype)
        and _have_primitives([t.device for t in tensors])
    )


def _have_primitives(devices: Sequence[Device]) -> bool:
    return all(device.type in _KNOWN for device in devices) and len(
        set(devices)
    ) == len(devices)


def _any_requires_grad(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(torch_internals.requires_grad_of(tensors))


def equal(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    """Whether two gradients have the same numbers, layout, shape and dtype."""
    if second is None or _form_of(first) != _form_of(second):
        return False
    if first.layout is torch.sparse_coo:
        one, other = first.coalesce(), second.coalesce()
        return torch.equal(one.indices(), other.indices()) and torch.equal(
            one.values(), other.values()
        )
    return torch.equal(first, second)


def _form_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.layout, tensor.shape, tensor.dtype


Column = Sequence[torch.Tensor]


def combine_in_buckets(
    columns: Sequence[Column], limit: int, combine: Callable[[Column], torch.Tensor]
) -> list[torch.Tensor]:
    """Calls `combine` on columns in buckets; returns its result for each column.

    `combine` works element by element.

    A bucket has `limit` bytes at most; 0: `combine` is called on each column by itself.
    """
    if not limit:
        return [combine(column) for column in columns]
    return [
        result
        for (result,) in exchange_in_buckets(
            columns, limit, lambda bucket: [combine(bucket)]
        )
    ]


def exchange_in_buckets(
    columns: Sequence[Column],
    limit: float,
    combine: Callable[[Column], Column],
    count: int = 1,
) -> list[list[torch.Tensor]]:
    """The same, for a `combine` that returns several tensors.

    No two of the results share memory.

    Args:
        columns: The columns that are sent.
        limit: How many bytes are put one after the other at most; a larger column is
            alone. 0: each column is.
        combine: Called with a bucket: a tensor for each replica. A column that has a
            bucket of its own is not copied.
        count: How many buckets of equal size these are cut into; the last one also has
            the rest.
    """
    found: dict[int, list[torch.Tensor]] = {}
    kinds = [_kind(column) or index for index, column in enumerate(columns)]
    for group in plan_groups(
        kinds,
        [column[0].numel() * column[0].element_size() for column in columns],
        limit,
    ):
        like = [columns[index][0] for index in group]
        total = sum(tensor.numel() for tensor in like)
        # Otherwise they are too small to cut.
        pieces = count if _kind(columns[group[0]]) and total >= count else 1
        if len(group) == pieces == 1:
            found[group[0]] = list(combine(columns[group[0]]))
            continue
        size = total // pieces
        sizes = [*[size] * (pieces - 1), total - size * (pieces - 1)]
        # For each replica its tensors one after the other, cut into pieces.
        cut_rows = []
        for row in zip(*(columns[index] for index in group), strict=True):
            cut_rows.append(flatten(row).split(sizes))
        combined = [combine(bucket) for bucket in zip(*cut_rows, strict=True)]
        results = []  # for each of the tensors that `combine` returned, its parts
        for parts in zip(*combined, strict=True):
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            results.append(
                [part.clone() for part in torch_internals.unflatten(whole, like)]
            )
        for index, of_column in zip(group, zip(*results, strict=True), strict=True):
            found[index] = list(of_column)
    return [found[index] for index in range(len(columns))]


def plan_groups(
    kinds: Iterable[Hashable], sizes: Iterable[int], limit: float, over: bool = False
) -> list[list[int]]:
    """Which of several things go together, by position.

    Things of one kind go together, up to a total size.

    Args:
        kinds: The kind of each thing.
        sizes: Its size.
        limit: The total size.
        over: Whether the last thing of a group may go over the limit. Then no small
            group is left between large things.
    """
    groups: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, float] = {}
    for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if room.get(kind, -1) < (1 if over else size):
            groups.append([])
            filling[kind], room[kind] = groups[-1], limit
        filling[kind].append(index)
        room[kind] -= size
    return groups


def _kind(column: Column) -> Hashable:
    """What columns in the same buckets share; None if a column goes as it is."""
    if not column[0].numel() or any(
        tensor.layout is not torch.strided for tensor in column
    ):
        return None
    return column[0].dtype, tuple(tensor.device for tensor in column)
