"""What a module writes on itself where `nn.DataParallel` runs replicas of it, and throws them away."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
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
State = dict[tuple[str, str], Any]
"""What replicas hold, by the name of the module in them and the name of the attribute."""


class _Lost(NamedTuple):
    kind: str
    name: str
    called_at: Place


@final
class ThrownReplicas(Lint):
    """Compares what replicas hold after they have run with what they held before.

    Counts, such as `self.steps += 1`, and buffers that are replaced, as by `self.mean = 0.9 * self.mean + ...`. What a
    module writes and reads in one call is nobody's loss.
    """

    def __init__(self) -> None:
        self._lost: Counter[_Lost] = Counter()

    @override
    def ran_replicas(self, facts: Facts, replica: nn.Module, before: State) -> None:
        modules = dict(modules_in(replica))
        place = here()
        for (prefix, name), value in state_of(replica).items():
            old = before.get((prefix, name))
            if old is not None and _is_other(value, old) and _counts_on(modules[prefix], name):
                self._lost[_Lost(type(modules[prefix]).__name__, name, place)] += 1

    @override
    def findings(self) -> list[Finding | None]:
        by_place: dict[Place, list[_Lost]] = {}
        for lost, times in self._lost.items():
            if times >= _ENOUGH:
                by_place.setdefault(lost.called_at, []).append(lost)
        return [
            finding(
                "written-on-a-replica",
                f"`nn.DataParallel` ({place}) runs replicas of the model, and throws them away after each call. With "
                f"them goes what they write on themselves: {some([f'{one.kind}.{one.name}' for one in those])}. It has "
                "its first value again in the next call.",
                "Write it outside of the model, before the call; or `buffer.add_(1)` in place, which the first device "
                "keeps.",
                [place],
            )
            for place, those in by_place.items()
        ]


def state_of(replica: nn.Module) -> State:
    """The numbers and the buffers of a replica."""
    found: State = {}
    for prefix, module in modules_in(replica):
        numbers = [(name, value) for name, value in named_in(module).items() if type(value) in (int, float)]
        found |= {(prefix, name): value for name, value in (*numbers, *own_buffers(module))}
    return found


def _counts_on(module: nn.Module, name: str) -> bool:
    """Whether the class of a module computes an attribute from its own value, and nowhere sets it anew in a call."""
    with suppress(OSError, TypeError, SyntaxError):  # it has no source
        made = ast.parse(textwrap.dedent(inspect.getsource(type(module))))
        methods = [one for one in ast.walk(made) if isinstance(one, ast.FunctionDef) and one.name != "__init__"]
        kinds = {_kind(one, name) for method in methods for one in ast.walk(method)}
        return "counts" in kinds and "sets" not in kinds
    return False


def _kind(node: ast.AST, name: str) -> str | None:
    """What a statement does to `self.name`: it counts on it, or sets it anew."""
    if isinstance(node, ast.AugAssign):
        return "counts" if _is_own(node.target, name) else None
    if isinstance(node, ast.Assign) and any(_is_own(target, name) for target in node.targets):
        return "counts" if any(_is_own(one, name) for one in ast.walk(node.value)) else "sets"
    return None


def _is_own(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _is_other(value: Any, old: Any) -> bool:
    """Whether a number is another one, or a buffer has other numbers."""
    if not isinstance(value, torch.Tensor) or not isinstance(old, torch.Tensor):
        return bool(value != old)
    return value is not old and fingerprint(value) != fingerprint(old)
