"""Lockstep and the slow replica: who goes when a test says so.

Nothing else depends on it.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy
from conditions import for_changes, for_releases, needs_signals
from problems import context, data, deal, mlp, mse, parameters, replica_id, sgd
from topologies import TOPOLOGIES, central, central_with_copies
from torchstrategy._group import replica_threads
from torchstrategy._group.group import ReplicaStopped
from torchstrategy.testing._faults import fail_in_replica, slow_replica
from torchstrategy.testing._lockstep import Lockstep

PATIENCE = 5.0  # seconds that a test waits for what must happen at once
ONE_REPLICA = ["default", "one_device", "central_1", "copies_1"]


@pytest.fixture(params=["one place", "several places"])
def places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that share a device.

    And replicas of which each logical CPU is a place of its own, as accelerators.
    """
    if request.param == "several places":
        monkeypatch.setattr(replica_threads, "memory_device", lambda device: device)


def on_cpus(replicas: int) -> torchstrategy.Strategy:
    """A strategy whose replicas are on logical CPUs of their own."""
    return torchstrategy.CentralStorageStrategy(
        [f"cpu:{r}" for r in range(replicas)], "cpu:0"
    )


def meet(name: str = "sum") -> None:
    context().all_reduce(name, 1)


# The order


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_blocks_run_in_the_order_that_was_chosen(order: list[int]) -> None:
    strategy, seen = on_cpus(3), []

    def step() -> None:
        seen.append(("begins", replica_id()))
        meet()
        seen.append(("goes on", replica_id()))
        meet("mean")

    with Lockstep(order) as lockstep:
        strategy.run(step)
    assert seen == [(what, r) for what in ("begins", "goes on") for r in order]
    begun = [(r, where) for r in order for where in ("start", "all_reduce(SUM)")]
    assert lockstep.history == [
        *begun,
        *((r, "all_reduce(MEAN)") for r in order),
        *((r, "end") for r in order),
    ]


@pytest.mark.usefixtures("places")
def test_at_a_point_the_turn_goes_on_to_another_replica() -> None:
    def step() -> None:
        lockstep.point("a")
        lockstep.point("b")

    with Lockstep([0, 1, 1]) as lockstep:
        on_cpus(2).run(step)
    assert lockstep.history == [
        *((0, "start"), (0, "a")),
        *((1, "start"), (1, "a"), (1, "b")),
        (0, "b"),
        (1, "end"),
        (0, "end"),
    ]


def test_replicas_that_the_order_does_not_name_come_last_and_in_replica_order() -> None:
    with Lockstep([2]) as lockstep:
        central(4).run(lambda: lockstep.point("p"))
    assert lockstep.history[:3] == [(2, "start"), (2, "p"), (2, "end")]
    assert [r for r, where in lockstep.history if where == "end"] == [2, 0, 1, 3]


def test_an_order_may_have_a_name() -> None:
    def history(order: str) -> list[tuple[int, str]]:
        strategy = on_cpus(3)
        with Lockstep(order) as lockstep:
            for _ in range(3):
                strategy.run(meet)
        return lockstep.history

    backwards = history("reversed")
    assert [replica for replica, where in backwards[:9] if where == "end"] == [2, 1, 0]
    assert (
        backwards[:2] == [(2, "start"), (2, "all_reduce(SUM)")]
        and backwards == backwards[:9] * 3
    )
    drawn = [history(f"random:{seed}") for seed in range(6)]
    assert drawn == [history(f"random:{seed}") for seed in range(6)]
    assert len({str(one) for one in drawn}) > 3
    assert any(one[:9] != one[9:18] for one in drawn)
    assert repr(Lockstep("random:7")) == "Lockstep('random:7')"
    assert repr(Lockstep("random")).startswith("Lockstep('random:")


def test_each_run_begins_the_order_anew() -> None:
    strategy = central(3)
    with Lockstep([2, 0, 1, 1]) as lockstep:  # of which the first run leaves one turn
        strategy.run(lambda: None)
        once = lockstep.history
        strategy.run(lambda: None)
    assert once == [(r, where) for r in (2, 0, 1) for where in ("start", "end")]
    assert lockstep.history == once * 2


