"""A warning for buffers that replicas wrote differently, such as a queue or a codebook.

Only the numbers of the first replica are kept. To compare them with those of other accelerators, the program has to
wait for the accelerators. So a buffer is compared after the first run that wrote it, the second, the fourth, the eighth
and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from torchstrategy._core.errors import ReplicaBufferWarning, warn

_COUNTER = "num_batches_tracked"  # each replica of a normalisation layer counts the same steps


@final
class LostBuffers:
    """Remembers which buffers differed between replicas.

    Args:
        names: What the user calls each buffer.
        modules: The id of the module of each.
    """

    def __init__(self, names: Sequence[str], modules: Sequence[int]) -> None:
        self._names = names
        self._modules = modules
        self._runs: dict[int, int] = {}  # by the position of a buffer: how many runs wrote it
        self._differing: set[int] = set()  # the positions of buffers that are to be warned of
        self._new: list[tuple[int, str]] = []  # modules and names of new buffers that are to be warned of

    def look(self, index: int, kept: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        """Compares the value of a buffer that is kept with the values that other replicas wrote."""
        self._runs[index] = count = self._runs.get(index, 0) + 1
        # `count & (count - 1)` is zero for powers of two.
        is_due = count & (count - 1) == 0 and not self._names[index].endswith(_COUNTER)
        if is_due and not all(_are_close(kept, other.to(kept.device)) for other in others):
            self._differing.add(index)

    def look_at_new(self, name: str, module: int, kept: object, others: Sequence[object]) -> None:
        """Compares a buffer that the step made in the first replica with those that it made in others."""
        tensors = [other for other in others if isinstance(other, torch.Tensor)]
        if isinstance(kept, torch.Tensor) and not all(
            (other.shape, other.dtype) == (kept.shape, kept.dtype) and _are_close(kept, other.to(kept.device))
            for other in tensors
        ):
            self._new.append((module, name))

    def warn(self, warned: set[tuple[int, str]]) -> None:
        """Warns of buffers that differed; `warned` has those of which users were warned before."""
        differing = [(self._modules[index], self._names[index]) for index in sorted(self._differing)]
        for key in [*differing, *self._new]:
            if key not in warned:
                warned.add(key)
                warn(_DIFFERS.format(name=key[1]), ReplicaBufferWarning)
        self._differing.clear()
        self._new.clear()


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, but for rounding, which differs between devices."""
    # `torch.allclose` takes neither sparse nor nested tensors, and a warning that may be wrong is worse than none.
    if one.layout is not torch.strided or other.layout is not torch.strided or one.is_nested:
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    # Torch does not compare tensors of float8.
    if one.element_size() == 1:
        one, other = one.float(), other.float()
    return torch.allclose(one, other, equal_nan=True)


_DIFFERS = (
    "The buffer {name} has other numbers in each replica after this run: each wrote it from its own rows. Those of the "
    "first replica are kept, and what the others wrote is lost. Write it from the rows of all replicas: in forward, "
    "rows = torchstrategy.get_replica_context().all_gather(rows, axis=0) before it is written, or all_reduce('sum', "
    "...) for a sum or a count. Or write it in a merge function; or keep it in a torchstrategy.Variable. For "
    "statistics of a batch there is torchstrategy.nn.SyncBatchNorm. If the first replica's will do: "
    'warnings.filterwarnings("ignore", category=torchstrategy.ReplicaBufferWarning).'
)
