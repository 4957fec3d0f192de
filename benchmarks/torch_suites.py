"""Runs torch's own tests of distributed code in ranks, and counts how many pass.

The ranks are in one process.

python benchmarks/torch_suites.py FOLDER [PATTERNS...] [--as-cuda] [--ranks N]
[--processes] [--json FILE]

FOLDER is `test/distributed` of a copy of PyTorch's repository. Nothing in it is
changed. Each file runs in an interpreter of its own. torch's test classes start a
process for each rank; here `run_ranks` calls the same function for each rank.
`--as-cuda` runs what asks for GPUs, on simulated devices: four, or as many as `--ranks`
says.

`--processes` runs the tests as they are, in processes that talk through gloo: what
fails there, too, is no fault of the ranks. `--without-profilers` lets the tests of
collectives check numbers alone: each rank opens torch's profiler there, and one process
has one.

It prints what failed, with the first line of the error, and a table by suite. FILE gets
the result of each test.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
SECONDS = 60  # of CPU time that a test may take
SECONDS_OF_A_FILE = 1200
# What `test_distributed_spawn.py` runs.
TESTS = "torch.testing._internal.distributed.distributed_test"
SUITES = {
    "functional collectives": [
        "test_functional_api.py",
        "test_c10d_functional_native.py",
    ],
    "collectives and meshes": [
        "test_device_mesh.py",
        "test_c10d_object_collectives.py",
        "test_collective_utils.py",
    ],
    "DTensor": ["_tensor/**/test_*.py", "tensor/**/test_*.py"],
    "FSDP2": ["_composable/fsdp/test_*.py"],
    "checkpoints": ["checkpoint/**/test_*.py"],
    "DDP": [
        "test_distributed_spawn.py",
        "_composable/test_replicate.py",
        "algorithms/**/test_*.py",
    ],
}


def main() -> None:
    """Runs the suites, and prints what became of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "patterns", nargs="*", help="parts of the names of files, all if there are none"
    )
    parser.add_argument(
        "--only", default="", help="tests whose names have this word in them"
    )
    parser.add_argument("--as-cuda", action="store_true", help="simulate as many GPUs")
    parser.add_argument(
        "--ranks",
        type=int,
        default=RANKS,
        help="ranks of tests that do not say how many, and simulated GPUs",
    )
    parser.add_argument(
        "--without-profilers", action="store_true", help="leave out torch's profiler"
    )
    parser.add_argument(
        "--processes",
        action="store_true",
        help="start processes, as torch's own runner does",
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    # What an interpreter of its own is to run.
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.file:
        run_file(told)
        return
    counts: dict[str, Counter[str]] = {}
    for suite, patterns in SUITES.items():
        for file in sorted(
            {file for pattern in patterns for file in told.folder.glob(pattern)}
        ):
            name = str(file.relative_to(told.folder))
            if told.patterns and not any(pattern in name for pattern in told.patterns):
                continue
            results = results_of(file, told)
            found = Counter(result["how"] for result in results)
            print(
                f"{name}: {', '.join(f'{n} {how}' for how, n in found.items())}",
                flush=True,
            )
            for result in results:
                if result["how"] not in ("passed", "skipped"):
                    print(f"    {result['test']}: {result['why']}", flush=True)
            counts.setdefault(suite, Counter()).update(found)
            if told.json:
                with told.json.open("a") as out:
                    out.writelines(
                        json.dumps({"file": name, **result}) + "\n"
                        for result in results
                    )
    print(
        "\n| suite | ran | passed | failed | skipped by the test |\n| --- | --- | --- "
        "| --- | --- |"
    )
    for suite, found in counts.items():
        passed, skipped = found["passed"], found["skipped"]
        ran = found.total() - skipped
        print(f"| {suite} | {ran} | {passed} | {ran - passed} | {skipped} |")


def results_of(file: Path, told: argparse.Namespace) -> list[dict[str, str]]:
    """What became of each test of a file, in an interpreter of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "results"
        (Path(scratch) / "barrier").mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [os.environ.get("PYTHONPATH", str(ROOT)), str(file.parent.resolve())]
            ),
            "OMP_NUM_THREADS": "1",
            "TEMP_DIR": scratch,
            "WORLD_SIZE": str(told.ranks),
            "BACKEND": "nccl" if told.as_cuda else "gloo",
            "RESULTS": str(out),
        }
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).resolve()),
            *sys.argv[1:],
        ]
        command += ["--file", str(file.resolve())]
        said = ""
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=scratch,
                capture_output=True,
                timeout=SECONDS_OF_A_FILE,
            )
            if done.returncode:
                said = (
                    f"ended with status {done.returncode}: "
                    f"{done.stderr.decode(errors='replace').strip()[-300:]}"
                )
        except subprocess.TimeoutExpired:
            said = f"not done after {SECONDS_OF_A_FILE} seconds"
        results = (
            [json.loads(line) for line in out.read_text().splitlines()]
            if out.exists()
            else []
        )
        return [
            *results,
            *([{"test": "(the file)", "how": "failed", "why": said}] if said else []),
        ]


def run_file(told: argparse.Namespace) -> None:
    """Runs the tests of a file here."""
    with contextlib.ExitStack() as stack:
        if told.as_cuda:
            from torchstrategy.testing import simulate_devices

            # As `python -m torchstrategy.testing.run`.
            from torchstrategy.testing._runner.deep_alias import deep_alias

            simulate_devices(told.ranks)
            stack.enter_context(deep_alias())
        if told.processes:
            fork_processes()
        else:
            put_ranks()
        if told.without_profilers:
            leave_out_profilers()
        module = importlib.import_module(told.file.stem)
        with contextlib.redirect_stdout(io.StringIO()):
            for test in each_test(
                unittest.defaultTestLoader.loadTestsFromModule(module)
            ):
                if told.only in test.id():
                    unittest.TestSuite([test]).run(Results())


def each_test(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """The tests of a suite and of the suites in it."""
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from each_test(one)
        elif isinstance(one, unittest.TestCase):
            yield one


class Results(unittest.TestResult):
    """Writes a line of JSON for each test, and ends a test that takes too long."""

    def startTest(self, test: unittest.TestCase) -> None:
        self._how, self._why, self._trace = "passed", "", ""
        signal.signal(signal.SIGUSR1, self._too_long)
        self._is_over = threading.Event()
        threading.Thread(
            target=self._watch, args=(self._is_over, time.process_time()), daemon=True
        ).start()

    def stopTest(self, test: unittest.TestCase) -> None:
        self._is_over.set()
        result = {
            "test": test.id(),
            "how": self._how,
            "why": self._why,
            "trace": self._trace,
        }
        with open(os.environ["RESULTS"], "a") as out:
            out.write(json.dumps(result) + "\n")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._how, self._why = "skipped", reason

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        if test.__class__.__name__ == "_ErrorHolder":  # setUpClass
            self.startTest(test)
        self._how, self._trace = "failed", "".join(traceback.format_exception(*err))
        self._why = f"{err[0].__name__}: {str(err[1]).strip() or '?'}".splitlines()[0][
            :300
        ]
        if test.__class__.__name__ == "_ErrorHolder":
            self.stopTest(test)

    addFailure = addError

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._how = "passed"

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._how, self._why = "failed", "It passed, and torch expects it to fail."

    def _watch(self, is_over: threading.Event, begin: float) -> None:
        while not is_over.wait(0.5):
            if time.process_time() - begin > SECONDS:
                # A timer's signal may go to another thread, and then does not wake this
                # one.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                return

    def _too_long(self, *_: Any) -> None:
        raise TimeoutError(f"not done after {SECONDS} seconds")


def fork_processes() -> None:
    """Lets torch's test classes fork: each process would import torch otherwise."""
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def spawn(test: Any) -> None:
        test._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = spawn


def leave_out_profilers() -> None:
    """Lets the tests of collectives call them without torch's profiler."""

    def call(
        test: Any,
        title: str,
        is_async: bool,
        first: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        second = kwargs.pop("secondary_op_call", None)
        for name in ("expect_event", "profile_cuda", "tensor_shapes"):
            kwargs.pop(name, None)
        works = [first(*args, **kwargs), *([second()] if second else [])]
        for work in works if is_async else []:
            work.wait()

    importlib.import_module(TESTS).DistributedTest._DistTestBase.call_dist_op = call


def put_ranks() -> None:
    """Lets torch's test classes run their ranks by `run_ranks`."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed
    from torch.testing._internal.common_utils import set_rng_seed

    from torchstrategy.testing import run_ranks

    skips = {
        skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()
    }

    def in_ranks(main: Callable[[int], object], n: int) -> None:
        if n < 1:
            raise unittest.SkipTest("it has a rank for each GPU")
        try:
            run_ranks(main, n)
        except SystemExit as end:  # so a rank says that the test cannot run here
            if end.code in skips:
                raise unittest.SkipTest(skips[end.code]) from None
            raise RuntimeError(f"a rank ended with status {end.code}") from end

    def join_or_run(self: Any, method: Callable[[], None]) -> Any:
        @functools.wraps(method)
        def run(test: Any) -> None:
            if test.rank >= 0:
                method()
            elif isinstance(test, common_distributed.MultiThreadedTestCase):
                in_ranks(
                    lambda rank: type(test)._run(
                        test._testMethodName, rank, test.world_size
                    ),
                    test.world_size,
                )
            else:
                name, kwargs = (
                    test._testMethodName,
                    {"fake_pg": getattr(test, "fake_pg", False)},
                )
                n = int(test.world_size)
                in_ranks(
                    lambda rank: type(test)._run(
                        rank, name, test.file_name, None, **kwargs
                    ),
                    n,
                )

        return types.MethodType(run, self)

    def run_test(test: Any, name: str, pipe: None) -> None:
        set_rng_seed()
        getattr(test, name)()
        if test.destroy_pg_upon_exit and dist.is_initialized():
            dist.destroy_process_group()

    def run_of_thread(test: Any, name: str, rank: int, ranks: int) -> None:
        if hasattr(test, "_tls"):  # torch keeps tolerances for each thread
            test._tls.precision, test._tls.rel_tol = (
                type(test)._precision,
                type(test)._rel_tol,
            )
        if torch.cuda.is_available():
            # Where each of torch's threads begins, and some tests put all of their
            # tensors.
            torch.cuda.set_device(0)
        dist.init_process_group("gloo")
        test.perThreadSetUp()
        try:
            getattr(test, name)()
        finally:
            dist.destroy_process_group()
            test.perThreadTearDown()

    def spawn_threads(
        function: Any = None, timeout: Any = None, world_size: int = RANKS
    ) -> Any:
        def decorate(function: Any) -> Any:
            def run(test: Any, *args: Any, **kwargs: Any) -> None:
                def main(rank: int) -> None:
                    dist.init_process_group("gloo")
                    function(test, *args, **kwargs)

                in_ranks(main, world_size)

            return run

        return decorate if function is None else decorate(function)

    def sync(cls: type, wait_for: int | None = None, timeout: int = 10) -> None:
        # torch's waits for a file of each process. As that one, this is no collective
        # of a group.
        store, rank = dist.TCPStore("localhost", 0), os.environ["RANK"]
        number = store.add(f"barriers of rank {rank}", 1)
        if store.add(f"barrier {number}", 1) == (wait_for or dist.get_world_size()):
            store.set(f"end of barrier {number}", "")
        store.wait([f"end of barrier {number}"])

    importlib.import_module(TESTS).Barrier.sync = classmethod(sync)
    processes, threads = (
        common_distributed.MultiProcessTestCase,
        common_distributed.MultiThreadedTestCase,
    )
    processes.join_or_run = threads.join_or_run = join_or_run
    processes._spawn_processes = processes._start_processes = threads._spawn_threads = (
        lambda test: None
    )
    processes.run_test, threads.run_test_with_threaded_pg = run_test, run_of_thread
    common_distributed.spawn_threads_and_init_comms = spawn_threads


if __name__ == "__main__":
    main()
