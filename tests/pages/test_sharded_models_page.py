"""docs/sharded-models.md says what is so: its snippets run in two processes."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conditions import for_changes
from workers.cluster import Cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sharded-models.md"
SNIPPETS = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def run_snippets(folder: str) -> tuple[float, float]:
    """The loss of the last batch, and the norm of all weights."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for snippet in SNIPPETS:
        exec(snippet.replace("Strategy()", 'Strategy(devices=["cpu"])'), names)
    loss = names["strategy"].reduce("mean", names["losses"], axis=0)
    norm = sum(
        parameter.full_tensor().square().sum()
        for parameter in names["model"].parameters()
    )
    os.chdir("/")
    return float(loss), float(norm)


@for_changes
@pytest.mark.slow
def test_the_snippets_run_in_two_processes() -> None:
    assert len(SNIPPETS) == 2
    processes = Cluster(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            (loss, norm), other = processes.run(run_snippets, folder)
        assert other == (loss, norm)
        assert 0 < loss < 8
    finally:
        processes.end()
    assert not dist.is_initialized()
