"""A block in which lints watch a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from torchstrategy.testing._lints.evidence.own_steps import WRITES
from torchstrategy.testing._lints.findings import Finding
from torchstrategy.testing._lints.session import Session
from torchstrategy.testing._lints.torch_internals import replaced_functions
from torchstrategy.testing._lints.watching.backwards import Backwards
from torchstrategy.testing._lints.watching.exchanges import Exchanges
from torchstrategy.testing._lints.watching.loaders import Loaders
from torchstrategy.testing._lints.watching.models import Models
from torchstrategy.testing._lints.watching.replaced import Late
from torchstrategy.testing._lints.watching.steps import Steps
from torchstrategy.testing._lints.watching.telling import Telling
from torchstrategy.testing._ranks.world import current_rank
from torchstrategy.testing._simulation.program import is_unwatched
from torchstrategy.testing._simulation.replacing import replacing


@final
class Watch:
    """Watches the programs of ranks, or the thread that has made it.

    Operators are told by the caller.
    """

    def __init__(self) -> None:
        self._telling, self._late = Telling(), Late()
        self._operators = Session(1).operators()
        self._exchanges = Exchanges(self._telling)
        self._backwards = Backwards(self._telling)
        self._loaders = Loaders(self._telling, self._late)
        self._models = Models(self._telling, self._late)
        self._steps = Steps(self._telling)
        self._telling.looks_for_more = self._models.watch_sharding

    def findings(self) -> list[Finding]:
        """What was found, each thing once."""
        return self._telling.findings()

    def writes(self, func: Any, args: Any) -> None:
        """An operator is going to run on this thread."""
        if func in WRITES and not is_unwatched():
            self._telling.say("writes", current_rank(), args[0])

    def operator(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        """An operator has run on this thread."""
        if func not in self._operators and not self._telling.follows:
            return
        if is_unwatched():  # it is not the program's
            return
        session = self._telling.session()
        if session is not None:
            session.operator(current_rank(), func, args, kwargs, result)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The block."""
        parts = (
            self._exchanges,
            self._backwards,
            self._loaders,
            self._models,
            self._steps,
        )
        with self._steps.hooked(), self._exchanges.witnessed(), self._late.open():
            replaced = [
                *replaced_functions(),
                *(one for part in parts for one in part.replaced()),
            ]
            with replacing(replaced):
                yield
