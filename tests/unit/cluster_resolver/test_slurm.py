"""Slurm's environment variables, as recorded in tasks of several kinds of jobs."""

from __future__ import annotations

from typing import Any

import pytest

from torchstrategy.cluster_resolver import SlurmClusterResolver

ONE_NODE = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "login1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
BRACKETS = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "gpu[08-10,12],big-1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x3)",
}
TWO_BRACKETS = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "rack[1-2]n[01-02]",
    "SLURM_TASKS_PER_NODE": "1(x4)",
}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Any:
    def started(environment: dict[str, str], **arguments: Any) -> SlurmClusterResolver:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return SlurmClusterResolver(**arguments)

    return started


def test_one_node(slurm: Any) -> None:
    resolver = slurm(ONE_NODE)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["login1:8888", "login1:8889"]
    }
    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.master() == "login1:8888"
    assert resolver.master("worker", 1, rpc_layer="grpc") == "grpc://login1:8889"


def test_brackets_and_nodes_with_other_numbers_of_tasks(slurm: Any) -> None:
    resolver = slurm(BRACKETS, port_base=9000, jobs={"chief": 1, "worker": 6})
    assert resolver.cluster_spec().as_dict() == {
        "chief": ["gpu08:9000"],
        "worker": [
            "gpu08:9001",
            "gpu09:9000",
            "gpu09:9001",
            "gpu10:9000",
            "gpu12:9000",
            "big-1:9000",
        ],
    }
    assert resolver.get_task_info() == ("worker", 3)
    assert resolver.master() == "gpu08:9000"


def test_two_brackets_in_a_name(slurm: Any) -> None:
    resolver = slurm(TWO_BRACKETS)
    assert resolver.cluster_spec().job_tasks("worker") == [
        "rack1n01:8888",
        "rack1n02:8888",
        "rack2n01:8888",
        "rack2n02:8888",
    ]


def test_gpus(slurm: Any) -> None:
    assert slurm(ONE_NODE, gpus_per_node=8).num_accelerators() == {"GPU": 4}
    assert slurm(ONE_NODE, gpus_per_task=3).num_accelerators() == {"GPU": 3}


@pytest.mark.parametrize(
    ("environment", "arguments", "kind", "told"),
    [
        ({}, {}, RuntimeError, "was not started by Slurm"),
        (ONE_NODE, {"auto_set_gpu": True}, ValueError, "gpus-per-task"),
        (ONE_NODE, {"tasks_per_node": 3}, ValueError, "Slurm started 2 tasks"),
        (ONE_NODE, {"jobs": {"worker": 1}}, ValueError, "Slurm started 2"),
        (
            {**ONE_NODE, "SLURM_STEP_TASKS_PER_NODE": "2,1"},
            {},
            ValueError,
            "There are 1 nodes",
        ),
        (
            {**ONE_NODE, "SLURM_STEP_TASKS_PER_NODE": "two"},
            {},
            ValueError,
            "is no list of numbers",
        ),
        (
            {**ONE_NODE, "SLURM_STEP_NODELIST": "a[1-x]"},
            {},
            ValueError,
            "is no number and no range",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    slurm: Any,
    environment: dict[str, str],
    arguments: dict[str, Any],
    kind: type[Exception],
    told: str,
) -> None:
    with pytest.raises(kind, match=told):
        slurm(environment, **arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"SLURM_STEP_NODELIST": "node[0-99999999999]"},
            r"SLURM_STEP_NODELIST='node\[0-9+\]' lists more than",
        ),
        (
            {"SLURM_STEP_NODELIST": "a[0-9999]b[0-9999]"},
            "SLURM_STEP_NODELIST=.* lists more than 1,000,000 nodes",
        ),
        (
            {"SLURM_STEP_NODELIST": f"node[0-{'9' * 5000}]"},
            r"SLURM_STEP_NODELIST='node\[0-9+'\.\.\. lists more than",
        ),
        (
            {"SLURM_STEP_NODELIST": "node[1-x]"},
            "'1-x' in SLURM_STEP_NODELIST is no number and no range",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2(x99999999999)"},
            "SLURM_STEP_TASKS_PER_NODE=.* lists more than 1,000,000",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "two"},
            "SLURM_STEP_TASKS_PER_NODE='two' is no list of numbers",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "9" * 5000},
            r"SLURM_STEP_NUM_TASKS='9+'\.\.\. is no number of tasks",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "many"},
            "SLURM_STEP_NUM_TASKS='many' is no number of tasks",
        ),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID='-1' is no number"),
        (
            {"SLURM_PROCID": "2"},
            "SLURM_PROCID=2 is no number of a task: Slurm started 2 tasks",
        ),
    ],
)
def test_a_variable_that_cannot_be_is_named_at_once(
    slurm: Any, changed: dict[str, str], message: str
) -> None:
    """A list of a hundred thousand million nodes was written out.

    It was until the memory was full.
    """
    with pytest.raises(ValueError, match=message):
        slurm(ONE_NODE | changed)
