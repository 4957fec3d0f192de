"""Draws the house: `python tests/house/picture.py` writes docs/house.svg, and with `--check` only compares.

The rooms, their floors and their purposes are those that the docstring of `tests/house` has; the arrows are the imports
of its files. An arrow is left out where other arrows lead to the same room, unless it is among the thickest. Thickness
has three steps only, so that a further import seldom changes the picture.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "house.svg"
REFRESH = "python tests/house/picture.py"

# How many imports make an arrow thicker.
SOME, MANY = 5, 20

# Coordinates are those of an SVG: x goes to the right, and y down.
WIDTH, MARGIN = 960, 40
ROOF, HEIGHT, SPACE, LEGEND = (
    64,
    68,
    52,
    46,
)  # heights: of the roof, a floor, the space between floors, the legend
WIDTHS = {1: 480, 2: 340, 3: 260}  # of one room, by the number of rooms on its floor
LETTER = 6.6  # at most so wide is a letter of a purpose, as a rule
HEAD = 10  # the length of the head of an arrow
BEND, CLEAR = (
    60,
    24,
)  # what a bend costs, as a longer way; what is between an arrow and a room that it passes
LANE = 14  # between two arrows that pass through one gap

# Readable on the white and on the dark ground of GitHub: rooms have a ground of their own.
PRIVATE, PUBLIC, EDGE, INK, GRAY = "#dbe9f9", "#f8e6c4", "#8b949e", "#1f2328", "#808890"
THICKNESS = {1: 1.2, SOME: 2.6, MANY: 4.6}


class Room(NamedTuple):
    """A part of the package, as the docstring of `tests/house` has it."""

    name: str
    purpose: str


class Arrow(NamedTuple):
    """What the files of one room import from another room."""

    start: str
    end: str


def package() -> Path:
    """The folder of the sources: beside the tests, or where it is installed."""
    here = ROOT / "torchstrategy"
    if here.is_dir():
        return here
    spec = importlib.util.find_spec("torchstrategy")
    assert spec is not None and spec.origin is not None, (
        "torchstrategy is not installed"
    )
    return Path(spec.origin).parent


# What there is


def listed(init: Path) -> list[tuple[str, str]]:
    """The indented lines at the end of a docstring: of each the name that stands first, and what follows it."""
    documentation = ast.get_docstring(ast.parse(init.read_text())) or ""
    lines = documentation.rpartition("\n\n")[2].splitlines()
    parted = (line.strip().partition(" ") for line in lines if line.startswith("    "))
    return [(name, text.strip()) for name, _, text in parted]


def floors() -> list[list[Room]]:
    """The rooms on each floor, from below."""
    found: list[list[Room]] = [[]]
    for name, purpose in listed(Path(__file__).with_name("__init__.py")):
        if name == "----":
            found.append([])
        else:
            found[-1].append(Room(name, purpose.replace("`", "")))
    return found


@functools.cache
def imports() -> Counter[Arrow]:
    """How many modules of each room the files of another room import, counted for each file."""
    counts: Counter[Arrow] = Counter()
    for path in package().rglob("*.py"):
        room = path.relative_to(package()).with_suffix("").parts[0]
        if room not in ("__init__", "__main__"):
            for other, *_ in set(modules_imported_by(path)):
                if other not in (room, "__init__"):
                    counts[Arrow(room, other)] += 1
    return counts


def modules_imported_by(path: Path) -> Iterator[tuple[str, ...]]:
    """The modules of the package that a file imports, for annotations too, as parts of their paths."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [
                _module_named(node.module or "", alias.name) for alias in node.names
            ]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top == "torchstrategy":
                yield tuple(rest) or ("__init__",)


def _module_named(module: str, name: str) -> str:
    """What `from module import name` imports: a module below it, or the module itself."""
    below = package().parent.joinpath(*module.split("."), name)
    return (
        f"{module}.{name}"
        if below.is_dir() or below.with_suffix(".py").is_file()
        else module
    )


def drawn_arrows(counts: Mapping[Arrow, int], ground: Sequence[str]) -> list[Arrow]:
    """The arrows to which no other way leads, and the thickest; but of those to the ground floor only the former."""

    def leads(start: str, end: str) -> bool:
        return any(
            a.start == start and (a.end == end or leads(a.end, end)) for a in counts
        )

    def is_implied(arrow: Arrow) -> bool:
        return any(
            a.start == arrow.start and a.end != arrow.end and leads(a.end, arrow.end)
            for a in counts
        )

    return sorted(
        a
        for a, count in counts.items()
        if not is_implied(a) or (count >= MANY and a.end not in ground)
    )


# Where it is drawn


@dataclass
class Box:
    """Where a room is drawn, and the arrows at it."""

    room: Room
    floor: int
    x: float
    y: float
    width: float
    leaving: list[Arrow] = field(default_factory=list)
    arriving: list[Arrow] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    def port(self, arrows: Sequence[Arrow], arrow: Arrow) -> float:
        """Where one of several arrows touches the edge."""
        return self.x + self.width * (arrows.index(arrow) + 1) / (len(arrows) + 1)


