"""The values that all workers have alike.

These are the values with which they begin, and those of buffers after a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from torchstrategy._base.errors import plural
from torchstrategy._base.marks import digest, digest_of
from torchstrategy._base.memory import wrapped_by
from torchstrategy._base.torch_internals import is_distributed_tensor
from torchstrategy._base.types import GeneratorLike
from torchstrategy._group.workers import IN_RUN, Workers
from torchstrategy._variables.kinds import SyncOnReadVariable
from torchstrategy._variables.variable import Variable

_FIRST_RUN = "the beginning of the first run"


def take_from_first_worker(
    workers: Workers,
    roots: Sequence[nn.Module],
    variables: Sequence[Variable],
    generators: Sequence[GeneratorLike] = (),
) -> None:
    """Writes worker 0's values on the modules and variables of all workers.

    So all workers begin alike.

    Args:
        workers: The processes that train together.
        roots: The modules, each with all that it holds.
        variables: The variables.
        generators: The random generators that get the states of those of worker 0.

    Raises:
        RuntimeError: If a worker has other modules or variables than worker 0, naming
            the first that differs.
    """
    named: list[tuple[str, Any]] = []
    for root in roots:
        for name, tensor in root.state_dict(keep_vars=True).items():
            named.append((f"{type(root).__name__}.{name}", tensor))
    for variable in variables:
        # After the first run, a replica's own value of a variable is its own in each
        # worker, too.
        held = (
            variable._take_as_made()
            if isinstance(variable, SyncOnReadVariable)
            else [variable]
        )
        named += [(variable.name, tensor) for tensor in held]
    known: dict[int, tuple[str, torch.Tensor]] = {}  # each tensor once, by its id
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and not isinstance(
            tensor, SyncOnReadVariable
        ):
            known[id(tensor)] = name, tensor
    # What wraps other tensors has no memory of its own. A `DTensor` is compared by how
    # it is sharded.
    tensors = [
        (name, part)
        for name, tensor in known.values()
        for part in ([tensor] if is_distributed_tensor(tensor) else wrapped_by(tensor))
    ]
    states = [generator.get_state() for generator in generators]
    _refuse_other_models(
        workers, [*(("a random generator", state) for state in states), *tensors]
    )
    # Each worker has a part of its own of a tensor that is sharded.
    whole = [(name, t) for name, t in tensors if not is_distributed_tensor(t)]
    with torch.no_grad():
        sent = [*(t for _, t in whole if _can_be_sent(t)), *states]
        workers.broadcast(sent, 0, _FIRST_RUN, are_alike=True)
    if workers.index:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    others = [(name, t) for name, t in whole if not _can_be_sent(t)]
    # An example is the adjacency matrix of a graph: it is data, which all workers have
    # read.
    if others:
        refuse_other_values(
            workers, names=[name for name, _ in others], tensors=[t for _, t in others]
        )


def _can_be_sent(tensor: torch.Tensor) -> bool:
    """Whether other workers can write what this one sends.

    For example, they would also need the scale of a quantized tensor.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _refuse_other_models(
    workers: Workers, tensors: Sequence[tuple[str, torch.Tensor]]
) -> None:
    described = [(name, tuple(t.shape), t.dtype, _parts(t)) for name, t in tensors]
    mark = digest(repr(described).encode())
    if len(set(workers.all_gather_object(mark, _FIRST_RUN))) == 1:
        return
    of_all = workers.all_gather_object(described, _FIRST_RUN)
    for w, theirs in enumerate(of_all):
        for one, other in zip_longest(of_all[0], theirs):
            if one != other:
                raise RuntimeError(
                    f"Workers 0 and {w} have different models: worker 0 has "
                    f"{_shown(one)} where worker {w} has {_shown(other)}. Make the "
                    "same modules and variables, in the same order, on all workers."
                )


def refuse_other_values(
    workers: Workers, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> None:
    """Refuses a run if the workers have computed it with different values.

    Raises:
        RuntimeError: Naming the first tensor that differs.
    """
    of_all = workers.all_gather_object(
        list(map(digest_of, tensors)), "the values that a worker has written"
    )
    for w, theirs in enumerate(of_all):
        for name, one, other in zip(names, of_all[0], theirs, strict=True):
            if one != other:
                raise RuntimeError(
                    f"{name} has other numbers in worker {w} than in worker 0. Only "
                    "some workers have written it, or not alike: one of them has "
                    "loaded a checkpoint, or left out an optimizer.step(). Or each has "
                    "written numbers of its own rows, as an Embedding(max_norm=...) "
                    "does, an update by hand of torch.autograd.grad, or a gradient "
                    "that the step adds to .grad in place. Write the same in all "
                    "workers: numbers of all rows come from loss.backward(), or from "
                    "get_replica_context().all_reduce. "
                    "torchstrategy.testing.assert_workers_agree(strategy, model) finds "
                    "where they part."
                )


def refuse_other_writes(
    workers: Workers, names: Sequence[str], num_writes: Sequence[int]
) -> None:
    """Refuses a run if workers have written a sharded tensor differently often.

    Each worker writes its own part of the tensor.

    Raises:
        RuntimeError: Naming the first tensor that differs.
    """
    of_all = workers.all_gather_object(
        list(num_writes), "the values that a worker has written"
    )
    for w, theirs in enumerate(of_all):
        for name, one, other in zip(names, of_all[0], theirs, strict=True):
            if one != other:
                raise RuntimeError(
                    f"Worker 0 has written its part of {name} in place "
                    f"{plural(one, 'time')}, and worker {w} {plural(other, 'time')}. "
                    "The parts of all workers are one tensor: write them in all of "
                    "them, as where a checkpoint is loaded."
                )


def _parts(tensor: Any) -> str:
    """How a tensor is sharded."""
    return f", sharded as {tensor.placements}" if is_distributed_tensor(tensor) else ""


def _shown(entry: tuple[str, tuple[int, ...], torch.dtype, str] | None) -> str:
    return (
        "nothing"
        if entry is None
        else f"{entry[0]} of shape {entry[1]} and {entry[2]}{entry[3]}"
    )


def mention_written(workers: Workers, indices: set[int]) -> None:
    """Lets the next exchange find out whether the workers wrote the same buffers."""
    workers.mention(IN_RUN, sorted(indices))


def written_anywhere(workers: Workers, indices: set[int]) -> set[int]:
    """The positions of the buffers that any worker wrote.

    Called after the exchange that `mention_written` waits for.

    Args:
        workers: The processes that train together.
        indices: The positions of those that this worker wrote.
    """
    if IN_RUN not in workers.differing:
        return indices
    workers.differing.discard(IN_RUN)
    return indices.union(*workers.all_gather_object(indices, IN_RUN))


def combine_over_workers(
    workers: Workers,
    values: dict[int, torch.Tensor],
    averaged: Sequence[int],
    lead: int,
) -> None:
    """Makes the new values of buffers those of all workers.

    Args:
        workers: The processes that train together.
        values: By position, the values that the replicas of this worker have come to.
            They are replaced.
        averaged: The positions of the averages, which are weighted already and are
            added up.
        lead: The worker whose other values all workers take.
    """
    point = "the end of the run"
    if averaged:
        values.update(
            zip(
                averaged,
                workers.all_reduce([values[i] for i in averaged], point),
                strict=True,
            )
        )
    taken = [i for i in values if i not in set(averaged)]
    copies = [values[i].clone() for i in taken]
    if taken:
        workers.broadcast(copies, lead, point)
        values.update(zip(taken, copies, strict=True))
