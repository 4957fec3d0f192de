"""What a step that is run several times in a row leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torchstrategy._core.context import current_replica_context, current_strategy
from torchstrategy._core.options import ReduceOp
from torchstrategy._core.types import StrategyLike, Tree


@final
class MultiStepContext:
    """What `StrategyExtended.experimental_run_steps_on_iterator` hands to each step, and returns after the last.

    Attributes:
        last_step_outputs: What was set last under each name.
        non_tensor_outputs: The same, of what is not reduced.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> iterator = strategy.make_dataset_iterator([torch.ones(4), torch.ones(4) * 3])
        >>> def steps(context, batch):
        ...     losses = strategy.run(lambda rows: rows.mean(), args=(batch,))
        ...     context.set_last_step_output("loss", losses, "mean")
        >>> strategy.extended.experimental_run_steps_on_iterator(steps, iterator, 2).last_step_outputs
        {'loss': tensor(3.)}
    """

    def __init__(self, last_step_outputs: Mapping[str, Tree]) -> None:
        self.last_step_outputs = dict(last_step_outputs)
        self.non_tensor_outputs: dict[str, Tree] = {}

    def set_last_step_output(self, name: str, output: Tree, reduce_op: ReduceOp | str | None = None) -> None:
        """Keeps `output` under `name` in `last_step_outputs`. In a replica this is a synchronization point.

        Args:
            name: By what to find it again.
            output: What to keep.
            reduce_op: How those of the replicas become one. None: they are kept as they are, as in no replica can be.

        Raises:
            ValueError: If it is called in a replica without `reduce_op`.
        """
        context = current_replica_context()
        if context is None:
            self._keep(current_strategy(), name, output, reduce_op)
        elif reduce_op is None:
            raise ValueError(
                f"set_last_step_output({name!r}, ...) was called in a replica, where reduce_op has to say how the "
                "outputs of all replicas become one: give it, or keep what strategy.run returns."
            )
        else:
            # The name is not brought to the synchronization point: a name that each replica has put together is another
            # object in each of them.
            context.merge_call(lambda strategy, merged: self._keep(strategy, name, merged, reduce_op), args=(output,))

    def set_non_tensor_output(self, name: str, output: Tree) -> None:
        """Keeps `output` under `name` in `non_tensor_outputs`. In a replica this is a synchronization point.

        What is set in replicas is kept as a tuple, with an item for each of them.
        """
        context = current_replica_context()
        if context is None:
            self.non_tensor_outputs[name] = output
        else:
            context.merge_call(lambda strategy, merged: self._keep_all(strategy, name, merged), args=(output,))

    def _keep(self, strategy: StrategyLike, name: str, output: Tree, reduce_op: ReduceOp | str | None) -> None:
        reduced = output if reduce_op is None else strategy.reduce(reduce_op, output, axis=None)
        self.last_step_outputs[name] = reduced

    def _keep_all(self, strategy: StrategyLike, name: str, output: Tree) -> None:
        self.non_tensor_outputs[name] = strategy.experimental_local_results(output)
