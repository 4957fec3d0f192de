"""A stretch of virtual time in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torchstrategy._base.errors import plural
from torchstrategy.testing._virtual_time.profiles import GIB
from torchstrategy.testing._virtual_time.timeline import Timeline, Wait

HEAD = "Figures of a model, +-30 %; not measured."
_WAITS = 5


def report(timeline: Timeline) -> str:
    """The devices, the copies by their routes, and the longest waits with the lines that cause them."""
    lines = [HEAD, f"{timeline.profile.name}: {in_words(timeline.seconds)}, {plural(len(timeline.spans), 'operator')}"]
    for device in timeline.devices:
        lines += _device(timeline, device)
    lines += _copies(timeline)
    waits = timeline.waits()
    total = sum(wait.seconds for wait in waits)
    if not total:
        lines.append("  the program never waits")
        return "\n".join(lines)
    lines.append(f"  the program waits {in_words(total)}{_together(timeline)}:")
    for wait in waits[:_WAITS]:
        if wait.seconds:
            lines += [f"    {_described(wait)}", *(f"      {advice}" for advice in _advice(wait.why))]
    if more := len([wait for wait in waits[_WAITS:] if wait.seconds]):
        lines.append(f"    and in {plural(more, 'other place')}")
    return "\n".join(lines)


def _device(timeline: Timeline, device: int) -> Iterator[str]:
    about = timeline.device(device)
    yield (
        f"  sim:{device}: computes {about.busy / max(timeline.seconds, 1e-12):.0%} of the time, "
        f"MFU {about.mfu:.1%}, at most {about.peak_bytes / GIB:.2f} GiB, "
        f"{timeline.overlap('copy', 'compute', device):.0%} of the copying while it computes"
    )
    if about.communicating:
        hidden = timeline.overlap("collective", "compute", device)
        yield f"    {in_words(about.communicating)} of collectives, {hidden:.0%} of them while it computes"


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
        blocks = f", {blocking[route]} of which the program waits for" if blocking[route] else ""
        lines.append(f"  {route}: {sizes[route] / 1e6:,.1f} MB in {copies}{blocks}")
    return lines


def _together(timeline: Timeline) -> str:
    hosts = {one.host for one in timeline.synchronizations if one.seconds}
    return f", {plural(len(hosts), min(hosts).partition(' ')[0])} together" if len(hosts) > 1 else ""


def _described(wait: Wait) -> str:
    where = wait.where or "code that is not yours"
    times = "" if wait.times == 1 else f", in {wait.times} waits"
    return f"{in_words(wait.seconds)} at {where}{times}: {wait.why}"


def _advice(why: str) -> Iterator[str]:
    """What to write instead, in a line."""
    if why.startswith("a copy to") and why.endswith("not pinned"):
        yield "Pin it once (tensor.pin_memory()), and copy with non_blocking=True."
    elif why.startswith("a copy to"):
        yield "Copy with non_blocking=True."
    elif why.startswith("a copy from"):
        yield "Copy less often, or with non_blocking=True, and wait for an event where you need the result."
    elif why.endswith("of ranks"):
        yield "A barrier, or a collective of tensors of the CPU: call it less often, or let devices do it."
    elif why.startswith("aten."):
        yield "The program reads a number (.item(), bool(), print): read it later, or less often."


def in_words(seconds: float) -> str:
    """Seconds with a unit that fits: `3.20 ms`."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
