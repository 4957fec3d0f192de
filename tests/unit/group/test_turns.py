"""Whose turn it is: replicas of one place take turns, others do not.

All wait at meetings.
"""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from conditions import needs_signals
from torchstrategy._base.devices import canonical_device
from torchstrategy._group import random_streams, replica_threads
from torchstrategy._group.group import Replica, ReplicaStopped
from torchstrategy._group.random_streams import RandomStreams
from torchstrategy._group.replica_threads import Replicas, ReplicaThreads

PATIENCE = 5.0  # seconds that a test waits for what must happen at once


def cpus(*indices: int) -> list[torch.device]:
    return [canonical_device(f"cpu:{index}") for index in indices]


@pytest.fixture
def several_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each logical CPU a place of its own, as each accelerator is.

    All logical CPUs are in one place, and there may be no accelerators here. Who gives
    the turns asks nothing about a device but its place; so this is all that it takes to
    see replicas run at the same time, and all else is as it is.
    """
    monkeypatch.setattr(replica_threads, "memory_device", lambda device: device)


@pytest.fixture(autouse=True)
def a_hang_is_a_failure() -> Iterator[None]:
    """Ends a run that hangs, again and again, so that the suite does not hang."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: Any) -> None:
        while frame is not None:
            if frame.f_code.co_filename == replica_threads.__file__:
                raise TimeoutError("this run would never have returned")
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE + 1, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def everyone(replicas: Replicas) -> Sequence[int]:
    return range(len(replicas.devices))


def echo(brought: Sequence[Any]) -> Sequence[Any]:
    return list(brought)


