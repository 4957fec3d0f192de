"""The errors of the library are Python's own families, so `except ValueError` works without importing us.

    RuntimeError    called on the wrong side of `Strategy.run`, in another strategy's scope, or replicas that disagree
    ValueError      something the caller can change: a size, a device, an option
    TypeError       a thing of the wrong kind

An exception of the user's own, raised in a replica, comes out of `Strategy.run` as the same object; `add_note` writes
on it where it came from.
"""

from __future__ import annotations

from contextlib import suppress


def plural(count: int, noun: str) -> str:
    """`1 replica`, `3 replicas`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def an(noun: str) -> str:
    """`a list`, `an int`."""
    return f"an {noun}" if noun[0] in "aeiouAEIOU" else f"a {noun}"


def unpicklable(thing: object, why: str) -> TypeError:
    """What is raised when a user saves, or sends to another process, what is of use in this one only."""
    return TypeError(f"This {type(thing).__name__} cannot be pickled: {why}")


def described(error: BaseException) -> str:
    """The type and text of an error; some errors have no text that can be had."""
    text = "its text cannot be had"
    with suppress(Exception):
        text = str(error)
    return f"{type(error).__name__}: {text}"


def add_note(error: BaseException, note: str) -> None:
    """Adds `note` to what a traceback prints below `error`, once however often the same object is raised."""
    notes = getattr(error, "__notes__", [])
    if note in notes:
        return  # a module that raises one prepared exception object would collect a note at every step
    with suppress(AttributeError, TypeError):  # an exception class that refuses attributes goes without
        # On Python 3.10 tracebacks do not print notes, but debuggers and loggers can read them.
        error.__notes__ = [*notes, note]