def test_replicas_that_sit_the_step_out_are_passed_over() -> None:
    strategy = central(4)
    with Lockstep([3, 1, 0]) as lockstep:
        strategy.run(lambda batch: None, args=(deal(strategy, torch.ones(2)),))
    assert lockstep.history == [(1, "start"), (1, "end"), (0, "start"), (0, "end")]


@pytest.mark.parametrize("name", ONE_REPLICA)
def test_a_lone_replica_records_its_stops(name: str) -> None:
    def step() -> None:
        lockstep.point("p")
        meet()

    with Lockstep([0]) as lockstep:
        TOPOLOGIES[name]().run(step)
    meeting = [(0, "all_reduce(SUM)")]
    assert lockstep.history == [(0, "start"), (0, "p"), *meeting, (0, "end")]


def test_the_history_has_the_names_of_meetings_that_errors_have() -> None:
    strategy = central(2)
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model)

    def step(batch: Any) -> None:
        mse(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        context().merge_call(lambda strategy: None)

    with Lockstep([1, 0]) as lockstep:
        strategy.run(step, args=(deal(strategy, data(4)),))
    assert [where for r, where in lockstep.history if r == 1] == [
        "start",
        "the first read of a gradient (.grad) after backward",
        "optimizer.step()",
        "merge_call",
        "end",
    ]


def expected_history(
    order: Sequence[int], programs: Sequence[Sequence[str]]
) -> list[tuple[int, str]]:
    """What replicas with these programs come to; written apart from the code.

    The programs have points and meetings `m`.
    """
    history, at, position = [], [0] * len(programs), 0
    stops = [["start", *program, "end"] for program in programs]
    standing = set(range(len(programs)))
    while standing:
        cycle = [order[(position + k) % len(order)] for k in range(len(order))]
        ahead = [k for k, r in enumerate(cycle) if r in standing]
        if ahead:
            r, position = cycle[ahead[0]], position + ahead[0] + 1
        else:
            r = min(standing)
        if at[r] == 0:
            history.append((r, "start"))
        at[r] += 1
        history.append((r, stops[r][at[r]]))
        if stops[r][at[r]] in ("m", "end"):
            standing.discard(r)
        if not standing:
            standing = {r for r in range(len(programs)) if stops[r][at[r]] == "m"}
    return history


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[list[int], list[list[str]]]:
    """An order, and programs for two or three replicas with as many meetings.

    There are points between these.
    """
    replicas, meetings = draw(st.integers(2, 3)), draw(st.integers(0, 2))
    points = st.lists(st.sampled_from("abc"), max_size=2)
    programs = []
    for _ in range(replicas):
        program = draw(points)
        for _ in range(meetings):
            program += ["m", *draw(points)]
        programs.append(program)
    return draw(
        st.lists(st.integers(0, replicas - 1), min_size=1, max_size=5)
    ), programs


TEAMS = {
    replicas: torchstrategy.CentralStorageStrategy(["cpu"] * replicas)
    for replicas in (2, 3)
}


@for_changes
@settings(deadline=None, max_examples=60)
@given(interleavings())
def test_any_order_of_any_program_is_kept(
    case: tuple[list[int], list[list[str]]],
) -> None:
    order, programs = case

    def step() -> int:
        for stop in programs[replica_id()]:
            if stop == "m":
                context()._group.replica.synchronize("m", lambda brought: brought, None)
            else:
                lockstep.point(stop)
        return replica_id()

    strategy = TEAMS[len(programs)]
    with Lockstep(order) as lockstep:
        results = strategy.run(step)
    assert strategy.experimental_local_results(results) == tuple(range(len(programs)))
    assert lockstep.history == expected_history(order, programs)


# What does not depend on the order


@pytest.mark.parametrize("make", [central, central_with_copies])
@pytest.mark.parametrize("order", [[2, 1, 0], [1], [0, 0, 2]])
def test_a_step_trains_the_same_in_any_order(
    make: Callable[[int], torchstrategy.Strategy], order: list[int]
) -> None:
    def trained(lockstep: Lockstep | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        strategy = make(3)
        with strategy.scope():
            model = torch.nn.Sequential(
                mlp(),
                torch.nn.Dropout(0.5),
                torch.nn.BatchNorm1d(2, dtype=torch.float64),
            )
            optimizer = sgd(model)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            loss = mse(model, batch)
            if lockstep:
                lockstep.point("after forward")
            loss.backward()
            optimizer.step()

        for k in range(3):
            strategy.run(step, args=(deal(strategy, data(8, seed=k)),))
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    plain = trained(None)
    with Lockstep(order) as lockstep:
        ordered = trained(lockstep)
    assert [r for r, where in lockstep.history if where == "start"][:3] != [0, 1, 2]
    assert ordered.keys() == plain.keys()
    assert all(torch.equal(ordered[name], plain[name]) for name in plain)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 0, 2]])
