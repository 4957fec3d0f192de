"""Which streams of accelerators the replicas of a run use, and who waits for whom.

A step may do its work on a stream of its own, as plain PyTorch allows. What acts for
all replicas, such as the update of an optimizer, runs on the streams that were current
where the caller called `run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch

from torchstrategy._base.streams import current_streams, keep_until_used, on_streams
from torchstrategy._base.tree import tree_leaves
from torchstrategy._base.types import Device, Tree


# Note [Streams of replicas]
# Where a replica stands still, the current streams of its thread are compared with the
# caller's. Mostly they are the same, and nothing is to be done. A side stream is one
# that is not the caller's:
# - The caller's stream waits for it before anything uses what the replica brought, and
#   it waits for the caller's stream before the replica goes on. The program waits for
#   neither of them.
# - While the replica stands still, and where it adds its gradients to those of other
#   replicas, its thread works on the caller's streams: two replicas of one device may
#   have a side stream each.
# - What a replica gets is memory of the caller's stream. `record_stream` keeps it until
#   the side stream has used it.
# - The end of a run reads what the step wrote on buffers and gradients, so that the
#   caller's stream waits for all side streams of the run; and these wait for it when
#   the run is over, and once the next run has brought the latest values. In plain
#   PyTorch, a program that has all its work on one side stream need not wait for
#   anything.
# A side stream that is current at no synchronization point, and not at the end of the
# step, is not seen. In plain PyTorch, too, the program has to wait for such a one.
@final
class DeviceStreams:
    """The current streams of the thread that calls `run`, and a run's side streams.

    Args:
        devices: The devices that the run uses.
        before: The side streams of the run before.
    """

    def __init__(
        self, devices: Iterable[Device], before: Iterable[torch.Stream] = ()
    ) -> None:
        self.callers = current_streams(devices)
        self.side: dict[torch.Stream, None] = {}
        self._before = before

    def standing_still(
        self,
    ) -> AbstractContextManager[dict[Device, torch.Stream] | None]:
        """A block in which the replica of this thread stands still.

        See Note [Streams of replicas].

        It works on the caller's streams, and gives the side streams by device, or
        nothing if there are none.
        """
        current = current_streams(self.callers)
        if current == self.callers:
            return NO_SIDE_STREAM
        return self._join(
            {d: stream for d, stream in current.items() if stream != self.callers[d]}
        )

    @contextmanager
    def _join(
        self, side: dict[Device, torch.Stream]
    ) -> Iterator[dict[Device, torch.Stream]]:
        self.side.update(dict.fromkeys(side.values()))
        for device, stream in side.items():
            self.callers[device].wait_stream(stream)
        try:
            with on_streams({device: self.callers[device] for device in side}):
                yield side
        finally:
            self._let_wait(side.values())

    def end_step(self) -> None:
        """Says that the step of the replica of this thread has ended.

        The caller's streams wait for all that the step has queued.
        """
        with self.standing_still():
            pass

    @contextmanager
    def steps(self) -> Iterator[None]:
        """A block in which all replicas run their steps, with current copies."""
        self._let_wait(self._before)
        try:
            yield
        finally:
            # Also for those of the run before: a step that fails may have used one and
            # not have come to a synchronization point, and its copies are dropped.
            for stream in {**dict.fromkeys(self._before), **self.side}:
                if stream.device in self.callers:
                    self.callers[stream.device].wait_stream(stream)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        """The run is over: the side streams may use what it has written."""
        self._let_wait(self.side)

    def _let_wait(self, side: Iterable[torch.Stream]) -> None:
        for stream in side:
            if stream.device in self.callers:
                stream.wait_stream(self.callers[stream.device])


def keep_for(side: dict[Device, torch.Stream], given: Tree) -> None:
    """Keeps the memory of what a replica is given until side streams have used it."""
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor) and leaf.device in side:
            keep_until_used(leaf, side[leaf.device])


NO_SIDE_STREAM: AbstractContextManager[None] = nullcontext()
