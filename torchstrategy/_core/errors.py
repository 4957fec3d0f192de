"""Words for messages, and what an exception of a replica says about where it was raised.

The library raises Python's own kinds of exceptions, so `except ValueError` works without importing the library:

    RuntimeError    a call inside instead of outside of `Strategy.run`, or the reverse; a call in another strategy's
                    scope; replicas that disagree
    ValueError      something that the caller can change: a size, a device, an option
    TypeError       an object of the wrong type

An exception that the user's code raises in a replica comes out of `Strategy.run` as the same object; `add_note` adds
to this object in which replica it was raised.
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
    """The error for a user who saves, or sends to another process, an object that is of use in this process only."""
    return TypeError(f"This {type(thing).__name__} cannot be pickled: {why}")


def described(error: BaseException) -> str:
    """The type and text of an error; the `__str__` of some errors raises, and then the text says so."""
    text = "its text cannot be had"
    with suppress(Exception):
        text = str(error)
    return f"{type(error).__name__}: {text}"


def add_note(error: BaseException, note: str) -> None:
    """Adds `note` to what a traceback prints below `error`: once, even if the same object is raised several times."""
    notes = getattr(error, "__notes__", [])
    if note in notes:
        return  # a module that raises one prepared exception object would collect a note at every step
    with suppress(AttributeError, TypeError):  # an exception whose class refuses attributes gets no note
        # On Python 3.10 tracebacks do not print notes, but debuggers and loggers can read them.
        error.__notes__ = [*notes, note]
