"""examples/evaluate.py: several replicas find exactly what plain PyTorch finds."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from conditions import for_changes
from topologies import central

REPLICAS = [1, 2, 3, 4, 5]
quickly = settings(max_examples=25, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def example() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
        yield importlib.import_module("evaluate")


@pytest.fixture(scope="module")
def test_images(example: ModuleType) -> Dataset:
    return example.problem.digits()[1]


class Net(nn.Module):
    """As good as nothing, but another number for every class and row.

    It refuses to be called without rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert len(images) > 0, "a replica without rows did not sit the step out"
        assert not self.training
        return self.linear(images.flatten(1))


def assert_same(example: ModuleType, replicas: int, loader: DataLoader) -> None:
    strategy = central(replicas)
    torch.manual_seed(0)
    plain = Net()
    with strategy.scope():
        model = Net()
    model.load_state_dict(plain.state_dict())
    rows, right, loss = example.evaluate_plainly(plain, loader)
    found = example.evaluate(strategy, model, loader)
    assert found[:2] == (rows, right)
    assert found[0] == len(loader.dataset)
    assert found[2] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_replicas_find_what_plain_pytorch_finds(
    example: ModuleType, test_images: Dataset, replicas: int
) -> None:
    loader = DataLoader(test_images, batch_size=119)
    assert [len(labels) for _, labels in loader] == [119, 119, 119, 3]
    assert_same(example, replicas, loader)


@for_changes
def test_no_row_is_counted_twice_or_not_at_all(
    example: ModuleType, test_images: Dataset
) -> None:
    @quickly
    @given(st.sampled_from(REPLICAS), st.integers(1, 12), st.integers(1, 12))
    def holds(replicas: int, rows: int, batch_size: int) -> None:
        assert_same(
            example,
            replicas,
            DataLoader(Subset(test_images, range(rows)), batch_size=batch_size),
        )

    holds()


@for_changes
@pytest.mark.slow
def test_the_example_runs_and_checks_itself(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(example.argument_parser().parse_args(["--replicas", "3", "--check"]))
    under_strategy, plain, same = capsys.readouterr().out.splitlines()
    assert under_strategy.removeprefix("3 replicas: ") == plain.removeprefix(
        "plain PyTorch: "
    )
    assert same == "1 to 5 replicas: the same"


@pytest.mark.parametrize(
    "off", [(1, 0, 0.0), (0, 1, 0.0), (0, 0, 1e-3), (0, 0, float("nan"))]
)
def test_its_check_fails_when_anything_differs(
    example: ModuleType,
    test_images: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    off: tuple[int, int, float],
) -> None:
    def wrong(*arguments: Any) -> tuple[Any, ...]:
        return tuple(
            a + b
            for a, b in zip(example.evaluate_plainly(*arguments), off, strict=True)
        )

    monkeypatch.setattr(
        example, "evaluate", lambda strategy, model, loader: wrong(model, loader)
    )
    with pytest.raises(
        SystemExit, match=r"^1 replicas: .*, which is not what plain PyTorch finds$"
    ):
        example.check(
            example.problem.Net(),
            DataLoader(Subset(test_images, range(8)), batch_size=3),
        )
