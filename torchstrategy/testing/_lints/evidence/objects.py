"""What is known of objects of the program while they are there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar, final

K = TypeVar("K")
V = TypeVar("V")


@final
class Objects(MutableMapping[K, V]):
    """A dictionary whose keys are objects, and does not keep them.

    It goes by which object it is. A program's own class may have no hash, or an `==`
    that gives a tensor.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Callable[[], Any], V]] = {}

    def __setitem__(self, key: K, value: V) -> None:
        own = id(key)
        there: Callable[[], Any]
        try:
            there = weakref.ref(key, lambda gone: self._forget(own, gone))
        except TypeError:  # one of a class with `__slots__`: it stays
            there = _Kept(key)
        self._by_id[own] = there, value

    def __getitem__(self, key: K) -> V:
        there, value = self._by_id[id(key)]
        if there() is not key:
            raise KeyError(key)
        return value

    def __delitem__(self, key: K) -> None:
        del self._by_id[id(key)]

    def __iter__(self) -> Iterator[K]:
        keys = [there() for there, _ in list(self._by_id.values())]
        return iter([key for key in keys if key is not None])

    def __len__(self) -> int:
        return len(self._by_id)

    def _forget(self, own: int, gone: Any) -> None:
        if own in self._by_id and self._by_id[own][0] is gone:
            del self._by_id[own]


@final
class _Kept:
    """What a reference would be for an object that nobody can refer to otherwise.

    Who refers to such an object keeps it.
    """

    def __init__(self, key: Any) -> None:
        self._key = key

    def __call__(self) -> Any:
        return self._key
