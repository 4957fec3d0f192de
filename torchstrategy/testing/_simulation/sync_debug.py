"""`torch.cuda.set_sync_debug_mode`: tells a program where it waits for a device.

A program may wait without saying so.
"""

from __future__ import annotations

import inspect
import warnings
from typing import final

_NOT_THE_USERS = ("torch", "torchstrategy", "contextlib", "functools")

_MODES = ("default", "warn", "error")
_WORDS = "called a synchronizing CUDA operation"  # torch's own


@final
class _Mode:
    level = 0  # an index of `_MODES`


_mode = _Mode()


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Sets what happens where the program waits for a device.

    It may be nothing, a warning or an error.

    Raises:
        RuntimeError: If it is none of `default`, `warn` and `error`, and no number of
            one.
    """
    if isinstance(debug_mode, str) and debug_mode in _MODES:
        debug_mode = _MODES.index(debug_mode)
    if debug_mode not in range(len(_MODES)):
        raise RuntimeError(
            f"invalid value of debug_mode {debug_mode!r}: expected one of `default`, "
            "`warn`, `error`"
        )
    _mode.level = int(debug_mode)


def get_sync_debug_mode() -> int:
    """What was set: 0, 1 or 2."""
    return _mode.level


def check_wait() -> None:
    """Tells the program that it waits for a device, if it has asked for that.

    Raises:
        RuntimeError: If it wants an error.
    """
    if _mode.level == 1:
        warnings.warn(_WORDS, stacklevel=levels_to_the_user())
    elif _mode.level == 2:
        raise RuntimeError(_WORDS)


def levels_to_the_user() -> int:
    """How far above the caller of this function the program's innermost line is.

    Lines of torch and of this package do not count.
    """
    level, frame = 0, inspect.currentframe()
    while (
        frame is not None
        and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS
    ):
        level, frame = level + 1, frame.f_back
    return level
