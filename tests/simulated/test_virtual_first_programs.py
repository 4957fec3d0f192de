"""The strategy that a page teaches first is a fast one.

It is where it is used for what it is for: on several devices.

The models of pages have a few numbers, and with these every strategy takes what its
launches take. So the strategy of each page trains a model of 36 million parameters
here, on modelled devices.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from conditions import for_changes
from torchstrategy.testing import simulated_devices, virtual_time

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONSTRUCTOR = re.compile(
    r"^[+ >.]*(?:self\.)?strategy = torchstrategy\.(\w+Strategy\(.*?\))(?:  #.*)?$",
    re.MULTILINE,
)
BLOCK = re.compile(r"^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST = 1.5  # times the seconds of the fastest
FASTEST = (
    "MirroredStrategy()",
    "MultiWorkerMirroredStrategy()",
    'CentralStorageStrategy(None, "sim:0")',
)
# What pages call a list of devices of theirs. On CPUs, a page says, it shows what GPUs
# do.
ON_CPUS = re.compile(r'\["cpu"\] \* \w+|CPUS')
NOT_SEVERAL = "OneDeviceStrategy"


def first_strategies() -> Iterator[tuple[str, str]]:
    """Of each page that makes a strategy of several replicas: its first constructor.

    The name of the page comes before.
    """
    for page in PAGES:
        made = [
            found
            for block in BLOCK.findall(page.read_text())
            for found in CONSTRUCTOR.findall(block)
        ]
        if made and not made[0].startswith(NOT_SEVERAL):
            yield str(page.relative_to(ROOT)), ON_CPUS.sub("", made[0])


FIRST = dict(first_strategies())


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/index.md", *[page for page in FIRST if "recipes" in page]],
)
def test_a_new_reader_meets_the_mirrored_strategy_first(page: str) -> None:
    assert FIRST[page].startswith("MirroredStrategy(")


@functools.cache
def seconds_of_a_step(constructor: str) -> float:
    devices = simulated_devices()
    names: dict[str, Any] = dict.fromkeys(
        ("devices", "DEVICES", "GPUS", "simulated_devices", "compute_devices"), devices
    )
    rows, classes = (
        torch.zeros(512, 2048).pin_memory(),
        torch.zeros(512, dtype=torch.int64).pin_memory(),
    )
    batches = [(rows, classes)] * 3
    with virtual_time("H100-SXM", shapes_only=True) as trace:
        strategy = eval(
            f"torchstrategy.{constructor}", {"torchstrategy": torchstrategy, **names}
        )
        with strategy.scope():
            model = nn.Sequential(
                *[nn.Linear(2048, 2048) for _ in range(8)], nn.Linear(2048, 1000)
            )
            optimizer = torch.optim.Adam(model.parameters())

        def train_step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        for batch in strategy.experimental_distribute_dataset(batches):
            torch.accelerator.synchronize()
            trace.mark()
            strategy.run(train_step, args=batch)
    return trace.step(1).seconds


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize("page", FIRST)
def test_the_first_strategy_of_a_page_is_a_fast_one(page: str) -> None:
    best = min(map(seconds_of_a_step, FASTEST))
    taken = seconds_of_a_step(FIRST[page])
    assert taken <= MOST * best, (
        f"{page} begins with {FIRST[page]}: {taken:.4f} s a step, and others take "
        f"{best:.4f}"
    )
