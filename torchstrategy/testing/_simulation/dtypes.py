"""Operators and dtypes that CUDA refuses and the CPU computes, and the reverse.

The table follows torch's own
`torch.testing._internal.common_methods_invocations.op_db`, which says of each operator
which dtypes it has on the CPU and which on CUDA, and what an H100 answered with torch
2.11. A refusal has torch's words; where these name a kernel, it is that of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Check = Callable[[Sequence[Any], Mapping[str, Any]], None]

_INTEGERS = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
)
_LOW = frozenset((torch.float16, torch.bfloat16))
_FLOAT8 = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)


class _Refused(NamedTuple):
    kernel: str  # what the message calls it
    dtypes: frozenset[torch.dtype]  # of the first argument


_REFUSED = {
    "_log_softmax": _Refused("host_softmax", _INTEGERS),
    "_softmax": _Refused("host_softmax", _INTEGERS),
    "_upsample_bilinear2d_aa": _Refused("upsample_bilinear2d_aa_out_frame", _INTEGERS),
    "abs": _Refused("abs_cuda", _FLOAT8),
    "addbmm": _Refused("addmm_cuda", _INTEGERS),
    "addmm": _Refused("addmm_cuda", _INTEGERS),
    "addmv": _Refused("addmv_impl_cuda", _INTEGERS),
    "angle": _Refused("angle_cuda", _LOW),
    "avg_pool2d": _Refused("avg_pool2d_out_cuda_frame", _INTEGERS),
    "avg_pool3d": _Refused("avg_pool3d_out_cuda", _INTEGERS),
    "baddbmm": _Refused("baddbmm_cuda", _INTEGERS),
    "bmm": _Refused("baddbmm_cuda", _INTEGERS),
    "dot": _Refused("dot", _INTEGERS),
    "igamma": _Refused("igamma_cuda", _LOW),
    "igammac": _Refused("igammac_cuda", _LOW),
    "max_pool2d_with_indices": _Refused(
        "max_pool2d_with_indices_out_cuda_frame", _INTEGERS
    ),
    "max_pool3d_with_indices": _Refused("max_pool3d_with_indices_out_frame", _INTEGERS),
    "mm": _Refused("addmm_cuda", _INTEGERS),
    "mv": _Refused("addmv_impl_cuda", _INTEGERS),
    "upsample_bicubic2d": _Refused("upsample_bicubic2d_out_frame", _INTEGERS),
    "upsample_bilinear2d": _Refused("upsample_bilinear2d_out_frame", _INTEGERS),
    "vdot": _Refused("vdot", _INTEGERS),
}

# The operators that CUDA computes in float16 or bfloat16, and some version of the CPU's
# kernels does not.
IN_FLOAT32 = frozenset(
    f"aten.{name}"
    for name in (
        "_upsample_bilinear2d_aa.default",
        "_upsample_bilinear2d_aa_backward.default",
        "avg_pool3d.default",
        "avg_pool3d_backward.default",
        "multi_margin_loss.default",
        "multi_margin_loss_backward.default",
        "multilabel_margin_loss_forward.default",
        "multilabel_margin_loss_backward.default",
        "polygamma.default",
        "round.decimals",
        "rrelu_with_noise.default",
        "rrelu_with_noise_backward.default",
        "trace.default",
    )
)


def check_of(name: str) -> Check | None:
    """The check before an operator such as `"aten.mm.default"` runs.

    It is None if CUDA computes the operator for all dtypes.
    """
    packet = name.split(".")[1] if name.startswith("aten.") else ""
    if packet in _REFUSED:
        return _checking(*_REFUSED[packet])
    return _CHECKS.get(packet)


def in_float32(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Computes in float32, and rounds the results to the arguments' dtype."""
    dtypes = {
        value.dtype
        for value in args
        if isinstance(value, torch.Tensor) and value.dtype in _LOW
    }
    wide = [
        value.float()
        if isinstance(value, torch.Tensor) and value.dtype in _LOW
        else value
        for value in args
    ]
    results = call(*wide, **kwargs)
    return results.to(dtypes.pop()) if dtypes else results


def _checking(kernel: str, dtypes: frozenset[torch.dtype]) -> Check:
    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if args[0].dtype in dtypes and args[0].numel():
            raise _not_implemented(kernel, args[0].dtype)
        if (
            kernel == "addmm_cuda"
            and args[0].dtype in _LOW
            and any(_is_sparse(value) for value in args[:3])
        ):
            raise _not_implemented("addmm_sparse_cuda", args[0].dtype)

    return check


