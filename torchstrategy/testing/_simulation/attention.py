"""Attention as one kernel, as on GPUs: the scores of all pairs of tokens are never held."""

from __future__ import annotations

from typing import Any

import torch

from torchstrategy.testing._simulation.backend import Backend, operator
from torchstrategy.testing._simulation.kernels import written_for_cpu

_ONE_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
_as_one = operator(_ONE_KERNEL)
_taken_apart = operator("_scaled_dot_product_attention_math")


def register(backend: Backend) -> None:
    """Registers the kernels."""
    for name in (_ONE_KERNEL, f"{_ONE_KERNEL}_backward"):
        backend.kernel(name)(written_for_cpu(operator(name), operator(name)))  # it draws nothing without dropout
    # torch composes attention of other operators above autograd, so the kernel has to stand there, too.
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        backend.kernel("scaled_dot_product_attention", key)(_attention)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    # Fused kernels of GPUs also know masks, dropout and groups of queries. The CPU has none that do all of it.
    if attn_mask is None and not dropout_p and not enable_gqa and _can_be_one(query, key, value):
        return _as_one(query, key, value, 0.0, is_causal, scale=scale)[0]
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return _taken_apart(query, key, value, _additive(attn_mask, query), dropout_p, is_causal, None, **options)[0]


def _can_be_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    tensors = (query, key, value)
    cuda: Any = torch.backends.cuda  # where `torch.nn.attention.sdpa_kernel` notes what is allowed, for all devices
    return (
        (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled())
        and all(tensor.dim() == 4 and tensor.numel() and tensor.stride(-1) == 1 for tensor in tensors)
        and len({tensor.size()[:2] for tensor in tensors}) == 1
        and len({tensor.size(-1) for tensor in tensors}) == 1
        and key.size(2) == value.size(2)
        and len({tensor.dtype for tensor in tensors}) == 1
        and query.is_floating_point()
        # A DTensor knows how the kernel of CUDA is divided among ranks, and not how this one is.
        and not any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors)
    )


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask that is added to the scores; a mask of bools says which of them take part."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
