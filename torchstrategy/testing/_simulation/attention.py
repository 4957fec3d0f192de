"""Attention as one kernel, as on GPUs.

It never holds the scores of all pairs of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from torchstrategy.testing._simulation.backend import Backend, operator
from torchstrategy.testing._simulation.kernels import written_for_cpu

_ONE_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
_as_one = operator(_ONE_KERNEL)
_taken_apart = operator("_scaled_dot_product_attention_math")
# The kernel of CUDA, with the same numbers. A DTensor knows how this one is divided
# among ranks, and not how that of the CPU is.
_OF_CUDA = "_scaled_dot_product_flash_attention"
_of_cuda = operator(_OF_CUDA)
_as_one_backward = operator(f"{_ONE_KERNEL}_backward")


def register(backend: Backend) -> None:
    """Registers the kernels."""
    for name in (_ONE_KERNEL, f"{_ONE_KERNEL}_backward"):
        # Without dropout, the kernel draws no random numbers.
        backend.kernel(name)(written_for_cpu(operator(name), operator(name)))
    backend.kernel(_OF_CUDA)(written_for_cpu(_of_cuda, _flash))
    backend.kernel(f"{_OF_CUDA}_backward")(
        written_for_cpu(operator(f"{_OF_CUDA}_backward"), _flash_backward)
    )
    # torch composes attention of other operators above autograd, so the kernel has to
    # stand there, too.
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
    _check(query, key, value, attn_mask)
    if attn_mask is not None and is_causal:
        attn_mask, is_causal = _causal(attn_mask, query, key), False
    # Fused kernels of GPUs also know masks, dropout and groups of queries. The CPU has
    # none that do all of it.
    is_simple = attn_mask is None and not dropout_p and not enable_gqa
    if is_simple and _can_be_one(query, key, value):
        # A subclass of tensors, such as DTensor.
        if any(hasattr(tensor, "__tensor_flatten__") for tensor in (query, key, value)):
            return _of_cuda(query, key, value, 0.0, is_causal, scale=scale)[0]
        return _as_one(query, key, value, 0.0, is_causal, scale=scale)[0]
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return _taken_apart(
        query,
        key,
        value,
        _additive(attn_mask, query),
        dropout_p,
        is_causal,
        None,
        **options,
    )[0]


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Refuses what CUDA refuses: dtypes that differ, and calls that no kernel computes.

    `torch.nn.attention.sdpa_kernel` says which kernels are allowed.
    """
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got "
            f"query.dtype: {query.dtype} key.dtype: {key.dtype} and value.dtype: "
            f"{value.dtype} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but "
            f"got attn_mask.dtype: {mask.dtype} and  query.dtype: {query.dtype} "
            "instead."
        )
    # `torch.nn.attention.sdpa_kernel` notes here what is allowed, for all devices.
    allowed: Any = torch.backends.cuda
    if allowed.math_sdp_enabled():
        return
    flash, efficient, cudnn = (
        allowed.flash_sdp_enabled(),
        allowed.mem_efficient_sdp_enabled(),
        allowed.cudnn_sdp_enabled(),
    )
    if not (flash or efficient or cudnn):
        raise RuntimeError(
            "No viable backend for scaled_dot_product_attention was found. This is "
            "likely due to turning off both the math kernel and the fused kernels."
        )
    is_low = query.dtype in (torch.float16, torch.bfloat16)
    is_computed = query.dim() == 4 and (
        (flash and is_low and mask is None)
        or (efficient and (is_low or query.dtype == torch.float32))
        or (cudnn and is_low)
    )
    if not is_computed:
        raise RuntimeError("No available kernel. Aborting execution.")


def _causal(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask with which no token sees a later one."""
    earlier = torch.ones(
        query.size(-2), key.size(-2), dtype=torch.bool, device=query.device
    ).tril()
    return (
        mask & earlier
        if mask.dtype == torch.bool
        else mask.masked_fill(~earlier, float("-inf"))
    )


def _can_be_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    tensors = (query, key, value)
    cuda: Any = torch.backends.cuda
    return (
        (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled())
        and all(
            tensor.dim() == 4 and tensor.numel() and tensor.stride(-1) == 1
            for tensor in tensors
        )
        and len({tensor.size()[:2] for tensor in tensors}) == 1
        and len({tensor.size(-1) for tensor in tensors}) == 1
        and key.size(2) == value.size(2)
        and len({tensor.dtype for tensor in tensors}) == 1
        and query.is_floating_point()
    )


def _flash(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Returns what the kernel of CUDA returns.

    It draws nothing, so nothing reads the state of its random numbers.
    """
    output, log_sums = _as_one(query, key, value, dropout_p, is_causal, scale=scale)
    state, unused = (
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros((), dtype=torch.uint64),
    )
    return (
        output,
        log_sums,
        None,
        None,
        query.size(2),
        key.size(2),
        state,
        unused,
        torch.empty(0),
    )


def _flash_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    log_sums: Any,
    *others: Any,
    scale: float | None = None,
) -> Any:
    dropout_p, is_causal = others[4:6]
    return _as_one_backward(
        gradient, query, key, value, output, log_sums, dropout_p, is_causal, scale=scale
    )


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask that is added to the scores; one of bools says which take part."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
        mask.logical_not(), float("-inf")
    )
