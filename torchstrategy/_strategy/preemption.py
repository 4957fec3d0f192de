"""Lets all workers leave a training after the same step, if one of them is asked to end."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import final

from torchstrategy._strategy.strategy import StrategyBase


@final
class PreemptionCheckpointHandler:
    """Tells a training that this process, or that of another worker, will be ended soon.

    Clusters that need a machine for something else send its processes the signal SIGTERM, and end them some time
    later. This object takes the signal, which would have ended the process at once. Workers tell each other when a run
    begins, so `requested` becomes True after the same run in all of them, whichever got the signal. Ask it after each
    `strategy.run`; if it is True, save a checkpoint and leave the loop.

    It takes signals until `close()`, or until the end of its `with` block. What happened at a signal before happens
    again then.

    Args:
        strategy: The strategy of the training. If it is no `MultiWorkerMirroredStrategy`, this process is the only one.
        signals: The signals that announce the end. Slurm sends another one if you say so: `sbatch --signal=USR1@120`.

    Example:
        >>> import os, signal
        >>> strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
        >>> with torchstrategy.experimental.PreemptionCheckpointHandler(strategy) as handler:
        ...     for step in range(5):
        ...         result = strategy.run(lambda: None)
        ...         if step == 2:
        ...             os.kill(os.getpid(), signal.SIGTERM)  # as a cluster does
        ...         if handler.requested:
        ...             break
        >>> step
        2

    Differs from tf.distribute:
        TensorFlow's class saves by itself and ends the process, as its `TerminationConfig` says; it counts the steps
        that it runs. Here the script saves and ends, since it knows what a checkpoint holds.

    Raises:
        TypeError: If `strategy` is no strategy.
        RuntimeError: If this is not the main thread of the program, which alone gets signals.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler
    """

    def __init__(self, strategy: StrategyBase, *, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)) -> None:
        if not isinstance(strategy, StrategyBase):
            raise TypeError(f"PreemptionCheckpointHandler takes a torchstrategy.Strategy; got {strategy!r}.")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "A PreemptionCheckpointHandler was made in a thread, and Python gives signals to the main thread only. "
                "Make it in the main thread, before the other one starts."
            )
        self._workers = strategy.extended._workers
        self._is_asked = False
        self._before = {one: signal.signal(one, self._note) for one in signals}

    @property
    def requested(self) -> bool:
        """Whether a worker was asked to end: the same in all workers between two runs."""
        return self._workers.all_leave if self._workers.count > 1 else self._is_asked

    def close(self) -> None:
        """Takes no more signals. `requested` stays as it is."""
        for one, handler in self._before.items():
            if handler is not None:  # what was not set in Python cannot be put back
                signal.signal(one, handler)
        self._before.clear()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = self._workers.is_asked_to_leave = True
