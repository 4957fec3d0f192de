"""How an error that ended the program is printed.

The text leaves out frames of this library, and uses the program's words.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from torchstrategy.testing._simulation.words import in_words_of_cuda

_HERE = f"{Path(__file__).parents[2]}{os.sep}"
# What `torchrun` sets, and a program may ask for by name.
_OF_TORCHRUN = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
)


def printed(error: BaseException) -> str:
    """What Python would print, with the program's own lines.

    Below them stand the lines of torch and other libraries.
    """
    found = traceback.TracebackException.from_exception(error)
    if os.environ.get("TORCHSTRATEGY_FULL_TRACEBACK", "0") in ("", "0"):
        _leave_out_our_frames(found)
    text = "".join(found.format())
    if sys.version_info < (3, 11):  # it prints no notes
        text += "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    return in_words_of_cuda(text)


def _leave_out_our_frames(found: traceback.TracebackException | None) -> None:
    if found is None:
        return
    kept = [frame for frame in found.stack if not frame.filename.startswith(_HERE)]
    if kept:  # an error of this library alone is told with all its frames
        found.stack[:] = kept
    _leave_out_our_frames(found.__cause__)
    _leave_out_our_frames(found.__context__)


def advice(error: BaseException, has_ranks: bool) -> str:
    """What to write, if an error means that the program was started the wrong way.

    Such a program expects another way to be started.
    """
    asked = error.args[0] if isinstance(error, KeyError) and error.args else None
    if asked in _OF_TORCHRUN and not has_ranks:
        return (
            f"The program asks for {asked}, which torchrun sets: run it with "
            "--ranks 2.\n"
        )
    return ""
