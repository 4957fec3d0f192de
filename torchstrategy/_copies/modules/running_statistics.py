"""Running statistics of replicas on accelerators.

The host never reads them: it would wait for all that is under way.

`ReplicatedModules._buffer_values` merges all buffers of replicas, and asks this file
for these. What it has made of those of one worker becomes that of all in
`_run/worker_values`. A worker with one replica sends its statistics with its gradients:
`TrainedTensors.averaged` in `_run/own/trained_tensors` says which.

torch's kernels write running statistics and do not count it in their versions. In the
memory of the CPU the numbers are compared. On an accelerator, the statistics of every
replica count as written by every run, and the accelerator itself finds out which
numbers are as they were: a mean of equal numbers could be off by a bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set

import torch

from torchstrategy._base.memory import flatten
from torchstrategy._base.torch_internals import unflatten
from torchstrategy._base.writes import TrackedTensors
from torchstrategy._copies.modules.module_replica import (
    ModuleReplica,
    have_other_numbers,
)


def find_unseen(
    running: Set[int], users: TrackedTensors, replica: ModuleReplica
) -> list[int]:
    """The positions of the user's running statistics that may differ in a replica.

    A forward outside of runs may have written them. On an accelerator, all of them may
    differ.
    """
    pairs = [(index, replica.buffer(index), users.tensors[index]) for index in running]
    return [
        index
        for index, own, of_user in pairs
        if not _can_be_read(own, of_user) or have_other_numbers(own, of_user)
    ]


def average_unread(
    indices: Set[int],
    users: TrackedTensors,
    replicas: Sequence[ModuleReplica],
    fractions: Sequence[float],
) -> dict[int, torch.Tensor]:
    """By position, the means of running statistics that the host does not read.

    They are means over replicas.

    Args:
        indices: The positions of buffers that count as written.
        users: The user's buffers, as they were before the run.
        replicas: The replicas that were in the run.
        fractions: How much each of them counts. They add up to 1.
    """
    columns: dict[int, list[torch.Tensor]] = {}
    for index in sorted(users.running & indices):
        of_user, own = (
            users.tensors[index],
            [replica.buffer(index).detach() for replica in replicas],
        )
        are_alike = all(
            (one.shape, one.dtype) == (of_user.shape, of_user.dtype) for one in own
        )
        if are_alike and not _can_be_read(of_user, *own):
            columns[index] = own
    before, of_replicas = (
        [users.tensors[index] for index in columns],
        list(zip(*columns.values(), strict=True)),
    )
    return dict(zip(columns, _average(before, of_replicas, fractions), strict=True))


def _can_be_read(*statistics: torch.Tensor) -> bool:
    """Whether the host can read statistics without waiting for an accelerator."""
    return all(statistic.is_cpu for statistic in statistics)


def _average(
    before: Sequence[torch.Tensor],
    of_replicas: Sequence[Sequence[torch.Tensor]],
    fractions: Sequence[float],
) -> list[torch.Tensor]:
    """The means of statistics over replicas, where the user's are.

    A number that no replica has changed stays as it is.

    Those of one dtype and on the same devices are put together, so that few transfers
    and few kernels are needed.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, own in enumerate(before):
        kind = (
            own.dtype,
            own.device,
            *(statistics[i].device for statistics in of_replicas),
        )
        groups.setdefault(kind, []).append(i)
    means: dict[int, torch.Tensor] = {}
    for group in groups.values():
        like = [before[i] for i in group]
        flat = flatten(like)
        parts = [
            flatten([statistics[i] for i in group]).to(flat.device)
            for statistics in of_replicas
        ]
        weighed = [
            part * fraction
            for part, fraction in zip(parts, fractions, strict=True)
            if fraction
        ]
        is_as_before = torch.stack([part == flat for part in parts]).all(0)
        mean = torch.where(is_as_before, flat, torch.stack(weighed).sum(0))
        means.update(zip(group, unflatten(mean, like), strict=True))
    return [means[i] for i in range(len(before))]
