"""At which line of the user's program something happened."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FrameType

from torchstrategy.testing._ranks.torch_internals import ENTRANCES

_NOT_THE_USERS = ("torch", "torchstrategy", "contextlib", "functools", "threading", "runpy", "typing_extensions")


def is_called_by_torch() -> bool:
    """Whether it was torch's own code that called a collective, as `DistributedDataParallel` does."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module not in ENTRANCES and module.partition(".")[0] not in ("torchstrategy", "contextlib"):
            return module.partition(".")[0] == "torch"
        frame = frame.f_back
    return True


def place_of_the_user() -> tuple[str, int]:
    """The file and the number of the innermost line that is neither torch's nor this library's; `("", 0)` of none."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS:
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def line_of_the_user() -> str:
    """The innermost line that is neither torch's nor this library's: `train.py:31`."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line that cannot be found"
