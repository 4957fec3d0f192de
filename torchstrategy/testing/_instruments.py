"""Installs the instruments that observe replicas, for a block.

What they are told is in `_group/instruments`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torchstrategy._group.instruments import IN_FORCE, Instrument


@contextmanager
def _only(instruments: tuple[Instrument, ...]) -> Iterator[None]:
    token = IN_FORCE.set(instruments)
    try:
        yield
    finally:
        IN_FORCE.reset(token)


def in_force(*instruments: Instrument) -> AbstractContextManager[None]:
    """A block whose runs these instruments observe.

    The instruments of outer blocks observe them, too.
    """
    return _only((*IN_FORCE.get(), *instruments))


def none_in_force() -> AbstractContextManager[None]:
    """A block whose runs no instrument observes."""
    return _only(())


def is_in_force(instrument: Instrument) -> bool:
    """Whether an instrument observes the runs that are started here."""
    return instrument in IN_FORCE.get()
