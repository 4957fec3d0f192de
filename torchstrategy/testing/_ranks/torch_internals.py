"""The private names of torch that only ranks in one process need, each with its reason.

When torch moves one of them, this file changes and no other does. `tests/unit/testing/test_ranks_and_torch.py` has a
test for each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_c10d: Any = torch._C._distributed_c10d
# C++ keeps a table of process groups by name. With isolation, each thread has a table of its own.
isolate_threads: Callable[[bool], None] = _c10d._set_thread_isolation_mode
_dist: Any = dist
Store: Any = _dist.Store  # type checkers do not know it

_TIMEOUT = timedelta(minutes=30)  # torch asks for one; nothing here waits for a clock

# What a process has once, and ranks on threads must not share: the variables of `torch.distributed`, with what each
# holds in a process that has just imported it.
_OF_A_PROCESS: dict[str, Callable[[], Any]] = {
    "_pg_map": dict,
    "_pg_names": dict,
    "_pg_group_ranks": dict,
    "_pg_backend_config": dict,
    "_group_count": int,
    "_tags_to_pg": dict,
    "_pg_to_tag": dict,
    "_backend": lambda: None,
    "_world": c10d._World,
    "_default_pg_init_method": lambda: None,
}
# The generator that DTensor draws from. The module is imported with the first DTensor, perhaps in the middle of a run.
_DTENSOR_RANDOM, _TRACKER = "torch.distributed.tensor._random", "_rng_tracker"
_FAKE_TENSORS = "torch._subclasses.fake_tensor"


def variables_of_a_new_process() -> dict[str, Any]:
    """What `put_variables` gives `torch.distributed` for a rank that has not run yet."""
    return {name: make() for name, make in _OF_A_PROCESS.items()} | {_TRACKER: None}


def take_variables() -> dict[str, Any]:
    """What the variables of `torch.distributed` hold now."""
    taken = {name: getattr(c10d, name) for name in _OF_A_PROCESS}
    random = sys.modules.get(_DTENSOR_RANDOM)
    return taken | {_TRACKER: getattr(random, _TRACKER, None)}


def put_variables(values: dict[str, Any]) -> None:
    """Sets the variables of `torch.distributed` to what `take_variables` returned."""
    for name in _OF_A_PROCESS:
        setattr(c10d, name, values[name])
    if (random := sys.modules.get(_DTENSOR_RANDOM)) is not None:
        setattr(random, _TRACKER, values[_TRACKER])


def forget_fake_results() -> None:
    """Empties the cache of fake tensors, which takes the current device of one rank for that of all."""
    fake_tensors: Any = sys.modules.get(_FAKE_TENSORS)
    if fake_tensors is not None and fake_tensors.FakeTensorMode.cache:
        fake_tensors.FakeTensorMode.cache_clear()


@contextmanager
def groups_made_by(
    make: Callable[[str, list[int]], dist.ProcessGroup],
    store_of: Callable[[], Any],
    ranks: Callable[[int, int], tuple[int, int]],
) -> Iterator[None]:
    """A block in which `torch.distributed` asks `make` for every process group, whatever backend a program names.

    Args:
        make: Gets the name of a group and the ranks in it, none for the group of all.
        store_of: What a program that gives no store finds in its place.
        ranks: Gets the rank and the number of ranks that a program names, -1 for what it does not; returns true ones.
    """
    dist.Backend.register_backend(
        _BACKEND, lambda options, _: make(options.group_id, list(options.global_ranks_in_group)), True, ["cpu"]
    )
    real = c10d._new_process_group_helper

    def helper(
        size: int, rank: int, members: Any, backend: Any, store: Any, name: Any, *args: Any, **options: Any
    ) -> Any:
        # What is for one backend alone: a device that is bound eagerly, options of NCCL.
        for unused in ("device_id", "backend_options", "pg_options"):
            options.pop(unused, None)
        rank, size = ranks(rank, size) if not members else (rank, size)
        group, kept = real(size, rank, members, dist.Backend(_BACKEND), store, name, **options)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (dist.Backend(str(backend)), kept)  # what `dist.get_backend` says
        return group, kept

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        yield (store_of(), *ranks(rank, world_size))

    in_place: list[tuple[ModuleType, str, Any]] = [
        (c10d, "_new_process_group_helper", helper),
        (c10d, "rendezvous", rendezvous),
        (c10d, "_store_based_barrier", lambda *args, **options: None),
        (c10d, "_get_default_timeout", lambda backend: _TIMEOUT),  # torch's warns where it has no NCCL
        (torch.cuda.nccl, "version", lambda: _NCCL),
        (dist, "TCPStore", lambda *args, **options: store_of()),
        (dist, "FileStore", lambda *args, **options: store_of()),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in in_place]
    for module, name, value in in_place:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


_BACKEND = "torchstrategy_ranks"
_NCCL = (2, 27, 5)  # torch logs it with an error of a collective, and cannot find it where it has no NCCL


# The files through which every call of a collective passes.
ENTRANCES = (c10d.__name__, "torch.distributed.c10d_logger")


def factor_of(operation: Any) -> float:
    """The factor of a `PREMUL_SUM`, by which NCCL multiplies each rank's numbers before it adds them."""
    return float(operation.__getstate__()[1])


def after_backward(call: Callable[[], None]) -> bool:
    """Has a function called at the end of the backward pass that runs on this thread; False if none runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    try:
        engine.queue_callback(call)
    except RuntimeError:  # there is no other way to ask
        return False
    return True
