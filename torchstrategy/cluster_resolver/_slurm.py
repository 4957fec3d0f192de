"""What Slurm's environment variables say about the tasks of a job step."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import final

from torchstrategy.cluster_resolver._cluster_resolver import ClusterSpec, FixedResolver


@final
class SlurmClusterResolver(FixedResolver):
    """Knows the tasks that `srun` has started, from the environment variables that Slurm gives to each of them.

    The tasks of a node have the ports `port_base`, `port_base + 1` and so on. The number of a task is `SLURM_PROCID`,
    and nodes have as many tasks as `SLURM_STEP_TASKS_PER_NODE` says, one node after the other: Slurm's usual order.

    Args:
        jobs: How many tasks each job has, in the order of their numbers. None: all are workers.
        port_base: The port of the first task of each node.
        gpus_per_node: How many GPUs each node has. None: as many as this process sees.
        gpus_per_task: How many GPUs each task has. None: those of its node, shared out evenly.
        tasks_per_node: How many tasks each node has: one number for all, or a list. None: what Slurm says.
        auto_set_gpu: Only False is accepted: `srun --gpus-per-task` gives each task its GPUs, and so does the `devices`
            of a strategy.
        rpc_layer: The protocol, which is put before addresses.

    Example:
        >>> import os
        >>> os.environ.update(SLURM_PROCID="2", SLURM_STEP_NUM_TASKS="3", SLURM_STEP_NODELIST="node[08-09]")
        >>> os.environ["SLURM_STEP_TASKS_PER_NODE"] = "2,1"
        >>> resolver = torchstrategy.cluster_resolver.SlurmClusterResolver()
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['node08:8888', 'node08:8889', 'node09:8888']})
        >>> resolver.task_type, resolver.task_id
        ('worker', 2)
        >>> for name in [name for name in os.environ if name.startswith("SLURM_")]:
        ...     del os.environ[name]

    Differs from tf.distribute:
        It never sets CUDA_VISIBLE_DEVICES, `rpc_layer` is None, and `scontrol` is not called. `jobs` may not leave out
        tasks.

    Raises:
        RuntimeError: If this process was not started by Slurm.
        ValueError: If the variables, or the arguments, contradict each other; or for `auto_set_gpu=True`.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | list[int] | None = None,
        auto_set_gpu: bool = False,
        rpc_layer: str | None = None,
    ) -> None:
        if auto_set_gpu:
            raise ValueError(
                "SlurmClusterResolver(auto_set_gpu=True) sets CUDA_VISIBLE_DEVICES, which has no effect once torch has "
                "looked for devices. Leave it out: srun --gpus-per-task=1 gives each task a GPU of its own, and a "
                "strategy takes the one of its task's number on the node."
            )
        count = int(_variable("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
        nodes = list(expanded(_variable("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")))
        of_nodes = _tasks_of_nodes(tasks_per_node, nodes)
        if sum(of_nodes) != count:
            raise ValueError(
                f"Slurm started {count} tasks, and the nodes {nodes} have {of_nodes} tasks each: say "
                "tasks_per_node=[...] as srun was told."
            )
        jobs = {"worker": count} if jobs is None else dict(jobs)
        if sum(jobs.values()) != count:
            raise ValueError(f"jobs={jobs} have {sum(jobs.values())} tasks, and Slurm started {count}.")
        places = [f"{node}:{port_base + i}" for node, tasks in zip(nodes, of_nodes, strict=True) for i in range(tasks)]
        addresses = iter(places)
        self._cluster_spec = ClusterSpec({job: list(itertools.islice(addresses, n)) for job, n in jobs.items()})
        self._master = places[0]
        if gpus_per_task is None and gpus_per_node is not None:
            gpus_per_task = gpus_per_node // max(of_nodes)
        if gpus_per_task is not None:
            self._accelerators = Counter(GPU=gpus_per_task)
        names = [(job, index) for job, n in jobs.items() for index in range(n)]
        self.task_type, self.task_id = names[int(_variable("SLURM_PROCID"))]
        self.rpc_layer = rpc_layer

    def get_task_info(self) -> tuple[str | None, int | None]:
        """The job of this process, and its index in the job.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver#get_task_info
        """
        return self.task_type, self.task_id


def _variable(*names: str) -> str:
    """The value of the first of these environment variables that is set."""
    for name in names:
        if (value := os.environ.get(name)) is not None:
            return value
    raise RuntimeError(
        f"The environment variable {names[0]} is not set, so this process was not started by Slurm. Start the script "
        "with srun; or, without Slurm, with torchrun, and leave the SlurmClusterResolver out."
    )


def _tasks_of_nodes(given: int | list[int] | None, nodes: list[str]) -> list[int]:
    if isinstance(given, int):
        return [given] * len(nodes)
    if given is not None:
        found = list(given)
    else:
        text = _variable("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")  # such as "2(x3),1"
        parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in text.split(",")]
        if None in parts:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is no list of numbers such as '2(x3),1'.")
        found = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if len(found) != len(nodes):
        raise ValueError(f"There are {len(nodes)} nodes, {nodes}, and numbers of tasks for {len(found)}: {found}.")
    return found


def expanded(nodes: str) -> Iterator[str]:
    """The names of nodes that Slurm writes in short: `"node[08-10,12],login"`.

    Raises:
        ValueError: If the text is not of this form.
    """
    # Commas within brackets part ranges, and others part nodes.
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        parts = re.split(r"\[([^\]]*)\]", entry.strip())
        choices = [list(_numbers(part)) if i % 2 else [part] for i, part in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise ValueError(f"{part!r} is no number and no range such as 08-10, in a list of Slurm's nodes.")
        first, last = found[1], found[2] or found[1]
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
