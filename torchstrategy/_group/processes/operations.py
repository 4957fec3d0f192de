"""Operations of `torch.distributed` that are under way, and how they end.

It also ends the groups of these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchstrategy._base.torch_internals import unflatten
from torchstrategy._group.native_dtypes import from_addable
from torchstrategy._group.processes.joining import leak
from torchstrategy._group.processes.lifelines import Lifelines
from torchstrategy._group.workers import PACK

Begin = Callable[[dist.ProcessGroup], Iterable["dist.Work | None"]]


@dataclass(eq=False)
class Operation:
    """An operation that was begun in a group, and the tensors on which it works."""

    group: int
    # None: it is over. A work keeps the connections of its group open.
    work: dist.Work | None
    tensors: Sequence[torch.Tensor]


def end_groups(groups: list[dist.ProcessGroup], under_way: list[Operation]) -> None:
    """Ends groups and their threads.

    This happens if a worker fails, a strategy is no longer used, or the process ends.

    The threads of gloo take Python's lock to let go of tensors. One that does so while
    Python ends aborts the process.
    """
    for sent in under_way:
        # The rank of a test, whose run is over, answers nothing more.
        with suppress(RuntimeError):
            if sent.work is not None and sent.work.is_completed():
                sent.work = None
    under_way[:] = [sent for sent in under_way if sent.work is not None]
    # A signal's handler may raise anywhere: see Note [What happens on Ctrl-C] in
    # `replica_threads`. Then the end of the process goes on with the groups that are
    # left.
    while groups:
        if any(sent.group == len(groups) - 1 for sent in under_way):
            # To destroy it means to wait for what it has under way, which may be as
            # long as its timeout. So nobody ever does, and nobody lets go of its
            # tensors. The others hear of it by their lifelines.
            leak(groups[-1])
        else:
            # The program may have destroyed all groups itself.
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(groups[-1])
        groups.pop()
    for sent in under_way:
        leak(sent)
    under_way.clear()


def leave_groups(
    groups: list[dist.ProcessGroup], under_way: list[Operation], lines: Lifelines
) -> None:
    """A strategy is no longer used."""
    lines.say("left", "")
    end_groups(groups, under_way)
    lines.close()


def begin_sum(
    flat: torch.Tensor, group: dist.ProcessGroup
) -> Iterable[dist.Work | None]:
    """Begins to make a tensor the sum of those of all workers.

    Several pieces are under way at once: gloo has two threads, which add up and send by
    turns. NCCL does both at once.
    """
    if flat.nbytes <= PACK or not flat.is_cpu:
        # `dist.all_reduce` makes the same call after a dozen checks.
        return (group.allreduce([flat], _AT_ONCE),)
    pieces = flat.split(PACK // flat.element_size())
    return (group.allreduce([piece], _AT_ONCE) for piece in pieces)


_AT_ONCE = c10d.AllreduceOptions()  # the call returns before the sum is there
_AT_ONCE.asyncOp = True


def split_sum(
    flat: torch.Tensor, like: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The parts of a sum that was made of several tensors in one.

    Each part has the dtype and shape of its tensor.
    """
    return unflatten(from_addable(flat.to(like[0].device), like[0].dtype), like)
