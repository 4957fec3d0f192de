"""Lints on simulated devices name planted mistakes, and not their right twins.

On the CPU, tests/unit/testing/test_lints.py looks at all of them, but for those that
only a device shows.
"""

from __future__ import annotations

import pytest

import linted
import planted
from conditions import for_changes
from planted import PAIRS, RANKS
from torchstrategy.testing import cuda_alias, run_ranks

ONE_OF_EACH = {pair.lint: name for name, pair in PAIRS.items() if not pair.needs_device}

# Of torch, about names that programs use.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "DEVICE", "cuda")


def names_of(name: str, is_right: bool) -> list[str]:
    pair = PAIRS[name]

    def program() -> None:
        with cuda_alias():
            if pair.has_ranks:
                run_ranks(lambda rank: pair.main(rank, is_right), RANKS)
            else:
                pair.main(0, is_right)

    return linted.names_of(program)


@pytest.mark.parametrize(
    "name", [name for name, pair in PAIRS.items() if pair.needs_device]
)
def test_a_mistake_that_only_a_device_shows_is_named(name: str) -> None:
    assert names_of(name, is_right=False) == [PAIRS[name].lint]
    assert names_of(name, is_right=True) == []


@for_changes
def test_one_mistake_of_each_lint_is_named() -> None:
    """In one test, so that those who run some variants of a test run all of these."""
    found = {
        lint: (names_of(name, is_right=False), names_of(name, is_right=True))
        for lint, name in ONE_OF_EACH.items()
    }
    assert found == {lint: ([lint], []) for lint in ONE_OF_EACH}
