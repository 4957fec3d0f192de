"""What a run warns of: numbers that are not those of one device, where nobody but the user can tell whether it matters.

Each thing is warned of once, at the line of the user's that called `run`. Each kind has a class, so that it can be
silenced, or made an error, by itself.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from pathlib import Path
from typing import final

from torch import nn


@final
class SharedWriteWarning(UserWarning):
    """Several replicas wrote in place, in one run, on one tensor that no replica has of its own.

    All replicas share a tensor that is neither in a module of the strategy nor in a `Variable`, and that the step
    reaches by a name, an attribute or a container. `total.add_(loss)` adds one loss in plain PyTorch, and n in n
    replicas. `hits.add_(hits_in_these_rows)` and `bank[indices] = outputs` are right: silence those.

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
    """Replicas wrote different numbers on a buffer of which only those of the first replica are kept.

    The running statistics of normalisation layers are averaged. A queue, a codebook or a count of rows, which `forward`
    writes from the rows that it sees, needs the rows of all replicas: see "Other buffers" in docs/features.md.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", torchstrategy.ReplicaBufferWarning)

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer
    """


@final
class UndistributedBatchWarning(UserWarning):
    """A step was trained on tensors of which nothing was dealt out, so that each replica computed with all rows.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", torchstrategy.UndistributedBatchWarning)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#experimental_distribute_dataset
    """


def warn(message: str, kind: type[Warning]) -> None:
    """Warns at the line from which the user called into this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


# A DataParallel is called by way of torch, and some of what is here by way of `contextlib`.
_NOT_THE_USERS = (str(Path(__file__).parents[1]), contextlib.__file__, inspect.getfile(nn.Module))
