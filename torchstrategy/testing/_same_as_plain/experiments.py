"""The problem with one thing changed, trained again.

The result shows whether that thing made the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from torchstrategy._base.tree import map_leaves, tree_flatten
from torchstrategy._base.types import Tree
from torchstrategy.nn import SyncBatchNorm
from torchstrategy.strategies import OneDeviceStrategy, get_strategy
from torchstrategy.testing._same_as_plain.comparison import (
    Mismatch,
    first_mismatch,
    first_plain_record,
)
from torchstrategy.testing._same_as_plain.difference import SECTIONS, Tolerance
from torchstrategy.testing._same_as_plain.record import Numbers, Record, joined
from torchstrategy.testing._same_as_plain.row_statistics import Place, RowStatistics
from torchstrategy.testing._same_as_plain.training import Problem

# The base classes of such layers, whose own names are private.
_DROPOUT = nn.Dropout.__mro__[1]
_BATCH_NORMALISATION = nn.BatchNorm1d.__mro__[1]
_CLOSE = 1e-3  # of one ratio for all gradients
_MOST_PLACES = 6  # lines that are tried
# Units of rounding in which two results may differ after one step, relative to the
# largest.
_MANY_ROUNDINGS = 4096
_MOST_ROUNDED = 0.1  # for a dtype with few digits
_ROUNDED_IN_MIXED = 0.06  # eight units of bfloat16


def agrees(problem: Problem) -> bool:
    """Whether the trainings of a problem agree.

    If they raise, the answer is no: a failure proves nothing.
    """
    try:
        return first_mismatch(problem) is None
    except Exception:
        return False


def differs(problem: Problem) -> bool:
    """Whether the trainings of a problem differ. If they raise, the answer is no."""
    return mismatch_of(problem) is not None


def mismatch_of(problem: Problem) -> Mismatch | None:
    """Where a problem's trainings differ; None if they agree, and if they raise."""
    try:
        return first_mismatch(problem)
    except Exception:
        return None


def in_plain(problem: Problem) -> Problem:
    """The problem with one replica, which is plain PyTorch a second time."""
    alone = (
        get_strategy() if problem.device is None else OneDeviceStrategy(problem.device)
    )
    return dataclasses.replace(problem, strategy=alone, options=None)


def edited(problem: Problem, edit: Callable[[nn.Module], object]) -> Problem:
    """The problem with `edit` called for each module of the models."""

    def model_fn() -> Tree:
        models = problem.model_fn()
        for model in tree_flatten(models)[0]:
            for module in model.modules():
                edit(module)
        return models

    return dataclasses.replace(problem, model_fn=model_fn)


def in_double(problem: Problem) -> Problem:
    """The problem in float64, with the tolerances of float64."""

    def leaf(value: Tree) -> Tree:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.double()
        is_floating = isinstance(value, np.ndarray) and value.dtype.kind == "f"
        return value.astype(np.float64) if is_floating else value

    batches = tuple(map_leaves(leaf, batch) for batch in problem.batches)
    return dataclasses.replace(
        edited(problem, nn.Module.double), batches=batches, tolerance=Tolerance()
    )


def drops(module: nn.Module) -> bool:
    """Whether a module is a dropout layer that drops anything now."""
    return isinstance(module, _DROPOUT) and module.training and bool(module.p)


def drop_nothing(module: nn.Module) -> None:
    """Makes a dropout layer drop nothing."""
    if isinstance(module, _DROPOUT):
        vars(module)["p"] = 0.0


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a module normalises each row by statistics of the rows of the replica."""
    # A layer of `torchstrategy.nn.SyncBatchNorm` takes them over the rows of all
    # replicas, as one device does.
    is_of_own_rows = isinstance(module, _BATCH_NORMALISATION) and not isinstance(
        module, SyncBatchNorm
    )
    return is_of_own_rows and (module.training or not module.track_running_stats)


def pass_through(module: nn.Module) -> None:
    """Makes a layer that uses statistics of the batch return its inputs."""
    # Not by `eval()`: the step may call `model.train()`.
    if uses_batch_statistics(module):
        module.forward = lambda inputs: inputs


def repeated(batch: Tree, times: int) -> Tree:
    """A batch with all its rows several times."""

    def leaf(value: Tree) -> Tree:
        if isinstance(value, torch.Tensor) and value.dim():
            return torch.cat([value] * times)
        return (
            np.concatenate([value] * times)
            if isinstance(value, np.ndarray) and value.ndim
            else value
        )

    return map_leaves(leaf, batch)


def grows_with_rows(problem: Problem) -> bool:
    """Whether plain PyTorch's gradient doubles when every row is there twice."""
    twice = dataclasses.replace(problem, batches=(repeated(problem.batches[0], 2),))
    try:
        ratio = ratio_of(
            *(first_gradients(first_plain_record(p)) for p in (twice, problem))
        )
    except Exception:
        return False
    return ratio is not None and abs(ratio - 2) < 10 * _CLOSE


