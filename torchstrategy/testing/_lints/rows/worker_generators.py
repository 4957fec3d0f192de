"""Generators of random numbers in a data set, copied in the same state.

Each worker of a loader has a copy.
"""

from __future__ import annotations

import builtins
import dis
import os
import pickle
import random
import signal
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, SequentialSampler
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import asked, attribute, named_in
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint

_GENERATORS = (
    np.random.Generator,
    np.random.RandomState,
    random.Random,
    torch.Generator,
)
# What a worker calls, of data sets and transforms.
_ENTRIES = ("__getitem__", "__getitems__", "__call__", "forward")
_NAMED = ("LOAD_ATTR", "LOAD_METHOD")
# How far from the data set, how many parts of a list, and of all.
_DEEPEST, _MOST, _MOST_OF_ALL = 4, 64, 2000
# By their ids: a global of the program may refuse to be compared, as an array does.
_OF_THE_PROCESS = frozenset(
    map(id, (torch, np, random, os, torch.utils.data.get_worker_info, int, range))
)
_SECONDS = 5.0  # that a row may take


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
    """Looks for data sets with a generator that was seeded too early.

    It was before the workers of a loader get a copy of it.

    A row is drawn twice in a process of its own, each time from another state of the
    generator: it has to change, and to come out different, since a row that seeds it
    ends with the same state. Loaders that do not shuffle are left alone: some programs
    want each evaluation to draw the same. So are those with a `worker_init_fn` that may
    seed what the data set has, and not only the generators that each process has
    anyway.
    """

    def __init__(self) -> None:
        self._by_loader: Objects[Any, dict[tuple[int, str], _Seen]] = Objects()
        self._all: list[_Seen] = []

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        if (
            not loader.num_workers
            or _may_seed(loader.worker_init_fn)
            or _is_in_order(loader)
            or facts.rank > 0
        ):
            return
        known = self._by_loader.setdefault(loader, {})
        if known and loader.persistent_workers:
            return
        for at, (owner, name_there, generator) in enumerate(
            _generators_in(loader.dataset, _DEEPEST, set())
        ):
            name, state = (
                f"{type(owner).__name__}.{name_there}",
                asked(partial(_state_of, generator), None),
            )
            if state is None:
                # That of the system has no state: each worker draws other numbers.
                continue
            if (at, name) not in known:
                known[at, name] = _Seen(here(), name, loader.num_workers, Counter())
                if _draws(loader.dataset, generator):
                    self._all.append(known[at, name])
            known[at, name].states[state] += 1

    @override
    def findings(self) -> list[Finding | None]:
        found = {
            (seen.opened_at, seen.name): seen for seen in self._all if _is_wrong(seen)
        }
        return [_finding(seen) for seen in found.values()]


def _may_seed(init: Any) -> bool:
    """Whether a `worker_init_fn` may change its worker's data set; None does not.

    It does not if it asks nobody but torch, NumPy and Python, and for no data set: it
    seeds the generators then that each process has anyway.
    """
    if init is None:
        return False
    if (
        not isinstance(init, FunctionType)
        or init.__closure__
        or init.__defaults__
        or init.__kwdefaults__
    ):
        return True
    instructions = list(_instructions_of(init.__code__))
    if any(
        one.argval == "dataset" or one.opname.startswith(("IMPORT", "STORE_ATTR"))
        for one in instructions
    ):
        return True
    known = {**vars(builtins), **init.__globals__}
    asked_of = [
        known.get(str(one.argval))
        for one in instructions
        if one.opname == "LOAD_GLOBAL"
    ]
    return not all(
        isinstance(one, (int, str)) or id(one) in _OF_THE_PROCESS for one in asked_of
    )


def _is_wrong(seen: _Seen) -> bool:
    return seen.workers > 1 or max(seen.states.values()) > 1


