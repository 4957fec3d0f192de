"""Models that all ranks call without gradients, and that differ by rank.

Nothing says that they should differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import (
    Facts,
    Model,
    parameters_of,
    tensors_in,
)
from torchstrategy.testing._lints.evidence.fingerprints import Fingerprint, fingerprint
from torchstrategy.testing._lints.evidence.known import Known, version_of
from torchstrategy.testing._lints.evidence.modules import parameters_in
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here, way_here
from torchstrategy.testing._lints.findings import Finding, finding, named_ranks
from torchstrategy.testing._lints.layers.batch_norm import BATCH_NORMS
from torchstrategy.testing._lints.lint import Follower, Seen
from torchstrategy.testing._lints.weights.untrained_copies import (
    Called,
    CalledModules,
    Prints,
)
from torchstrategy.testing._ranks.witnesses import Told

_COLLECTIVES = ("all_reduce", "reduce", "all_gather", "gather")
_MOST_KEPT = 8  # looks at one model that differs, and collectives after one look
_aten = torch.ops.aten
# The first operators of layers. In inference mode torch does not take `linear` and
# others apart.
_LAYERS = (
    *(
        _aten.addmm.default,
        _aten.mm.default,
        _aten.linear.default,
        _aten.matmul.default,
        _aten.embedding.default,
    ),
    *(
        _aten.convolution.default,
        _aten.conv1d.default,
        _aten.conv2d.default,
        _aten.conv3d.default,
    ),
    *(_aten.native_layer_norm.default, _aten.layer_norm.default),
    *(_aten.native_group_norm.default, _aten.group_norm.default),
    *BATCH_NORMS,
)


@final
@dataclass(eq=False)
class _Look:
    """A rank calls a model without gradients.

    Attributes:
        called: The model.
        place: Where.
        steps: How many steps the rank had made.
        values: What the model was.
        rows: What its first layer got.
        reduced: Where collectives of the program came after it, before the next
            `backward`, by their keys.
        used_at: Where something with gradients is computed from what the model has
            returned.
    """

    called: Called
    place: Place
    steps: int
    values: Prints
    rows: Fingerprint
    reduced: dict[Hashable, Place] = field(default_factory=dict)
    used_at: Place | None = None


class _Difference(NamedTuple):
    names: list[str]
    numbers: tuple[float, float]
    ranks: tuple[int, int]


@final
class UnlikeModels(Follower):
    """Compares the models that ranks train together, and untrained copies of parts.

    It does where all ranks call them.

    That is a mistake if ranks call them with other rows, and their results come
    together: in a collective, or in the loss of the model that they train together.
    Each of these has right programs without the other: ranks may evaluate models of
    their own on the same rows, and only one of them may use what it gets. A copy has to
    follow the model: another rank may have another teacher or opponent, which is loaded
    and then stays as it is.
    """

    def __init__(self, have_parted: Callable[[tuple[Any, ...]], bool]) -> None:
        """`have_parted` says whether the trained weights of a model have parted.

        Then another lint names that.
        """
        self._have_parted = have_parted
        # By rank, what is computed from what a copy has returned.
        self._pieces: dict[int, Known[_Look]] = {}
        self._modules: dict[int, CalledModules] = defaultdict(CalledModules)
        self._optimizers: dict[int, Objects[torch.optim.Optimizer, None]] = defaultdict(
            Objects
        )
        # By rank and parameter: after how many steps.
        self._loads: dict[int, Known[list[int]]] = defaultdict(Known)
        # By rank, since the last `backward`.
        self._open: dict[int, list[_Look]] = defaultdict(list)
        self._waiting: dict[Hashable, dict[int, _Look]] = defaultdict(dict)
        self._apart: dict[Hashable, list[dict[int, _Look]]] = defaultdict(list)

    @override
    def operators(self) -> dict[Any, Seen]:
        return dict.fromkeys(_LAYERS, self._calls)

    @override
    def made(self, facts: Facts, model: Model) -> None:
        self._modules[facts.rank].add(model)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if (
            facts.models
            or not facts.reducers
            or optimizer in self._optimizers[facts.rank]
        ):
            return
        self._optimizers[facts.rank][optimizer] = None
        first = next(
            (one for one in parameters_of(optimizer) if one.grad is not None), None
        )
        if first is not None:
            self._modules[facts.rank].add_owner(first, facts.reducers)

    @override
    def restored(
        self, facts: Facts, module: nn.Module, state: dict[str, Any], misfits: Any
    ) -> None:
        loads = self._loads[facts.rank]
        for parameter in parameters_in(module) if facts.size > 1 else ():
            loads.put(parameter, [*(loads.get(parameter) or []), facts.steps])

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if is_of_torch or told.kind not in _COLLECTIVES:
            return
        for look in self._open[facts.rank]:
            is_mean = "reduce" in told.kind and not told.detail.startswith("sum")
            if is_mean and not look.called.trained.is_wrapped:
                continue  # of models that each rank has for rows of its own kind
            if len(look.reduced) < _MOST_KEPT:
                look.reduced[told.key] = here()

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        pieces = self._pieces[facts.rank]
        given = list(tensors_in((*args, *kwargs.values())))
        look = next(
            (look for tensor in given if (look := pieces.get(tensor)) is not None), None
        )
        if look is None:
            return
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            look.used_at = here()
            del self._pieces[facts.rank]
            return
        for made in tensors_in((result,)):
            pieces.put(made, look)

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        self._open.pop(facts.rank, None)
        self._pieces.pop(facts.rank, None)

    @override
    def findings(self) -> list[Finding | None]:
        found: dict[tuple[Place, ...], Finding | None] = {}
        for kept in self._apart.values():
            for looks in kept:
                places = _places_of_a_mistake(looks)
                if places and not self._is_named(looks):
                    found.setdefault(tuple(places), _finding(looks, places))
                    break
        return list(found.values())

    def _is_named(self, looks: dict[int, _Look]) -> bool:
        """Whether another lint names what differs: weights that are trained."""
        trained = next(iter(looks.values())).called.trained
        if trained.is_wrapped:
            return self._have_parted(trained.key)
        difference = _difference(looks)
        return difference is None or not all(
            _is_statistic(name) for name in difference.names
        )

    def _calls(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        modules = self._modules.get(facts.rank)
        if not modules:
            return
        for parameter in map(_parameter_of, args):
            called = None if parameter is None else modules.of(parameter)
            if (
                parameter is None
                or called is None
                or id(parameter) not in called.entries
            ):
                continue
            if called.part is None and torch.is_grad_enabled():
                called.trains = facts.steps
            elif torch.is_grad_enabled() and parameter.requires_grad:
                called.is_trained = True
            elif not called.is_trained and called.trains != facts.steps:
                # Weights that are adapted to the rows of a rank have gradients before.
                self._look(facts, called, parameter, args, result)
            return

    def _look(
        self,
        facts: Facts,
        called: Called,
        parameter: nn.Parameter,
        args: Sequence[Any],
        result: torch.Tensor,
    ) -> None:
        way = way_here()
        if called.last.get(way) == facts.steps:
            return
        called.last[way] = facts.steps
        called.counts[way] += 1
        number = called.counts[way]
        # The numbers of all parameters are read: not at each step.
        if number & (number - 1):
            return
        rows = next(
            (
                one
                for one in args
                if isinstance(one, torch.Tensor) and _parameter_of(one) is None
            ),
            None,
        )
        given = fingerprint(rows)
        if given is None:
            return
        look = _Look(called, way[0], facts.steps, called.prints(), given)
        self._follow(facts, called, look, parameter)
        self._open[facts.rank].append(look)
        pieces = self._pieces.setdefault(facts.rank, Known())
        for made in tensors_in((result,)):
            pieces.put(made, look)
        trained = called.trained
        key = trained.key, called.part, called.number, way, facts.steps
        there = self._waiting[key]
        there[facts.rank] = look
        if len(there) == len(trained.ranks):
            del self._waiting[key]
            kept = self._apart[key[:4]]
            if (
                len(kept) < _MOST_KEPT
                and _have_other_rows(there)
                and _difference(there) is not None
            ):
                kept.append(there)

    def _follow(
        self, facts: Facts, called: Called, look: _Look, parameter: nn.Parameter
    ) -> None:
        """Notes whether a copy is written on, except by a checkpoint that it loads."""
        loads = self._loads[facts.rank].get(parameter) or []
        writes = version_of(parameter)
        if called.first is None:
            called.first = look.values
        # As one opponent after the other is.
        is_loaded_again = len(loads) > 1 or any(loads)
        called.has_moved = not is_loaded_again and (
            called.first != look.values or writes > len(loads)
        )


def _parameter_of(tensor: Any) -> nn.Parameter | None:
    """The parameter that a tensor is, or of which it is a view.

    The transposed weight of `nn.Linear` is such a view.
    """
    if isinstance(tensor, nn.Parameter):
        return tensor
    base = tensor._base if isinstance(tensor, torch.Tensor) else None
    return base if isinstance(base, nn.Parameter) else None


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _have_other_rows(looks: dict[int, _Look]) -> bool:
    return len({look.rows for look in looks.values()}) > 1


def _difference(looks: dict[int, _Look]) -> _Difference | None:
    """What differs between the first rank and another one.

    It is None if nothing does by more than rounding.
    """
    first, *others = sorted(looks)
    mine = looks[first].values
    for rank in others:
        theirs = looks[rank].values
        names = [name for name in mine if _are_unlike(mine[name], theirs.get(name))]
        if names:
            a, b = mine[names[0]], theirs[names[0]]
            assert a is not None and b is not None  # else they are not unlike
            numbers = max(
                zip(a.sample, b.sample, strict=False),
                key=lambda pair: abs(pair[0] - pair[1]),
            )
            return _Difference(names, numbers, (first, rank))
    return None


def _are_unlike(mine: Fingerprint | None, theirs: Fingerprint | None) -> bool:
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return False
    return not mine.is_close_to(theirs)


def _places_of_a_mistake(looks: dict[int, _Look]) -> list[Place]:
    """Where a model that differs was called, and where results come together.

    It is nothing if that may be meant.
    """
    first = looks[min(looks)]
    called = first.called
    follows = called.part is None or any(
        look.called.has_moved for look in looks.values()
    )
    if not follows and (first.steps or first.values != called.begun()):
        return []
    if all(look.used_at is not None for look in looks.values()):
        assert first.used_at is not None
        return [first.place, first.used_at]
    together = set.intersection(*(set(look.reduced) for look in looks.values()))
    place = next(
        (place for key, place in first.reduced.items() if key in together), None
    )
    return [first.place, place] if place is not None and first.steps else []


def _finding(looks: dict[int, _Look], places: list[Place]) -> Finding | None:
    difference = _difference(looks)
    assert difference is not None  # else they would not have been kept
    first = looks[min(looks)]
    called = first.called
    names, (one, other), (mine, theirs) = difference
    if called.part is None:
        what = (
            "the model that DistributedDataParallel has wrapped"
            if called.trained.is_wrapped
            else "a trained model"
        )
    else:
        what = (
            f"a copy of {called.part!r} of the trained model"
            if called.part
            else "a copy of the trained model"
        )
    how = (
        "their results come together"
        if first.used_at is None
        else "the loss is made of what it returns"
    )
    return finding(
        "models-differ",
        f"All {len(looks)} ranks call {what} without gradients ({places[0]}), each "
        f"with other rows, and {how} ({places[1]}). But it is another model on each "
        f"rank: {names[0]} has {one:.4g} on rank {mine} where it has {other:.4g} on "
        "rank "
        f"{theirs}{f', and {len(names) - 1} more differ' if len(names) > 1 else ''}.",
        _mend(looks, names),
        places,
    )


def _mend(looks: dict[int, _Look], names: list[str]) -> str:
    first = looks[min(looks)]
    if first.called.part is None:
        if _is_statistic(names[0]):
            is_wrapped = first.called.trained.is_wrapped
            why = (
                "The wrapper was told not to broadcast buffers"
                if is_wrapped
                else "No collective reduces buffers"
            )
            return (
                f"{why}, and each rank has the statistics of its own rows. Give all "
                "ranks the same ones before you evaluate, `for b in model.buffers(): "
                "dist.broadcast(b, 0)`, or their mean."
            )
        return (
            "Write on the weights of all ranks, or `for p in model.parameters(): "
            "dist.broadcast(p.data, 0)`."
        )
    broadcast = "`for p in copy.parameters(): dist.broadcast(p.data, 0)`"
    stayed = [
        rank for rank, look in looks.items() if look.steps and not look.called.has_moved
    ]
    if stayed and len(stayed) < len(looks):
        return (
            f"On {named_ranks(sorted(stayed))} it is still as it was made. Update it "
            "on all ranks, or give all ranks the weights of one before they call it: "
            f"{broadcast}."
        )
    return (
        "Make the copy after `DistributedDataParallel(model)`, which gives all ranks "
        f"the weights of rank 0, or {broadcast}."
    )
