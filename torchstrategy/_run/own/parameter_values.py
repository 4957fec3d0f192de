"""Whether the workers still have the same values of parameters.

For sharded parameters, it compares the parts that workers have in common.
"""

from __future__ import annotations

from typing import final

from torchstrategy._base.marks import Versions, checksum_of_piece
from torchstrategy._group.workers import Workers
from torchstrategy._run.own.trained_tensors import TrainedTensors
from torchstrategy._run.worker_values import refuse_other_values, refuse_other_writes


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
        # As the workers last agreed about the values, and as they were when the run
        # began.
        self._agreed = Versions(tensors.parameters)
        self._agreed_of_sharded = Versions(self._sharded)
        self._begun = Versions(tensors.parameters)
        self._next = 0  # the position of the tensor of which a piece is compared next
        self._num_rounds = 0  # so often, a piece of each tensor was compared

    def begin_run(self) -> None:
        """From here on, writes are those of the step."""
        self._begun.take()

    def were_written(self) -> bool:
        """Whether the step has written parameters."""
        return self._begun.have_changed()

    def mark(self) -> int:
        """A number that differs where the workers have written parameters otherwise."""
        writes = self._agreed.num_writes()
        if self._sharded:
            writes += self._agreed_of_sharded.num_writes()
        return (
            hash(
                (
                    *writes,
                    self._tensors.num_writes_between_runs,
                    self._checksum_of_next(),
                )
            )
            & 0xFFFFFFFF
        )

    def _checksum_of_next(self) -> int:
        """The checksum of a piece of the next tensor.

        The first round takes the first elements of each tensor, the next round those
        after them.

        What wrote all of a tensor is found once each tensor had its turn; what wrote
        one element, in a later round.
        """
        tensors = self._tensors.parameters
        if not tensors:
            return 0
        if self._next == len(tensors):
            self._next = 0
            self._num_rounds += 1
        tensor = tensors[self._next]
        self._next += 1
        return checksum_of_piece(tensor, self._num_rounds)

    def refuse_others(self) -> None:
        """Compares all values.

        Raises:
            RuntimeError: Naming a tensor that has other values in another worker.
        """
        tensors, buffers = self._tensors, self._tensors.known_buffers()
        names, values = (
            [*tensors.names(), *buffers],
            [*tensors.parameters, *buffers.values()],
        )
        refuse_other_values(self._workers, names, values)
        # Of a sharded parameter each worker has another part, so that only the number
        # of writes can be compared.
        if self._sharded:
            refuse_other_writes(
                self._workers,
                tensors.sharded.names(),
                self._agreed_of_sharded.num_writes(),
            )
        self._agreed.take()
        self._agreed_of_sharded.take()
        tensors.num_writes_between_runs = 0

    def refuse_other_parameters(self) -> None:
        """Compares all parameters, and no buffers: these the step may have written.

        Raises:
            RuntimeError: Naming a parameter that has other values in another worker.
        """
        refuse_other_values(
            self._workers, self._tensors.names(), self._tensors.parameters
        )
