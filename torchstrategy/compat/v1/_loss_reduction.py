"""How losses are reduced, as version 1 asks."""

from __future__ import annotations

from torchstrategy._core.options import ReduceOp


def get_loss_reduction() -> ReduceOp:
    """`ReduceOp.SUM`, as outside of Estimator: the optimizer need not divide by the number of replicas.

    How the gradients of a run become one, `RunOptions(gradient_reduction=...)` says.

    Example:
        >>> torchstrategy.compat.v1.get_loss_reduction()
        <ReduceOp.SUM: 'SUM'>

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/get_loss_reduction
    """
    return ReduceOp.SUM
