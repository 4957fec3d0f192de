"""What every test runs under: a fixed seed, and torch's state as it was found.

No scope is left open, and no thread is left busy.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

import depths
import torchstrategy
from topologies import EVERY, MAKERS, SEVERAL, TOPOLOGIES, central_in_one_place
from torchstrategy.testing import simulated_devices

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers have a core each. With more threads than cores, those of an operation wait
    # for each other by spinning.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

if sys.version_info >= (3, 14) and hasattr(os, "fork"):
    # The default there is `forkserver`. It pickles what it starts, of which tests
    # define much in functions, and each worker of a loader imports torch.
    # `tests/surroundings` has loaders of every kind.
    multiprocessing.set_start_method("fork")

# `python -m tests.gpu` runs the tests that need no package but torch and pytest.
with suppress(ImportError):
    import hypothesis

    # A machine that is busy with something else is no failure.
    too_slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "no_deadline", deadline=None, suppress_health_check=too_slow
    )
    hypothesis.settings.load_profile("no_deadline")

# A package of its own, which test_thirdparty.py installs and runs.
collect_ignore = ["thirdparty"]
if simulated_devices():
    # What no device can change: text, settings, the order of rows, and which context
    # holds where. What moves data, reads gradients, copies models or draws numbers
    # runs. `unit/testing` simulates devices in processes of its own.
    collect_ignore += [
        "house",
        "pages",
        "unit/cluster_resolver",
        "unit/strategy",
        "unit/testing",
    ]
    collect_ignore += [
        "contract/test_context.py",
        "contract/test_pickling.py",
        "contract/test_process.py",
        "contract/test_run_options.py",
        "equality/test_base_classes.py",
        "equality/test_drawing_programs.py",
        "unit/parity/test_communication_options.py",
        "unit/data/test_element_spec.py",
        "unit/data/test_input_options.py",
        "unit/data/test_numpy_dataset.py",
        "unit/data/test_resume.py",
        "unit/data/test_resume_refusals.py",
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    depths.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    depths.begin(config)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out the tests that are deeper than this run goes: see `depths.py`."""
    depths.assign_depths(items, on_devices=bool(simulated_devices()))
    deepest = depths.current_depth()
    left_out = [item for item in items if depths.depth_of(item) > deepest]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if depths.depth_of(item) <= deepest]


def pytest_collection_finish() -> None:
    """Keeps what was imported out of the collections that tests ask for.

    There is far more of it than they make.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=EVERY)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    """Every strategy there is, on every topology."""
    return TOPOLOGIES[request.param]()


@pytest.fixture(params=SEVERAL)
def several(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    """Every strategy of several replicas."""
    return TOPOLOGIES[request.param]()


@pytest.fixture(params=[2, 3, 4], ids=lambda replicas: f"replicas_{replicas}")
def in_one_place(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    """Several replicas that share a device, and run one after the other."""
    return central_in_one_place(request.param)


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], torchstrategy.Strategy]:
    """What makes a strategy of so many replicas.

    One has parameters that share the owner's memory, one has copies.
    """
    return MAKERS[request.param]


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """Seeds torch, and fails a test that leaves a scope, mode or setting behind."""
    # Without accelerators, `torch.manual_seed` notes a stack trace for each kind of
    # accelerator, for a later use of it: that takes longer than many a test.
    seed = (
        torch.manual_seed
        if torch.accelerator.is_available()
        else torch.default_generator.manual_seed
    )
    seed(0)
    before = _state()
    yield
    assert _state() == before, (
        "the test left torch or torchstrategy in another state than it found it in"
    )


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What goes in such a test goes without the help of the garbage collector."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Fails the test whose replica threads outlive its strategies."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)  # it was told to end when its strategy went
        assert not thread.is_alive(), f"{thread.name} is still there"


def _state() -> tuple[object, ...]:
    return (
        torchstrategy.has_strategy(),
        torchstrategy.in_cross_replica_context(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.optim.Optimizer.__init__,
        torch.are_deterministic_algorithms_enabled(),
        torch.autograd.is_multithreading_enabled(),
    )
