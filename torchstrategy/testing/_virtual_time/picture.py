"""A stretch of virtual time as a picture: an SVG file, with a line for the program and for each stream and engine.

The picture follows the reader's choice of light or dark. On a narrow screen its letters grow, so that they can be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from torchstrategy.testing._virtual_time.report import HEAD, in_words
from torchstrategy.testing._virtual_time.spans import CpuWork, Span, Synchronization
from torchstrategy.testing._virtual_time.timeline import Timeline

# Coordinates are those of an SVG: x goes to the right, and y down.
_WIDTH, _MARGIN = 960, 16
_HEAD, _AXIS = 112, 40  # heights: of the title and the legend, and of the axis
_LABEL, _BAR, _SPACE = 34, 26, 8  # heights: of a lane's name, of its bars, and of the space below
_LEAST = 0.6  # the width of the narrowest bar; closer ones become one
_TICKS = 6  # about so many
_LEGEND = (
    ("compute", "computes"),
    ("copy", "copies"),
    ("wait", "waits"),
    ("cpu", "works on the CPU"),
    ("collective", "collectives"),
)
_LAST = "collective"  # is in the legend of pictures that have some

_STYLE = """
  svg { background: #ffffff; }
  text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 17px; }
  .dim { fill: #59636e; }
  .ground { fill: #eff2f5; }
  .tick { stroke: #d1d9e0; stroke-width: 1; }
  .compute { fill: #2f6fbb; }
  .copy { fill: #d9730d; }
  .wait { fill: #c93c37; }
  .cpu { fill: #2d8a55; }
  .collective { fill: #8250df; }
  .bar:hover { stroke: #1f2328; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; }
    text { fill: #f0f6fc; }
    .dim { fill: #9198a1; }
    .ground { fill: #212830; }
    .tick { stroke: #3d444d; }
    .compute { fill: #58a6ff; }
    .copy { fill: #f0a04b; }
    .wait { fill: #ff7b72; }
    .cpu { fill: #56d364; }
    .collective { fill: #bc8cff; }
    .bar:hover { stroke: #f0f6fc; }
  }
  @media print {
    svg { background: #ffffff; }
    text { fill: #000000; }
    .dim { fill: #333333; }
    .ground { fill: #f4f4f4; }
  }
  @media (max-width: 600px) {
    text { font-size: 28px; }
    .title { font-size: 30px; }
    .optional { display: none; }
  }
"""


class _Bar(NamedTuple):
    start: float
    end: float
    kind: str
    text: str


def picture(timeline: Timeline) -> str:
    """The file."""
    lanes = [(name, [_bar(thing) for thing in things]) for name, things in timeline.lanes()]
    height = _HEAD + _AXIS + len(lanes) * (_LABEL + _BAR + _SPACE) + _MARGIN
    title = f"{timeline.profile.name}: {in_words(timeline.seconds)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"  <title>{escape(title)}</title>",
        f"  <style>{_STYLE}  </style>",
        f'  <text class="title" x="{_MARGIN}" y="32">{escape(title)}</text>',
        f'  <text class="dim" x="{_MARGIN}" y="64">{escape(HEAD)}</text>',
        *_legend(any(bar.kind == _LAST for _, bars in lanes for bar in bars)),
        *_axis(timeline, height),
    ]
    for row, (name, bars) in enumerate(lanes):
        y = _HEAD + _AXIS + row * (_LABEL + _BAR + _SPACE)
        parts.append(f'  <text x="{_MARGIN}" y="{y + _LABEL - 8}">{escape(name)}</text>')
        inner = _WIDTH - 2 * _MARGIN
        parts.append(f'  <rect class="ground" x="{_MARGIN}" y="{y + _LABEL}" width="{inner}" height="{_BAR}"/>')
        parts += [_drawn(bar, timeline, y + _LABEL) for bar in _joined(bars, timeline)]
    return "\n".join([*parts, "</svg>", ""])


def _bar(thing: Span | Synchronization | CpuWork) -> _Bar:
    if isinstance(thing, Synchronization):
        end = thing.start + thing.seconds
        return _Bar(thing.start, end, "wait", _hover(f"waits: {thing.why}", thing.seconds, thing.where))
    seconds = thing.end - thing.start
    if isinstance(thing, CpuWork):
        return _Bar(thing.start, thing.end, "cpu", _hover(thing.name, seconds, thing.where, thing.bytes))
    return _Bar(thing.start, thing.end, thing.kind, _hover(thing.name, seconds, thing.where, thing.bytes))


def _hover(name: str, seconds: float, where: str, size: int | None = None) -> str:
    bytes_ = [] if size is None else [f"{size:,} bytes"]
    return ", ".join([name, in_words(seconds), *bytes_, *([where] if where else [])])


def _joined(bars: Sequence[_Bar], timeline: Timeline) -> Iterator[_Bar]:
    """Bars as they can be drawn: what is too narrow to be seen alone is one bar with its neighbours."""
    least = _LEAST * timeline.seconds / (_WIDTH - 2 * _MARGIN)
    for kind in ("compute", "copy", "cpu", "wait", "collective"):
        before: _Bar | None = None
        count = 0
        for bar in sorted(bar for bar in bars if bar.kind == kind):
            is_small = bar.end - bar.start < least
            if before is not None and bar.start - before.end < least and (is_small or (count > 1 and is_small)):
                count += 1
                before = _Bar(before.start, max(before.end, bar.end), kind, f"{count} in a row")
                continue
            if before is not None:
                yield before
            before, count = bar, 1
        if before is not None:
            yield before


def _x(moment: float, timeline: Timeline) -> float:
    share = (moment - timeline.since) / max(timeline.seconds, 1e-12)
    return _MARGIN + min(max(share, 0.0), 1.0) * (_WIDTH - 2 * _MARGIN)


def _drawn(bar: _Bar, timeline: Timeline, y: int) -> str:
    x, end = _x(bar.start, timeline), _x(bar.end, timeline)
    place = f'x="{x:.2f}" y="{y}" width="{max(end - x, _LEAST):.2f}" height="{_BAR}"'
    return f'  <rect class="bar {bar.kind}" {place}><title>{escape(bar.text)}</title></rect>'


def _legend(has_collectives: bool) -> Iterator[str]:
    x = _MARGIN
    for kind, words in _LEGEND:
        if kind == _LAST and not has_collectives:
            continue
        yield f'  <rect class="{kind}" x="{x}" y="{_HEAD - 32}" width="18" height="18"/>'
        yield f'  <text x="{x + 26}" y="{_HEAD - 16}">{words}</text>'
        x += 190


def _axis(timeline: Timeline, height: int) -> Iterator[str]:
    step = _step(timeline.seconds / _TICKS)
    count = int(timeline.seconds / step) + 1 if step else 0
    for i in range(count):
        x = _x(timeline.since + i * step, timeline)
        optional = " optional" if i % 2 else ""
        anchor = "start" if i == 0 else "end" if x > _WIDTH - 100 else "middle"
        yield f'  <line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD + _AXIS - 4}" y2="{height - _MARGIN}"/>'
        label = f'class="dim{optional}" x="{x:.1f}" y="{_HEAD + _AXIS - 10}" text-anchor="{anchor}"'
        yield f"  <text {label}>{_label(i * step, step)}</text>"


def _step(rough: float) -> float:
    """A round number of seconds near a rough one."""
    if rough <= 0:
        return 0.0
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _label(seconds: float, step: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if step >= unit or name == "us":
            return f"{seconds / unit:g} {name}"
    raise AssertionError
