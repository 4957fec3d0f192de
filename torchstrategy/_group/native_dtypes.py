"""Tensors as NCCL and gloo take them.

These libraries know fewer dtypes than torch, and read memory as it is.

They have no complex numbers and no int16, and add up the bytes of bools. They do not
see that a tensor reads its memory as conjugate or negative. So a tensor is brought into
a form that they take, and what comes back into the form it had.
"""

from __future__ import annotations

import torch

from torchstrategy._base.memory import as_in_memory, bits

# The dtypes that both of them add up.
_ADDED = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
# Others that torch adds up, and the dtype in which their sum is the same once it is
# brought back.
_ADDED_AS = {torch.int16: torch.int32, torch.bool: torch.int32}


def can_be_added(dtype: torch.dtype) -> bool:
    """Whether `as_addable` takes a dtype.

    PyTorch itself does not add up other dtypes, such as float8.
    """
    return dtype in _ADDED or dtype in _ADDED_AS or dtype.is_complex


def as_addable(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense tensor, in a form that can be added up.

    You get the tensor itself if it has such a form.
    """
    if tensor.dtype in _ADDED and not (tensor.requires_grad or tensor.is_neg()):
        return tensor
    tensor = as_in_memory(tensor)
    return tensor.to(_ADDED_AS.get(tensor.dtype, tensor.dtype))


def from_addable(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The reverse of `as_addable`, for a tensor that had this dtype."""
    return torch.view_as_complex(numbers) if dtype.is_complex else numbers.to(dtype)


def as_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense tensor, in a form that can be sent.

    You get the tensor itself if it has such a form.
    """
    sendable = as_in_memory(tensor)
    return sendable if sendable.dtype in _ADDED else bits(sendable)


def is_sent_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor can be sent from its own memory, and received there."""
    return tensor.dtype in _ADDED and tensor.is_contiguous() and not tensor.is_neg()


def from_sendable(sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The reverse of `as_sendable`, for a tensor with the dtype and shape of `like`."""
    if like.dtype in _ADDED:
        return sent
    # What was sent may begin anywhere in a buffer, and only a number of its own may
    # begin at each byte.
    return sent.clone().reshape(-1).view(like.dtype).view(like.shape)
