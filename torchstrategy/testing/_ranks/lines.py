"""At which line of the user's program something happened."""

from __future__ import annotations

import inspect
from types import FrameType

from torchstrategy.testing._ranks.torch_internals import ENTRANCES
from torchstrategy.testing._simulation.words import name_of_file

_NOT_THE_USERS = (
    "torch",
    "torchstrategy",
    "contextlib",
    "functools",
    "threading",
    "runpy",
    "typing_extensions",
)


def is_called_by_torch() -> bool:
    """Whether torch's own code called a collective.

    For example, `DistributedDataParallel` does so.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        is_between = module in ENTRANCES or package in ("torchstrategy", "contextlib")
        if not is_between:
            return package == "torch"
        frame = frame.f_back
    return True


def is_called_by_a_library() -> bool:
    """Whether it was code of torch, or of this library, that called a collective."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        is_between = (
            module in ENTRANCES
            or module == "contextlib"
            or module.startswith("torchstrategy.testing")
        )
        if not is_between:
            return module.partition(".")[0] in ("torch", "torchstrategy")
        frame = frame.f_back
    return True


def places_of_the_user() -> list[tuple[str, int]]:
    """The files and numbers of the program's lines, the innermost first.

    Lines of torch and of this library are left out.

    Lines of installed packages come last: a program cannot change them.
    """
    own: list[tuple[str, int]] = []
    installed: list[tuple[str, int]] = []
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS:
            (installed if is_of_a_package(frame) else own).append(
                (frame.f_code.co_filename, frame.f_lineno)
            )
        frame = frame.f_back
    return own + installed


def line_of_the_user() -> str:
    """The innermost line that is neither torch's nor this library's: `train.py:31`."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if is_the_users(frame):
            return f"{name_of_file(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line that cannot be found"


def is_the_users(frame: FrameType) -> bool:
    """Whether a frame is neither torch's nor this library's."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS


def is_of_a_package(frame: FrameType) -> bool:
    """Whether a frame is one of an installed package."""
    file = frame.f_code.co_filename
    return "site-packages" in file or "dist-packages" in file