class Gate:
    """Counts who is inside, by device, and who has been."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside: dict[torch.device, list[int]] = {}
        self.most: dict[torch.device, int] = {}
        self.log: list[tuple[str, int]] = []

    def pass_through(self, name: str, replica: Replica) -> None:
        with self._lock:
            here = self.inside.setdefault(replica.device, [])
            here.append(replica.index)
            self.most[replica.device] = max(self.most.get(replica.device, 0), len(here))
            self.log.append((name, replica.index))
        # Long enough for Python to switch threads if another one could run.
        for _ in range(300):
            sum(range(10))
        with self._lock:
            here.remove(replica.index)

    def at(
        self,
        device: torch.device,
        replicas: Sequence[int],
        devices: Sequence[torch.device],
    ) -> list[tuple[str, int]]:
        return [
            entry
            for entry in self.log
            if devices[entry[1]] == device and entry[1] in replicas
        ]


# One place


def test_replicas_in_one_place_run_one_at_a_time_and_in_order() -> None:
    replicas, gate = Replicas(cpus(0, 1, 0, 2)), Gate()

    def call(replica: Replica) -> int:
        gate.pass_through("begins", replica)
        replica.synchronize("a", echo, None)
        gate.pass_through("goes on", replica)
        replica.synchronize("b", echo, None)
        gate.pass_through("ends", replica)
        return replica.index * 10

    for _ in range(3):
        gate.log.clear()
        assert replicas.run(call, everyone(replicas)) == {0: 0, 1: 10, 2: 20, 3: 30}
        assert gate.log == [
            (name, r) for name in ("begins", "goes on", "ends") for r in range(4)
        ]


def test_a_replica_does_not_begin_before_those_before_it_stand_still() -> None:
    replicas, running = Replicas(cpus(0, 0, 0)), []

    def call(replica: Replica) -> None:
        assert not running
        running.append(replica.index)
        sum(range(10000))
        running.remove(replica.index)
        replica.synchronize("m", echo, None)
        assert not running

    replicas.run(call, everyone(replicas))


def test_only_the_replicas_that_are_present_run() -> None:
    replicas = Replicas(cpus(0, 0, 0, 0))
    brought = []

    def call(replica: Replica) -> int:
        return replica.synchronize(
            "m",
            lambda values: brought.append(list(values)) or echo(values),
            replica.index,
        )

    assert replicas.run(call, [1, 3]) == {1: 1, 3: 3}
    assert brought == [[1, 3]]
    assert replicas.run(call, [2]) == {2: 2}


def test_a_lone_replica_runs_here_and_meets_itself() -> None:
    replicas = Replicas(cpus(5))
    before = set(threading.enumerate())

    def call(replica: Replica) -> tuple[Any, ...]:
        answer = replica.synchronize("m", lambda values: [sum(values) + 1], 4)
        return threading.get_ident(), replica.index, replica.device, answer

    assert replicas.run(call, [0]) == {
        0: (threading.get_ident(), 0, canonical_device("cpu:5"), 5)
    }
    assert set(threading.enumerate()) == before


# Meetings


def test_a_meeting_is_held_once_on_the_callers_thread_in_replica_order() -> None:
    replicas, held = Replicas(cpus(0, 1, 2)), []

    def call(replica: Replica) -> Any:
        def combine(brought: Sequence[Any]) -> list[Any]:
            held.append((replica.index, threading.get_ident(), list(brought)))
            return [value * 2 for value in brought]

        return [
            replica.synchronize("m", combine, replica.index + 1),
            replica.synchronize("m", combine, replica.index + 5),
        ]

    assert replicas.run(call, everyone(replicas)) == {
        0: [2, 10],
        1: [4, 12],
        2: [6, 14],
    }
    # The lowest replica's combine is the one that is called.
    assert held == [
        (0, threading.get_ident(), [1, 2, 3]),
        (0, threading.get_ident(), [5, 6, 7]),
    ]


def test_replicas_at_meetings_of_different_names_are_refused() -> None:
    replicas = Replicas(cpus(0, 0))
    with pytest.raises(RuntimeError, match="different number of") as caught:
        replicas.run(
            lambda replica: replica.synchronize(f"meeting {replica.index}", echo, None),
            everyone(replicas),
        )
    assert "replica 0 is at meeting 0" in str(caught.value)
    assert "replica 1 is at meeting 1" in str(caught.value)


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_replicas_that_wait_for_one_that_has_ended_are_told_so(ends: int) -> None:
    replicas = Replicas(cpus(0, 0, 0))

    def call(replica: Replica) -> None:
        if replica.index != ends:
            replica.synchronize("m", echo, None)

    with pytest.raises(RuntimeError, match="different number of") as caught:
        replicas.run(call, everyone(replicas))
    waiting = [r for r in range(3) if r != ends]
    assert all(f"replica {r} is at m" in str(caught.value) for r in waiting)


@pytest.mark.parametrize("answers", [[], [1], [1, 2, 3]])
def test_a_meeting_that_gives_too_few_or_too_many_answers_does_not_hang(
    answers: list[int],
) -> None:
    replicas = Replicas(cpus(0, 0))
    with pytest.raises(ValueError, match="zip"):
        replicas.run(
            lambda replica: replica.synchronize("m", lambda brought: answers, None),
            everyone(replicas),
        )
    assert replicas.run(lambda replica: replica.index, everyone(replicas)) == {
        0: 0,
        1: 1,
    }


def test_a_meeting_may_hold_a_run_of_the_same_replicas() -> None:
    replicas = Replicas(cpus(0, 0))

    def inner(replica: Replica) -> int:
        return replica.synchronize(
            "m", lambda brought: [sum(brought)] * 2, replica.index + 1
        )

    def outer(replica: Replica) -> Any:
        return replica.synchronize(
            "m", lambda brought: [replicas.run(inner, everyone(replicas))] * 2, None
        )

    assert replicas.run(outer, everyone(replicas)) == {0: {0: 3, 1: 3}, 1: {0: 3, 1: 3}}
    assert replicas.run(inner, everyone(replicas)) == {0: 3, 1: 3}


# Several places


@pytest.mark.usefixtures("several_places")
def test_replicas_in_different_places_run_at_the_same_time() -> None:
    replicas, together = Replicas(cpus(0, 1, 2)), threading.Barrier(3)

    def call(replica: Replica) -> None:
        together.wait(PATIENCE)
        replica.synchronize("m", echo, None)
        together.wait(PATIENCE)

    replicas.run(call, everyone(replicas))
    assert not together.broken


@pytest.mark.usefixtures("several_places")
def test_of_replicas_in_two_places_those_in_one_still_take_turns() -> None:
    devices = cpus(0, 1, 0, 1, 0, 1)
    replicas, gate, pairs = Replicas(devices), Gate(), threading.Barrier(2)

    def call(replica: Replica) -> None:
        gate.pass_through("begins", replica)
        pairs.wait(PATIENCE)  # the n-th of each place
        replica.synchronize("m", echo, None)
        gate.pass_through("ends", replica)
        pairs.wait(PATIENCE)

    replicas.run(call, everyone(replicas))
    assert gate.most == {devices[0]: 1, devices[1]: 1}
    for device, here in ((devices[0], [0, 2, 4]), (devices[1], [1, 3, 5])):
        expected = [("begins", r) for r in here] + [("ends", r) for r in here]
        assert gate.at(device, here, devices) == expected


@pytest.mark.usefixtures("several_places")
def test_a_place_does_not_wait_for_the_turns_of_another() -> None:
    # Replica 1 goes on only when both replicas of the other place have begun.
    replicas, begun = Replicas(cpus(0, 1, 0)), threading.Barrier(2)

    def call(replica: Replica) -> None:
        if replica.index != 0:
            begun.wait(PATIENCE)

    replicas.run(call, everyone(replicas))


@pytest.mark.usefixtures("several_places")
def test_while_a_meeting_is_held_all_places_stand_still() -> None:
    """It waits for all of them first."""
    replicas = Replicas(cpus(0, 1, 0, 1))
    lock, running, seen = threading.Lock(), set(), []

    def combine(brought: Sequence[int]) -> list[int]:
        seen.append((list(brought), set(running), threading.get_ident()))
        return [sum(brought)] * len(brought)

    def call(replica: Replica) -> list[int]:
        answers = []
        for _ in range(3):
            with lock:
                running.add(replica.index)
            sum(range(1000 * (replica.index + 1)))
            with lock:
                running.discard(replica.index)
            answers.append(replica.synchronize("m", combine, replica.index))
        return answers

    assert replicas.run(call, everyone(replicas)) == {r: [6, 6, 6] for r in range(4)}
    assert seen == [([0, 1, 2, 3], set(), threading.get_ident())] * 3


@pytest.mark.usefixtures("several_places")
def test_a_failure_ends_the_run_when_the_other_place_stands_still() -> None:
    error, together, log = ValueError("bad"), threading.Barrier(2), []

    def call(replica: Replica) -> None:
        try:
            if replica.index == 0:
                together.wait(PATIENCE)
                raise error
            if replica.index == 1:
                together.wait(PATIENCE)
                replica.synchronize("m", echo, None)
                log.append("replica 1 went on")
            if replica.index == 2:
                log.append("replica 2, whose place failed, began")
        except BaseException as stopped:
            log.append(type(stopped))
            raise

    replicas = Replicas(cpus(0, 1, 0))
    with pytest.raises(ValueError, match="bad") as caught:
        replicas.run(call, everyone(replicas))
    assert caught.value is error
    assert sorted(log, key=str) == sorted([ValueError, ReplicaStopped], key=str)
    assert replicas.run(lambda replica: replica.index, everyone(replicas)) == {
        0: 0,
        1: 1,
        2: 2,
    }


@pytest.mark.usefixtures("several_places")
def test_a_replica_that_ends_well_beside_one_that_fails_changes_nothing() -> None:
    error, together = ValueError("bad"), threading.Barrier(2)

    def call(replica: Replica) -> None:
        together.wait(PATIENCE)
        if replica.index == 1:
            raise error

    replicas = Replicas(cpus(0, 1))
    for _ in range(20):
        with pytest.raises(ValueError, match="bad") as caught:
            replicas.run(call, everyone(replicas))
        assert caught.value is error
    assert replicas.run(lambda replica: replica.index, everyone(replicas)) == {
        0: 0,
        1: 1,
    }


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.usefixtures("several_places")
@pytest.mark.parametrize(
    "other", [KeyError("also bad"), Unprintable()], ids=["KeyError", "Unprintable"]
)
def test_of_two_failures_the_lower_replicas_comes_out_and_speaks_of_the_other(
    other: BaseException,
) -> None:
    error, together = ValueError("bad"), threading.Barrier(2)

    def call(replica: Replica) -> None:
        together.wait(PATIENCE)
        raise error if replica.index == 0 else other

    replicas = Replicas(cpus(0, 1))
    with pytest.raises(ValueError, match="bad") as caught:
        replicas.run(call, everyone(replicas))
    assert caught.value is error
    notes = "".join(error.__notes__)
    assert "replica 0 of 2" in notes
    assert "replica 1" in notes
    assert type(other).__name__ in notes


@pytest.mark.usefixtures("several_places")
def test_places_that_meet_unequally_are_told_so() -> None:
    replicas, together = Replicas(cpus(0, 1)), threading.Barrier(2)

    def call(replica: Replica) -> None:
        together.wait(PATIENCE)
        if replica.index == 0:
            replica.synchronize("m", echo, None)

    with pytest.raises(RuntimeError, match="different number of"):
        replicas.run(call, everyone(replicas))


@pytest.mark.usefixtures("several_places")
@needs_signals
def test_ctrl_c_stops_all_places() -> None:
    replicas, together, log = Replicas(cpus(0, 1, 0)), threading.Barrier(2), []
    computing, over, presses = threading.Event(), threading.Event(), [1]

    def handle(*_: object) -> None:
        if presses:
            presses.pop()
            raise KeyboardInterrupt

    def keep_pressing() -> None:
        computing.wait()
        # A main thread that is just about to wait may miss a signal.
        while not over.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def call(replica: Replica) -> None:
        log.append(("begins", replica.index))
        try:
            together.wait(PATIENCE)
            computing.set()
            while True:
                pass
        except BaseException as stopped:
            log.append((type(stopped), replica.index))
            raise

    finger = threading.Thread(target=keep_pressing)
    before = signal.signal(signal.SIGINT, handle)
    finger.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            replicas.run(call, everyone(replicas))
    finally:
        over.set()
        computing.set()
        finger.join()
        signal.signal(signal.SIGINT, before)
    assert set(log) == {
        ("begins", 0),
        ("begins", 1),
        (ReplicaStopped, 0),
        (ReplicaStopped, 1),
    }
    assert replicas.run(lambda replica: replica.index, everyone(replicas)) == {
        0: 0,
        1: 1,
        2: 2,
    }


# Teams


def test_two_threads_may_run_the_same_replicas_at_the_same_time() -> None:
    replicas, together, results = Replicas(cpus(0, 0)), threading.Barrier(2), {}

    def call(name: str) -> Callable[[Replica], str]:
        def of_caller(replica: Replica) -> str:
            if replica.index == 0:
                together.wait(PATIENCE)
            return replica.synchronize(
                "m", lambda brought: ["".join(brought)] * 2, name
            )

        return of_caller

    def run(name: str) -> None:
        results[name] = replicas.run(call(name), everyone(replicas))

    callers = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE)
    assert results == {"a": {0: "aa", 1: "aa"}, "b": {0: "bb", 1: "bb"}}


def test_runs_that_follow_one_another_use_the_same_threads() -> None:
    replicas = Replicas(cpus(0, 0))
    first = replicas.run(lambda replica: threading.get_ident(), everyone(replicas))
    assert (
        replicas.run(lambda replica: threading.get_ident(), everyone(replicas)) == first
    )
    with pytest.raises(ValueError, match="bad"):
        replicas.run(lambda replica: int("bad"), everyone(replicas))
    assert (
        replicas.run(lambda replica: threading.get_ident(), everyone(replicas)) == first
    )


def test_a_team_that_is_gone_ends_its_threads(no_thread_left: None) -> None:
    replicas = Replicas(cpus(0, 0))
    assert replicas.run(lambda replica: replica.index, [0, 1]) == {0: 0, 1: 1}


def test_a_team_that_was_abandoned_is_not_fit(no_thread_left: None) -> None:
    team = ReplicaThreads(cpus(0, 0))
    assert team.is_fit
    team.abandon({})
    assert not team.is_fit


def test_a_team_holds_nothing_of_a_run_that_is_over() -> None:
    class Held:
        pass

    replicas, held = Replicas(cpus(0, 0)), Held()
    alive = weakref.ref(held)

    def run(held: Held, fails: bool) -> None:
        def call(replica: Replica) -> Held:
            replica.synchronize("m", echo, held)
            if fails and replica.index == 1:
                raise ValueError("bad")
            return held

        if fails:
            with pytest.raises(ValueError, match="bad"):
                replicas.run(call, everyone(replicas))
        else:
            replicas.run(call, everyone(replicas))

    run(held, fails=False)
    run(held, fails=True)
    del held
    gc.collect()
    assert alive() is None


# Streams of random numbers


def draw(generator: torch.Generator | None = None) -> list[float]:
    return torch.rand(3, generator=generator).tolist()


def test_a_stream_goes_on_where_it_was_left() -> None:
    torch.manual_seed(1)
    streams = RandomStreams(cpus(0, 0, 0), one_at_a_time=True)
    drawn: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for r in (0, 1, 2, 0, 2, 1, 1, 0):
        streams.put_in_force(r)
        drawn[r] += draw()
    streams.give_back()
    after = draw()

    torch.manual_seed(1)
    plain = draw() + draw() + draw()
    assert drawn[0] == plain
    assert after == draw()

    torch.manual_seed(1)
    at_once = RandomStreams(cpus(0, 0, 0), one_at_a_time=True)
    for r in (2, 1):
        at_once.put_in_force(r)
        assert [
            number for _ in range(len(drawn[r]) // 3) for number in draw()
        ] == drawn[r]
    at_once.give_back()


def test_streams_are_made_of_the_generators_state_and_the_replicas_number() -> None:
    def starts(seed: int) -> list[tuple[float, ...]]:
        torch.manual_seed(seed)
        streams = RandomStreams(cpus(0, 0, 0), one_at_a_time=True)
        found = []
        for r in (1, 2):
            streams.put_in_force(r)
            found.append(tuple(draw()))
        streams.give_back()
        return found

    assert starts(1) == starts(1)
    assert len({*starts(1), *starts(2)}) == 4


def test_the_same_replica_may_be_put_in_force_again() -> None:
    torch.manual_seed(1)
    streams = RandomStreams(cpus(0, 0), one_at_a_time=True)
    streams.put_in_force(1)
    first = draw()
    streams.put_in_force(1)
    second = draw()
    streams.give_back()
    assert first != second


def test_making_and_giving_back_streams_that_nobody_used_changes_nothing() -> None:
    before = torch.get_rng_state()
    streams = RandomStreams(cpus(0, 0), one_at_a_time=True)
    streams.give_back()
    streams.give_back()
    streams = RandomStreams(cpus(0, 0), one_at_a_time=True)
    streams.put_in_force(1)
    streams.give_back()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_all_places_share_is_not_exchanged_while_they_run() -> None:
    torch.manual_seed(1)
    streams = RandomStreams(cpus(0, 1), one_at_a_time=False)
    drawn = []
    for r in (0, 1, 0):
        streams.put_in_force(r)
        drawn.append(draw())
    streams.give_back()
    torch.manual_seed(1)
    assert drawn == [draw() for _ in range(3)]


class Accelerators:
    """Generators of accelerators, where `RandomStreams` looks for them.

    This machine need not have the accelerators.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.devices = [torch.device("cuda", index) for index in range(count)]
        self.generators = {
            device: torch.Generator().manual_seed(7 + device.index)
            for device in self.devices
        }

        def generators(device: torch.device, with_cpu: bool) -> list[torch.Generator]:
            of_device = [self.generators[device]] if device in self.generators else []
            return [torch.default_generator] * with_cpu + of_device

        monkeypatch.setattr(random_streams, "generators_of", generators)


