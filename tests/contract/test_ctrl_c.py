"""Ctrl-C stops all replicas of a run."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

import torchstrategy
from conditions import needs_signals
from failures import HANG, Problem, assert_same, reduce, replica
from problems import share_a_place
from topologies import central_in_one_place
from torchstrategy._group import replica_threads
from torchstrategy._turns.switch import IN_TURNS

pytestmark = pytest.mark.usefixtures("a_hang_is_a_failure")


# Simulated devices count their memory in finalizers, where what interrupts a replica is
# lost: it comes once more.
interrupts_finalizers = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <finalize:pytest.PytestUnraisableExceptionWarning"
)


class CtrlC:
    """In a block, pressing it raises KeyboardInterrupt in the main thread.

    It does so `times` times.

    It is pressed again and again, since a main thread that is just about to wait may
    miss a signal.
    """

    def __init__(self, times: int = 1) -> None:
        self._left = times
        self._pressed, self._over = threading.Event(), threading.Event()
        self._finger = threading.Thread(target=self._keep_pressing)

    def press(self) -> None:
        self._pressed.set()

    def _keep_pressing(self) -> None:
        self._pressed.wait()
        while not self._over.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def _handle(self, *_: object) -> None:
        if self._left:
            self._left -= 1
            raise KeyboardInterrupt

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._handle)
        self._finger.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left = 0
        self._over.set()
        self._pressed.set()
        self._finger.join()
        signal.signal(signal.SIGINT, self._before)


@needs_signals
@interrupts_finalizers
@pytest.mark.parametrize("who", ["first", "last"])
def test_ctrl_c_stops_a_replica_that_computes_and_those_that_wait(
    several: torchstrategy.Strategy, who: str
) -> None:
    problem = Problem(several)
    before = problem.state()
    count = several.num_replicas_in_sync
    loops = 0 if who == "first" else count - 1
    began, ended = [], []

    def step(inputs: torch.Tensor) -> None:
        began.append(replica())
        try:
            problem.optimizer.zero_grad()
            problem.model(inputs).square().mean().backward()
            if replica() == loops:
                ctrl_c.press()
                while True:
                    pass
            reduce()
        finally:
            ended.append(replica())

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        problem.run(step)
    # In turns, replicas meet at the end of the backward.
    first = list(range(count if IN_TURNS else loops + 1))
    assert began == first or not share_a_place(several)
    assert sorted(ended) == sorted(began)
    assert_same(problem.state(), before)
    problem.train()


@needs_signals
@interrupts_finalizers
def test_ctrl_c_after_a_meeting_stops_also_those_that_have_not_gone_on(
    several: torchstrategy.Strategy,
) -> None:
    began, ended = [], []

    def step() -> None:
        began.append(replica())
        try:
            reduce()
            ctrl_c.press()
            while True:
                pass
        finally:
            ended.append(replica())

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        several.run(step)
    assert sorted(ended) == sorted(began)
    several.run(reduce)


@needs_signals
def test_ctrl_c_lets_replicas_that_wait_clean_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_threads, "_PATIENCE_S", HANG)
    strategy = central_in_one_place(3)
    cleaned_up = []

    def step() -> None:
        if replica() == 2:
            ctrl_c.press()
            while len(cleaned_up) < 2:
                pass
            return
        try:
            reduce()
        finally:
            if replica() == 1:
                # There is time to interrupt it, if somebody did.
                for _ in range(1_000_000):
                    pass
            cleaned_up.append(replica())

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    assert cleaned_up == [0, 1]


@needs_signals
def test_ctrl_c_in_a_merge_function_stops_all_replicas(
    several: torchstrategy.Strategy,
) -> None:
    ended = []

    def merged(strategy: torchstrategy.Strategy) -> None:
        ctrl_c.press()
        while True:
            pass

    def step() -> None:
        try:
            torchstrategy.get_replica_context().merge_call(merged)
        finally:
            ended.append(replica())

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        several.run(step)
    assert sorted(ended) == list(range(several.num_replicas_in_sync))
    several.run(reduce)


@needs_signals
def test_a_second_ctrl_c_returns_while_a_replica_is_stuck() -> None:
    problem = Problem(torchstrategy.CentralStorageStrategy(["cpu"] * 2))
    before = problem.state()
    let_go, ended = threading.Event(), threading.Event()

    def step(inputs: torch.Tensor) -> None:
        problem.model(inputs).square().mean().backward()
        if replica() == 0:
            reduce()
        ctrl_c.press()
        try:
            let_go.wait(30)
        finally:
            ended.set()

    with CtrlC(times=2) as ctrl_c, pytest.raises(KeyboardInterrupt):
        problem.run(step)
    assert not ended.is_set()
    assert_same(problem.state(), before)
    problem.train()
    trained = problem.state()
    let_go.set()
    assert ended.wait(10), "the replica that was stuck has not gone on"
    assert_same(problem.state(), trained)