def test_each_replica_draws_its_own_random_numbers_in_any_order(
    order: list[int],
) -> None:
    strategy = central(3)

    def drawn(point: Callable[[str], None]) -> tuple[Any, ...]:
        def step() -> list[float]:
            numbers = torch.rand(2).tolist()
            point("between")
            return numbers + torch.rand(2).tolist()

        torch.manual_seed(5)
        return *strategy.experimental_local_results(strategy.run(step)), torch.rand(
            1
        ).item()

    plain = drawn(lambda name: None)
    with Lockstep(order) as lockstep:
        assert drawn(lockstep.point) == plain
    assert (0, "between") in lockstep.history


def test_in_several_places_random_numbers_are_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_threads, "memory_device", lambda device: device)
    strategy, inside = on_cpus(3), []

    def step() -> list[float]:
        inside.append(replica_id())
        # Long enough for Python to switch threads if another one could run.
        sum(range(20000))
        numbers = torch.rand(2).tolist()
        assert inside[-1] == replica_id()
        lockstep.point("between")
        return numbers + torch.rand(2).tolist()

    drawn = []
    for order in ([0, 1, 2], [2, 0, 1], [2, 0, 1]):
        torch.manual_seed(5)
        with Lockstep(order) as lockstep:
            drawn.append(strategy.experimental_local_results(strategy.run(step)))
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(map(tuple, drawn[0]))) == 3


# When something goes wrong


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_failure_stops_replicas_that_pause(fails: int) -> None:
    strategy, error, stopped = on_cpus(3), ValueError("bad"), []

    def step() -> None:
        try:
            lockstep.point("a")
            if replica_id() == fails:
                raise error
            lockstep.point("b")
        except ReplicaStopped:
            stopped.append(replica_id())
            raise

    with Lockstep([2, 1, 0]) as lockstep:
        with pytest.raises(ValueError, match="bad") as caught:
            strategy.run(step)
        assert caught.value is error
        assert sorted([*stopped, fails]) == [0, 1, 2]
        assert (fails, "end") not in lockstep.history
        assert strategy.experimental_local_results(strategy.run(replica_id)) == (
            0,
            1,
            2,
        )


@pytest.mark.usefixtures("places")
def test_a_replica_that_comes_to_a_point_while_it_is_stopped_is_stopped_again() -> None:
    strategy = on_cpus(3)
    threads = strategy.experimental_local_results(strategy.run(threading.get_ident))

    def step() -> None:
        try:
            lockstep.point("a")
            if replica_id() == 1:
                raise ValueError("bad")
            meet()
        finally:
            lockstep.point("on the way out")
            lockstep.point("never")

    with Lockstep([0, 2, 1]) as lockstep, pytest.raises(ValueError, match="bad"):
        strategy.run(step)
    assert [r for r, where in lockstep.history if where == "on the way out"] == [
        1,
        0,
        2,
    ]
    # It was an orderly end: the threads are still good.
    assert (
        strategy.experimental_local_results(strategy.run(threading.get_ident))
        == threads
    )


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_unequal_meetings_are_an_error_in_any_order(order: list[int]) -> None:
    def step() -> None:
        lockstep.point("p")
        if replica_id() != 1:
            meet()

    with (
        Lockstep(order) as lockstep,
        pytest.raises(RuntimeError, match="replica 1 has ended"),
    ):
        on_cpus(3).run(step)


