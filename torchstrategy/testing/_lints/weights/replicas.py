"""Weights that differ between ranks.

They do at the beginning, by gradients that were not reduced, or by something else.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import asked
from torchstrategy.testing._lints.evidence.copies import (
    Copies,
    Named,
    Parted,
    Way,
    snapshot,
)
from torchstrategy.testing._lints.evidence.facts import (
    Facts,
    Model,
    address_of,
    parameters_of,
)
from torchstrategy.testing._lints.evidence.fingerprints import (
    Fingerprint,
    can_be_read,
    fingerprint,
    number_of,
)
from torchstrategy.testing._lints.evidence.modules import (
    has_statistics,
    joined,
    longest_names,
    modules_in,
    named_parameters,
    nameless,
    own_buffers,
)
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.own_steps import OwnOptimizer
from torchstrategy.testing._lints.evidence.places import Place, here, in_words
from torchstrategy.testing._lints.findings import (
    Finding,
    finding,
    listed_ranks,
    named_ranks,
    some,
)
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.optimizers.scheduled import rates_of
from torchstrategy.testing._lints.torch_internals import ignored_names, is_persistent
from torchstrategy.testing._lints.weights.causes import (
    cause_of,
    cause_of_other_updates,
    skipped_apart,
)
from torchstrategy.testing._lints.weights.left_out import LeftOut
from torchstrategy.testing._lints.weights.multiplied_apart import multiplied_apart
from torchstrategy.testing._ranks.witnesses import Told

# Of programs whose ranks have parts of a model.
_EXCHANGING = ("all_to_all", "send", "recv")


class _Shared(NamedTuple):
    """Memory that a collective of the program has made alike on several ranks."""

    storage: weakref.ref[Any]
    size: int
    key: tuple[Any, ...]
    ranks: tuple[int, ...]
    steps: int  # that the rank had made
    place: Place


class _Part(NamedTuple):
    """A gradient that the program has reduced as a part of a larger tensor."""

    key: tuple[Any, ...]
    ranks: tuple[int, ...]
    place: Place


@final
class Replicas(Lint):
    """Compares the parameters and buffers that ranks have copies of, after each step.

    What has copies: the models of `DistributedDataParallel`; other parameters of their
    optimizers, if they begin alike; and what the program itself broadcasts, or whose
    gradients it reduces.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Copies] = {}
        self._owners: dict[
            tuple[int, int], tuple[weakref.ref[torch.Tensor], Copies]
        ] = {}  # by rank and id
        self._shared: dict[tuple[int, int], _Shared] = {}  # by rank and address
        # By rank and address of a gradient, of a step.
        self._in_flats: dict[int, dict[int, _Part]] = defaultdict(dict)
        self._numbered: Counter[int] = Counter()  # optimizers, by rank
        self._left_out = LeftOut()
        self._optimizers: dict[int, Objects[torch.optim.Optimizer, int]] = defaultdict(
            Objects
        )
        self._has_parts = False
        self._losses: dict[int, float | None] = {}  # of the first backward of a rank

    @override
    def made(self, facts: Facts, model: Model) -> None:
        copies = self._copies.setdefault(
            model.key, Copies(model.key, model.ranks, True)
        )
        copies.named[facts.rank] = _finder(model.model)
        members = _members_of(model.model)
        parameters = _parameters(members)
        copies.begun = frozenset(parameters)
        copies.frozen = frozenset(
            name for name, member in parameters.items() if not member.requires_grad
        )
        copies.wrapped_at = here()
        for parameter in members.values():
            self._owners[facts.rank, id(parameter)] = weakref.ref(parameter), copies

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        self._has_parts = self._has_parts or told.kind in _EXCHANGING
        if is_of_torch or told.kind not in ("all_reduce", "broadcast"):
            return
        ranks, place = tuple(told.ranks), here()
        for index, tensor in enumerate(told.gives or told.gets):
            if not can_be_read(tensor):
                continue
            key, flat = ("told", told.key, index), facts.flats.get(tensor)
            for at, address in enumerate(() if flat is None else flat.parts):
                self._in_flats[facts.rank][address] = _Part((*key, at), ranks, place)
            storage = weakref.ref(tensor.untyped_storage())
            shared = _Shared(storage, tensor.numel(), key, ranks, facts.steps, place)
            self._shared[facts.rank, address_of(tensor)] = shared

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        if facts.size > 1 and facts.rank not in self._losses:
            self._losses[facts.rank] = (
                number_of(losses[0]) if len(losses) == 1 else None
            )

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        is_own = isinstance(optimizer, OwnOptimizer)
        for copies in self._copies_in(facts, optimizer):
            made = copies.steps[facts.rank]
            # A program that makes its steps itself may have moved weights to look from
            # there, and not to stay.
            is_first = not made and not (facts.steps and is_own)
            if is_first or copies.parted is not None:
                # Copies that have parted may have been averaged since the last step.
                named = copies.named[facts.rank]()
                way = Way(skips=facts.skips, is_own=is_own)
                before = snapshot(
                    facts, named if made else _parameters(named), False, way
                )
                copies.add(facts.rank, made + 0.5 if made else 0, before)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        there = self._copies_in(facts, optimizer)
        rates, state = rates_of(optimizer), _state_of(optimizer) if there else {}
        for copies in there:
            copies.steps[facts.rank] += 1
            was_called = not copies.is_wrapped or copies.key in facts.called
            was_synchronized = not copies.is_wrapped or copies.key in facts.synchronized
            was_left_open = copies.is_wrapped and copies.key in facts.left_open
            way = Way(
                was_called,
                was_synchronized,
                was_left_open,
                facts.was_awaited,
                facts.skips,
                None if rates is None else tuple(rates),
                state,
                isinstance(optimizer, OwnOptimizer),
            )
            made = snapshot(facts, copies.named[facts.rank](), True, way)
            copies.add(facts.rank, copies.steps[facts.rank], made)
        self._in_flats.pop(facts.rank, None)
        if any(
            copies.late is not None and not self._left_out.knows(copies)
            for copies in there
        ):
            self._left_out.stepped(facts, self._singles(facts, optimizer))

    @override
    def findings(self) -> list[Finding | None]:
        grouped: dict[tuple[Any, ...], list[tuple[Copies, Parted]]] = defaultdict(list)
        for copies in self._copies.values():
            if copies.parted is not None and copies.differ_at_last():
                parted = copies.parted
                if copies.key[0] == "beside" and self._has_parts:
                    continue
                if copies.is_a_guess and not self._most_are_reduced(copies.key[1]):
                    continue
                if not all(
                    taken.way.was_awaited for taken in parted.snapshots.values()
                ):
                    continue  # `Waits` names it
                places = tuple(taken.place for taken in parted.snapshots.values())
                # What skipped steps have done to gradients says nothing more.
                how = (
                    None
                    if skipped_apart(copies, parted)
                    else parted.has_other_gradients
                )
                grouped[parted.step, how, places, copies.is_wrapped].append(
                    (copies, parted)
                )
        wrong = self._of_a_wrong_group(
            [members for members in grouped.values() if members[0][1].step == 0]
        )
        if wrong is not None:
            return [finding("reduced-over-wrong-group", *wrong)]
        found = [
            self._finding(members) for members in grouped.values()
        ] + self._partial()
        has_parts = self._has_parts or any(
            copies.began_apart for copies in self._copies.values()
        )
        return (
            found
            if has_parts
            else [*found, self._left_out.finding(list(self._copies.values()))]
        )

    def have_parted(self, key: tuple[Any, ...]) -> bool:
        """Whether the copies with a key have parted after some step.

        They may have come together again.
        """
        copies = self._copies.get(key)
        return copies is not None and copies.parted is not None

    def _most_are_reduced(self, optimizer: int) -> bool:
        """Whether the gradients of most parameters of an optimizer are alike.

        It looks at parameters that begin with other numbers.

        Those of a last bias alone are alike where ranks add up the outputs of models of
        their own.
        """
        guesses = [
            copies
            for copies in self._copies.values()
            if copies.is_a_guess and copies.key[1] == optimizer
        ]
        apart = [copies.parted is not None for copies in guesses if copies.began_apart]
        return 2 * sum(apart) >= len(apart)

    def _partial(self) -> list[Finding | None]:
        """Gradients of parameters that all ranks have, of a model that is divided.

        Its other parameters are parts.

        The loss of the first step says that: it is the same to the bit, though ranks
        have other weights.
        """
        guesses = [copies for copies in self._copies.values() if copies.is_a_guess]
        losses = set(self._losses.values())
        has_parts = any(copies.began_apart for copies in guesses)
        if (
            not has_parts
            or self._has_parts
            or len(losses) != 1
            or len(self._losses) < 2
        ):
            return []
        loss = losses.pop()
        # A constant is alike without a reason.
        if loss is None or not math.isfinite(loss) or loss.is_integer():
            return []
        late = [
            (copies, copies.late)
            for copies in guesses
            if copies.late is not None and not copies.is_over
        ]
        late = [(copies, parted) for copies, parted in late if parted.step == 1]
        if not late:
            return []
        apart = multiplied_apart(parted for _, parted in late)
        if apart is not None:
            return [apart.finding()]
        names = [_name_of(_tensor(parted, ""), its.key[-1]) for its, parted in late]
        copies, parted = late[0]
        places = list(dict.fromkeys(taken.place for taken in parted.snapshots.values()))
        return [
            finding(
                "gradient-is-partial",
                f"In step 1, ranks {listed_ranks([copies.ranks[0], *parted.ranks])} "
                f"have called the optimizer ({in_words(places)}) with gradients that "
                f"differ for parameters that were alike: {some(names)}. Their losses "
                "were alike to the bit, with parts of other weights on each rank.",
                "Add the gradient of the input of a layer that is divided, in "
                "backward: a function whose forward returns its input, and whose "
                "backward does `dist.all_reduce(gradient)`.",
                places,
            )
        ]

    def _of_a_wrong_group(
        self, groups: list[list[tuple[Copies, Parted]]]
    ) -> tuple[str, str, list[Place]] | None:
        """What to say if other ranks have the same weights.

        They are others than those whose gradients are reduced together.
        """
        ours = [one for members in groups for one in members if one[0].key[0] == "told"]
        reduced = sorted({copies.ranks for copies, _ in ours})
        by_rank: dict[int, list[Any]] = defaultdict(list)
        for copies, parted in ours:
            for rank in copies.ranks:
                by_rank[rank] += parted.snapshots[rank].values.values()
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for rank in sorted(by_rank):
            alike[tuple(by_rank[rank])].append(rank)
        right = list(alike.values())
        is_a_grid = len(reduced) > 1 and all(
            len(set(ranks) & set(group)) == 1 for ranks in right for group in reduced
        )
        if not is_a_grid or sum(map(len, reduced)) != len(by_rank):
            return None
        places = list(
            dict.fromkeys(
                taken.place for _, parted in ours for taken in parted.snapshots.values()
            )
        )
        return (
            (
                f"Gradients are reduced among ranks {listed_ranks(reduced[0])} "
                f"({in_words(places)}), which have other weights from the beginning; "
                f"ranks {listed_ranks(right[0])} have the same ones."
            ),
            "Reduce them over the groups of ranks that have the same weights: "
            f"{' and '.join(map(listed_ranks, right))}.",
            places,
        )

    def _copies_in(
        self, facts: Facts, optimizer: torch.optim.Optimizer
    ) -> list[Copies]:
        """The copies of which an optimizer has some parameters."""
        found: dict[int, Copies] = {}
        alone: list[tuple[int, torch.Tensor]] = []
        for position, parameter in enumerate(parameters_of(optimizer)):
            owner, copies = self._owners.get((facts.rank, id(parameter)), (None, None))
            if (
                copies is None
                or owner is None
                or owner() is not parameter
                or copies.is_a_guess
            ):
                guess, copies = copies, self._shared_copies(facts, parameter)
                if guess is not None and copies is not None:
                    guess.late = None  # the program makes them alike, only later
            if copies is None:
                alone.append((position, parameter))
            else:
                self._forgive(facts, copies, parameter)
                found[id(copies)] = copies
        wrapped = [copies for copies in found.values() if copies.is_wrapped]
        for position, parameter in alone if facts.size > 1 else []:
            if any(self._has_got(facts, copies, parameter) for copies in wrapped):
                continue
            if wrapped:
                key: tuple[Any, ...] = ("beside", wrapped[0].key, position)
                copies = self._single(
                    facts, parameter, key, wrapped[0].ranks, may_differ=True
                )
            else:
                key = (
                    "guess",
                    self._number(facts, optimizer),
                    position,
                    tuple(parameter.shape),
                )
                copies = self._single(
                    facts, parameter, key, range(facts.size), is_a_guess=True
                )
            found[id(copies)] = copies
        return [copies for copies in found.values() if not copies.is_over]

    def _has_got(self, facts: Facts, copies: Copies, parameter: torch.Tensor) -> bool:
        """Whether a parameter came into a model after it was wrapped."""
        is_there = any(
            member is parameter for member in copies.named[facts.rank]().values()
        )
        if is_there:
            self._owners[facts.rank, id(parameter)] = weakref.ref(parameter), copies
        return is_there

    def _number(self, facts: Facts, optimizer: torch.optim.Optimizer) -> int:
        """Which of a rank's optimizers it is, in the order of their first steps."""
        known = self._optimizers[facts.rank]
        if optimizer not in known:  # some may be gone
            known[optimizer] = self._numbered[facts.rank]
            self._numbered[facts.rank] += 1
        return known[optimizer]

    def _singles(
        self, facts: Facts, optimizer: torch.optim.Optimizer
    ) -> dict[int, Copies]:
        """The copies of an optimizer's parameters that no wrapper has, by id.

        It is the id of the parameter.
        """
        both = (
            (one, self._owners.get((facts.rank, id(one))))
            for one in parameters_of(optimizer)
        )
        return {
            id(one): known[1]
            for one, known in both
            if known is not None and not known[1].is_wrapped
        }

    def _shared_copies(self, facts: Facts, parameter: torch.Tensor) -> Copies | None:
        """The copies of a parameter that the program has broadcast.

        It may have reduced the gradient instead.
        """
        for tensor in (parameter, facts.gradient_of(parameter)):
            shared = self._shared_at(facts, tensor)
            if shared is not None and len(shared.ranks) > 1:
                copies = self._single(facts, parameter, shared.key, shared.ranks)
                copies.reduced_at = None if tensor is parameter else shared.place
                return copies
        part = self._in_flats[facts.rank].get(facts.address_of_gradient(parameter))
        # Where there is an optimizer, a flat tensor that does not come back into
        # gradients is only looked at.
        if (
            part is None
            or len(part.ranks) < 2
            or not isinstance(facts.stepping, OwnOptimizer)
        ):
            return None
        copies = self._single(facts, parameter, part.key, part.ranks)
        copies.reduced_at = part.place
        return copies

    def _shared_at(self, facts: Facts, tensor: torch.Tensor | None) -> _Shared | None:
        if tensor is None or not can_be_read(tensor):
            return None
        shared = self._shared.get((facts.rank, address_of(tensor)))
        is_it = (
            shared is not None
            and shared.storage() is not None
            and shared.size == tensor.numel()
        )
        return shared if is_it else None

    def _single(
        self,
        facts: Facts,
        parameter: torch.Tensor,
        key: tuple[Any, ...],
        ranks: Sequence[int],
        may_differ: bool = False,
        is_a_guess: bool = False,
    ) -> Copies:
        copies = self._copies.setdefault(
            key, Copies(key, tuple(ranks), False, may_differ, is_a_guess)
        )
        there = weakref.ref(parameter)
        copies.begun_after.setdefault(facts.rank, facts.steps)
        copies.named[facts.rank] = lambda: (
            {"": tensor} if (tensor := there()) is not None else {}
        )
        self._owners[facts.rank, id(parameter)] = there, copies
        return copies

    def _forgive(self, facts: Facts, copies: Copies, parameter: torch.Tensor) -> None:
        """Copies that the program itself reduces or broadcasts after a step.

        They are apart in between on purpose.
        """
        shared = self._shared_at(facts, parameter)
        begun_after = copies.begun_after.setdefault(facts.rank, facts.steps)
        if shared is not None and shared.steps > begun_after:
            copies.is_over = True

    def _finding(self, members: list[tuple[Copies, Parted]]) -> Finding | None:
        copies, parted = members[0]
        names: list[str] = []
        for _, its in members:
            names += [name or _name_of(_tensor(its, name)) for name in its.names]
        places = list(dict.fromkeys(taken.place for taken in parted.snapshots.values()))
        where, which = in_words(places), some(names)
        ranks = f"rank {copies.ranks[0]} and {named_ranks(parted.ranks)}"
        if parted.step == 0:
            reduced = list(
                dict.fromkeys(
                    its.reduced_at for its, _ in members if its.reduced_at is not None
                )
            )
            together = (
                f" Their gradients are reduced together ({in_words(reduced)})."
                if reduced
                else ""
            )
            parts = (
                " If each rank has a part of its own there, such as an expert, do not "
                "reduce its gradients."
            )
            return finding(
                "weights-differ",
                f"Before the first step ({where}), {ranks} have other weights: "
                f"{which}.{together}",
                "Build the model from one seed on all ranks, load one checkpoint, or "
                "broadcast the weights of one rank before the first "
                f"step.{parts if reduced else ''}",
                [*places, *reduced],
            )
        skipped = skipped_apart(copies, parted)
        if skipped is not None:
            says, write = skipped
            # Ranks that have skipped other steps come to the same step with other
            # batches.
            return finding(
                "step-skipped-by-some",
                f"Until step {parted.step} ({where}), {says}. The weights of {ranks} "
                f"differ since then: {which}.",
                write,
                places,
            )
        if not parted.has_other_gradients:
            cause, write = cause_of_other_updates(parted)
            return finding(
                "replicas-part",
                f"Since step {parted.step} ({where}), {ranks} have other values, "
                f"though their gradients were alike: {which}.{cause}",
                write,
                places,
            )
        apart = multiplied_apart(one for _, one in members)
        if apart is not None:
            return apart.finding()
        cause, write = cause_of(copies, parted)
        return finding(
            "gradient-not-reduced",
            f"In step {parted.step}, {ranks} have called the optimizer ({where}) with "
            f"other gradients{cause}, and their weights differ since then: {which}.",
            write,
            places,
        )


