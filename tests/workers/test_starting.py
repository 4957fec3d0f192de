"""Who the workers are: by torchrun, a group, TF_CONFIG, Slurm or the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchstrategy
from conditions import for_changes, for_releases
from torchstrategy import multi_worker_mirrored
from torchstrategy.cluster_resolver import ClusterSpec, SimpleClusterResolver
from workers import starting
from workers.cluster import Cluster, alone, cluster, free_ports

pytestmark = pytest.mark.slow


def environments(kind: str, addresses: list[str]) -> list[dict[str, str]]:
    host, _, port = addresses[0].partition(":")
    if kind == "torchrun":
        common = {
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
        }
        return [{**common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(3)]
    if kind == "TF_CONFIG":
        jobs = {"worker": addresses[1:], "chief": addresses[:1]}
        tasks = [("chief", 0), ("worker", 0), ("worker", 1)]
        return [
            {
                "TF_CONFIG": json.dumps(
                    {"cluster": jobs, "task": {"type": job, "index": index}}
                )
            }
            for job, index in tasks
        ]
    if kind == "slurm":
        step = {
            "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_NODELIST": host,
            "SLURM_STEP_TASKS_PER_NODE": "3",
        }
        return [{**step, "SLURM_PROCID": str(r)} for r in range(3)]
    return [{"TASK": str(r)} for r in range(3)]


@for_changes
@pytest.mark.parametrize("kind", ["torchrun", "TF_CONFIG", "slurm", "simple"])
def test_workers_find_each_other(kind: str) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    for outcome in alone(
        starting.of_task, environments(kind, addresses), kind, addresses
    ):
        assert outcome.error is None, outcome.trace
        assert outcome.value == (3, [0, 1, 2], True, True)


@for_changes
def test_where_nobody_says_there_is_one_worker() -> None:
    config = json.dumps(
        {"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
    )
    for outcome in alone(
        starting.of_task,
        [{}, {"TF_CONFIG": config}, {"RANK": "0", "WORLD_SIZE": "1"}],
        "none",
        [],
    ):
        assert outcome.value == (1, [0], False, True), outcome.trace


@for_changes
def test_a_group_that_the_script_has_made_for_devices_only_is_enough() -> None:
    """`init_process_group("nccl")` is the first line of scripts for DDP.

    Its group takes no tensors of the CPU.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    first, *others = alone(
        starting.of_a_group_for_devices, environments("torchrun", addresses)
    )
    assert first.error is None, first.trace
    config, is_untouched, sums, _ = first.value
    assert (config, is_untouched, sums) == ("cuda:gloo", True, [8.0, 6.0])
    assert [other.value for other in others] == [first.value, first.value]


@for_changes
def test_a_group_that_one_worker_has_made_alone_changes_no_names() -> None:
    """torch named the next group by a number that was another one in this worker.

    All waited for each other.
    """
    processes = Cluster(2)
    try:
        assert processes.run(starting.after_a_group_of_one) == [2.0, 2.0]
    finally:
        processes.end()


@for_changes
def test_a_process_can_leave_its_world_for_one_of_other_processes(
    tmp_path: Path,
) -> None:
    """It had counted a strategy of workers 0 and 1 there, and the new worker 1 none.

    They waited under two names.
    """
    first, second, third = alone(
        starting.of_two_worlds, environments("simple", ["", "", ""]), str(tmp_path)
    )
    assert first.error is None, first.trace
    assert (first.value, second.value, third.value) == ([2.0, 2.0], [2.0], [2.0])


def test_a_group_of_some_processes_trains_alone() -> None:
    assert cluster(3).run(starting.of_a_part) == [(2, 4.0), None, (2, 4.0)]


