"""Collectives, messages, groups, files, and waits for the device.

What one rank knows of others, and when.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist

from torchstrategy.testing._lints.collectives.files import (
    replaced as replaced_for_files,
)
from torchstrategy.testing._lints.watching.replaced import Method, Replaced, after
from torchstrategy.testing._lints.watching.telling import Telling
from torchstrategy.testing._ranks.witnesses import (
    Told,
    UnderWay,
    WorkWitness,
    witnesses,
    work_witnesses,
)
from torchstrategy.testing._ranks.world import current_rank, current_world
from torchstrategy.testing._simulation.ordinals import NAME


@final
class _Here(threading.local):
    is_at_file = False


@final
class Exchanges:
    """Is told of collectives and messages by ranks, and replaces what says the rest."""

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self._here = _Here()

    @contextmanager
    def witnessed(self) -> Iterator[None]:
        """A block in which ranks tell of collectives and messages."""
        work = WorkWitness(self._begins, self._over)
        witnesses.append(self._told)
        work_witnesses.append(work)
        try:
            yield
        finally:
            witnesses.remove(self._told)
            work_witnesses.remove(work)

    def replaced(self) -> Replaced:
        """What is replaced."""
        device: Any = getattr(torch, NAME, None)  # None while no devices are simulated
        devices: list[Any] = [torch.cuda, torch.accelerator]
        devices += [] if device is None else [device, device.Stream, device.Event]
        return [
            *[
                (owner, "synchronize", after(owner.synchronize, self._synchronized))
                for owner in devices
            ],
            (dist, "new_group", self._grouping(dist.new_group)),
            *replaced_for_files(self._file),
        ]

    def _told(self, told: Told) -> None:
        self._telling.looks_for_more()
        self._telling.say("told", told)

    def _begins(self, under_way: UnderWay) -> None:
        self._telling.say("saw", under_way.rank, "begins", under_way)

    def _over(self, rank: int, part: Any) -> None:
        self._telling.say("saw", rank, "awaited", part)

    def _synchronized(self, *_: Any, **__: Any) -> None:
        self._telling.saw("synchronized")

    def _grouping(self, make: Method) -> Method:
        @functools.wraps(make)
        def told(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(ranks, Iterator):  # which can be gone through only once
                ranks = list(ranks)
            is_local = (
                args[3]
                if len(args) > 3
                else kwargs.get("use_local_synchronization", False)
            )
            # All ranks have to make the call, and not only the members.
            if not is_local:
                self._telling.saw("groups", None if ranks is None else list(ranks))
            return make(ranks, *args, **kwargs)

        return told

    def _file(self, what: str, file: Any) -> None:
        world = current_world()
        if world is None or world.size < 2 or self._here.is_at_file:
            return
        self._here.is_at_file = True  # the lint looks into the source of the program
        try:
            self._telling.say(
                "saw", current_rank(), "uses_file", world.happened, what, file
            )
        finally:
            self._here.is_at_file = False