def _state_of(
    optimizer: torch.optim.Optimizer,
) -> dict[str, float | Fingerprint | None]:
    """What an optimizer keeps of its first parameter."""
    found: dict[str, float | Fingerprint | None] = {}
    first = next(iter(parameters_of(optimizer)), None)
    kept = None if first is None else asked(lambda: optimizer.state.get(first), None)
    for name, value in kept.items() if isinstance(kept, dict) else ():
        number = number_of(value)
        found[str(name)] = (
            fingerprint(value)
            if number is None and isinstance(value, torch.Tensor)
            else number
        )
    return found


def _tensor(parted: Parted, name: str) -> torch.Tensor | None:
    held = [
        taken.tensors[name]
        for taken in parted.snapshots.values()
        if name in taken.tensors
    ]
    return held[0]() if held else None


def _finder(model: weakref.ref[Any]) -> Callable[[], Named]:
    return lambda: _members_of(model)


def _parameters(named: Named) -> Named:
    return {
        name: tensor
        for name, tensor in named.items()
        if isinstance(tensor, nn.Parameter)
    }


def _members_of(model: weakref.ref[Any]) -> dict[str, torch.Tensor]:
    """The parameters of a model, and the buffers that checkpoints have, by name.

    The statistics of norms are left out.
    """
    wrapped = model()
    if wrapped is None:
        return {}
    ignored = ignored_names(wrapped)
    found: dict[str, torch.Tensor] = dict(named_parameters(wrapped.module))
    for prefix, module in (
        modules_in(wrapped.module) if wrapped.broadcast_buffers else ()
    ):  # or each has its own
        if not has_statistics(module):
            found |= {
                joined(prefix, name): one
                for name, one in own_buffers(module)
                if is_persistent(module, name)
            }
    return {
        name: tensor
        for name, tensor in found.items()
        if name not in ignored and can_be_read(tensor)
    }


def _name_of(
    parameter: torch.Tensor | None, shape_of_gone: tuple[int, ...] = ()
) -> str:
    """The name of a parameter in the largest module that has it."""
    if parameter is None:
        return nameless(shape_of_gone) if shape_of_gone else "a parameter"
    return longest_names([parameter]).get(id(parameter), nameless(parameter.shape))
