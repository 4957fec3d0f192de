"""Copies of tensors that several ranks have, and have to keep alike."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch

from torchstrategy.testing._lints.evidence.facts import Factor, Facts
from torchstrategy.testing._lints.evidence.fingerprints import (
    Fingerprint,
    fingerprint,
    of_sparse,
)
from torchstrategy.testing._lints.evidence.places import Place, here

Named = Mapping[str, torch.Tensor]
Prints = dict[str, Fingerprint | None]


class Way(NamedTuple):
    """How a rank came to a step.

    Attributes:
        was_called: Whether the model was called since the step before, through what
            wraps it.
        was_synchronized: Whether that was outside of `no_sync`.
        was_left_open: Whether the last call was in `no_sync`.
        was_awaited: Whether the step has read no gradient that a collective has still
            to write.
        skips: How many steps `GradScaler` has skipped until now.
        rates: The learning rates of the optimizer; None if they are not known.
        state: What the optimizer keeps of its first parameter: numbers, and what is
            kept of tensors, by name.
        is_own: Whether the program has made the step itself. It may have moved weights
            before, and back, which rounds.
    """

    was_called: bool = True
    was_synchronized: bool = True
    was_left_open: bool = False
    was_awaited: bool = True
    skips: int = 0
    rates: tuple[float, ...] | None = None
    state: Mapping[str, float | Fingerprint | None] = {}
    is_own: bool = False


@final
@dataclass
class Snapshot:
    """What one rank had after a step.

    Attributes:
        place: Where it made the step.
        values: What it had, by name.
        gradients: With what gradients the step was made.
        tensors: The tensors.
        way: How it came to the step.
        sparse: Of sparse gradients, checksums of their indices and of their values.
        factors: By what gradients were multiplied since the last `backward`, those that
            were.
        steps: How many steps the rank has made before.
    """

    place: Place
    values: Prints
    gradients: Prints
    tensors: dict[str, weakref.ref[torch.Tensor]]
    way: Way
    sparse: dict[str, tuple[int, int]] = field(default_factory=dict)
    factors: dict[str, Factor] = field(default_factory=dict)
    steps: int = 0


class Used(NamedTuple):
    """A gradient with which a step is made.

    Attributes:
        numbers: What is kept of it; None if there is none.
        sparse: Of a sparse one, checksums of its indices and of its values.
        factor: By what it was multiplied since the last `backward`.
    """

    numbers: Fingerprint | None
    sparse: tuple[int, int] | None
    factor: Factor | None


def gradient_used(facts: Facts, parameter: torch.Tensor) -> Used:
    """What is kept of the gradient of a parameter, as it is now."""
    gradient = facts.gradient_of(parameter)
    if (
        gradient is not None
        and type(gradient) is torch.Tensor
        and gradient.layout is torch.sparse_coo
    ):
        return Used(*of_sparse(gradient), None)
    # The step is made with what is in the flat tensor.
    numbers = (
        None
        if facts.address_of_gradient(parameter) in facts.apart
        else fingerprint(gradient)
    )
    return Used(numbers, None, facts.multiplied(gradient))


def snapshot(facts: Facts, named: Named, with_gradients: bool, way: Way) -> Snapshot:
    """What a rank has at the line where it is now."""
    gradients: Prints = {}
    sparse: dict[str, tuple[int, int]] = {}
    factors: dict[str, Factor] = {}
    for name, tensor in named.items() if with_gradients else ():
        if tensor.is_leaf:
            used: Used = facts.used.get(id(tensor)) or gradient_used(facts, tensor)
            gradients[name] = used.numbers
            if used.sparse is not None:
                sparse[name] = used.sparse
            if used.factor is not None:
                factors[name] = used.factor
    return Snapshot(
        here(),
        {name: fingerprint(tensor) for name, tensor in named.items()},
        gradients,
        {name: weakref.ref(tensor) for name, tensor in named.items()},
        way,
        sparse,
        factors,
        facts.steps,
    )


@final
@dataclass
class Parted:
    """Since when copies differ.

    Attributes:
        step: Since which step; 0: from the beginning.
        names: Which.
        ranks: The ranks that differ from the first.
        has_other_gradients: Whether their gradients were different.
        snapshots: What ranks had.
    """

    step: int
    names: list[str]
    ranks: list[int]
    has_other_gradients: bool
    snapshots: dict[int, Snapshot]


@final
@dataclass
class Copies:
    """The copies of some tensors.

    Attributes:
        key: The same in all ranks.
        ranks: Who has copies.
        is_wrapped: Whether `DistributedDataParallel` keeps them alike.
        may_differ: Whether nobody said that they are to be alike at the beginning: if
            they are not, they are no copies.
        is_a_guess: Whether only equal gradients can say that they are copies.
        begun: The names of the parameters that were there when they were wrapped.
        frozen: Those of them that had no gradient then.
        wrapped_at: Where that was.
        reduced_at: Where a collective of the program has reduced their gradients; None
            if none has.
        named: Finds the tensors of a rank, by name.
        steps: How many steps a rank has made with them.
        begun_after: How many steps a rank had made before it made the first one with
            them.
    """

    key: tuple[Any, ...]
    ranks: tuple[int, ...]
    is_wrapped: bool
    may_differ: bool = False
    is_a_guess: bool = False
    begun: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    wrapped_at: Place | None = None
    reduced_at: Place | None = None
    named: dict[int, Callable[[], Named]] = field(default_factory=dict)
    steps: Counter[int] = field(default_factory=Counter)
    begun_after: dict[int, int] = field(default_factory=dict)
    parted: Parted | None = None
    is_over: bool = False  # nothing more is to be compared
    began_alike: bool = False
    began_apart: bool = False
    was_compared: bool = False  # at the beginning
    # Of a guess that began alike: since some step, by gradients that differ.
    late: Parted | None = None
    # The steps before the last one in which gradients were alike, and no constants.
    last_alike: int = -1
    _waiting: dict[float, dict[int, Snapshot]] = field(default_factory=dict)
    # Those that differ, until the end.
    _kept: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _is_rounded: bool = False
    _beginning: dict[int, Snapshot] = field(default_factory=dict)

    def add(self, rank: int, step: float, snapshot: Snapshot) -> None:
        """Adds what a rank has after a step, and compares it with what others have.

        It does so once all have made the step.

        `step` is a half more before the next step, and 0 before the first.
        """
        if self.is_over or (
            step not in self._waiting and len(self._waiting) >= _MOST_WAITING
        ):
            return
        there = self._waiting.setdefault(step, {})
        there[rank] = snapshot
        if len(there) == len(self.ranks):
            del self._waiting[step]
            self._compare(step, there)

    def differ_at_last(self) -> bool:
        """Whether copies that have parted are still apart."""
        if self.parted is None or self.is_over:
            return False
        for tensors in self._kept.values():
            prints = {fingerprint(tensor) for tensor in tensors}
            if len(tensors) == len(self.ranks) and len(prints) > 1:
                return True
        return not any(
            len(tensors) == len(self.ranks) for tensors in self._kept.values()
        )

    def _compare(self, step: float, there: dict[int, Snapshot]) -> None:
        first = there[self.ranks[0]]
        self.was_compared = self.was_compared or step == 0
        others = {rank: there[rank] for rank in self.ranks[1:]}
        names = [
            name
            for name in first.values
            if any(_are_unlike(first, other, name) for other in others.values())
        ]
        if first.way.is_own and not any(
            _are_far(first, other, names) for other in others.values()
        ):
            names = []
        if not names:
            # Copies that come together again are trained apart on purpose, as by
            # averaging each few steps.
            self.is_over = (
                self.parted is not None and self.parted.names[0] in first.values
            )
            self.began_alike = self.began_alike or (
                step == 0 and all(map(_is_drawn, first.values.values()))
            )
            if step >= 1 and _have_one_gradient(first, others):
                self.last_alike = first.steps
            return
        if self.is_a_guess:
            self._guess(step, there, names)
            return
        if step == 0 and self.may_differ:
            self.is_over = self.began_apart = True
            return
        if self.parted is not None:
            return
        apart = [
            name
            for name in names
            if any(
                _have_other_gradients(first, other, name) for other in others.values()
            )
        ]
        if not apart and (
            self._is_rounded
            or any(_are_rounded(first, other, names) for other in others.values())
        ):
            self._is_rounded = True  # each rank adds in an order of its own
            return
        apart_or_all = apart or names
        ranks = [
            rank
            for rank, other in others.items()
            if any(_are_unlike(first, other, name) for name in names)
        ]
        self._part(Parted(int(step), apart_or_all, ranks, bool(apart), there), there)

    def _guess(self, step: float, there: dict[int, Snapshot], names: list[str]) -> None:
        """Other weights have other gradients: if they are alike, they were reduced."""
        if step == 0:
            self._beginning = there
            self.began_apart = any(map(_is_drawn, there[self.ranks[0]].values.values()))
        elif self.began_alike and self.late is None:
            mine = there[self.ranks[0]]
            others = [
                rank
                for rank in self.ranks[1:]
                if _have_other_gradients(mine, there[rank], names[0])
            ]
            if others and all(
                one.gradients.get(names[0]) is not None for one in there.values()
            ):
                self.late = Parted(int(step), names, others, True, there)
        elif self._beginning and self.parted is None:
            prints = [
                there[rank].gradients.get(name) for rank in self.ranks for name in names
            ]
            first = prints[0]
            if (
                first is not None
                and any(first.sample)
                and all(one == first for one in prints)
            ):
                self._part(
                    Parted(0, names, list(self.ranks[1:]), False, self._beginning),
                    there,
                )

    def _part(self, parted: Parted, there: dict[int, Snapshot]) -> None:
        self.parted = parted
        for name in parted.names[:_MOST_KEPT]:
            # A buffer may be on some ranks alone.
            held = [there[rank].tensors.get(name) for rank in self.ranks]
            found = [tensor() for tensor in held if tensor is not None]
            self._kept[name] = [tensor for tensor in found if tensor is not None]


_MOST_KEPT, _MOST_WAITING = 8, 64  # a rank that waits for nobody may be far ahead


def _is_drawn(value: Fingerprint | None) -> bool:
    return value is not None and value.is_drawn


def _are_unlike(first: Snapshot, other: Snapshot, name: str) -> bool:
    mine, theirs = first.values[name], other.values.get(name)
    return mine is not None and theirs is not None and mine != theirs


def _are_far(first: Snapshot, other: Snapshot, names: list[str]) -> bool:
    """Whether numbers differ by more than rounding."""
    pairs = [(first.values[name], other.values.get(name)) for name in names]
    return any(
        mine is None or theirs is None or not mine.is_close_to(theirs)
        for mine, theirs in pairs
    )


def _have_other_gradients(first: Snapshot, other: Snapshot, name: str) -> bool:
    mine, theirs = first.gradients.get(name), other.gradients.get(name)
    if mine is None or theirs is None:
        return mine is not theirs
    return not mine.is_close_to(theirs)


def _have_one_gradient(first: Snapshot, others: Mapping[int, Snapshot]) -> bool:
    """Whether ranks made a step with gradients that are alike, and no constants."""
    if not first.gradients or not all(map(_is_drawn, first.gradients.values())):
        return False
    names, there = list(first.gradients), list(others.values())
    return not any(
        _have_other_gradients(first, other, name) for other in there for name in names
    )


def _are_rounded(first: Snapshot, other: Snapshot, names: list[str]) -> bool:
    """Whether gradients differ by rounding, or, of what has none, the numbers do."""
    for name in names:
        mine, theirs = first.gradients.get(name), other.gradients.get(name)
        if mine != theirs:
            return True
        value, others = first.values[name], other.values.get(name)
        if (
            mine is None
            and value is not None
            and others is not None
            and not value.is_close_to(others)
        ):
            return False
    return all(first.gradients.get(name) is None for name in names)
