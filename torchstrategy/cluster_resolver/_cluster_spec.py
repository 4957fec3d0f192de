"""Which processes a cluster has: tasks with addresses, in jobs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, final

from torchstrategy._core.errors import an


@final
class ClusterSpec:
    """The processes of a cluster: jobs, such as `"worker"`, each of several tasks, each at an address.

    Args:
        cluster: For each job its tasks: a list of addresses, or, if not all tasks are known, a dict from the index of a
            task to its address. Or another `ClusterSpec`.

    Example:
        >>> spec = torchstrategy.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"], "ps": {7: "c:2222"}})
        >>> spec.jobs, spec.task_indices("ps")
        (['worker', 'ps'], [7])
        >>> spec.task_address("worker", 1)
        'b:2222'

    Differs from tf.distribute:
        In TensorFlow it is `tf.train.ClusterSpec`; protocol buffers are not accepted and not made. It does not change,
        and is equal to other `ClusterSpec`s only.

    Raises:
        TypeError: If it is not a dict of lists or dicts of strings.
        ValueError: If the index of a task is not 0 or more, or stands there twice.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/train/ClusterSpec
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "A cluster is a dict from jobs to the addresses of their tasks, such as {'worker': ['a:2222', "
                f"'b:2222']}}; got {cluster!r}."
            )
        self._tasks = {_job(job): _tasks(job, tasks) for job, tasks in cluster.items()}

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
            raise ValueError(f"The job {job_name!r} has no task {task_index!r}, only {list(tasks)}.")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job by the indices of its tasks, with None for tasks that are not known.

        Raises:
            ValueError: If there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """The tasks of each job: a list where all are known, and else a dict, as a `ClusterSpec` is made of."""
        return {
            job: list(tasks.values()) if tasks and len(tasks) == max(tasks) + 1 else dict(tasks)
            for job, tasks in self._tasks.items()
        }

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        return self._tasks == other._tasks if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, *tasks.items()) for job, tasks in self._tasks.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _job(self, name: object) -> dict[int, str]:
        if name not in self._tasks:
            raise ValueError(f"There is no job {name!r} in the cluster, only {self.jobs}.")
        return self._tasks[name]


_MOST_TASKS = 1_000_000


def as_index(value: object) -> int:
    """The index of a task, which JSON may hold as a string.

    Raises:
        ValueError: If it is negative, larger than in any cluster, or text that is no number.
        TypeError: If it is no integer.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        index = int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"The index of a task is an integer; got {value!r:.60}, {an(type(value).__name__)}.") from None
    except ValueError:
        raise ValueError(f"The index of a task is an integer; got {value!r:.60}.") from None
    if index < 0:
        raise ValueError(f"The index of a task is 0 or more; got {index}.")
    if index >= _MOST_TASKS:
        raise ValueError(f"The index of a task is less than {_MOST_TASKS}; got {value!r:.60}.")
    return index


def _job(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"The name of a job is a string; got {name!r}.")
    return name


def _tasks(job: str, tasks: object) -> dict[int, str]:
    """The addresses of the tasks of a job, by index, in order."""
    if isinstance(tasks, (list, tuple)):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise TypeError(f"The tasks of the job {job!r} are a list or a dict of addresses; got {tasks!r}.")
    for address in tasks.values():
        if not isinstance(address, str):
            raise TypeError(f"The address of a task is a string; the job {job!r} has {address!r}.")
    by_index = {as_index(index): address for index, address in tasks.items()}
    if len(by_index) < len(tasks):
        raise ValueError(f"The job {job!r} has two tasks of one index: {tasks!r}.")
    return dict(sorted(by_index.items()))
