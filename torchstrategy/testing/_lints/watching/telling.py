"""Which run a thread is in, and how its lints are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.findings import Finding
from torchstrategy.testing._lints.session import Session
from torchstrategy.testing._ranks.world import World, current_rank, current_world


@final
class _Known(threading.local):
    run: tuple[World | None, Session] | None = None  # the one that was asked for last


@final
class Telling:
    """Tells the session of each run what its program does.

    It is the program of ranks, or of the thread of the block.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._sessions: list[Session] = []
        self._of_world: Objects[World, Session] = Objects()
        self._alone: Session | None = None
        self._known = _Known()
        self.looks_for_more: Callable[[], None] = lambda: None
        """Is called before most events, to look for what has to be watched now.

        That is what the program has imported meanwhile.
        """

    def findings(self) -> list[Finding]:
        """What was found, each thing once."""
        found = [
            finding for session in self._sessions for finding in session.findings()
        ]
        return list(dict.fromkeys(found))

    @property
    def follows(self) -> bool:
        """Whether a session has to be told of all operators now."""
        return any(session.follows for session in self._sessions)

    def session(self) -> Session | None:
        """The run of this thread; None if it is a program's thread that is no rank."""
        world = current_world()
        known = self._known.run
        if known is not None and known[0] is world:
            return known[1]
        if world is None and threading.get_ident() != self._thread:
            return None
        made = self._alone if world is None else self._of_world.get(world)
        if made is None:
            made = Session(1 if world is None else world.size)
            self._sessions.append(made)
            if world is None:
                self._alone = made
            else:
                self._of_world[world] = made
        self._known.run = world, made
        return made

    def say(self, what: str, *args: Any) -> Any:
        """Calls a method of the session.

        An error of its own is none of the program's.
        """
        session = self.session()
        if session is None:
            return None
        try:
            return getattr(session, what)(*args)
        except Exception as error:
            return session.loses(None, error)

    def tell(self, what: str, *args: Any) -> Any:
        """Calls a method of the session with this rank, and with what has happened."""
        self.looks_for_more()
        return self.say(what, current_rank(), *args)

    def saw(self, what: str, *args: Any) -> None:
        """Tells the lints of something for which the session has no method."""
        self.tell("saw", what, *args)
