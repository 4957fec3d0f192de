"""docs/language-models.md says what is so: its snippets run in one or two processes."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from conditions import for_changes
from documents import dead_links_of, examples_run_on
from workers.cluster import cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "language-models.md"
TEXT = PAGE.read_text()
OF_TRANSFORMERS, OF_WORKERS = re.findall(
    r"^```py\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL
)

pytestmark = pytest.mark.slow


def test_the_page_runs() -> None:
    assert examples_run_on(PAGE) > 30


def test_links_of_the_page_and_to_it_lead_somewhere() -> None:
    assert dead_links_of(PAGE) == []
    root = PAGE.parents[1]
    for document in (
        "README.md",
        "docs/index.md",
        "docs/features.md",
        "docs/logging.md",
        "mkdocs.yml",
    ):
        assert "language-models.md" in (root / document).read_text(), document


def run(program: str, strategy: str) -> tuple[dict[str, Any], list[str]]:
    """The names of a program with another strategy in it, and what it prints."""
    ours = re.search(r"strategy = (.*)\n", program)
    assert ours is not None
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program.replace(ours[1], strategy), names)
    return names, printed.getvalue().splitlines()


def test_the_model_of_transformers_trains_as_in_plain_pytorch() -> None:
    pytest.importorskip(
        "transformers",
        reason="needs models of a well-known package: pip install '.[models]'",
    )
    # Without dropout, of which each replica draws its own.
    program = OF_TRANSFORMERS.replace(
        "n_head=2,", "n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,"
    )
    (ours, printed), (plain, expected) = (
        run(program, strategy)
        for strategy in (
            'torchstrategy.MirroredStrategy(["cpu"] * 2, gradient_reduction="loss")',
            "torchstrategy.get_strategy()",
        )
    )
    assert len(printed) == 3
    for line, plain_line in zip(printed, expected, strict=True):
        assert float(line.split()[1]) == pytest.approx(
            float(plain_line.split()[1]), abs=2e-4
        )
    # A first update of Adam is as large as the rate, whatever the gradient is: float32
    # has rounded a few of them.
    states = (names["model"].state_dict() for names in (ours, plain))
    torch.testing.assert_close(*states, rtol=1e-3, atol=2e-3)


def of_workers(strategy: str) -> list[float]:
    losses: list[float] = run(OF_WORKERS, strategy)[0]["losses"]
    return losses


@for_changes
def test_the_program_for_several_processes_prints_what_one_prints() -> None:
    ours = (
        'torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"], '
        'gradient_reduction="loss")'
    )
    expected = of_workers("torchstrategy.get_strategy()")
    assert len(expected) == 3
    found = cluster(2).run(of_workers, ours)
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-5)
