"""The names of `tf.distribute.cluster_resolver` that need no network.

They say who is in a cluster, and who this process is.

A cluster has jobs, a job has tasks, and a task has an address. A base class says what a
resolver knows; four are here.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, final

from torchstrategy._base.devices import local_accelerators
from torchstrategy._base.errors import an, plural, require_type
from torchstrategy.cluster_resolver._slurm_lists import (
    expand_counts,
    expand_nodes,
    shorten,
)


@final
class ClusterSpec:
    """The processes of a cluster: its jobs, their tasks and the tasks' addresses.

    Each job, such as `"worker"`, has several tasks, each at an address.

    Args:
        cluster: For each job its tasks: a list of addresses, or, if not all tasks are
            known, a dict from the index of a task to its address. Or another
            `ClusterSpec`.

    Example:
        >>> spec = torchstrategy.cluster_resolver.ClusterSpec(
        ...     {"worker": ["a:2222", "b:2222"], "ps": {7: "c:2222"}}
        ... )
        >>> spec.jobs, spec.task_indices("ps")
        (['worker', 'ps'], [7])
        >>> spec.task_address("worker", 1)
        'b:2222'

    Differs from tf.distribute:
        In TensorFlow it is `tf.train.ClusterSpec`; protocol buffers are not accepted
        and not made. It does not change, and is equal to other `ClusterSpec`s only.

    Raises:
        TypeError: If it is not a dict of lists or dicts of strings.
        ValueError: If the index of a task is not 0 or more, or stands there twice.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/train/ClusterSpec
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        require_type(
            cluster,
            Mapping,
            "A cluster is a dict from jobs to tasks: {'worker': ['a:2222']}",
        )
        self._tasks = {job: _tasks(job, tasks) for job, tasks in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """How many tasks of a job are known.

        Raises:
            ValueError: If there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of the tasks of a job that are known, in order.

        Raises:
            ValueError: If there is no such job.
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Where a task is.

        Raises:
            ValueError: If there is no such job, or no such task in it.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"The job {job_name!r} has no task {task_index!r}, only {list(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job, in the order of its tasks' indices.

        The address of a task that is not known is None.

        Raises:
            ValueError: If there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """The tasks of each job, in the form that `ClusterSpec` takes.

        A job is a list if all its tasks are known, and else a dict.
        """
        spec: dict[str, Any] = {}
        for job, tasks in self._tasks.items():
            # The indices begin with 0 and leave none out.
            has_all_numbers = bool(tasks) and len(tasks) == max(tasks) + 1
            spec[job] = list(tasks.values()) if has_all_numbers else dict(tasks)
        return spec

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        return (
            self._tasks == other._tasks
            if isinstance(other, ClusterSpec)
            else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(
            frozenset((job, *tasks.items()) for job, tasks in self._tasks.items())
        )

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _job(self, name: object) -> dict[int, str]:
        if name not in self._tasks:
            raise ValueError(
                f"There is no job {name!r} in the cluster, only {self.jobs}."
            )
        return self._tasks[name]


_MOST_TASKS = 1_000_000


def _as_index(value: object) -> int:
    """The index of a task, which JSON may hold as a string.

    Raises:
        ValueError: If it is negative, larger than in any cluster, or text that is no
            number.
        TypeError: If it is no integer.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        index = int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        told = (
            f"The index of a task is an integer; got {value!r:.60}, "
            f"{an(type(value).__name__)}."
        )
        raise type(error)(told) from None
    if index < 0:
        raise ValueError(f"The index of a task is 0 or more; got {index}.")
    if index >= _MOST_TASKS:
        raise ValueError(
            f"The index of a task is less than {_MOST_TASKS}; got {value!r:.60}."
        )
    return index


def _tasks(job: object, tasks: Any) -> dict[int, str]:
    """The addresses of the tasks of a job, by index, in order."""
    require_type(job, str, "The name of a job is a string")
    if isinstance(tasks, (list, tuple)):
        tasks = dict(enumerate(tasks))
    require_type(
        tasks,
        Mapping,
        f"The tasks of the job {job!r} are a list or a dict of addresses",
    )
    for address in tasks.values():
        require_type(
            address, str, f"The address of a task of the job {job!r} is a string"
        )
    by_index = {_as_index(index): address for index, address in tasks.items()}
    if len(by_index) < len(tasks):
        raise ValueError(f"The job {job!r} has two tasks of one index: {tasks!r}.")
    return dict(sorted(by_index.items()))


class _Task(NamedTuple):
    """What a resolver was told, or has found out, about this process."""

    type: str | None = None
    id: int | None = None
    rpc_layer: str | None = None


class ClusterResolver(ABC):
    """Knows which processes a cluster has, and which of them this one is.

    Subclass it to describe your own.

    A subclass implements `cluster_spec` and `master`, and sets `task_type`, `task_id`
    and `rpc_layer` to say which task this process is. They may be set again at any
    time.

    Example:
        >>> class OnOneHost(torchstrategy.cluster_resolver.ClusterResolver):
        ...     def cluster_spec(self):
        ...         return torchstrategy.cluster_resolver.ClusterSpec(
        ...             {"worker": ["localhost:2222", "localhost:2223"]}
        ...         )
        ...
        ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
        ...         return self.cluster_spec().task_address(
        ...             task_type or "worker", task_id or 0
        ...         )
        >>> resolver = OnOneHost()
        >>> resolver.task_id = 1
        >>> resolver.master(), resolver.task_type, resolver.task_id
        ('localhost:2222', None, 1)

    Differs from tf.distribute:
        `num_accelerators` counts those of this machine, and is refused for another
        task, whose machine it cannot see. There are no sessions, and so no
        `config_proto`.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/ClusterResolver
    """

    # What was said of this process. On the class, since a subclass may not call our
    # constructor.
    _told = _Task()
    _environment: str | None = ""
    # How many accelerators each task has, if that was said.
    _accelerators: Counter[str] | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The processes of the cluster, as they are now."""

    @abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of the process that leads, or of the task that is named.

        Args:
            task_type: The job of the task.
            task_id: Its index in the job.
            rpc_layer: The protocol, which is put before the address: `"grpc"` makes
                `"grpc://host:port"`.
        """

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: None = None,
    ) -> Counter[str]:
        """How many accelerators a task has, by kind: `{"GPU": 8}`.

        The number is 0 for a kind that the task does not have.

        If nobody has said how many each task has, it counts those that this process
        sees.

        Args:
            task_type: The job of the task that is asked about. None: this one's.
            task_id: Its index. None: this one's.
            config_proto: None: there are no sessions.

        Raises:
            ValueError: If `config_proto` is not None; or if it is asked about another
                task, and nobody has said how many each task has.
        """
        if config_proto is not None:
            raise ValueError(
                f"config_proto={config_proto!r} configures a session, and there are "
                "none here."
            )
        if self._accelerators is not None:
            return Counter(self._accelerators)
        asked = (
            self.task_type if task_type is None else task_type,
            self.task_id if task_id is None else task_id,
        )
        if asked != (self.task_type, self.task_id):
            raise ValueError(
                f"num_accelerators was asked about {asked[0]} {asked[1]}, and this "
                f"process, {self.task_type} {self.task_id}, sees its own only. Use "
                "SimpleClusterResolver(spec, num_accelerators={'GPU': 8})."
            )
        # The plus sign leaves out a kind of which there is none.
        return +Counter(GPU=len(local_accelerators()))

    @property
    def environment(self) -> str | None:
        """Where the program runs, as the resolver was told.

        In TensorFlow, it is `"google"` or empty.
        """
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process, such as `"worker"`; None if that is not known."""
        return self._found().type if self._told.type is None else self._told.type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._told = self._told._replace(type=task_type)

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if that is not known."""
        return self._found().id if self._told.id is None else self._told.id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._told = self._told._replace(
            id=None if task_id is None else _as_index(task_id)
        )

    @property
    def rpc_layer(self) -> str | None:
        """The protocol of the cluster, such as `"grpc"`; None if there is none."""
        return (
            self._found().rpc_layer
            if self._told.rpc_layer is None
            else self._told.rpc_layer
        )

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._told = self._told._replace(rpc_layer=rpc_layer)

    def _found(self) -> _Task:
        """What holds where nothing was said."""
        return _Task()


