"""The command line: `python -m torchstrategy.testing.run --devices 4 train.py ...`."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import torch.multiprocessing as mp

from torchstrategy._base.errors import plural
from torchstrategy.testing._lints import Finding, Watch
from torchstrategy.testing._ranks.alone import world_of_one
from torchstrategy.testing._ranks.orders import with_a_seed
from torchstrategy.testing._ranks.process import put_back_builtins, take_builtins
from torchstrategy.testing._ranks.record import RankRecord
from torchstrategy.testing._ranks.run_ranks import run_recorded
from torchstrategy.testing._runner.comparison import differences, earlier_report
from torchstrategy.testing._runner.deep_alias import deep_alias
from torchstrategy.testing._runner.messages import advice, printed
from torchstrategy.testing._runner.observer import Observer, observing
from torchstrategy.testing._runner.output import Output, ends_with_a_report
from torchstrategy.testing._runner.prediction import FILES, Prediction
from torchstrategy.testing._runner.programs import (
    Program,
    give_local_rank,
    module,
    script,
    wanted_spelling,
)
from torchstrategy.testing._runner.report import Report
from torchstrategy.testing._simulation import (
    cuda_alias,
    record_streams,
    simulate_devices,
)
from torchstrategy.testing._simulation import module as devices
from torchstrategy.testing._simulation.cuda_alias import Compiling
from torchstrategy.testing._simulation.storages import Starting
from torchstrategy.testing._simulation.words import in_words_of_cuda
from torchstrategy.testing._virtual_time import DeviceProfile, virtual_time

DEVICE = "cuda"  # what the report calls devices: the program's word
_FIRST_SEED = 1_234_567  # of a rank whose program sets none; any number does
_NOT_SHARED = (
    "A process of its own has no simulated devices, so it cannot share a tensor on "
    "{device}. Let torch.multiprocessing.spawn start the function: it then runs in "
    "ranks, which share this process. Or take the process out of the program while you "
    "test it."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a program as the command line says; returns its exit status."""
    options, output = _parsed(arguments), Output()
    # The program may replace the built-in names and leave the folder.
    names, folder = take_builtins(), Path.cwd()
    try:
        before = (
            None if options.compare is None else earlier_report(Path(options.compare))
        )
    except ValueError as error:
        print(f"torchstrategy.testing.run: {error}", file=sys.stderr)
        return 2
    count = options.devices or max(options.ranks or 0, 2)
    simulate_devices(count)
    try:
        find = module if options.module else script
        program = find(options.program, options.arguments)
    except (FileNotFoundError, ModuleNotFoundError, SyntaxError) as error:
        print(
            f"torchstrategy.testing.run: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        return 2
    run = _Run(program, options, output)
    status = run.go()
    put_back_builtins(names)
    report = Report(
        program=Path(options.program).name,
        status=status,
        seen=run.observer.seen,
        peaks=[devices.max_memory_allocated(index) for index in range(count)],
        races=run.races,
        collectives=run.record if run.has_ranks else None,
        device=DEVICE,
        prediction=run.prediction,
        notes=run.notes(),
        findings=run.findings,
    )
    is_written = output.write(f"\n{report}\n")
    numbers = report.as_json() if options.json or before is not None else {}
    if before is not None:
        is_written = (
            output.write(
                "\n".join([*differences(before, numbers, options.compare), ""])
            )
            and is_written
        )
    try:
        if options.json:
            (folder / options.json).write_text(
                json.dumps(numbers, indent=2) + "\n", encoding="utf-8"
            )
        if run.prediction is not None and options.trace:
            run.prediction.save(folder / options.trace)
    except OSError as error:
        output.write(
            f"torchstrategy.testing.run: the report could not be written: {error}\n"
        )
        is_written = False
    is_bad = not is_written or (options.strict and (run.races or run.findings))
    return status or int(bool(is_bad))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torchstrategy.testing.run",
        description=(
            "Run a program for GPUs on simulated devices of the CPU, and report what "
            "it did. In the program, "
            '"cuda" means these devices.'
        ),
    )
    parser.add_argument(
        "--devices",
        type=_positive,
        metavar="N",
        help="how many devices; default: 2, or one a rank",
    )
    parser.add_argument(
        "--as-cuda",
        action="store_true",
        help=(
            "devices and tensors also say that they are CUDA's: device.type == "
            '"cuda", tensor.is_cuda'
        ),
    )
    parser.add_argument(
        "--ranks",
        type=_positive,
        metavar="N",
        help="run it as torchrun does, in N ranks",
    )
    parser.add_argument(
        "--order",
        type=_order,
        metavar="reversed|random[:SEED]",
        help=(
            "which rank goes on, of those that can: so missing barriers and races "
            "through files show"
        ),
    )
    parser.add_argument(
        "--profile",
        type=_profile,
        metavar="GPU",
        help=(
            "predict the times on such GPUs, A100 or another one, which the program "
            "finds on its own clock, too"
        ),
    )
    parser.add_argument(
        "--shapes-only",
        action="store_true",
        help=(
            "with --profile: do not compute operators on tensors of more than 64 KiB, "
            "so that large models run"
        ),
    )
    parser.add_argument(
        "--trace",
        metavar="DIR",
        help=f"with --profile: write {' and '.join(FILES)} (for Perfetto) there",
    )
    parser.add_argument(
        "--compile",
        choices=("eager", "aot_eager", "refuse"),
        default="aot_eager",
        help=(
            "what torch.compile does in place of inductor, which writes kernels for a "
            "GPU; default: aot_eager"
        ),
    )
    parser.add_argument(
        "--stop-after",
        type=_positive,
        metavar="N",
        help="end it after N steps of an optimizer",
    )
    _add_rest(parser)
    options = parser.parse_args(arguments)
    for option in ("shapes_only", "trace"):
        if getattr(options, option) and options.profile is None:
            parser.error(
                f"--{option.replace('_', '-')} needs --profile, the GPU whose times "
                "are predicted"
            )
    return options


