"""What a module writes on itself in replicas of `nn.DataParallel`.

`nn.DataParallel` throws these replicas away.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import named_in
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import fingerprint
from torchstrategy.testing._lints.evidence.modules import modules_in, own_buffers
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.lint import Lint

_ENOUGH = 2  # calls
# Whose sources are kept, and what was asked of them.
_MOST_CLASSES, _MOST_ANSWERS = 64, 1024
# With these a buffer keeps a part of what it was, and gets a sum.
_ADDING = ("add_", "mul_", "div_")
_AVERAGING = {
    "mean",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "amax",
    "amin",
    "max",
    "min",
    "norm",
}
_LOST = (
    "With them goes what they write on themselves: {names}. It has its first value "
    "again in the next call."
)
_WRITE = (
    "Write it outside of the model, before the call; or `buffer.add_(1)` in place, "
    "which the first device keeps."
)
_LOST_IN_PART = (
    "Of what they add to {names}, the model keeps what the rows of the first device "
    "say; that of the others is lost."
)
_RETURN = (
    "Return from `forward` what is added, and add it outside, where the results of all "
    "devices are together; or use `DistributedDataParallel`, and reduce it."
)
State = dict[tuple[str, str], Any]
"""What replicas hold, by the names of the module in them and of the attribute."""


class _Lost(NamedTuple):
    kind: str
    name: str
    called_at: Place


@final
class ThrownReplicas(Lint):
    """Compares what replicas hold after they have run with what they held before.

    Counts, such as `self.steps += 1`, and buffers that are replaced, as by `self.mean =
    0.9 * self.mean + ...`. What a module writes and reads in one call is nobody's loss.
    A buffer of the first device that is written in place is that of the model, and
    keeps what the rows of this device have added; what those of the others have added
    is lost.
    """

    def __init__(self) -> None:
        self._lost: Counter[_Lost] = Counter()
        self._lost_in_part: Counter[_Lost] = Counter()

    @override
    def ran_replicas(
        self, facts: Facts, replicas: Sequence[nn.Module], before: State
    ) -> None:
        modules, other = dict(modules_in(replicas[0])), state_of(replicas[1])
        place = here()
        for (prefix, name), value in state_of(replicas[0]).items():
            kind: type = type(modules[prefix])
            old = before.get((prefix, name))
            lost = _Lost(kind.__name__, name, place)
            if old is not None and _is_other(value, old) and _counts_on(kind, name):
                self._lost[lost] += 1
            elif (
                value is old
                and _adds_in_place(kind, name)
                and _have_parted(value, other.get((prefix, name)))
            ):
                self._lost_in_part[lost] += 1

    @override
    def findings(self) -> list[Finding | None]:
        lost = [
            _finding(place, names, _LOST, _WRITE) for place, names in _named(self._lost)
        ]
        return lost + [
            _finding(place, names, _LOST_IN_PART, _RETURN)
            for place, names in _named(self._lost_in_part)
        ]


def _named(counts: Counter[_Lost]) -> Iterator[tuple[Place, str]]:
    """The places of calls, and the names of what was lost there in several of them."""
    by_place: dict[Place, list[str]] = {}
    for lost, times in counts.items():
        if times >= _ENOUGH:
            by_place.setdefault(lost.called_at, []).append(f"{lost.kind}.{lost.name}")
    for place, names in by_place.items():
        yield place, some(names)


def _finding(place: Place, names: str, what: str, write: str) -> Finding | None:
    return finding(
        "written-on-a-replica",
        f"`nn.DataParallel` ({place}) runs replicas of the model, and throws them away "
        f"after each call. {what.format(names=names)}",
        write,
        [place],
    )


def state_of(replica: nn.Module) -> State:
    """The numbers and the buffers of a replica."""
    found: State = {}
    for prefix, module in modules_in(replica):
        numbers = [
            (name, value)
            for name, value in named_in(module).items()
            if type(value) in (int, float)
        ]
        found |= {
            (prefix, name): value for name, value in (*numbers, *own_buffers(module))
        }
    return found


def _counts_on(kind: type, name: str) -> bool:
    """Whether a class of modules computes an attribute from its own value.

    It nowhere sets the attribute anew in a call.
    """
    kinds = {_kind(node, name) for node in _nodes_of(kind)}
    return "counts" in kinds and "sets" not in kinds


@functools.lru_cache(_MOST_ANSWERS)
def _adds_in_place(kind: type, name: str) -> bool:
    """Whether a class of modules adds sums to an attribute in place.

    It nowhere writes over what it was.

    A mean of the rows of one device is nearly that of all, and some programs take it,
    as batch norm does.
    """
    calls = [
        node
        for node in _nodes_of(kind)
        if isinstance(node, ast.Call) and _is_called_on(node.func, name)
    ]
    methods = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
    writes_over = any(
        method.endswith("_") and not method.startswith("_")
        for method in methods - set(_ADDING)
    )
    added = _with_assigned(kind, [value for call in calls for value in call.args])
    asked = {
        node.attr
        for value in added
        for node in ast.walk(value)
        if isinstance(node, ast.Attribute)
    }
    return (
        "add_" in methods
        and "sum" in asked
        and not writes_over
        and not asked & _AVERAGING
    )


def _is_called_on(function: ast.AST, name: str) -> bool:
    """Whether a method is called on `self.name`, or on what its methods return.

    `self.name.mul_(0.9)` is such a call.
    """
    while isinstance(function, ast.Attribute):
        if _is_own(function, name):
            return True
        function = (
            function.value.func
            if isinstance(function.value, ast.Call)
            else function.value
        )
    return False


def _with_assigned(kind: type, values: list[ast.expr]) -> list[ast.expr]:
    """Some expressions in the methods of a class, and what their variables are.

    That is what is assigned there to the variables.
    """
    names = {name for value in values for name in _variables_in(value)}
    assigned = [node for node in _nodes_of(kind) if isinstance(node, ast.Assign)]
    return values + [
        node.value
        for node in assigned
        if any(names & _variables_in(target) for target in node.targets)
    ]


def _variables_in(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


@functools.lru_cache(_MOST_CLASSES)
def _nodes_of(kind: type) -> list[ast.AST]:
    """What the methods of a class are made of, but for `__init__`.

    It is nothing of one that has no source, or is torch's.
    """
    # Batch norm keeps the statistics of the first device, as is said.
    if kind.__module__.partition(".")[0] == "torch":
        return []
    with suppress(OSError, TypeError, SyntaxError):
        made = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        methods = [
            one
            for one in ast.walk(made)
            if isinstance(one, ast.FunctionDef) and one.name != "__init__"
        ]
        return [node for method in methods for node in ast.walk(method)]
    return []


def _kind(node: ast.AST, name: str) -> str | None:
    """What a statement does to `self.name`: it counts on it, or sets it anew."""
    if isinstance(node, ast.AugAssign):
        return "counts" if _is_own(node.target, name) else None
    if isinstance(node, ast.Assign) and any(
        _is_own(target, name) for target in node.targets
    ):
        return (
            "counts"
            if any(_is_own(one, name) for one in ast.walk(node.value))
            else "sets"
        )
    return None


def _is_own(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _have_parted(value: Any, other: Any) -> bool:
    """Whether a buffer of floating-point numbers is another one on another device."""
    if (
        not isinstance(value, torch.Tensor)
        or not isinstance(other, torch.Tensor)
        or not value.is_floating_point()
    ):
        return False
    return fingerprint(value) != fingerprint(other)


def _is_other(value: Any, old: Any) -> bool:
    """Whether a number is another one, or a buffer has other numbers."""
    if not isinstance(value, torch.Tensor) or not isinstance(old, torch.Tensor):
        return bool(value != old)
    return value is not old and fingerprint(value) != fingerprint(old)
