"""Parameters that all ranks have whole, in a model that they divide, and part.

They divide it among themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy._base.errors import plural
from torchstrategy.testing._lints.evidence.copies import Parted
from torchstrategy.testing._lints.evidence.facts import Facts, parameters_of
from torchstrategy.testing._lints.evidence.fingerprints import (
    can_be_read,
    checksum,
    numbers_of,
)
from torchstrategy.testing._lints.evidence.known import is_plain
from torchstrategy.testing._lints.evidence.nodes import leaf_of, name_of_any
from torchstrategy.testing._lints.evidence.places import (
    Place,
    exchanging_function_here,
    frames_of,
    here,
    in_words,
)
from torchstrategy.testing._lints.evidence.tracks import (
    EXCHANGING,
    Track,
    Tracks,
    places_of,
)
from torchstrategy.testing._lints.findings import Finding, finding, listed_ranks, some
from torchstrategy.testing._lints.lint import Lint, Seen
from torchstrategy.testing._lints.weights.multiplied_apart import multiplied_apart
from torchstrategy.testing._ranks.witnesses import Told

_MOST_NODES, _MOST_MASKS, _ENOUGH = 50_000, 3, 16
_DROPOUT = "torch.nn.functional"  # in whose frames the input of dropout is
_aten = torch.ops.aten


class _Mask(NamedTuple):
    """What a rank has dropped: sums of the bytes of the input and of the mask."""

    place: Place
    numbers: int
    input: int
    mask: int


@final
@dataclass
class _Region:
    """A part of a graph, as far as it goes without a function between ranks.

    Such a function hands activations from rank to rank.

    Attributes:
        parameters: Those that it uses, by id.
        tracks: What is followed of these, by id.
        has_the_loss: Whether the loss is made there.
    """

    parameters: set[int] = field(default_factory=set)
    tracks: dict[int, Track] = field(default_factory=dict)
    has_the_loss: bool = False


@final
class Divided(Lint):
    """Looks at programs that write their own functions for parallel layers.

    Nobody wraps the parameters of these.

    Between two such functions, where ranks have other weights, each rank has its part
    of the model. Outside of these regions, all ranks have the same parameters, and only
    gradients that are alike keep them so. Random numbers that are alike show that. Ones
    and zeros do not, but where such numbers are beside them, or as those of a norm in
    the region in which the loss is made.
    """

    def __init__(self) -> None:
        # The names of their nodes, by rank.
        self._functions: dict[int, set[str]] = defaultdict(set)
        self._groups: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        self._roots: dict[int, Any] = {}
        self._regions: dict[int, list[_Region]] = {}
        self._tracks = Tracks()
        self._open: dict[int, list[Track]] = {}
        self._has_parts = False
        # By place and number, and by rank.
        self._masks: dict[tuple[Place, int], dict[int, _Mask]] = defaultdict(dict)
        self._times: Counter[tuple[int, Place]] = Counter()

    @override
    def operators(self) -> dict[Any, Seen]:
        return {
            _aten.native_dropout.default: self._drops,
            _aten.bernoulli_.float: self._drops,
        }

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        self._has_parts = self._has_parts or told.kind in EXCHANGING
        if facts.rank not in self._regions and not facts.models and len(told.ranks) > 1:
            function = exchanging_function_here()
            if function is not None:
                self._functions[facts.rank].add(f"{function.__name__}Backward")
                self._groups[facts.rank].add(tuple(sorted(told.ranks)))

    @override
    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        if (
            facts.size > 1
            and not facts.models
            and facts.rank not in self._regions
            and len(losses) == 1
        ):
            self._roots[facts.rank] = losses[0].grad_fn

    @override
    def went_back(self, facts: Facts) -> None:
        root = self._roots.pop(facts.rank, None)
        if (
            root is not None
            and self._functions[facts.rank]
            and facts.rank not in self._regions
        ):
            # Now the functions are known that hand on gradients only.
            self._regions[facts.rank] = _regions_of(root, self._functions[facts.rank])

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        groups = self._groups[facts.rank]
        if facts.rank in self._regions and not facts.models and len(groups) == 1:
            parameters = [
                (i, one)
                for i, one in enumerate(parameters_of(optimizer))
                if is_plain(one)
            ]
            tracks = self._tracks.begins(
                facts, optimizer, parameters, next(iter(groups))
            )
            self._open[facts.rank] = tracks
            for (_, parameter), track in zip(parameters, tracks, strict=True):
                for region in self._regions[facts.rank]:
                    if id(parameter) in region.parameters:
                        region.tracks[id(parameter)] = track

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._tracks.ends(facts, self._open.pop(facts.rank, []))

    @override
    def findings(self) -> list[Finding | None]:
        if self._has_parts:
            return []
        by_ranks: dict[tuple[int, ...], int] = {}
        for rank in sorted(self._regions):
            for ranks in self._groups[rank]:
                by_ranks.setdefault(ranks, rank)
        return [self._finding(ranks, rank) for ranks, rank in by_ranks.items()]

    def _finding(self, ranks: tuple[int, ...], rank: int) -> Finding | None:
        found = self._parted(rank)
        if not found:
            return None
        names = [owner.name for track, _ in found for owner in (track.owners or [])[:1]]
        parted = [one for _, one in found]
        which = (
            f"{plural(len(names), 'parameter')} that were alike on them, and these "
            f"differ since then: {some(names)}"
        )
        others = listed_ranks(ranks)
        masks = self._other_masks(ranks)
        if masks:
            at = list(dict.fromkeys(mask.place for mask in masks))
            return finding(
                "random-numbers-differ",
                f"Ranks {others} divide a model, and drop other ones of "
                f"{masks[0].numbers} numbers that are alike on all of them "
                f"({in_words(at)}): their generators differ. In step {parted[0].step} "
                f"they have called the optimizer ({in_words(places_of(parted))}) with "
                f"other gradients of {which}.",
                "Seed the ranks that divide a model alike, `torch.manual_seed(seed)`, "
                "and draw with another seed of the rank only what is dropped of a "
                "part.",
                at,
            )
        apart = multiplied_apart(parted)
        if apart is not None:
            return apart.finding()
        places = places_of(parted)
        return finding(
            "gradient-not-reduced",
            f"Ranks {others} divide a model, and in step {parted[0].step} they have "
            f"called the optimizer ({in_words(places)}) with other gradients of "
            f"{which}.",
            "If each rank has its own rows there, as with a divided sequence, add the "
            "gradients up before the step: `dist.all_reduce(p.grad)`. If not, all of "
            "them have to get the same batch and the same activations.",
            places,
        )

    def _parted(self, rank: int) -> list[tuple[Track, Parted]]:
        """The parameters that all ranks have whole, and that have parted."""
        regions = [
            (
                region,
                list(region.tracks.values()),
                any(track.is_part for track in region.tracks.values()),
            )
            for region in self._regions[rank]
        ]
        if not any(is_divided for _, _, is_divided in regions):
            return []
        parts = {
            id(track)
            for _, tracks, is_divided in regions
            if is_divided
            for track in tracks
        }
        found: dict[int, tuple[Track, Parted]] = {}
        norms: dict[int, tuple[Track, Parted]] = {}
        for region, tracks, is_divided in regions:
            has_whole = any(track.is_whole for track in tracks)
            for track in () if is_divided else tracks:
                parted = track.parted()
                if parted is None or id(track) in parts:
                    continue
                is_of_a_norm = all(
                    "norm" in owner.kind.lower() for owner in track.owners or []
                )
                if has_whole or (is_of_a_norm and region.has_the_loss):
                    found[id(track)] = track, parted
                elif is_of_a_norm:
                    norms[id(track)] = track, parted
        # Norms before the first layer that is divided, of which nothing else says that
        # they are those of all ranks.
        return sorted((found and norms | found).values(), key=lambda one: one[1].step)

    def _other_masks(self, ranks: tuple[int, ...]) -> list[_Mask]:
        """Where all ranks have dropped other ones of the same numbers."""
        found = []
        for those in self._masks.values():
            mine = [those[rank] for rank in ranks if rank in those]
            if len(mine) == len(ranks) and len({one.input for one in mine}) == 1 < len(
                {one.mask for one in mine}
            ):
                found.append(mine[0])
        return found

    def _drops(
        self, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        if facts.size < 2 or facts.models or not self._functions.get(facts.rank):
            return
        place = here()
        number = self._times[facts.rank, place]
        mask = result[1] if isinstance(result, tuple) else result
        given = args[0] if isinstance(result, tuple) else _input_of_dropout()
        if (
            number >= _MOST_MASKS
            or mask.numel() < _ENOUGH
            or given is None
            or not can_be_read(mask)
        ):
            return
        self._times[facts.rank, place] += 1
        if can_be_read(given) and given.shape == mask.shape:
            sums = checksum(numbers_of(given)), checksum(numbers_of(mask))
            self._masks[place, number][facts.rank] = _Mask(place, mask.numel(), *sums)


def _input_of_dropout() -> torch.Tensor | None:
    """The input of the function that drops.

    On the CPU, the operator draws numbers, and does not know for what.
    """
    for frame in frames_of(_DROPOUT):
        given = frame.f_locals.get("input")
        if "dropout" in frame.f_code.co_name and isinstance(given, torch.Tensor):
            return given
    return None


def _regions_of(root: Any, functions: set[str]) -> list[_Region]:
    """The parts of a graph between functions of some names.

    Those that one parameter joins are several all the same.
    """
    # Which keeps them, and with them their ids.
    nodes: dict[int, Any] = {id(root): root}
    leader: dict[int, int] = {id(root): id(root)}

    def leader_of(one: int) -> int:
        while leader[one] != one:
            leader[one] = leader[leader[one]]
            one = leader[one]
        return one

    used: list[tuple[int, int]] = []  # a node, and a parameter that it uses
    waiting = [root]
    while waiting and len(nodes) < _MOST_NODES:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            leaf = leaf_of(following)
            if leaf is not None:
                used.append((id(node), id(leaf)))
                continue
            if id(following) not in nodes:
                nodes[id(following)], leader[id(following)] = following, id(following)
                waiting.append(following)
            if (
                name_of_any(node) not in functions
                and name_of_any(following) not in functions
            ):
                leader[leader_of(id(following))] = leader_of(id(node))
    regions: dict[int, _Region] = defaultdict(_Region)
    for one, parameter in used:
        regions[leader_of(one)].parameters.add(parameter)
    regions[leader_of(id(root))].has_the_loss = name_of_any(root) not in functions
    return list(regions.values())
