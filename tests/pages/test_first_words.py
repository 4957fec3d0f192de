"""What a reader sees first is true without a footnote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchstrategy
from documents import dead_links_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/migrating-from-dataparallel.md"]
)
def test_who_promises_the_result_of_one_device_names_the_layer_that_needs_a_line_more(
    page: str,
) -> None:
    beginning = "\n".join((ROOT / page).read_text().splitlines()[:20])
    assert (
        "BatchNorm normalises" in beginning or "BatchNorm is an\nexception" in beginning
    )
    assert "torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(model)" in beginning
    assert callable(torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm)


README = (ROOT / "README.md").read_text()


def test_the_links_of_the_readme_lead_somewhere() -> None:
    assert dead_links_of(ROOT / "README.md") == []
    cited = set(re.findall(r"\]\[([\w-]+)\]", README))
    assert (
        cited == set(re.findall(r"^\[([\w-]+)\]: https://\S+$", README, re.MULTILINE))
        and cited
    )


@pytest.mark.parametrize("page", ["README.md", "docs/why.md"])
def test_figures_beside_others_are_those_of_the_benchmarks(page: str) -> None:
    """The figures that the pages quote first.

    Of a step: Accelerate 1.400, Fabric 1.107, one replica 1.027; of workers 1.10, 1.00
    and 0.94 of DDP's time.
    """
    figures = (ROOT / "benchmarks" / "README.md").read_text()
    text = (ROOT / page).read_text()
    measured = {
        name: found
        for name, found in re.findall(
            r"^\| a step \| (\w+) \| \S+ ms \| (\S+) \|", figures, re.M
        )
    }
    said = {"Accelerate": "1.40", "Fabric": "1.11", "OneDevice": "1.03"}
    assert {name: f"{float(measured[name]):.2f}" for name in said} == said
    if page == "README.md":
        assert all(f"[{figure}]" in text for figure in said.values())
    assert (
        "1.10, 1.00 and 0.94 of the wall time" in " ".join(figures.split())
        and "0.94 to 1.10" in text
    )


def test_what_the_benchmarks_say_of_the_drop_in_is_in_the_readme() -> None:
    figures = (ROOT / "benchmarks" / "README.md").read_text()
    ratios = re.findall(r"\| `nn.DataParallel` on it \| ([\d.]+), ([\d.]+) \(", figures)
    found = sorted(float(ratio) for pair in ratios for ratio in pair)
    assert f"{found[0]} to {found[-1]}" in README
