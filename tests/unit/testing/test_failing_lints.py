"""Lints that end with an error of their own.

The program goes on, the other lints too, and the report says so.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import linted
from conditions import for_changes, for_releases
from sweep import operators
from torchstrategy.testing import Finding, lint_training, run_ranks
from torchstrategy.testing._lints import session
from torchstrategy.testing._lints.rows.fed_rows import FedRows
from torchstrategy.testing._lints.rows.generators import Generators

RANKS = 2


def train(rank: int, seed: int = 0) -> list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(seed * rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(32, 4)).mean().backward()
        optimizer.step()
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def fails(*_: Any) -> None:
    raise LookupError("nothing is there")


def the_failure(findings: list[Finding]) -> Finding:
    (failure,) = [finding for finding in findings if finding.name == "lint-failed"]
    return failure


@for_changes
@pytest.mark.parametrize("event", ["calls", "goes_back", "stepped", "findings"])
def test_a_lint_that_fails_does_not_end_the_program(
    monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    expected = run_ranks(train, RANKS)[0]
    monkeypatch.setattr(FedRows, event, fails)
    with lint_training(check=False) as record:
        results, _ = run_ranks(train, RANKS)
    assert results == expected
    failure = the_failure(record.findings)
    assert (
        "the lint `FedRows` has ended with LookupError: nothing is there "
        "(test_failing_lints.py:" in failure.says
    )


def test_a_lint_that_fails_at_an_operator_does_not_end_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        FedRows, "operators", lambda _: {torch.ops.aten.randn.default: fails}
    )
    findings = linted.findings_of(lambda: run_ranks(train, RANKS))
    assert the_failure(findings).lines == (
        f"test_failing_lints.py:{train.__code__.co_firstlineno + 10}",
    )


@for_changes
def test_the_other_lints_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedRows, "calls", fails)
    names = linted.names_of(lambda: run_ranks(train, RANKS))
    monkeypatch.undo()
    expected = linted.names_of(lambda: run_ranks(train, RANKS))
    assert expected == ["same-rows"]  # all ranks draw the same
    assert sorted(names) == ["lint-failed", *expected]


@pytest.mark.parametrize("shared", ["terms_of", "_puts_together"])
def test_what_lints_share_may_fail(
    monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    """Then no lint has anything to go by, and the one finding says so."""
    monkeypatch.setattr(session, shared, fails)
    (failure,) = linted.findings_of(lambda: run_ranks(train, RANKS))
    assert failure.name == "lint-failed"
    assert "what all lints share has ended with LookupError" in failure.says


def test_a_failure_may_be_silenced_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draws() -> None:
        torch.randn(3)  # torchstrategy: ignore[lint-failed]

    monkeypatch.setattr(
        Generators, "operators", lambda _: {torch.ops.aten.randn.default: fails}
    )
    assert linted.findings_of(draws) == []


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev])
def test_numbers_may_be_copied_as_tensors(transform: Any) -> None:
    """In `vmap`, the 2 of `x * 2` is copied to its dtype.

    `FedRows` asked the number whether it requires a gradient.
    """

    def main(rank: int) -> None:
        train(rank, seed=1)
        transform(lambda x: x * 2 + 1)(torch.randn(3))

    assert linted.findings_of(lambda: run_ranks(main, RANKS)) == []


@for_releases
@pytest.mark.filterwarnings("ignore")  # of operators
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.complex64], ids=str
)
def test_no_lint_fails_at_a_sample_of_torchs_own(dtype: torch.dtype) -> None:
    def main(rank: int) -> int:
        train(rank, seed=1)
        return sum(
            runs(name, sample)
            for name in operators.names()
            for sample in of(name, dtype)
        )

    with lint_training(check=False) as record, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts, _ = run_ranks(main, RANKS)
    assert min(counts) > 400
    assert [
        finding for finding in record.findings if finding.name == "lint-failed"
    ] == []


def of(name: str, dtype: torch.dtype) -> list[Any]:
    return (
        operators.samples(name, 2, dtype)
        if operators.dtype_of(name, dtype) is dtype
        else []
    )


def runs(name: str, sample: Any) -> bool:
    try:
        result = operators.call(name)(sample.input, *sample.args, **sample.kwargs)
        losses = [
            one.abs().sum()
            for one in tree_leaves(result)
            if isinstance(one, torch.Tensor) and one.requires_grad
        ]
        if losses:
            torch.stack([loss.float() for loss in losses]).sum().backward()
    except Exception:  # what torch refuses
        return False
    return True
