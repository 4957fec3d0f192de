"""`fully_shard` on the CPU, in ranks: the numbers of one device.

Their memory is watched as the runner watches it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

from conditions import for_changes, for_releases
from torchstrategy.testing import lint_training, record_streams, run_ranks

RANKS, STEPS, ROWS = 4, 4, 8

# torch says of its own flattened meshes what it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")
Make = Callable[..., torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 1)
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.gain.to(x.dtype) * torch.tanh(layer(x))
        result: torch.Tensor = self.out(x)
        return result


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(
        ROWS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )
    return rows, rows.sum(1, keepdim=True)


def fit(
    net: Net, optimizer: torch.optim.Optimizer, rank: int, ranks: int, is_reduced: bool
) -> None:
    for step in range(STEPS):
        x, y = (part[rank::ranks] for part in batch(step))
        nn.functional.mse_loss(net(x).double(), y).backward()
        if is_reduced and net.gain.grad is not None:
            dist.all_reduce(net.gain.grad)
            net.gain.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(net: Net, make: Make, **options: Any) -> torch.optim.Optimizer:
    decayed = [
        parameter for name, parameter in net.named_parameters() if name != "gain"
    ]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [net.gain], "weight_decay": 0.0},
    ]
    return make(groups, lr=0.05, **options)


def sharded(
    make: Make, options: dict[str, Any], is_ignored: bool, **policies: Any
) -> list[list[torch.Tensor]]:
    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("gloo")
        mesh, net = init_device_mesh("cpu", (RANKS,)), make_net()
        for layer in net.layers:
            fully_shard(layer, mesh=mesh, **policies)
        fully_shard(
            net,
            mesh=mesh,
            ignored_params={net.gain} if is_ignored else None,
            **policies,
        )
        fit(net, optimizer_of(net, make, **options), rank, RANKS, is_ignored)
        return [
            (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
            .detach()
            .clone()
            for parameter in net.parameters()
        ]

    with record_streams(), lint_training():
        return run_ranks(main, RANKS)[0]


def on_one_device(make: Make, options: dict[str, Any]) -> list[torch.Tensor]:
    net = make_net()
    fit(net, optimizer_of(net, make, **options), 0, 1, False)
    return [parameter.detach() for parameter in net.parameters()]


@for_releases
@pytest.mark.parametrize("is_ignored", [True, False])
@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {}]
)
def test_adamw_steps_on_shards_and_on_a_parameter_that_is_ignored(
    options: dict[str, Any], is_ignored: bool
) -> None:
    expected = on_one_device(torch.optim.AdamW, options)
    for parameters in sharded(torch.optim.AdamW, options, is_ignored):
        assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


@for_changes
def test_sgd_with_momentum_steps_on_shards() -> None:
    options: dict[str, Any] = {"momentum": 0.9, "foreach": True}
    expected = on_one_device(torch.optim.SGD, options)
    for parameters in sharded(torch.optim.SGD, options, True):
        assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


@for_releases
@pytest.mark.parametrize("after_forward", [True, False, 2])
@pytest.mark.parametrize("is_offloaded", [True, False])
def test_shards_that_are_kept_gathered_or_on_the_cpu(
    after_forward: bool | int, is_offloaded: bool
) -> None:
    policies: dict[str, Any] = (
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if is_offloaded else {}
    )
    expected = on_one_device(torch.optim.AdamW, {})
    for parameters in sharded(
        torch.optim.AdamW, {}, True, reshard_after_forward=after_forward, **policies
    ):
        assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


@for_releases
def test_gradients_that_are_computed_and_reduced_in_other_dtypes() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    expected = on_one_device(torch.optim.AdamW, {})
    for parameters in sharded(torch.optim.AdamW, {}, True, mp_policy=policy):
        assert_close(parameters, expected, rtol=1e-3, atol=1e-3)


def test_distributed_tensors_are_saved_and_counted_as_in_processes() -> None:
    def main(rank: int) -> tuple[torch.Tensor, list[int]]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        versions = [tensor._version]
        tensor.mul_(2)
        versions.append(tensor._version)
        torch._foreach_mul_([tensor], 2)
        versions.append(tensor._version)
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        return torch.load(file, weights_only=False).full_tensor(), versions

    plainly = run_ranks(main, 2)[0]
    with record_streams():
        watched = run_ranks(main, 2)[0]
    for (whole, versions), (expected, counted) in zip(watched, plainly, strict=True):
        assert torch.equal(whole, torch.arange(4.0) * 4) and torch.equal(
            whole, expected
        )
        assert versions == counted


class Named(torch.Tensor):
    """A tensor that stands for another one, and says nothing of it."""

    content: torch.Tensor

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> Named:
        made: Named = torch.Tensor._make_wrapper_subclass(
            cls, content.shape, dtype=content.dtype
        )
        made.content = content
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # type: ignore[override]
        inner = [one.content if isinstance(one, Named) else one for one in args]
        result = func(*inner, **(kwargs or {}))
        return args[0] if result is inner[0] else result


def test_a_tensor_without_memory_of_its_own_is_no_error() -> None:
    inner = torch.ones(3)
    with record_streams() as record:
        Named(inner).mul_(2)
    assert torch.equal(inner, torch.full((3,), 2.0)) and record.races == []
