"""A shorter program with the same fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .actions import OnSideStream
from .layers import Hooked, Keeping, Layer, Linear, Nested, Wrapped
from .optimizers import Optimizer
from .programs import Program
from .topologies import Topology
from .trials import Outcome, judged


def shrunk(
    program: Program, outcome: Outcome, most: int = 400
) -> tuple[Program, Outcome]:
    """Takes away what is not needed for an outcome of one kind; `most`: trials."""
    trials = 0
    found = True
    while found:
        found = False
        for smaller in _smaller(program):
            trials += 1
            if trials > most:
                return program, outcome
            new = judged(smaller)
            if (new.verdict, new.kind) == (outcome.verdict, outcome.kind):
                program, outcome, found = smaller, new, True
                break
    return program, outcome


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less, the largest steps first."""
    for name in ("events", "after", "before", "then", "step", "optimizers", "layers"):
        parts = getattr(program, name)
        if len(parts) > 3:
            yield replace(program, **{name: parts[: len(parts) // 2]})
            yield replace(program, **{name: parts[len(parts) // 2 :]})
        for i in reversed(range(len(parts))):
            if len(parts) > 1 or name != "optimizers":
                yield replace(program, **{name: parts[:i] + parts[i + 1 :]})
    yield from _with_fewer_batches(program)
    yield from _with_simpler_parts(program)
    yield from _with_simpler_place(program)


def _with_fewer_batches(program: Program) -> Iterator[Program]:
    batches = program.batches
    for i in range(len(batches)):
        events = tuple((when - (when > i), event) for when, event in program.events)
        yield replace(program, batches=batches[:i] + batches[i + 1 :], events=events)
    for i, rows in enumerate(batches):
        for fewer in (2, 3):
            if fewer < rows:
                yield replace(program, batches=(*batches[:i], fewer, *batches[i + 1 :]))


def _with_simpler_parts(program: Program) -> Iterator[Program]:
    for i, layer in enumerate(program.layers):
        simpler: list[Layer] = (
            [layer.layer] if isinstance(layer, (Wrapped, Hooked, Keeping)) else []
        )
        simpler += layer.layers if isinstance(layer, Nested) else ()
        simpler += [Linear()] if not isinstance(layer, Linear) else []
        for other in simpler:
            yield replace(
                program, layers=(*program.layers[:i], other, *program.layers[i + 1 :])
            )
    for i, optimizer in enumerate(program.optimizers):
        for other in (
            Optimizer(),
            replace(optimizer, scheduler=None, groups=1, foreach=None),
            _whole(optimizer),
        ):
            if other != optimizer:
                yield replace(
                    program,
                    optimizers=(
                        *program.optimizers[:i],
                        other,
                        *program.optimizers[i + 1 :],
                    ),
                )
    for i, action in enumerate(program.step):
        if isinstance(action, OnSideStream):
            yield replace(
                program,
                step=(*program.step[:i], *action.actions, *program.step[i + 1 :]),
            )
            for j in range(len(action.actions)):
                fewer = replace(
                    action, actions=action.actions[:j] + action.actions[j + 1 :]
                )
                yield replace(
                    program, step=(*program.step[:i], fewer, *program.step[i + 1 :])
                )
    if program.then:
        yield replace(program, step=program.step + program.then, then=())
    if program.after:
        yield replace(program, step=program.step + program.after, after=())
    if program.before:
        yield replace(program, step=program.before + program.step, before=())
    simplest: dict[str, object] = {
        "reach": "closure",
        "made_in_scope": True,
        "teacher": False,
        "scaler": False,
    }
    for name, value in {**simplest, "width": 2}.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})  # type: ignore[arg-type]


def _whole(optimizer: Optimizer) -> Optimizer:
    return replace(optimizer, start=0, of=1)


def _with_simpler_place(program: Program) -> Iterator[Program]:
    topology = program.topology
    others: list[Topology] = []
    if len(topology.devices) > 1:
        others.append(replace(topology, devices=topology.devices[:-1]))
    if topology.owner is not None:
        others.append(replace(topology, owner=None))
    cpus = ("cpu",) * len(topology.devices)
    if topology.devices != cpus:
        others.append(Topology(topology.kind, cpus))
    if topology.kind.startswith("mirrored,"):
        others.append(replace(topology, kind="mirrored"))
    if topology.kind.startswith("mirrored"):
        others.append(replace(topology, kind="central"))
    for other in others:
        yield replace(program, topology=other)
