"""Kernels of sparse tensors in coordinate format.

Their indices and values are tensors of the device.
"""

from __future__ import annotations

from typing import Any

import torch

from torchstrategy.testing._simulation.backend import Backend, keys, operator
from torchstrategy.testing._simulation.kernels import mismatch
from torchstrategy.testing._simulation.memory import on_cpu, on_device
from torchstrategy.testing._simulation.ordinals import current, index_of
from torchstrategy.testing._simulation.torch_internals import tensor_data

_KEY = "SparsePrivateUse1"

# Operators that take a sparse tensor apart or put one together, and touch no number.
_STRUCTURE = (
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_coo_tensor_with_dims",
    "_nnz",
    "sparse_dim",
    "dense_dim",
    "_indices",
    "_values",
    "indices",
    "values",
    "is_coalesced",
    "_coalesced_",
)


def register(backend: Backend) -> None:
    """Registers the kernels."""
    for name in _STRUCTURE:
        backend.kernel(name, _KEY)(_structural(operator(name), keys("SparseCPU")))

    @backend.kernel("_copy_from", _KEY)
    def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        seen = source if index_of(source) is None else on_cpu(source)
        index = index_of(target)
        if index is None:
            target.copy_(seen)
        else:
            tensor_data.__set__(
                target, on_device(seen.to(target.dtype, copy=True), index)
            )
        return target


def _structural(op: Any, kernels: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        devices = [
            value.device for value in reversed(args) if isinstance(value, torch.Tensor)
        ]
        if len(set(devices)) > 1:
            raise mismatch(str(op), devices[1], devices[0])
        # A new tensor is put on the current device.
        with current(devices[0] if devices else kwargs.get("device")):
            return op.redispatch(kernels, *args, **kwargs)

    return kernel
