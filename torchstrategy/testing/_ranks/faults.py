"""Ranks that fail, where the test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

from torch.overrides import TorchFunctionMode

from torchstrategy._base.errors import plural
from torchstrategy.testing._ranks.injection import Injection

_planned: list[Injection] = []  # of the blocks that are open


@contextmanager
def fail_in_rank(
    rank: int,
    at: str = "start",
    error: BaseException | type[BaseException] | None = None,
    *,
    times: int = 1,
    skip: int = 0,
) -> Iterator[None]:
    """A block in which one rank of `run_ranks` fails, as one process of a cluster does.

    Use it to see what the others do: that a checkpoint is whole, that the error has the
    name of the rank.

    Args:
        rank: Which rank.
        at: Where it fails: `"start"`; `"end"`; when it comes to a collective of a kind,
            such as `"all_reduce"`, `"broadcast"`, `"barrier"`, `"send"` or `"recv"`
            (see `Collective.kind`); or in place of a torch function that the program
            calls, such as `"linear"` or `"backward"`.
        error: What it raises: an exception, or a class of exceptions that is called
            without arguments. None: a `RuntimeError` that says where it comes from.
        times: How often it fails.
        skip: How often it first gets away: with `skip=2` the third `all_reduce` fails.

    Example:
        >>> def main(rank):
        ...     torch.distributed.init_process_group("nccl")
        ...     torch.distributed.barrier()
        >>> with torchstrategy.testing.fail_in_rank(1, at="barrier", error=MemoryError):
        ...     try:
        ...         torchstrategy.testing.run_ranks(main, 2)
        ...     except MemoryError:
        ...         print("rank 1 is out of memory")
        rank 1 is out of memory

    Raises:
        AssertionError: If the block ends and the rank has not failed so often. It lists
            what it did come to.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is too low; from `run_ranks`, if there is no such rank.
    """
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"fail_in_rank: a rank is an int from 0; got {rank!r}.")
    if rank < 0:
        raise ValueError(f"fail_in_rank: a rank is 0 or more; got {rank}.")
    injection = Injection("fail_in_rank", "rank", rank, at, error, times, skip)
    _planned.append(injection)
    try:
        yield
    finally:
        _planned.remove(injection)
    injection.check_happened()


@final
class Visits:
    """Tells the planned failures of a run where its ranks are.

    Raises:
        ValueError: If a failure is planned for a rank that the run does not have.
    """

    def __init__(self, n: int) -> None:
        self._planned = list(_planned)
        for injection in self._planned:
            if injection.index >= n:
                raise ValueError(
                    f"{injection!r} names rank {injection.index}, and run_ranks was "
                    f"called with {plural(n, 'rank')} in its block: they end at "
                    f"{n - 1}."
                )

    def came_to(self, rank: int, where: str) -> None:
        """A rank has come to somewhere."""
        for injection in self._planned:
            injection.came_to(rank, where, where == injection.at)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """The block in which a rank runs, on its thread."""
        self.came_to(rank, "start")
        with ExitStack() as modes:
            if self._planned:
                modes.enter_context(_Calls(self, rank))
            yield
        self.came_to(rank, "end")


@final
class _Calls(TorchFunctionMode):
    """Sees the torch functions that a rank calls."""

    def __init__(self, visits: Visits, rank: int) -> None:
        super().__init__()
        self._visits, self._rank = visits, rank

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", repr(func))
        if name not in _COLLECTIVES and not name.startswith("_"):
            self._visits.came_to(self._rank, name)
        return func(*args, **(kwargs or {}))


# Functions of `torch.distributed` that ask for function modes, and have the names of
# kinds of collectives.
_COLLECTIVES = frozenset(
    (
        *(
            "all_reduce",
            "broadcast",
            "all_gather",
            "reduce_scatter",
            "reduce",
            "gather",
            "scatter",
            "all_to_all",
        ),
        *("barrier", "send", "recv"),
    )
)
