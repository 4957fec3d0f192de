"""`assert_same_as_plain` says what batches that divide evenly cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torchstrategy
from torchstrategy.testing import assert_same_as_plain


def step_with_a_wrong_label_offset(
    model: Any, optimizer: Any, batch: Any
) -> torch.Tensor:
    context = torchstrategy.get_replica_context()
    optimizer.zero_grad()
    own = F.normalize(model(batch), dim=1)
    keys = context.all_gather(own, axis=0)
    # Others have other numbers of rows.
    labels = torch.arange(len(own)) + context.replica_id_in_sync_group * len(own)
    losses = F.cross_entropy(own @ keys.T / 0.5, labels, reduction="none")
    losses.mean().backward()
    optimizer.step()
    return losses.detach()


def step_with_negatives_of_its_replica(
    model: Any, optimizer: Any, batch: Any
) -> torch.Tensor:
    optimizer.zero_grad()
    own = F.normalize(model(batch), dim=1)
    losses = F.cross_entropy(
        own @ own.T / 0.5, torch.arange(len(own)), reduction="none"
    )
    losses.mean().backward()
    optimizer.step()
    return losses.detach()


def compare(step: Any, *rows: int) -> None:
    strategy = torchstrategy.MirroredStrategy(["cpu"] * 4)
    batches = [torch.randn(count, 6) for count in rows]
    assert_same_as_plain(
        step,
        lambda: torch.nn.Linear(6, 4),
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        batches,
        strategy,
    )


def test_even_batches_pass_a_wrong_step_and_a_warning_says_so() -> None:
    with pytest.warns(
        UserWarning, match=r"the batches have 8, 8, 3 rows.* Add a batch of 7 rows\."
    ):
        compare(step_with_a_wrong_label_offset, 8, 8, 3)


def test_the_batch_that_the_warning_asks_for_finds_it() -> None:
    with pytest.raises((AssertionError, IndexError)):
        compare(step_with_a_wrong_label_offset, 8, 8, 7)


def test_in_replica_negatives_are_named() -> None:
    with pytest.raises(
        AssertionError, match=r"Cause: (?s:.)*contrastive losses(?s:.)*all_gather\("
    ):
        compare(step_with_negatives_of_its_replica, 8, 7)
