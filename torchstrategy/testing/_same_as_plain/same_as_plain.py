"""The assertion that a user calls: `assert_same_as_plain`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from torchstrategy._base.context import has_strategy
from torchstrategy._base.errors import add_note, an, warn
from torchstrategy._base.options import RunOptions
from torchstrategy._base.types import Tree
from torchstrategy._data.batch_types import rows_of
from torchstrategy._data.steps import split_equally
from torchstrategy.strategy import StrategyBase
from torchstrategy.testing._same_as_plain.comparison import (
    Mismatch,
    StepFailed,
    first_mismatch,
)
from torchstrategy.testing._same_as_plain.difference import SECTIONS, Tolerance
from torchstrategy.testing._same_as_plain.messages import (
    failure_text,
    mismatch_text,
    which,
)
from torchstrategy.testing._same_as_plain.randomness import Sources
from torchstrategy.testing._same_as_plain.training import Problem

_IGNORABLE = (*SECTIONS, "order")


def assert_same_as_plain(
    step: Callable[[Any, Any, Any], Tree],
    model_fn: Callable[[], Any],
    optimizer_fn: Callable[[Any], Any] | None,
    batches: Iterable[Tree],
    strategy: StrategyBase,
    *,
    options: RunOptions | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Trains in plain PyTorch and under a strategy, and fails if the two differ.

    The error tells the cause.

    Both trainings begin with the same seed. In plain PyTorch, on the device of replica
    0, the step is called with whole batches; under the strategy the model and the
    optimizer are made in its scope, each batch is split, and the step is run in
    replicas. After every step these have to agree:

    - `"losses"`: the numbers that the step returns, in any container. Tensors that have
      the rows of the replicas are concatenated. Other tensors and floats are averaged
      by rows, or added, as the gradients are; where gradients are weighted by what a
      loss was divided by, they may be averaged by that, too. Integers are added. A
      number that is the same in all replicas may be that of the whole batch already.
    - `"gradients"`, at each `optimizer.step()` and after the step; `"parameters"`;
      `"buffers"`; `"optimizer"`, its state and settings.
    - `"attributes"`: the numbers and tensors that are plain attributes of modules, in
      every replica. A tensor may hold the rows of its replica.
    - `"tensors"`: the tensors outside of the models that the step reaches by a name, an
      attribute or a container. Every replica writes on the same tensor there. Each
      training has its own numbers in these tensors, and afterwards they get their
      earlier numbers back.
    - `"order"`: with several replicas there is a third training, in which they run in
      the opposite order. A result that depends on the order is an error, also if it
      agrees with plain PyTorch: on several accelerators there is no order.

    Tensors differ if the norm of their difference is more than `rtol` times the norm of
    plain PyTorch's tensor, plus `atol`. These are 1e-10 and 1e-13 for float64, 1e-5 and
    1e-6 for float32, 4e-3 and 1e-4 for float16, 3e-2 and 1e-3 for bfloat16: well above
    the rounding of a sum in another order, and well below the effect of mistakes.
    Gradients that cancel have rounding errors of the size of other gradients, so
    gradients may also differ by `rtol` times the largest one. Integers have to be
    equal, a Python float counts as of torch's default dtype, and NaN is equal to NaN.
    For a step that computes in a lower precision than its parameters have (autocast,
    TF32), give `rtol`.

    Compare in float64 if you can: `model_fn` returns `Net().double()`, and the batches
    have that dtype. In float32, replicas part visibly from one device after some steps,
    most of all with ReLU and batch norm, though nothing is wrong: a sum in another
    order rounds otherwise, and the next step makes more of it.

    Each training begins with the globals, closure variables, attributes, lists and
    dicts that the step found, and goes on with what it wrote there itself. Afterwards
    they are what they were before the check.

    An optimizer can make a full step of a rounding error, as Adam does where a gradient
    is nothing else. So once gradients agree, plain PyTorch makes its update from the
    gradients of the replicas: the trainings do not drift apart, and the update itself
    is compared up to rounding.

    The message of the failure names the step, what differs and by how much, what was
    allowed, and the causes. They are found by training again without dropout, without
    batch statistics, with another reduction and so on. A cause that such a training has
    proved comes first. Random numbers (torch's, Python's, numpy's, and those of
    generators that the step holds) go on afterwards as if nothing had been drawn.

    Args:
        step: Called as `step(model, optimizer, batch)`: the ordinary training step,
            with nothing of this in it.
        model_fn: Makes a new model at each call: a module, or a list, tuple or dict of
            modules.
        optimizer_fn: Makes the optimizer of what `model_fn` made, or a list, tuple or
            dict of them. None: there is none, and the step is given None. A
            learning-rate scheduler belongs to its optimizer, so make it here, too, and
            keep it as an attribute of the optimizer: see the second example.
        batches: A few batches, as a loader yields them. All are taken before the first
            step, so they have to end. Let one of them be uneven, such as 7 rows for 4
            replicas: if none is, a warning says so.
        strategy: The strategy to compare with plain PyTorch.
        options: The options of each `strategy.run`.
        seed: The seed of torch's default generators, Python's `random` and numpy's
            `np.random`.
        rtol: The relative tolerance for all floating dtypes. None: by dtype.
        atol: The absolute tolerance for all floating dtypes. None: by dtype.
        ignore: Names of the list above that are not to be compared.

    Raises:
        AssertionError: If the two differ, if the step meets tensors of two devices in a
            replica, or if replicas come to different synchronization points.
        Exception: What the step raises in plain PyTorch; what it raises in replicas
            only, with a note that says so.
        TypeError: If an argument is of the wrong kind.
        ValueError: If there are no batches, a tolerance is negative, `ignore` has a
            name that is not above, or `model_fn` does not make a new model, and the
            same, each time.
        RuntimeError: If called in the scope of a strategy or in a replica.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
        >>> def step(model, optimizer, batch):
        ...     optimizer.zero_grad()
        ...     losses = (model(batch) - 1).square().sum(1)
        ...     losses.mean().backward()
        ...     optimizer.step()
        ...     return losses.detach()
        >>> def model_fn():
        ...     return torch.nn.Linear(2, 2)
        >>> def optimizer_fn(model):
        ...     return torch.optim.Adam(model.parameters())
        >>> # Replicas get 3, 3 and 2 rows.
        >>> batches = torch.utils.data.DataLoader(torch.rand(20, 2), batch_size=8)
        >>> torchstrategy.testing.assert_same_as_plain(
        ...     step, model_fn, optimizer_fn, batches, strategy
        ... )

        With a scheduler:

        >>> def with_scheduler(model):
        ...     optimizer = optimizer_fn(model)
        ...     optimizer.scheduler = torch.optim.lr_scheduler.StepLR(
        ...         optimizer, step_size=2
        ...     )
        ...     return optimizer
        >>> def scheduled_step(model, optimizer, batch):
        ...     losses = step(model, optimizer, batch)
        ...     optimizer.scheduler.step()
        ...     return losses
        >>> torchstrategy.testing.assert_same_as_plain(
        ...     scheduled_step, model_fn, with_scheduler, batches, strategy
        ... )
    """
    _check_kinds(step, model_fn, optimizer_fn, strategy, options, seed)
    if has_strategy():
        raise RuntimeError(
            "assert_same_as_plain was called in the scope of a strategy or in a "
            "replica, where nothing is plain PyTorch. Call it outside: it enters the "
            "strategy's scope itself."
        )
    sources = Sources((), ())
    with sources.kept():
        sources.seed(seed)
        taken = _taken(batches)
    problem = Problem(
        step,
        model_fn,
        optimizer_fn,
        taken,
        strategy,
        options,
        seed,
        _tolerance(rtol, atol),
        _ignored(ignore),
    )
    outcome = _outcome(problem)
    if isinstance(outcome, Mismatch):
        raise AssertionError(mismatch_text(problem, outcome))
    if outcome is not None:
        text = failure_text(problem, outcome)
        if text is not None:
            # The message has the error already, with the lines of the step that it came
            # through.
            raise AssertionError(text) from None
        add_note(
            outcome.error,
            f"{which(problem, outcome.step)}: plain PyTorch takes this step without an "
            "error.",
        )
        raise outcome.error
    _warn_if_all_are_even(problem)