def first_gradients(record: Record) -> Numbers:
    """The gradients of the first update, or after the step if there is no update."""
    return record.updates[0] if record.updates else record.gradients


def ratio_of(ours: Numbers, theirs: Numbers) -> float | None:
    """The one factor by which all gradients differ; None if there is none."""
    pairs = [
        (ours.get(name), their) for name, their in theirs.items() if their is not None
    ]
    tensors = [
        (our.double().flatten(), their.double().flatten())
        for our, their in pairs
        if our is not None
    ]
    if (
        not tensors
        or len(tensors) < len(pairs)
        or any(our.shape != their.shape for our, their in tensors)
    ):
        return None
    one, two = (torch.cat(column) for column in zip(*tensors, strict=True))
    ratio = float(one @ two / (two @ two).clamp_min(torch.finfo(torch.double).tiny))
    return (
        ratio
        if float((one - ratio * two).norm()) <= _CLOSE * float(one.norm())
        else None
    )


def synchronized_statistics(models: Sequence[nn.Module]) -> set[str]:
    """The names of running statistics that layers take over all replicas' rows."""
    return {
        joined(name, buffer)
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, SyncBatchNorm)
        for buffer, _ in module.named_buffers(recurse=False)
    }


def is_like_rounding(mismatch: Mismatch, words: set[str]) -> bool:
    """Whether everything that differs differs by no more than rounding can make of it.

    Args:
        mismatch: What differs.
        words: The names that the step uses. With autocast a step rounds to fewer digits
            than its tensors have.
    """
    is_mixed = "autocast" in words or torch.get_float32_matmul_precision() != "highest"
    largest: dict[str, float] = {}
    for difference in mismatch.differences:
        if difference.pair.expected is not None:
            norm = float(difference.pair.expected.double().norm())
            largest[difference.pair.section] = max(
                largest.get(difference.pair.section, 0.0), norm
            )
    for difference in mismatch.differences:
        got, expected = difference.pair.got, difference.pair.expected
        if (
            got is None
            or expected is None
            or got.shape != expected.shape
            or not expected.is_floating_point()
        ):
            return False
        eps = max(
            torch.finfo(got.dtype).eps if got.is_floating_point() else 0.0,
            torch.finfo(expected.dtype).eps,
        )
        part = min(_MANY_ROUNDINGS * eps, _MOST_ROUNDED)
        part = max(part, _ROUNDED_IN_MIXED) if is_mixed else part
        error = float((got.double() - expected.double()).norm())
        if not error <= part * (mismatch.step + 1) * (
            largest[difference.pair.section] or 1.0
        ):
            return False
    return True


def places_that_matter(problem: Problem, mismatch: Mismatch) -> list[Place]:
    """The lines where replicas reduce rows to a number, and which make the difference.

    Replicas are given the numbers of plain PyTorch there. Where gradients flow through
    such a number, it is not enough to exchange the number, so the losses that the step
    returns have to tell.
    """
    noted = RowStatistics()
    mismatch_of(_with_only(problem, noted, problem.ignore))
    differing = noted.differing()
    without_gradient = [
        place for place, needs_gradient in differing.items() if not needs_gradient
    ][:_MOST_PLACES]
    with_gradient = [
        place for place, needs_gradient in differing.items() if needs_gradient
    ][:_MOST_PLACES]

    def helps(places: Sequence[Place], ignore: frozenset[str]) -> bool:
        given = RowStatistics(noted.plain, frozenset(places))
        return agrees(_with_only(problem, given, ignore))

    for place in without_gradient:
        if helps([place], problem.ignore):
            return [place]
    sections = {difference.pair.section for difference in mismatch.differences}
    if "losses" in sections:
        for place in with_gradient:
            if helps([place], frozenset(SECTIONS) - {"losses"}):
                return [place]
    # Two lines may matter together, as those of a mean and a standard deviation. What
    # is returned is left out: a number that the step returns for its rows only is not
    # to be that of the batch.
    ignore = problem.ignore | {"losses"}
    if (
        len(without_gradient) < 2
        or sections == {"losses"}
        or not helps(without_gradient, ignore)
    ):
        return []
    needed = list(without_gradient)
    for place in without_gradient:
        others = [other for other in needed if other != place]
        if others and helps(others, ignore):
            needed = others
    return needed


def _with_only(
    problem: Problem, statistics: RowStatistics, ignore: frozenset[str]
) -> Problem:
    return dataclasses.replace(
        problem, row_statistics=statistics, ignore=ignore | {"order"}
    )
