"""What a data set holds: `content_of` says if two ranks may share rows."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from torchstrategy.testing._lints.evidence.contents import content_of


class Holding:
    def __init__(self, held: Any) -> None:
        self.held = held


def tensors(seed: int) -> TensorDataset:
    return TensorDataset(
        torch.randn(10, 3, generator=torch.Generator().manual_seed(seed))
    )


OTHER: dict[str, tuple[Any, Any]] = {
    "tensors": (tensors(0), tensors(1)),
    "parts": (
        ConcatDataset([tensors(0), tensors(1)]),
        ConcatDataset([tensors(0), tensors(2)]),
    ),
    "arrays": (Holding(np.arange(6)), Holding(np.arange(6) + 1)),
    "paths": (Holding(Path("part-0")), Holding(Path("part-1"))),
    "files": (Holding(["a", "b"]), Holding(["a", "c"])),
    "a deque": (Holding(deque([1])), Holding(deque([2]))),
    "settings": (Holding({"seed": 0}), Holding({"seed": 1})),
    "a large number": (Holding(10**5000), Holding(10**5000 + 1)),
    "text": (Holding("x" * 10_000_000), Holding("y" * 10_000_000)),
}


@pytest.mark.parametrize("held", OTHER)
def test_what_differs_is_seen(held: str) -> None:
    one, other = OTHER[held]
    assert content_of(one) == content_of(one) != content_of(other)


ODD: dict[str, Any] = {
    "numbers of one byte": torch.zeros(4, dtype=torch.float8_e4m3fn),
    "packed": torch.empty(4, dtype=torch.bits8),
    "complex": torch.ones(4, dtype=torch.complex64),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "nested": torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "nothing": torch.empty(0),
    "one number": torch.tensor(3.0),
    "an array of objects": np.array([object()]),
    "an empty array": np.empty((0, 3)),
    "a generator": torch.Generator(),
    "a function": content_of,
    "text that cannot be written": "\ud800",
}


@pytest.mark.parametrize("held", ODD)
def test_odd_things_are_left_alone(held: str) -> None:
    assert content_of(Holding(ODD[held])) == content_of(Holding(ODD[held]))


def test_what_holds_itself_has_an_end() -> None:
    holding = Holding(None)
    holding.held = [holding, holding]
    assert content_of(holding) == content_of(holding)