@pytest.mark.parametrize(
    ("seen", "environment", "taken"),
    [(4, {}, "cuda:1"), (1, {"CUDA_VISIBLE_DEVICES": "1"}, "cuda:0"), (0, {}, "cpu:0")],
)
def test_a_worker_takes_the_accelerator_of_its_number_or_the_only_one_it_is_shown(
    seen: int, environment: dict[str, str], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_devices(seen, environment, monkeypatch) == [torch.device(taken)]


@pytest.mark.parametrize(
    ("seen", "environment"), [(1, {}), (2, {"CUDA_VISIBLE_DEVICES": "0,1"})]
)
def test_more_workers_than_accelerators_are_refused(
    seen: int, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match=f"This machine has {seen} accelerators? and 3 workers"
    ):
        own_devices(seen, environment, monkeypatch)


def own_devices(
    seen: int, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> list[torch.device]:
    """Those of a machine's second of three workers, which sees so many accelerators."""
    shown = [torch.device("cuda", index) for index in range(seen)]
    monkeypatch.setattr(multi_worker_mirrored, "local_accelerators", lambda: shown)
    for name in [name for name in os.environ if name.endswith("VISIBLE_DEVICES")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return multi_worker_mirrored._own_devices(
        multi_worker_mirrored.WorkerPlace(1, 3, "", 1, 3)
    )


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((1, 2), "worker 0 has 1 device, and worker 1 has 2"),
        ((2, 1), "worker 0 has 2 devices, and worker 1 has 1"),
        ((1, 1, 3), "worker 0 has 1 device, and worker 2 has 3"),
        ((3, 2), "worker 0 has 3 devices, and worker 1 has 2"),
    ],
)
def test_workers_with_other_numbers_of_replicas_are_refused(
    counts: tuple[int, ...], told: str
) -> None:
    """A worker with one replica exchanges other messages than one with several.

    Each would wait for the other.
    """
    for refusal, total in cluster(len(counts)).run(starting.of_unequal_workers, counts):
        assert told in refusal
        assert total == counts[0] * len(counts)  # they can make a strategy that fits


@pytest.mark.parametrize("kind", ["ps", "evaluator"])
def test_a_task_that_does_not_train_is_refused(kind: str) -> None:
    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": ["a:1", "b:1"], kind: ["c:1"]}),
        task_type=kind,
        task_id=0,
    )
    with pytest.raises(ValueError, match=f"This process is the task '{kind}'"):
        torchstrategy.MultiWorkerMirroredStrategy(resolver)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("value", "Linear 0.bias: worker 1 differs by up to 1, in 1 of 1 number"),
        (
            "state",
            (
                "Adam 1.state[param_groups[0]['params'][0]]['exp_avg']: worker 1 "
                "differs by up to 0.5, in 1 of 2"
            ),
        ),
        ("structure", "Linear 0.bias: worker 1 does not have it and worker 0 does"),
    ],
)
def test_workers_that_have_drifted_apart_are_found(how: str, told: str) -> None:
    for outcome in cluster(2).outcomes(starting.drifted, how):
        assert outcome.error is not None and outcome.error.startswith(
            "AssertionError: The workers have drifted apart"
        )
        assert told in outcome.error


PROGRAM = r"""
import sys
import torch
import torchstrategy

strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])

def step():
    context = torchstrategy.get_replica_context()
    if sys.argv[1] == "raises" and context.replica_id_in_sync_group == 1:
        raise ValueError("no such luck")
    return context.all_reduce("sum", torch.ones(()))

# One write, since both processes write on one pipe.
sys.stdout.write(f"{strategy.experimental_local_results(strategy.run(step))[0].item()}\n")
"""


@for_changes
@pytest.mark.parametrize("how", ["goes well", "raises"])
def test_torchrun_starts_the_workers_and_hears_how_they_end(
    how: str, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*launcher, str(program), how],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
    )
    if how == "goes well":
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["2.0", "2.0"]
    else:
        assert done.returncode == 1
        assert "ValueError: no such luck" in done.stderr


ENDING = """
import atexit
import sys

atexit.register(lambda: print("threads of gloo at the end:", num_gloo_threads(), flush=True))  # the last one called
sys.path[:0] = {path}

import torchstrategy
from workers.starting import num_gloo_threads

strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
print("meanwhile:", num_gloo_threads() > 0)
strategy.run(lambda: None)
"""  # noqa: E501


@for_releases
@pytest.mark.skipif(
    sys.platform != "linux", reason="the names of native threads are read in /proc"
)
@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.10 gives the threads of gloo no name"
)
def test_no_thread_of_gloo_outlives_the_program() -> None:
    # A thread that let go of a tensor while Python ended aborted a process that had
    # trained well: "terminate called without an active exception".
    program = ENDING.format(
        path=[
            str(Path(torchstrategy.__file__).parents[1]),
            str(Path(__file__).parents[1]),
        ]
    )
    (port,) = free_ports(1)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": "2",
                "RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=600)[0] for process in processes]
    assert told == ["meanwhile: True\nthreads of gloo at the end: 0\n"] * 2
    assert [process.returncode for process in processes] == [0, 0]


@for_changes
@pytest.mark.skipif(
    sys.platform != "linux", reason="the names of native threads are read in /proc"
)
@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.10 gives the threads of gloo no name"
)
def test_a_strategy_that_is_no_longer_used_leaves_no_group() -> None:
    for meanwhile, after in cluster(2).run(starting.of_dropped_strategies):
        assert meanwhile > 0 == after


LEAVING = """
import sys
import torchstrategy

strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
strategy.run(lambda: None)
print("done", flush=True)
sys.stdin.readline()
"""


@for_changes
def test_the_process_that_keeps_the_store_leaves_last() -> None:
    """If it ended first, a worker still using the store said: connection reset.

    It said that the connection was reset.
    """
    (port,) = free_ports(1)
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", LEAVING],
            env={**common, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    for process in (first, second):
        assert process.stdout is not None
        # torch 2.10 says who is connected.
        told = (line for line in process.stdout if not line.startswith("[Gloo]"))
        assert next(told) == "done\n"
    assert first.stdin is not None and first.stdout is not None
    first.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(1)
    second.communicate(timeout=100)
    first.wait(100)
    assert (first.returncode, second.returncode) == (0, 0)
    first.stdout.close()
