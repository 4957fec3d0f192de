"""The tests that need simulated devices, sim:0 to sim:4.

Run pytest with --simulate-devices=5.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from torchstrategy.testing import simulated_devices

DEVICES = 5
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class _Skipped(pytest.Module):
    """A file that is not even imported."""

    def collect(self) -> Sequence[pytest.Item]:
        pytest.skip(
            f"needs simulated devices: run pytest with --simulate-devices={DEVICES}"
        )


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if len(simulated_devices()) >= DEVICES:
        return None
    module: pytest.Module = _Skipped.from_parent(parent, path=module_path)
    return module


def pytest_collection_finish() -> None:
    # torch's own helpers for tests freeze the settings of its backends when they are
    # imported; other tests change them.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True


@pytest.fixture(autouse=True)
def same_current_device() -> Iterator[None]:
    """Fails the test that leaves another device or stream current than it found."""
    before = (
        torch.accelerator.current_device_index(),
        torch.accelerator.current_stream(),
    )
    yield
    assert (
        torch.accelerator.current_device_index(),
        torch.accelerator.current_stream(),
    ) == before


@pytest.fixture(autouse=True)
def no_tensors_of_other_tests(request: pytest.FixtureRequest) -> None:
    """Predicted figures count the memory in use.

    An earlier test may have left some in a cycle of objects.

    Python's collector sees no cycle through C++, such as a gradient with a graph makes:
    a test that makes such gradients of large parameters has to clear them.
    """
    if "virtual" in request.module.__name__ or "predicted" in request.module.__name__:
        gc.collect()


@pytest.fixture(scope="module")
def counting() -> Iterator[Any]:
    """The module benchmarks/waits.py."""
    yield from benchmark("waits", "contest")


@pytest.fixture(scope="module")
def contests() -> Iterator[Any]:
    """The module benchmarks/accelerator.py."""
    yield from benchmark("accelerator", "contest", "networks")


def benchmark(name: str, *imported: str) -> Iterator[Any]:
    """A module of benchmarks/.

    It is forgotten after the tests, with those of the folder that it has imported.
    """
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module(name)
    for forgotten in {name, *imported} - known:
        sys.modules.pop(forgotten, None)
