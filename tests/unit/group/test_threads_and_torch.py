"""What torch keeps with replicas' threads, and what becomes of it in the end.

That is when the process ends.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import torchstrategy
from conditions import for_changes, for_releases, without_simulated_devices

PROGRAM = """
import torch, torchstrategy

strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3, "cpu")

def step():
    torch._C._stash_obj_in_tls("something of torch", object())
    torchstrategy.get_replica_context().merge_call(lambda strategy: None)

strategy.run(step)
print("has run", flush=True)
"""


@for_changes
@pytest.mark.slow
@without_simulated_devices
def test_a_process_ends_well_where_torch_keeps_objects_with_threads() -> None:
    """It does so for CUDA graphs of the compiler.

    The process aborted, since such a thread ended after Python.
    """
    for _ in range(2):  # it did in every second process
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "has run\n", "")


@for_releases
@pytest.mark.slow
# Of torch, where it imports the compiler.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@without_simulated_devices
def test_the_compiler_finds_its_tables_of_graphs_in_each_replica() -> None:
    """On some releases of torch, it failed an assertion on all threads but torch's."""
    from torch._inductor import cudagraph_trees

    def step() -> int:
        torchstrategy.get_replica_context().merge_call(lambda strategy: None)
        return id(cudagraph_trees.get_container(0))

    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3, "cpu")
    found = strategy.experimental_local_results(strategy.run(step))
    assert len(set(found)) == 3  # a graph is recorded on the thread that runs it
    assert strategy.experimental_local_results(strategy.run(step)) == found
    cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers").clear()