def _is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def _check_convolution(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    inputs, weight, bias = args[:3]
    for what, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != inputs.dtype:
            raise RuntimeError(
                f"Input type ({_type_of(inputs)}) and {what} type ({_type_of(tensor)}) "
                "should be the same"
            )
    if inputs.dtype in _INTEGERS and inputs.numel():
        raise _not_implemented("slow_conv2d_cuda", inputs.dtype)


def _check_norm(args: Sequence[Any], kwargs: Mapping[str, Any], first: int) -> None:
    for tensor in args[first : first + 2]:
        if tensor is not None and tensor.dtype != args[0].dtype:
            raise RuntimeError(
                f"expected scalar type {name_in_cpp(args[0].dtype)} but found "
                f"{name_in_cpp(tensor.dtype)}"
            )


def _check_dropout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    inputs, p, train = args
    drops_some = train is not False and 0 < p < 1
    if drops_some and inputs.dtype in _INTEGERS and inputs.numel():
        raise _not_implemented("fused_dropout", inputs.dtype)


def _check_nll_loss(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    inputs, target, _, reduction = args[:4]
    if target.dtype not in (torch.int64, torch.uint8):
        kernel = "nll_loss_forward_no_reduce_cuda_kernel_index"
        if reduction or inputs.dim() == 1:
            kernel = f"nll_loss_forward_reduce_cuda_kernel_{inputs.dim()}d_index"
        raise _not_implemented(kernel, target.dtype)


def _check_histc(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if args[0].dtype == torch.float16:
        raise RuntimeError("HalfTensor is not supported")
    if args[0].dtype == torch.bfloat16:
        raise _not_implemented("histc", torch.bfloat16)


def _check_int_mm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    one, other = args[:2]
    if one.size(0) <= 16:
        raise RuntimeError(
            f"self.size(0) needs to be greater than 16, but got {one.size(0)}"
        )
    for name, tensor in (("self", one), ("mat2", other)):
        if tensor.size(1) == 0 or tensor.size(1) % 8:
            raise RuntimeError(
                f"{name}.size(1) needs to be greater than 0 and a multiple of 8, but "
                f"got {tensor.size(1)}"
            )


def _check_scaled_mm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    one, other = args[:2]
    if one.stride(1) != 1 or other.stride(0) != 1:
        raise RuntimeError(
            "Only multiplication of row-major and column-major matrices is supported "
            "by cuBLASLt"
        )
    if one.dtype == other.dtype == torch.float8_e5m2:
        raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")


def _check_index_select(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if args[2].dim() > 1:
        raise RuntimeError("Index is supposed to be an empty tensor or a vector")


def _refuse_histogram(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    raise NotImplementedError(
        "Could not run 'aten::histogram' with arguments from the 'CUDA' backend: torch "
        "has it for the CPU only. Write torch.histc, or move the tensor to the CPU."
    )


_CHECKS: dict[str, Check] = {
    "_histogramdd_bin_edges": _refuse_histogram,
    "_histogramdd_from_bin_cts": _refuse_histogram,
    "_histogramdd_from_bin_tensors": _refuse_histogram,
    "_int_mm": _check_int_mm,
    "_scaled_mm": _check_scaled_mm,
    "convolution": _check_convolution,
    "histc": _check_histc,
    "histogram": _refuse_histogram,
    "index_select": _check_index_select,
    "native_dropout": _check_dropout,
    "native_group_norm": lambda args, kwargs: _check_norm(args, kwargs, first=1),
    "native_layer_norm": lambda args, kwargs: _check_norm(args, kwargs, first=2),
    "nll_loss_forward": _check_nll_loss,
}


def _not_implemented(kernel: str, dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(
        f"\"{kernel}\" not implemented for '{name_in_cpp(dtype)}'"
    )


_NAMES = {
    torch.bfloat16: "BFloat16",
    torch.bool: "Bool",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.int8: "Char",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
    torch.uint8: "Byte",
}


def name_in_cpp(dtype: torch.dtype) -> str:
    """What messages of torch's C++ call a dtype: "Half"."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch.").capitalize())


def _type_of(tensor: torch.Tensor) -> str:
    return f"torch.cuda.{name_in_cpp(tensor.dtype)}Tensor"
