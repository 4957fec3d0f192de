"""Parameters that shared their memory until their module was moved.

`.data` ties them, and they are trained apart.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of, parameters_of
from torchstrategy.testing._lints.evidence.modules import named_parameters
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import APPLY
from torchstrategy.testing._lints.weights.ties import have_one_gradient

Names = list[tuple[str, str]]
"""The names of two parameters each."""


@final
@dataclass(eq=False)
class _Lost:
    """Two parameters that have shared memory.

    Attributes:
        names: How their module calls them.
        moved_at: Where it was moved.
        first: One of them, while it is there.
        second: The other one.
    """

    names: tuple[str, str]
    moved_at: Place
    first: weakref.ref[torch.Tensor]
    second: weakref.ref[torch.Tensor]


class _Found(NamedTuple):
    names: tuple[str, str]
    steps_at: Place


@final
class LostTies(Lint):
    """Looks for two parameters of an optimizer that had one memory before `.to()`.

    They have a gradient each.

    One parameter under two names stays one. A tie that the program makes again after it
    has moved the module is there.
    """

    def __init__(self) -> None:
        self._lost: dict[int, list[_Lost]] = defaultdict(list)
        self._found: dict[Place, _Found] = {}

    @override
    def moved(self, facts: Facts, module: torch.nn.Module, ties: Names) -> None:
        named = dict(named_parameters(module))
        for names in ties:
            first, second = (named.get(name) for name in names)
            if (
                first is not None
                and second is not None
                and address_of(first) != address_of(second)
            ):
                self._lost[facts.rank].append(
                    _Lost(names, here(), weakref.ref(first), weakref.ref(second))
                )

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if not self._lost[facts.rank]:
            return
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        for lost in list(self._lost[facts.rank]):
            first, second = lost.first(), lost.second()
            if (
                first is None
                or second is None
                or address_of(first) == address_of(second)
            ):
                self._lost[facts.rank].remove(lost)
            elif (
                {id(first), id(second)} <= own
                and first.grad is not None
                and second.grad is not None
            ):
                self._lost[facts.rank].remove(lost)
                if not have_one_gradient(first, second):
                    self._found.setdefault(lost.moved_at, _Found(lost.names, here()))

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "tie-is-lost",
                f"{found.names[0]} and {found.names[1]} are two parameters, which had "
                f"the same memory until their module was moved ({moved_at}), and have "
                f"not since then. The optimizer updates both ({found.steps_at}), each "
                "with the gradient of its own use alone, and they part.",
                "Give both modules one parameter, as in `head.weight = embed.weight`, "
                "and not its `.data`. `.to()` keeps that.",
                [moved_at, found.steps_at],
            )
            for moved_at, found in self._found.items()
        ]


def _ties_of(module: torch.nn.Module) -> Names:
    """The names of parameters with the same memory that are not one parameter.

    They have the same layout, too.
    """
    known: dict[tuple[object, ...], str] = {}
    ties = []
    for name, parameter in named_parameters(module):
        address = address_of(parameter)
        if address and parameter.numel():
            first = known.setdefault(
                (address, parameter.dtype, parameter.shape, parameter.stride()), name
            )
            if first != name:
                ties.append((first, name))
    return ties


def replaced(tell: Callable[..., None]) -> list[tuple[Any, str, Any]]:
    """What tells of modules that are moved, in place of a function of torch."""
    apply = getattr(torch.nn.Module, APPLY)
    here_now = threading.local()

    @functools.wraps(apply)
    def moving(module: Any, *args: Any, **kwargs: Any) -> Any:
        # A module within another one.
        if getattr(here_now, "is_moving", False) or torch.compiler.is_compiling():
            return apply(module, *args, **kwargs)
        here_now.is_moving = True
        try:
            ties: Names = []
            # A module of the program's own may have parameters of another kind.
            with suppress(Exception):
                ties = _ties_of(module)
            result = apply(module, *args, **kwargs)
        finally:
            here_now.is_moving = False
        if ties:
            tell("moved", module, ties)
        return result

    return [(torch.nn.Module, APPLY, moving)]
