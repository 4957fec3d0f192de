"""The warnings that a run gives about numbers that one device would not have.

Only the user can tell whether such a difference matters. A run warns once of each cause, at the user's line that called
`run`. Each kind of warning has a class, so that a user can silence it, or make it an error, without the others.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from pathlib import Path
from typing import final

from torch import nn


@final
class SharedWriteWarning(UserWarning):
    """Several replicas wrote in place, in one run, on one tensor that they share.

    All replicas share a tensor that is neither in a module of the strategy nor in a `Variable`, and that the step
    reaches by a name, an attribute or a container. `total.add_(loss)` adds one loss in plain PyTorch, and n losses in n
    replicas. `hits.add_(hits_in_these_rows)` and `bank[indices] = outputs` are right: silence the warning for those.

    Example:
        >>> import warnings
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> hits = torch.zeros(())
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", torchstrategy.SharedWriteWarning)
        ...     _ = strategy.run(lambda: hits.add_(1))
        >>> hits
        tensor(2.)

    Source: https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-operations-with-autograd
    """


@final
class ReplicaBufferWarning(UserWarning):
    """Replicas wrote different numbers on a buffer, of which the library keeps only the numbers of the first replica.

    The running statistics of normalisation layers are averaged instead. A queue, a codebook or a count of rows, which
    `forward` computes from the rows that it sees, needs the rows of all replicas: see "Other buffers" in
    docs/features.md.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", torchstrategy.ReplicaBufferWarning)

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer
    """


@final
class UndistributedBatchWarning(UserWarning):
    """A step was trained on tensors that were not split among the replicas, so each replica computed with all rows.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", torchstrategy.UndistributedBatchWarning)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#experimental_distribute_dataset
    """


def warn(message: str, kind: type[Warning]) -> None:
    """Gives a warning for the line at which the user's code called into this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


# torch's `Module.__call__` calls a DataParallel, and `contextlib` calls some functions of this package; so frames of
# these files are not the user's, either.
_NOT_THE_USERS = (str(Path(__file__).parents[1]), contextlib.__file__, inspect.getfile(nn.Module))
