"""What a process that is forked from a worker inherits, and gives back at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# By descriptor: which socket it was. The numbers of descriptors are used again.
_sockets: dict[int, int] = {}
_in_child: list[Callable[[], None]] = []


# Note [Forked processes of a worker]
# A forked process, such as a worker of a DataLoader, inherits the connections of its
# parent. As long as it lives, the system does not close them when the parent is killed:
# the others would not hear of it, and a port stays taken. So the child closes what it
# inherited. This closes nothing in the parent: a connection ends when its last
# descriptor is closed. Nothing is shut down, and nothing is destroyed: torch's objects
# would join threads that a child does not have. Connections that torch made have no
# names. They are the sockets that appeared while it made them, on systems that list the
# descriptors of a process, as Linux and macOS do. Elsewhere they stay open in the
# child; the lifelines, by which the others hear of a death, are Python's, and are
# closed on all systems that fork.
@contextmanager
def noting_sockets() -> Iterator[None]:
    """A block in which torch makes connections."""
    before = _open_sockets()
    try:
        yield
    finally:
        made = _open_sockets()
        for descriptor in made.keys() - before.keys():
            _sockets[descriptor] = made[descriptor]
            with suppress(OSError):
                # No program that this one starts has a use for it.
                os.set_inheritable(descriptor, False)


def give_back(call: Callable[[], None]) -> None:
    """Lets each forked process begin with a call."""
    _in_child.append(call)


def _open_sockets() -> dict[int, int]:
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return {}
    found = {}
    for name in names:
        with suppress(OSError, ValueError):  # the descriptor that listed them is closed
            known = os.fstat(int(name))
            if stat.S_ISSOCK(known.st_mode):
                found[int(name)] = known.st_ino
    return found


def _begin_as_child() -> None:
    for call in _in_child:
        call()
    for descriptor, known in _sockets.items():
        with suppress(OSError):
            found = os.fstat(descriptor)
            if stat.S_ISSOCK(found.st_mode) and found.st_ino == known:
                os.close(descriptor)
    _sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_as_child)
