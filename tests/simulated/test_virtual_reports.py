"""What virtual time writes: pictures, files for Perfetto, and reports.

Messages of limits are tested, too.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from torchstrategy.testing import (
    DeviceProfile,
    VirtualTrace,
    simulated_devices,
    virtual_time,
)
from torchstrategy.testing._virtual_time.limits import Limits

SIM = simulated_devices()
H100 = DeviceProfile.named("H100-SXM")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def trace() -> VirtualTrace:
    """Two steps: a batch comes in, is computed with, and a number of it is read.

    It comes from memory that is not pinned.
    """
    x = torch.zeros(512, 512, device=SIM[0])
    batch, pinned = torch.ones(512, 512), torch.ones(512, 512).pin_memory()
    side = torch.Stream(device=SIM[0])
    with virtual_time(H100) as trace:
        trace.mark("setup")
        x.copy_(pinned)
        for _ in range(2):
            trace.mark()
            x.copy_(batch)
            with side:
                y = pinned.to(SIM[0], non_blocking=True)
            torch.accelerator.current_stream(SIM[0]).wait_stream(side)
            ((x @ x) * y).sum().item()
            x.to(SIM[1])
    return trace


def bars(picture: ElementTree.Element) -> list[ElementTree.Element]:
    return [
        rect
        for rect in picture.iter(f"{SVG}rect")
        if "bar" in rect.get("class", "").split()
    ]


def test_a_picture_has_a_lane_for_everything_and_says_what_each_bar_is(
    trace: VirtualTrace, tmp_path: Path
) -> None:
    trace.save(tmp_path / "timeline.svg")
    picture = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    lanes = [
        "host",
        "sim:0, stream 0",
        "sim:0, copies in",
        "sim:0, copies out",
        "sim:0, copies to sim:1",
    ]
    assert [text for text in texts if text in lanes] == lanes
    assert texts[:2] == [
        texts[0],
        "Figures of a model, +-30 %; not measured.",
    ] and texts[0].startswith("H100-SXM: ")
    titles = [bar.findtext(f"{SVG}title") or "" for bar in bars(picture)]
    assert any(
        re.fullmatch(
            r"mm, [\d.]+ us, 3,145,728 bytes, test_virtual_reports\.py:\d+", title
        )
        for title in titles
    )
    assert any(
        title.startswith("waits: a copy to sim:0 from memory that is not pinned, ")
        for title in titles
    )


def test_bars_are_where_their_time_is_and_inside(
    trace: VirtualTrace, tmp_path: Path
) -> None:
    trace.save(tmp_path / "timeline.svg")
    picture = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    inner = 960 - 2 * 16
    products = [
        bar
        for bar in bars(picture)
        if (bar.findtext(f"{SVG}title") or "").startswith("mm,")
    ]
    spans = [span for span in trace._clock.spans if span.name == "mm"]
    for bar, span in zip(products, spans, strict=True):
        assert float(bar.get("x", "")) == pytest.approx(
            16 + span.start / trace.seconds * inner, abs=0.01
        )
        assert float(bar.get("width", "")) == pytest.approx(
            span.seconds / trace.seconds * inner, abs=0.01
        )
    assert all(16 <= float(bar.get("x", "")) <= 960 - 15 for bar in bars(picture))


def test_a_picture_is_readable_in_light_and_dark_on_paper_and_on_a_phone(
    trace: VirtualTrace, tmp_path: Path
) -> None:
    trace.save(tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    for medium in ("(prefers-color-scheme: dark)", "print", "(max-width: 600px)"):
        assert f"@media {medium}" in text
    light = colors(text.partition("@media")[0])
    dark = {
        **light,
        **colors(
            text.partition("(prefers-color-scheme: dark)")[2].partition("@media")[0]
        ),
    }
    for shown, ground in ((light, "#ffffff"), (dark, "#0d1117")):
        assert (
            contrast(shown["text"], ground) > 7
            and contrast(shown[".dim"], ground) > 4.5
        )
        for kind in (".compute", ".copy", ".wait", ".cpu"):
            assert contrast(shown[kind], shown[".ground"]) > 2.5, kind


def colors(style: str) -> dict[str, str]:
    return dict(re.findall(r"^ *([.\w]+) \{.*?fill: (#\w{6})", style, re.MULTILINE))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_many_small_operators_are_few_bars(tmp_path: Path) -> None:
    x = torch.zeros(10, device=SIM[0])
    with virtual_time(H100) as trace:
        for _ in range(5000):
            x.add_(1)
    trace.save(tmp_path / "timeline.svg")
    all_bars = bars(ElementTree.parse(tmp_path / "timeline.svg").getroot())
    assert len(all_bars) < 4000
    drawn = [bar for bar in all_bars if bar.get("class") == "bar compute"]
    counts = [
        re.match(r"(\d+) in a row", bar.findtext(f"{SVG}title") or "") for bar in drawn
    ]
    assert sum(int(count[1]) if count else 1 for count in counts) == 5000


def test_a_file_for_perfetto_has_all_times_in_microseconds(
    trace: VirtualTrace, tmp_path: Path
) -> None:
    trace.save(tmp_path / "trace.json")
    file = json.loads((tmp_path / "trace.json").read_text())
    assert file["otherData"] == {
        "profile": "H100-SXM",
        "note": "Figures of a model, +-30 %; not measured.",
    }
    events = [event for event in file["traceEvents"] if event["ph"] == "X"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in file["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert sorted(names.values()) == [
        "copies in",
        "copies out",
        "copies to sim:1",
        "program",
        "stream 0",
    ]
    processes = {
        e["pid"]: e["args"]["name"]
        for e in file["traceEvents"]
        if e["name"] == "process_name"
    }
    assert sorted(processes.values()) == ["host", "sim:0"]
    product = next(event for event in events if event["name"] == "mm")
    span = next(span for span in trace._clock.spans if span.name == "mm")
    assert (product["ts"], product["dur"]) == (
        round(span.start * 1e6, 3),
        round(span.seconds * 1e6, 3),
    )
    assert names[product["pid"], product["tid"]] == "stream 0" and product["args"][
        "flops"
    ] == str(2 * 512**3)
    work = len(trace._clock.spans) + len(trace._clock.cpu_work)
    assert len(events) == work + sum(
        wait.seconds > 0 for wait in trace.synchronizations
    )


def test_another_name_is_refused(trace: VirtualTrace, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the name has to end in \.svg, for a picture, or in \.json"
    ):
        trace.save(tmp_path / "timeline.png")


def test_a_report_names_the_longest_waits_with_their_lines_and_what_to_do(
    trace: VirtualTrace,
) -> None:
    lines = trace.report().splitlines()
    assert lines[0] == "Figures of a model, +-30 %; not measured."
    assert re.fullmatch(r"H100-SXM: [\d.]+ (us|ms), \d+ operators", lines[1])
    assert re.match(
        r"  sim:0: computes \d+% of the time, MFU [\d.]+%, at most 0\.00 GiB, ",
        lines[2],
    )
    assert "  cpu->sim:0: 5.2 MB in 5 copies, 3 of which the program waits for" in lines
    first = next(line for line in lines if "not pinned" in line)
    assert re.search(
        r"us at test_virtual_reports\.py:\d+, in 2 waits: a copy to sim:0 from memory "
        r"that is not",
        first,
    )
    assert (
        lines[lines.index(first) + 1]
        == "      Pin it once (tensor.pin_memory()), and copy with non_blocking=True."
    )
    assert lines.index(first) < lines.index(
        next(line for line in lines if "reads a number" in line)
    )
    assert trace.report() in repr(trace)


def test_a_program_that_never_waits_is_told_so() -> None:
    x = torch.zeros(10, device=SIM[0])
    with virtual_time(H100) as trace:
        x.add_(1)
    assert trace.report().splitlines()[-1] == "  the program never waits"


# Limits


def message(limits: Limits, trace: VirtualTrace) -> str:
    broken = limits.broken(trace)
    assert broken
    return broken


def test_limits_that_hold_say_nothing(trace: VirtualTrace) -> None:
    assert Limits().broken(trace) == ""
    assert (
        Limits(max_seconds=1, max_syncs=5, min_overlap=0.0, max_bytes=2**30).broken(
            trace
        )
        == ""
    )


def test_a_broken_limit_is_named_with_its_figures(trace: VirtualTrace) -> None:
    assert re.match(
        r"It takes [\d.]+ us, and may take 1\.0 us \(max_seconds\)\.",
        message(Limits(max_seconds=1e-6), trace),
    )
    waits = message(Limits(max_syncs=3), trace)
    assert waits.startswith(
        "The program waits for a device 5 times, and may wait 3 times (max_syncs):\n"
    )
    assert re.search(
        r"\n  2 times at test_virtual_reports\.py:\d+: a copy to sim:0 from memory "
        r"that is",
        waits,
    )
    overlap = message(Limits(min_overlap=0.9), trace)
    assert re.match(
        r"\d+% of the copying is done while the device computes, and 90% has to be",
        overlap,
    )
    assert "bytes, and may hold 10 (max_bytes)." in message(Limits(max_bytes=10), trace)
    assert trace.report().splitlines()[0] in overlap


def test_limits_hold_from_the_first_mark_on() -> None:
    x = torch.zeros(10, device=SIM[0])
    with virtual_time(H100) as trace:
        x.sum().item()
        trace.mark()
        x.sum().item()
    assert Limits(max_syncs=1).broken(trace) == ""
    assert "1 time, and may wait 0 times" in message(Limits(max_syncs=0), trace)
