"""Models that are sharded over the workers.

Such models send the gradients of their parameters themselves.

`fully_shard` gives each worker a part of each parameter, puts whole parameters together
while they are used, and averages their gradients over the workers when backward has
come to them. Tensor parallelism splits the computation itself. Both make a parameter a
`DTensor`. The strategy leaves the sending to them, see `Note [Gradients that others
send]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from torchstrategy._base.torch_internals import (
    hide_from_compiler,
    is_distributed_tensor,
    is_flat_sharded,
    places_of_sharded,
    sharding_groups,
    whole_of_sharded,
)

_IS_ONE = 1e-12  # a factor that differs from 1 by less is 1, but for rounding


# Note [Gradients that others send]
# `fully_shard` computes the mean of the workers' gradients, in which each worker counts
# the same. The gradient of the batch is a mean, too, in which a worker counts as it has
# rows. So the gradient of the whole parameter is multiplied where backward has computed
# it, by `count * weight`: then the mean over the workers is the sum of `weight *
# gradient`. All else is left to `fully_shard`, so that this holds for several mesh
# dimensions, for each precision, for gradients that are added up in this worker first
# and sent by a later backward, and for whatever communication it was given. Where all
# workers have the same number of rows, the factor is 1 and nothing is done.
# - A worker without rows has the factor 0. What it has computed may be NaN, so its
#   gradients become zeros.
# - The sum over workers that `gradient_reduction="sum"` asks for is `count` times the
#   mean: the weight is 1.
# - Where several workers have the same rows, as with tensor parallelism, `fully_shard`
#   averages over those that have others: over count / n workers. Their weights add up
#   to 1 / n, so the mean is that of all rows again.
# - A parameter that only tensor parallelism has split gets its gradient from the rows
#   that all workers have.
@final
class ShardedModels:
    """The parameters of some modules that are sharded.

    Args:
        modules: The modules.

    Attributes:
        is_empty: Whether there is none. Each backward asks it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        groups = {
            id(group): group for module in modules for group in sharding_groups(module)
        }
        self._groups = list(groups.values())
        self._of_fully_shard = [
            parameter for group in self._groups for parameter in group.fsdp_params
        ]
        # By the id of a module: the names under which it has parameters that
        # `fully_shard` has made.
        self._places: dict[int, set[str]] = {}
        for parameter in self._of_fully_shard:
            for module, name in places_of_sharded(parameter):
                self._places.setdefault(id(module), set()).add(name)
        self._split = []
        for module in modules:
            known = self._places.get(id(module), ())
            for name, parameter in module._parameters.items():
                if is_distributed_tensor(parameter) and name not in known:
                    self._split.append((module, name))
        self.is_empty = not (self._of_fully_shard or self._split)

    def has_places(self, module: nn.Module) -> bool:
        """Whether `fully_shard` decides which tensors a module has under some names."""
        return id(module) in self._places

    def has_place(self, module: nn.Module, name: str) -> bool:
        """Whether `fully_shard` decides which tensor a module has under this name."""
        return name in self._places.get(id(module), ())

    def parameters(self) -> list[torch.Tensor]:
        """The part that this worker has of each parameter, as a `DTensor`."""
        split = [module._parameters[name] for module, name in self._split]
        return [
            *(one.sharded_param for one in self._of_fully_shard),
            *(p for p in split if p is not None),
        ]

    def names(self) -> list[str]:
        """A name for each of the parameters, for messages."""
        places = [
            *(places_of_sharded(one)[0] for one in self._of_fully_shard),
            *self._split,
        ]
        return [f"{type(module).__name__}.{name}" for module, name in places]

    def averaged_over(self, rank: int) -> dict[tuple[int, ...], str]:
        """The processes whose gradients become one, for each kind of parameters.

        Args:
            rank: That of this process.

        Returns:
            The ranks of the processes, each with the name of a parameter.
        """
        found: dict[tuple[int, ...], str] = {}
        for group in self._groups:
            ranks = tuple(group.mesh_info.mesh.mesh.flatten().tolist())
            for one in group.fsdp_params[:1]:
                module, name = places_of_sharded(one)[0]
                found.setdefault(ranks, f"{type(module).__name__}.{name}")
        # For such a parameter, each process has its gradient for itself.
        for module, name in self._split[:1]:
            found.setdefault((rank,), f"{type(module).__name__}.{name}")
        return found

    def take_from_first(self) -> None:
        """Gives workers with the same part of a parameter the first one's values."""
        with torch.no_grad():
            for parameter in self.parameters():
                _take_from_first(parameter)

    @contextmanager
    def weighing(self, weight: float, count: int) -> Iterator[None]:
        """A block in which backward weighs gradients by how much this worker counts.

        Args:
            weight: How much it counts.
            count: How many workers there are.
        """
        factor = weight * count
        handles = []
        if abs(factor - 1.0) > _IS_ONE:
            split = [module._parameters[name] for module, name in self._split]
            wholes = [*map(whole_of_sharded, self._of_fully_shard), *split]
            weigh = _weighing_by(factor)
            handles = [
                whole.register_hook(weigh)
                for whole in wholes
                if whole is not None and whole.requires_grad
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def refuse_flat(modules: Sequence[nn.Module]) -> None:
    """Refuses modules that are sharded in a way in which gradients cannot be weighed.

    Raises:
        TypeError: If there is one.
    """
    if any(map(is_flat_sharded, modules)):
        raise TypeError(_FLAT)


# See Note [Where a gradient is weighed] in `_group/weighing`.
def _weighing_by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def weigh(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * factor if factor else torch.zeros_like(gradient)

    hide_from_compiler(weigh)
    return weigh


def _take_from_first(parameter: Any) -> None:
    """Sends a part of a `DTensor` from the first process that has this part."""
    for dim, placement in enumerate(parameter.placements):
        mesh, own = parameter.device_mesh, parameter.to_local()
        if placement.is_replicate() and mesh.size(dim) > 1 and own.numel():
            # What is offloaded to the CPU cannot be sent from there by NCCL.
            sent = own.to(mesh.device_type).contiguous()
            torch.distributed.broadcast(sent, group=mesh.get_group(dim), group_src=0)
            own.copy_(sent)


_FLAT = (
    "A FullyShardedDataParallel averages gradients as if all workers had the same "
    "number of rows, and hides the parameters by which they could be weighed. Shard "
    "the model by torch.distributed.fsdp.fully_shard(module)."
)
