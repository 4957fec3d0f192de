"""What a reader sees first is true without a footnote."""

from __future__ import annotations

from pathlib import Path

import pytest

import torchstrategy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/migrating-from-dataparallel.md"])
def test_who_promises_the_result_of_one_device_names_the_layer_that_needs_a_line_more(page: str) -> None:
    beginning = "\n".join((ROOT / page).read_text().splitlines()[:20])
    assert "BatchNorm normalises" in beginning or "BatchNorm is an\nexception" in beginning
    assert "torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(model)" in beginning
    assert callable(torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm)
