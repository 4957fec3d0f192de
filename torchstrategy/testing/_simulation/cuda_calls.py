"""Calls of torch in programs for CUDA that simulated devices need otherwise.

They need another form of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchstrategy.testing._simulation.ordinals import is_simulated

_COMPRESSED = ("csr", "csc", "bsr", "bsc")
# By function, where the tensor of its first argument matters. torch's compiler traces
# this file, and cannot look these functions up in a set.
_TO_COMPRESSED = tuple(
    getattr(torch.Tensor, f"to_sparse_{layout}") for layout in _COMPRESSED
)
_MADE_COMPRESSED = (
    torch.sparse_compressed_tensor,
    *(getattr(torch, f"sparse_{layout}_tensor") for layout in _COMPRESSED),
)


def in_another_form(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """The arguments with which a function is called.

    Raises:
        NotImplementedError: If it makes a tensor that is not simulated.
    """
    if (
        func in (torch.ctc_loss, torch.nn.functional.ctc_loss)
        and len(args) > 3
        and is_simulated(args[0])
    ):
        # While something watches operators, torch takes lengths of the CPU for tensors
        # of the device.
        return *args[:2], *map(_as_numbers, args[2:4]), *args[4:]
    if func in _TO_COMPRESSED and args and is_simulated(args[0]):
        _refuse_compressed(func)
    if func in _MADE_COMPRESSED and _is_on_device(args, kwargs):
        _refuse_compressed(func)
    return args


def _as_numbers(lengths: Any) -> Any:
    return (
        lengths.tolist()
        if isinstance(lengths, torch.Tensor) and lengths.is_cpu
        else lengths
    )


def _is_on_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type not in ("cpu", "meta")
    return any(
        isinstance(value, torch.Tensor) and is_simulated(value)
        for value in (*args, *kwargs.values())
    )


def _refuse_compressed(func: Any) -> None:
    raise NotImplementedError(
        f"{func.__name__} makes a compressed sparse tensor (CSR and its like) of a "
        "GPU, and simulated devices have none. Write to_sparse() or sparse_coo_tensor, "
        "which they have, or keep this tensor on the CPU."
    )
