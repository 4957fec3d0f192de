"""Draws the pictures of docs/how-a-step-runs.md next to this file.

Call it so: `python docs/pictures/draw.py`.

A drawing follows the light or dark scheme of the site, and elsewhere that of the
reader's system. batch.svg and step.svg were drawn by hand, in the same style.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
LIGHT = (
    "--ink:#1f2328;--soft:#59636e;--line:#c5cdd5;"
    "--r0:#0072b2;--r1:#d55e00;--r2:#008a63;--r3:#a8568b"
)
DARK = (
    "--ink:#e6edf3;--soft:#9da7b1;--line:#4a525b;"
    "--r0:#56b4e9;--r1:#f0883e;--r2:#3fc79a;--r3:#d798c3"
)
FONT = 'font:15px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif'
COLOURS = "".join(
    f".pic .r{i}{{fill:var(--r{i});stroke:var(--r{i})}}" for i in range(4)
)
STYLE = f"""<style>
.pic{{{LIGHT};{FONT}}}
@media (prefers-color-scheme:dark){{.pic{{{DARK}}}}}
[data-md-color-scheme=default] .pic{{{LIGHT}}}
[data-md-color-scheme=slate] .pic{{{DARK}}}
.pic text{{fill:var(--ink);stroke:none}}.pic .m{{text-anchor:middle}}.pic .s{{fill:var(--soft);font-size:14px}}
.pic .b{{font-weight:600}}{COLOURS}
.pic rect{{fill-opacity:.16;stroke-width:1.5}}.pic .box{{fill:none;stroke:var(--line)}}
.pic path{{fill:none;stroke-width:1.5}}
.pic .arrow{{stroke:var(--soft)}}.pic .wall{{stroke:var(--ink);stroke-dasharray:5 5}}
</style>"""  # noqa: E501


def box(
    x: int, y: int, width: int, height: int, text: str = "", kind: str = "box"
) -> str:
    """A box with a text in its middle."""
    words = label(x + width // 2, y + height // 2 + 5, text, "m") if text else ""
    return (
        f'<g><rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" '
        f'rx="4"/>{words}</g>'
    )


def label(x: int, y: int, text: str, kind: str = "s") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    """A straight arrow, along one of the axes."""
    across, down = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    ends = (
        (to_x - 6 * across - 5 * side * down, to_y - 6 * down - 5 * side * across)
        for side in (-1, 1)
    )
    (a, b), (c, d) = ends
    return (
        f'<path class="arrow" d="M{x} {y}L{to_x} {to_y}M{a} {b}L{to_x} {to_y}L{c} '
        f'{d}"/>'
    )


def owners() -> tuple[str, str, int, list[str]]:
    parts = []
    rows = (
        (
            "CentralStorage",
            "device",
            ("your parameters", "a copy of them", "a copy of them"),
            (0,),
        ),
        (
            "Mirrored",
            "device",
            ("your parameters", "parameters", "parameters"),
            (0, 1, 2),
        ),
        ("MultiWorkerMirrored", "worker", ("your parameters",) * 3, (0, 1, 2)),
    )
    for row, (name, place, kinds, with_state) in enumerate(rows):
        top = 12 + 132 * row
        parts += [label(0, top + 56, name), label(0, top + 76, "Strategy")]
        for column, kind in enumerate(kinds):
            left = 184 + 186 * column
            parts += [
                box(left, top, 176, 120),
                label(left + 88, top + 20, f"{place} {column}", "m b"),
            ]
            parts.append(box(left + 10, top + 30, 156, 24, kind, "r0"))
            parts.append(
                box(left + 10, top + 60, 156, 24, "gradient of its rows", "r1")
            )
            if column in with_state:
                parts.append(
                    box(left + 10, top + 90, 156, 24, "optimizer's state", "r2")
                )
    about = (
        "CentralStorageStrategy has one state of the optimizer, on one device; the "
        "other two have one on every device."
    )
    return (
        "Where parameters, gradients and the optimizer's state are",
        about,
        410,
        parts,
    )


def exchange() -> tuple[str, str, int, list[str]]:
    parts = []
    for worker, (top, rows) in enumerate(((12, "6 rows"), (192, "5 rows"))):
        parts += [label(0, top + 18, f"worker {worker}", "b"), label(0, top + 37, rows)]
        parts.append(box(84, top, 112, 46, "forward", f"r{worker}"))
        parts.append(box(200, top, 256, 46, "backward", f"r{worker}"))
        parts.append(box(460, top, 156, 46, "waits for sums"))
        parts.append(box(620, top, 100, 46, "update", f"r{worker}"))
    middles = (
        (270, 60, ("large", "gradient")),
        (340, 60, ("large", "gradient")),
        (466, 146, ("small gradients,", "buffers, mark")),
    )
    for left, width, words in middles:
        parts.append(box(left, 98, width, 54, kind="r2"))
        parts += [
            label(left + width // 2, 121 + 18 * line, word, "m s")
            for line, word in enumerate(words)
        ]
        to_sum, to_worker = left + width // 2 - 8, left + width // 2 + 8
        parts += [arrow(to_sum, 62, to_sum, 94), arrow(to_worker, 94, to_worker, 62)]
        parts += [
            arrow(to_sum, 188, to_sum, 156),
            arrow(to_worker, 156, to_worker, 188),
        ]
    parts += [label(0, 130, "sums"), arrow(84, 262, 720, 262), label(84, 284, "time")]
    parts.append(
        label(560, 284, "backward returns: .grad is that of all 11 rows", "m s")
    )
    about = (
        "Two workers run forward and backward of their own rows. Large gradients are "
        "added up during backward, and all else in one pack when it ends. Then both "
        "make the same update."
    )
    return "What two workers of one replica each exchange in a step", about, 294, parts


def traffic() -> tuple[str, str, int, list[str]]:
    parts = []
    sides = (
        (
            0,
            "torch.nn.DataParallel",
            (("the module", 1), ("rows", 1), ("outputs", -1), ("gradients", -1)),
        ),
        (376, "a strategy", (("rows", 1), ("gradients", -1), ("parameters", 1))),
    )
    for left, name, moves in sides:
        parts += [label(left + 182, 20, name, "m b")]
        parts += [
            box(left, 36, 96, 190, kind="r0"),
            box(left + 268, 36, 96, 190, kind="r1"),
        ]
        parts += [
            label(left + 48, 60, "device 0", "m"),
            label(left + 316, 60, "device 1", "m"),
        ]
        for number, (what, way) in enumerate(moves):
            y = 92 + 36 * number
            ends = (left + 102, left + 262)[::way]
            parts += [
                label(left + 182, y - 6, what, "m s"),
                arrow(ends[0], y, ends[1], y),
            ]
    parts.append(label(182, 252, "the loss is computed on device 0 alone", "m s"))
    parts.append(label(558, 252, "each device computes the loss of its rows", "m s"))
    about = (
        "DataParallel copies the module, rows, outputs and gradients. A strategy "
        "copies rows, gradients and parameters."
    )
    return "What moves between devices in a step", about, 264, parts


def turns() -> tuple[str, str, int, list[str]]:
    parts = [label(0, 33 + 40 * replica, f"replica {replica}") for replica in range(4)]
    for replica in range(4):
        parts.append(
            box(84 + 100 * replica, 12 + 40 * replica, 98, 32, "step", f"r{replica}")
        )
        parts.append(
            box(576 + 30 * replica, 12 + 40 * replica, 28, 32, "", f"r{replica}")
        )
    parts += [
        box(486, 12, 88, 152, kind="box"),
        label(530, 84, "one", "m s"),
        label(530, 102, "update", "m s"),
    ]
    parts += [
        arrow(84, 186, 720, 186),
        label(84, 208, "time, on one CPU"),
        label(530, 208, "optimizer.step()", "m s"),
    ]
    about = (
        "Each replica runs its step up to optimizer.step(), one after the other. Then "
        "there is one update."
    )
    return "Replicas on one device run one after the other", about, 218, parts


def prefetch() -> tuple[str, str, int, list[str]]:
    parts = [label(0, 33, "without"), label(0, 113, "load_ahead")]
    for number in range(3):
        parts.append(box(104 + 200 * number, 12, 78, 32, f"load {number}", "r1"))
        parts.append(box(184 + 200 * number, 12, 118, 32, f"step {number}", "r0"))
        parts.append(
            box(104 + (0, 80, 200)[number], 92, 78, 32, f"load {number}", "r1")
        )
        parts.append(box(184 + 120 * number, 132, 118, 32, f"step {number}", "r0"))
    parts += [arrow(104, 186, 716, 186), label(104, 208, "time")]
    about = (
        "Without load_ahead, each step waits until its batch is loaded. With it, it is "
        "loaded during the step before."
    )
    return "The next batch is loaded during the step", about, 218, parts


def boundary() -> tuple[str, str, int, list[str]]:
    parts = [box(0, 12, 330, 140, kind="r0"), box(390, 12, 330, 140, kind="r1")]
    parts += [label(165, 36, "sim:0", "m b"), label(555, 36, "sim:1", "m b")]
    parts += [box(20, 52, 120, 32, "weight"), box(410, 52, 120, 32, "inputs")]
    parts += ['<path class="wall" d="M360 4v190"/>', arrow(404, 68, 146, 68)]
    parts += [label(165, 122, "weight * inputs.to(&quot;sim:0&quot;) works", "m s")]
    parts += [label(555, 122, "weight * inputs raises an error", "m s")]
    parts += [label(360, 214, "torch refuses to mix tensors of two devices", "m s")]
    about = (
        "A product of tensors of two simulated devices raises an error. After a copy "
        "to one device, it works."
    )
    return "A tensor has to be moved over the boundary of a device", about, 222, parts


def drawings() -> dict[str, str]:
    """The text of each file."""
    texts = {}
    for draw in (owners, exchange, traffic, turns, prefetch, boundary):
        name = draw.__name__
        title, about, height, parts = draw()
        ids = f'aria-labelledby="{name}-title {name}-desc"'
        head = (
            '<svg class="pic" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 '
            f'{height}" role="img" {ids}>'
        )
        words = (
            f'<title id="{name}-title">{title}</title>\n<desc '
            f'id="{name}-desc">{about}</desc>'
        )
        texts[f"{name}.svg"] = "\n".join([head, words, STYLE, *parts, "</svg>"]) + "\n"
    return texts


if __name__ == "__main__":
    for name, text in drawings().items():
        (FOLDER / name).write_text(text)
