"""The processes that tests share end with the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchstrategy.testing import simulated_devices
from workers.cluster import end_all


@pytest.fixture(scope="package", autouse=True)
def shared_processes() -> Iterator[None]:
    if simulated_devices():
        pytest.skip("the processes have no simulated devices")
    yield
    end_all()
