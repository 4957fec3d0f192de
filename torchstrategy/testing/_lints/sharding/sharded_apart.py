"""Parameters that ranks shard with `fully_shard`, each from other weights."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.fingerprints import Fingerprint, fingerprint
from torchstrategy.testing._lints.evidence.modules import named_parameters, names_of
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding, named_ranks, some
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.torch_internals import held_here, ranks_of_mesh


class _Sharded(NamedTuple):
    """A parameter of a rank.

    Attributes:
        place: Where it was sharded.
        whole: What it was before.
        part: What this rank has of it.
        held: What that was, just after.
        ranks: The ranks that have the others.
        is_loaded: Whether it was loaded from a checkpoint, and not drawn.
    """

    place: Place
    whole: Fingerprint
    part: weakref.ref[Any]
    held: Fingerprint | None
    ranks: tuple[int, ...]
    is_loaded: bool


class _Trained(NamedTuple):
    """A parameter that is still as it was sharded when it is trained."""

    place: Place
    whole: Fingerprint
    name: str
    ranks: tuple[int, ...]
    is_loaded: bool


@final
class ShardedApart(Lint):
    """Compares the weights that ranks have when they shard them.

    It does if nothing else is written before the first step.

    A rank has to have loaded them. Where all draw random weights, those of several
    ranks are as random as those of one.
    """

    def __init__(self) -> None:
        self._sharded: dict[int, list[_Sharded]] = defaultdict(list)
        # By rank, the shapes of what it has loaded: `.to(device)` may have made other
        # parameters of these since then.
        self._loaded: dict[int, set[torch.Size]] = defaultdict(set)
        self._trained: dict[int, dict[int, _Trained]] = {}  # by rank and position

    @override
    def restored(
        self, facts: Facts, module: torch.nn.Module, state: dict[str, Any], misfits: Any
    ) -> None:
        there = [
            parameter for name, parameter in named_parameters(module) if name in state
        ]
        self._loaded[facts.rank] |= {parameter.shape for parameter in there}

    @override
    def sharded(
        self,
        facts: Facts,
        whole: torch.Tensor,
        parameter: torch.Tensor,
        before: Fingerprint | None,
    ) -> None:
        part: Any = parameter
        if (
            before is not None
            and facts.rank not in self._trained
            and hasattr(part, "device_mesh")
        ):
            ranks = ranks_of_mesh(part)
            held = fingerprint(held_here(part))
            is_loaded = whole.shape in self._loaded[facts.rank]
            self._sharded[facts.rank].append(
                _Sharded(here(), before, weakref.ref(part), held, ranks, is_loaded)
            )

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        sharded = self._sharded.pop(facts.rank, [])
        if not sharded or facts.rank in self._trained or not any(self._loaded.values()):
            return  # to find names takes long
        there = {at: (one, one.part()) for at, one in enumerate(sharded)}
        left = {
            at: (one, part)
            for at, (one, part) in there.items()
            if part is not None and fingerprint(held_here(part)) == one.held
        }
        names = names_of([part for _, part in left.values()])
        self._trained[facts.rank] = {
            at: _Trained(one.place, one.whole, name, one.ranks, one.is_loaded)
            for (at, (one, _)), name in zip(left.items(), names, strict=True)
        }

    @override
    def findings(self) -> list[Finding | None]:
        apart: dict[Place, tuple[int, int, list[str]]] = {}
        for rank, mine in sorted(self._trained.items()):
            for at, one in mine.items():
                for other in one.ranks:
                    its = self._trained.get(other, {}).get(at)
                    if (
                        other <= rank
                        or its is None
                        or its.whole.shape != one.whole.shape
                    ):
                        continue
                    if (
                        one.is_loaded or its.is_loaded
                    ) and its.whole.checksum != one.whole.checksum:
                        first, second, names = apart.setdefault(
                            one.place, (rank, other, [])
                        )
                        if (first, second) == (rank, other):
                            names.append(one.name)
        return [_finding(place, *those) for place, those in apart.items()]


def _finding(place: Place, rank: int, other: int, names: list[str]) -> Finding | None:
    return finding(
        "weights-differ",
        f"When `fully_shard` ({place}) divides the parameters, rank {rank} and "
        f"{named_ranks([other])} have other weights: {some(names)}. It takes the part "
        "of each rank from the weights of this rank, and broadcasts nothing.",
        "Load the weights on all ranks before `fully_shard`; or load them after it, "
        "with `set_model_state_dict(model, state, "
        "options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))`.",
        [place],
    )