@pytest.mark.usefixtures("places")
def test_a_replica_may_end_while_others_have_blocks_left() -> None:
    def step() -> None:
        for k in range(replica_id()):
            lockstep.point(f"{k}")

    with Lockstep([0, 1, 2]) as lockstep:
        on_cpus(3).run(step)
    assert [r for r, _ in lockstep.history] == [0, 0, 1, 1, 2, 2, 1, 2, 2]


@for_releases
@pytest.mark.usefixtures("places")
@needs_signals
def test_ctrl_c_stops_replicas_that_compute_and_replicas_that_pause(
    no_thread_left: None,
) -> None:
    strategy, stopped, presses = on_cpus(3), [], [1]

    def press(*_: object) -> None:
        if presses:
            presses.pop()
            raise KeyboardInterrupt

    def step() -> None:
        try:
            lockstep.point("p")
            while True:  # a main thread that is just about to wait may miss a signal
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        except BaseException as error:
            stopped.append((replica_id(), type(error)))
            raise

    before = signal.signal(signal.SIGINT, press)
    try:
        with Lockstep([1, 0]) as lockstep, pytest.raises(KeyboardInterrupt):
            strategy.run(step)
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(stopped) == {(0, ReplicaStopped), (1, ReplicaStopped)}
    assert lockstep.history == [(1, "start"), (1, "p"), (0, "start"), (0, "p")]
    assert strategy.experimental_local_results(strategy.run(replica_id)) == (0, 1, 2)
    del strategy
    gc.collect()


# Runs within runs, and threads


def test_a_run_within_a_run_goes_through_the_order_by_itself() -> None:
    strategy = central(2)

    def inner(strategy: torchstrategy.Strategy) -> None:
        strategy.run(lambda: lockstep.point("inner"))

    def step() -> None:
        lockstep.point("outer")
        context().merge_call(inner)

    with Lockstep([1, 0]) as lockstep:
        strategy.run(step)
    assert lockstep.history == [
        *(
            (1, "start"),
            (1, "outer"),
            (0, "start"),
            (0, "outer"),
            (1, "merge_call"),
            (0, "merge_call"),
        ),
        *(
            (1, "start"),
            (1, "inner"),
            (0, "start"),
            (0, "inner"),
            (1, "end"),
            (0, "end"),
        ),
        *((1, "end"), (0, "end")),
    ]


