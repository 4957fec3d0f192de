"""The contests of a GPU in virtual time.

Two runs say the same, to the last byte; and a model of real size is quick.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from conditions import for_releases
from processes import python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL: dict[str, dict[str, Any]] = {
    "one_device": {"sizes": (64,)},
    "sharing": {"sizes": (64,)},
    "central_memory": {"layers": 4, "width": 256, "rows": 16},
    "central_transformer": {"layers": 2, "width": 128, "tokens": 16},
    "place_of_optimizer": {"layers": 4, "width": 256, "rows": 16},
}


def held(contests: Any, name: str, folder: Path) -> tuple[list[str], dict[str, bytes]]:
    """The rows of a small contest, and what happened in it, by the names of files."""
    small: Any = functools.partial(getattr(contests, name), **SMALL[name])
    small.__name__ = name
    rows = list(map(str, contests.in_virtual_time(small, "H100", folder)(2)))
    return rows, {path.name: path.read_bytes() for path in folder.iterdir()}


@for_releases
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
@pytest.mark.parametrize("name", SMALL)
def test_two_runs_of_a_contest_are_equal(
    contests: Any, name: str, tmp_path: Path
) -> None:
    first, second = (held(contests, name, tmp_path) for _ in range(2))
    assert first == second
    assert first[0] and len(first[1][f"{name}.json"]) > 10_000


@for_releases
def test_two_processes_predict_the_same_at_real_size(tmp_path: Path) -> None:
    outputs = []
    for name in ("one", "other"):
        script, folder = str(BENCHMARKS / "accelerator.py"), str(tmp_path / name)
        done = python(
            script,
            "--simulated",
            "H100",
            "--timelines",
            folder,
            folder=tmp_path,
            timeout=3600,
        )
        assert not done.returncode, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] and "predicted" in outputs[0]
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(
        f"{name}.{kind}" for name in SMALL for kind in ("json", "svg")
    )
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (
            tmp_path / "other" / file
        ).read_bytes(), file


THREE_STEPS = """
import resource
import sys
import time

sys.path.insert(0, sys.argv[1])
import torch
from networks import GPT2
from torch.nn import functional as F

from torchstrategy.testing import simulate_devices, virtual_time

began = time.process_time()
simulate_devices(1)
with virtual_time("A100", shapes_only=True):
    with torch.device("sim:0"):
        model, tokens = GPT2(), torch.zeros(16, 1024, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""  # noqa: E501


@for_releases
@pytest.mark.slow
def test_three_steps_of_gpt2_take_a_laptop_little_time_and_memory() -> None:
    """GPT-2 124M, 16 rows of 1,024 tokens: 1.2 s and 0.32 GiB.

    At most 10 s and 4 GB were asked for.
    """
    done = python("-c", THREE_STEPS, str(BENCHMARKS))
    seconds, gibibytes = map(float, done.stdout.split())
    assert seconds < 60, done.stderr  # on a machine ten times as slow, too
    assert gibibytes < 1
