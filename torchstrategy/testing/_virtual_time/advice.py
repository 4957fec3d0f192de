"""What would make the steps of a program faster.

Each change is predicted, and reported only if it helps.

Note [A second prediction]
The acts of the program are changed as the advice would change them, and played again.
So the second figure is of the same program by the same model, and not a rule of thumb.
What each change does to the acts is in the function that makes it. A change that would
need another order of the program's own work, such as smaller buckets of gradients,
cannot be predicted so, and is not made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, final

from torchstrategy.testing._virtual_time.acts import (
    Act,
    Awaits,
    Begins,
    Follows,
    Meets,
    Notes,
    Optimizes,
    StepEnds,
)
from torchstrategy.testing._virtual_time.profiles import DeviceProfile
from torchstrategy.testing._virtual_time.replay import played
from torchstrategy.testing._virtual_time.spans import Span

_MOST = 5
_LEAST_STEPS = 3
_MOST_ACTS = 300_000
_LEAST_GAIN = 0.01  # the part of a step below which a change is not worth a line
_READ = "aten._local_scalar_dense"
_MIB = 2**20
_BUCKET = 25  # MiB: `bucket_cap_mb` where nobody says it
# The part of the bandwidth that a copy gets if it changes the order of elements.
_STRIDED = 0.75
_LINES = 2


@final
@dataclass(frozen=True)
class Advice:
    """What to write, and the seconds of a step without it and with it."""

    write: str
    before: float
    after: float


class _Change(NamedTuple):
    write: str
    acts: Sequence[Act]


def advice(acts: Sequence[Act], profile: DeviceProfile) -> list[Advice]:
    """At most five, the one that gains most first.

    Empty if the program made less than three steps.
    """
    ends = [i for i, act in enumerate(acts) if isinstance(act, StepEnds)]
    if len(ends) < _LEAST_STEPS:
        return []
    # The first steps say it as well as all of them, and are played in a moment.
    acts = acts[
        : max(ends[_LEAST_STEPS - 1], *(end for end in ends if end < _MOST_ACTS), 0) + 1
    ]
    before = _step(acts, profile)
    found = [
        Advice(change.write, before, _step(change.acts, profile))
        for change in _changes(acts, profile)
    ]
    found = [one for one in found if one.after < before * (1 - _LEAST_GAIN)]
    best: dict[str, Advice] = {}
    for one in sorted(found, key=lambda one: one.after):
        best.setdefault(one.write.partition("(")[0], one)  # one size of buckets
    return list(best.values())[:_MOST]


def _step(acts: Iterable[Act], profile: DeviceProfile) -> float:
    """The seconds of a step in the middle."""
    ends = played(acts, profile)
    return statistics.median(end - start for start, end in pairwise(ends))


def _changes(acts: Sequence[Act], profile: DeviceProfile) -> Iterator[_Change]:
    first = next(i for i, act in enumerate(acts) if isinstance(act, StepEnds))
    set_up, steps = acts[:first], acts[first:]
    kinds = (
        _pinned(steps, profile),
        _unread(steps),
        _fused(steps),
        _channels_last(steps, profile),
        _graphed(steps),
    )
    for change in kinds:
        if change is not None:
            yield _Change(change.write, [*set_up, *change.acts])
    for change in _larger_buckets(steps):
        yield _Change(change.write, [*set_up, *change.acts])


def _pinned(acts: Sequence[Act], profile: DeviceProfile) -> _Change | None:
    """The program's copies to a device come from pinned memory, and do not block it."""
    changed: list[Act] = []
    lines: list[str] = []
    were_pinned = True
    for i, act in enumerate(acts):
        if isinstance(act, Awaits) and act.why.startswith("a copy to") and not act.way:
            lines.append(act.where)
        elif (
            isinstance(act, Span)
            and act.lane == "copies in"
            and _is_waited_for(acts, i)
        ):
            seconds = profile.copy + act.bytes / (profile.pinned * 1e9)
            were_pinned = were_pinned and act.seconds <= seconds * 1.001
            changed.append(act._replace(end=act.start + min(seconds, act.seconds)))
        else:
            changed.append(act)
    what = (
        "non_blocking=True for copies from pinned memory"
        if were_pinned
        else "pinned memory and non_blocking=True"
    )
    return _Change(f"{what} ({_some(lines)})", changed) if lines else None


def _is_waited_for(acts: Sequence[Act], i: int) -> bool:
    """Whether the program waits for what it puts on a stream at this place."""
    after = acts[i + 1] if i + 1 < len(acts) else None
    return (
        isinstance(after, Awaits)
        and after.why.startswith("a copy to")
        and not after.way
    )


def _unread(acts: Sequence[Act]) -> _Change | None:
    """The program reads no numbers: they are not copied, and nobody waits for them."""
    reads = [i for i, act in enumerate(acts) if _is_read(act)]
    # Both the copy and the wait for it are gone.
    gone = {place for i in reads for place in (i - 1, i)}
    lines = [act.where for act in acts if isinstance(act, Awaits) and _is_read(act)]
    kept = [
        act
        for i, act in enumerate(acts)
        if i not in gone or not (_is_read(act) or _is_copy_of_a_number(act))
    ]
    return _Change(f"no .item() each step ({_some(lines)})", kept) if lines else None


def _is_copy_of_a_number(act: Act) -> bool:
    return (
        isinstance(act, Span) and act.lane == "copies out" and _READ.endswith(act.name)
    )


def _is_read(act: Act) -> bool:
    return isinstance(act, Awaits) and act.why.startswith(_READ) and not act.way


