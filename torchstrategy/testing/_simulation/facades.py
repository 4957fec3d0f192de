"""Classes in the place of torch's, which also make objects for simulated devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def put_in_place(name: str, make: Callable[..., Any]) -> None:
    """Replaces a class of torch whose C++ code serves only backends in C++.

    The C++ code can make objects for such backends only.

    Args:
        name: The name of the class in `torch`.
        make: Called in place of the class, with the class itself and the arguments of
            the call.
    """
    original: Any = getattr(torch, name)

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(original, *args, **kwargs)

    setattr(
        torch,
        name,
        Kind(name, (original,), {"__doc__": original.__doc__, "__module__": "torch"}),
    )
