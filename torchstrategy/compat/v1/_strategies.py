"""The strategies, as version 1 has them, and how losses are reduced."""

from __future__ import annotations

from typing import final

from torch.utils.data import Dataset

from torchstrategy._base.options import ReduceOp
from torchstrategy._base.types import Tree
from torchstrategy.multi_worker_mirrored import MultiWorkerMirroredBase
from torchstrategy.strategies import CentralStorageBase, MirroredBase, OneDeviceBase
from torchstrategy.strategy import StrategyBase


class Strategy(StrategyBase):
    """`torchstrategy.Strategy`, with the methods of version 1.

    An instance of this class is no instance of `torchstrategy.Strategy`.

    `reduce` has a default for `axis`. Where version 2 iterates over a dataset, version
    1 asks an iterator of `make_dataset_iterator` or `make_input_fn_iterator` for one
    batch after the other, as `experimental_run` does. There is no `gather`, no
    `experimental_distribute_values_from_function`, and there are no logical devices.

    Args:
        extended: How this strategy does it.

    Example:
        >>> strategy = torchstrategy.compat.v1.experimental.CentralStorageStrategy(
        ...     ["cpu", "cpu"]
        ... )
        >>> (
        ...     isinstance(strategy, torchstrategy.compat.v1.Strategy),
        ...     isinstance(strategy, torchstrategy.Strategy),
        ... )
        (True, False)
        >>> iterator = strategy.make_dataset_iterator([torch.ones(4)])
        >>> iterator.initialize()
        >>> strategy.reduce(
        ...     "sum", strategy.experimental_run(lambda batch: batch.sum(), iterator)
        ... )
        tensor(4.)

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/Strategy
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        axis: int | tuple[int, ...] | None = None,
        weights: Tree = None,
    ) -> Tree:
        """`torchstrategy.Strategy.reduce`, over replicas only unless you give `axis`.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/Strategy#reduce
        """
        return super().reduce(reduce_op, value, axis, weights)

    def unwrap(self, value: Tree) -> tuple[Tree, ...]:
        """The name that `experimental_local_results` had before TensorFlow 2.0.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/Strategy#experimental_local_results
        """
        return self.experimental_local_results(value)

    def experimental_make_numpy_dataset(
        self, numpy_input: Tree, session: None = None
    ) -> Dataset[Tree]:
        """`torchstrategy.Strategy.experimental_make_numpy_dataset`, without sessions.

        Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/Strategy#experimental_make_numpy_dataset
        """
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)


@final
class OneDeviceStrategy(OneDeviceBase, Strategy):
    """What `torchstrategy.OneDeviceStrategy` is, with the methods of version 1.

    Args:
        device: As there.
        examples: As there.

    Example:
        >>> strategy = torchstrategy.compat.v1.OneDeviceStrategy("cpu")
        >>> strategy.run(lambda: torchstrategy.get_strategy() is strategy)
        True

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/OneDeviceStrategy
    """


@final
class CentralStorageStrategy(CentralStorageBase, Strategy):
    """What `torchstrategy.CentralStorageStrategy` is, with the methods of version 1.

    Args:
        compute_devices: As there.
        parameter_device: As there.
        gradient_reduction: As there.
        buffer_aggregation: As there.
        examples: As there.

    Example:
        >>> strategy = torchstrategy.compat.v1.experimental.CentralStorageStrategy(
        ...     ["cpu", "cpu"]
        ... )
        >>> strategy.reduce("sum", strategy.experimental_run(lambda: torch.ones(1) * 2))
        tensor([4.])

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/experimental/CentralStorageStrategy
    """


@final
class MirroredStrategy(MirroredBase, Strategy):
    """What `torchstrategy.MirroredStrategy` is, with the methods of version 1.

    Args:
        devices: As there.
        cross_device_ops: As there.
        gradient_reduction: As there.
        buffer_aggregation: As there.
        examples: As there.

    Example:
        >>> strategy = torchstrategy.compat.v1.MirroredStrategy(["cpu", "cpu"])
        >>> strategy.reduce("sum", strategy.experimental_run(lambda: torch.ones(1) * 2))
        tensor([4.])

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/MirroredStrategy
    """


@final
class MultiWorkerMirroredStrategy(MultiWorkerMirroredBase, Strategy):
    """`torchstrategy.MultiWorkerMirroredStrategy`, with the methods of version 1.

    Args:
        cluster_resolver: As there.
        communication_options: As there.
        devices: As there.
        process_group: As there.
        timeout: As there.
        gradient_reduction: As there.
        buffer_aggregation: As there.
        examples: As there.

    Example:
        >>> strategy = torchstrategy.compat.v1.experimental.MultiWorkerMirroredStrategy(
        ...     devices=["cpu", "cpu"]
        ... )
        >>> strategy.reduce("sum", strategy.experimental_run(lambda: torch.ones(1) * 2))
        tensor([4.])

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/experimental/MultiWorkerMirroredStrategy
    """


def get_loss_reduction() -> ReduceOp:
    """`ReduceOp.SUM`, as in TensorFlow outside of Estimator.

    You need not divide by the number of replicas in the optimizer.

    How the gradients of a run become one, `RunOptions(gradient_reduction=...)` says.

    Example:
        >>> torchstrategy.compat.v1.get_loss_reduction()
        <ReduceOp.SUM: 'SUM'>

    Source: https://www.tensorflow.org/versions/r2.2/api_docs/python/tf/compat/v1/distribute/get_loss_reduction
    """
    return ReduceOp.SUM
