"""Whether the workers still have the same values of parameters, and the same parts of those that are sharded."""

from __future__ import annotations

import zlib
from operator import sub
from typing import final

import torch

from torchstrategy._base.torch_internals import versions
from torchstrategy._group.workers import Workers
from torchstrategy._run.own.trained_tensors import TrainedTensors
from torchstrategy._run.worker_values import refuse_other_values, refuse_other_writes

_SLICE = 1 << 12  # the elements of a tensor that are compared at a backward


@final
class ValuesOfParameters:
    """Finds parameters that have other values in some workers.

    Args:
        workers: The processes that train together.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.take(TrainedTensors([], [], averages_buffers=True))

    def take(self, tensors: TrainedTensors) -> None:
        """Takes other parameters, which the workers have alike now."""
        self._tensors = tensors
        self._sharded = tensors.sharded.parameters()
        self._note_versions()
        self._next = (0, 0)  # the tensor, and the element, with which the next slice begins
        self.begin_run()

    def _note_versions(self) -> None:
        self._agreed = versions(self._tensors.parameters)
        self._agreed_of_sharded = versions(self._sharded)

    def begin_run(self) -> None:
        """From here on, writes are those of the step."""
        self._begun = versions(self._tensors.parameters)

    def were_written(self) -> bool:
        """Whether the step has written parameters."""
        return versions(self._tensors.parameters) != self._begun

    def mark(self) -> int:
        """A number that differs where the workers have written parameters otherwise."""
        moved = [*map(sub, versions(self._tensors.parameters), self._agreed)]
        if self._sharded:
            moved += self._writes_on_sharded()
        writes = self._tensors.num_writes_between_runs
        return hash((*moved, writes, self._checksum_of_next())) & 0xFFFFFFFF

    def _writes_on_sharded(self) -> list[int]:
        return list(map(sub, versions(self._sharded), self._agreed_of_sharded))

    def _checksum_of_next(self) -> int:
        tensors = self._tensors.parameters
        i, begin = self._next
        if i >= len(tensors):
            self._next = (0, 0)
            return 0
        tensor, end = tensors[i], begin + _SLICE
        self._next = (i, end) if end < tensor.numel() else (i + 1, 0)
        # To read the memory of an accelerator, the host would wait for it.
        if not (tensor.is_cpu and tensor.is_contiguous()):
            return 0
        # A sum, by torch or by NumPy, takes three times as long here: its code is in no cache of the processor.
        if tensor.dtype in _KNOWN_TO_NUMPY:
            return zlib.crc32(tensor.detach().numpy().reshape(-1)[begin:end].data)
        return checksum(tensor.detach().view(-1)[begin:end])

    def refuse_others(self) -> None:
        """Compares all values.

        Raises:
            RuntimeError: Naming a tensor that has other values in another worker.
        """
        tensors, buffers = self._tensors, self._tensors.known_buffers()
        names, values = [*tensors.names(), *buffers], [*tensors.parameters, *buffers.values()]
        refuse_other_values(self._workers, names, values)
        # Of a sharded parameter each worker has another part, so that only the number of writes can be compared.
        if self._sharded:
            refuse_other_writes(self._workers, tensors.sharded.names(), self._writes_on_sharded())
        self._note_versions()
        tensors.num_writes_between_runs = 0

    def refuse_other_parameters(self) -> None:
        """Compares all parameters, and no buffers: these the step may have written.

        Raises:
            RuntimeError: Naming a parameter that has other values in another worker.
        """
        refuse_other_values(self._workers, self._tensors.names(), self._tensors.parameters)


_KNOWN_TO_NUMPY = (torch.float16, torch.float32, torch.float64)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """A number that differs where the bits of two tensors do, but for unlikely cases."""
    return int(sum_of_bits(tensor))


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same number, where the tensor is."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return dense.contiguous().view(_INTEGERS[dense.element_size()]).sum(dtype=torch.int64)
