"""A stretch of virtual time as a picture.

The picture is an SVG file, with a line for the program and for each stream and engine.

The picture follows the reader's choice of light or dark. On a narrow screen its letters
grow, so that they can be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import final

from torchstrategy.testing._virtual_time.report import HEAD, in_words
from torchstrategy.testing._virtual_time.spans import (
    CpuWork,
    Interval,
    Span,
    Synchronization,
    during,
    without,
)
from torchstrategy.testing._virtual_time.timeline import Timeline

# Coordinates are those of an SVG: x goes to the right, and y down.
_WIDTH, _MARGIN = 960, 16
_LEGEND_TOP, _LEGEND_ROW = 80, 32
_AXIS, _STEPS = 40, 30  # heights: of the axis, and of the names of the steps
# Heights: of a lane's name, of its bars, and of the space below.
_LABEL, _BAR, _SPACE = 34, 26, 8
_LEAST = 0.6  # the width of the narrowest bar; closer ones become one
_TICKS = 6  # about so many
_LETTER = 6.6  # the width of a letter in a bar
_NAMES = 3  # of the operators of a bar that is several
_IN_A_ROW = 5  # of the legend
_LEGEND = {
    "idle": "GPU is idle",
    "wait": "waits, GPU idle",
    "calm": "waits, GPU works",
    "compute": "computes",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "copy": "copies",
    "cpu": "works on the CPU",
    "collective": "collectives",
}

_STYLE = """
  svg { background: #ffffff; }
  text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 17px; }
  .dim { fill: #59636e; }
  .ground { fill: #eff2f5; }
  .tick { stroke: #d1d9e0; stroke-width: 1; }
  .edge { stroke: #59636e; stroke-width: 1; stroke-dasharray: 3 3; }
  .in { font-size: 11px; fill: #ffffff; pointer-events: none; }
  .idle { fill: #d1242f; }
  .wait { fill: #9a6700; }
  .calm { fill: #818b98; }
  .compute { fill: #2f6fbb; }
  .forward { fill: #2f6fbb; }
  .backward { fill: #1b4f8f; }
  .optimizer { fill: #1b7c83; }
  .copy { fill: #bc5d00; }
  .cpu { fill: #2d8a55; }
  .collective { fill: #8250df; }
  .bar:hover { stroke: #1f2328; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; }
    text { fill: #f0f6fc; }
    .dim { fill: #9198a1; }
    .ground { fill: #212830; }
    .tick { stroke: #3d444d; }
    .edge { stroke: #9198a1; }
    .in { fill: #0d1117; }
    .idle { fill: #ff7b72; }
    .wait { fill: #d29922; }
    .calm { fill: #9198a1; }
    .compute { fill: #58a6ff; }
    .forward { fill: #79c0ff; }
    .backward { fill: #58a6ff; }
    .optimizer { fill: #39c5cf; }
    .copy { fill: #f0a04b; }
    .cpu { fill: #56d364; }
    .collective { fill: #bc8cff; }
    .bar:hover { stroke: #f0f6fc; }
  }
  @media print {
    svg { background: #ffffff; }
    text { fill: #000000; }
    .dim { fill: #333333; }
    .in { fill: #ffffff; }
    .ground { fill: #f4f4f4; }
  }
  @media (max-width: 600px) {
    text { font-size: 28px; }
    .title { font-size: 30px; }
    .optional, .in { display: none; }
  }
"""  # noqa: E501


@final
@dataclass
class _Bar:
    """One thing, or several in a row that are too narrow to be seen alone."""

    start: float
    end: float
    kind: str
    text: str  # what the reader sees who points at it
    name: str = ""
    function: str = ""  # of the program
    count: int = 1
    # The seconds of each operator, if a bar stands for several.
    names: dict[str, float] = field(default_factory=dict)
    functions: dict[str, float] = field(default_factory=dict)

    def take(self, other: _Bar) -> None:
        """Becomes one with the bar that comes next."""
        if self.count == 1:
            self._count(self)
        self._count(other)
        self.end, self.count = max(self.end, other.end), self.count + 1

    def _count(self, other: _Bar) -> None:
        for known, name in ((self.names, other.name), (self.functions, other.function)):
            known[name] = known.get(name, 0.0) + other.end - other.start

    def title(self) -> str:
        """The text, or the names of what it is, those that take longest first."""
        if self.count == 1:
            return self.text
        names = _longest_first(self.names)
        more = f" and {len(names) - _NAMES} others" if len(names) > _NAMES else ""
        function = self._users_function()
        together = f"{self.count} in a row, {in_words(self.seconds())} together"
        return (
            f"{together}: "
            f"{', '.join(names[:_NAMES])}{more}{f', in {function}' if function else ''}"
        )

    def label(self) -> str:
        """What is written on it, if there is room."""
        if self.kind == "idle":
            return f"idle {in_words(self.seconds())}"
        return (
            self.name
            if self.count == 1
            else self._users_function() or _longest_first(self.names)[0]
        )

    def seconds(self) -> float:
        return self.end - self.start if self.count == 1 else sum(self.names.values())

    def _users_function(self) -> str:
        """In which it is, or most of it."""
        return _longest_first(self.functions)[0] if self.functions else self.function


def _longest_first(seconds: dict[str, float]) -> list[str]:
    return sorted(seconds, key=lambda name: -seconds[name])


def picture(timeline: Timeline) -> str:
    """The file."""
    lanes = list(_lanes(timeline))
    kinds = [
        kind
        for kind in _LEGEND
        if any(bar.kind == kind for _, bars in lanes for bar in bars)
    ]
    top = _LEGEND_TOP + _LEGEND_ROW * math.ceil(len(kinds) / _IN_A_ROW) + _AXIS
    names = list(_names_of_steps(timeline))
    first = top + (_STEPS if names else 0)
    height = first + len(lanes) * (_LABEL + _BAR + _SPACE) + _MARGIN
    title = f"{timeline.profile.name}: {in_words(timeline.seconds)}"
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            'role="img">'
        ),
        f"  <title>{escape(title)}</title>",
        f"  <style>{_STYLE}  </style>",
        f'  <text class="title" x="{_MARGIN}" y="32">{escape(title)}</text>',
        f'  <text class="dim" x="{_MARGIN}" y="64">{escape(HEAD)}</text>',
        *_legend(kinds),
        *_axis(timeline, top, height),
        *_edges(names, timeline, top, height),
    ]
    for row, (name, bars) in enumerate(lanes):
        y = first + row * (_LABEL + _BAR + _SPACE)
        parts.append(
            f'  <text x="{_MARGIN}" y="{y + _LABEL - 8}">{escape(name)}</text>'
        )
        inner = _WIDTH - 2 * _MARGIN
        parts.append(
            f'  <rect class="ground" x="{_MARGIN}" y="{y + _LABEL}" width="{inner}" '
            f'height="{_BAR}"/>'
        )
        parts += [_drawn(bar, timeline, y + _LABEL) for bar in _joined(bars, timeline)]
    return "\n".join([*parts, "</svg>", ""])


def _lanes(timeline: Timeline) -> Iterator[tuple[str, list[_Bar]]]:
    """The lanes to draw, first those that show when each device is idle.

    A reader mostly looks for these. Then come the program, the streams and the engines.
    """
    for device in timeline.devices:
        idle = timeline.idle(device)
        share = sum(end - start for start, end in idle) / max(timeline.seconds, 1e-12)
        name = f"sim:{device} is idle for {share:.0%} of the time"
        yield (
            name,
            [
                _Bar(start, end, "idle", f"idle, {in_words(end - start)}", "idle")
                for start, end in idle
            ],
        )
    idle_by_host = timeline.idle_by_host()
    is_training = timeline.is_training
    for name, things in timeline.lanes():
        yield (
            name,
            [
                bar
                for thing in things
                for bar in _bars(thing, idle_by_host, is_training)
            ],
        )


def _bars(
    thing: Span | Synchronization | CpuWork,
    idle: dict[str, list[Interval]],
    is_training: bool,
) -> Iterator[_Bar]:
    if isinstance(thing, Synchronization):
        end = thing.start + thing.seconds
        whole, lost = (
            [(thing.start, end)],
            during(thing.start, end, idle.get(thing.host, [])),
        )
        text = _hover(f"waits: {thing.why}", thing.seconds, thing.where)
        for kind, parts in (("wait", lost), ("calm", without(whole, lost))):
            yield from (_Bar(start, end, kind, text, thing.why) for start, end in parts)
        return
    text = _hover(thing.name, thing.end - thing.start, thing.where, thing.bytes)
    if isinstance(thing, CpuWork):
        yield _Bar(thing.start, thing.end, "cpu", text, thing.name)
        return
    kind = thing.phase if is_training and thing.kind == "compute" else thing.kind
    yield _Bar(thing.start, thing.end, kind, text, thing.name, thing.users_function)


def _hover(name: str, seconds: float, where: str, size: int | None = None) -> str:
    bytes_ = [] if size is None else [f"{size:,} bytes"]
    return ", ".join([name, in_words(seconds), *bytes_, *([where] if where else [])])


def _joined(bars: Sequence[_Bar], timeline: Timeline) -> Iterator[_Bar]:
    """Bars as they can be drawn.

    A bar that is too narrow to be seen alone is joined with its neighbours.
    """
    least = _LEAST * timeline.seconds / (_WIDTH - 2 * _MARGIN)
    for kind in _LEGEND:
        before: _Bar | None = None
        for bar in sorted(
            (bar for bar in bars if bar.kind == kind),
            key=lambda bar: (bar.start, bar.end),
        ):
            if (
                before is not None
                and bar.start - before.end < least
                and bar.end - bar.start < least
            ):
                before.take(bar)
                continue
            if before is not None:
                yield before
            before = bar
        if before is not None:
            yield before


def _x(moment: float, timeline: Timeline) -> float:
    share = (moment - timeline.since) / max(timeline.seconds, 1e-12)
    return _MARGIN + min(max(share, 0.0), 1.0) * (_WIDTH - 2 * _MARGIN)


def _drawn(bar: _Bar, timeline: Timeline, y: int) -> str:
    x, end = _x(bar.start, timeline), _x(bar.end, timeline)
    place = f'x="{x:.2f}" y="{y}" width="{max(end - x, _LEAST):.2f}" height="{_BAR}"'
    drawn = (
        f'  <rect class="bar {bar.kind}" '
        f"{place}><title>{escape(bar.title())}</title></rect>"
    )
    label = bar.label()
    if not label or end - x < _LETTER * (len(label) + 2):
        return drawn
    return (
        f'{drawn}\n  <text class="in" x="{x + _LETTER:.2f}" '
        f'y="{y + 17}">{escape(label)}</text>'
    )


def _legend(kinds: Sequence[str]) -> Iterator[str]:
    for i, kind in enumerate(kinds):
        x, y = (
            _MARGIN + 190 * (i % _IN_A_ROW),
            _LEGEND_TOP + _LEGEND_ROW * (i // _IN_A_ROW),
        )
        yield f'  <rect class="{kind}" x="{x}" y="{y}" width="18" height="18"/>'
        yield f'  <text x="{x + 26}" y="{y + 16}">{_LEGEND[kind]}</text>'


def _names_of_steps(timeline: Timeline) -> Iterator[tuple[str, float, float]]:
    """What is written above each step, and from when to when it is."""
    known = [] if timeline.begin is None else [timeline.begin]
    bounds = [*known, *(end for end in timeline.ends if not known or end > known[0])]
    if len(bounds) < 2:
        return
    if bounds[0] > timeline.since:
        yield "set-up" if known else "set-up and step 1", timeline.since, bounds[0]
    for number, (start, end) in enumerate(pairwise(bounds), 1 if known else 2):
        yield f"step {number}", start, end


def _edges(
    names: Sequence[tuple[str, float, float]], timeline: Timeline, top: int, height: int
) -> Iterator[str]:
    for name, start, end in names:
        x, until = _x(start, timeline), _x(end, timeline)
        yield (
            f'  <line class="edge" x1="{until:.1f}" x2="{until:.1f}" y1="{top}" '
            f'y2="{height - _MARGIN}"/>'
        )
        if until - x > _LETTER * 1.3 * len(name):
            place = f'x="{(x + until) / 2:.1f}" y="{top + 18}" text-anchor="middle"'
            yield f'  <text class="dim optional" {place}>{name}</text>'


def _axis(timeline: Timeline, top: int, height: int) -> Iterator[str]:
    step = _step(timeline.seconds / _TICKS)
    count = int(timeline.seconds / step) + 1 if step else 0
    for i in range(count):
        x = _x(timeline.since + i * step, timeline)
        optional = " optional" if i % 2 else ""
        anchor = "start" if i == 0 else "end" if x > _WIDTH - 100 else "middle"
        yield (
            f'  <line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" '
            f'y2="{height - _MARGIN}"/>'
        )
        label = (
            f'class="dim{optional}" x="{x:.1f}" y="{top - 10}" text-anchor="{anchor}"'
        )
        yield f"  <text {label}>{_label(i * step, step)}</text>"


def _step(rough: float) -> float:
    """A round number of seconds near a rough one."""
    if rough <= 0:
        return 0.0
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(
        factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999
    )


def _label(seconds: float, step: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if step >= unit or name == "us":
            return f"{seconds / unit:g} {name}"
    raise AssertionError
