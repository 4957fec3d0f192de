"""What an error of a step is about, and who raised it.

Such errors are about tensors or generators of another device, or synchronization.
"""

from __future__ import annotations

import re

# The words of torch's check of operands, of its check of generators, and of kernels
# that check by themselves.
_WORDS = re.compile(
    r"same device|different devices|at least two devices|device type for generator|to "
    r"(have|be on) .*device",
    re.IGNORECASE,
)
_NOT_TOGETHER = "replicas synchronized a different number of times"
_REPLICA = re.compile(r"raised by replica (\d+) of ")


def is_about_devices(error: BaseException) -> bool:
    """Whether torch refused tensors, or a generator, of another device."""
    return (
        isinstance(error, (RuntimeError, ValueError))
        and _WORDS.search(str(error)) is not None
    )


def is_about_synchronization(error: BaseException) -> bool:
    """Whether replicas came to different synchronization points."""
    return isinstance(error, RuntimeError) and _NOT_TOGETHER in str(error)


def replica_of(error: BaseException) -> int | None:
    """The replica that raised an error, from the note that a run adds to it.

    None: it was raised for all replicas.
    """
    matches = (_REPLICA.search(note) for note in getattr(error, "__notes__", ()))
    return next((int(match[1]) for match in matches if match), None)
