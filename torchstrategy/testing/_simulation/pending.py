"""What Python has raised and nobody has caught yet, while C++ is on its way out.

A hook in a backward raises. Its exception stays pending in Python until torch has left all its C++, which on the way
out asks the device guard what device it is for. Nothing of Python can answer while an exception is pending, and with no
answer the process ends. So what answers takes the exception away first, and who called torch raises it again.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

_SIZE = ctypes.sizeof(ctypes.c_void_p)
_three = ctypes.create_string_buffer(3 * _SIZE)  # where Python writes what it has pending: type, value and traceback
_NOTHING = _three.raw

# Functions of their own: those that are attributes of `ctypes.pythonapi` are everybody's.
_fetch = ctypes.pythonapi["PyErr_Fetch"]
_fetch.restype = functools.partial(getattr, _three, "raw")  # called with what C returns, and `getattr` with a default
_restore = ctypes.pythonapi["PyErr_Restore"]
_restore.argtypes = [ctypes.c_void_p] * 3
_restore.restype = None

# The answer, by what was pending and on which thread. What is asked for the first time, it answers and keeps.
_asked: defaultdict[tuple[bytes, int], Any] = defaultdict()


def answer_whatever_is_pending(answer: Any) -> Callable[[], Any]:
    """A function that returns `answer`, and takes away what is pending for `raise_what_was_taken`.

    It is C throughout: an interruption, such as Ctrl-C, is raised by functions of Python, in any of them, and where
    they are called there is no way out for it.
    """
    _asked.default_factory = itertools.repeat(answer).__next__
    pending = map(_fetch, *(itertools.repeat(ctypes.byref(_three, i * _SIZE)) for i in range(3)))
    threads = itertools.starmap(threading.get_ident, itertools.repeat(()))
    return map(_asked.__getitem__, zip(pending, threads, strict=False)).__next__


def raise_what_was_taken() -> None:
    """Raises on this thread what was taken away last, the very same exception; does nothing if nothing was."""
    here = threading.get_ident()
    taken = [pending for pending, thread in list(_asked) if thread == here and pending != _NOTHING]
    for pending in taken:
        del _asked[pending, here]
    if taken:
        _restore(*(ctypes.c_void_p * 3).from_buffer_copy(taken[-1]))
