"""Replicas that fail or lag, where the test says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch.overrides import TorchFunctionMode

from torchstrategy._base.context import current_frame
from torchstrategy._group.instruments import START, Instrument, Turns
from torchstrategy.testing._instruments import in_force
from torchstrategy.testing._ranks.injection import Injection
from torchstrategy.testing._refusals import (
    refuse_bad_replica,
    refuse_in_replica,
    refuse_unknown_replica,
)


@contextmanager
def fail_in_replica(
    replica: int,
    at: str = START,
    error: BaseException | type[BaseException] | None = None,
    *,
    times: int = 1,
    skip: int = 0,
) -> Iterator[None]:
    """A block in which one replica fails, as on a machine of which one device does.

    Use it to see that a program survives it: that `strategy.run` raises the error, and
    leaves parameters and gradients as its documentation says.

    Args:
        replica: The id of the replica.
        at: Where it fails: `"start"`; `"end"`; when it comes to a synchronization
            point, such as `"optimizer.step()"`, `"all_reduce"`, `"merge_call"` or `"the
            first read of a gradient"` (the name that errors give it, with or without
            what is in parentheses at its end); at a `Lockstep.point` of this name; or
            in place of a torch function that the step calls, such as `"linear"`,
            `"relu"` or `"backward"`. Functions that torch's own functions call are not
            seen.
        error: What it raises: an exception, or a class of exceptions that is called
            without arguments. None: a `RuntimeError` that says where it comes from.
        times: How often it fails.
        skip: How often it first gets away: with `skip=2` the third `backward` fails.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> with torchstrategy.testing.fail_in_replica(1, at="relu", error=MemoryError):
        ...     try:
        ...         strategy.run(lambda: torch.relu(torch.ones(1)))
        ...     except MemoryError:
        ...         print("replica 1 is out of memory")
        replica 1 is out of memory

    Raises:
        AssertionError: If the block ends and the replica has not failed so often. It
            lists what it did come to.
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument has no meaning; from `run`, if the strategy has no
            such replica.
        RuntimeError: If it is entered in a replica.
    """
    refuse_in_replica("fail_in_replica")
    refuse_bad_replica("fail_in_replica", replica)
    injection = Injection("fail_in_replica", "replica", replica, at, error, times, skip)
    fault = _Fault(injection)
    with in_force(fault), _Calls(fault):
        yield
    injection.check_happened()


@contextmanager
def slow_replica(replica: int) -> Iterator[None]:
    """A block in which one replica goes on only when no other can.

    So it is the last to come to every synchronization point.

    It is as one slow device among fast ones, without any waiting, and the same each
    time. The others go in replica order, one at a time, on whatever devices they are.

    Args:
        replica: The id of the replica.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> with torchstrategy.testing.slow_replica(0):
        ...     strategy.run(lambda: print(torchstrategy.get_replica_context()))
        <torchstrategy.ReplicaContext 1 of 2>
        <torchstrategy.ReplicaContext 0 of 2>

    Raises:
        TypeError: If `replica` is not an int.
        ValueError: If it is negative; from `run`, if the strategy has no such replica.
        RuntimeError: If it is entered in a replica; from `run`, if something else, such
            as `Lockstep`, gives turns.
    """
    refuse_in_replica("slow_replica")
    with in_force(_Slow(replica)):
        yield


@final
class _Slow(Instrument):
    def __init__(self, replica: int) -> None:
        refuse_bad_replica("slow_replica", replica)
        self._replica = replica

    def __repr__(self) -> str:
        return f"slow_replica({self._replica})"

    def _begins(self, num_replicas: int) -> Turns:
        refuse_unknown_replica(repr(self), self._replica, num_replicas)
        return self._next

    def _next(self, waiting: Sequence[int]) -> int:
        return min(waiting, key=lambda r: (r == self._replica, r))

    def _reached(self, replica: int, where: str) -> None:
        pass


@final
class _Fault(Instrument):
    """Lets a replica come to where it fails."""

    def __init__(self, injection: Injection) -> None:
        self._injection = injection

    def __repr__(self) -> str:
        return repr(self._injection)

    def called(self, replica: int, function: str) -> None:
        """A replica is about to call a function of torch."""
        self._injection.came_to(replica, function, function == self._injection.at)

    def _begins(self, num_replicas: int) -> None:
        refuse_unknown_replica(repr(self), self._injection.index, num_replicas)

    def _reached(self, replica: int, where: str) -> None:
        self._injection.came_to(
            replica,
            where,
            self._injection.at in (where, where.partition("(")[0].rstrip()),
        )


@final
class _Calls(TorchFunctionMode):
    """Sees the torch functions that the steps of all replicas call.

    It can, because their threads run under the torch modes of the caller.
    """

    def __init__(self, fault: _Fault) -> None:
        super().__init__()
        self._fault = fault

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        frame = current_frame()
        if frame is not None and frame.replica_context is not None:
            self._fault.called(
                frame.replica_context.replica_id_in_sync_group,
                getattr(func, "__name__", repr(func)),
            )
        return func(*args, **(kwargs or {}))
