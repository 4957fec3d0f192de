"""The first minutes on a machine with a GPU: `python -m tests.gpu`.

It runs in a copy of the repository.

It needs torch, numpy and pytest, no installation and no network, and ends in nine
minutes. Each part says what it told, and all of it is in the folder of the option
--logs. Without a GPU: ON=cpu, in the environment, runs what needs none, and --simulate
runs it on simulated devices. --short runs a little of each part, in a minute or two.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .deadline import LAST_TEST

ROOT = Path(__file__).parents[2]
PLUGINS = ("-p", "pytest_torchstrategy", "-p", "gpu.deadline", "-p", "no:cacheprovider")
PYTEST = (sys.executable, "-m", "pytest", "-q", *PLUGINS, "--tb=short")
ON_ONE_DEVICE = (*PYTEST, "-p", "gpu.on_one_device", "-W", "default")
MOST_PROCESSES = 8  # that run tests at the same time
MOST_SECONDS = 520  # of all parts together
# Seconds that pytest has, after its last test has begun, to end that test and say what
# all told.
TO_END = 20
# What some tests do is not there on one GPU.
NOT_ON_ONE_DEVICE = (
    # They simulate devices by their names, count what travels between devices, or print
    # where tensors are.
    *(
        "random_programs",
        "names_each_device_once",
        "evaluation_and_accumulation_copy_nothing",
        "what_is_sent",
    ),
    *(
        "every_way_to_reach_into",
        "share_graphs",
        "comparing_ends",
        "what_forward_writes_on_attributes",
        "reduce_to",
    ),
    *("loads_what_was_saved_with_a_data_parallel", "what_a_step_sets_on_its_thread"),
    # They make tensors or generators without a device within a scope.
    *(
        "plain_batch",
        "warning_of_a_batch",
        "averaged_through_data",
        "hooks_of_updates_are_not_warned_of",
    ),
    *("half_of_a_pair", "generator_of_the_steps_own"),
    # CUDA refuses to work in a process that was forked from one that has used it.
    "forked_child_can_run",
    # They compare with plain PyTorch on the CPU, whose numbers differ: cosines and
    # norms of weights in float32, cuDNN's recurrent layers, and updates of parameters
    # that share memory, which the GPU makes at the same time.
    *(
        "test_sync_batch_norm",
        "weight_norm",
        "parametriz",
        "weights_that_hooks_compute",
        "changes_its_dtype",
    ),
    *(
        "gradients_are_those_of_plain_pytorch",
        "parameters_that_share_memory",
        "adam_of_a_tensor_rate",
        "Adagrad",
    ),
)
# They need a device that is not the CPU.
NOT_ON_THE_CPU = (
    *(
        "fork_rng_around_a_run",
        "refusal_of_another_device",
        "on_an_accelerator_nothing_is_read_back",
    ),
    "the_attributes_that_scripts_ask_for",
)
# What some files import beside torch, numpy and pytest.
PACKAGES = (
    "hypothesis",
    "sklearn",
    "torchmetrics",
    "torch_geometric",
    "transformers",
    "pytorch_optimizer",
)


class Part(NamedTuple):
    """Commands that run at the same time, with a limit of seconds.

    It also says how many last lines are shown.
    """

    commands: Sequence[tuple[str, ...]]
    seconds: int
    lines: int = 8
    needs: str | None = None  # a package; without it, the part is left out


def missing() -> list[str]:
    """The packages that are not here."""
    return [
        package for package in PACKAGES if importlib.util.find_spec(package) is None
    ]


def test_files(*folders: str) -> list[str]:
    """The test files that can run with the packages here, the largest first."""
    found = [
        path
        for folder in folders
        for path in (ROOT / "tests" / folder).glob("test_*.py")
    ]
    absent = missing()
    texts = {path: path.read_text(encoding="utf-8") for path in found}
    able = [
        p
        for p, text in texts.items()
        if not any(f"\nfrom {a} " in text or f"\nimport {a}" in text for a in absent)
    ]
    return [
        str(path.relative_to(ROOT))
        for path in sorted(able, key=lambda path: -len(texts[path]))
    ]


def shared_out(files: Sequence[str], *options: str) -> list[tuple[str, ...]]:
    """Commands that run the tests of some files in several processes."""
    count = max(1, min(MOST_PROCESSES, os.cpu_count() or 1, len(files)))
    return [(*ON_ONE_DEVICE, *files[first::count], *options) for first in range(count)]


def parts(is_short: bool, simulated: bool) -> dict[str, Part]:
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    workers = (*torchrun, "tests/gpu/two_workers.py")
    on = os.environ.get("ON", "cuda:0")
    figures = (sys.executable, "benchmarks/accelerator.py", "--rounds", "3")
    if simulated:
        figures = (*figures, "--simulated", "H100")
    trainer = (
        sys.executable,
        "examples/trainer.py",
        "--check",
        "--device",
        on,
        "--replicas",
        "2",
    )
    places = ("--simulate-devices=5",) if simulated else ()
    words = (
        "(usual or scaled or recurrent) and (two or several)" if is_short else "test"
    )
    # -k: every variant of each test.
    trainings = (*PYTEST, "-rs", *places, "-k", words, "tests/gpu")
    left_out = (
        (*NOT_ON_ONE_DEVICE, *NOT_ON_THE_CPU) if on == "cpu" else NOT_ON_ONE_DEVICE
    )
    what = f"not ({' or '.join(left_out)})"
    files = (
        ["tests/equality/test_matrix.py"]
        if is_short
        else test_files("equality", "contract")
    )
    own = {
        "what is there": Part(
            [(sys.executable, "-m", "torchstrategy", *places)], 60, 24
        )
    }
    own["trainings"] = Part([trainings], 150, 30)
    if not simulated:
        own["two workers"] = Part([workers], 60, 24)
        own["trainer"] = Part([trainer], 120, needs="sklearn")
        if "ON" not in os.environ and own_devices() > 1:
            own["workers with a GPU each"] = Part([(*workers, "--nccl")], 60, 24)
    if not is_short:
        own["figures"] = Part([figures], 120, 40)
    if not simulated:  # the last part, which takes what the others have left
        own["equality"] = Part(shared_out(files, "-k", what), MOST_SECONDS, 40)
    return own


def own_devices() -> int:
    """How many GPUs there are.

    A process of its own asks, since one that has asked may not be forked.
    """
    program = "import torch; print(torch.cuda.device_count())"
    return int(
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
    )


def environment(last_test: float) -> dict[str, str]:
    """What the commands of a part find in their environment.

    Args:
        last_test: The time after which pytest begins no other test.
    """
    paths = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    )
    own = {
        "PYTHONPATH": paths,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        LAST_TEST: str(last_test),
        **own,
    }


def run(name: str, part: Part, logs: Path, seconds: float) -> bool:
    """Runs a part, and says what it told. Returns whether it went well.

    Args:
        name: What to call it.
        part: What runs.
        logs: The folder for all that it says.
        seconds: The most that it may take.
    """
    if part.needs in missing():
        print(f"== {name}: left out, since there is no {part.needs}", flush=True)
        return True
    began, files = time.monotonic(), []
    for number in range(len(part.commands)):
        files.append(logs / f"{name.replace(' ', '_')}{number or ''}.log")
    processes = []
    for command, path in zip(part.commands, files, strict=True):
        with path.open("w") as file:
            options: dict[str, Any] = {
                "cwd": ROOT,
                "env": environment(time.time() + seconds - TO_END),
                "stdout": file,
                "stderr": subprocess.STDOUT,
                "start_new_session": True,
            }
            processes.append(subprocess.Popen(command, **options))
    ends = [end_of(process, began + seconds) for process in processes]
    # 5: pytest found no test in its files that is not left out
    went_well = all(
        end in (0, 5 if "pytest" in part.commands[0] else 0) for end in ends
    )
    said = (
        f"ended with {' '.join(map(str, ends))}"
        if None not in ends
        else "was ended, since it took too long,"
    )
    print(f"== {name}: {said} after {time.monotonic() - began:.0f} s")
    for path in files:
        shown = path.read_text(errors="replace").splitlines()[
            -max(3, part.lines // len(files)) :
        ]
        print("\n".join(line[:200] for line in shown), flush=True)
    return went_well


def end_of(process: subprocess.Popen[bytes], until: float) -> int | None:
    """How a process ended. None: it was ended, since it took too long."""
    try:
        return process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also what torchrun has started
        process.wait()
        return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path("gpu-logs"),
        help="where all that is said goes",
    )
    parser.add_argument("--short", action="store_true", help="a little of each part")
    parser.add_argument(
        "--simulate", action="store_true", help="on simulated devices, where no GPU is"
    )
    parser.add_argument("parts", nargs="*", help="which; default: all")
    told = parser.parse_args()
    known = parts(told.short, told.simulate)
    if unknown := set(told.parts) - set(known):
        parser.error(
            f"there is no part {', '.join(sorted(unknown))}; there are "
            f"{', '.join(known)}"
        )
    told.logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    went_well = {}
    for name, part in known.items():
        if not told.parts or name in told.parts:
            left = MOST_SECONDS - (time.monotonic() - began)
            went_well[name] = run(name, part, told.logs, min(part.seconds, left))
    failed = [name for name, is_well in went_well.items() if not is_well]
    print(
        f"== all: {time.monotonic() - began:.0f} s; "
        + (f"failed: {', '.join(failed)}" if failed else "all went well")
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
