"""Timelines that were computed by hand, to the microsecond.

They follow the rules in `_virtual_time/clock.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from round_numbers import PROFILE, US
from torchstrategy.testing import (
    VirtualTrace,
    record_streams,
    simulated_devices,
    virtual_time,
)

SIM = simulated_devices()

COUNT = 25_000  # elements, so 100,000 bytes

Bars = list[tuple[int, str, int, int]]  # device, lane, start and end in microseconds


class Tensors:
    """What the programs work on, made before the clock runs."""

    def __init__(self) -> None:
        self.on = [torch.ones(COUNT, device=device) for device in SIM[:3]]
        self.x, self.y = self.on[0], torch.ones(COUNT, device=SIM[0])
        self.half = torch.ones(COUNT // 2, device=SIM[1])
        self.small = torch.ones(250, device=SIM[0])
        self.number = torch.ones(1, device=SIM[0])
        self.pinned, self.other = (
            torch.ones(COUNT).pin_memory(),
            torch.ones(COUNT).pin_memory(),
        )
        self.pageable = torch.ones(COUNT)
        self.side = torch.Stream(device=SIM[0])
        self.main = torch.accelerator.current_stream(SIM[0])


class Case(NamedTuple):
    program: Callable[[Tensors], object]
    bars: Bars
    host: int  # when the program is at the end of its code


def on(stream: torch.Stream, call: Callable[[], object]) -> None:
    with stream:
        call()


def on_side(t: Tensors, call: Callable[[], object]) -> None:
    on(t.side, call)


def with_event(t: Tensors) -> None:
    on_side(t, t.x.zero_)
    event = t.side.record_event()
    t.main.wait_event(event)
    t.y.zero_()


def event_before_more_work(t: Tensors) -> None:
    on_side(t, t.x.zero_)
    event = t.side.record_event()
    on_side(t, t.x.zero_)
    t.main.wait_event(event)
    t.y.zero_()


def with_wait_stream(t: Tensors) -> None:
    on_side(t, t.x.zero_)
    t.main.wait_stream(t.side)
    t.y.zero_()


def synchronized_event(t: Tensors) -> None:
    t.x.zero_()
    t.main.record_event().synchronize()
    t.x.zero_()


def synchronized_device(t: Tensors) -> None:
    t.x.zero_()
    on_side(t, lambda: (t.y.zero_(), t.y.zero_()))
    torch.accelerator.synchronize(SIM[0])
    t.x.zero_()


def double_buffered(t: Tensors) -> None:
    """Copies in on a side stream, each computed with as soon as it is there."""
    for pinned, target in ((t.pinned, t.x), (t.other, t.y)):
        on_side(
            t,
            lambda pinned=pinned, target=target: target.copy_(
                pinned, non_blocking=True
            ),
        )
        t.main.wait_event(t.side.record_event())
        target.zero_()


IN, OUT = "copies in", "copies out"
SIDE = "stream 1"  # the first one that is not the default stream

CASES = {
    "one operator": Case(lambda t: t.x.zero_(), [(0, "stream 0", 10, 113)], 10),
    "two operators, one after the other": Case(
        lambda t: (t.x.zero_(), t.y.zero_()),
        [(0, "stream 0", 10, 113), (0, "stream 0", 113, 216)],
        20,
    ),
    "two small operators, which wait for the program": Case(
        lambda t: (t.small.zero_(), t.small.zero_()),
        [(0, "stream 0", 10, 14), (0, "stream 0", 20, 24)],
        20,
    ),
    "two streams": Case(
        lambda t: (t.x.zero_(), on_side(t, t.y.zero_)),
        [(0, "stream 0", 10, 113), (0, SIDE, 20, 123)],
        20,
    ),
    "two devices": Case(
        lambda t: (t.x.zero_(), t.on[1].zero_()),
        [(0, "stream 0", 10, 113), (1, "stream 0", 20, 123)],
        20,
    ),
    "a copy in that does not block": Case(
        lambda t: t.x.copy_(t.pinned, non_blocking=True), [(0, IN, 10, 115)], 10
    ),
    "a copy in that blocks": Case(
        lambda t: t.x.copy_(t.pinned), [(0, IN, 10, 115)], 115
    ),
    "a copy in from memory that is not pinned": Case(
        lambda t: t.x.copy_(t.pageable, non_blocking=True), [(0, IN, 10, 215)], 215
    ),
    "a copy out that does not block": Case(
        lambda t: t.pinned.copy_(t.x, non_blocking=True), [(0, OUT, 10, 115)], 10
    ),
    "a copy out to memory that is not pinned": Case(
        lambda t: t.x.cpu(), [(0, OUT, 10, 215)], 215
    ),
    "a copy in, and an operator on its stream": Case(
        lambda t: (t.x.copy_(t.pinned, non_blocking=True), t.x.zero_()),
        [(0, IN, 10, 115), (0, "stream 0", 115, 218)],
        20,
    ),
    "a copy out waits for the operator before it": Case(
        lambda t: (t.x.zero_(), t.pinned.copy_(t.x, non_blocking=True)),
        [(0, "stream 0", 10, 113), (0, OUT, 113, 218)],
        20,
    ),
    "a copy beside an operator": Case(
        lambda t: (
            t.x.zero_(),
            on_side(t, lambda: t.y.copy_(t.pinned, non_blocking=True)),
        ),
        [(0, "stream 0", 10, 113), (0, IN, 20, 125)],
        20,
    ),
    "two copies in share an engine, whatever their streams": Case(
        lambda t: (
            t.x.copy_(t.pinned, non_blocking=True),
            on_side(t, lambda: t.y.copy_(t.other, non_blocking=True)),
        ),
        [(0, IN, 10, 115), (0, IN, 115, 220)],
        20,
    ),
    "a copy in and a copy out have an engine each": Case(
        lambda t: (
            t.x.copy_(t.pinned, non_blocking=True),
            on_side(t, lambda: t.other.copy_(t.y, non_blocking=True)),
        ),
        [(0, IN, 10, 115), (0, OUT, 20, 125)],
        20,
    ),
    "two devices have engines each": Case(
        lambda t: (
            t.x.copy_(t.pinned, non_blocking=True),
            t.on[1].copy_(t.other, non_blocking=True),
        ),
        [(0, IN, 10, 115), (1, IN, 20, 125)],
        20,
    ),
    "an event": Case(with_event, [(0, SIDE, 10, 113), (0, "stream 0", 113, 216)], 22),
    "wait_stream": Case(
        with_wait_stream, [(0, SIDE, 10, 113), (0, "stream 0", 113, 216)], 22
    ),
    "an event does not wait for what comes later": Case(
        event_before_more_work,
        [(0, SIDE, 10, 113), (0, SIDE, 113, 216), (0, "stream 0", 113, 216)],
        32,
    ),
    "event.synchronize": Case(
        synchronized_event, [(0, "stream 0", 10, 113), (0, "stream 0", 123, 226)], 123
    ),
    "synchronize waits for all streams": Case(
        synchronized_device,
        [
            (0, "stream 0", 10, 113),
            (0, SIDE, 20, 123),
            (0, SIDE, 123, 226),
            (0, "stream 0", 236, 339),
        ],
        236,
    ),
    "a number that is read": Case(
        lambda t: (t.x.zero_(), t.number.item()),
        [(0, "stream 0", 10, 113), (0, OUT, 113, 118)],
        118,
    ),
    "a copy between devices waits for both, and both for it": Case(
        lambda t: (
            t.x.zero_(),
            t.half.zero_(),
            t.on[1].copy_(t.x),
            t.half.zero_(),
            t.x.zero_(),
        ),
        [
            (0, "stream 0", 10, 113),
            (1, "stream 0", 20, 73),
            (0, "copies to sim:1", 113, 168),
            (1, "stream 0", 168, 221),
            (0, "stream 0", 168, 271),
        ],
        50,
    ),
    "two links between devices": Case(
        lambda t: (t.on[1].copy_(t.x), on_side(t, lambda: t.on[2].copy_(t.y))),
        [(0, "copies to sim:1", 10, 65), (0, "copies to sim:2", 20, 75)],
        20,
    ),
    "one link between devices": Case(
        lambda t: (
            t.on[1].copy_(t.x),
            on_side(
                t, lambda: on(torch.Stream(device=SIM[1]), lambda: t.on[1].copy_(t.y))
            ),
        ),
        [(0, "copies to sim:1", 10, 65), (0, "copies to sim:1", 65, 120)],
        20,
    ),
    "double buffering": Case(
        double_buffered,
        [
            (0, IN, 10, 115),
            (0, "stream 0", 115, 218),
            (0, IN, 115, 220),
            (0, "stream 0", 220, 323),
        ],
        44,
    ),
    "an operator of the CPU": Case(  # 100,000 bytes are written, and read before
        lambda t: (t.pageable.zero_(), t.x.zero_()), [(0, "stream 0", 212, 315)], 212
    ),
}


def run(program: Callable[[Tensors], object]) -> tuple[VirtualTrace, Tensors]:
    tensors = Tensors()
    with virtual_time(PROFILE) as trace:
        program(tensors)
    return trace, tensors


@pytest.mark.parametrize("name", CASES)
def test_a_timeline_is_as_computed_by_hand(name: str) -> None:
    case = CASES[name]
    trace, _ = run(case.program)
    bars = [
        (span.device, span.lane, span.start / US, span.end / US)
        for span in trace._clock.spans
    ]
    assert len(bars) == len(case.bars)
    for bar, expected in zip(bars, case.bars, strict=True):
        assert bar == (
            *expected[:2],
            pytest.approx(expected[2], abs=1e-6),
            pytest.approx(expected[3], abs=1e-6),
        )
    assert trace._clock.hosts.program.now / US == pytest.approx(case.host, abs=1e-6)
    assert trace.seconds / US == pytest.approx(
        max([case.host, *(bar[3] for bar in case.bars)]), abs=1e-6
    )


@pytest.mark.parametrize("name", CASES)
def test_races_can_be_looked_for_at_the_same_time(name: str) -> None:
    with record_streams(check=False):
        trace, _ = run(CASES[name].program)
    assert trace.seconds == run(CASES[name].program)[0].seconds


def measured(t: Tensors) -> Iterator[float]:
    start, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
    start.record(t.main)
    t.x.zero_()
    end.record(t.main)
    yield start.elapsed_time(end)


def test_events_measure_virtual_time() -> None:
    """The first event is at 1 us; the operator begins at 11 us and takes 103 us."""
    tensors = Tensors()
    with virtual_time(PROFILE):
        (elapsed,) = measured(tensors)
    assert elapsed == pytest.approx(0.113)


def test_queries_answer_in_virtual_time_and_a_loop_of_them_ends() -> None:
    """The operator is done at 113 us; the event was recorded at 11 us.

    Each question takes the program 1 us.
    """
    tensors = Tensors()
    asked = 0
    with virtual_time(PROFILE):
        tensors.x.zero_()
        event = tensors.main.record_event()
        while not event.query():
            asked += 1
        assert tensors.main.query()
        on_side(tensors, tensors.y.zero_)
        assert not tensors.side.query()
    assert asked == 101


def test_overlap_busy_and_idle_are_parts_of_the_time() -> None:
    trace, _ = run(CASES["a copy beside an operator"].program)
    assert trace.overlap("copy", "compute") == pytest.approx(93 / 105)
    assert trace.overlap("compute", "copy", device="sim:0") == pytest.approx(93 / 103)
    about = trace.device(0)
    assert (about.busy / US, about.copying / US) == (
        pytest.approx(103),
        pytest.approx(105),
    )
    assert about.idle / US == pytest.approx(125 - 103)
    assert trace.device("sim:1").busy == 0 and trace.overlap(device=1) == 1.0


def test_copies_and_synchronizations_have_the_line_of_the_program() -> None:
    trace, _ = run(
        lambda t: (
            t.x.copy_(t.pageable),
            t.number.item(),
            t.y.copy_(t.pinned, non_blocking=True),
        )
    )
    first, second = trace.copies
    assert (first.route, first.bytes, first.is_pinned, first.blocks) == (
        "cpu->sim:0",
        4 * COUNT,
        False,
        True,
    )
    assert (second.is_pinned, second.blocks) == (True, False)
    assert [wait.why for wait in trace.synchronizations] == [
        "a copy to sim:0 from memory that is not pinned",
        "aten._local_scalar_dense.default",
    ]
    assert [round(wait.seconds / US) for wait in trace.synchronizations] == [205, 5]
    assert all(
        one.where.startswith("test_virtual_timelines.py:")
        for one in (*trace.copies, *trace.synchronizations)
    )
