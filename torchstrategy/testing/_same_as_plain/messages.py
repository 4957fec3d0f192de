"""The message of a failed comparison.

It says at which step, what differs, by how much, and why.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

import torch

from torchstrategy._base.devices import memory_device
from torchstrategy._base.errors import described, plural
from torchstrategy._base.types import Device
from torchstrategy.testing._same_as_plain.causes import KEEP_STATE, causes
from torchstrategy.testing._same_as_plain.comparison import Mismatch, StepFailed
from torchstrategy.testing._same_as_plain.device_errors import (
    is_about_devices,
    is_about_synchronization,
    replica_of,
)
from torchstrategy.testing._same_as_plain.experiments import agrees, in_double
from torchstrategy.testing._same_as_plain.held import (
    held_by,
    places_on_the_way,
    words_in,
    words_on_the_way,
)
from torchstrategy.testing._same_as_plain.training import Problem

_WIDTH = 100
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|mtia|hpu|sim)(?::(\d+))?")

_MOVE_TENSOR = (
    "Bring a tensor to its rows, in the step: `weight.to(inputs.device)`. Or make it a "
    "buffer of the model, `register_buffer(...)`, of which each replica has its own. "
    "If it is a moving average of the weights, update it after strategy.run, from your "
    "own model: in the step, each replica would update it."
)
_DRAW_ELSEWHERE = (
    "Draw from torch's default generator, which gives each replica a stream of its own."
)
_NAME_NONE = "Name no device in the step: ask a tensor of the batch, `inputs.device`."


def which(problem: Problem, step: int) -> str:
    """`At step 1 of 3`."""
    return f"At step {step + 1} of {len(problem.batches)}"


def mismatch_text(problem: Problem, mismatch: Mismatch) -> str:
    """The message for two trainings that differ."""
    first, *others = mismatch.differences
    what = "replicas and plain PyTorch disagree"
    if mismatch.is_order:
        what = (
            "the result depends on the order in which the replicas run. In the "
            "opposite order"
        )
    lines = [f"{which(problem, mismatch.step)}, {what}:", f"  {first}"]
    if others:
        by_section = {
            difference.pair.section: difference.pair.name
            for difference in reversed(others)
        }
        examples = ", ".join(reversed(by_section.values()))
        lines.append(
            _filled(f"  {plural(len(others), 'other')} as well, such as {examples}")
        )
    shares = mismatch.replicas.shares
    counts = ", ".join(f"{fraction:.3g}" for fraction in shares.parts)
    lines.append(
        f"  {plural(problem.num_replicas, 'replica')}; the share of each in the batch: "
        f"{counts}"
    )
    found = causes(problem, mismatch) or [
        (
            "not found. Ruled out: random numbers, layers with batch statistics, sum "
            "instead of mean, mutated state. Does the step or the model take a mean or "
            "a standard deviation over rows? In a replica it is that of its own rows: "
            "add up sums and counts with get_replica_context().all_reduce('sum', ...). "
            "Does the loss compare rows with each other, as contrastive losses with "
            "negatives from the batch and ranking losses do? A replica has its own "
            "rows only: bring those of all together with "
            "get_replica_context().all_gather(rows, axis=0), and count labels from "
            "this replica's first row on. If not, look at what the step does with the "
            f"number of rows.{_in_double(problem)}"
        )
    ]
    return "\n".join([*lines, *(_filled(f"Cause: {text}") for text in found)])


def _in_double(problem: Problem) -> str:
    """What to add if float64 makes a difference that is not one of rounding."""
    if not agrees(in_double(problem)):
        return ""
    return (
        " In float64 the two agree, but the difference is too large for rounding in "
        "float32: look also for what depends on the dtype, and for steps in a "
        "function, as of a comparison, round or argmax."
    )


def failure_text(problem: Problem, failure: StepFailed) -> str | None:
    """The message for a step that raises in replicas only.

    It is None if the step's own error says it all.
    """
    where = which(problem, failure.step)
    if failure.order is not None:
        return (
            f"{where}, {problem.step_name} raised when the replicas ran in the order "
            f"{failure.order}, and not in their own: {described(failure.error)}\n"
        ) + _filled(
            "Cause: replicas share something that it writes and reads (a list, a "
            f"counter, a cache). {KEEP_STATE}"
        )
    if is_about_synchronization(failure.error):
        return _synchronization_text(problem, where, failure)
    return (
        _devices_text(problem, where, failure)
        if is_about_devices(failure.error)
        else None
    )


def _synchronization_text(problem: Problem, where: str, failure: StepFailed) -> str:
    cause = (
        f"Cause: {problem.step_name} decides by something that is not the same in all "
        "replicas whether, or how often, it comes to a synchronization point: such as "
        "the loss of a replica's own rows, in `if loss < limit: optimizer.step()`, or "
        "the number of its rows. Let all replicas decide by one value: "
        "get_replica_context().all_reduce('mean', loss), or a sum and a count that are "
        "added up so."
    )
    return "\n".join(
        [
            f"{where}, replicas decided differently, and plain PyTorch took the step:",
            _filled(cause),
            *_raised(failure),
        ]
    )


def _raised(failure: StepFailed) -> Iterator[str]:
    """The error in one line, and the lines of the user's code that it came through."""
    yield _filled(f"  {described(failure.error).splitlines()[0]}")
    for place in places_on_the_way(failure.error):
        yield f"    {place}"


