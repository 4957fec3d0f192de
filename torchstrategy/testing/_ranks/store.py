"""`torch.distributed`'s stores, in which processes leave notes for each other.

A rank that waits for one hands over.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any, final

import torch.distributed as dist

from torchstrategy.testing._ranks.torch_internals import Store
from torchstrategy.testing._ranks.turns import Wait
from torchstrategy.testing._ranks.world import Notes, World, current_rank, current_world

# Torch's timeout of a store. If no less is said, a wait that cannot end is a fault.
_FOR_EVER = timedelta(minutes=5)
_drawn_ports = count(49152)


class RankStore(Store):  # type: ignore[misc]
    """A store of all ranks, as one rank uses it.

    PyTorch's C++ calls its methods with bytes.

    Args:
        world: The ranks.
        rank: The rank that uses it.
        name: What tells it from the other stores of these ranks. Empty: it is the one
            by which they have met.
    """

    def __init__(self, world: World, rank: int, name: str = "") -> None:
        super().__init__()
        self._world, self._rank, self._name = world, rank, name
        self._notes = world.stores.setdefault(name, Notes())

    def clone(self) -> RankStore:
        return RankStore(self._world, self._rank, self._name)

    def set(self, key: str, value: Any) -> None:
        self._notes.values[key] = _as_bytes(value)
        self._world.happened.writes_note(self._rank)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._notes.values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._notes.values.get(key, b"0")) + amount
        self._notes.values[key] = str(total).encode()
        self._has_read_and_written()
        return total

    def append(self, key: str, value: Any) -> None:
        self._notes.values[key] = self._notes.values.get(key, b"") + _as_bytes(value)
        self._has_read_and_written()

    def check(self, keys: Sequence[str]) -> bool:
        if not self._has(keys) and self._world.turns.has_others(self._rank):
            self._world.turns.poll(self._rank)
        return self._has(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        values = self._notes.values
        if values.get(key, b"") == _as_bytes(expected):
            values[key] = _as_bytes(desired)
        self._has_read_and_written()
        return values.get(key, _as_bytes(expected))

    def delete_key(self, key: str) -> bool:
        self._has_read_and_written()
        return self._notes.values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._notes.values)

    # The names by which C++ asks a store that is written in Python.
    deleteKey, getNumKeys = delete_key, num_keys

    def list_keys(self) -> list[str]:
        return list(self._notes.values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: Any) -> None:
        self._notes.queues.setdefault(key, deque()).append(_as_bytes(value))
        self._has_read_and_written()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if not block and not self.queue_len(key):
            raise dist.QueueEmptyError(f"queue {key} is empty")
        self._wait(_Pushed(self._notes, key))
        self._has_read_and_written()
        return self._notes.queues[key].popleft()

    def queue_len(self, key: str) -> int:
        return len(self._notes.queues.get(key, ()))

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(_Note(self._notes, keys), timeout)

    def _wait(self, wait: _Note | _Pushed, timeout: timedelta | None = None) -> None:
        if not wait.is_over():
            limit = self.timeout if timeout is None else timeout
            wait.timeout = limit.total_seconds() if limit < _FOR_EVER else None
            self._world.turns.wait(self._rank, wait)
        self._world.happened.reads_note(self._rank)
        if not wait.is_over() and wait.timeout is not None:
            keys = ", ".join(f"/{key}" for key in wait.keys)
            raise dist.DistStoreError(
                f"wait timeout after {1000 * wait.timeout:.0f}ms, keys: {keys}"
            )

    def _has(self, keys: Sequence[str]) -> bool:
        self._world.happened.reads_note(self._rank)
        return all(key in self._notes.values for key in keys)

    def _has_read_and_written(self) -> None:
        self._world.happened.reads_note(self._rank)
        self._world.happened.writes_note(self._rank)


@final
class TCPStore(RankStore):
    """The one at a port, whatever the name of this machine.

    Args:
        host_name: Where the program expects it.
        port: Its port. 0: it gets one that no other store of the ranks has.
        world_size: Not used: all ranks are there when they begin.
        is_master: Not used: ranks share one process, which keeps it.
        timeout: How long a rank waits in it.
        options: What torch's has besides, for its connections.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = _FOR_EVER,
        *args: Any,
        **options: Any,
    ) -> None:
        self._host, self._port = host_name, port or next(_drawn_ports)
        super().__init__(_world_here(), current_rank(), f"port {self._port}")
        self.set_timeout(timeout)

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        return self._port


@final
class FileStore(RankStore):
    """The one of a file, which is not written."""

    def __init__(self, path: str, *args: Any, **options: Any) -> None:
        self._path = os.fspath(path)
        super().__init__(
            _world_here(), current_rank(), f"file {os.path.realpath(self._path)}"
        )

    @property
    def path(self) -> str:
        return self._path


# The classes by torch's names.
STORES: dict[str, type[RankStore]] = {"TCPStore": TCPStore, "FileStore": FileStore}


def _world_here() -> World:
    world = current_world()
    if world is None:
        raise RuntimeError(
            "A store was made on a thread that is no rank: make it where the ranks of "
            "the program run."
        )
    return world


@final
class _Note(Wait):
    def __init__(self, notes: Notes, keys: Sequence[str]) -> None:
        self._notes, self.keys = notes, keys

    def is_over(self) -> bool:
        return all(key in self._notes.values for key in self.keys)

    def describe(self) -> str:
        missing = ", ".join(
            repr(key) for key in self.keys if key not in self._notes.values
        )
        return f"waits for {missing} in the store of torch.distributed"


@final
class _Pushed(Wait):
    def __init__(self, notes: Notes, key: str) -> None:
        self._notes, self.keys = notes, [key]

    def is_over(self) -> bool:
        return bool(self._notes.queues.get(self.keys[0]))

    def describe(self) -> str:
        return (
            f"waits for what is pushed to {self.keys[0]!r} in the store of "
            "torch.distributed"
        )


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
