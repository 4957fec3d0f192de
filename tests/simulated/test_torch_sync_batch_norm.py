"""The kernels of torch's own SyncBatchNorm.

What they compute in two processes is batch norm of all rows.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchstrategy.testing import simulated_devices

SIM = simulated_devices()
EPS, MOMENTUM = 1e-5, 0.3


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 4), (7, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_two_processes_normalize_by_the_rows_of_both(
    shape: tuple[int, ...], affine: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight, bias = (
        torch.rand(2, 3, dtype=torch.float64).unbind() if affine else (None, None)
    )
    parameters = [p.requires_grad_() for p in (weight, bias) if p is not None]
    running = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    expected = F.batch_norm(
        x, running[0], running[1], weight, bias, True, MOMENTUM, EPS
    )
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, [x, *parameters], upstream)

    rows = [slice(0, 2), slice(2, 7)]  # of each process
    parts = [x.detach()[r].to(SIM[0]) for r in rows]
    w, b = (None if p is None else p.detach().to(SIM[0]) for p in (weight, bias))
    stats = [torch.batch_norm_stats(part, EPS) for part in parts]
    counts = torch.tensor(
        [part.numel() // 3 for part in parts], dtype=torch.float64, device=SIM[0]
    )
    mine = [
        torch.zeros(3, dtype=torch.float64, device=SIM[0]),
        torch.ones(3, dtype=torch.float64, device=SIM[0]),
    ]
    mean_all, invstd_all = (torch.stack(values) for values in zip(*stats, strict=True))
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        parts[0], mean_all, invstd_all, mine[0], mine[1], MOMENTUM, EPS, counts
    )
    outputs = [torch.batch_norm_elemt(part, w, b, mean, invstd, EPS) for part in parts]
    torch.testing.assert_close(torch.cat(outputs).cpu(), expected.detach())
    torch.testing.assert_close([t.cpu() for t in mine], running)

    ups = [upstream[r].to(SIM[0]) for r in rows]
    sums = [
        torch.batch_norm_backward_reduce(
            up, part, mean, invstd, w, True, affine, affine
        )
        for up, part in zip(ups, parts, strict=True)
    ]
    total, centered = (sums[0][i] + sums[1][i] for i in (0, 1))
    whole = [
        torch.batch_norm_backward_elemt(
            up, part, mean, invstd, w, total, centered, counts.int()
        )
        for up, part in zip(ups, parts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(whole).cpu(), gradients[0])
    for i, gradient in enumerate(gradients[1:], start=2):
        torch.testing.assert_close((sums[0][i] + sums[1][i]).cpu(), gradient)


def test_statistics_of_a_lower_precision_are_float32() -> None:
    mean, invstd = torch.batch_norm_stats(
        torch.randn(4, 3, device=SIM[0]).bfloat16(), EPS
    )
    assert mean.dtype is invstd.dtype is torch.float32
    normalized = torch.batch_norm_elemt(
        torch.ones(4, 3, device=SIM[0]).bfloat16(), None, None, mean, invstd, EPS
    )
    assert normalized.dtype is torch.bfloat16


def test_the_layer_trains_and_evaluates_in_one_process() -> None:
    torch.manual_seed(0)
    plain, layer = nn.BatchNorm1d(3), nn.SyncBatchNorm(3).to(SIM[1])
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer(x.to(SIM[1])).cpu(), plain(x))
    torch.testing.assert_close(layer.eval()(x.to(SIM[1])).cpu(), plain.eval()(x))
