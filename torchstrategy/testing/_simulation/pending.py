"""How an exception of a hook gets out of torch's C++.

If a hook raises during a backward, its exception stays pending in Python until torch
has left all its C++ functions. On the way out, these ask the device guard for its
device. The guard is written in Python, which cannot run while an exception is pending,
and without an answer torch ends the process. So the function that answers takes the
exception away first, and the Python code that called torch raises it again.
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
# Python writes the pending exception here: type, value and traceback.
_three = ctypes.create_string_buffer(3 * _SIZE)
_NOTHING = _three.raw

# By index, which makes new function objects: the attributes of `ctypes.pythonapi` are
# shared by the whole process.
_fetch = ctypes.pythonapi["PyErr_Fetch"]
# ctypes calls this with the C function's result, which `getattr` takes for its default
# and ignores.
_fetch.restype = functools.partial(getattr, _three, "raw")
_restore = ctypes.pythonapi["PyErr_Restore"]
_restore.argtypes = [ctypes.c_void_p] * 3
_restore.restype = None

# By the pending exception and the thread: the answer. The dict makes the answer for a
# new key, and so also keeps the exception.
_asked: defaultdict[tuple[bytes, int], Any] = defaultdict()


def answer_whatever_is_pending(answer: Any) -> Callable[[], Any]:
    """Makes a function that returns `answer`, and keeps the pending exception.

    `raise_what_was_taken` can raise that exception later.

    The function is made of C functions only. An interruption such as Ctrl-C may be
    raised in any function that is written in Python, and torch's C++ code that calls
    this function cannot handle an exception.
    """
    _asked.default_factory = itertools.repeat(answer).__next__
    pending = map(
        _fetch, *(itertools.repeat(ctypes.byref(_three, i * _SIZE)) for i in range(3))
    )
    threads = itertools.starmap(threading.get_ident, itertools.repeat(()))
    return map(_asked.__getitem__, zip(pending, threads, strict=False)).__next__


def raise_what_was_taken() -> None:
    """Raises on this thread the exception that was taken away last.

    It raises the same object, and does nothing if there is none.
    """
    here = threading.get_ident()
    taken = [
        pending
        for pending, thread in list(_asked)
        if thread == here and pending != _NOTHING
    ]
    for pending in taken:
        del _asked[pending, here]
    if taken:
        _restore(*(ctypes.c_void_p * 3).from_buffer_copy(taken[-1]))
