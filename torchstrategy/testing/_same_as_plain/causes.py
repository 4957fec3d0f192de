"""Why a step in replicas differs from the step in plain PyTorch.

Evidence finds the cause: mostly, the step is trained again with one thing changed.

Each possible cause is looked for in turn. If a cause can be removed (dropout, batch
statistics, how gradients are reduced), it is removed and the trainings are compared
again. If they agree then, it was the cause. If not, the search goes on without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from torchstrategy._base.options import LOSS, NO_OPTIONS, ReduceOp
from torchstrategy.testing._same_as_plain.comparison import Mismatch
from torchstrategy.testing._same_as_plain.difference import SECTIONS
from torchstrategy.testing._same_as_plain.experiments import (
    agrees,
    differs,
    drop_nothing,
    drops,
    edited,
    first_gradients,
    grows_with_rows,
    in_double,
    in_plain,
    is_like_rounding,
    mismatch_of,
    pass_through,
    places_that_matter,
    ratio_of,
    repeated,
    synchronized_statistics,
    uses_batch_statistics,
)
from torchstrategy.testing._same_as_plain.held import words_in
from torchstrategy.testing._same_as_plain.record import Numbers
from torchstrategy.testing._same_as_plain.training import Problem

_SHOWN = 3  # names in a list
_CLOSE = 1e-3  # to a ratio
# What a comparison ignores if only the update matters.
_ONLY_UPDATE = frozenset({*SECTIONS, "order"}) - {"gradients", "parameters"}


KEEP_STATE = (
    "Keep such state in a buffer of the model, or make it in the step. If it is made "
    "from rows, as a mean, a standard deviation or a moving average is, a buffer alone "
    "is not enough: then add up the numbers of all replicas first, with "
    "get_replica_context().all_reduce('sum', ...), so that every replica keeps the "
    "same."
)


class Cause(NamedTuple):
    """A cause that was found.

    Args:
        text: What the cause is, and what to do.
        rest: The problem without this cause, in which to look for others; None: this
            cause explains everything.
        is_proved: Whether another training has shown that the two agree, or differ,
            because of this cause.
    """

    text: str
    rest: Problem | None = None
    is_proved: bool = False


def causes(problem: Problem, mismatch: Mismatch) -> list[str]:
    """The causes of a difference, the proved ones first.

    The list is empty if none of the usual causes applies.
    """
    problem = dataclasses.replace(problem, batches=problem.batches[: mismatch.step + 1])
    found: list[str] = []
    for look in _LOOKS:
        cause = look(problem, mismatch)
        if cause is None:
            continue
        if cause.rest is None:
            return [cause.text, *found] if cause.is_proved else [*found, cause.text]
        found.append(cause.text)
        problem = dataclasses.replace(cause.rest, ignore=problem.ignore | {"order"})
        if agrees(problem):
            return [
                *found[:-1],
                (
                    f"{found[-1]} Without {'it' if len(found) == 1 else 'all of this'} "
                    "the two agree."
                ),
            ]
        mismatch = mismatch_of(problem) or mismatch
    return found or list(_coupled_rows(problem, mismatch))


def _without_replicas(problem: Problem, mismatch: Mismatch) -> Cause | None:
    if not differs(in_plain(problem)):
        return None
    return Cause(
        f"Two trainings in plain PyTorch differ as well: {problem.step_name} keeps "
        "state outside of the model and the optimizer that this check cannot put back "
        "before each training (an iterator, a file, an object of a library), or uses a "
        "generator of random numbers that it cannot seed. All replicas share such "
        f"state. {KEEP_STATE}",
        is_proved=True,
    )


def _rounding(problem: Problem, mismatch: Mismatch) -> Cause | None:
    if not is_like_rounding(mismatch, words_in(problem.step)) or not agrees(
        in_double(problem)
    ):
        return None
    return Cause(
        "Rounding: in float64 the two agree. Replicas add the same numbers in another "
        "order, and a model can make more of that than is usual, most of all with ReLU "
        "and batch norm and after some steps. Compare in float64: model.double() in "
        "model_fn, and batches of that dtype. Or say how much to allow, as in "
        "rtol=1e-3.",
        is_proved=True,
    )


def _shared_generator(problem: Problem, mismatch: Mismatch) -> Cause | None:
    shared = [source.name for source in mismatch.drawn if source.is_shared]
    if not shared or len(mismatch.replicas.seen) == 1:
        return None
    return Cause(
        f"{' and '.join(shared)}, is a generator that all replicas share: what a "
        "replica draws depends on who drew before it, and a generator of one device "
        "cannot be used on another. Draw from torch's default generator, which gives "
        "each replica a stream of its own, or draw before the batch is distributed and "
        "put it into it."
    )


def _shared_writes(problem: Problem, mismatch: Mismatch) -> Cause | None:
    names = [d.pair.name for d in mismatch.differences if d.pair.section == "tensors"]
    if not names or len(mismatch.replicas.seen) == 1:
        return None
    return Cause(
        f"All replicas share {_listed(names)} and each of them writes there. That "
        "makes a count of the whole batch, and no mean, moving average or decay. "
        "Return the value from the step and write after strategy.run; or keep it in a "
        "torchstrategy.Variable; or write in a merge function: "
        "get_replica_context().merge_call(...)."
    )


def _order(problem: Problem, mismatch: Mismatch) -> Cause | None:
    if not mismatch.depends_on_order:
        return None
    drawn = [
        source.name
        for source in mismatch.drawn
        if not source.name.startswith("torch's")
    ]
    shared = (
        f" It draws from {' and '.join(drawn)}, which is one for all replicas."
        if drawn
        else ""
    )
    return Cause(
        f"With the replicas in another order, {problem.step_name} gives another "
        "result: replicas share something that it writes and reads (a list, a counter, "
        f"a cache, a generator).{shared} {KEEP_STATE} On several accelerators replicas "
        "run at the same time, in no order at all.",
        is_proved=True,
    )


def _random_numbers(problem: Problem, mismatch: Mismatch) -> Cause | None:
    if not mismatch.drawn or len(mismatch.replicas.seen) == 1:
        return None
    names = _names(mismatch.models, drops)
    who = (
        f"{_listed(names)} in training mode"
        if names
        else " and ".join(source.name for source in mismatch.drawn)
    )
    return Cause(
        f"Random numbers ({who}): each replica draws its own, so they are not those "
        "that one device draws. That is as it should be, and cannot be compared. For "
        "this test switch dropout off (p=0, model.eval()), or draw before the batch is "
        "distributed and put the numbers into the batch.",
        edited(problem, drop_nothing),
    )


def _batch_statistics(problem: Problem, mismatch: Mismatch) -> Cause | None:
    names = _names(mismatch.models, uses_batch_statistics)
    if not names or len(mismatch.replicas.seen) == 1:
        return None
    return Cause(
        f"Batch statistics ({_listed(names)} in training mode): each replica "
        "normalises by the mean and variance of its own rows, one device by those of "
        "the whole batch. For those of the whole batch, convert the model: "
        "torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(model). Or use "
        "GroupNorm or LayerNorm, put the layers into eval mode, or leave such a model "
        "out of this comparison.",
        edited(problem, pass_through),
    )


def _own_count(problem: Problem, mismatch: Mismatch) -> Cause | None:
    """The losses themselves tell what they were divided by.

    If gradients that are weighted by these counts are right, nothing else is wrong.
    """
    told = mismatch.replicas.losses.told()
    if told is None or problem.reduction is not ReduceOp.MEAN or problem.weighs_losses:
        return None
    options = dataclasses.replace(
        problem.options or NO_OPTIONS, gradient_reduction=LOSS
    )
    if not _is_of_gradients(mismatch) or not agrees(
        dataclasses.replace(problem, options=options, ignore=_ONLY_UPDATE)
    ):
        return None
    shares = mismatch.replicas.shares
    by = "rows" if shares.parts == shares.fractions else "what examples= says"
    return Cause(
        "The loss is a mean over tokens, or over what a mask or class weights leave of "
        f"the rows: {told}. But gradients are weighted by {by}. With "
        "RunOptions(gradient_reduction='loss') gradients and parameters agree: run the "
        "step with that option, or make the strategy with it. Or say how much each "
        "replica counts, RunOptions(examples=lambda batch: ...), with what the loss is "
        "divided by.",
        is_proved=True,
    )


def _returned_mean(problem: Problem, mismatch: Mismatch) -> Cause | None:
    """Only the losses that the step returns differ.

    Gradients are not weighted by rows.
    """
    if not problem.weighs_losses or {d.pair.section for d in mismatch.differences} != {
        "losses"
    }:
        return None
    return Cause(
        "The gradients agree. What the step returns is averaged here by rows, or as "
        "all terms of its loss are if these have one count; it is a mean over "
        "something else. Leave it out of the comparison: ignore=['losses']. A training "
        "logs such a number by strategy.reduce('mean', loss, axis=None, "
        "weights=counts)."
    )


def _reduction(problem: Problem, mismatch: Mismatch) -> Cause | None:
    other = ReduceOp.SUM if problem.reduction is ReduceOp.MEAN else ReduceOp.MEAN
    options = dataclasses.replace(
        problem.options or NO_OPTIONS, gradient_reduction=other
    )
    remedied = dataclasses.replace(problem, options=options, ignore=_ONLY_UPDATE)
    if (
        len(mismatch.replicas.seen) == 1
        or not _is_of_gradients(mismatch)
        or not agrees(remedied)
    ):
        return None
    times = _times(mismatch)
    proof = (
        f"With RunOptions(gradient_reduction={other.value.lower()!r}) gradients and "
        "parameters agree."
    )
    if other is ReduceOp.MEAN:
        return Cause(
            "The loss is a mean over the rows of each replica, and the replicas' "
            f"gradients are added{times}. {proof} Leave the gradients to be averaged, "
            "or divide the loss by the rows of the whole batch.",
            is_proved=True,
        )
    if grows_with_rows(problem):
        return Cause(
            "The loss is a sum over rows, and the replicas' gradients are "
            f"averaged{times}. {proof} Make the loss a mean over the rows that it is "
            "given (losses.mean()), or run the step with that option. How this is "
            "known: on a batch that has each row two times, plain PyTorch's gradient "
            "is twice as large, as only that of a sum is.",
            is_proved=True,
        )
    return Cause(
        f"The loss depends on the number of replicas{_reads_count(problem)}: it is "
        f"divided by it, and the replicas' gradients are averaged as well{times}. "
        f"{proof} Make the loss a mean over the rows that the replica has "
        "(losses.mean()) and divide by nothing else, or run the step with that option.",
        is_proved=True,
    )


def _scale(problem: Problem, mismatch: Mismatch) -> Cause | None:
    reads, times = _reads_count(problem), _times(mismatch)
    if (
        len(mismatch.replicas.seen) == 1
        or not _is_of_gradients(mismatch)
        or not (reads or times)
    ):
        return None
    what = (
        "number of replicas"
        if reads or _is_of_count(problem, mismatch)
        else "number of rows, or on the replica"
    )
    return Cause(
        f"The loss depends on the {what}{reads}{times}. Make it a mean over the rows "
        "that the replica has (losses.mean()): gradients are averaged by rows, so "
        "nothing else is to be multiplied or divided."
    )


def _written_state(problem: Problem, mismatch: Mismatch) -> Cause | None:
    # A layer that normalises by all rows keeps what it was given. If that is wrong, its
    # statistics are a consequence.
    passive = [
        f"the buffer `{name}`" for name in synchronized_statistics(mismatch.models)
    ]
    written = [
        d.pair.name
        for d in mismatch.differences
        if d.pair.section in ("attributes", "buffers")
    ]
    names = [name for name in written if name not in passive]
    if not names:
        return None
    return Cause(
        f"State is written in the step: {_listed(names)}. Each replica writes on its "
        "own copy, from its own rows; after the step the first replica's value is kept "
        "(of running statistics the mean). Write such state outside of strategy.run, "
        "or bring it together in the step with get_replica_context().all_reduce(...)."
    )


def _row_statistics(problem: Problem, mismatch: Mismatch) -> Cause | None:
    if len(mismatch.replicas.seen) == 1:
        return None
    places = places_that_matter(problem, mismatch)
    if not places:
        return None
    return Cause(
        f"A statistic of the batch in the step: {' and '.join(map(str, places))}. Each "
        "replica computes it from its own rows, one device from those of the whole "
        "batch. With the numbers of the whole batch there the two agree. Add up in all "
        "replicas what it is made of, such as the sum and the count of a mean, with "
        "get_replica_context().all_reduce('sum', ...). Or compute it before the batch "
        "is distributed.",
        is_proved=True,
    )


def _missing_gradients(problem: Problem, mismatch: Mismatch) -> Cause | None:
    pairs = [d.pair for d in mismatch.differences if d.pair.section == "gradients"]
    names = [
        pair.name for pair in pairs if (pair.got is None) != (pair.expected is None)
    ]
    if not names:
        return None
    return Cause(
        "Backward reaches other parameters in replicas than in plain PyTorch: "
        f"{_listed(names)}. Let no layer be used depending on the replica, on its "
        "number of rows, or on its data."
    )


def _not_finite(problem: Problem, mismatch: Mismatch) -> Cause | None:
    tables = [
        *mismatch.replicas.updates,
        mismatch.replicas.gradients,
        *(s.returned for s in mismatch.replicas.seen),
    ]
    usual = [
        *mismatch.plain.updates,
        mismatch.plain.gradients,
        *(s.returned for s in mismatch.plain.seen),
    ]
    if _finite(tables) or not _finite(usual):
        return None
    return Cause(
        "Replicas made numbers that are NaN or infinite. A replica has few rows: a "
        "mean over none of them, as of rows that a mask leaves, and a variance of one "
        "row are NaN. Divide by max(count, 1)."
    )


def _update(problem: Problem, mismatch: Mismatch) -> Cause | None:
    differing = {difference.pair.section for difference in mismatch.differences}
    if not differing <= {"parameters", "optimizer"}:
        return None
    return Cause(
        "The gradients agree and the update does not: the step sets a learning rate or "
        "other settings of the optimizer by something that replicas share, count or "
        f"see otherwise than one device{_reads_count(problem)}. Set them outside of "
        "strategy.run."
    )


def _coupled_rows(problem: Problem, mismatch: Mismatch) -> Iterator[str]:
    """The last cause to look for: rows depend on each other.

    Replicas that all have the same rows agree in this case.
    """
    batches = tuple(repeated(batch, problem.num_replicas) for batch in problem.batches)
    alike = dataclasses.replace(
        problem, batches=batches, ignore=problem.ignore | {"order"}
    )
    if len(mismatch.replicas.seen) > 1 and agrees(alike):
        unread = mismatch.replicas.losses.unread
        count = (
            ""
            if unread is None
            else f" What it is divided by cannot be read from its graph (`{unread}`)."
        )
        yield (
            "With the same rows in every replica the two agree: so the loss is not a "
            "mean in which each row counts the same. It leaves rows out or weighs them "
            "(ignored targets, masks, class weights), or compares rows with each other "
            "(contrastive losses, a mean or standard deviation over rows, which in a "
            f"replica is that of its own rows).{count} Say how much each replica "
            "counts, if it is a mean over what can be counted: "
            "RunOptions(examples=lambda batch: ...). Or divide by the count of the "
            "whole batch, brought together with "
            "get_replica_context().all_reduce('sum', count), and run with "
            "RunOptions(gradient_reduction='sum')."
        )


_LOOKS: tuple[Callable[[Problem, Mismatch], Cause | None], ...] = (
    _without_replicas,
    _rounding,
    _shared_generator,
    _shared_writes,
    _order,
    _random_numbers,
    _batch_statistics,
    _returned_mean,
    _own_count,
    _reduction,
    _written_state,
    _row_statistics,
    _not_finite,
    _missing_gradients,
    _scale,
    _update,
)


def _is_of_gradients(mismatch: Mismatch) -> bool:
    return any(
        difference.pair.section == "gradients" for difference in mismatch.differences
    )


def _names(
    models: Sequence[nn.Module], wanted: Callable[[nn.Module], bool]
) -> list[str]:
    return [
        f"{type(module).__name__} `{name}`" if name else type(module).__name__
        for model in models
        for name, module in model.named_modules()
        if wanted(module)
    ]


def _listed(names: Sequence[str]) -> str:
    """The first few names, in words."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _reads_count(problem: Problem) -> str:
    words = words_in(problem.step) & {"num_replicas_in_sync", "num_replicas"}
    return "".join(
        f" ({problem.step_name} reads `{word}`)" for word in sorted(words)[:1]
    )


def _finite(tables: Sequence[Numbers]) -> bool:
    numbers = [
        number for table in tables for number in table.values() if number is not None
    ]
    return all(bool(torch.isfinite(number).all()) for number in numbers)


def _is_of_count(problem: Problem, mismatch: Mismatch) -> bool:
    ratio = (
        ratio_of(first_gradients(mismatch.replicas), first_gradients(mismatch.plain))
        or 1.0
    )
    return any(
        abs(ratio / problem.num_replicas**power - 1) < _CLOSE
        for power in (-2, -1, 1, 2)
    )


def _times(mismatch: Mismatch) -> str:
    """`: every gradient is 1/4 of plain PyTorch's`, if there is such a number."""
    ratio = ratio_of(
        first_gradients(mismatch.replicas), first_gradients(mismatch.plain)
    )
    if not ratio or abs(ratio - 1) < _CLOSE:
        return ""
    inverse = round(1 / ratio)
    shown = (
        f"1/{inverse} of"
        if inverse > 1 and abs(inverse * ratio - 1) < _CLOSE
        else f"{ratio:.4g} times"
    )
    return f": every gradient is {shown} plain PyTorch's"
