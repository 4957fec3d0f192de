"""The first minutes on a machine with a GPU: `python -m tests.gpu`, in a copy of the repository.

It needs torch, pytest and pytest-xdist, and no installation. Each part says what it told, and the whole of it is in the
folder of the option --logs. ON=cpu, in the environment, tries it without a GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "pytest_torchstrategy", "-p", "no:cacheprovider", "--tb=short")
SEVERAL = (*PYTEST, "-p", "xdist", "-n", "8", "-p", "gpu.on_one_device", "-W", "default")
# What some tests do is not there on one GPU.
NOT_ON_ONE_DEVICE = (
    # They simulate devices by their names, count what travels between devices, or print where tensors are.
    *("random_programs", "names_each_device_once", "evaluation_and_accumulation_copy_nothing", "what_is_sent"),
    *("every_way_to_reach_into", "share_graphs", "comparing_ends", "what_forward_writes_on_attributes", "reduce_to"),
    *("loads_what_was_saved_with_a_data_parallel", "what_a_step_sets_on_its_thread"),
    # They make tensors or generators without a device within a scope.
    *("plain_batch", "warning_of_a_batch", "averaged_through_data", "hooks_of_updates_are_not_warned_of"),
    *("half_of_a_pair", "generator_of_the_steps_own"),
    # They compare with plain PyTorch on the CPU, whose numbers differ: cosines and norms of weights in float32, cuDNN's
    # recurrent layers, and updates of parameters that share memory, which the GPU makes at the same time.
    *("test_sync_batch_norm", "weight_norm", "parametriz", "weights_that_hooks_compute", "changes_its_dtype"),
    *("gradients_are_those_of_plain_pytorch", "parameters_that_share_memory", "adam_of_a_tensor_rate", "Adagrad"),
)


class Part(NamedTuple):
    """A command, the most seconds that it may take, and how many of its last lines are shown."""

    command: tuple[str, ...]
    seconds: int
    lines: int = 8


def parts() -> dict[str, Part]:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    on = os.environ.get("ON", "cuda:0")
    figures = (sys.executable, "benchmarks/accelerator.py", "--rounds", "3")
    trainer = (sys.executable, "examples/trainer.py", "--check", "--device", on, "--replicas", "2")
    equal = ("tests/equality", "tests/contract", "-k", f"not ({' or '.join(NOT_ON_ONE_DEVICE)})")
    return {
        "what is there": Part((sys.executable, "-m", "torchstrategy"), 60, 24),
        "trainings": Part((*PYTEST, "-k", "test", "tests/gpu"), 120),  # -k: every variant of each test
        "two workers": Part((*torchrun, "tests/gpu/two_workers.py"), 60, 16),
        "trainer": Part(trainer, 60),
        "equality": Part((*SEVERAL, *equal), 120, 40),
        "figures": Part(figures, 120, 40),
    }


def run(name: str, part: Part, logs: Path) -> bool:
    """Runs a part, and says what it told. Returns whether it went well."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    log = logs / f"{name.replace(' ', '_')}.log"
    began = time.monotonic()
    with log.open("w") as file:
        try:
            done = subprocess.run(
                part.command,
                cwd=ROOT,
                env=environment,
                timeout=part.seconds,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
            ended = f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "was ended"
    said = log.read_text(errors="replace")
    print(f"== {name}: {ended} after {time.monotonic() - began:.0f} s")
    print("\n".join(line[:200] for line in said.splitlines()[-part.lines :]), flush=True)
    return ended == "ended with 0"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"), help="where all that is said goes")
    parser.add_argument("parts", nargs="*", help=f"which; default: all of {', '.join(parts())}")
    told = parser.parse_args()
    told.logs.mkdir(parents=True, exist_ok=True)
    went_well = [run(name, part, told.logs) for name, part in parts().items() if name in (told.parts or parts())]
    sys.exit(not all(went_well))
