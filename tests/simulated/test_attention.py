"""Attention is one kernel on simulated devices where it is one on GPUs.

It gives the CPU's numbers, in little memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchstrategy.testing import record_streams, run_ranks, simulated_devices

DEVICE = simulated_devices()[1]
SCORES = 512 * 512 * 8  # bytes

MASK = torch.ones(512, 512, dtype=torch.bool).tril()
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3, "is_causal": True},
    "a mask of bools": {"attn_mask": MASK},
    "a mask of numbers": {
        "attn_mask": torch.linspace(0, 1, 512 * 512, dtype=torch.float64).view(512, 512)
    },
}


def attention(device: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, 1, 512, 4, dtype=torch.float64) for _ in range(3)
    )
    tensors = [tensor.to(device).requires_grad_() for tensor in (query, key, value)]
    options = {
        name: v.to(device) if isinstance(v, torch.Tensor) else v
        for name, v in options.items()
    }
    result = F.scaled_dot_product_attention(*tensors, **options)
    return [result, *torch.autograd.grad(result.square().sum(), tensors)]


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_the_cpu(case: str) -> None:
    for one, other in zip(
        attention("cpu", CASES[case]), attention(DEVICE, CASES[case]), strict=True
    ):
        torch.testing.assert_close(other.cpu(), one)


def test_the_scores_are_not_held() -> None:
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)
    attention(DEVICE, {"is_causal": True})
    assert torch.accelerator.max_memory_allocated(DEVICE) - before < SCORES / 4
    with sdpa_kernel(SDPBackend.MATH):
        attention(DEVICE, {"is_causal": True})
    assert torch.accelerator.max_memory_allocated(DEVICE) - before > SCORES


def test_it_is_one_launch_forward_and_one_backward() -> None:
    tensor = torch.randn(1, 2, 8, 4, device=DEVICE, requires_grad=True)
    with record_streams() as record:
        result = F.scaled_dot_product_attention(tensor, tensor, tensor)
        assert [event.about for event in record.events] == [
            "aten._scaled_dot_product_flash_attention_for_cpu.default"
        ]
        result.backward(torch.ones_like(result))
    launches = [event.about for event in record.events if "attention" in event.about]
    assert len(launches) == 2


@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
def test_ranks_divide_the_heads_of_dtensors() -> None:
    # torch knows how the kernel of CUDA is divided, and not how that of the CPU is:
    # without it, causal attention of DTensors made a mask that was no DTensor, and
    # raised.
    def inputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [
            torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True)
            for _ in range(3)
        ]

    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("sim", (2,))
        divided = [
            distribute_tensor(
                t.detach().to(f"sim:{rank}"), mesh, [Shard(1)]
            ).requires_grad_()
            for t in inputs()
        ]
        result = F.scaled_dot_product_attention(*divided, is_causal=True)
        assert isinstance(result, DTensor) and result.to_local().shape[1] == 2
        gradients = torch.autograd.grad(result.square().sum(), divided)
        return [tensor.full_tensor().detach().cpu() for tensor in (result, *gradients)]  # type: ignore[attr-defined]

    whole = inputs()
    result = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected = [result.detach(), *torch.autograd.grad(result.square().sum(), whole)]
    results, _ = run_ranks(main, 2)
    for of_rank in results:
        torch.testing.assert_close(of_rank, expected)


def test_groups_of_queries_and_values_of_another_width_are_computed() -> None:
    query, key, value = (
        torch.randn(1, 4, 6, 8),
        torch.randn(1, 2, 5, 8),
        torch.randn(1, 2, 5, 3),
    )
    here = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    there = F.scaled_dot_product_attention(
        *(t.to(DEVICE) for t in (query, key, value)), enable_gqa=True
    )
    torch.testing.assert_close(there.cpu(), here)


def test_dropout_draws_from_the_device() -> None:
    tensor = torch.ones(1, 1, 64, 4, device=DEVICE)
    state = torch.sim.get_rng_state(DEVICE)
    one = F.scaled_dot_product_attention(tensor, tensor, tensor, dropout_p=0.5)
    torch.sim.set_rng_state(state, DEVICE)
    other = F.scaled_dot_product_attention(tensor, tensor, tensor, dropout_p=0.5)
    assert torch.equal(one, other) and not torch.equal(one, tensor)


def test_it_runs_in_inference_mode_and_under_autocast() -> None:
    tensor = torch.randn(1, 2, 8, 4, device=DEVICE)
    with torch.inference_mode(), torch.autocast(DEVICE.type, torch.bfloat16):
        assert (
            F.scaled_dot_product_attention(tensor, tensor, tensor).dtype
            is torch.bfloat16
        )