def _fused(acts: Sequence[Act]) -> _Change | None:
    """What an optimizer computes in a step is one operator on all of its tensors."""
    # For each host, the places of what it computes since its optimizer began a step.
    mine: dict[str, list[int]] = {}
    gone: set[int] = set()
    fused: dict[int, Span] = {}  # by place
    for i, act in enumerate(acts):
        if isinstance(act, Span) and act.kind == "compute" and act.host in mine:
            mine[act.host].append(i)
        elif isinstance(act, Optimizes) and act.begins:
            mine[act.host] = []
        elif (
            isinstance(act, Optimizes)
            and (places := mine.pop(act.host, []))
            and act.fused is not None
        ):
            spans = [
                span
                for span in (acts[place] for place in places)
                if isinstance(span, Span)
            ]
            # Otherwise the host works on several devices.
            if len({span.stream for span in spans}) == 1:
                seconds, launches = act.fused
                launch = min(span.launch for span in spans) * (1 + (launches - 1) / 2)
                gone.update(places)
                fused[places[0]] = spans[0]._replace(
                    end=spans[0].start + seconds, launch=launch
                )
    changed = [
        fused.get(i, act) for i, act in enumerate(acts) if i in fused or i not in gone
    ]
    return _Change("a fused optimizer (fused=True)", changed) if fused else None


def _channels_last(acts: Sequence[Act], profile: DeviceProfile) -> _Change | None:
    """No convolution transposes its images: the first one's are, once in a step."""
    changed: list[Act] = []
    is_first = True
    for act in acts:
        if isinstance(act, StepEnds):
            is_first = True
        if isinstance(act, Span) and act.layout:
            if is_first:
                # What the layout of the first convolution costs is to bring its images
                # there and back.
                seconds = act.layout / 2 / _STRIDED + profile.kernel
                changed.append(
                    act._replace(end=act.start + seconds, name="copy_", layout=0.0)
                )
                is_first = False
            changed.append(act._replace(end=act.end - act.layout, layout=0.0))
        else:
            changed.append(act)
    write = "channels_last (model and images .to(memory_format=torch.channels_last))"
    return _Change(write, changed) if changed != list(acts) else None


def _graphed(acts: Sequence[Act]) -> _Change | None:
    """Forward and backward are a CUDA graph each.

    The program launches each graph as it launches one operator.

    None if the program reads what the device has computed within one of them, sends to
    other ranks, or uses several devices: then they cannot be graphs, or not as they
    are.
    """
    if any(isinstance(act, (Meets, Begins)) for act in acts):
        return None
    changed: list[Act] = []
    phase: str | None = None  # of the graph that is being launched; None: none is
    devices: set[int] = set()
    for act in acts:
        if isinstance(act, Span) and act.kind == "compute" and act.phase != "optimizer":
            devices.add(act.device)
            changed.append(act if act.phase != phase else act._replace(launch=0.0))
            phase = act.phase
            continue
        if (
            isinstance(act, Awaits)
            and phase == "forward"
            and not act.why.startswith("a copy to")
        ):
            return None
        if isinstance(act, (StepEnds, Optimizes)):
            phase = None
        changed.append(act)
    write = (
        "CUDA graphs, if shapes stay (torch.cuda.make_graphed_callables, or "
        "torch.compile(mode='reduce-overhead'))"
    )
    return _Change(write, changed) if len(devices) == 1 else None


def _larger_buckets(acts: Sequence[Act]) -> Iterator[_Change]:
    """Several buckets of `DistributedDataParallel` are sent together.

    They are sent when the last of them is full.
    """
    buckets = {act.number for act in acts if isinstance(act, Notes) and act.is_bucket}
    sent: list[list[Meets]] = [[]]  # by step
    for act in acts:
        if isinstance(act, StepEnds):
            sent.append([])
        elif (
            isinstance(act, Meets)
            and act.kind == "all_reduce"
            and set(act.arrivals) <= buckets
        ):
            sent[-1].append(act)
    most = max(map(len, sent))
    for factor in (2, 4, most):
        if 1 < factor <= most:
            together = [
                step[i : i + factor]
                for step in sent
                for i in range(0, len(step), factor)
            ]
            largest = max(sum(one.bytes for one in some) for some in together)
            size = _BUCKET * factor if factor < most else math.ceil(largest / _MIB)
            changed = _sent_together(acts, together)
            if changed is not None and size > _BUCKET:
                yield _Change(f"DistributedDataParallel(bucket_cap_mb={size})", changed)


def _sent_together(
    acts: Sequence[Act], together: Sequence[Sequence[Meets]]
) -> list[Act] | None:
    """The acts, with each group of collectives replaced by its last one.

    The last one carries the bytes of the group.

    None if somebody waits for one of them before the last is sent.
    """
    last = {one.number: some[-1] for some in together for one in some}
    sizes = {
        some[-1].number: sum(one.bytes for one in some) for some in together if some
    }
    gone = {one.number for some in together for one in some[:-1]}
    left_out = {
        number for some in together for one in some[:-1] for number in one.arrivals
    }
    changed: list[Act] = []
    seen: set[int] = set()
    for act in acts:
        if isinstance(act, Meets):
            seen.add(act.number)
        if (isinstance(act, Meets) and act.number in gone) or (
            isinstance(act, Notes) and act.number in left_out
        ):
            continue
        if isinstance(act, Meets) and act.number in sizes:
            changed.append(act._replace(bytes=sizes[act.number]))
        elif (
            isinstance(act, (Follows, Awaits))
            and act.moment is not None
            and act.moment in gone
        ):
            if last[act.moment].number not in seen:
                return None
            changed.append(act._replace(moment=last[act.moment].number))
        else:
            changed.append(act)
    return changed


def _some(lines: Sequence[str]) -> str:
    known = [line for line in dict.fromkeys(lines) if line]
    more = f" and {len(known) - _LINES} more lines" if len(known) > _LINES else ""
    return ", ".join(known[:_LINES]) + more
