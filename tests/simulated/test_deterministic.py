"""`torch.use_deterministic_algorithms(True)` refuses what it does on GPUs only.

Nothing else is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

DEVICE = torch.device("sim:1")


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def backward(run: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> None:
    run(torch.rand(*shape, device=DEVICE, requires_grad=True)).sum().backward()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=DEVICE)


INDEX = torch.tensor([0, 1, 1, 2])

# By the name that the message has. What torch 2.11 said on an H100, but for those of
# the second half.
REFUSED: dict[str, Callable[[], Any]] = {
    "index_reduce_cuda": lambda: ones(4).index_reduce(
        0, INDEX.to(DEVICE), ones(4), "prod"
    ),
    "put_": lambda: ones(4).put_(INDEX.to(DEVICE), ones(4), accumulate=True),
    "embedding_bag_backward_cuda_max": lambda: backward(
        lambda w: F.embedding_bag(INDEX.to(DEVICE).view(2, 2), w, mode="max"), 4, 1
    ),
    "median CUDA with indices output": lambda: ones(2, 4).median(1),
    "_histc_cuda with floating point input": lambda: ones(4).histc(4, -2, 2),
    "_bincount_cuda": lambda: INDEX.to(DEVICE).bincount(ones(4)),
    "max_pool3d_with_indices_backward_cuda": lambda: backward(
        lambda x: F.max_pool3d(x, (1, 2, 2)), 1, 1, 2, 6, 6
    ),
    "adaptive_max_pool2d_backward_cuda": lambda: backward(
        lambda x: F.adaptive_max_pool2d(x, 2), 1, 2, 6, 6
    ),
    "adaptive_avg_pool2d_backward_cuda": lambda: backward(
        lambda x: F.adaptive_avg_pool2d(x, 2), 1, 2, 6, 6
    ),
    "adaptive_avg_pool3d_backward_cuda": lambda: backward(
        lambda x: F.adaptive_avg_pool3d(x, (1, 2, 2)), 1, 2, 6, 6
    ),
    "avg_pool3d_backward_cuda": lambda: backward(
        lambda x: F.avg_pool3d(x, (1, 2, 2)), 1, 2, 6, 6
    ),
    "fractional_max_pool2d_backward_cuda": lambda: backward(
        lambda x: F.fractional_max_pool2d(x, 2, output_size=2), 1, 2, 6, 6
    ),
    "max_unpooling2d_forward_out": lambda: F.max_unpool2d(
        *F.max_pool2d(ones(1, 2, 6, 6), 2, return_indices=True), kernel_size=2
    ),
    "upsample_bicubic2d_backward_out_cuda": lambda: backward(
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), 1, 2, 6, 6
    ),
    "upsample_linear1d_backward_out_cuda": lambda: backward(
        lambda x: F.interpolate(x, scale_factor=2, mode="linear"), 2, 6, 6
    ),
    "upsample_bilinear2d_aa_backward_out_cuda": lambda: backward(
        lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True), 1, 2, 6, 6
    ),
    "reflection_pad1d_backward_out_cuda": lambda: backward(
        lambda x: F.pad(x, (1, 1), "reflect"), 2, 6, 6
    ),
    "grid_sampler_2d_backward_cuda": lambda: backward(
        lambda x: F.grid_sample(
            x, torch.zeros(1, 2, 2, 2, device=DEVICE), align_corners=False
        ),
        1,
        2,
        6,
        6,
    ),
    "nll_loss2d_forward_out_cuda_template": lambda: F.cross_entropy(
        ones(1, 3, 2, 2), ones(1, 2, 2).long()
    ),
    "ctc_loss_backward_gpu": lambda: backward(
        lambda x: F.ctc_loss(
            x.log_softmax(-1),
            torch.tensor([[1, 2]], device=DEVICE),
            torch.tensor([5]),
            torch.tensor([2]),
        ),
        *(5, 1, 3),
    ),
    "adaptive_max_pool3d_backward_cuda": lambda: backward(
        lambda x: F.adaptive_max_pool3d(x, 2), 1, 2, 6, 6, 6
    ),
    "fractional_max_pool3d_backward_cuda": lambda: backward(
        lambda x: F.fractional_max_pool3d(x, 2, output_size=2), 1, 2, 6, 6, 6
    ),
    "grid_sampler_3d_backward_cuda": lambda: backward(
        lambda x: F.grid_sample(
            x, torch.zeros(1, 2, 2, 2, 3, device=DEVICE), align_corners=False
        ),
        1,
        2,
        6,
        6,
        6,
    ),
    "max_unpooling3d_forward_out": lambda: F.max_unpool3d(
        *F.max_pool3d(ones(1, 2, 6, 6, 6), 2, return_indices=True), kernel_size=2
    ),
    "reflection_pad3d_backward_out_cuda": lambda: backward(
        lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), "reflect"), 1, 2, 6, 6, 6
    ),
    "upsample_bicubic2d_aa_backward_out_cuda": lambda: backward(
        lambda x: F.interpolate(x, size=3, mode="bicubic", antialias=True), 1, 2, 6, 6
    ),
}

ALLOWED: dict[str, Callable[[], Any]] = {
    "scatter_add": lambda: ones(4).scatter_add(0, INDEX.to(DEVICE), ones(4)),
    "index_put": lambda: ones(4).index_put(
        (INDEX.to(DEVICE),), ones(4), accumulate=True
    ),
    "cumsum": lambda: ones(4).cumsum(0),
    "kthvalue": lambda: ones(4).kthvalue(2),
    "median": lambda: ones(4).median(),
    "histc_of_integers": lambda: INDEX.to(DEVICE).histc(4, 0, 3),
    "bincount": lambda: INDEX.to(DEVICE).bincount(),
    "global_average": lambda: backward(
        lambda x: F.adaptive_avg_pool2d(x, 1), 1, 2, 6, 6
    ),
    "max_pool2d": lambda: backward(lambda x: F.max_pool2d(x, 2), 1, 2, 6, 6),
    "bilinear": lambda: backward(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 1, 2, 6, 6
    ),
    "replicate": lambda: backward(lambda x: F.pad(x, (1, 1), "replicate"), 2, 6, 6),
    "embedding_bag": lambda: backward(
        lambda w: F.embedding_bag(INDEX.to(DEVICE).view(2, 2), w, mode="sum"), 4, 1
    ),
    "cross_entropy": lambda: F.cross_entropy(ones(4, 3), ones(4).long()),
    "cross_entropy_unreduced": lambda: F.cross_entropy(
        ones(1, 3, 2, 2), ones(1, 2, 2).long(), reduction="none"
    ),
    "matmul": lambda: ones(2, 2) @ ones(2, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_gpus_cannot_do_deterministically_is_refused(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    words = (
        f"{name} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. "
    )
    with pytest.raises(RuntimeError) as raised:
        REFUSED[name]()
    assert str(raised.value).startswith(
        words + "You can turn off determinism just for this operation, or"
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        REFUSED[name]()
    said = [
        warning
        for warning in caught
        if str(warning.message).startswith(f"{name} does not have a determ")
    ]
    assert said and "(True, warn_only=True)'. You can file an issue" in str(
        said[0].message
    )
    assert (
        name in ("put_", "max_unpooling2d_forward_out", "max_unpooling3d_forward_out")
        or len(said) == 1
    )
    torch.use_deterministic_algorithms(False)
    REFUSED[name]()


@pytest.mark.parametrize("run", ALLOWED.values(), ids=ALLOWED)
def test_what_gpus_do_deterministically_runs(run: Callable[[], Any]) -> None:
    torch.use_deterministic_algorithms(True)
    run()
