"""Lines of the program, and comments there that silence a lint."""

from __future__ import annotations

import ast
import functools
import re
import sys
import threading
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torchstrategy.testing._lints.torch_internals import replaced_functions
from torchstrategy.testing._ranks.lines import is_the_users, places_of_the_user

CHECKPOINTS = "torch.utils.checkpoint"
# Its functions that backward calls, without and with `use_reentrant`.
_AGAIN = ("unpack_hook", "backward")
# It multiplies gradients by what keeps their norm small.
CLIPPING = "torch.nn.utils.clip_grad"
# In whose frames a function with a backward of its own runs.
FUNCTIONS = ("torch.autograd.function", replaced_functions.__module__)
_COLLECTIVES = "torch.distributed.nn"  # whose collectives are such functions
# From an operator to the function of torch that called it, there are fewer calls.
_NEAR = 15
_COMMENT = re.compile(r"#.*\btorchstrategy:\s*ignore\[([^\]]*)\]")


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return (
            f"{Path(self.file).name}:{self.line}"
            if self.file
            else "a line that cannot be found"
        )

    def silences(self, name: str) -> bool:
        """Whether the statement here has a comment `# torchstrategy: ignore[name]`."""
        return name in _silenced(self.file, self.line)

    def mentions(self, name: str, what: str) -> bool:
        """Whether a line of the file has a name and matches an expression.

        It is a line where the name gets its value, for example.
        """
        expression = re.compile(what)
        return any(
            expression.search(line) and re.search(rf"\b{name}\b", line)
            for line in _lines(self.file)
        )

    def text(self) -> str:
        """The statement on this line."""
        lines = _lines(self.file)
        start, end = _extent(self.file, self.line)
        return "\n".join(lines[start - 1 : end])


class _Standing(threading.local):
    place: Place | None = None


_standing = _Standing()


@contextmanager
def standing_at(place: Place) -> Iterator[None]:
    """A block that is about what this thread has done at an earlier line."""
    before, _standing.place = _standing.place, place
    try:
        yield
    finally:
        _standing.place = before


def here() -> Place:
    """The innermost line that is neither torch's nor this library's."""
    if _standing.place is not None:
        return _standing.place
    return Place(*next(iter(places_of_the_user()), ("", 0)))


def way_here() -> tuple[Place, ...]:
    """The lines of the program through which it came here, the innermost first."""
    return tuple(Place(*place) for place in places_of_the_user()) or (Place("", 0),)


def frames_of(
    module: str | tuple[str, ...], most: int | None = _NEAR
) -> Iterator[FrameType]:
    """The calls of functions of a module that an operator comes from.

    It looks among so many innermost ones; `most` None: among all.
    """
    modules = (module,) if isinstance(module, str) else module
    for frame in islice(_frames(), most):
        if frame.f_globals.get("__name__") in modules:
            yield frame


def _frames() -> Iterator[FrameType]:
    """The calls that are under way, from that of `frames_of` on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def calls_of_the_user() -> Iterator[FrameType]:
    """The calls under way of the program's functions, the innermost first.

    They are neither torch's nor this library's.
    """
    return (frame for frame in _frames() if is_the_users(frame))


def lines_around(module: str) -> tuple[Place | None, Place | None]:
    """The innermost lines of the program around functions of a module.

    They are on both sides of those; an operator comes from them.

    The first one is called by them, and the second one calls them. Both are None if it
    comes from elsewhere.
    """
    inside: Place | None = None
    is_there = False
    for frame in _frames():
        if frame.f_globals.get("__name__") == module:
            is_there = True
        elif is_the_users(frame):
            place = Place(frame.f_code.co_filename, frame.f_lineno)
            if is_there:
                return inside, place
            inside = inside or place
    return None, None


def is_within(module: str, most: int | None = _NEAR) -> bool:
    """Whether an operator comes from a function of a module.

    It looks among so many innermost calls; `most` None: among all.
    """
    return next(frames_of(module, most), None) is not None


def is_computed_again() -> bool:
    """Whether backward computes a part of a model again.

    `torch.utils.checkpoint` has kept the input of this part alone.
    """
    return any(frame.f_code.co_name in _AGAIN for frame in frames_of(CHECKPOINTS, None))


def is_in_a_function() -> bool:
    """Whether an operator comes from a function with a backward of its own."""
    return next(frames_of(FUNCTIONS, None), None) is not None


def exchanging_function_here() -> Any:
    """The program's function with a backward of its own that calls this.

    It is a subclass of `torch.autograd.Function`.

    None outside of such a function, and in one of torch's that does other things, as
    `fully_shard` does.
    """
    for frame in frames_of(FUNCTIONS, None):
        if frame.f_code.co_name == "apply":
            there = frame.f_locals.get("cls")  # of its forward
            function = (
                there
                if there is not None
                else getattr(frame.f_locals.get("self"), "_forward_cls", None)
            )
            module = getattr(function, "__module__", "torch.")
            return (
                None
                if module.startswith("torch.") and not module.startswith(_COLLECTIVES)
                else function
            )
    return None


def in_words(places: Iterable[Place]) -> str:
    """Lines, each once: `train.py:3, train.py:7`."""
    return ", ".join(dict.fromkeys(map(str, places)))


@functools.cache
def _lines(file: str) -> list[str]:
    try:
        with tokenize.open(file) as text:  # in the encoding that its first lines name
            return text.read().split("\n")  # a form feed ends no line of Python
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return []


@functools.cache
def _statements(file: str) -> list[tuple[int, int]]:
    """The first and the last line of each statement.

    Of one with a body, they are those of what stands before it.
    """
    try:
        tree = ast.parse("\n".join(_lines(file)))
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = (
                body[0].lineno - 1
                if isinstance(body, list) and body
                else node.end_lineno
            )
            found.append((node.lineno, max(end or 0, node.lineno)))
    return found


def _extent(file: str, line: int) -> tuple[int, int]:
    around = [(start, end) for start, end in _statements(file) if start <= line <= end]
    return max(around, default=(line, line))


@functools.cache
def _silenced(file: str, line: int) -> frozenset[str]:
    start, end = _extent(file, line)
    comments = (_COMMENT.search(text) for text in _lines(file)[start - 1 : end])
    names = (comment[1].split(",") for comment in comments if comment)
    return frozenset(name.strip() for several in names for name in several)
