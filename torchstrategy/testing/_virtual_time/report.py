"""A stretch of virtual time in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from torchstrategy._base.errors import plural
from torchstrategy.testing._virtual_time.advice import Advice
from torchstrategy.testing._virtual_time.profiles import GIB
from torchstrategy.testing._virtual_time.step_times import Steps, mfu, steps_of
from torchstrategy.testing._virtual_time.timeline import MATTERS, Timeline, Wait

HEAD = "Figures of a model, +-30 %; not measured."
_WAITS = 5
# The part from which on the report says "all", and the seconds up to which it says
# "none".
_ALL, _NONE = 0.995, 5e-8


def report(timeline: Timeline) -> str:
    """The steps, the devices, the copies by routes, and the waits that matter most.

    Each wait comes with its line.
    """
    lines = [
        HEAD,
        (
            f"{timeline.profile.name}: {in_words(timeline.seconds)}, "
            f"{plural(len(timeline.spans), 'operator')}"
        ),
    ]
    steps = steps_of(timeline)
    if steps is not None:
        lines += _steps(steps)
    for device in timeline.devices:
        lines += _device(timeline, steps, device)
    lines += _copies(timeline)
    return "\n".join([*lines, *_waits(timeline)])


def _waits(timeline: Timeline) -> list[str]:
    waits = timeline.waits()
    total, idle = sum(wait.seconds for wait in waits), sum(wait.idle for wait in waits)
    if not total:
        return ["  the program never waits"]
    lines = [
        (
            f"  the program waits {in_words(total)}{_together(timeline)}, "
            f"{_of_it(total, idle)}:"
        )
    ]
    for wait in waits[:_WAITS]:
        if wait.seconds:
            matters = wait.idle > MATTERS * timeline.seconds
            lines += [
                f"    {_described(wait)}",
                *(f"      {words}" for words in _advice(wait.why) if matters),
            ]
    if more := len([wait for wait in waits[_WAITS:] if wait.seconds]):
        lines.append(f"    and in {plural(more, 'other place')}")
    return lines


def _of_it(seconds: float, idle: float) -> str:
    """How much of a wait matters, since nothing computes meanwhile."""
    if idle < _ALL * seconds:
        return (
            f"{in_words(idle)} of it while its device is idle"
            if idle > _NONE
            else "while its device computes"
        )
    return "while its device is idle"


def _steps(steps: Steps) -> Iterator[str]:
    with_first = ", with the first step" if steps.has_first else ""
    after = (
        f", and {in_words(steps.after)} after the last step"
        if steps.after > _NONE
        else ""
    )
    yield f"  set-up{with_first}: {in_words(steps.set_up)}{after}"
    seconds = [time.seconds for time in steps.times]
    spread = (
        f", {in_words(min(seconds))} to {in_words(max(seconds))}"
        if max(seconds) > 1.01 * min(seconds)
        else ""
    )
    typical = steps.typical()
    yield (
        f"  a step takes {in_words(typical.seconds)} (the middle one of "
        f"{len(seconds)}{spread})"
    )
    rows: dict[str, list[int]] = {}
    for index, device in typical.devices.items():
        exposed = (
            f", {in_words(device.exposed)} collectives that nothing hides"
            if device.exposed
            else ""
        )
        words = (
            f"{in_words(device.computes)} computing{exposed}, {in_words(device.idle)} "
            f"idle; {in_words(device.copies)} copying"
        )
        rows.setdefault(words, []).append(index)
    for words, indices in rows.items():
        yield f"    {', '.join(f'sim:{index}' for index in indices)}: {words}"
    lost, calm = typical.waits_while_idle, typical.waits_while_busy
    if lost or calm:
        yield (
            f"    the program waits {in_words(lost)} while its device is idle, and "
            f"{in_words(calm)} while it computes"
        )


def _device(timeline: Timeline, steps: Steps | None, device: int) -> Iterator[str]:
    """A line of a device: without set-up, if there are steps."""
    part = timeline if steps is None else steps.all
    busy, peak = part.device(device).busy, timeline.device(device).peak_bytes
    utilization = mfu(part, device) if steps is not None else part.device(device).mfu
    yield (
        f"  sim:{device}: computes {busy / max(part.seconds, 1e-12):.0%} of the time"
        f"{'' if steps is None else ' of the steps'}, MFU {utilization:.1%}, at most "
        f"{peak / GIB:.2f} GiB, {part.overlap('copy', 'compute', device):.0%} of the "
        "copying while it computes"
    )
    communicating = part.device(device).communicating
    if communicating:
        hidden = part.overlap("collective", "compute", device)
        yield (
            f"    {in_words(communicating)} of collectives, {hidden:.0%} of them while "
            "it computes"
        )


def advice_in_words(advice: Sequence[Advice]) -> list[str]:
    """A line for each piece of advice, with a step's time without it and with it."""
    lines = [
        f"  {one.write}: {in_words(one.before)} -> {in_words(one.after)} a step"
        for one in advice
    ]
    return ["Predicted to be faster", *lines] if lines else []


def _copies(timeline: Timeline) -> list[str]:
    sizes: defaultdict[str, int] = defaultdict(int)
    counts: Counter[str] = Counter()
    blocking: Counter[str] = Counter()
    for copy in timeline.copies:
        sizes[copy.route] += copy.bytes
        counts[copy.route] += 1
        blocking[copy.route] += copy.blocks
    lines = []
    for route in sorted(sizes):
        copies = "1 copy" if counts[route] == 1 else f"{counts[route]} copies"
        blocks = (
            f", {blocking[route]} of which the program waits for"
            if blocking[route]
            else ""
        )
        lines.append(f"  {route}: {sizes[route] / 1e6:,.1f} MB in {copies}{blocks}")
    return lines


def _together(timeline: Timeline) -> str:
    hosts = {one.host for one in timeline.synchronizations if one.seconds}
    return (
        f", {plural(len(hosts), min(hosts).partition(' ')[0])} together"
        if len(hosts) > 1
        else ""
    )


def _described(wait: Wait) -> str:
    where = wait.where or "code that is not yours"
    times = "" if wait.times == 1 else f", in {wait.times} waits"
    return (
        f"{in_words(wait.seconds)} at {where}{times}: {wait.why}, "
        f"{_of_it(wait.seconds, wait.idle)}"
    )


def _advice(why: str) -> Iterator[str]:
    """What to write instead, in a line."""
    if why.startswith("a copy to") and why.endswith("not pinned"):
        yield "Pin it once (tensor.pin_memory()), and copy with non_blocking=True."
    elif why.startswith("a copy to"):
        yield "Copy with non_blocking=True."
    elif why.startswith("a copy from"):
        yield (
            "Copy less often, or with non_blocking=True, and wait for an event where "
            "you need the result."
        )
    elif why.endswith("of ranks"):
        yield (
            "A barrier, or a collective of tensors of the CPU: call it less often, or "
            "let devices do it."
        )
    elif why.startswith("aten."):
        yield (
            "The program reads a number (.item(), bool(), print): read it later, or "
            "less often."
        )


def in_words(seconds: float) -> str:
    """Seconds with a unit that fits: `3.20 ms`."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
