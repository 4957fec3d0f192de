"""The calls of a step in which rows become one number, and what they made.

For example, `inputs.mean()` makes one number of the rows of a batch.

Plain PyTorch computes such a number from all rows, and a replica from its own. Whether
that makes the difference is tried: the replicas are given the numbers of plain PyTorch
there.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch.overrides import TorchFunctionMode

from torchstrategy._base.torch_internals import unseen_by_function_modes

_LIBRARIES = ("torch", "numpy")
_LARGEST = 2**22  # elements of a tensor that is remembered
_CLOSE = 1e-4  # the inputs of all replicas together, to those of plain PyTorch
_OF_ROWS = frozenset(
    {
        "mean",
        "std",
        "var",
        "sum",
        "norm",
        "amax",
        "amin",
        "nanmean",
        "nansum",
        "logsumexp",
        "median",
    }
)


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return (
            f"`{source}` (line {self.line} of {Path(self.file).name}, in "
            f"`{self.function}`)"
        )


class Key(NamedTuple):
    """One call: the place, the function, and which of its calls there it is."""

    place: Place
    function: str
    number: int


class Call(NamedTuple):
    """What was reduced, and what became of it."""

    rows: torch.Tensor
    result: torch.Tensor
    needs_gradient: bool


Calls = dict[Key, Call]


@final
class RowStatistics:
    """Notes, in a comparison, the calls that make one number of several rows.

    It may give replicas the results of plain PyTorch.

    Args:
        given: The calls of plain PyTorch at each step, whose results the replicas get.
        places: Where they get them.
    """

    def __init__(
        self, given: Sequence[Calls] = (), places: frozenset[Place] = frozenset()
    ) -> None:
        self.plain: list[Calls] = []
        self.replicas: list[dict[int, Calls]] = []
        self._given = given
        self._places = places

    def in_plain(self) -> AbstractContextManager[object]:
        """The block of a step in plain PyTorch."""
        self.plain.append({})
        return _Watch(self.plain[-1], lambda key: None)

    def next_step(self) -> None:
        """Says that replicas begin a step."""
        self.replicas.append({})

    def in_replica(self, replica: int) -> AbstractContextManager[object]:
        """The block of a step in a replica."""
        step = len(self.replicas) - 1
        given = self._given[step] if step < len(self._given) else {}
        known = {
            key: call.result for key, call in given.items() if key.place in self._places
        }
        return _Watch(self.replicas[-1].setdefault(replica, {}), known.get)

    def differing(self) -> dict[Place, bool]:
        """Where replicas and plain PyTorch reduced the same rows to other numbers.

        It also says whether gradients flow through the place.
        """
        found: dict[Place, bool] = {}
        for plain, replicas in zip(self.plain, self.replicas, strict=False):
            for key, call in plain.items():
                theirs = [
                    calls[key] for _, calls in sorted(replicas.items()) if key in calls
                ]
                if len(theirs) != len(replicas) or not _reduces_the_same_rows(
                    call, theirs
                ):
                    continue
                # A scalar with a gradient may be the loss itself, or a part of it:
                # there other causes are looked for.
                if not call.needs_gradient or (
                    call.result.dim() and key.function in _OF_ROWS
                ):
                    found[key.place] = (
                        found.get(key.place, False) or call.needs_gradient
                    )
        return found


class _Watch(TorchFunctionMode):
    def __init__(
        self, calls: Calls, given: Callable[[Key], torch.Tensor | None]
    ) -> None:
        super().__init__()
        self._calls = calls
        self._given = given
        self._counter: Counter[tuple[Place, str]] = Counter()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        rows = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if (
            not isinstance(result, torch.Tensor)
            or rows is None
            or not _may_reduce(rows, result)
        ):
            return result
        place = _place_of(sys._getframe(1))
        if place is None:
            return result
        name = getattr(func, "__name__", str(func))
        key = Key(place, name, self._counter[place, name])
        self._counter[place, name] += 1
        with unseen_by_function_modes():
            self._calls[key] = Call(
                _copied(rows), _copied(result), result.requires_grad
            )
            given = self._given(key)
            if given is None or given.shape != result.shape:
                return result
            given = given.to(result.device, result.dtype)
            # The gradient flows as it does in the replica: it is the value alone that
            # is another.
            return result + (given - result).detach() if result.requires_grad else given


def _may_reduce(rows: torch.Tensor, result: torch.Tensor) -> bool:
    if rows is result or not rows.dim() or max(rows.numel(), result.numel()) > _LARGEST:
        return False
    return (
        result.shape != rows.shape
        and result.device.type != "meta"
        and result.layout is torch.strided
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _place_of(frame: FrameType | None) -> Place | None:
    """The user's line that called torch, perhaps through layers of torch.

    It is None if the call is this library's.
    """
    while frame is not None:
        package = frame.f_globals.get("__name__", "").split(".")[0]
        if package == "torchstrategy":
            return None
        if package not in _LIBRARIES:
            return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def _reduces_the_same_rows(call: Call, theirs: Sequence[Call]) -> bool:
    """Whether replicas had the rows of plain PyTorch, and got other results.

    The replicas had these rows together, and each result has the shape of plain
    PyTorch's.
    """
    shapes = {(one.result.shape, one.rows.shape[1:]) for one in (call, *theirs)}
    if len(shapes) > 1:
        return False
    if sum(len(one.rows) for one in theirs) != len(call.rows):
        return False
    together = torch.cat([one.rows for one in theirs])
    if not _are_close(together, call.rows):
        return False
    return any(not torch.equal(one.result, call.result) for one in theirs)


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.double(), other.double()
    return float((one - other).norm()) <= _CLOSE * float(other.norm())
