"""Generators of random numbers in a data set, of which each worker of a loader has a copy in the same state."""

from __future__ import annotations

import dis
import pickle
import random
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import SequentialSampler
from typing_extensions import override

from torchstrategy.testing._lints.facts import Facts
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.places import Place, here

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_ENTRIES = ("__getitem__", "__getitems__", "__call__", "forward")  # what a worker calls, of data sets and transforms
# What a program uses that gives each worker, or each row, numbers of its own.
_SEEDS = {
    *("seed", "manual_seed", "set_state", "setstate", "bit_generator", "spawn", "clone_state"),
    *("get_worker_info", "initial_seed", "getpid", "default_rng", "RandomState", "Random", "Generator"),
}
_DEEPEST, _MOST = 4, 64  # how far from the data set, and how many parts of a list


@final
@dataclass
class _Seen:
    """What is known of the generator of a loader's data set.

    Attributes:
        opened_at: Where the rows of the loader are asked for.
        name: The class and the attribute that has the generator.
        workers: How many workers have a copy.
        states: How often workers have begun with each state.
    """

    opened_at: Place
    name: str
    workers: int
    states: Counter[int]


@final
class WorkerGenerators(Lint):
    """Looks for data sets with a generator that was seeded before the workers of a loader get a copy of it.

    What a worker calls has to use it, and to seed none. Loaders that do not shuffle are left alone: some programs want
    each evaluation to draw the same. So are those with a `worker_init_fn`.
    """

    def __init__(self) -> None:
        self._by_loader: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], _Seen]] = weakref.WeakKeyDictionary()
        self._all: list[_Seen] = []

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        is_in_order = isinstance(loader.sampler, SequentialSampler) and loader.batch_size is not None
        if not loader.num_workers or loader.worker_init_fn is not None or is_in_order or facts.rank > 0:
            return
        known = self._by_loader.setdefault(loader, {})
        if known and loader.persistent_workers:
            return
        for at, (owner, attribute, generator) in enumerate(_generators_in(loader.dataset, _DEEPEST, set())):
            name = f"{type(owner).__name__}.{attribute}"
            if (at, name) not in known:
                known[at, name] = _Seen(here(), name, loader.num_workers, Counter())
                self._all.append(known[at, name])
            known[at, name].states[_state_of(generator)] += 1

    @override
    def findings(self) -> list[Finding | None]:
        found = {(seen.opened_at, seen.name): seen for seen in self._all if _is_wrong(seen)}
        return [_finding(seen) for seen in found.values()]


def _is_wrong(seen: _Seen) -> bool:
    return seen.workers > 1 or max(seen.states.values()) > 1


def _generators_in(thing: Any, depth: int, passed: set[int]) -> Iterator[tuple[Any, str, Any]]:
    """The generators that parts of a data set draw from in a worker, each with its owner and the name there."""
    if id(thing) in passed:
        return
    passed.add(id(thing))
    if isinstance(thing, (list, tuple, dict)):
        parts = list(thing.values() if isinstance(thing, dict) else thing)
        if len(parts) <= _MOST and depth:
            for part in parts:
                yield from _generators_in(part, depth - 1, passed)
        return
    if isinstance(thing, type) or not hasattr(thing, "__dict__"):
        return
    used: set[str] | None = None
    for name, value in list(vars(thing).items()):
        if isinstance(value, _GENERATORS):
            used = _names_used_in_workers(type(thing)) if used is None else used
            if name in used:
                yield thing, name, value
        elif depth and not isinstance(value, (str, bytes, int, float, np.ndarray, torch.Tensor)):
            yield from _generators_in(value, depth - 1, passed)


def _names_used_in_workers(kind: type) -> set[str]:
    """The attributes that what a worker calls of a class uses and never sets; none if it seeds something."""
    used: set[str] = set()
    stored: set[str] = set()
    waiting, known = list(_ENTRIES), set(_ENTRIES)
    while waiting:
        method = getattr(kind, waiting.pop(), None)
        if not isinstance(method, FunctionType):
            continue
        for instruction in _instructions_of(method.__code__):
            (stored if instruction.opname == "STORE_ATTR" else used).add(str(instruction.argval))
        more = {name for name in used if isinstance(getattr(kind, name, None), FunctionType)} - known
        waiting += more
        known |= more
    return set() if used & _SEEDS else used - stored


def _instructions_of(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions with a name, those of functions within included."""
    yield from (one for one in dis.get_instructions(code) if isinstance(one.argval, str))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions_of(constant)


def _state_of(generator: Any) -> int:
    """A checksum of the state of a generator."""
    if isinstance(generator, np.random.Generator):
        state: Any = generator.bit_generator.state
    elif isinstance(generator, torch.Generator):
        state = generator.get_state().numpy()
    else:
        is_numpys = isinstance(generator, np.random.RandomState)
        state = generator.get_state(legacy=False) if is_numpys else generator.getstate()
    return zlib.crc32(pickle.dumps(state))


def _finding(seen: _Seen) -> Finding | None:
    times = max(seen.states.values())
    workers = f"{seen.workers} workers" if seen.workers > 1 else "worker"
    alike = "All of them draw the same numbers for other rows" if seen.workers > 1 else "It draws numbers"
    again = f", and the same again in each of {times} epochs" if times > 1 else ""
    return finding(
        "loader-workers-draw-alike",
        f"The data set of the loader ({seen.opened_at}) has a generator, `{seen.name}`, of which the {workers} of the "
        f"loader {'get a copy each' if seen.workers > 1 else 'gets a copy'}, in the same state. {alike}{again}.",
        "Make it in the worker, when it is used first: `np.random.default_rng(torch.initial_seed())`. "
        "`torch.initial_seed()` is another number in each worker and in each epoch.",
        [seen.opened_at],
    )