def placed(house: Sequence[Sequence[Room]]) -> dict[str, Box]:
    """A box for each room: the ground floor is as wide as the house."""
    boxes: dict[str, Box] = {}
    for floor, rooms in enumerate(house):
        y = ROOF + (len(house) - 1 - floor) * (HEIGHT + SPACE)
        width = WIDTH - 2 * MARGIN if floor == 0 else WIDTHS[len(rooms)]
        space = (
            (WIDTH - 2 * MARGIN - width * len(rooms)) / max(1, len(rooms) - 1)
            if len(rooms) > 2
            else 60
        )
        x = (WIDTH - width * len(rooms) - space * (len(rooms) - 1)) / 2
        for room in rooms:
            boxes[room.name] = Box(room, floor, x, y, width)
            x += width + space
    return boxes


def gaps(boxes: Mapping[str, Box], floor: int) -> list[float]:
    """Where an arrow can pass a floor: beside its rooms, and between them."""
    on_floor = sorted(
        (box for box in boxes.values() if box.floor == floor), key=lambda box: box.x
    )
    between = [
        (left.x + left.width + right.x) / 2 for left, right in pairwise(on_floor)
    ]
    first, last = on_floor[0], on_floor[-1]
    return [
        MARGIN / 2,
        first.x - CLEAR,
        *between,
        last.x + last.width + CLEAR,
        WIDTH - MARGIN / 2,
    ]


def way_of(boxes: Mapping[str, Box], arrow: Arrow) -> tuple[float, list[float]]:
    """The x at which an arrow passes each floor between its ends, from above; and before it, how long a way it is."""
    start, end = boxes[arrow.start], boxes[arrow.end]
    passed = range(start.floor - 1, end.floor, -1)
    everywhere = {x for floor in passed for x in gaps(boxes, floor)}
    best: dict[float, tuple[float, list[float]]] = {start.middle: (0, [])}
    for floor in passed:
        rooms = [box for box in boxes.values() if box.floor == floor]
        free = sorted(
            x
            for x in everywhere
            if all(abs(x - b.middle) >= b.width / 2 + CLEAR / 2 for b in rooms)
        )
        best = {
            x: min(
                (cost + abs(x - last) + BEND * (x != last), [*way, x])
                for last, (cost, way) in best.items()
            )
            for x in free
        }
    return min(
        (cost + abs(end.middle - last), way) for last, (cost, way) in best.items()
    )


def ways(boxes: Mapping[str, Box], arrows: Sequence[Arrow]) -> dict[Arrow, list[float]]:
    """The ways of all arrows, side by side where several pass through one gap."""
    found = {arrow: way_of(boxes, arrow)[1] for arrow in arrows}
    passing: dict[tuple[int, float], list[Arrow]] = {}
    for arrow, way in found.items():
        for below, x in enumerate(way, start=1):
            passing.setdefault((boxes[arrow.start].floor - below, x), []).append(arrow)
    for (floor, _), together in passing.items():
        together.sort(
            key=lambda arrow: (boxes[arrow.end].middle, boxes[arrow.start].middle)
        )
        for place, arrow in enumerate(together):
            found[arrow][boxes[arrow.start].floor - 1 - floor] += LANE * (
                place - (len(together) - 1) / 2
            )
    return found


def with_short_ways(
    house: Sequence[Sequence[Room]], arrows: Sequence[Arrow]
) -> dict[str, Box]:
    """The boxes, with the rooms of each floor in the order in which arrows are shortest."""
    orders = product(*(permutations(rooms) for rooms in house))
    return min(
        map(placed, orders),
        key=lambda boxes: sum(way_of(boxes, arrow)[0] for arrow in arrows),
    )


# How it is drawn


@functools.cache
def drawn() -> str:
    """The picture."""
    house, counts = floors(), imports()
    arrows = drawn_arrows(counts, [room.name for room in house[0]])
    boxes = with_short_ways(house, arrows)
    passed = ways(boxes, arrows)
    for arrow in arrows:
        boxes[arrow.start].leaving.append(arrow)
        boxes[arrow.end].arriving.append(arrow)
    for box in boxes.values():
        box.leaving.sort(key=lambda arrow: [*passed[arrow], boxes[arrow.end].middle][0])
        box.arriving.sort(
            key=lambda arrow: [boxes[arrow.start].middle, *passed[arrow]][-1]
        )
    height = ROOF + len(house) * (HEIGHT + SPACE) - SPACE + LEGEND
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif">',
            "  <title>The rooms of torchstrategy, floor by floor, and what imports what</title>",
            f"  <!-- {REFRESH} has drawn this. -->",
            '  <defs><marker id="head" markerUnits="userSpaceOnUse" markerWidth="11" markerHeight="10" refX="1" '
            f'refY="5" orient="auto"><path d="M0,0 L11,5 L0,10 Z" fill="{GRAY}"/></marker></defs>',
            *_roof(),
            *(_arrow(boxes, arrow, passed[arrow], counts[arrow]) for arrow in arrows),
            *(line for box in boxes.values() for line in _box(box)),
            *_legend(height),
            "</svg>",
            "",
        ]
    )