def _generators_in(
    thing: Any, depth: int, passed: set[int]
) -> Iterator[tuple[Any, str, Any]]:
    """The generators that parts of a data set draw from in a worker.

    Each comes with its owner and the name there.
    """
    if id(thing) in passed or len(passed) > _MOST_OF_ALL:
        return
    passed.add(id(thing))
    if isinstance(thing, (list, tuple, dict)):
        parts = list(dict.values(thing) if isinstance(thing, dict) else thing)
        if len(parts) <= _MOST and depth:
            for part in parts:
                yield from _generators_in(part, depth - 1, passed)
        return
    if isinstance(thing, type):
        return
    used: set[str] | None = None
    for name, value in named_in(thing).items():
        if isinstance(value, _GENERATORS):
            used = _names_used_in_workers(type(thing)) if used is None else used
            if name in used:
                yield thing, name, value
        elif depth and not isinstance(
            value, (str, bytes, int, float, np.ndarray, torch.Tensor)
        ):
            yield from _generators_in(value, depth - 1, passed)


def _names_used_in_workers(kind: type) -> set[str]:
    """The attributes that what a worker calls of a class uses.

    Whether it draws is asked later.
    """
    used: set[str] = set()
    waiting, known = list(_ENTRIES), set(_ENTRIES)
    while waiting:
        method = getattr(kind, waiting.pop(), None)
        if not isinstance(method, FunctionType):
            continue
        used |= {
            str(one.argval)
            for one in _instructions_of(method.__code__)
            if one.opname in _NAMED
        }
        more = {
            name for name in used if isinstance(getattr(kind, name, None), FunctionType)
        } - known
        waiting += more
        known |= more
    return used


def _instructions_of(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions with a name, those of functions within included."""
    yield from (
        one for one in dis.get_instructions(code) if isinstance(one.argval, str)
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions_of(constant)


def _is_in_order(loader: Any) -> bool:
    """Whether a loader's rows come in the data set's order, as in an evaluation."""
    sampler = loader.sampler
    if loader.batch_size is None:  # the sampler gives batches
        sampler = attribute(sampler, "sampler", sampler)
    elif type(loader.batch_sampler) is BatchSampler:
        sampler = loader.batch_sampler.sampler
    return (
        isinstance(sampler, SequentialSampler)
        or attribute(sampler, "shuffle", True) is False
    )


def _draws(dataset: Any, generator: Any) -> bool:
    """Whether a row draws from a generator, and does not seed it.

    Asked in a process that ends then, as a worker.
    """
    if not hasattr(os, "fork"):
        return False
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Of other threads, which a worker does not have either.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        answer = b"?"
        try:
            silent = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(silent, stream)
            before = _state_of(generator)
            dataset[0]
            first = _state_of(generator)
            _draw(generator)
            dataset[0]
            answer = b"y" if before != first != _state_of(generator) else b"n"
        finally:
            os.write(writing, answer)
            os._exit(0)
    os.close(writing)
    late = threading.Timer(_SECONDS, os.kill, (child, signal.SIGKILL))
    late.start()
    try:
        answer = os.read(reading, 1)
        os.waitpid(child, 0)
    finally:
        late.cancel()
        os.close(reading)
    return answer == b"y"


def _draw(generator: Any) -> None:
    """Draws a number."""
    if isinstance(generator, torch.Generator):
        torch.rand((), generator=generator, device=generator.device)
    else:
        generator.random()


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
    alike = (
        "All of them draw the same numbers for other rows"
        if seen.workers > 1
        else "It draws numbers"
    )
    again = f", and the same again in each of {times} epochs" if times > 1 else ""
    return finding(
        "loader-workers-draw-alike",
        f"The data set of the loader ({seen.opened_at}) has a generator, "
        f"`{seen.name}`, of which the {workers} of the loader "
        f"{'get a copy each' if seen.workers > 1 else 'gets a copy'}, in the same "
        f"state. {alike}{again}.",
        "Make it in the worker, when it is used first: "
        "`np.random.default_rng(torch.initial_seed())`. `torch.initial_seed()` is "
        "another number in each worker and in each epoch.",
        [seen.opened_at],
    )
