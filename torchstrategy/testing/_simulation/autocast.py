"""Mixed precision on simulated devices.

It says which operators run in the lower precision, and which never do.

The lists are those of torch for CUDA. It registers its casts in builds for the CPU,
too, so it tells which of them this version has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from torchstrategy._base.torch_internals import tree_flatten
from torchstrategy.testing._simulation.backend import Backend, keys
from torchstrategy.testing._simulation.ordinals import NAME, is_simulated
from torchstrategy.testing._simulation.torch_internals import (
    has_kernel,
    tree_map_only,
    without_keys,
)

_KEY = "AutocastPrivateUse1"

# The names of operators, with spaces between them.
_LOWER = """
    _convolution _convolution.deprecated _scaled_dot_product_flash_attention
    _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm
    chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution einsum gru_cell linalg_multi_dot linalg_vecdot
    linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell
    scaled_dot_product_attention
"""
_FULL = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin
    binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
    cumprod cumsum dist erfinv exp expm1 frobenius_norm.dim group_norm
    hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord linalg_vector_norm log log10 log1p log2 log_softmax.int
    logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    native_layer_norm nll_loss nll_loss2d norm.Scalar norm.ScalarOpt_dim nuclear_norm
    nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor prod prod.dim_int reciprocal renorm rms_norm rsqrt sinh
    smooth_l1_loss soft_margin_loss softmax.int softplus sum sum.dim_IntList tan
    triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
"""
_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add "
    "tensordot vdot"
)
# The layers that cuDNN computes. Its kernel takes float16, whatever autocast is set to.
_OF_CUDNN = (
    "gru.data gru.input lstm.data lstm.input rnn_relu.data rnn_relu.input "
    "rnn_tanh.data rnn_tanh.input"
)

Choice = Callable[[Any, Any], torch.dtype | None]
"""Returns the dtype to which a call's arguments are cast; None if they stay."""


def register(backend: Backend) -> None:
    """Registers the casts."""
    for names, choice in ((_LOWER, _lower), (_FULL, _full), (_WIDEST, _widest)):
        for op in _existing(names):
            if has_kernel(op.name(), "AutocastCUDA"):
                backend.kernel(_name(op), _KEY)(_casting(op, choice))
    for op in _existing(_OF_CUDNN):
        backend.kernel(_name(op), _KEY)(_casting(op, _float16))
    backend.kernel("binary_cross_entropy", _KEY)(_refuse_probabilities)


def _name(op: Any) -> str:
    return str(op.name().removeprefix("aten::"))


def _existing(names: str) -> Iterator[Any]:
    """The operators of these names.

    Names that this version of torch does not have are left out.
    """
    for name in names.split():
        packet, _, overload = name.partition(".")
        found = getattr(torch.ops.aten, packet, None)
        if found is not None and (overload or "default") in found.overloads():
            yield getattr(found, overload or "default")


def _casting(op: Any, choice: Choice) -> Callable[..., Any]:
    here = keys(_KEY)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_keys(here):
            dtype = choice(args, kwargs)
            if dtype is not None:
                args, kwargs = tree_map_only(
                    torch.Tensor,
                    lambda tensor: _cast(tensor, dtype),
                    (list(args), kwargs),
                )
            return op(*args, **kwargs)

    return kernel


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (
        tensor.to(dtype) if _is_eligible(tensor) and tensor.dtype != dtype else tensor
    )


def _is_eligible(tensor: torch.Tensor) -> bool:
    return (
        is_simulated(tensor)
        and tensor.is_floating_point()
        and tensor.dtype != torch.double
    )


def _lower(args: Any, kwargs: Any) -> torch.dtype | None:
    return torch.get_autocast_dtype(NAME)


def _float16(args: Any, kwargs: Any) -> torch.dtype | None:
    return torch.float16 if torch.backends.cudnn.enabled else None


def _refuse_probabilities(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
        "autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using "
        "torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and "
        "BCEWithLogits are\n"
        "safe to autocast."
    )


def _full(args: Any, kwargs: Any) -> torch.dtype | None:
    return torch.float32 if kwargs.get("dtype") is None else None


def _widest(args: Any, kwargs: Any) -> torch.dtype | None:
    leaves, _ = tree_flatten((list(args), kwargs))
    dtypes = {
        leaf.dtype
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and _is_eligible(leaf)
    }
    return torch.float32 if torch.float32 in dtypes else None
