"""The processes that the tests of a page share end with these tests.

Tests that come later look for processes that they left behind. And pytest waits at its
end for processes that run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from workers.cluster import end_all


@pytest.fixture(scope="module", autouse=True)
def shared_processes() -> Iterator[None]:
    yield
    end_all()
