"""Variables under one strategy of each kind.

They take the place of the strategies that other tests run under.
"""

from __future__ import annotations

import pytest

import torchstrategy
from variables import MAKERS, make, mirrored

SEVERAL = [name for name, (_, replicas) in MAKERS.items() if replicas > 1]


@pytest.fixture(params=MAKERS)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return make(request.param)


@pytest.fixture(params=SEVERAL)
def several(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return make(request.param)


@pytest.fixture(params=["central_2", "mirrored_2"])
def two(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return make(request.param)


@pytest.fixture
def two_mirrored() -> torchstrategy.Strategy:
    return mirrored(2)
