"""One tensor of each sample on another device than the rest.

It has to be an error that says so, or the CPU's numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sweep.agreement import Raised, Trial, Verdict, compared, observed
from sweep.copies import CPU, copied, tensors
from sweep.operators import UNFILLED, arguments, call, dtype_of, samples


class Answer(enum.Enum):
    """What an operator does with tensors of two devices."""

    NAMED = "refused, in words that name the device"
    REFUSED = "refused otherwise"
    TAKEN = "taken, and the CPU's numbers"
    WRONG = "taken, and other numbers"


class Mixture(NamedTuple):
    """What came of one tensor elsewhere."""

    name: str
    answer: Answer
    said: str


def mixtures(
    name: str, count: int, device: torch.device, elsewhere: torch.device
) -> Iterator[Mixture]:
    """Each tensor of the first samples of an operator, elsewhere.

    Samples that the CPU refuses do not count, nor does a single number on the CPU,
    which accelerators take.
    """
    dtype = dtype_of(name, torch.float32)
    if dtype is None or name in UNFILLED:
        return
    for number, sample in enumerate(samples(name, count, dtype)):
        given = tensors(arguments(sample))
        wanted = observed(_trial(name, sample), CPU)
        if len(given) < 2 or isinstance(wanted, Raised):
            continue
        for position, tensor in enumerate(given):
            if elsewhere == CPU and not tensor.dim():
                continue
            found = observed(_trial(name, sample, (tensor, elsewhere)), device)
            yield Mixture(
                f"sample {number}, tensor {position} on {elsewhere}",
                *_answer(wanted, found),
            )


def _trial(
    name: str, sample: Any, stray: tuple[torch.Tensor, torch.device] | None = None
) -> Trial:
    def run(device: torch.device) -> Any:
        first, args, kwargs = copied(arguments(sample), device, stray)
        return call(name)(first, *args, **kwargs)

    return Trial(name, run)


def _answer(wanted: Any, found: Any) -> tuple[Answer, str]:
    if isinstance(found, Raised):
        said = f"{type(found.error).__name__}: {found.error}"
        return (Answer.NAMED if "device" in said else Answer.REFUSED), said
    verdict, difference = compared(wanted, found, None)
    return (Answer.WRONG if verdict is Verdict.DIFFERENT else Answer.TAKEN), difference
