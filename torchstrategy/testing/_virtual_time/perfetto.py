"""A stretch of virtual time as a file for Perfetto and `chrome://tracing`.

Perfetto is at https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
from typing import Any

from torchstrategy.testing._virtual_time.report import HEAD
from torchstrategy.testing._virtual_time.spans import CpuWork, Span, Synchronization
from torchstrategy.testing._virtual_time.timeline import Timeline


def perfetto(timeline: Timeline) -> str:
    """The file: JSON in Chrome's trace event format, in microseconds."""
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {}
    for thread, (lane, things) in enumerate(timeline.lanes()):
        process, _, name = lane.partition(", ")
        number = processes.setdefault(process, len(processes))
        place = {"pid": number, "tid": thread}
        events += [
            {"ph": "M", "name": "process_name", **place, "args": {"name": process}},
            {
                "ph": "M",
                "name": "thread_name",
                **place,
                "args": {"name": name or "program"},
            },
        ]
        events += [{**_event(thing), **place} for thing in things]
    about = {"profile": timeline.profile.name, "note": HEAD}
    return json.dumps(
        {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}, indent=0
    )


def _event(thing: Span | Synchronization | CpuWork) -> dict[str, Any]:
    if isinstance(thing, Synchronization):
        name, kind, end, about = (
            thing.why,
            "wait",
            thing.start + thing.seconds,
            {"line": thing.where},
        )
    elif isinstance(thing, CpuWork):
        name, kind, end, about = (
            thing.name,
            "cpu",
            thing.end,
            {"line": thing.where, "bytes": str(thing.bytes)},
        )
    else:
        name, kind, end = thing.name, thing.kind, thing.end
        about = {
            "line": thing.where,
            "function": thing.users_function,
            "phase": thing.phase,
        }
        about |= {"bytes": str(thing.bytes), "flops": str(thing.flops)}
    times = {
        "ts": round(thing.start * 1e6, 3),
        "dur": round((end - thing.start) * 1e6, 3),
    }
    return {"ph": "X", "name": name, "cat": kind, **times, "args": about}
