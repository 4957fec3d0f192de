"""Replicas that fail or lag, where the test says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch.overrides import TorchFunctionMode

from torchstrategy._core.context import current_frame
from torchstrategy._core.errors import plural
from torchstrategy._execution.instruments import START, Instrument, Turns
from torchstrategy.testing._instruments import in_force
from torchstrategy.testing._refusals import refuse_bad_replica, refuse_in_replica, refuse_unknown_replica


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

    Use it to see that a program survives it: that `strategy.run` raises the error, and leaves parameters and gradients
    as its documentation says.

    Args:
        replica: The id of the replica.
        at: Where it fails: `"start"`; `"end"`; when it comes to a synchronization point, such as `"optimizer.step()"`,
            `"all_reduce"`, `"merge_call"` or `"the first read of a gradient"` (the name that errors give it, with or
            without what is in parentheses at its end); at a `Lockstep.point` of this name; or in place of a torch
            function that the step calls, such as `"linear"`, `"relu"` or `"backward"`. Functions that torch's own
            functions call are not seen.
        error: What it raises: an exception, or a class of exceptions that is called without arguments. None: a
            `RuntimeError` that says where it comes from.
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
        AssertionError: If the block ends and the replica has not failed so often. It lists what it did come to.
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument has no meaning; from `run`, if the strategy has no such replica.
        RuntimeError: If it is entered in a replica.
    """
    refuse_in_replica("fail_in_replica")
    fault = _Fault(replica, at, error, times, skip)
    with in_force(fault), _Calls(fault):
        yield
    fault.check_happened()


@contextmanager
def slow_replica(replica: int) -> Iterator[None]:
    """A block in which one replica goes on only when no other can: it is the last at every synchronization point.

    It is as one slow device among fast ones, without any waiting, and the same each time. The others go in replica
    order, one at a time, on whatever devices they are.

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
        RuntimeError: If it is entered in a replica; from `run`, if something else, such as `Lockstep`, gives turns.
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
    """Which replica fails, where, and how often it still has to. Used on that replica's thread."""

    def __init__(
        self, replica: int, at: str, error: BaseException | type[BaseException] | None, times: int, skip: int
    ) -> None:
        self._replica, self._at, self._times, self._skip = replica, at, times, skip
        refuse_bad_replica("fail_in_replica", replica)
        if not isinstance(at, str) or not at:
            raise TypeError(f"{self!r}: `at` is the name of where the replica fails; got {at!r}.")
        for name, count, least in (("times", times, 1), ("skip", skip, 0)):
            if not isinstance(count, int) or isinstance(count, bool):
                raise TypeError(f"{self!r}: `{name}` is an int; got {count!r}.")
            if count < least:
                raise ValueError(f"{self!r}: `{name}` is {least} or more; got {count}.")
        self._make_error = self._maker_of(error)
        self._passed: Counter[str] = Counter()
        self._arrivals = 0
        self._failures = 0

    def check_happened(self) -> None:
        """Refuses that a test passes whose fault did not happen.

        Raises:
            AssertionError: If the replica has not failed as often as it should.
        """
        if self._failures < self._times:
            came_to = ", ".join(f"{where} ({n} times)" if n > 1 else where for where, n in self._passed.items())
            raise AssertionError(
                f"The block of {self!r} has ended, and the replica has failed {plural(self._failures, 'time')} instead "
                f"of {self._times}. Replica {self._replica} came to: {came_to or 'nothing: it was in no run'}."
            )

    def came_to(self, replica: int, where: str, matches: bool) -> None:
        """A replica has come to somewhere, and fails if this is where it has to."""
        if replica != self._replica:
            return
        self._passed[where] += 1
        self._arrivals += matches
        if matches and self._arrivals > self._skip and self._failures < self._times:
            self._failures += 1
            raise self._make_error()

    def called(self, replica: int, function: str) -> None:
        """A replica is about to call a function of torch."""
        self.came_to(replica, function, function == self._at)

    def __repr__(self) -> str:
        return f"fail_in_replica({self._replica!r}, at={self._at!r}, times={self._times!r}, skip={self._skip!r})"

    def _begins(self, num_replicas: int) -> None:
        refuse_unknown_replica(repr(self), self._replica, num_replicas)

    def _reached(self, replica: int, where: str) -> None:
        self.came_to(replica, where, self._at in (where, where.partition("(")[0].rstrip()))

    def _maker_of(self, error: BaseException | type[BaseException] | None) -> Callable[[], BaseException]:
        if error is None:
            return lambda: RuntimeError(
                f"This failure was injected: {self!r}, and replica {self._replica} has come to {self._at!r}."
            )
        if isinstance(error, BaseException):
            return lambda: error
        if isinstance(error, type) and issubclass(error, BaseException):
            error()  # one that needs arguments is refused here, and not in the step
            return error
        raise TypeError(f"{self!r}: `error` is an exception or a class of exceptions; got {error!r}.")


@final
class _Calls(TorchFunctionMode):
    """Sees the torch functions that the steps of all replicas call: their threads wear the caller's modes."""

    def __init__(self, fault: _Fault) -> None:
        super().__init__()
        self._fault = fault

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = current_frame()
        if frame is not None and frame.replica_context is not None:
            self._fault.called(frame.replica_context.replica_id_in_sync_group, getattr(func, "__name__", repr(func)))
        return func(*args, **(kwargs or {}))
