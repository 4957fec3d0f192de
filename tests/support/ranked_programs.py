"""Programs of several ranks, as people write them for torchrun.

With what plain PyTorch computes in their place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from torchstrategy.testing import RankRecord, run_ranks

RANKS, STEPS = 4, 3
Place = Callable[[int], torch.device]  # the device of a rank


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def rows_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: torch.device
) -> None:
    """What one rank of a program does."""
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows_of(rank, step).to(device)).square().mean().backward()
        optimizer.step()


def fit_plainly() -> list[torch.Tensor]:
    """The same on one device, with the rows of all ranks."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(
            torch.cat([rows_of(rank, step) for rank in range(RANKS)])
        ).square().mean().backward()
        optimizer.step()
    return numbers_of(model)


def numbers_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def whole_numbers_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]  # type: ignore[attr-defined]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def check_all(results: list[Any], expected: Any) -> None:
    assert len(results) == RANKS
    for result in results:
        assert_close(result, expected, rtol=1e-12, atol=1e-12)


# Programs


def all_reduce(place: Place) -> RankRecord:
    def main(rank: int) -> torch.Tensor:
        dist.init_process_group("nccl")
        total = torch.full((3,), float(rank), dtype=torch.float64, device=place(rank))
        dist.all_reduce(total)
        dist.barrier()
        return total.cpu()

    results, record = run_ranks(main, RANKS)
    check_all(results, torch.full((3,), 6.0, dtype=torch.float64))
    assert record.bytes == {"all_reduce": 24, "barrier": 0}
    return record


def distributed_data_parallel(place: Place) -> RankRecord:
    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(make_model().to(place(rank)))
        fit(model, adam(model), rank, place(rank))
        return numbers_of(model)

    results, record = run_ranks(main, RANKS)
    check_all(results, fit_plainly())
    gradients = sum(parameter.nbytes for parameter in make_model().parameters())
    assert record.bytes["all_reduce"] == STEPS * gradients
    return record


