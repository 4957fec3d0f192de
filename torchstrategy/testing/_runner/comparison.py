"""Two reports of a program, of which one is earlier: what is different."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchstrategy.testing._virtual_time.report import in_words

_SAME = 0.005  # the part of a number below which a difference is none


def earlier_report(file: Path) -> dict[str, Any]:
    """The numbers of an earlier report.

    Raises:
        ValueError: If there are none in the file.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--compare {file}: {error}. Name a file that --json has written."
        ) from None
    if not isinstance(found, dict) or not {"program", "routes", "peak_bytes"} <= set(
        found
    ):
        raise ValueError(
            f"--compare {file}: this is not a report. Name a file that --json has "
            "written."
        )
    return found


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], name: str
) -> list[str]:
    """A line for each number that is different, and each finding that is new or gone.

    Races count as findings here.

    Args:
        before: The numbers of the earlier report.
        after: Those of the later one.
        name: What the earlier one is called.
    """
    numbers, others = _numbers(before), _numbers(after)
    lines = []
    for what, (value, said) in numbers.items():
        if what in others and abs(others[what][0] - value) > _SAME * max(
            abs(value), abs(others[what][0])
        ):
            lines.append(
                f"  {what}: {said(value)} -> "
                f"{said(others[what][0])}{_percent(value, others[what][0])}"
            )
    for kind, was, now in (
        ("finding", _findings(before), _findings(after)),
        ("race", before.get("races", []), after.get("races", [])),
    ):
        lines += [f"  a {kind} is gone: {one}" for one in was if one not in now]
        lines += [f"  a {kind} is new: {one}" for one in now if one not in was]
    profiles = [
        (report.get("predicted") or {}).get("profile") for report in (before, after)
    ]
    if profiles[0] != profiles[1]:
        lines.insert(
            0,
            f"  predicted for: {profiles[0] or 'no GPU'} -> {profiles[1] or 'no GPU'}",
        )
    head = f"Compared with {name}, {before['program']}"
    return [f"{head}: no difference"] if not lines else [head, *lines]


_Said = Callable[[float], str]


def _numbers(report: Mapping[str, Any]) -> dict[str, tuple[float, _Said]]:
    """What is compared, by what it is called, with how it is said."""
    found: dict[str, tuple[float, _Said]] = {
        "exit status": (report["status"], _count),
        "steps": (report["steps"], _count),
    }
    found |= {
        what: (value, said)
        for what, value, said in _times(report.get("predicted") or {})
    }
    steps = max(1, report["steps"])
    waits = sum(one["times"] for one in report.get("synchronizations", []))
    found["waits a step"] = waits / steps, _count
    found["blocking copies a step"] = (
        sum(report.get("blocking_copies", {}).values()) / steps,
        _count,
    )
    for route in report["routes"]:
        found[f"bytes {route['from']} -> {route['to']} a step"] = (
            route["bytes"] / steps,
            _bytes,
        )
    for device, size in report["peak_bytes"].items():
        found[f"peak memory of {device}"] = size, _bytes
    for kind, about in (report.get("collectives") or {}).items():
        found[f"{kind}, calls"] = about["calls"], _count
        found[f"{kind}, bytes"] = about["bytes"], _bytes
    return found


def _times(predicted: Mapping[str, Any]) -> Iterator[tuple[str, float, _Said]]:
    if predicted:
        yield "all", predicted["seconds"], in_words
    step = predicted.get("typical_step")
    if not step:
        return
    yield "set-up", predicted["set_up"], in_words
    yield "a step", step["seconds"], in_words
    for device, about in step["devices"].items():
        for name, words in _OF_A_STEP.items():
            yield f"{device}, {words} a step", about[name], in_words
        yield f"{device}, MFU", about["mfu"], "{:.1%}".format
    yield "waits while a device is idle, a step", step["waits_while_idle"], in_words
    yield "waits while it computes, a step", step["waits_while_busy"], in_words


_OF_A_STEP = {
    "computes": "computing",
    "copies": "copying",
    "exposed": "collectives that nothing hides",
    "idle": "idle",
}


def _findings(report: Mapping[str, Any]) -> list[str]:
    return [
        f"{one['name']} ({', '.join(one['lines'])})"
        for one in report.get("findings", [])
    ]


def _percent(before: float, after: float) -> str:
    return f" ({(after - before) / before:+.0%})" if before else ""


def _count(value: float) -> str:
    return f"{value:g}" if float(value).is_integer() else f"{value:.1f}"


def _bytes(size: float) -> str:
    return f"{size:,.0f} bytes" if size < 10_000 else f"{size / 2**20:,.2f} MiB"
