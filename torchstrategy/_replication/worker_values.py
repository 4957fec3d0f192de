"""The values that all workers have alike: those with which they begin, and those of buffers after a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, final

import torch
from torch import nn

from torchstrategy._binding.object_attributes import KEPT, NOTHING, Told, Trainer
from torchstrategy._communication.native_dtypes import bits
from torchstrategy._communication.wire import encode
from torchstrategy._communication.workers import IN_RUN, Workers, digest
from torchstrategy._core.errors import an, plural
from torchstrategy._core.torch_internals import is_distributed_tensor
from torchstrategy._execution.replica_weights import ReplicaWeights
from torchstrategy._replication.kept_by_hooks import KeptInRun
from torchstrategy._replication.merged_values import Look
from torchstrategy._replication.plain_attributes import PlainAttributes
from torchstrategy._variables.kinds import SyncOnReadVariable
from torchstrategy._variables.variable import Variable


def take_from_first_worker(workers: Workers, roots: Sequence[nn.Module], variables: Sequence[Variable]) -> None:
    """Writes the values of worker 0 on the modules and variables of all workers, so that they begin alike.

    Raises:
        RuntimeError: If a worker has other modules or variables than worker 0, naming the first that differs.
    """
    named = [
        (f"{type(root).__name__}.{name}", tensor)
        for root in roots
        for name, tensor in root.state_dict(keep_vars=True).items()
    ]
    # After the first run, a replica's own value of a variable is its own in each worker, too.
    named += [(v.name, t) for v in variables for t in (v._take_as_made() if isinstance(v, SyncOnReadVariable) else [v])]
    known = [(name, t) for name, t in named if isinstance(t, torch.Tensor) and not isinstance(t, SyncOnReadVariable)]
    tensors = {id(t): (name, t) for name, t in known}.values()
    point = "the beginning of the first run"
    of_all = workers.all_gather_object([(name, tuple(t.shape), t.dtype, _parts(t)) for name, t in tensors], point)
    for w, theirs in enumerate(of_all):
        for one, other in zip_longest(of_all[0], theirs):
            if one != other:
                raise RuntimeError(
                    f"Workers 0 and {w} have different models: worker 0 has {_shown(one)} where worker {w} has "
                    f"{_shown(other)}. Make the same modules and variables, in the same order, on all workers."
                )
    with torch.no_grad():
        # Each worker has a part of its own of a tensor that is sharded.
        workers.broadcast([t for _, t in tensors if not is_distributed_tensor(t)], 0, point)


def refuse_other_values(workers: Workers, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Refuses a run if the workers have computed it with different values.

    Raises:
        RuntimeError: Naming the first tensor that differs.
    """
    marks = [digest(bits(t).cpu().numpy().tobytes()) for t in tensors]
    of_all = workers.all_gather_object(marks, "the values that a worker has written")
    for w, theirs in enumerate(of_all):
        for name, one, other in zip(names, of_all[0], theirs, strict=True):
            if one != other:
                raise RuntimeError(
                    f"{name} has other numbers in worker {w} than in worker 0: it was written between two runs in some "
                    "workers only, or not alike. Write it in all of them, as where a checkpoint is loaded; "
                    "torchstrategy.testing.assert_workers_agree(strategy, model) finds where they part."
                )


def refuse_other_writes(workers: Workers, names: Sequence[str], num_writes: Sequence[int]) -> None:
    """Refuses a run if a worker has written its part of a sharded tensor more often than another one.

    Raises:
        RuntimeError: Naming the first tensor that differs.
    """
    of_all = workers.all_gather_object(list(num_writes), "the values that a worker has written")
    for w, theirs in enumerate(of_all):
        for name, one, other in zip(names, of_all[0], theirs, strict=True):
            if one != other:
                raise RuntimeError(
                    f"Worker 0 has written its part of {name} in place {plural(one, 'time')}, and worker {w} "
                    f"{plural(other, 'time')}. The parts of all workers are one tensor: write them in all of them, as "
                    "where a checkpoint is loaded."
                )


def _parts(tensor: Any) -> str:
    """How a tensor is sharded."""
    return f", sharded as {tensor.placements}" if is_distributed_tensor(tensor) else ""


def _shown(entry: tuple[str, tuple[int, ...], torch.dtype, str] | None) -> str:
    return "nothing" if entry is None else f"{entry[0]} of shape {entry[1]} and {entry[2]}{entry[3]}"