def _warn_if_all_are_even(problem: Problem) -> None:
    """Says that no two replicas ever had different numbers of rows.

    Mistakes that show only with uneven rows were not looked for.
    """
    count, given = problem.num_replicas, []
    with suppress(TypeError, ValueError):  # some rows cannot be counted like this
        given = [rows for rows in map(rows_of, problem.batches) if rows]
    of_each = [
        {piece.stop - piece.start for piece in split_equally(count, rows)} - {0}
        for rows in given
    ]
    if not given or count == 1 or any(len(different) > 1 for different in of_each):
        return
    warn(
        f"assert_same_as_plain passed, and no two of {count} replicas that had rows "
        "ever had different numbers of them: the batches have "
        f"{', '.join(map(str, given[:9]))} rows. A step that is wrong for uneven rows "
        f"passes, too. Add a batch of {2 * count - 1} rows.",
        UserWarning,
    )


def _outcome(problem: Problem) -> Mismatch | StepFailed | None:
    try:
        return first_mismatch(problem)
    except StepFailed as failure:
        return failure


def _check_kinds(
    step: object,
    model_fn: object,
    optimizer_fn: object,
    strategy: object,
    options: object,
    seed: object,
) -> None:
    for name, value in (
        ("step", step),
        ("model_fn", model_fn),
        ("optimizer_fn", optimizer_fn),
    ):
        if not callable(value) and not (value is None and name == "optimizer_fn"):
            raise TypeError(
                f"{name} is a function; got {value!r}, {an(type(value).__name__)}."
            )
    if isinstance(model_fn, nn.Module):
        raise TypeError(
            "model_fn makes a new model at each call; got a model, "
            f"{an(type(model_fn).__name__)}. Write a function that makes it, such as "
            "lambda: Net()."
        )
    if not isinstance(strategy, StrategyBase):
        raise TypeError(
            f"strategy is a torchstrategy.Strategy; got {strategy!r}, "
            f"{an(type(strategy).__name__)}."
        )
    if not isinstance(options, (RunOptions, type(None))):
        raise TypeError(
            f"options is a torchstrategy.RunOptions or None; got {options!r}."
        )
    if not isinstance(seed, int):
        raise TypeError(f"seed is an int; got {seed!r}, {an(type(seed).__name__)}.")


