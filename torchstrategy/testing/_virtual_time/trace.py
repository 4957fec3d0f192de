"""What a program would do on GPUs: the questions `virtual_time` answers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, final

import torch
from typing_extensions import Self

from torchstrategy._base.errors import plural
from torchstrategy.testing._simulation.ordinals import ordinal
from torchstrategy.testing._virtual_time.advice import Advice, advice
from torchstrategy.testing._virtual_time.clock import Clock
from torchstrategy.testing._virtual_time.perfetto import perfetto
from torchstrategy.testing._virtual_time.picture import picture
from torchstrategy.testing._virtual_time.profiles import DeviceProfile
from torchstrategy.testing._virtual_time.report import advice_in_words, report
from torchstrategy.testing._virtual_time.spans import Synchronization, TimedCopy
from torchstrategy.testing._virtual_time.timeline import DeviceTime, Timeline

_Device = torch.device | str | int
_STEP = "step"


@final
class VirtualTrace:
    """What `virtual_time` has seen so far.

    It tells what takes how long, what waits for what, and how much memory the program
    needs.

    All times are in seconds and come from a model, so they are about 30 % off. What
    happens, in which order, and who waits for whom is as on a real device.

    Example:
        >>> with torchstrategy.testing.virtual_time("A100-SXM-80GB") as trace:
        ...     pass  # a step with tensors on "sim:0"
        >>> trace.seconds, trace.copies
        (0.0, [])
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[tuple[str, float]] = []
        # A part of a trace: from which mark on, and up to which one. None: from the
        # beginning, and up to the end.
        self._part: tuple[int | None, int | None] = None, None

    @property
    def profile(self) -> DeviceProfile:
        """What the devices are taken for."""
        return self._clock.profile

    @property
    def seconds(self) -> float:
        """How long it takes, until the program and all streams are done.

        For a step, it is the time until the next mark.
        """
        since, until = self._window()
        return until - since

    @property
    def copies(self) -> list[TimedCopy]:
        """The copies from one memory to another.

        Each has its route, bytes, seconds, and the line of your program.

        `is_pinned` says whether the memory of the CPU is, and `blocks` whether the
        program waits for the copy.
        """
        return list(self._timeline().copies)

    @property
    def synchronizations(self) -> list[Synchronization]:
        """Where the program waits for a device: why, where, and for how long.

        It names the line of your program.

        A copy that blocks, `.item()`, `.cpu()`, `synchronize()`, `nonzero()` and the
        like. Those that need not wait, since the device is done already, are in the
        list with 0 seconds: on another device they may wait.
        """
        return list(self._timeline().synchronizations)

    def device(self, device: _Device = 0) -> DeviceTime:
        """What one device does, and for how many seconds.

        The seconds are `busy`, `idle`, `copying` and `communicating`. There are also
        `peak_bytes`, `flops` and `mfu`.

        `mfu`, model flops utilization, is the part of the time that the arithmetic
        would take at the peak of its dtype. It counts matrix products, convolutions and
        attention.

        Args:
            device: `"sim:1"`, or its index.
        """
        return self._timeline().device(ordinal(device))

    def overlap(
        self,
        one: Literal["compute", "copy", "collective"] = "copy",
        other: Literal["compute", "copy", "collective"] = "compute",
        device: _Device | None = None,
    ) -> float:
        """How much of one kind of work a device does while it does the other kind.

        The result is a part of the time of the first kind, from 0 to 1.

        Args:
            one: `"copy"`, from and to other memory; `"collective"`, between ranks; or
                `"compute"`, which is everything else.
            other: The same.
            device: `"sim:1"`, or its index; None: all devices together.

        Returns:
            The part; 1 if there is no work of the first kind.
        """
        return self._timeline().overlap(
            one, other, None if device is None else ordinal(device)
        )

    def mark(self, name: str = _STEP) -> None:
        """Marks this moment of the program, and so the beginning of a step.

        Of ranks, the marks of the first one count.

        Reports see by themselves where `optimizer.step()` ends a step, and `step` says
        it where there is none. A mark says where the first step begins, and what comes
        before it is set-up.

        Args:
            name: What it is called.
        """
        host = self._clock.hosts.here()
        if not host.rank:
            self._marks.append((name, host.now))
            self._clock.begin_peaks()

    def step(self, number: int, name: str = _STEP) -> Self:
        """The part of the trace from a mark to the next one of its name, or to the end.

        Args:
            number: Which of the marks of this name: 0 is the first, and -1 the last.
            name: What the marks are called.

        Raises:
            IndexError: If there are not so many.
        """
        marks = [i for i, (called, _) in enumerate(self._marks) if called == name]
        if not -len(marks) <= number < len(marks):
            raise IndexError(
                f"There is no step {number}: the program said trace.mark({name!r}) "
                f"{plural(len(marks), 'time')}. Say it at the beginning of each step."
            )
        number %= len(marks)
        part = self.__class__(self._clock)
        part._marks = self._marks
        part._part = (
            marks[number],
            marks[number + 1] if number + 1 < len(marks) else None,
        )
        return part

    def _from_first_mark(self) -> Self:
        """The trace from the first mark on; all of it if there is none."""
        part = self.__class__(self._clock)
        part._marks = self._marks
        part._part = 0 if self._marks else None, None
        return part

    def _advice(self) -> list[Advice]:
        """What would make the steps faster.

        A part of a trace has no advice. Nor has a trace in which others, such as
        replicas, gave clocks.
        """
        if self._part != (None, None) or self._clock.hosts.were_given:
            return []
        return advice(self._clock.acts, self.profile)

    def report(self) -> str:
        """The trace in words: its steps, the devices, the copies, and five waits.

        These are the waits that matter most.

        A trace of a whole block ends with advice: at most five changes, each of which
        was predicted to make its steps faster.
        """
        return "\n".join([report(self._timeline()), *advice_in_words(self._advice())])

    def save(self, path: str | Path) -> None:
        """Writes the timeline to a file.

        Args:
            path: A name that ends in `.svg`, for a picture that a browser shows, or in
                `.json`, for https://ui.perfetto.dev.

        Raises:
            ValueError: If it ends in something else.
        """
        path = Path(path)
        kinds = {".svg": picture, ".json": perfetto}
        if path.suffix not in kinds:
            raise ValueError(
                f"trace.save({str(path)!r}): the name has to end in .svg, for a "
                "picture, or in .json."
            )
        path.write_text(kinds[path.suffix](self._timeline()), encoding="utf-8")

    def __repr__(self) -> str:
        return f"<{self.report()}>"

    def _window(self) -> tuple[float, float]:
        first, last = self._part
        since = 0.0 if first is None else self._marks[first][1]
        return since, self._clock.end if last is None else self._marks[last][1]

    def _timeline(self) -> Timeline:
        since, until = self._window()
        first, last = self._part
        clock = self._clock

        def is_in(moment: float) -> bool:
            return since <= moment and (last is None or moment < until)

        return Timeline(
            profile=clock.profile,
            since=since,
            until=until,
            spans=[
                span for span in clock.spans if span.end > since and span.start < until
            ],
            copies=[copy for copy in clock.copies if is_in(copy.start)],
            synchronizations=[
                one for one in clock.synchronizations if is_in(one.start)
            ],
            cpu_work=[work for work in clock.cpu_work if is_in(work.start)],
            peaks=clock.peaks(
                0 if first is None else first + 1, None if last is None else last + 1
            ),
            ends=[end for end in clock.ends if is_in(end)],
            begin=since if first is not None else self._first_step(),
        )

    def _first_step(self) -> float | None:
        """When the first step begins, if the program has marked that."""
        moment = next((moment for name, moment in self._marks if name == _STEP), None)
        return (
            moment
            if moment is not None and moment < next(iter(self._clock.ends), moment)
            else None
        )