def _url(address: str, rpc_layer: str | None) -> str:
    """An address with the protocol before it."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


class _FixedResolver(ClusterResolver):
    """Knows all when it is made."""

    _cluster_spec: ClusterSpec
    _master: str

    def cluster_spec(self) -> ClusterSpec:
        """The processes of the cluster. They stay the same."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of the process that leads.

        If you give both `task_type` and `task_id`, you get the address of that task.

        Raises:
            ValueError: If there is no such task.
        """
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return _url(address, rpc_layer or self.rpc_layer)


@final
class SimpleClusterResolver(_FixedResolver):
    """Knows what it was told.

    Args:
        cluster_spec: The processes of the cluster.
        master: The address of the one that leads.
        task_type: The job of this process.
        task_id: Its index in the job.
        environment: Where it runs.
        num_accelerators: How many accelerators each task has, by kind: `{"GPU": 8}`.
        rpc_layer: The protocol, which is put before addresses.

    Example:
        >>> spec = torchstrategy.cluster_resolver.ClusterSpec(
        ...     {"worker": ["a:2222", "b:2222"]}
        ... )
        >>> resolver = torchstrategy.cluster_resolver.SimpleClusterResolver(
        ...     spec,
        ...     task_type="worker",
        ...     task_id=0,
        ...     num_accelerators={"GPU": 8},
        ...     rpc_layer="grpc",
        ... )
        >>> resolver.master("worker", 1)
        'grpc://b:2222'
        >>> resolver.num_accelerators()["GPU"]
        8

    Raises:
        TypeError: If `cluster_spec` is no `ClusterSpec`, `master` no string, or
            `num_accelerators` no dict.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/SimpleClusterResolver
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        require_type(
            cluster_spec,
            ClusterSpec,
            "cluster_spec is a ClusterSpec, such as ClusterSpec({...})",
        )
        require_type(master, str, "master is an address, a string")
        require_type(
            num_accelerators,
            Mapping | None,
            "num_accelerators is a dict of numbers by kind, {'GPU': 8}",
        )
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._accelerators = Counter(num_accelerators or {})
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer


