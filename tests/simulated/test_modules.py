"""Some of torch's own modules and optimizers, on a simulated device as on the CPU.

All are in `python tests/sweep`.
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from sweep import exceptions, modules, optimizers
from sweep.agreement import Verdict, judge

HERE = torch.device("sim:1")


@pytest.mark.parametrize("name", modules.names()[::6])
def test_a_module_agrees_with_the_cpu(name: str) -> None:
    outcomes = [
        judge(trial, HERE) for trial in islice(modules.trials(name, 2), 0, 60, 5)
    ]
    assert [
        outcome for outcome in outcomes if outcome.verdict is Verdict.DIFFERENT
    ] == []
    assert {outcome.verdict for outcome in outcomes} & {Verdict.EQUAL, Verdict.CLOSE}


@pytest.mark.parametrize("name", optimizers.names())
def test_an_optimizer_agrees_with_the_cpu(name: str) -> None:
    outcomes = [judge(trial, HERE) for trial in islice(optimizers.trials(name, 2), 4)]
    assert [
        outcome for outcome in outcomes if outcome.verdict is Verdict.DIFFERENT
    ] == []
    assert {outcome.verdict for outcome in outcomes} <= {Verdict.EQUAL, Verdict.CLOSE}


def test_no_module_and_no_optimizer_is_an_exception() -> None:
    assert not exceptions.MODULES
    assert not exceptions.OPTIMIZERS
