"""Buffers and tensors in attributes that are views of one another.

They are written under one name and read under another.

A random program found it: a model with one buffer under two names, after
`load_state_dict(..., assign=True)` of its own state, has two tensors that share memory.
Replicas had a copy of each, and a write on one did not reach the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from conditions import only_with_copies
from torchstrategy._base.context import using_device

X = torch.arange(8, dtype=torch.float64).reshape(4, 2) / 8


class Net(nn.Module):
    """Reads a table under several names, and writes it under one of them."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, 2, dtype=torch.float64))
        self.inner = nn.Module()
        self.inner.register_buffer("row", None)
        self.rows: Any = {}
        self.written = written

    def named(self) -> dict[str, Any]:
        return {"table": self.table, "inner.row": self.inner.row, **self.rows}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.named()[self.written].mul_(0.5)
        return x * sum(
            t.reshape(-1)[-2:].to(x.device)
            for t in self.named().values()
            if t is not None
        )


def two_names(m: Any) -> None:
    m.inner.row = m.table.detach()
    m.load_state_dict(m.state_dict(), assign=True)


def a_row(m: Any) -> None:
    m.inner.row = m.table[3]


def in_an_attribute(m: Any) -> None:
    m.rows = {"last": m.table[2:], "columns": m.table.T}


def only_in_attributes(m: Any) -> None:
    whole = torch.ones(3, 2, dtype=torch.float64)
    m.rows = {"last": whole[1:], "columns": whole.T}


def by_set(m: Any) -> None:
    if m.inner.row is None:
        m.inner.row = torch.ones(2, dtype=torch.float64, device=m.table.device)
    m.inner.row.set_(m.table[3])


CASES = [
    (two_names, "table"),
    (two_names, "inner.row"),
    (a_row, "table"),
    (a_row, "inner.row"),
    (in_an_attribute, "table"),
    (in_an_attribute, "last"),
    (only_in_attributes, "columns"),
    (by_set, "inner.row"),
]


def trained(
    strategy: torchstrategy.Strategy | None,
    share: Callable[[Any], None],
    written: str,
    when: int,
) -> list[Any]:
    """Results and tensors of some steps, with two tensors that come to share memory.

    They begin to before one of the steps.
    """
    device = (
        torch.device("cpu")
        if strategy is None
        else strategy.extended.parameter_devices[0]
    )
    with nullcontext() if strategy is None else strategy.scope(), using_device(device):
        net = Net("table" if when else written)
        if share is by_set:
            net.inner.row = torch.ones(2, dtype=torch.float64, device=device)
    results = []
    for index in range(4):
        if index == when:
            share(net)
            net.written = written
        if strategy is None:
            results.append(net(X))
        else:
            (batch,) = strategy.experimental_distribute_dataset([X])
            results.append(strategy.gather(strategy.run(net, args=(batch,)), axis=0))
        if index >= when:
            net.named()[written].add_(0.25)  # the user writes, too
    return [
        tensor.detach().cpu().clone()
        for tensor in (*results, *net.named().values())
        if tensor is not None
    ]


@pytest.mark.parametrize("when", [0, 2], ids=["from the beginning", "later"])
@pytest.mark.parametrize(
    ("share", "written"),
    CASES,
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_write_under_one_name_is_seen_under_the_other(
    several: torchstrategy.Strategy,
    share: Callable[[Any], None],
    written: str,
    when: int,
) -> None:
    ours, plain = (
        trained(several, share, written, when),
        trained(None, share, written, when),
    )
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)


@only_with_copies
def test_copies_are_not_made_anew_while_the_same_tensors_share_memory(
    several: torchstrategy.Strategy,
) -> None:
    with several.scope():
        net = Net("table")
    a_row(net)
    seen = set()
    kept = []

    def step() -> None:
        kept.append(net.table)
        seen.add(id(net.table))
        net(X)

    for _ in range(4):
        several.run(step)
    assert len(seen) == several.num_replicas_in_sync
