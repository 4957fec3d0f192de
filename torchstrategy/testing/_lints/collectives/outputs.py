"""Collectives that write what several ranks give into one and the same tensor."""

from __future__ import annotations

from collections import Counter
from typing import final

from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.known import is_plain
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._ranks.witnesses import Told
from torchstrategy.testing._simulation.memory import span

_KINDS = ("all_gather", "gather", "all_to_all")


@final
class Outputs(Lint):
    """Compares the memory of the outputs of one call.

    Those that overlap in part may be columns of one matrix.
    """

    def __init__(self) -> None:
        self._found: dict[Place, tuple[str, int]] = {}

    @override
    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        if is_of_torch or told.kind not in _KINDS or len(told.gets) < 2:
            return
        written = [
            tensor for tensor in told.gets if is_plain(tensor) and tensor.numel()
        ]
        places = Counter(
            (span(tensor), tensor.stride(), tensor.dtype) for tensor in written
        )
        most = max(places.values(), default=1)
        if most > 1:
            self._found.setdefault(here(), (told.kind, most))

    @override
    def findings(self) -> list[Finding | None]:
        return [
            finding(
                "outputs-share-memory",
                f"{count} of the outputs of `{kind}` at {place} are the same tensor: "
                "what one rank has given is written over what another one has given.",
                "Make a tensor for each rank: `[torch.empty_like(x) for _ in "
                "range(world_size)]`. `[x] * n` is one tensor n times.",
                [place],
            )
            for place, (kind, count) in self._found.items()
        ]