def _taken(batches: Iterable[Tree]) -> tuple[Tree, ...]:
    try:
        taken = tuple(batches)
    except TypeError as error:
        raise TypeError(
            f"batches is an iterable of batches, such as a DataLoader: {error}."
        ) from error
    if not taken:
        raise ValueError(
            "batches is empty: without a step there is nothing to compare. Give it at "
            "least one batch."
        )
    return taken


def _tolerance(rtol: float | None, atol: float | None) -> Tolerance:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, (int, float, type(None))):
            raise TypeError(
                f"{name} is a number or None; got {value!r}, "
                f"{an(type(value).__name__)}."
            )
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(
                f"{name}={value} allows nothing or anything: it is a number, and not "
                "negative."
            )
    return Tolerance(rtol, atol)


def _ignored(ignore: Sequence[str]) -> frozenset[str]:
    names = {ignore} if isinstance(ignore, str) else set(ignore)
    unknown = sorted(map(repr, names - set(_IGNORABLE)))
    if unknown:
        raise ValueError(
            f"ignore names {', '.join(unknown)}, and what is compared is "
            f"{', '.join(_IGNORABLE)}."
        )
    if names.issuperset(SECTIONS):
        raise ValueError(
            "ignore names everything that is compared: nothing is left that could "
            "differ."
        )
    return frozenset(names)
