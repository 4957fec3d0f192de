"""Operators by what they do to what they write on."""

import torch

_aten = torch.ops.aten
# A number of Python comes to `Tensor`, too.
MULTIPLYING = (
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten._foreach_mul_.Tensor,
    _aten._foreach_mul_.Scalar,
)
DIVIDING = (
    _aten.div_.Tensor,
    _aten.div_.Scalar,
    _aten._foreach_div_.Tensor,
    _aten._foreach_div_.Scalar,
)
