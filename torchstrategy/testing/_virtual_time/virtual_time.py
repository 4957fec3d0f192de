"""A block in which simulated devices keep the time that real ones would take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torchstrategy.testing._simulation.listeners import listeners, listening
from torchstrategy.testing._simulation.ordinals import device_count
from torchstrategy.testing._simulation.program import watching_the_cpu
from torchstrategy.testing._simulation.replacing import replacing
from torchstrategy.testing._simulation.shapes import computing_shapes_only
from torchstrategy.testing._virtual_time.clock import Clock
from torchstrategy.testing._virtual_time.fused import watching_optimizers
from torchstrategy.testing._virtual_time.hosts import Hosts, of_others
from torchstrategy.testing._virtual_time.profiles import DeviceProfile
from torchstrategy.testing._virtual_time.steps import following_steps
from torchstrategy.testing._virtual_time.trace import VirtualTrace

_FUNCTIONS = ("time", "perf_counter", "monotonic")


@contextmanager
def virtual_time(
    profile: str | DeviceProfile,
    shapes_only: bool = False,
    *,
    program_clock: bool = False,
) -> Iterator[VirtualTrace]:
    """A block in which simulated devices have a clock of their own.

    On this clock, their work takes the time that it would take on real devices.

    The times come from a model, and are about 30 % off. Exact are: which copies block
    the program and on which line, which streams wait for which, how many bytes go
    where, how often the program waits for a device, and the peak of memory (of tensors;
    no fragmentation, no workspaces, no context of CUDA). So the block finds out what a
    program waits for, what overlaps, and what fits into memory, for a GPU that is not
    there. Two runs of the same program take the same time, to the last digit. Threads
    that your program starts itself may change that.

    Events and streams answer in this time: `event.elapsed_time(other)`,
    `event.query()`, `stream.query()`. Tensors that do not fit into the memory of the
    profile raise `torch.OutOfMemoryError`. `record_streams` may be on at the same time,
    and finds races.

    Args:
        profile: What the devices are taken for: `"H100-SXM"`, `"H200-SXM"`,
            `"A100-SXM-80GB"`, `"A100-SXM-40GB"`, `"V100-SXM-16GB"`, `"RTX-4090"`,
            `"L4"`, or a `DeviceProfile`.
        shapes_only: Whether operators on tensors of more than 64 KiB on devices are not
            computed: their results have the right sizes and no meaning. So models of
            real size run on a laptop.
        program_clock: Whether `time.time()`, `time.perf_counter()` and
            `time.monotonic()` answer in virtual time, too, so that a script prints the
            times of its steps. It holds for all of the process.

    Yields:
        A trace, which answers questions in the block and after it.

    Raises:
        ValueError: If there is no profile of this name.
        TypeError: If it is neither a name nor a profile.
        RuntimeError: If another such block is open, or if it is entered in a replica;
            from `run`, if something else gives turns to replicas (`Lockstep`): here
            they go to the replica whose clock is behind.

    Example:
        >>> with torchstrategy.testing.virtual_time("H100-SXM") as trace:
        ...     pass  # a step with tensors on "sim:0"
        >>> trace.seconds, trace.synchronizations
        (0.0, [])
    """
    hosts = Hosts()
    with ExitStack() as block:
        for clocks_of_others in of_others():
            block.enter_context(clocks_of_others(hosts))
        known = _profile_named(profile)
        if any(isinstance(listener, Clock) for listener in listeners()):
            raise RuntimeError(
                "virtual_time() is at work already, and times all threads: leave that "
                "block first."
            )
        clock = Clock(known, hosts, device_count())
        if shapes_only:
            block.enter_context(computing_shapes_only())
        block.enter_context(watching_optimizers(clock))
        block.enter_context(following_steps(clock.step_ends))
        block.enter_context(listening(clock))
        block.enter_context(watching_the_cpu())
        if program_clock:
            block.enter_context(_answering_for(hosts))
        yield VirtualTrace(clock)


def _profile_named(profile: object) -> DeviceProfile:
    if isinstance(profile, str):
        return DeviceProfile.named(profile)
    if not isinstance(profile, DeviceProfile):
        raise TypeError(
            f"virtual_time takes the name of a GPU or a DeviceProfile; got {profile!r}."
        )
    return profile


def _answering_for(hosts: Hosts) -> AbstractContextManager[None]:
    return replacing(
        [(time, name, _after(getattr(time, name)(), hosts)) for name in _FUNCTIONS]
    )


def _after(began: float, hosts: Hosts) -> Any:
    return lambda: began + hosts.here().now
