"""Programs in processes of their own that have imported torch before their first line.

An interpreter imports torch for seconds. `python` sends a program to one that has done
so, and that forks itself for each: see `__main__.py`. Tests of what an import does, or
of what comes before torch, need an interpreter that is new.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Other plugins take longer to load than most programs here take, and are none of what
# is tested.
LEAN = {"PYTEST_ADDOPTS": "-p no:hypothesispytest -p no:xdist"}
NO_ACCELERATOR = {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "none"}
FORKS = sys.platform.startswith("linux")


def python(
    *arguments: str, folder: Path | None = None, timeout: int = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` does in a folder, with changes to the environment.

    A program that takes longer than `timeout` seconds prints the stacks of all its
    threads, and exits with 1. What triton leaks is left out of what it prints.
    """
    environment = {**os.environ, **LEAN, **environment}
    if not FORKS:
        new = [sys.executable, *arguments]
        done = subprocess.run(
            new,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=timeout,
        )
        done.stderr = _without_leaks_of_triton(done.stderr)
        return done
    with tempfile.TemporaryDirectory() as outputs:
        stdout, stderr = Path(outputs, "stdout"), Path(outputs, "stderr")
        program = {
            "arguments": arguments,
            "folder": str(folder or Path.cwd()),
            "environment": environment,
            "timeout": timeout,
            "outputs": [str(stdout), str(stderr)],
        }
        code = _exit_code(json.dumps(program))
        said = _without_leaks_of_triton(stderr.read_text())
        return subprocess.CompletedProcess(arguments, code, stdout.read_text(), said)


def _without_leaks_of_triton(stderr: str) -> str:
    """What a process has said, without the list of what triton leaks.

    A torch for CUDA may load triton. Its binding, nanobind, makes this list where
    Python ends and a thread still runs.
    """
    mine = (
        "nanobind: ",
        " - leaked ",
        " - ... skipped remainder",
        "See https://nanobind.",
    )
    return "".join(
        line for line in stderr.splitlines(keepends=True) if not line.startswith(mine)
    )


def _exit_code(program: str) -> int:
    interpreter = _interpreter()
    assert interpreter.stdin and interpreter.stdout
    print(program, file=interpreter.stdin, flush=True)
    return int(interpreter.stdout.readline())


@functools.cache
def _interpreter() -> subprocess.Popen[str]:
    """The one that forks itself, until its input ends."""
    command = [sys.executable, str(Path(__file__).parent)]
    # Others would not come along, and workers of xdist share cores.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    interpreter = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=one_thread,
    )
    atexit.register(interpreter.communicate)
    return interpreter