def _devices_text(problem: Problem, where: str, failure: StepFailed) -> str:
    replica = replica_of(failure.error)
    device, first_device = (
        memory_device(problem.strategy.extended._device_of(r))
        for r in (replica or 0, 0)
    )
    who = (
        "the step"
        if replica is None
        else f"replica {replica} of {problem.num_replicas} on {device}"
    )
    plain = (
        f"plain PyTorch on {first_device} "
        f"{'did as well' if failure.is_everywhere else 'did not'}"
    )
    found = (
        dict(_held_elsewhere(problem, device))
        or dict(_named_elsewhere(words_on_the_way(failure.error), device))
        or dict(_named_elsewhere([(problem.step_name, words_in(problem.step))], device))
        or {
            (
                f"a tensor was left on another device. {problem.step_name} itself "
                "holds none: look at what its modules and objects keep"
            ): _MOVE_TENSOR
        }
    )
    return "\n".join(
        [
            f"{where}, {who} met another device; {plain}:",
            _filled(
                f"Cause: {'; '.join(found)}. {' '.join(dict.fromkeys(found.values()))}"
            ),
            *_raised(failure),
        ]
    )


def _held_elsewhere(problem: Problem, device: Device) -> Iterator[tuple[str, str]]:
    """The tensors and generators that the step holds and that are not on `device`.

    Each comes with advice on what to do about it.
    """
    for fn in (problem.step, problem.model_fn):
        for name, value in held_by(fn):
            if (
                isinstance(value, torch.Tensor)
                and memory_device(value.device) != device
            ):
                yield f"{name}, is a tensor on {value.device}", _MOVE_TENSOR
            if (
                isinstance(value, torch.Generator)
                and memory_device(value.device) != device
            ):
                yield f"{name}, is a generator of {value.device}", _DRAW_ELSEWHERE


def _named_elsewhere(
    functions: Iterable[tuple[str, set[str]]], device: Device
) -> Iterator[tuple[str, str]]:
    """The devices other than `device` that functions name, each with advice."""
    for function, words in functions:
        for match in filter(None, map(_DEVICE.fullmatch, sorted(words))):
            kind, index = match.groups()
            if kind != device.type or int(index or device.index or 0) != (
                device.index or 0
            ):
                yield f"{function} names the device {match[0]!r}", _NAME_NONE


def _filled(text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
