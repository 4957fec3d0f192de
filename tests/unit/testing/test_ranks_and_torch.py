"""The private names of torch that ranks need: each does what `_ranks/torch_internals.py` says of it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import _random

from torchstrategy.testing import run_ranks
from torchstrategy.testing._ranks import torch_internals as internals


def test_the_variables_of_torch_distributed_are_those_that_a_group_writes() -> None:
    before = internals.take_variables()
    new = internals.variables_of_a_new_process()
    seen: dict[str, Any] = {}

    def main(rank: int) -> None:
        assert {name: type(value) for name, value in internals.take_variables().items()} == {
            name: type(value) for name, value in new.items()
        }
        dist.init_process_group("gloo")
        seen.update(internals.take_variables())
        dist.new_group([0])
        assert internals.take_variables()["_group_count"] > seen["_group_count"]

    run_ranks(main, 1)
    for name in ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag"):
        assert len(seen[name]) >= 1, name
    assert seen["_backend"] == "gloo" and seen["_default_pg_init_method"] == "env://"
    assert seen["_world"].default_pg is not None and seen["_group_count"] >= 1
    assert internals.take_variables() == before


def test_there_are_no_other_variables_of_a_process() -> None:
    """If torch gets a new one, ranks may have to have one each."""
    constants = {"_GLOO_AVAILABLE", "_MPI_AVAILABLE", "_NCCL_AVAILABLE", "_UCC_AVAILABLE", "_XCCL_AVAILABLE"}
    constants |= {"_TORCHCOMM_AVAILABLE", "_DistributedBackendOptions", "_CollOp", "_P2POpMeta"}
    kinds = (dict, list, set, int, type(None))
    found = {
        name
        for name, value in vars(c10d).items()
        if name.startswith("_") and not name.startswith("__") and isinstance(value, kinds) and not callable(value)
    }
    assert found - constants - internals.variables_of_a_new_process().keys() == set()


def test_the_generator_of_distributed_tensors_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = object()
    monkeypatch.setattr(_random, "_rng_tracker", tracker)
    assert internals.take_variables()["_rng_tracker"] is tracker
    internals.put_variables(internals.take_variables() | {"_rng_tracker": None})
    assert _random._rng_tracker is None


def test_with_isolation_each_thread_has_a_table_of_groups() -> None:
    found: list[str] = []

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        name = c10d._get_default_group().group_name
        found.append(c10d._resolve_process_group(name).group_name)

        def look() -> None:
            try:
                c10d._resolve_process_group(name)
            except RuntimeError as error:
                found.append(str(error).splitlines()[0])

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    run_ranks(main, 1)
    assert len(found) == 2 and found[1].startswith("Could not resolve the process group")


def test_the_cache_of_fake_tensors_is_emptied() -> None:
    with FakeTensorMode():
        torch.ones(2) + torch.ones(2)
        torch.ones(2) + torch.ones(2)
    assert FakeTensorMode.cache
    internals.forget_fake_results()
    assert not FakeTensorMode.cache


def test_groups_are_made_by_us_and_the_functions_are_put_back() -> None:
    names = ("_new_process_group_helper", "rendezvous", "_store_based_barrier", "_get_default_timeout")
    before = [getattr(c10d, name) for name in names], dist.TCPStore, dist.FileStore, torch.cuda.nccl.version

    def main(rank: int) -> None:
        assert c10d._get_default_timeout(dist.Backend("nccl")) > timedelta(0)
        assert len(torch.cuda.nccl.version()) == 3
        dist.init_process_group("nccl")
        assert type(c10d._get_default_group()).__name__ == "RankGroup"

    run_ranks(main, 2)
    after = [getattr(c10d, name) for name in names], dist.TCPStore, dist.FileStore, torch.cuda.nccl.version
    assert after == before


def test_a_sum_with_a_factor_is_that_of_nccl() -> None:
    operation = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
    assert internals.factor_of(operation) == 0.5

    def main(rank: int) -> float:
        dist.init_process_group("nccl")
        x = torch.full((1,), 1.0 + rank)
        dist.all_reduce(x, op=operation)
        return x.item()

    assert run_ranks(main, 2)[0] == [1.5, 1.5]


def test_torch_calls_collectives_from_the_files_that_are_named() -> None:
    assert [dist.all_reduce.__module__, dist.all_reduce.__globals__["__name__"]] == [  # type: ignore[attr-defined]
        internals.ENTRANCES[0],
        internals.ENTRANCES[1],
    ]


def test_what_is_called_after_backward_is_called_at_its_end() -> None:
    happened: list[str] = []
    x = torch.ones(1, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        assert internals.after_backward(lambda: happened.append("after"))
        happened.append("hook")

    (y := x * 2).register_hook(hook)
    x.register_hook(lambda gradient: happened.append("the last gradient"))
    y.backward()
    assert happened == ["hook", "the last gradient", "after"]
    assert not internals.after_backward(lambda: None)  # no backward runs
