"""NCCL knows fewer dtypes than torch, and the values of replicas may have any of them.

A model with a complex parameter failed on three GPUs: torch's broadcast gives the real
and imaginary parts back as a dimension of their own. An all-reduce of int16 failed, and
one of bools added up their bytes: True and True made a bool with the byte 2, which is
no bool.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from nccl import let_nccl_join_simulated_devices
from problems import close
from torchstrategy import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
)
from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._group.native_dtypes import (
    as_addable,
    as_sendable,
    bits,
    from_addable,
    from_sendable,
)
from torchstrategy.testing import simulated_devices

SIM = simulated_devices()
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
OTHERS = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
every_dtype = pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX, *WHOLE], ids=str)
OPS = {
    "by NCCL": NcclAllReduce,
    "in packs": lambda: NcclAllReduce(num_packs=2),
    "one by one": lambda: NcclAllReduce(num_packs=0),
    "in groups": HierarchicalCopyAllReduce,
    "on one device": ReductionToOneDevice,
}


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of each sum that NCCL makes."""
    return let_nccl_join_simulated_devices(monkeypatch)


def numbers(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(seed)
        if dtype.is_complex or dtype.is_floating_point:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
        return torch.randint(
            0, 2 if dtype is torch.bool else 100, shape, generator=generator
        ).to(dtype)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """On the device where a scope makes tensors."""
    return tensor.to(torch.get_default_device())


def in_replicas(
    dtype: torch.dtype, shape: tuple[int, ...], replicas: int = 3
) -> PerReplica:
    return PerReplica(
        [numbers(dtype, shape, seed).to(SIM[seed]) for seed in range(replicas)]
    )


def added_by_torch(value: PerReplica) -> torch.Tensor:
    first, *others = (tensor.cpu() for tensor in value.values)
    for other in others:
        first = first + other
    return first


@every_dtype
@pytest.mark.parametrize("ops", OPS.values(), ids=OPS.keys())
def test_a_sum_is_that_of_torch(
    ops: Any, dtype: torch.dtype, sums: list[torch.dtype]
) -> None:
    values = [in_replicas(dtype, shape) for shape in [(3,), (), (2, 5), (7,)]]
    results = ops().batch_reduce(ReduceOp.SUM, [(value, value) for value in values])
    results += ops().batch_reduce(ReduceOp.SUM, [(value, "cpu") for value in values])
    assert len(results) == 2 * len(values)
    for result, value in zip(results, values * 2, strict=True):
        for component in (
            result.values
            if isinstance(result, torchstrategy.DistributedValues)
            else [result]
        ):
            assert component.dtype is dtype
            close(component.cpu(), added_by_torch(value))
            assert dtype is not torch.bool or int(bits(component).max()) <= 1
    assert sums


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("ops", OPS.values(), ids=OPS.keys())
def test_what_torch_does_not_add_up_is_refused_by_torch(
    ops: Any, dtype: torch.dtype, sums: list[torch.dtype]
) -> None:
    value = PerReplica([torch.ones(3).to(dtype).to(SIM[r]) for r in range(3)])
    with pytest.raises(
        (NotImplementedError, RuntimeError), match="not implemented for"
    ):
        ops().reduce(ReduceOp.SUM, value, value)
    assert not sums


class Mixed(nn.Module):
    """A model with tensors of all dtypes, most of an odd number of bytes.

    So nothing begins where it could.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(here(numbers(torch.complex128, (3,), 1)))
        self.bias = nn.Parameter(here(numbers(torch.float64, (1,), 2)))
        self.scale = nn.Parameter(here(numbers(torch.complex128, (), 3)))
        for index, dtype in enumerate([*FLOATING, *COMPLEX, *WHOLE, *OTHERS]):
            values = numbers(torch.int64, (3,), index) % 4
            self.register_buffer(f"buffer_{index}", here(values.to(dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight * self.scale).abs() + self.bias


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", ["central", "central, elsewhere", "mirrored"])
def test_a_model_with_all_dtypes_is_trained_as_in_plain_pytorch(
    kind: str, count: int, sums: list[torch.dtype]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64)
    devices = SIM[:count]
    if kind == "mirrored":
        strategy: torchstrategy.Strategy = torchstrategy.MirroredStrategy(devices)
    else:
        strategy = torchstrategy.CentralStorageStrategy(
            devices, SIM[4 if "elsewhere" in kind else 0]
        )
    with strategy.scope():
        model = Mixed()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    twin = Mixed()
    plain = torch.optim.Adam(twin.parameters(), lr=0.1)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset([x]):
            strategy.run(step, args=(batch,))
        plain.zero_grad()
        twin(x).square().mean().backward()
        plain.step()
        # What is written between runs goes to all replicas together.
        for buffers in (dict(model.named_buffers()), dict(twin.named_buffers())):
            for name in ("buffer_6", "buffer_8", "buffer_11"):
                buffers[name].copy_(buffers[name].flip(0))
            for name in ("buffer_4", "buffer_5"):
                buffers[name].mul_(1j)
    seen = strategy.run(
        lambda: {name: buffer.clone() for name, buffer in model.named_buffers()}
    )
    for name, expected in twin.state_dict().items():
        close(
            model.state_dict()[name].cpu().to(torch.complex128),
            expected.to(torch.complex128),
        )
        for component in seen[name].values if name in seen else []:
            assert component.dtype is expected.dtype
            close(component.cpu().to(torch.complex128), expected.to(torch.complex128))
    assert kind != "mirrored" or sums


@every_dtype
def test_the_forms_for_sending_lead_back(dtype: torch.dtype) -> None:
    for shape in [(), (3,), (2, 0), (2, 3)]:
        tensor = numbers(dtype, shape, 1)
        like = [tensor, tensor.t()] if tensor.dim() == 2 else [tensor]
        if dtype.is_complex:
            like += [tensor.conj(), torch._neg_view(tensor)]
        elif dtype.is_floating_point:
            like += [torch._neg_view(tensor)]
        for one in like:
            assert torch.equal(
                from_addable(as_addable(one), dtype), one.resolve_conj().resolve_neg()
            )
            assert not as_addable(one).is_complex() and not as_addable(one).is_neg()
            # In a buffer it may begin at any number.
            sent = as_sendable(one)
            buffer = torch.cat([torch.zeros(1, dtype=sent.dtype), sent.reshape(-1)])
            there = buffer[1:].view(sent.shape)
            assert torch.equal(
                from_sendable(there, one), one.resolve_conj().resolve_neg()
            )


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.uint16, torch.float8_e5m2], ids=str
)
def test_simulated_devices_refuse_to_broadcast_what_nccl_does_not_send(
    dtype: torch.dtype,
) -> None:
    tensor = torch.ones(3).to(dtype).to(SIM[0])
    for broadcast in (
        lambda: torch.nn.parallel.comm.broadcast(tensor, [0, 1]),
        lambda: torch.nn.parallel.comm.broadcast_coalesced([tensor], [0, 1]),
    ):
        with pytest.raises(RuntimeError, match="Unconvertible NCCL type"):
            broadcast()
    (same,) = torch.nn.parallel.comm.broadcast(tensor, [0])
    assert same.dtype is dtype
