"""Losses that are a sum over the rows of the whole batch, divided by a number.

No replica alone knows this number.

Before the gradients of the replicas are added up, each is multiplied by the replica's
weight: by its fraction of the rows if gradients are averaged, by 1 if they are summed.
A loss that is divided by this weight beforehand is exact in both cases.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchstrategy._base.context import has_strategy
from torchstrategy._base.errors import as_int, require_type
from torchstrategy._base.torch_internals import hide_from_compiler
from torchstrategy._group.group import ALONE, ReplicaGroup, group_here


def compute_average_loss(
    per_example_loss: torch.Tensor,
    sample_weight: Any = None,
    global_batch_size: int | None = None,
) -> torch.Tensor:
    """The weighted mean of the losses of all rows of the whole batch.

    Call `backward` on it in a replica.

    The mean of a replica's own rows, which steps are written with as a rule, is exact
    as long as each row counts the same. Where rows are weighted or ignored, or count by
    their tokens, replicas with as many rows do not count the same, and only this is:
    the gradient is that of `sum(weight * loss) / W` over the whole batch, however
    uneven, and whether gradients are averaged or summed; see `RunOptions`. W is
    `global_batch_size` if that is given, else the sum of the weights of all rows in all
    replicas, and without weights the number of rows. Where W is 0, so is the loss.

    Without `global_batch_size` it is a synchronization point: every replica has to come
    to it. To accumulate gradients over several batches, give it their total, and no
    replica waits.

    What it returns is this replica's part of the loss, divided by what the replica's
    gradient is going to be multiplied by. For a loss to report, return the losses and
    the weights from the step and reduce both, as below; with
    `gradient_reduction="sum"`, the sum of what this returns is the loss.

    Args:
        per_example_loss: The loss of each row, or of each token of each row and so on:
            rows come first. What a loss function gives with `reduction="none"`.
        sample_weight: How much each counts: a tensor with the shape of the losses, or
            with fewer dimensions, `[rows]` for losses of `[rows, tokens]`, where each
            weight counts once. Sizes of 1 are broadcast. Zeros and False leave out. A
            number scales the loss, and counts rows like None.
        global_batch_size: What to divide by: an integer, or a tensor that holds one.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 3)
        >>> def step(batch):
        ...     inputs, targets = batch
        ...     losses = torch.nn.functional.cross_entropy(
        ...         model(inputs), targets, reduction="none", ignore_index=-1
        ...     )
        ...     counted = targets != -1
        ...     torchstrategy.nn.compute_average_loss(losses, counted).backward()
        ...     return losses.detach(), counted
        >>> loader = torch.utils.data.DataLoader(
        ...     [(torch.ones(2), t) for t in (0, 1, -1, -1, 2)], batch_size=5
        ... )
        >>> for batch in strategy.experimental_distribute_dataset(loader):
        ...     losses, counted = strategy.run(step, args=(batch,))
        ...     count = strategy.reduce("sum", counted, axis=0)
        ...     loss = strategy.reduce("sum", losses, axis=0) / count

    Differs from tf.nn:
        TensorFlow divides by the rows of this replica times the number of replicas,
        whatever the weights, and its result has to be summed over the replicas. Nothing
        is divided by the number of replicas here.

    Raises:
        RuntimeError: In the cross-replica context, unless `global_batch_size` is given;
            from `run`, if not every replica makes the call.
        ValueError: If `per_example_loss` is a scalar, the weights do not fit it, or
            `global_batch_size` is negative.
        TypeError: If `per_example_loss` is not a tensor of real numbers, or the others
            hold none that fit.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/nn/compute_average_loss
    """
    # The replica's gradient is going to be multiplied by `group.weight`, so the sum is
    # divided by that, too: see Note [Where a gradient is weighed] in `_group/weighing`.
    loss = _losses(per_example_loss)
    weight = None if sample_weight is None else _weights(sample_weight, loss)
    given = None if global_batch_size is None else _count(global_batch_size)
    group = _group("compute_average_loss", refuse_cross_replica=given is None)
    if given is None and weight is not None and weight.dim():
        counted = weight.expand(loss.shape[0], *weight.shape[1:]).sum()
    else:  # how much the rows of this replica count together
        counted = loss.new_full((), loss.shape[0] if given is None else given)
    if given is None and group.participants.count > 1:
        # The rows of a replica whose gradient is dropped do not count.
        counted = counted if group.weight else torch.zeros_like(counted)
        (counted,) = group.all_reduce([counted], name="compute_average_loss")
    total = (loss if weight is None else loss * weight).sum()
    divisor = (counted * (group.weight or 1.0)).masked_fill(counted == 0, torch.inf)
    return (total / divisor).to(_dtype_of_result(per_example_loss))


def scale_regularization_loss(
    regularization_loss: torch.Tensor | float,
) -> torch.Tensor:
    """A loss of the parameters only, which all replicas together count once.

    The loss may not depend on the rows of the batch.

    Add it to what `compute_average_loss` returns, or to the mean loss of the replica's
    rows.

    Its value is the regularisation loss where gradients are averaged, and its part for
    one replica where they are summed.

    Args:
        regularization_loss: The loss, the same in every replica: a number, or a tensor
            whose elements are added up.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(
        ...     ["cpu", "cpu"], gradient_reduction="sum"
        ... )
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> def step():
        ...     decay = model.weight.square().sum()
        ...     torchstrategy.nn.scale_regularization_loss(decay).backward()
        >>> strategy.run(step)
        >>> torch.allclose(model.weight.grad, 2 * model.weight)
        True

    Differs from tf.nn:
        TensorFlow always divides by the number of replicas. Here what replicas'
        gradients are multiplied by adds up to 1 in any case.

    Raises:
        RuntimeError: In the cross-replica context.
        TypeError: If it is not a tensor of real numbers or a number.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/nn/scale_regularization_loss
    """
    if not isinstance(regularization_loss, (int, float, torch.Tensor)) or _is_complex(
        regularization_loss
    ):
        raise TypeError(
            "A regularization loss is a tensor of real numbers or a number; got "
            f"{regularization_loss!r}."
        )
    group = _group("scale_regularization_loss")
    return torch.as_tensor(regularization_loss).sum() / group.participants.total_weight


# A compiler would break its graph at the look-up of the replica and at the
# synchronization point, and make a graph of the few lines between them.
hide_from_compiler(compute_average_loss)
hide_from_compiler(scale_regularization_loss)


def _group(what: str, refuse_cross_replica: bool = True) -> ReplicaGroup:
    """The replicas of this run; the group of a lone replica if no replica runs here."""
    group = group_here(what)
    if group is None and refuse_cross_replica and has_strategy():
        raise RuntimeError(
            f"You are calling `{what}` in cross-replica context, while it was expected "
            "to be called in replica context: it gives a replica its part of the loss. "
            "Call it in the step that strategy.run calls."
        )
    return group or ALONE


def _losses(per_example_loss: torch.Tensor) -> torch.Tensor:
    """The losses in the dtype in which they are added up: at least float32."""
    require_type(
        per_example_loss, torch.Tensor, "per_example_loss is a tensor of losses"
    )
    if _is_complex(per_example_loss):
        raise TypeError(
            f"per_example_loss is a tensor of {per_example_loss.dtype}: a loss is a "
            "real number."
        )
    if not per_example_loss.dim():
        raise ValueError(
            "per_example_loss is a scalar, of which it is not known how many rows it "
            "stands for. Give the loss of each "
            'row: a loss function gives it with reduction="none".'
        )
    return per_example_loss.to(
        torch.promote_types(_dtype_of_result(per_example_loss), torch.float32)
    )


def _dtype_of_result(per_example_loss: torch.Tensor) -> torch.dtype:
    return (
        per_example_loss.dtype
        if per_example_loss.is_floating_point()
        else torch.get_default_dtype()
    )


def _weights(sample_weight: Any, loss: torch.Tensor) -> torch.Tensor:
    """The weights with as many dimensions as the losses, or none."""
    try:
        weight = sample_weight
        if not isinstance(weight, torch.Tensor):
            weight = torch.as_tensor(np.asarray(weight)).to(loss.device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"sample_weight holds a number for each row; got {sample_weight!r}."
        ) from None
    if _is_complex(weight):
        raise TypeError(
            f"sample_weight is a tensor of {weight.dtype}: a weight is a real number."
        )
    shape = list(weight.shape)
    if len(shape) == loss.dim() + 1 and shape[-1] == 1:
        shape.pop()
    if shape:
        shape += [1] * (loss.dim() - len(shape))
    if len(shape) > loss.dim() or any(
        w not in (1, n) for w, n in zip(shape, loss.shape, strict=False)
    ):
        raise ValueError(
            f"sample_weight of shape {tuple(weight.shape)} cannot be broadcast to "
            f"per_example_loss of shape {tuple(loss.shape)}. Give one weight for each "
            "row, or one for each loss."
        )
    return weight.reshape(shape).to(loss.dtype)


def _count(global_batch_size: Any) -> int:
    held = (
        global_batch_size.tolist()
        if isinstance(global_batch_size, torch.Tensor)
        else global_batch_size
    )
    count = as_int(
        None if isinstance(held, bool) else held,
        "global_batch_size is an integer, or a tensor that holds one; got "
        f"{global_batch_size!r}. To divide by a sum of weights that is no integer, "
        "divide the weights by it and give global_batch_size=1.",
    )
    if count < 0:
        raise ValueError(f"global_batch_size={count} counts rows: it is not negative.")
    return count


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()
