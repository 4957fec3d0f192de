"""Mixed precision: what runs in it, what never does, and scaled gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.testing import assert_close

ZERO, ONE = torch.device("sim:0"), torch.device("sim:1")

LOWER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x, x[0]),
    "convolution": lambda x: F.conv1d(x[None], x[:, :, None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}
FULL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": lambda x: x.half().exp(),
    "softmax": lambda x: x.half().softmax(1),
    "sum": lambda x: x.half().sum(),
    "layer_norm": lambda x: F.layer_norm(x.half(), (4,)),
    "mse_loss": lambda x: F.mse_loss(x.half(), x.half()),
    "pow": lambda x: x.half() ** 2,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
class TestAutocast:
    @pytest.mark.parametrize("calculate", LOWER.values(), ids=LOWER)
    def test_products_run_in_the_lower_precision(
        self, calculate: Any, dtype: torch.dtype
    ) -> None:
        x = torch.randn(4, 4)
        with torch.autocast("sim", dtype=dtype):
            assert calculate(x.to(ONE)).dtype == dtype
            assert calculate(x).dtype == torch.float32  # the CPU's is another switch
            with torch.autocast("sim", enabled=False):
                assert calculate(x.to(ONE)).dtype == torch.float32
            assert (x.to(ONE).double() @ x.to(ONE).double()).dtype == torch.float64

    @pytest.mark.parametrize("calculate", FULL.values(), ids=FULL)
    def test_what_loses_numbers_runs_in_full_precision(
        self, calculate: Any, dtype: torch.dtype
    ) -> None:
        x = torch.randn(4, 4, device=ONE)
        with torch.autocast("sim", dtype=dtype):
            assert calculate(x).dtype == torch.float32

    def test_two_precisions_meet_in_the_wider(self, dtype: torch.dtype) -> None:
        x = torch.randn(4, device=ONE)
        with torch.autocast("sim", dtype=dtype):
            assert torch.addcmul(x.to(dtype), x, x.to(dtype)).dtype == torch.float32
            assert torch.dot(x.to(dtype), x.to(dtype)).dtype == dtype

    def test_a_model_trains_as_under_the_cpus(self, dtype: torch.dtype) -> None:
        weights, x = torch.randn(4, 4), torch.randn(8, 4)

        def gradient(device: str) -> torch.Tensor:
            w = weights.to(device, copy=True).requires_grad_()
            with torch.autocast(torch.device(device).type, dtype=dtype):
                loss = F.linear(x.to(device), w).float().square().mean()
            loss.backward()
            assert w.grad is not None and w.grad.dtype == torch.float32
            return w.grad.cpu()

        assert_close(gradient("sim:1"), gradient("cpu"), rtol=2e-2, atol=2e-2)


def test_the_default_precision_is_that_of_accelerators() -> None:
    x = torch.randn(2, 2, device=ONE)
    with torch.autocast("sim"):
        assert torch.is_autocast_enabled("sim") and (x @ x).dtype == torch.float16
    assert not torch.is_autocast_enabled("sim") and (x @ x).dtype == torch.float32


@pytest.mark.parametrize("calculate", LOWER.values(), ids=LOWER)
def test_autocast_of_the_cpu_leaves_the_devices_alone(calculate: Any) -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert calculate(x).dtype == torch.bfloat16
        assert calculate(x.to(ONE)).dtype == torch.float32


def test_a_scaler_unscales_on_every_device_and_skips_steps_that_overflow() -> None:
    parameters = [nn.Parameter(torch.ones(2, device=device)) for device in (ZERO, ONE)]
    optimizer, scaler = torch.optim.SGD(parameters, lr=0.1), torch.amp.GradScaler("sim")

    def step(spoil: bool) -> None:
        optimizer.zero_grad()
        loss = parameters[0].sum() + parameters[1].sum().to(ZERO)
        scaler.scale(loss).backward()
        if spoil:
            assert parameters[1].grad is not None
            parameters[1].grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 100.0)
        scaler.step(optimizer)
        scaler.update()

    step(spoil=False)
    assert_close([p.detach().cpu() for p in parameters], [torch.full((2,), 0.9)] * 2)
    before = scaler.get_scale()
    step(spoil=True)
    assert scaler.get_scale() == before / 2
    assert_close([p.detach().cpu() for p in parameters], [torch.full((2,), 0.9)] * 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bit_floats_round_as_on_the_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(64)
    ours = x.to(ONE).to(dtype)
    assert ours.device == ONE and ours.dtype == dtype
    assert torch.equal(ours.float().cpu(), x.to(dtype).float())
    assert torch.equal(
        ours.view(8, 8).t()[1].float().cpu(), x.to(dtype).view(8, 8).t()[1].float()
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_a_module_of_another_precision_computes_what_the_cpus_computes(
    dtype: torch.dtype,
) -> None:
    layer = nn.Linear(4, 3).to(dtype)
    x = torch.randn(5, 4, dtype=dtype)
    expected = layer(x)
    ours = layer.to(ONE)(x.to(ONE))
    assert ours.dtype == dtype
    assert torch.equal(ours.cpu(), expected)