def _add_rest(parser: argparse.ArgumentParser) -> None:
    """The options about what comes of the report, and the program."""
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if streams race, or lints find something",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the numbers of the report there, too"
    )
    parser.add_argument(
        "--compare",
        metavar="FILE",
        help="say what is different from an earlier run, whose --json has written FILE",
    )
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the program is a module, as for python -m",
    )
    parser.add_argument("program", help="a script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="what the program finds in sys.argv"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def _order(text: str) -> str:
    try:
        return with_a_seed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _profile(text: str) -> DeviceProfile:
    try:
        return DeviceProfile.named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@final
class _Run:
    def __init__(
        self, program: Program, options: argparse.Namespace, output: Output
    ) -> None:
        self._program, self._options, self._output = program, options, output
        self.observer = Observer(options.stop_after, _progress)
        self.record = RankRecord()
        self.has_ranks = options.ranks is not None
        self.races: list[str] = []
        self.findings: list[Finding] = []
        self.prediction: Prediction | None = None
        # The spelling of the additional argument that each rank gets.
        self.spelling: str | None = None

    def go(self) -> int:
        """Runs the program; returns its exit status."""
        with ExitStack() as block:
            block.enter_context(self._program.at_home())
            Compiling.backend = (
                None if self._options.compile == "refuse" else self._options.compile
            )
            block.enter_context(ends_with_a_report(self._output))
            self._predict(block)
            streams = block.enter_context(record_streams(check=False))
            block.enter_context(observing(self.observer))
            watch = Watch()
            self.observer.before, self.observer.also = watch.writes, watch.operator
            block.enter_context(watch.watching())
            block.enter_context(_spawning(self._spawn))
            block.enter_context(_starting_nothing())
            block.enter_context(deep_alias() if self._options.as_cuda else cuda_alias())
            status = self._status_of(self._run)
        self.races = [in_words_of_cuda(race) for race in streams.races]
        self.findings = watch.findings()
        return status

    def _run(self) -> None:
        if self._options.ranks is None:
            with self.observer, world_of_one(self.record, self._is_a_rank):
                self._program.run()
        else:
            self.spelling = wanted_spelling(self._program.file, self._options.arguments)
            self._ranks(self._run_as, self._options.ranks)

    def _run_as(self, rank: int) -> None:
        give_local_rank(self.spelling, rank)
        self._program.run()

    def _is_a_rank(self) -> None:
        self.has_ranks = True

    def _predict(self, block: ExitStack) -> None:
        if self._options.profile is not None:
            time = virtual_time(
                self._options.profile, self._options.shapes_only, program_clock=True
            )
            self.prediction = Prediction(block.enter_context(time), DEVICE)

    def _ranks(self, main: Callable[..., Any], n: int, *args: Any) -> None:
        run_recorded(
            partial(_with_seeds_of_its_own, main),
            n,
            self.record,
            args,
            self._options.order,
        )

    def _spawn(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        *_: Any,
        **options: Any,
    ) -> None:
        self.has_ranks = True
        self._ranks(function, nprocs, *args)

    def notes(self) -> list[str]:
        """What was done in another way than the program says, a line for each."""
        notes = []
        if Compiling.count:
            times = plural(Compiling.count, "time")
            notes.append(
                f"torch.compile was called {times} for inductor, and ran "
                f"{Compiling.backend} (--compile)"
            )
        if self.spelling is not None:
            given = (
                f"each rank was given {self.spelling}=RANK, as "
                "torch.distributed.launch does"
            )
            notes.append(f"{given}; torchrun sets LOCAL_RANK instead")
        return notes

    def _status_of(self, run: Callable[[], None]) -> int:
        try:
            run()
        except SystemExit as error:
            if isinstance(error.code, str):
                self._output.write(f"{error.code}\n")
            return (
                error.code
                if isinstance(error.code, int)
                else int(error.code is not None)
            )
        except KeyboardInterrupt:
            return 130  # as a shell says it
        except BaseException as error:
            self._output.write(
                printed(error) + advice(error, self._options.ranks is not None)
            )
            return 1
        return 0


def _with_seeds_of_its_own(main: Callable[..., Any], rank: int, *args: Any) -> None:
    """Runs a rank with random numbers that no other rank has, as processes have them.

    Two runs have the same.
    """
    seed = _FIRST_SEED + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # also those of the devices
    main(rank, *args)


def _progress(steps: int) -> None:
    if sys.stderr.isatty():
        print(f"\rstep {steps}", end="", file=sys.stderr, flush=True)


@contextmanager
def _spawning(spawn: Callable[..., None]) -> Iterator[None]:
    """A block in which `torch.multiprocessing.spawn` runs ranks.

    New processes would not share simulated devices.
    """
    processes: Any = mp
    before = processes.spawn, processes.start_processes
    processes.spawn = processes.start_processes = spawn
    try:
        yield
    finally:
        processes.spawn, processes.start_processes = before


@contextmanager
def _starting_nothing() -> Iterator[None]:
    """A block that refuses to start a process with tensors of devices.

    Otherwise the process would fail, and the program would go on.
    """
    Starting.refused = _NOT_SHARED
    try:
        yield
    finally:
        Starting.refused = None