def fully_sharded(place: Place) -> RankRecord:
    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("nccl")
        mesh, model = (
            init_device_mesh(place(rank).type, (RANKS,)),
            make_model().to(place(rank)),
        )
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        fit(model, adam(model), rank, place(rank))
        return whole_numbers_of(model)

    results, record = run_ranks(main, RANKS)
    check_all(results, fit_plainly())
    # A layer is gathered for forward and for backward, and its gradients are scattered
    # once. Rows that do not divide by the number of ranks are padded. `full_tensor`
    # gathers each parameter once more at the end.
    layers = [layer for layer in make_model() if isinstance(layer, nn.Linear)]
    padded = [
        -(-rows.shape[0] // RANKS) * RANKS * rows[0].nbytes
        for layer in layers
        for rows in layer.parameters()
    ]
    assert record.counts["reduce_scatter"] == STEPS * len(layers)
    assert record.bytes["reduce_scatter"] == STEPS * sum(padded)
    assert record.bytes["all_gather"] == (2 * STEPS + 1) * sum(padded)
    return record


def hybrid_sharded(place: Place) -> RankRecord:
    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("nccl")
        mesh = init_device_mesh(
            place(rank).type, (2, 2), mesh_dim_names=("replicate", "shard")
        )
        model = make_model().to(place(rank))
        fully_shard(model, mesh=mesh)
        fit(model, adam(model), rank, place(rank))
        return whole_numbers_of(model)

    results, record = run_ranks(main, RANKS)
    check_all(results, fit_plainly())
    assert {
        collective.ranks
        for collective in record.collectives
        if collective.kind == "all_reduce"
    } == {
        (0, 2),
        (1, 3),
    }
    return record


def distributed_tensors(place: Place) -> RankRecord:
    def numbers(seed: int, *sizes: int) -> torch.Tensor:
        return torch.randn(
            *sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )

    def main(rank: int) -> torch.Tensor:
        dist.init_process_group("nccl")
        mesh = init_device_mesh(place(rank).type, (RANKS,))
        x = distribute_tensor(numbers(1, 8, 6).to(place(rank)), mesh, [Shard(0)])
        y = distribute_tensor(numbers(2, 6, 8).to(place(rank)), mesh, [Shard(1)])
        product = x @ y.redistribute(mesh, [Replicate()])
        return product.redistribute(mesh, [Replicate()]).to_local().cpu()  # type: ignore[attr-defined]

    results, record = run_ranks(main, RANKS)
    check_all(results, numbers(1, 8, 6) @ numbers(2, 6, 8))
    return record


def tensor_parallel(place: Place) -> RankRecord:
    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("nccl")
        mesh, model = (
            init_device_mesh(place(rank).type, (RANKS,)),
            make_model().to(place(rank)),
        )
        parallelize_module(
            model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        y = model(rows_of(0, 0).to(place(rank)))
        y.square().mean().backward()
        gradients = [
            model[0].weight.grad.full_tensor(),
            model[2].weight.grad.full_tensor(),
            model[4].weight.grad,
        ]
        return [y.detach().cpu(), *(gradient.cpu() for gradient in gradients)]

    results, record = run_ranks(main, RANKS)
    plain = make_model()
    y = plain(rows_of(0, 0))
    y.square().mean().backward()
    expected = [layer.weight.grad for layer in plain if isinstance(layer, nn.Linear)]
    check_all(results, [y.detach(), *expected])
    return record


def checkpoints(place: Place) -> RankRecord:
    with tempfile.TemporaryDirectory() as folder:

        def main(rank: int) -> list[torch.Tensor]:
            dist.init_process_group("nccl")
            mesh, model, other = (
                init_device_mesh(place(rank).type, (RANKS,)),
                make_model(0),
                make_model(1),
            )
            for each in (model, other):
                fully_shard(each.to(place(rank)), mesh=mesh)
            dcp.save(get_model_state_dict(model), checkpoint_id=folder)
            loaded = get_model_state_dict(other)
            dcp.load(loaded, checkpoint_id=folder)
            set_model_state_dict(other, loaded)
            return whole_numbers_of(other)

        results, record = run_ranks(main, RANKS)
    check_all(results, numbers_of(make_model(0)))
    return record


def objects(place: Place) -> RankRecord:
    def main(rank: int) -> tuple[Any, ...]:
        dist.init_process_group("gloo")
        gathered: list[Any] = [None] * RANKS
        dist.all_gather_object(gathered, {"rank": rank, "text": "a" * rank})
        broadcast = [rank]
        dist.broadcast_object_list(broadcast, src=2)
        scattered: list[Any] = [None]
        dist.scatter_object_list(
            scattered, [10, 11, 12, 13] if rank == 1 else None, src=1
        )
        return gathered, broadcast, scattered[0] - rank

    results, record = run_ranks(main, RANKS)
    everything = [{"rank": rank, "text": "a" * rank} for rank in range(RANKS)]
    assert results == [(everything, [2], 10)] * RANKS
    return record


def chain(place: Place) -> RankRecord:
    def main(rank: int) -> float:
        dist.init_process_group("nccl")
        x = torch.zeros(1, device=place(rank))
        if rank > 0:
            assert dist.recv(x, None if rank == 2 else rank - 1) == rank - 1
        if rank < RANKS - 1:
            dist.send(x + 1, rank + 1)
        return x.item()

    results, record = run_ranks(main, RANKS)
    assert results == [0.0, 1.0, 2.0, 3.0]
    assert [collective.ranks for collective in record.collectives] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]
    return record


def pipeline(place: Place) -> RankRecord:
    def layers() -> list[nn.Linear]:
        torch.manual_seed(0)
        return [nn.Linear(6, 6).double() for _ in range(RANKS)]

    x = torch.arange(24, dtype=torch.float64).view(4, 6) / 24
    target = torch.ones(4, 6, dtype=torch.float64)

    def main(rank: int) -> torch.Tensor:
        dist.init_process_group("nccl")
        layer = layers()[rank].to(place(rank))
        stage = PipelineStage(layer, rank, RANKS, place(rank))
        schedule = ScheduleGPipe(
            stage, 2, loss_fn=lambda y, wanted: (y - wanted).square().mean()
        )
        if rank == 0:
            schedule.step(x.to(place(rank)))
        elif rank == RANKS - 1:
            schedule.step(target=target.to(place(rank)))
        else:
            schedule.step()
        assert layer.weight.grad is not None
        return layer.weight.grad.cpu()

    results, record = run_ranks(main, RANKS)
    plain = layers()
    (nn.Sequential(*plain)(x) - target).square().mean().backward()
    assert_close(
        results, [layer.weight.grad for layer in plain], rtol=1e-12, atol=1e-12
    )
    return record


def uneven_inputs(place: Place) -> RankRecord:
    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(make_model().to(place(rank)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            for step in range(2 + rank):
                optimizer.zero_grad()
                model(rows_of(rank, step).to(place(rank))).mean().backward()
                optimizer.step()
        return numbers_of(model)

    results, record = run_ranks(main, RANKS)
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2 + RANKS - 1):
        optimizer.zero_grad()
        losses = [
            plain(rows_of(rank, step)).mean()
            for rank in range(RANKS)
            if step < 2 + rank
        ]
        # torch divides by all ranks, also by those that have joined.
        (sum(losses) / torch.tensor(RANKS)).backward()
        optimizer.step()
    check_all(results, numbers_of(plain))
    return record


def zero_redundancy(place: Place) -> RankRecord:
    # It is imported here since torch compiles some of it, which takes as long as the
    # test.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(make_model().to(place(rank)))
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
        )
        fit(model, optimizer, rank, place(rank))
        return numbers_of(model)

    results, record = run_ranks(main, RANKS)
    check_all(results, fit_plainly())
    return record


def synchronized_batch_norm(place: Place) -> RankRecord:
    def rows(rank: int) -> torch.Tensor:
        return torch.randn(
            3 + rank,
            4,
            generator=torch.Generator().manual_seed(rank),
            dtype=torch.float64,
        )

    def main(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        dist.init_process_group("nccl")
        layer, x = (
            nn.SyncBatchNorm(4).double().to(place(rank)),
            rows(rank).to(place(rank)).requires_grad_(),
        )
        y = layer(x)
        y.pow(3).sum().backward()
        assert x.grad is not None
        return y.detach().cpu(), x.grad.cpu()

    results, record = run_ranks(main, RANKS)
    x = torch.cat([rows(rank) for rank in range(RANKS)]).requires_grad_()
    y = nn.BatchNorm1d(4).double()(x)
    y.pow(3).sum().backward()
    assert_close(
        torch.cat([part for part, _ in results]), y.detach(), rtol=1e-9, atol=1e-9
    )
    assert_close(
        torch.cat([gradient for _, gradient in results]), x.grad, rtol=1e-9, atol=1e-9
    )
    return record


EVERYWHERE = [
    all_reduce,
    distributed_data_parallel,
    fully_sharded,
    hybrid_sharded,
    distributed_tensors,
    tensor_parallel,
    checkpoints,
    objects,
    chain,
    pipeline,
    uneven_inputs,
    zero_redundancy,
]  # torch's SyncBatchNorm refuses the CPU
