"""Strategies that several files of the contract test with, and the end of hangs.

A run that hangs is ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import torchstrategy
from failures import HANG
from hangs import ended_if_it_hangs
from topologies import TOPOLOGIES, central, central_with_copies


@pytest.fixture(params=["default", "one_device", "central_1", "central_3"])
def kind(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    """One strategy of each kind, for what does not depend on the number of replicas."""
    return TOPOLOGIES[request.param]()


@pytest.fixture(params=["one_device", "central_1", "central_2", "copies_3"])
def chosen(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    """A strategy that somebody chose: any but the default one."""
    return TOPOLOGIES[request.param]()


@pytest.fixture
def other() -> torchstrategy.Strategy:
    """Another one."""
    return central(2)


@pytest.fixture(params=[central, central_with_copies], ids=["shared", "copied"])
def three(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    """Three replicas that share the parameters' memory, and three with copies.

    The copies are their own.
    """
    return request.param(3)


@pytest.fixture
def a_hang_is_a_failure() -> Iterator[None]:
    with ended_if_it_hangs(os.path.dirname(torchstrategy.__file__), HANG):
        yield