@final
class SlurmClusterResolver(_FixedResolver):
    """Knows the tasks that `srun` has started.

    It reads the environment variables that Slurm gives to each of them.

    The tasks of a node have the ports `port_base`, `port_base + 1` and so on. The
    number of a task is `SLURM_PROCID`, and nodes have as many tasks as
    `SLURM_STEP_TASKS_PER_NODE` says, one node after the other: Slurm's usual order.

    Args:
        jobs: How many tasks each job has, in the order of their numbers. None: all are
            workers.
        port_base: The port of the first task of each node.
        gpus_per_node: How many GPUs each node has. None: as many as this process sees.
        gpus_per_task: How many GPUs each task has. None: those of its node, shared out
            evenly.
        tasks_per_node: How many tasks each node has: one number for all, or a list.
            None: what Slurm says.
        auto_set_gpu: Only False is accepted: `srun --gpus-per-task` gives each task its
            GPUs, and so does the `devices` of a strategy.
        rpc_layer: The protocol, which is put before addresses.

    Example:
        >>> import os
        >>> os.environ.update(
        ...     SLURM_PROCID="2",
        ...     SLURM_STEP_NUM_TASKS="3",
        ...     SLURM_STEP_NODELIST="node[08-09]",
        ... )
        >>> os.environ["SLURM_STEP_TASKS_PER_NODE"] = "2,1"
        >>> resolver = torchstrategy.cluster_resolver.SlurmClusterResolver()
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['node08:8888', 'node08:8889', 'node09:8888']})
        >>> resolver.task_type, resolver.task_id
        ('worker', 2)
        >>> for name in [name for name in os.environ if name.startswith("SLURM_")]:
        ...     del os.environ[name]

    Differs from tf.distribute:
        It never sets CUDA_VISIBLE_DEVICES, `rpc_layer` is None, and `scontrol` is not
        called. `jobs` may not leave out tasks.

    Raises:
        RuntimeError: If this process was not started by Slurm.
        ValueError: If the variables, or the arguments, contradict each other; or for
            `auto_set_gpu=True`.

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
                "SlurmClusterResolver(auto_set_gpu=True) sets CUDA_VISIBLE_DEVICES, "
                "which has no effect once torch has looked for devices. Leave it out: "
                "srun --gpus-per-task=1 gives each task its own, as strategies do."
            )
        count = _number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        name, text = _variable(
            "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"
        )
        nodes = expand_nodes(name, text)
        of_nodes = _tasks_of_nodes(tasks_per_node, nodes)
        if sum(of_nodes) != count:
            raise ValueError(
                f"Slurm started {count} tasks, and {nodes} have {of_nodes}: say "
                "tasks_per_node=[...]."
            )
        jobs = {"worker": count} if jobs is None else dict(jobs)
        if sum(jobs.values()) != count:
            raise ValueError(
                f"jobs={jobs} have {sum(jobs.values())} tasks, and Slurm started "
                f"{count}."
            )
        places = [
            f"{node}:{port_base + i}"
            for node, tasks in zip(nodes, of_nodes, strict=True)
            for i in range(tasks)
        ]
        addresses = iter(places)
        self._cluster_spec = ClusterSpec(
            {job: list(itertools.islice(addresses, n)) for job, n in jobs.items()}
        )
        self._master = places[0]
        if gpus_per_task is None and gpus_per_node is not None:
            gpus_per_task = gpus_per_node // max(of_nodes)
        if gpus_per_task is not None:
            self._accelerators = Counter(GPU=gpus_per_task)
        names = [(job, index) for job, n in jobs.items() for index in range(n)]
        process = _number("SLURM_PROCID")
        if process >= count:
            raise ValueError(
                f"SLURM_PROCID={process} is no number of a task: Slurm started "
                f"{plural(count, 'task')}."
            )
        self.task_type, self.task_id = names[process]
        self.rpc_layer = rpc_layer

    def get_task_info(self) -> tuple[str | None, int | None]:
        """The job of this process, and its index in the job.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver#get_task_info
        """
        return self.task_type, self.task_id


def _variable(*names: str) -> tuple[str, str]:
    """The first of these environment variables that is set, and its value."""
    for name in names:
        if (value := os.environ.get(name)) is not None:
            return name, value
    raise RuntimeError(
        f"The environment variable {names[0]} is not set, so this process was not "
        "started by Slurm. Start the script with srun; or, without Slurm, with "
        "torchrun, and leave the SlurmClusterResolver out."
    )


def _number(*names: str) -> int:
    """The number that the first of these environment variables says that is set."""
    name, value = _variable(*names)
    if re.fullmatch(r"\d{1,9}", value.strip()) is None:
        raise ValueError(
            f"{name}={shorten(value)} is no number of tasks: Slurm sets it to one such "
            "as '4'."
        )
    return int(value)


def _tasks_of_nodes(given: int | list[int] | None, nodes: list[str]) -> list[int]:
    if isinstance(given, int):
        return [given] * len(nodes)
    if given is not None:
        found = list(given)
    else:
        # An example is "2(x3),1".
        name, text = _variable("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        found = expand_counts(name, text)
    if len(found) != len(nodes):
        raise ValueError(
            f"There are {len(nodes)} nodes, {nodes}, and numbers of tasks for "
            f"{len(found)}: {found}."
        )
    return found


@final
class UnionResolver(ClusterResolver):
    """Several clusters as one. Whatever is not the sum of all comes from the first.

    A job that several of them have is that job, with the tasks of all: one after the
    other where all tasks are known, that is, in lists; by index where not.

    Args:
        resolvers: What knows the clusters.
        task_type: The job of this process.
        task_id: Its index in the job.
        rpc_layer: The protocol, which is put before addresses.

    Example:
        >>> from torchstrategy.cluster_resolver import (
        ...     ClusterSpec,
        ...     SimpleClusterResolver,
        ...     UnionResolver,
        ... )
        >>> workers = SimpleClusterResolver(
        ...     ClusterSpec({"worker": ["a:2222"]}), task_type="worker", task_id=0
        ... )
        >>> more = SimpleClusterResolver(
        ...     ClusterSpec({"worker": ["b:2222"], "ps": ["c:2222"]})
        ... )
        >>> union = UnionResolver(workers, more)
        >>> union.cluster_spec()
        ClusterSpec({'worker': ['a:2222', 'b:2222'], 'ps': ['c:2222']})
        >>> union.task_type
        'worker'

    Differs from tf.distribute:
        A `task_id` of 0 that is given wins over the first resolver's, as any other
        does. `master` puts the `rpc_layer` of the union before every address, and that
        of the first resolver where the union has none.

    Raises:
        ValueError: If there is no resolver.
        TypeError: If one is something else.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/UnionResolver
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError(
                "UnionResolver() has nothing to unite: give it one ClusterResolver or "
                "more."
            )
        for resolver in resolvers:
            require_type(
                resolver, ClusterResolver, "UnionResolver unites ClusterResolvers"
            )
        self._resolvers = resolvers
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The jobs of all.

        Raises:
            KeyError: If a job has one task twice, where they go by their indices.
        """
        # For each job, its tasks in each cluster that has the job.
        of_jobs: dict[str, list[Any]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                of_jobs.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _unite(job, parts) for job, parts in of_jobs.items()})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """What the `master` of the first resolver returns.

        If you give both `task_type` and `task_id`, you get the address of that task.

        Raises:
            ValueError: If there is no such task.
        """
        rpc_layer = rpc_layer or self.rpc_layer
        if task_type is not None and task_id is not None:
            return _url(self.cluster_spec().task_address(task_type, task_id), rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: None = None,
    ) -> Counter[str]:
        """What the first says."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """What the first says."""
        return self._resolvers[0].environment

    def _found(self) -> _Task:
        first = self._resolvers[0]
        return _Task(first.task_type, first.task_id, first.rpc_layer)


def _unite(
    job: str, parts: list[list[str] | dict[int, str]]
) -> list[str] | dict[int, str]:
    """The tasks of one job."""
    if all(isinstance(part, list) for part in parts):
        # mypy does not see that all parts are lists.
        return [address for part in parts for address in part]  # type: ignore[misc]
    tasks: list[tuple[int, str]] = []
    for part in parts:
        tasks += enumerate(part) if isinstance(part, list) else part.items()
    counts = Counter(index for index, _ in tasks)
    if twice := sorted(index for index in counts if counts[index] > 1):
        raise KeyError(
            f"The clusters to unite both have a task {twice[0]} of the job {job!r}."
        )
    return dict(tasks)


T = TypeVar("T")


@final
class TFConfigClusterResolver(ClusterResolver):
    """Knows what the environment variable `TF_CONFIG` says, which is read at each call.

    `TF_CONFIG` is JSON: `{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type":
    "worker", "index": 0}}`; also `"rpc_layer"` and `"session_master"` are known. What
    is given here wins over it.

    Args:
        task_type: The job of this process.
        task_id: Its index in the job.
        rpc_layer: The protocol, which is put before addresses.
        environment: Where it runs.

    Example:
        >>> import json, os
        >>> cluster = {
        ...     "cluster": {"worker": ["a:2222", "b:2222"]},
        ...     "task": {"type": "worker", "index": "1"},
        ... }
        >>> os.environ["TF_CONFIG"] = json.dumps(cluster)
        >>> resolver = torchstrategy.cluster_resolver.TFConfigClusterResolver(
        ...     rpc_layer="grpc"
        ... )
        >>> resolver.task_type, resolver.task_id, resolver.master()
        ('worker', 1, 'grpc://b:2222')
        >>> del os.environ["TF_CONFIG"]
        >>> resolver.task_id, bool(resolver.cluster_spec())
        (None, False)

    Raises:
        ValueError: When something is asked, and `TF_CONFIG` is not JSON, or not of this
            form.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """The processes that `TF_CONFIG` names; none if it is not set.

        Raises:
            ValueError: If `TF_CONFIG` is not JSON, or describes no cluster.
        """
        return _said(ClusterSpec, _config().get("cluster", {}))

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of this task, or of the task that you name.

        It is empty in a cluster of one task or none.

        A `"session_master"` in `TF_CONFIG` is returned as it is.

        Raises:
            ValueError: If it is not known which task this is, there is no such task, or
                `TF_CONFIG` is not JSON.
        """
        session_master = _text("session_master", _config())
        if session_master is not None:
            return session_master
        cluster = self.cluster_spec()
        if sum(map(cluster.num_tasks, cluster.jobs)) <= 1 >= len(cluster.jobs):
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ValueError(
                f"TF_CONFIG has a cluster of the jobs {cluster.jobs}, and does not say "
                "which of its tasks this is. Add "
                '"task": {"type": "worker", "index": 0} to it, or give the resolver a '
                "task_type and a task_id."
            )
        return _url(
            cluster.task_address(task_type, task_id),
            self.rpc_layer if rpc_layer is None else rpc_layer,
        )

    def _found(self) -> _Task:
        task = _config().get("task", {})
        if not isinstance(task, dict):
            raise ValueError(
                '"task" in TF_CONFIG is an object with a "type" and an "index"; it is '
                f"{task!r:.60}."
            )
        index = task.get("index")
        task_id = None if index is None else _said(_as_index, index)
        return _Task(_text("type", task), task_id, _text("rpc_layer", _config()))


def _text(name: str, where: dict[str, Any]) -> str | None:
    text = where.get(name)
    if not isinstance(text, (str, type(None))):
        raise ValueError(
            f'"{name}" in the environment variable TF_CONFIG is a string; it is '
            f"{text!r:.60}."
        )
    return text


def _said(make: Callable[[Any], T], value: Any) -> T:
    """What `make` makes of a value that the variable holds.

    An error says that the variable has to be changed.
    """
    try:
        return make(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{error} It stands in the environment variable TF_CONFIG."
        ) from None


def _config() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG", "{}")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        told = f"The environment variable TF_CONFIG is not JSON: {error.msg}"
        raise json.JSONDecodeError(told, text, error.pos) from None
    except (RecursionError, ValueError) as error:
        why = (
            "its brackets are nested too deeply"
            if isinstance(error, RecursionError)
            else str(error)
        )
        raise ValueError(
            f"The environment variable TF_CONFIG is no description of a cluster: {why}."
        ) from None
    if not isinstance(config, dict):
        raise ValueError(
            'The environment variable TF_CONFIG is no object such as {"cluster": ...}: '
            f"{text:.60}"
        )
    return config
