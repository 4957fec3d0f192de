"""Loaders and samplers."""

from __future__ import annotations

import functools
import threading
import weakref
from types import FunctionType
from typing import Any, final

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchstrategy.testing._lints.evidence.asking import asked, attribute
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.torch_internals import LoaderIterator
from torchstrategy.testing._lints.watching.replaced import Late, Method, Replaced, after
from torchstrategy.testing._lints.watching.telling import Telling


@final
class _Here(threading.local):
    opening: Any = None  # the loader whose iterator is being made


@final
class Loaders:
    """Replaces what begins a loader, and what draws and fetches its batches."""

    def __init__(self, telling: Telling, late: Late) -> None:
        self._telling = telling
        self._late = late
        self._here = _Here()
        self._samplers: set[type] = {DistributedSampler}  # whose `set_epoch` is watched
        self._loaders: Objects[Any, Any] = Objects()  # by their iterators

    def replaced(self) -> Replaced:
        """What is replaced."""
        return [
            (DataLoader, "__iter__", self._iterating(DataLoader.__iter__)),
            (LoaderIterator, "__next__", self._getting(LoaderIterator.__next__)),
            (LoaderIterator, "_next_index", self._drawing(LoaderIterator._next_index)),
            (
                DistributedSampler,
                "set_epoch",
                after(DistributedSampler.set_epoch, self._sets_epoch),
            ),
        ]

    def _sets_epoch(self, sampler: Any, *_: Any, **__: Any) -> None:
        self._telling.saw("sets_epoch", sampler)

    def _watch_sampler(self, sampler: Any) -> None:
        """Watches `set_epoch` of a program's own sampler, from its first loader on."""
        kind = next(
            (one for one in type(sampler).__mro__ if "set_epoch" in vars(one)), None
        )
        if kind is None or kind in self._samplers or not self._late.is_open:
            return
        self._samplers.add(kind)
        method = vars(kind)["set_epoch"]
        if isinstance(method, FunctionType):
            self._late.replace(kind, "set_epoch", after(method, self._sets_epoch))

    def _iterating(self, iterate: Method) -> Method:
        @functools.wraps(iterate)
        def told(loader: Any) -> Any:
            if self._telling.session() is None:
                return iterate(loader)
            batches = attribute(loader, "batch_sampler")
            for sampler in (
                batches,
                attribute(batches, "sampler"),
                attribute(loader, "sampler"),
            ):
                # Its class may refuse to be changed.
                asked(functools.partial(self._watch_sampler, sampler), None)
            if not isinstance(loader.dataset, IterableDataset):
                self._telling.saw("opened", loader)
            before, self._here.opening = self._here.opening, loader
            try:
                iterator = iterate(loader)
            finally:
                self._here.opening = before
            # `for batch in DataLoader(...)` keeps the iterator alone. One that keeps
            # its iterator is kept by others.
            keeps = bool(getattr(loader, "persistent_workers", False))
            self._loaders[iterator] = (
                weakref.ref(loader) if keeps else functools.partial(_same, loader)
            )
            return iterator

        return told

    def _getting(self, get: Method) -> Method:
        @functools.wraps(get)
        def told(iterator: Any) -> Any:
            batch = get(iterator)
            loader = self._loader_of(iterator)
            if loader is not None and isinstance(loader.dataset, IterableDataset):
                self._telling.saw("got", loader, batch)
            return batch

        return told

    def _drawing(self, draw: Method) -> Method:
        @functools.wraps(draw)
        def told(iterator: Any) -> Any:
            # It draws rows already while the iterator is made. A loader is false, or
            # asks for its length, as a bool.
            opening = self._here.opening
            loader = self._loader_of(iterator) if opening is None else opening
            if loader is None or isinstance(loader.dataset, IterableDataset):
                return draw(iterator)
            try:
                rows = draw(iterator)
            except StopIteration:
                self._telling.saw("drew", loader, None)
                raise
            self._telling.saw("drew", loader, rows)
            return rows

        return told

    def _loader_of(self, iterator: Any) -> Any:
        there = self._loaders.get(iterator)
        return None if there is None else there()


def _same(value: Any) -> Any:
    return value
