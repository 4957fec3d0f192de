"""A plugin, `-p gpu.deadline`: no test begins after a time from the environment.

So a part that runs out of time still says which tests have failed, and how many were
left out.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

LAST_TEST = "TESTS_GPU_LAST_TEST"
"""The variable: a time in seconds, as `time.time()` counts them."""

_left_out: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(LAST_TEST, "inf")):
        _left_out.append(item.nodeid)
        pytest.skip("the time of this part is over")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _left_out:
        terminalreporter.write_line(
            f"The time of this part was over: {len(_left_out)} tests were left out."
        )
