"""The problem with one thing changed, trained again to see whether that thing made the difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from torchstrategy._base.tree import map_leaves, tree_flatten
from torchstrategy._base.types import Tree
from torchstrategy.strategies import OneDeviceStrategy, get_strategy
from torchstrategy.testing._same_as_plain.comparison import Mismatch, first_mismatch, first_plain_record
from torchstrategy.testing._same_as_plain.difference import Tolerance
from torchstrategy.testing._same_as_plain.record import Numbers, Record
from torchstrategy.testing._same_as_plain.training import Problem

_DROPOUT = nn.Dropout.__mro__[1]  # the base classes of such layers, whose own names are private
_BATCH_NORMALISATION = nn.BatchNorm1d.__mro__[1]
_CLOSE = 1e-3  # of one ratio for all gradients


def agrees(problem: Problem) -> bool:
    """Whether the trainings of a problem agree. If they raise, the answer is no: a failure proves nothing."""
    try:
        return first_mismatch(problem) is None
    except Exception:
        return False


def differs(problem: Problem) -> bool:
    """Whether the trainings of a problem differ. If they raise, the answer is no."""
    return mismatch_of(problem) is not None


def mismatch_of(problem: Problem) -> Mismatch | None:
    """Where the trainings of a problem differ; None if they agree, and if they raise."""
    try:
        return first_mismatch(problem)
    except Exception:
        return None


def in_plain(problem: Problem) -> Problem:
    """The problem with one replica, which is plain PyTorch a second time."""
    alone = get_strategy() if problem.device is None else OneDeviceStrategy(problem.device)
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
    return dataclasses.replace(edited(problem, nn.Module.double), batches=batches, tolerance=Tolerance())


def drops(module: nn.Module) -> bool:
    """Whether a module is a dropout layer that drops anything now."""
    return isinstance(module, _DROPOUT) and module.training and bool(module.p)


def drop_nothing(module: nn.Module) -> None:
    """Makes a dropout layer drop nothing."""
    if isinstance(module, _DROPOUT):
        vars(module)["p"] = 0.0


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a module normalises each row by statistics of all rows of the batch."""
    return isinstance(module, _BATCH_NORMALISATION) and (module.training or not module.track_running_stats)


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
        return np.concatenate([value] * times) if isinstance(value, np.ndarray) and value.ndim else value

    return map_leaves(leaf, batch)


def grows_with_rows(problem: Problem) -> bool:
    """Whether plain PyTorch's gradient is twice as large when every row is there twice."""
    twice = dataclasses.replace(problem, batches=(repeated(problem.batches[0], 2),))
    try:
        ratio = ratio_of(*(first_gradients(first_plain_record(p)) for p in (twice, problem)))
    except Exception:
        return False
    return ratio is not None and abs(ratio - 2) < 10 * _CLOSE


def first_gradients(record: Record) -> Numbers:
    """The gradients of the first update, or those after the step if it makes no update."""
    return record.updates[0] if record.updates else record.gradients


def ratio_of(ours: Numbers, theirs: Numbers) -> float | None:
    """The one factor by which all gradients differ; None if there is none."""
    pairs = [(ours.get(name), their) for name, their in theirs.items() if their is not None]
    tensors = [(our.double().flatten(), their.double().flatten()) for our, their in pairs if our is not None]
    if not tensors or len(tensors) < len(pairs) or any(our.shape != their.shape for our, their in tensors):
        return None
    one, two = (torch.cat(column) for column in zip(*tensors, strict=True))
    ratio = float(one @ two / (two @ two).clamp_min(torch.finfo(torch.double).tiny))
    return ratio if float((one - ratio * two).norm()) <= _CLOSE * float(one.norm()) else None
