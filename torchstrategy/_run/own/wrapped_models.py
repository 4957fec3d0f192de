"""Models that the program has wrapped in a `DistributedDataParallel`.

It would average the gradients of all workers as if each had the same number of rows,
and then the strategy would add up what is the same already. So it does not reduce
gradients in a run, as in its own `no_sync()`: the strategy does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any, final

from torch import nn

from torchstrategy._base.torch_internals import communication_hooks
from torchstrategy._group.workers import Workers


@final
class WrappedModels:
    """The `DistributedDataParallel`s whose forward the steps of a strategy call.

    Args:
        workers: The processes that train together.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._ours: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def run_forward(
        self, model: Any, forward: Callable[[], Any], ours: Container[int]
    ) -> Any:
        """Runs the forward of one.

        Args:
            model: The `DistributedDataParallel`.
            forward: Calls its forward.
            ours: The ids of the parameters whose gradients the strategy sends.

        Raises:
            RuntimeError: If it does something with gradients that the strategy would
                leave out.
        """
        if model not in self._ours:
            if not any(id(parameter) in ours for parameter in model.parameters()):
                return forward()
            self._refuse(model)
            self._ours.add(model)
        with model.no_sync():
            return forward()

    def _refuse(self, model: Any) -> None:
        what = ""
        if communication_hooks(model):
            what = "has a communication hook, which would not be called"
        elif model.mixed_precision is not None:
            what = "has a mixed_precision of its own, which would not be in force"
        elif model.static_graph:
            what = "has static_graph=True, which needs its own reduction of gradients"
        elif model.process_group.size() != self._workers.count:
            size = model.process_group.size()
            what = (
                f"averages over {size} processes, where the strategy has "
                f"{self._workers.count} workers"
            )
        if what:
            raise RuntimeError(_REFUSED.format(type(model.module).__name__, what))


_REFUSED = (
    "The step calls a DistributedDataParallel of {} which {}: in strategy.run, the "
    "strategy sums the gradients of all workers, by their rows. Call the module that "
    "it wraps, `.module`."
)
