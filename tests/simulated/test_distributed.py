"""torch's own data parallelism, with a thread for each rank.

Each thread has a simulated device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from torchstrategy.testing import cuda_alias, run_ranks

RANKS = 4


def fit(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_collectives_take_a_wrapper_that_has_no_memory_of_its_own() -> None:
    """It was read at the address 0, and the process crashed."""

    def main(rank: int) -> list[list[float]]:
        dist.init_process_group("nccl")
        mine = TwoTensor(
            *(
                torch.full((2,), rank + part, device=f"sim:{rank}")
                for part in (0.0, 10.0)
            )
        )
        got = torch.empty_like(mine)
        dist.scatter(got, [mine + 1, mine + 2] if rank == 0 else None)
        dist.all_reduce(mine)
        return [tensor.tolist() for tensor in (got.a, got.b, mine.a, mine.b)]

    assert run_ranks(main, 2)[0] == [
        [[1.0] * 2, [11.0] * 2, [1.0] * 2, [21.0] * 2],
        [[2.0] * 2, [12.0] * 2, [1.0] * 2, [21.0] * 2],
    ]


NO_BACKEND = "No backend type associated with device type cpu"
Call = Callable[[torch.Tensor], object]
REFUSED_BY_NCCL: list[tuple[Call, type[Exception], str]] = [
    (lambda x: dist.all_reduce(torch.ones(2)), RuntimeError, NO_BACKEND),
    (lambda x: dist.broadcast(torch.ones(2), 0), RuntimeError, NO_BACKEND),
    (
        lambda x: dist.all_gather([torch.ones(2)] * 2, torch.ones(2)),
        RuntimeError,
        NO_BACKEND,
    ),
    (lambda x: dist.send(torch.ones(2), 1 - x.device.index), RuntimeError, NO_BACKEND),
    (lambda x: dist.recv(torch.ones(2), 1 - x.device.index), RuntimeError, NO_BACKEND),
    (lambda x: DistributedDataParallel(nn.Linear(2, 2)), RuntimeError, NO_BACKEND),
    (
        lambda x: dist.all_gather_into_tensor(torch.ones(4), x),
        ValueError,
        "Tensors must be CUDA and dense",
    ),
    (
        lambda x: dist.all_reduce(torch.ones(2, 3).to(x.device).t()),
        ValueError,
        "Tensors must be contiguous",
    ),
    (
        lambda x: dist.broadcast(torch.ones(2, 4).to(x.device)[:, ::2], 0),
        ValueError,
        "Tensors must be contiguous",
    ),
    (
        lambda x: dist.all_reduce(x, dist.ReduceOp.BAND),
        ValueError,
        "Cannot use ReduceOp.BAND with NCCL",
    ),
    (
        lambda x: dist.reduce_scatter_tensor(x[:1], x, dist.ReduceOp.BXOR),
        ValueError,
        "Cannot use ReduceOp.BXOR with",
    ),
    (
        lambda x: dist.all_reduce(x > 0, dist.ReduceOp.AVG),
        TypeError,
        "Cannot use ReduceOp.AVG with boolean inputs",
    ),
    (
        lambda x: dist.all_reduce(x.short()),
        TypeError,
        "not supported for NCCL process group: Short",
    ),
    (
        lambda x: dist.all_reduce(torch.eye(2).to(x.device).to_sparse()),
        RuntimeError,
        "NCCL does not support all_reduce",
    ),
]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "call, error, words", REFUSED_BY_NCCL, ids=range(len(REFUSED_BY_NCCL))
)
def test_a_group_of_nccl_refuses_what_nccl_refuses_and_goes_on(
    call: Call, error: type[Exception], words: str
) -> None:
    def main(rank: int) -> list[float]:
        dist.init_process_group("nccl")
        x = torch.full((2,), rank + 1.0, device=f"sim:{rank}")
        with pytest.raises(error, match=words):
            call(x)
        dist.all_reduce(x)
        return x.tolist()

    assert run_ranks(main, 2)[0] == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "gloo"])
def test_a_group_with_gloo_takes_tensors_of_the_cpu_and_of_devices(
    backend: str,
) -> None:
    def main(rank: int) -> list[list[float]]:
        dist.init_process_group(backend)
        tensors = [
            torch.ones(2),
            torch.ones(2, 2)[:, 0],
            torch.ones(2, device=f"sim:{rank}"),
        ]
        for tensor in tensors:
            dist.all_reduce(tensor)
        assert (
            torch.device("cpu")
            in dist.distributed_c10d._get_default_group()._device_types
        )
        return [tensor.tolist() for tensor in tensors]

    assert run_ranks(main, 2)[0] == [[[2.0, 2.0]] * 3] * 2


def test_objects_and_channels_last_go_through_nccl() -> None:
    def main(rank: int) -> tuple[list[object], object, float]:
        dist.init_process_group("nccl")
        gathered: list[object] = [None, None]
        dist.all_gather_object(gathered, rank)
        sent = [rank + 5]
        dist.broadcast_object_list(sent, 1)
        image = torch.ones(1, 2, 3, 3, device=f"sim:{rank}").to(
            memory_format=torch.channels_last
        )
        dist.all_reduce(image)
        return gathered, sent[0], image.mean().item()

    assert run_ranks(main, 2)[0] == [([0, 1], 6, 2.0)] * 2


def test_a_program_reads_what_it_would_of_a_group_of_nccl() -> None:
    def main(rank: int) -> list[object]:
        dist.init_process_group("nccl", device_id=torch.device(f"sim:{rank}"))
        group = dist.distributed_c10d._get_default_group()
        with pytest.raises(RuntimeError, match=NO_BACKEND):
            group._get_backend(torch.device("cpu"))
        replica = DistributedDataParallel(
            nn.Linear(2, 2, device=f"sim:{rank}"), device_ids=[rank]
        )
        # It would split a group that is bound to a device.
        init_device_mesh("sim", (2,))
        logged = replica._get_ddp_logging_data()["backend_name"]  # type: ignore[operator]
        bound = group.bound_device_id
        assert bound is not None and bound.index == rank
        with cuda_alias():
            return [
                group.name(),
                logged,
                dist.get_backend_config(),
                dist.is_nccl_available(),
                *group._device_types,
            ]

    assert (
        run_ranks(main, 2)[0]
        == [["nccl", "nccl", "cuda:nccl", True, torch.device("sim")]] * 2
    )
