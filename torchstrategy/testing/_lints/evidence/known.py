"""What is known of tensors while their memory is there."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar, final

import torch

from torchstrategy.testing._lints.torch_internals import stands_for_others

T = TypeVar("T")


def is_plain(tensor: Any) -> bool:
    """Whether something is a tensor with memory of its own.

    It stands for no others then.
    """
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
    ):
        return False
    return not (tensor.is_meta or tensor.is_nested or stands_for_others(tensor))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written on, as torch counts.

    It is 0 in inference mode, where nobody counts.
    """
    return 0 if tensor.is_inference() else tensor._version


@final
class Known(Generic[T]):
    """What is known of the tensors of a rank, by their storage."""

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[weakref.ref[Any], T]] = {}

    def put(self, tensor: Any, fact: T) -> None:
        """Notes something of a tensor."""
        if not is_plain(tensor):
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        made = weakref.ref(storage, lambda gone: self._forget(address, gone))
        self._by_address[address] = made, fact

    def get(self, tensor: Any) -> T | None:
        """What is known of a tensor."""
        if not self._by_address or not is_plain(tensor):
            return None
        storage, fact = self._by_address.get(
            tensor.untyped_storage().data_ptr(), (None, None)
        )
        return fact if storage is not None and storage() is not None else None

    def facts(self) -> list[T]:
        """What is known of tensors that are there."""
        return [
            fact
            for storage, fact in list(self._by_address.values())
            if storage() is not None
        ]

    def drop(self, tensor: Any) -> None:
        """Forgets what is known of a tensor."""
        if self._by_address and is_plain(tensor):
            self._by_address.pop(tensor.untyped_storage().data_ptr(), None)

    def clear(self) -> None:
        """Forgets everything."""
        self._by_address.clear()

    def __bool__(self) -> bool:
        return bool(self._by_address)

    def _forget(self, address: int, gone: Any) -> None:
        if address in self._by_address and self._by_address[address][0] is gone:
            del self._by_address[address]
