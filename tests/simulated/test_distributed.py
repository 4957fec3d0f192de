"""torch's own data parallelism, with a thread for each rank and a simulated device for each thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.testing._internal.two_tensor import TwoTensor

from torchstrategy.testing import run_ranks

RANKS = 4
Trained = Callable[[nn.Module, torch.Tensor, int], list[torch.Tensor]]


def fit(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def with_ddp(model: nn.Module, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    replica = DistributedDataParallel(model, device_ids=[rank])
    fit(replica, x)
    return list(replica.parameters())


def with_fsdp(model: nn.Module, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("sim", (RANKS,))
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fit(model, x)
    shards = list(model.parameters())
    assert all(shard.to_local().device.index == rank for shard in shards)  # type: ignore[attr-defined]
    return [shard.full_tensor() for shard in shards]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
@pytest.mark.parametrize("kind", [with_ddp, with_fsdp])
def test_ranks_on_simulated_devices_train_as_one_process_does(kind: Trained) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 8)
    plain = copy.deepcopy(model)
    fit(plain, x)
    found: dict[int, list[torch.Tensor]] = {}
    errors: list[BaseException] = []
    store = dist.HashStore()

    def work(rank: int) -> None:
        torch.accelerator.set_device_index(rank)
        dist.init_process_group("threaded_sim", rank=rank, world_size=RANKS, store=store)
        try:
            found[rank] = [
                p.detach().cpu() for p in kind(copy.deepcopy(model).to("sim"), x.chunk(RANKS)[rank].to("sim"), rank)
            ]
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    if "threaded_sim" not in dist.Backend.backend_list:
        dist.Backend.register_backend("threaded_sim", threaded._create_threaded_pg, devices=["cpu", "sim"])
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch.autograd.set_multithreading_enabled(True)  # which older ones leave off
    if errors:
        raise errors[0]
    for rank in range(RANKS):
        for ours, theirs in zip(found[rank], plain.parameters(), strict=True):
            assert_close(ours, theirs.detach())


def test_collectives_take_a_wrapper_that_has_no_memory_of_its_own() -> None:
    """It was read at the address 0, and the process crashed."""

    def main(rank: int) -> list[list[float]]:
        dist.init_process_group("nccl")
        mine = TwoTensor(*(torch.full((2,), rank + part, device=f"sim:{rank}") for part in (0.0, 10.0)))
        got = torch.empty_like(mine)
        dist.scatter(got, [mine + 1, mine + 2] if rank == 0 else None)
        dist.all_reduce(mine)
        return [tensor.tolist() for tensor in (got.a, got.b, mine.a, mine.b)]

    assert run_ranks(main, 2)[0] == [
        [[1.0] * 2, [11.0] * 2, [1.0] * 2, [21.0] * 2],
        [[2.0] * 2, [12.0] * 2, [1.0] * 2, [21.0] * 2],
    ]