def _roof() -> list[str]:
    low, middle = ROOF - 14, WIDTH / 2
    return [
        f'  <path d="M{MARGIN},{low} L{middle:g},6 L{WIDTH - MARGIN},{low} Z" fill="none" stroke="{EDGE}" '
        'stroke-linejoin="round"/>',
        _text(
            middle,
            low - 10,
            "torchstrategy",
            GRAY,
            'font-size="15" font-weight="600" text-anchor="middle"',
        ),
    ]


def _arrow(
    boxes: Mapping[str, Box], arrow: Arrow, way: Sequence[float], count: int
) -> str:
    start, end = boxes[arrow.start], boxes[arrow.end]
    points = [(start.port(start.leaving, arrow), start.y + HEIGHT)]
    for x in way:
        top = points[-1][1] + SPACE
        points += [(x, top), (x, top + HEIGHT)]
    points.append((end.port(end.arriving, arrow), end.y - HEAD))
    path = "M{:.0f},{:.0f}".format(*points[0])
    for (x, y), (next_x, next_y) in pairwise(points):
        bend = (y + next_y) / 2
        path += (
            f" C{x:.0f},{bend:.0f} {next_x:.0f},{bend:.0f} {next_x:.0f},{next_y:.0f}"
        )
    return f'  <path d="{path}" {_stroke(count)}/>'


def _stroke(count: int) -> str:
    thickness = THICKNESS[max(step for step in THICKNESS if step <= count)]
    return f'fill="none" stroke="{GRAY}" stroke-width="{thickness}" marker-end="url(#head)"'


def _box(box: Box) -> list[str]:
    middle, lines = (
        box.middle,
        _wrapped(box.room.purpose, int((box.width - 16) / LETTER)),
    )
    y = box.y + (HEIGHT - 16 * len(lines)) / 2 + 4
    fill = PRIVATE if box.room.name.startswith("_") else PUBLIC
    name = 'font-size="15" font-weight="600" font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"'
    return [
        f'  <rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{HEIGHT}" rx="7" fill="{fill}" '
        f'stroke="{EDGE}"/>',
        _text(middle, y, box.room.name, INK, f'{name} text-anchor="middle"'),
        *(
            _text(
                middle,
                y + 16 * number + 2,
                line,
                INK,
                'font-size="12" text-anchor="middle"',
            )
            for number, line in enumerate(lines, start=1)
        ),
    ]


def _wrapped(text: str, width: int) -> list[str]:
    """As few lines as there have to be, of about the same length."""
    lines = textwrap.wrap(text, width)
    return min(
        (textwrap.wrap(text, less) for less in range(8, width + 1)),
        key=lambda w: (len(w) != len(lines), max(map(len, w))),
    )


def _legend(height: int) -> list[str]:
    y, x, lines = height - 14, float(MARGIN), []
    for fill, what in {PUBLIC: "public", PRIVATE: "private"}.items():
        lines.append(
            f'  <rect x="{x:g}" y="{y - 11}" width="18" height="13" rx="3" fill="{fill}" stroke="{EDGE}"/>'
        )
        lines.append(_text(x + 25, y, what, GRAY, 'font-size="12"'))
        x += 84
    for least, what in {
        1: "imports",
        SOME: f"{SOME} or more",
        MANY: f"{MANY} or more",
    }.items():
        lines.append(f'  <path d="M{x:g},{y - 4} h20" {_stroke(least)}/>')
        lines.append(_text(x + 36, y, what, GRAY, 'font-size="12"'))
        x += 116
    lines.append(
        _text(
            x,
            y,
            "Not drawn: a thin arrow where others lead to the same room.",
            GRAY,
            'font-size="12"',
        )
    )
    return lines


def _text(x: float, y: float, text: str, fill: str, attributes: str) -> str:
    return (
        f'  <text x="{x:g}" y="{y:g}" fill="{fill}" {attributes}>{escape(text)}</text>'
    )


def main() -> int:
    """Writes the picture; or, with --check, says whether it is the one that is there."""
    parser = argparse.ArgumentParser(
        description="Draws docs/house.svg from the imports of the package."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and fail if the file is another",
    )
    picture = drawn()
    if parser.parse_args().check:
        if not PICTURE.is_file() or PICTURE.read_text() != picture:
            print(
                f"{PICTURE.name} is not what the imports are. Write it: {REFRESH}",
                file=sys.stderr,
            )
            return 1
        return 0
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
