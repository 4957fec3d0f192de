"""The processes that tests of pages share end with these tests: else pytest would wait for them for ever at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from workers.cluster import end_all


@pytest.fixture(scope="package", autouse=True)
def shared_processes() -> Iterator[None]:
    yield
    end_all()
