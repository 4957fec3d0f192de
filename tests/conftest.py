"""What every test runs under: a fixed seed, torch's state as it was found, no scope left open, no thread left busy."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import torchstrategy
from torchstrategy._central_storage import CentralStorage
from torchstrategy._devices import canonical
from torchstrategy._extended import ReplicatedExtended
from torchstrategy._options import ReduceOp
from torchstrategy._replicas import Replicas
from torchstrategy.testing import simulated_devices

collect_ignore = ["thirdparty"]  # a package of its own, which test_thirdparty.py installs and runs

# Where the strategies of these tests run: on the one CPU, or each replica on a simulated device of its own.
SIMULATED = simulated_devices()


def compute_devices(replicas: int) -> list[torch.device]:
    """The device of each of so many replicas. Simulated are five; the last of them computes nothing."""
    return [SIMULATED[r % 4] if SIMULATED else torch.device("cpu") for r in range(replicas)]


def central(replicas: int, **kwargs: object) -> torchstrategy.Strategy:
    """CentralStorage whose parameters are where replica 0 is; replicas there share the owner's memory."""
    devices = compute_devices(replicas)
    return torchstrategy.CentralStorageStrategy(devices, devices[0], **kwargs)  # type: ignore[arg-type]


def central_in_one_place(replicas: int) -> torchstrategy.Strategy:
    """The same with all replicas on one device, so that they run one after the other."""
    device = SIMULATED[1] if SIMULATED else "cpu"
    return torchstrategy.CentralStorageStrategy([device] * replicas, device)


def central_with_copies(replicas: int) -> torchstrategy.Strategy:
    """The same, but each replica's parameters are real copies of those on another device, or as if on another."""
    devices = [canonical(device) for device in compute_devices(replicas)]
    owner = SIMULATED[4] if SIMULATED else devices[0]
    storage = CentralStorage(devices, owner, may_alias=False)
    return torchstrategy.Strategy(ReplicatedExtended(Replicas(devices), storage, ReduceOp.MEAN))


TOPOLOGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "default": torchstrategy.get_strategy,
    "one_device": lambda: torchstrategy.OneDeviceStrategy(SIMULATED[1] if SIMULATED else "cpu"),
    "central_1": lambda: central(1),
    "central_2": lambda: central(2),
    "central_3": lambda: central(3),
    "central_4": lambda: central(4),
    "central_offset": lambda: torchstrategy.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:3"),
    "copies_1": lambda: central_with_copies(1),
    "copies_3": lambda: central_with_copies(3),
}
SEVERAL = [name for name in TOPOLOGIES if name not in ("default", "one_device", "central_1", "copies_1")]


@pytest.fixture(params=TOPOLOGIES)
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


MAKERS = {"aliased": central, "copies": central_with_copies}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], torchstrategy.Strategy]:
    """What makes a strategy of so many replicas: with parameters that share the owner's memory, and with copies."""
    return MAKERS[request.param]


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """Seeds torch, and fails the test that leaves a scope, a mode or a setting behind."""
    torch.manual_seed(0)
    before = _state()
    yield
    assert _state() == before, "the test left torch or torchstrategy in another state than it found it in"


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
    )