def test_replicas_on_one_accelerator_exchange_its_generator_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Accelerators(monkeypatch, 1)
    device, generator = fake.devices[0], fake.generators[fake.devices[0]]
    streams = RandomStreams([device, device], one_at_a_time=True)
    drawn = []
    for r in (0, 1, 0):
        streams.put_in_force(r)
        drawn.append(draw(generator))
    streams.give_back()
    after = draw(generator)
    plain = torch.Generator().manual_seed(7)
    assert drawn[0] == draw(plain)
    assert drawn[2] == draw(plain)
    assert after == draw(plain)
    assert drawn[1] not in (drawn[0], drawn[2])


def test_replicas_on_different_accelerators_have_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Accelerators(monkeypatch, 2)
    first, second = (fake.generators[device] for device in fake.devices)

    def drawn() -> tuple[list[float], list[float]]:
        streams = RandomStreams(fake.devices, one_at_a_time=False)
        streams.put_in_force(0)
        streams.put_in_force(1)
        numbers = draw(first), draw(second)
        streams.give_back()
        return numbers

    states = [first.get_state(), second.get_state()]
    some = drawn()
    assert torch.equal(second.get_state(), states[1]), (
        "replica 1 used up numbers of the caller's"
    )
    assert some[0] == draw(torch.Generator().manual_seed(7))
    assert some[1] not in (some[0], draw(torch.Generator().manual_seed(8)))
    assert drawn()[1] != some[1], "the generator of the first accelerator has gone on"
    first.set_state(states[0])
    assert drawn() == some
