"""What goes from replica to replica and from device to device, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base.torch_internals import TorchDispatchMode
from torchstrategy._base.types import Device
from torchstrategy._group.instruments import Instrument
from torchstrategy.testing._instruments import in_force
from torchstrategy.testing._refusals import refuse_in_replica


class Copy(NamedTuple):
    """The values of one tensor, copied."""

    source: Device
    target: Device
    bytes: int  # that are written
    is_write: bool  # into memory that was there before


@final
class Traffic:
    """What `count_traffic` has counted so far.

    Example:
        >>> with torchstrategy.testing.count_traffic() as traffic:
        ...     copy = torch.ones(3).to("meta")
        >>> traffic.copies, traffic.bytes
        (1, 12)
        >>> traffic.copies_by_route
        Counter({(device(type='cpu'), device(type='meta')): 1})
    """

    def __init__(self) -> None:
        self._copies: list[Copy] = []  # appended to on all threads of a run
        self._meetings: list[str] = []
        self._reductions = 0

    @property
    def copies(self) -> int:
        """How many tensors were copied from one device to another."""
        return len(self._between())

    @property
    def bytes(self) -> int:
        """How many bytes they have, on the device that they were copied to."""
        return sum(copy.bytes for copy in self._between())

    @property
    def copies_by_route(self) -> Counter[tuple[Device, Device]]:
        """How many tensors were copied between devices, by (source, target)."""
        return Counter((copy.source, copy.target) for copy in self._between())

    @property
    def bytes_by_route(self) -> Counter[tuple[Device, Device]]:
        """How many bytes they have, by (source, target)."""
        routes: Counter[tuple[Device, Device]] = Counter()
        for copy in self._between():
            routes[copy.source, copy.target] += copy.bytes
        return routes

    @property
    def writes(self) -> int:
        """How many tensors got the values of another tensor of the same device."""
        return sum(
            copy.is_write and copy.source == copy.target for copy in self._copies
        )

    @property
    def meetings(self) -> Counter[str]:
        """How often the replicas synchronized, by the name of the point.

        Error messages use the same names, such as `"optimizer.step()"`.
        """
        return Counter(self._meetings)

    @property
    def gradient_reductions(self) -> int:
        """How often gradients that the replicas had collected became one.

        It happens once a step, if no gradient is sent twice.
        """
        return self._reductions

    def __repr__(self) -> str:
        return (
            f"Traffic(copies={self.copies}, bytes={self.bytes}, writes={self.writes}, "
            f"meetings={dict(self.meetings)}, "
            f"gradient_reductions={self.gradient_reductions})"
        )

    def _between(self) -> list[Copy]:
        return [copy for copy in self._copies if copy.source != copy.target]


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """A block that counts copies, synchronization points and reductions of gradients.

    A reduction is a moment at which the replicas' gradients become one.

    It counts on this thread and on those of its runs.

    A copy is what `Tensor.to`, `Tensor.copy_`, `Module.to` and the like do. On one
    device there is no boundary to cross, so that only `writes` can tell that values
    were copied; on simulated devices the numbers are those of real ones, but for what
    CUDA copies without saying so (the broadcasts of NCCL).

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> def step():
        ...     context = torchstrategy.get_replica_context()
        ...     return context.all_reduce("sum", torch.ones(2))
        >>> with torchstrategy.testing.count_traffic() as traffic:
        ...     total = strategy.run(step)
        >>> traffic.meetings
        Counter({'all_reduce(SUM)': 1})
        >>> traffic.copies
        0

    Raises:
        RuntimeError: If it is entered in a replica.
    """
    refuse_in_replica("count_traffic")
    traffic = Traffic()
    with in_force(_Meetings(traffic)), _Operations(traffic):
        yield traffic


def copies_of(operator: str, arguments: tuple[Any, ...], result: Any) -> Iterator[Copy]:
    """What an operation of torch copies.

    Args:
        operator: Its full name: `aten::copy_`.
        arguments: What it was given.
        result: What it returned.
    """
    if operator == "aten::copy_":
        yield _copied(arguments[1], arguments[0], is_write=True)
    elif operator == "aten::_foreach_copy_":
        for target, source in zip(arguments[0], arguments[1], strict=True):
            yield _copied(source, target, is_write=True)
    elif operator == "aten::_to_copy":
        yield _copied(arguments[0], result, is_write=False)


def _copied(source: torch.Tensor, target: torch.Tensor, is_write: bool) -> Copy:
    return Copy(
        source.device, target.device, target.numel() * target.element_size(), is_write
    )


@final
class _Meetings(Instrument):
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def _reached(self, replica: int, where: str) -> None:
        pass

    def _held(self, point: str) -> None:
        self._traffic._meetings.append(point)

    def _combined_gradients(self) -> None:
        self._traffic._reductions += 1


@final
class _Operations(TorchDispatchMode):
    """Sees every operation of all replicas: their threads wear the caller's modes."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._traffic._copies.extend(copies_of(func.name(), args, result))
        return result
