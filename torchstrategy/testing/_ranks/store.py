"""`torch.distributed`'s store, in which processes leave notes for each other. A rank that waits for one hands over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torchstrategy.testing._ranks.torch_internals import Store
from torchstrategy.testing._ranks.turns import Wait
from torchstrategy.testing._ranks.world import World


@final
class RankStore(Store):  # type: ignore[misc]
    """The store of all ranks, as one rank uses it. torch's C++ calls its methods with bytes."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__()
        self._world, self._rank = world, rank

    def set(self, key: str, value: Any) -> None:
        self._world.stored[key] = _as_bytes(value)
        self._world.happened.writes_note(self._rank)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._world.stored[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._world.stored.get(key, b"0")) + amount
        self._world.stored[key] = str(total).encode()
        self._has_read_and_written()
        return total

    def append(self, key: str, value: Any) -> None:
        self._world.stored[key] = self._world.stored.get(key, b"") + _as_bytes(value)
        self._has_read_and_written()

    def check(self, keys: Sequence[str]) -> bool:
        if not self._has(keys) and self._world.turns.has_others(self._rank):
            self._world.turns.poll(self._rank)
        return self._has(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        stored = self._world.stored
        if stored.get(key, b"") == _as_bytes(expected):
            stored[key] = _as_bytes(desired)
        self._has_read_and_written()
        return stored.get(key, _as_bytes(expected))

    def delete_key(self, key: str) -> bool:
        return self._world.stored.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._world.stored)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: Any) -> None:
        """Nothing here waits for a clock."""

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        if not self._has(keys):
            self._world.turns.wait(self._rank, _Note(self._world, keys))
            self._world.happened.reads_note(self._rank)

    def _has(self, keys: Sequence[str]) -> bool:
        self._world.happened.reads_note(self._rank)
        return all(key in self._world.stored for key in keys)

    def _has_read_and_written(self) -> None:
        self._world.happened.reads_note(self._rank)
        self._world.happened.writes_note(self._rank)


@final
class _Note(Wait):
    def __init__(self, world: World, keys: Sequence[str]) -> None:
        self._world, self._keys = world, keys

    def is_over(self) -> bool:
        return all(key in self._world.stored for key in self._keys)

    def describe(self) -> str:
        missing = ", ".join(repr(key) for key in self._keys if key not in self._world.stored)
        return f"waits for {missing} in the store of torch.distributed"


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
