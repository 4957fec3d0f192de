"""Training from a checkpoint with an optimizer that has forgotten what it knew."""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.checkpoints.checkpoints import (
    Checkpoint,
    Checkpoints,
    is_moment,
)
from torchstrategy.testing._lints.evidence.asking import asked, named_in
from torchstrategy.testing._lints.evidence.facts import Facts, parameters_of
from torchstrategy.testing._lints.evidence.modules import parameters_in
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, calls_of_the_user, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint

_LEAST = 2  # loops of training that begins anew start at 0 or 1
_MOST = 0.9  # of the parameters of an optimizer: a new head has values of its own
_POSITION = re.compile(r"(^|_)(epochs?|steps?|iters?|iterations?|it|updates?)(_|$)")
_LENGTH = re.compile(
    r"(^|_)(max|total|warmup|best|every|per|interval|accum\w*|patience)(_|$)"
)


class _Counter(NamedTuple):
    """A variable that counts, of a function of the program or of its `self`."""

    code: CodeType
    is_own: bool
    name: str


@dataclass(eq=False)
class _Resume:
    """An optimizer that has made its first step after its parameters were loaded.

    Attributes:
        checkpoint: From where.
        restored: Where.
        kind: The name of its class.
        place: Where it steps.
        counters: What had a number of the checkpoint at the first step, or the next
            number, and the number now.
        began: The name and the number of the counter that goes on; None while there is
            none.
    """

    checkpoint: Checkpoint
    restored: Place
    kind: str
    place: Place
    counters: dict[_Counter, int]
    began: tuple[str, int] | None = None


@final
class Resumes(Lint):
    """Looks for counters that go on from a number of the checkpoint.

    The optimizer begins with an empty state meanwhile.

    Who takes the weights alone, to train them for something else, counts from the
    beginning.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        # Parameters, by id.
        self._trained: dict[int, dict[int, weakref.ref[Any]]] = defaultdict(dict)
        self._loaded: dict[
            int, dict[int, tuple[weakref.ref[Any], Checkpoint, Place]]
        ] = defaultdict(dict)
        self._sizes: Objects[Any, int] = Objects()
        self._resumes: Objects[Any, _Resume] = Objects()
        self._all: list[_Resume] = []

    @override
    def restored(
        self, facts: Facts, module: torch.nn.Module, state: dict[str, Any], misfits: Any
    ) -> None:
        checkpoint = self._checkpoints.of_tensors(facts, state.values())
        if checkpoint is None or not _positions(checkpoint):
            return
        parameters, place = parameters_in(module), here()
        trained = self._trained[facts.rank]
        if any(id(one) in trained and trained[id(one)]() is one for one in parameters):
            return  # it takes earlier weights back
        for one in parameters:
            self._loaded[facts.rank][id(one)] = weakref.ref(one), checkpoint, place

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        resume = self._resumes.get(optimizer)
        if resume is not None:
            _follow(resume)
            return
        loaded = self._loaded[facts.rank]
        if not loaded or optimizer in self._sizes:
            return
        parameters = parameters_of(optimizer)
        there = [
            loaded[id(one)]
            for one in parameters
            if id(one) in loaded and loaded[id(one)][0]() is one
        ]
        if not there or len(there) < _MOST * len(parameters) or _moments_of(optimizer):
            return
        _, checkpoint, restored = there[0]
        counters = {
            counter: value
            for counter, value in _counters()
            if _goes_on(value, checkpoint)
        }
        if counters:
            resume = _Resume(
                checkpoint, restored, type(optimizer).__name__, here(), counters
            )
            self._resumes[optimizer] = resume
            self._all.append(resume)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        parameters = parameters_of(optimizer)
        if self._sizes.get(optimizer) == len(parameters):
            return
        self._sizes[optimizer] = len(parameters)
        self._trained[facts.rank] |= {id(one): weakref.ref(one) for one in parameters}
        resume = self._resumes.get(optimizer)
        if resume is None:
            return
        moments, before = _moments_of(optimizer), resume.checkpoint.moments
        # It needs none, or is one of another kind, on purpose.
        if not moments or (before and not before & moments):
            self._all.remove(resume)
            del self._resumes[optimizer]

    @override
    def findings(self) -> list[Finding | None]:
        return [
            _finding(resume, *resume.began)
            for resume in self._all
            if resume.began is not None
        ]


def _finding(resume: _Resume, name: str, number: int) -> Finding | None:
    checkpoint = resume.checkpoint
    save = (
        ""
        if checkpoint.groups
        else "save `optimizer.state_dict()` in the checkpoint, and "
    )
    write = f"{save}call `optimizer.load_state_dict(...)` before you train."
    key = next(
        key
        for key, value in _positions(checkpoint).items()
        if number in (value, value + 1)
    )
    return finding(
        "optimizer-not-restored",
        f"The weights come from a checkpoint (loaded at {checkpoint.place}, used at "
        f"{resume.restored}), and training goes on from its `{key}` "
        f"{checkpoint.numbers[key]}: `{name}` was {number} in the first step "
        f"({resume.place}). The {resume.kind} has made that step with an empty state. "
        f"The checkpoint has {'a' if checkpoint.groups else 'no'} state for it.",
        f"{write[0].upper()}{write[1:]}",
        [resume.place, resume.restored, checkpoint.place],
    )


def _positions(checkpoint: Checkpoint) -> dict[str, int]:
    """How far training was when a checkpoint was saved."""
    numbers = checkpoint.numbers.items()
    return {
        name: value
        for name, value in numbers
        if value >= _LEAST and _POSITION.search(name) and not _LENGTH.search(name)
    }


def _goes_on(number: int, checkpoint: Checkpoint) -> bool:
    return any(
        number in (value, value + 1) for value in _positions(checkpoint).values()
    )


def _follow(resume: _Resume) -> None:
    """Looks whether the counters go on by one."""
    if resume.began is not None or not resume.counters:
        return
    now = dict(_counters({counter.code for counter in resume.counters}))
    for counter, before in list(resume.counters.items()):
        value = now.get(counter)
        if value == before + 1:
            resume.began = counter.name, before
        elif value != before:
            del resume.counters[counter]


def _counters(codes: set[CodeType] | None = None) -> Iterator[tuple[_Counter, int]]:
    """The whole numbers in variables of the program's functions, or the functions.

    The variables have them now.
    """
    for frame in calls_of_the_user():
        if codes is not None and frame.f_code not in codes:
            continue
        values = frame.f_locals
        own = named_in(values.get("self"))
        for is_own, named in ((False, values), (True, own)):
            for name, value in list(named.items()):
                if type(value) is int:
                    yield _Counter(frame.f_code, is_own, name), value


def _moments_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """What an optimizer knows of each number of its parameters."""
    nothing: list[Any] = []
    return {
        name
        for known in asked(lambda: list(optimizer.state.values()), nothing)
        if isinstance(known, dict)
        for name, value in known.items()
        if is_moment(value)
    }