def test_locksteps_of_two_threads_do_not_disturb_each_other() -> None:
    strategy, together, histories = central(2), threading.Barrier(2), {}

    def run(order: tuple[int, ...]) -> None:
        def step() -> None:
            if replica_id() == order[0]:
                together.wait(PATIENCE)
            lockstep.point(f"{order}")
            meet()

        with Lockstep(order) as lockstep:
            strategy.run(step)
        histories[order] = lockstep.history

    threads = [
        threading.Thread(target=run, args=(order,)) for order in ((0, 1), (1, 0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for order, history in histories.items():
        a, b = order
        assert history == [
            *((a, "start"), (a, f"{order}"), (b, "start"), (b, f"{order}")),
            *((a, "all_reduce(SUM)"), (b, "all_reduce(SUM)"), (a, "end"), (b, "end")),
        ]
    assert len(histories) == 2


def test_a_lockstep_is_in_force_on_the_thread_that_entered_it_only() -> None:
    strategy, seen = central(2), []
    with Lockstep([1, 0]) as lockstep:
        thread = threading.Thread(
            target=lambda: strategy.run(lambda: seen.append(replica_id()))
        )
        thread.start()
        thread.join(PATIENCE)
    assert sorted(seen) == [0, 1]
    assert lockstep.history == []


# Points


def test_a_point_does_nothing_outside_of_replicas_and_outside_of_the_block() -> None:
    strategy, lockstep, other = central(2), Lockstep([1, 0]), Lockstep([0, 1])

    def step() -> None:
        lockstep.point("in the step")
        other.point("of a lockstep that is not in force")
        context().merge_call(lambda strategy: lockstep.point("in a merge function"))

    lockstep.point("before")
    strategy.run(step)
    with lockstep:
        lockstep.point("in no run")
        assert lockstep.history == []
        strategy.run(step)
    lockstep.point("after")
    strategy.run(step)
    assert [where for r, where in lockstep.history if r == 1] == [
        "start",
        "in the step",
        "merge_call",
        "end",
    ]
    assert other.history == []


def test_a_lockstep_that_is_entered_again_begins_a_new_history() -> None:
    strategy, lockstep = central(2), Lockstep([1, 0])
    for _ in range(2):
        with lockstep:
            strategy.run(lambda: None)
        assert lockstep.history == [(1, "start"), (1, "end"), (0, "start"), (0, "end")]
    lockstep.history.clear()
    assert len(lockstep.history) == 4


# What is refused


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ([], ValueError, "at least one"),
        ([0, -1], ValueError, "got -1"),
        ([0, True], TypeError, "got True, a bool"),
        ([0, 1.0], TypeError, "got 1.0, a float"),
        ([0, "1"], TypeError, "got '1', a str"),
        ("01", ValueError, "'01' is no order"),
        (1, TypeError, "sequence of replica ids"),
        ({0, 1}, TypeError, "sequence of replica ids"),
    ],
)
def test_what_is_no_order_is_refused(
    order: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Lockstep(order)


@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_an_id_that_the_strategy_does_not_have_is_refused_when_it_is_run(
    name: str,
) -> None:
    strategy = TOPOLOGIES[name]()
    count = strategy.num_replicas_in_sync
    for block in (Lockstep([0, count]), slow_replica(count), fail_in_replica(count)):
        with (
            pytest.raises(
                ValueError, match=f"names replica {count}, .* ids end at {count - 1}"
            ),
            block,
        ):
            strategy.run(lambda: pytest.fail("the step was run"))
    assert strategy.experimental_local_results(strategy.run(replica_id)) == tuple(
        range(count)
    )


def test_only_one_says_who_goes_next() -> None:
    strategy = central(2)
    for inner in (Lockstep([0, 1]), slow_replica(0)):
        with Lockstep([1, 0]) as outer, inner:
            with pytest.raises(
                RuntimeError, match=r"Lockstep\(\[1, 0\]\) and .* both say"
            ):
                strategy.run(lambda: None)
            assert outer.history == []
    assert strategy.experimental_local_results(strategy.run(replica_id)) == (0, 1)


def test_a_lockstep_is_entered_once_at_a_time_and_outside_of_replicas() -> None:
    lockstep = Lockstep([0])
    with lockstep, pytest.raises(RuntimeError, match="entered already"), lockstep:
        pass

    def step() -> None:
        with lockstep:
            pass

    for name in ("default", "central_2"):
        with pytest.raises(
            RuntimeError,
            match=r"Lockstep was called in replica 0.*around strategy\.run",
        ):
            TOPOLOGIES[name]().run(step)


def test_a_point_has_a_name() -> None:
    with pytest.raises(TypeError, match="got 3, an int"):
        Lockstep([0]).point(3)  # type: ignore[arg-type]


# A slow replica


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_a_slow_replica_is_the_last_to_come_to_every_meeting(slow: int) -> None:
    strategy, seen = on_cpus(4), []

    def step() -> None:
        for k in range(3):
            seen.append((k, replica_id()))
            meet()

    with slow_replica(slow):
        strategy.run(step)
    fast = [r for r in range(4) if r != slow]
    assert seen == [(k, r) for k in range(3) for r in (*fast, slow)]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_replica_changes_no_number(slow: int) -> None:
    def trained() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        strategy = central(2)
        with strategy.scope():
            model = mlp()
            optimizer = sgd(model)

        def step(batch: Any) -> None:
            mse(model, (batch[0] + torch.rand(3), batch[1])).backward()
            optimizer.step()

        strategy.run(step, args=(deal(strategy, data(5)),))
        return parameters(model)

    plain = trained()
    with slow_replica(slow):
        slowed = trained()
    assert all(torch.equal(slowed[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("replica", "error"), [(-1, ValueError), (True, TypeError), ("0", TypeError)]
)
def test_what_is_no_replica_is_not_slow(replica: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="slow_replica"), slow_replica(replica):
        pass


def test_a_slow_replica_is_not_made_in_a_replica() -> None:
    def step() -> None:
        with slow_replica(0):
            pass

    with pytest.raises(RuntimeError, match="slow_replica was called in replica 0"):
        central(2).run(step)
