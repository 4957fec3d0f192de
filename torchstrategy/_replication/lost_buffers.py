"""Buffers of which replicas wrote different numbers, and only those of the first replica are kept: a queue, a codebook.

To compare numbers of several accelerators is to wait for them. So a buffer is looked at after the first run that wrote
it, the second, the fourth, the eighth and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from torchstrategy._binding.tensor_versions import TrackedTensors
from torchstrategy._core.warnings import ReplicaBufferWarning, warn

_COUNTER = "num_batches_tracked"  # each replica of a normalisation layer counts the same steps


@final
class LostBuffers:
    """The buffers of some modules: which of them differed between replicas.

    Args:
        buffers: The originals.
    """

    def __init__(self, buffers: TrackedTensors) -> None:
        self._buffers = buffers
        self._runs: dict[int, int] = {}  # that wrote a buffer
        self._differing: set[int] = set()

    def look(self, index: int, kept: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        """Compares what is kept of a buffer with what other replicas wrote."""
        self._runs[index] = count = self._runs.get(index, 0) + 1
        is_due = count & (count - 1) == 0 and not self._buffers.names[index].endswith(_COUNTER)
        if is_due and not all(_are_close(kept, other.to(kept.device)) for other in others):
            self._differing.add(index)

    def warn(self, warned: set[tuple[int, str]]) -> None:
        """Warns of those that differ; `warned` are those that were warned of before."""
        for index in sorted(self._differing):
            name = self._buffers.names[index]
            key = (id(self._buffers.tensors[index]), name)
            if key not in warned:
                warned.add(key)
                warn(_DIFFERS.format(name=name), ReplicaBufferWarning)
        self._differing.clear()


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, but for the rounding of several devices. Of sparse ones it may be."""
    if one.layout is not torch.strided or other.layout is not torch.strided or one.is_nested:
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    if one.element_size() == 1:  # torch compares no float8
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