# What the replicas of this worker wrote on plain attributes of the user's objects, before the user sees it.
Writer = PlainAttributes | Trainer | KeptInRun


def mention_writes(workers: Workers, indices: set[int], writes: Sequence[Writer]) -> None:
    """Lets the next exchange find out whether the workers wrote alike. If not, `compare_writes` makes one of it."""
    texts = [{key: item.text for key, item in one.told().items()} for one in writes]
    workers.mention(IN_RUN, (sorted(indices), repr(texts)))


def compare_writes(
    workers: Workers, indices: set[int], writes: Sequence[Writer], weights: ReplicaWeights, look: Look
) -> set[int]:
    """Makes one value of what the workers wrote on each plain attribute, where there can be one.

    Args:
        workers: The processes that train together.
        indices: The positions of the buffers that this worker wrote.
        writes: What it wrote besides.
        weights: How much the replicas of this worker count.
        look: Compares numbers, for a warning.

    Returns:
        The positions of the buffers that any worker wrote.
    """
    if IN_RUN not in workers.differing:
        return indices
    workers.differing.discard(IN_RUN)
    told = [one.told() for one in writes]
    sent = [{key: _as_sent(one) for key, one in of_writer.items()} for of_writer in told]
    arrived = workers.all_gather_object((weights.is_understudy, sent, indices), IN_RUN)
    of_all = [(is_understudy, list(map(_as_told, of_worker)), written) for is_understudy, of_worker, written in arrived]
    for i, (writer, mine) in enumerate(zip(writes, told, strict=True)):
        leads = of_all[weights.lead_worker][1][i]
        for key in {**leads, **mine}:
            own, lead = mine.get(key, NOTHING), leads.get(key, NOTHING)
            theirs = [(is_understudy, of_worker[i].get(key, NOTHING)) for is_understudy, of_worker, _ in of_all]
            counted = [one for is_understudy, one in theirs if not is_understudy or one.text == KEPT]
            differ = len({one.text for one in counted}) > 1
            if (own.is_own or lead.is_own) and (differ or lead is NOTHING):
                writer.keep(key)
                continue
            if isinstance(lead.value, _Unsent) and any(one.text != lead.text for _, one in theirs):
                raise _cannot_arrive(workers, key, lead)
            if differ and lead.path:
                look(lead.path, lead.value, [one.value for one in counted if one is not NOTHING])
            if own.text != lead.text:
                writer.put(key, lead.value)
    return indices.union(*(written for *_, written in of_all))


@final
class _Unsent(NamedTuple):
    """In the place of a value that cannot be sent."""

    kind: str  # the name of its class


def _as_sent(one: Told) -> tuple[object, ...]:
    """What is sent of a value: of one that cannot be sent, what it is called."""
    try:
        encode(one.value)
    except TypeError:
        return (one.text, type(one.value).__name__, one.is_own, one.path, False)
    return (*one, True)


def _as_told(sent: dict[Any, tuple[Any, ...]]) -> dict[Any, Told]:
    """The reverse of `_as_sent`, for the values of a writer."""
    told = {}
    for key, (text, value, is_own, path, is_sent) in sent.items():
        told[key] = Told(text, value if is_sent else _Unsent(value), is_own, path)
    return told


def _cannot_arrive(workers: Workers, key: Any, lead: Told) -> TypeError:
    name = lead.path or f"attribute {key if isinstance(key, str) else ''.join(map(str, key))}"
    error = TypeError(
        f"The step wrote {lead.text} on {name}, and not all workers wrote the same. They would all take that of one "
        f"worker, and {an(lead.value.kind)} cannot be sent to the others. Let the attribute hold a number or a text."
    )
    workers.note_of_all(error)
    return error


def combine_over_workers(workers: Workers, values: dict[int, torch.Tensor], averaged: Sequence[int], lead: int) -> None:
    """Makes the new values of buffers those of all workers.

    Args:
        workers: The processes that train together.
        values: By position, the values that the replicas of this worker have come to. They are replaced.
        averaged: The positions of the averages, which are weighted already and are added up.
        lead: The worker whose other values all workers take.
    """
    point = "the end of the run"
    if averaged:
        values.update(zip(averaged, workers.all_reduce([values[i] for i in averaged], point), strict=True))
    taken = [i for i in values if i not in set(averaged)]
    copies = [values[i].clone() for i in taken]
    if taken:
        workers.broadcast(copies, lead, point)
        values.update(zip(taken, copies, strict=True))
