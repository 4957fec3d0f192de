"""Workers that need the same rows, because they compute one model together.

Tensor parallelism splits each layer over several workers, which pass activations to one
another. So they have to have the same rows, and to draw the same random numbers.
`fully_shard` averages gradients over the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.marks import checksum
from torchstrategy._base.torch_internals import is_distributed_tensor
from torchstrategy._base.tree import tree_leaves
from torchstrategy._base.types import Tree
from torchstrategy._group.workers import Workers
from torchstrategy._run.own.sharded_models import ShardedModels

# The number of runs in which rows on an accelerator are compared. Later, the host would
# have to wait for the accelerator.
_FIRST_RUNS = 3
_LOOKED_AT = 1 << 16  # bytes of a tensor that are compared


@final
class RowPeers:
    """The workers that need the same rows as this one.

    Args:
        workers: The processes that train together.
        indices: The numbers of these workers, in order; this one alone if it has rows
            of its own.
    """

    def __init__(self, workers: Workers, indices: Sequence[int]) -> None:
        self._workers = workers
        self._indices = indices
        self._num_runs = 0

    @property
    def first(self) -> int:
        """The first of the workers, whose random numbers all of them draw."""
        return self._indices[0]

    @classmethod
    def of(cls, workers: Workers, models: ShardedModels) -> RowPeers:
        """Asks all workers over which of them each averages gradients.

        The others need the same rows.

        Raises:
            RuntimeError: If that does not tell, naming the parameters.
        """
        rank = dist.get_rank()
        of_all = workers.all_gather_object(
            (rank, models.averaged_over(rank)), "how the models are sharded"
        )
        ranks = [of_worker for of_worker, _ in of_all]
        # For each worker, the processes with other rows; (): all have others.
        kinds: list[tuple[int, ...]] = []
        for w, (_, averaged) in enumerate(of_all):
            for group, name in averaged.items():
                if not set(group) <= set(ranks):
                    raise _of_all(
                        workers,
                        _STRANGERS.format(name, w, sorted(group), sorted(ranks)),
                    )
            parts = {
                group: name
                for group, name in averaged.items()
                if set(group) != set(ranks)
            }
            if len(parts) > 1:
                (one, name), (other, another) = [*parts.items()][:2]
                raise _of_all(
                    workers, _UNLIKE.format(w, name, list(one), another, list(other))
                )
            kinds.append(next(iter(parts), ()))
        if not any(kinds):
            return cls(workers, [workers.index])
        num_in = Counter(kinds)
        is_even = len(set(map(len, kinds))) == 1 and all(
            num_in[group] == len(group) for group in kinds
        )
        if not is_even or not all(
            rank in group for rank, group in zip(ranks, kinds, strict=True)
        ):
            raise _of_all(workers, _UNEVEN.format([list(group) for group in kinds]))
        places = [group.index(rank) for rank, group in zip(ranks, kinds, strict=True)]
        own = places[workers.index]
        return cls(workers, [w for w, place in enumerate(places) if place == own])

    def refuse_other_rows(self, leaves: Sequence[Tree], given: Tree) -> None:
        """Refuses a run in which they have other rows. Called in all workers.

        Args:
            leaves: What the run was given.
            given: What the step is given in this worker.

        Raises:
            RuntimeError: In all workers, naming two of them.
        """
        if len(self._indices) == 1:
            return
        self._num_runs += 1
        distributed = [leaf for leaf in leaves if type(leaf) is PerReplica]
        if any(leaf.rows_of_all or leaf.read for leaf in distributed):
            raise _of_all(self._workers, _SPLIT.format(self._shown()))
        told = (
            self._indices,
            [
                self._mark(leaf)
                for leaf in tree_leaves(given)
                if isinstance(leaf, torch.Tensor)
            ],
        )
        of_all = self._workers.all_gather_object(
            told, "the rows of workers that compute one model"
        )
        for w, (peers, marks) in enumerate(of_all):
            if marks != of_all[peers[0]][1]:
                raise _of_all(self._workers, _OTHER_ROWS.format(peers[0], w))

    def _mark(self, tensor: Any) -> tuple[Any, ...]:
        """Numbers that differ where the contents of two tensors do."""
        number = 0
        tensor = tensor.to_local() if is_distributed_tensor(tensor) else tensor
        if tensor.layout is torch.strided and (
            tensor.is_cpu or self._num_runs <= _FIRST_RUNS
        ):
            number = checksum(tensor, most=_LOOKED_AT)
        return tuple(tensor.shape), str(tensor.dtype), number

    def _shown(self) -> str:
        return ", ".join(map(str, self._indices))


def _of_all(workers: Workers, text: str) -> RuntimeError:
    """An error that all workers come to."""
    error = RuntimeError(text)
    workers.note_of_all(error)
    return error


_STRANGERS = (
    "{} is sharded, in worker {}, over the processes {}, and the workers of the "
    "strategy are the processes {}. Its gradients would be averaged with those of "
    "processes that the strategy does not know. Make the mesh of these processes, or "
    "give the strategy the others, too."
)

_UNLIKE = (
    "In worker {}, the gradients of {} become one over the processes {}, and those of "
    "{} over the processes {}. So it is unclear which workers have the same rows. "
    "Shard all parameters over one mesh: with tensor parallelism, call "
    "fully_shard(module, mesh=mesh['dp']) on every module whose parameters are split."
)

_UNEVEN = (
    "The workers average gradients over the processes {}, one list for each worker. "
    "These lists have to be of one length, and each process has to be in one of them: "
    "make the meshes of all workers of one `init_device_mesh`."
)

_SPLIT = (
    "The workers {} do not average their gradients with one another: tensor "
    "parallelism lets them compute one model together, so they need the same rows. The "
    "dataset of this batch is split over all workers. Let each worker read its rows "
    "itself: by strategy.distribute_datasets_from_function, or with the option "
    "experimental_auto_shard_policy=AutoShardPolicy.OFF. Its loader takes a sampler "
    "that is the same in workers that compute together, such as "
    "DistributedSampler(data, num_replicas=dp.size(), rank=dp.get_local_rank()) where "
    "dp = mesh['dp']. If each worker is to have rows of its own, make the mesh of "
    "fully_shard of all workers."
)

_OTHER_ROWS = (
    "The workers {} and {} do not average their gradients with one another: tensor "
    "parallelism lets them compute one model together, so they need the same rows, and "
    "were given others. Give each of them the same loader, with the same seed, and a "
    "sampler of the same rank in both. If each is to have rows of its own, make the "
    "mesh of fully_shard of all workers."
)
